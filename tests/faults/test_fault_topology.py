"""[faults] in a topology: what is wrong with it is said before anything starts, and what is right is said loudly."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from busrl.errors import TopologyError
from busrl.faults import PASSED_BY, CrashWatch, crash_environment
from busrl.preflight.explain import process_configs, report
from busrl.preflight.load import load
from busrl.states import CRASH_POINTS
from busrl.topology import Topology
from busrl.topology.schema import CrashFault, Faults

ROOT = Path(__file__).resolve().parents[2]
QUICKSTART = ROOT / "configs" / "quickstart.toml"


def with_faults(tmp_path: Path, text: str) -> Topology:
    path = tmp_path / "faulty.toml"
    path.write_text(f"{QUICKSTART.read_text()}\n{text}\n")
    return load(path)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('[[faults.bus]]\ntypes = ["NEWTASK"]\ndrop = 0.1', "no message 'NEWTASK'; did you mean NEW_TASK?"),
        (
            '[[faults.bus]]\nroles = ["learn"]\ndrop = 0.1',
            "on the bus 'learn'; did you mean learner?",
        ),
        ("[[faults.bus]]\ndrop = 1.5", "faults.bus.0.drop = 1.5: expected a number >= 0 and <= 1"),
        ("[[faults.bus]]\nseed = 1", "has no effect"),
        ("[[faults.bus]]\ndorp = 1.0", "unknown key in [[faults.bus]]; did you mean drop?"),
        ('[[faults.bus]]\nat = "sender"\nduplicate = 0.5', "a sender can only lose messages"),
        ("[faults]\nbus = 3", "faults.bus = 3: is an array of tables; write [[faults.bus]], twice bracketed"),
        ('[[faults.crash]]\nprocess = "rollout/0"', "add point = ... to [[faults.crash]]"),
        (
            '[[faults.crash]]\nprocess = "rollout"\npoint = "commit.befor"',
            "no crash point 'commit.befor'; did you mean commit.before?",
        ),
        (
            '[[faults.crash]]\nprocess = "rollout"\npoint = "commit.before"',
            "no process of this topology 'rollout'; did you mean rollout/0?",
        ),
        (
            '[[faults.crash]]\nprocess = "rollout/0"\npoint = "finish.fate"',
            "a rollout never passes 'finish.fate', so it would never die there: learner, validator do; for a rollout "
            "choose of register.lock",
        ),
    ],
)
def test_a_mistake_is_named_with_its_place_and_a_remedy(text: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(TopologyError) as caught:
        with_faults(tmp_path, text)
    shown = str(caught.value)
    assert said in shown, shown
    line = len(QUICKSTART.read_text().splitlines()) + 2
    assert re.search(rf"faulty\.toml:({'|'.join(str(line + more) for more in range(4))}):", shown), shown


def test_check_says_that_faults_are_on_and_gives_them_to_every_process(tmp_path: Path) -> None:
    topology = with_faults(tmp_path, "[faults]\nseed = 7\n[[faults.bus]]\ndrop = 0.3\n")
    assert Topology.from_json(topology.to_json()) == topology
    assert "FAULTS ARE ON: every message to everybody but the broker: 30% lost" in report(topology)
    assert all(config["settings"]["faults"]["seed"] == 7 for config in process_configs(topology))
    assert not any("faults" in config["settings"] for config in process_configs(load(QUICKSTART)))


def test_faults_may_be_given_on_the_command_line() -> None:
    topology = load(QUICKSTART, ["faults.bus=[{drop=1.0}, {types=['STOP'], duplicate=0.5}]", "faults.seed=3"])
    assert [fault.drop for fault in topology.faults.bus] == [1.0, 0.0] and topology.faults.seed == 3


def test_several_crashes_of_one_process_occur_in_sequence_in_their_own_lives() -> None:
    entries = (
        CrashFault("learner", "finish.fate", 9, 2),
        CrashFault("rollout/0", "claim.cas", 1, 0),
        CrashFault("learner", "drop.cas", 1, 1),
    )
    faults = Faults(crash=entries)
    points = [crash_environment(faults, "learner", life).get("BUSRL_CRASH_POINT", "") for life in range(1, 6)]
    assert points == ["finish.fate:9", "finish.fate:9", "drop.cas:1", "", ""]
    assert all(crash_environment(faults, "rollout/0", life) for life in range(1, 100))
    assert crash_environment(faults, "keeper", 1) == {}


def test_the_crash_point_list_matches_the_source_and_the_page() -> None:
    called: set[str] = set()
    for path in [*ROOT.glob("csrc/**/*.hpp"), *ROOT.glob("csrc/**/*.cpp")]:
        called |= set(re.findall(r'crash_point\("([a-z._]+)"\)', path.read_text()))
    assert called == set(CRASH_POINTS) and len(CRASH_POINTS) == len(called)
    page = (ROOT / "docs" / "faults.md").read_text()
    named = {
        name for row in page.splitlines() if row.startswith("| `") for name in re.findall(r"`([a-z]+\.[a-z]+)`", row)
    }
    assert named == set(CRASH_POINTS)


def test_page_and_rules_agree_on_which_process_passes_each_crash_point() -> None:
    told: dict[str, set[str]] = {}
    for row in (ROOT / "docs" / "faults.md").read_text().splitlines():
        if row.startswith("| `") and len(cells := row.split(" | ")) == 3 and "." in cells[0]:
            roles = {role.strip() for role in cells[1].partition(":")[0].split(",")}
            told |= dict.fromkeys(re.findall(r"`([a-z]+\.[a-z]+)`", cells[0]), roles)
    assert told == {point: set(roles) for point, roles in PASSED_BY.items()}


def test_a_planned_death_that_never_came_is_named() -> None:
    faults = Faults(crash=(CrashFault("learner", "finish.fate", 9, 1), CrashFault("rollout/0", "claim.cas", 1, 0)))
    watch = CrashWatch(faults)
    watch.killed("rollout/0", 3)
    watch.killed("learner", 2)
    assert watch.missing() == ["learner is killed when it passes finish.fate for the 9. time, in 1 life"]
