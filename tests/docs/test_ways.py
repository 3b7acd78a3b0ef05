"""The ways of docs/ways.md are those of real runs of three steps, whose processes are traced (`traced.py`).

- A way has doors: functions of roles, and of children where user code runs, by which work comes in.
- A file is on the way if the doors call functions of it, directly or through other functions. On the long way of a
  prompt these are at least four: a file of which fewer are called is read in passing, where it is called.
- Not on the way is what happens beside it (`ASIDE`, and sides of the way): what only measures, reports, watches or
  saves; tools and tables that know nothing of a run's work; messages on the bus, which may be lost; another way.
- What is done once, at the start and the end of a process, is no part of a way: no door calls it.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from traced import files_passed, tracing

ROOT = Path(__file__).resolve().parents[2]
PAGE = "\n".join((ROOT / "docs" / f"{name}.md").read_text() for name in ("concepts", "ways"))
TOOLS = (
    "states.py", "paths.py", "errors.py", "faults.py", "capabilities.py", "system/", "topology/", "ring/", "bus/",
    "protocol/", "hosts/messages.py",
)
BESIDE = (
    "roles/process.py", "roles/probes.py", "roles/version_pin.py", "roles/learner/metrics.py",
    "roles/learner/alarms.py", "roles/learner/parity.py", "roles/learner/observers.py", "roles/learner/excerpts.py",
    "training/step_stats.py", "training/checkpoint.py",
    "algorithms/diagnostics.py", "data/figures.py", "ledger/trained.py", "predict/", "preflight/", "scheduling/plan.py",
)
ASIDE = (*TOOLS, *BESIDE)


@dataclass(frozen=True)
class Way:
    """A way of the page: its title, most files, doors, and what is beside it."""

    title: str
    most: int
    doors: tuple[str, ...]
    sides: tuple[str, ...] = ()
    least: int = 1  # functions of a file


PROMPT = Way("The way of a prompt", 36, (
    "roles/scheduler.py:Scheduler.work", "roles/rollout.py:Rollout.work", "roles/reward.py:Reward.work",
    "rewards/child.py:main", "roles/learner/loop.py:Learner.work",
), ("weights/", "roles/learner/publish.py"), 4)
WEIGHTS = Way("The way of the weights", 14, (
    "roles/learner/publish.py:Publisher.publish", "roles/rollout.py:Rollout.update_weights",
), ("ledger/", "roles/learner/history.py", "roles/learner/loop.py", "roles/answers.py", "data/"))
TURN = Way("The way of an agent's turn", 15, (
    "agents/llm.py:Llm.complete", "agents/roles/holder.py:EpisodeHolder.run_passes", "roles/rollout.py:Rollout.work",
), ("weights/", "ledger/", "engines/", "data/", "scheduling/", "agents/http.py", "agents/parsers.py",
    "agents/seats.py", "agents/sides.py",  # what more than one seat adds
    "roles/rollout.py:Rollout.update_weights"))
CLAIM = Way("The way of a host's claim", 12, (
    "hosts/satellite.py:Satellite.work", "hosts/satellite.py:Satellite.handle", "roles/keeper.py:Keeper.handle",
), ("weights/", "ledger/", "scheduling/"))


def rows(title: str) -> list[list[str]]:
    text = PAGE.split(f"## {title}\n")[1].split("\n## ")[0]
    table = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line[:1] == "|"]
    return table[2:]


def holds(way: Way, folder: Path) -> None:
    """The page's list of the way is that of the trace, and is short enough."""
    files = files_passed(folder, way.doors, (*ASIDE, *way.sides), way.least)
    said = {row[0].strip("`"): row[1] for row in rows(way.title)}
    lines = [f"| `{file}` | {said.get(file) or ', '.join(names[:6])} |" for file, names in files.items()]
    assert len(files) <= way.most, "\n".join([f"{len(files)} > {way.most}", *lines])
    assert set(said) == set(files), "\n".join([f"write into docs/ways.md, below '{way.title}':", *lines])


@pytest.mark.long
def test_a_prompt_and_a_version_pass_the_files_listed(tmp_path: Path, quickstart: None) -> None:
    from harness import Run, running

    run = Run(tmp_path / "run", steps=3, env=tracing(tmp_path / "calls"))
    with running(run):
        assert run.wait() == 0, run.tail()
    holds(PROMPT, tmp_path / "calls")
    holds(WEIGHTS, tmp_path / "calls")


@pytest.mark.long
def test_a_turn_of_an_agent_passes_the_files_of_the_page(tmp_path: Path, quickstart: None) -> None:
    from harness import Run, running

    config = ROOT / "configs" / "agents.toml"
    run = Run(tmp_path / "run", config=config, steps=3, env=tracing(tmp_path / "calls"))
    with running(run):
        assert run.wait() == 0, run.tail()
    holds(TURN, tmp_path / "calls")


@pytest.mark.long
def test_a_claim_of_a_host_passes_the_files_of_the_page(tmp_path: Path, quickstart: None) -> None:
    from harness import running
    from host_scene import Home, Host

    variables, home = tracing(tmp_path / "calls"), Home(tmp_path, steps=3)
    host = Host(home)
    home.env.update(variables)
    host.env.update(variables)
    with running(home), running(host):
        assert home.wait() == 0, home.tail()
        assert host.wait(60) == 0, host.tail()
    holds(CLAIM, tmp_path / "calls")


def lines_of(path: Path, name: str) -> int:
    body: list[ast.stmt] = ast.parse(path.read_text()).body
    for part in name.split("."):
        [node] = [child for child in body if getattr(child, "name", "") == part]
        assert isinstance(node, ast.FunctionDef | ast.ClassDef)
        body = node.body
    assert node.end_lineno is not None
    return node.end_lineno - node.lineno + 1


def path_of_reading() -> Iterator[tuple[Path, str]]:
    for name, read, _ in rows("Reading path"):
        yield from ((ROOT / "busrl" / name.strip("`"), function) for function in re.findall(r"`([^`]+)`", read))


def test_the_reading_path_exists_and_has_at_most_1500_lines() -> None:
    total = sum(lines_of(path, name) for path, name in path_of_reading())
    assert 500 < total <= 1500, total
    assert "concepts.md#reading-path" in (ROOT / "README.md").read_text()


@pytest.mark.parametrize("way", [PROMPT, WEIGHTS, TURN, CLAIM], ids=lambda way: way.title)
def test_every_file_of_a_way_exists_and_has_one_row(way: Way) -> None:
    files = [row[0].strip("`") for row in rows(way.title)]
    assert len(files) == len(set(files)) <= way.most
    assert not [file for file in files if not (ROOT / "busrl" / file).is_file()]
