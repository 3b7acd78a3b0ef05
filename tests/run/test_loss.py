"""Principle 1 in real runs: messages get lost, doubled, late and out of order, and the run is slower, never wrong."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from checks import check_end
from harness import Run, running

STEPS = 12
ROLES = ["keeper", "scheduler", "rollout-0", "reward-0", "learner", "validator"]


def faulty_run(tmp_path: Path, *entries: str, steps: int = STEPS) -> Run:
    run = Run(tmp_path / "run", f"faults.bus=[{', '.join(entries)}]", "faults.seed=1", steps=steps)
    with running(run):
        code = run.wait()
    check_end(run, code)
    assert nobody_was_killed(run)
    said = "FAULTS ARE ON: " in run.text() and "WITH FAULTS ON PURPOSE: " in run.text()
    assert said and run.summary()["faults"], run.text()
    return run


def nobody_was_killed(run: Run) -> bool:
    """Nobody, that is, for being silent."""
    return not any(process.get("killed_for_silence") for process in run.summary()["processes"].values())


def counts(run: Run) -> Iterator[tuple[str, Counter[str]]]:
    """What each process says at its end about the faults on its messages."""
    for role in ROLES:
        text = (run.paths.logs / f"{role}.log").read_text()
        said = re.findall(r"faults on its messages: (.*)", text)
        assert said, text[-1000:]
        yield role, Counter({name: int(number) for number, name in re.findall(r"(\d+) (\w+)", said[-1])})


@pytest.mark.long
def test_with_every_message_lost_the_quickstart_finishes_with_a_clean_audit(tmp_path: Path, quickstart: None) -> None:
    run = faulty_run(tmp_path, "{drop=1.0}")
    for role, count in counts(run):
        assert count["passed"] == 0 and count["lost"] > 0, (role, count)
    assert all(process["restarts"] == 0 for name, process in run.summary()["processes"].items() if name != "launch")


@pytest.mark.slow
@pytest.mark.parametrize("share", [0.01, 0.3])
def test_with_a_share_of_the_messages_lost_the_quickstart_finishes(
    share: float, tmp_path: Path, quickstart: None
) -> None:
    run = faulty_run(tmp_path, f"{{drop={share}}}", steps=40)
    total = Counter[str]()
    for _, count in counts(run):
        total += count
    expected = share * total.total()
    # Five standard deviations of so many throws: a hundredth of a few hundred messages may be none at all.
    assert abs(total["lost"] - expected) <= 5 * math.sqrt(expected * (1 - share)) + 1, total


@pytest.mark.slow
def test_messages_that_are_doubled_late_and_out_of_order_change_nothing(tmp_path: Path, quickstart: None) -> None:
    run = faulty_run(tmp_path, "{drop=0.05, duplicate=0.3, delay_s=0.5, reorder=0.3}", steps=40)
    assert all(count["late"] > 0 for _, count in counts(run))


@pytest.mark.slow
@pytest.mark.parametrize("at", ["receiver", "sender"])
def test_losing_only_the_doorbells_of_one_role_changes_nothing(at: str, tmp_path: Path, quickstart: None) -> None:
    roles = "reward" if at == "receiver" else "rollout"
    faulty_run(tmp_path, f'{{types=["DATA_GENERATED"], roles=["{roles}"], at="{at}", drop=1.0}}')


@pytest.mark.slow
def test_a_broker_that_is_killed_every_two_seconds_kills_nobody_else(tmp_path: Path, quickstart: None) -> None:
    # It has served too short a time to count as work: by default the eighth death in a row would end the run.
    run = Run(tmp_path / "run", "limits.progress_s=10", "limits.crash_attempts=0", steps=80)
    with running(run):
        run.until_step(1)
        killed = 0
        while run.step() < run.steps - 5:
            killed += run.kill_if_there("bus")
            run.let_pass(2.0)
        code = run.wait()
    check_end(run, code)
    assert killed >= 3 and run.restarts("bus") == killed and nobody_was_killed(run), run.summary()["processes"]
    others = {name: process for name, process in run.summary()["processes"].items() if name not in ("bus", "launch")}
    assert all(process["restarts"] == 0 for process in others.values()), others


@pytest.mark.slow
def test_topology_crash_points_kill_a_process_in_the_stated_lives(tmp_path: Path, quickstart: None) -> None:
    crash = (
        'faults.crash=[{process="reward/0", point="release.before", count=20}, '
        '{process="reward/0", point="claim.cas", lives=2}]'
    )
    run = Run(tmp_path / "run", crash, steps=STEPS)
    with running(run):
        code = run.wait()
    check_end(run, code)
    assert run.restarts("reward/0") == 3 and "starting it again in" not in run.text(), run.text()
    log = (run.paths.logs / "launch.log").read_text()
    assert re.search(r"slots of reward/0 \(pid \d+\) went back from REWARDING to GENERATED", log), log
