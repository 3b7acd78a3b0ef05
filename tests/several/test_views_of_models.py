"""The models of a run as they are now: from files and rings, when the run is over, and when a file is another run's."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tagged import AGENT, JUDGE, SERVED, SOLVER, Read

from busrl.observe.monitor.phrases import headline
from busrl.observe.monitor.screen import Turning
from busrl.observe.monitor.sources import Watcher, models_of
from busrl.paths import RunPaths
from busrl.ring import Ring
from busrl.several.summaries import overview
from busrl.states import HeaderWord
from busrl.status.runfiles import RunFiles, run_of_files
from busrl.status.state import Facts, ProcessRecord, RingRecord, RunState
from busrl.status.waits import chain
from busrl.topology import Topology


def written(root: Path, topology: Topology, tag: str) -> RunPaths:
    """The directory of a model as a start leaves it."""
    paths = topology.paths_of(tag, RunPaths.of(root))
    paths.root.mkdir(parents=True, exist_ok=True)
    paths.topology.write_text(topology.of(tag).to_json())
    paths.run_json.write_text(json.dumps({"run_id": "several", "uuid": uuid.uuid4().hex}))
    return paths


def stepped(paths: RunPaths, *rewards: float) -> None:
    rows = [{"step": step, "version": step, "reward": reward} for step, reward in enumerate(rewards, 1)]
    paths.metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))


@contextmanager
def ring_of(paths: RunPaths, name: str, **words: int) -> Iterator[Ring]:
    ring = Ring.create(paths.ring_name, slots=2, slot_bytes=256, processes=8, uuid=uuid.uuid4().bytes)
    try:
        ring.register(name.partition("/")[0], name)
        for word, value in words.items():
            ring.set_header(HeaderWord(word), value)
        yield ring
    finally:
        ring.close()
        Ring.unlink(paths.ring_name)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "run"


def test_each_model_shows_its_step_version_reward_and_wait(read: Read, root: Path) -> None:
    topology = read(SOLVER + JUDGE + SERVED.replace("judge", "hint") + AGENT)
    judge, _ = written(root, topology, "judge"), written(root, topology, "solver")
    hint = written(root, topology, "hint")
    stepped(judge, 0.25, 0.75)
    with ring_of(judge, "learner/judge", step=3, version=2) as ring, ring_of(hint, "rollout/2"):
        ring.activity("waits: groups")
        view = overview(root)
        assert view is not None
        waits = view.data["judge"].pop("waits")
        assert waits["for"] == "groups" and waits["since_s"] >= 0
        assert view.data["judge"] == {
            "trained": True, "max_steps": 9, "step": 3, "version": 2, "processes": ["learner/judge"],
            "reward": {"first": 0.25, "last_10_steps": 0.5}}
        assert view.data["hint"] == {
            "trained": False, "max_steps": 9, "step": 0, "version": 0, "processes": ["rollout/2"]}
        first, *lines = view.lines
        assert first == "  models    hint only serves, judge step 3/9"
        assert lines[0] == "    hint: rollout/2"
        assert lines[1].startswith("    judge: version 2 · reward 0.250 → 0.500 · waits for groups, ")
        ring.activity("train")
        again = overview(root)
        assert again is not None and again.data["judge"]["waits"] is None


def test_files_are_read_on_and_those_of_another_run_anew(read: Read, root: Path) -> None:
    topology = read(SOLVER + JUDGE + AGENT)
    written(root, topology, "solver")
    judge = written(root, topology, "judge")
    for rewards in ((0.5,), (0.5, 0.7)):
        stepped(judge, *rewards)
        view = overview(root)
        assert view is not None and view.data["judge"]["step"] == len(rewards) and not view.data["judge"]["processes"]
    written(root, topology, "judge")
    judge.metrics.unlink()
    stepped(judge, 0.1)
    view = overview(root)
    assert view is not None and view.data["judge"]["reward"] == {"first": 0.1, "last_10_steps": 0.1}


def test_the_live_view_turns_to_the_next_model_and_back(read: Read, root: Path) -> None:
    topology = read(SOLVER + JUDGE + AGENT)
    for tag, reward in (("solver", 0.1), ("judge", 0.9)):
        stepped(written(root, topology, tag), reward)
    places = models_of(RunPaths.of(root))
    assert [paths.root for paths in places] == [root, root / "models" / "judge"]
    first = Watcher(places[0])
    turning = Turning(first, places)
    shown = []
    for _ in range(3):
        run = turning.now.run
        shown.append((run.facts.beside, run.steps.recent(lambda step: step.reward), "judge" in headline(run, 0.0)))
        turning.turn()
    turning.close()
    first.close()
    assert shown == [("", 0.1, False), ("judge", 0.9, True), ("", 0.1, False)]
    from_judge = models_of(places[1])
    assert from_judge[0].root == places[1].root and from_judge[1].root == root


def test_a_run_of_one_model_has_no_such_view(root: Path) -> None:
    root.mkdir()
    assert overview(root) is None


def test_a_chain_of_waits_of_a_model_begins_with_its_own_learner() -> None:
    def row(name: str, activity: str = "") -> ProcessRecord:
        return ProcessRecord(name, name.partition("/")[0], 1, "ready", activity, activity_age_s=3.0)

    run = RunState(facts=Facts(beside="judge"), restarts={"learner": 1})  # it trains several models
    for there in ((), (row("learner", "waits: admission"),)):
        run.look(RingRecord(4, {"free": 4}, {}, 0, 0, 0, 0, (row("scheduler"), *there)), 0.0)
        assert [link.process for link in chain(run, 0.0)] == (["learner", "scheduler"] if there else ["learner"])
    processes = (row("scheduler"), row("agent/0"), row("rollout/1"), row("learner/judge", "waits: admission"))
    ring = RingRecord(4, {"free": 4}, {}, 0, 0, 0, 0, processes)
    run, lead = RunState(facts=Facts(beside="judge")), RunState()
    for each in (run, lead):
        each.look(ring, 0.0)
    links = chain(run, 0.0)
    assert [link.process for link in links] == ["learner/judge", "scheduler"]
    assert chain(lead, 0.0) == [], "of the lead it would begin with `learner`"


@pytest.mark.parametrize(("listed", "learners"), [
    ('["solver", "judge"]', ("learner", "learner/third")), ('["judge", "third"]', ("learner/judge", "learner/judge")),
])
def test_a_model_counts_the_restarts_of_processes_that_it_shares(
    read: Read, root: Path, listed: str, learners: tuple[str, ...]
) -> None:
    lora = '[lora]\nrank = 4\n[weights]\ntransport = "lora_hotswap"\n'
    shared = f'[[process]]\nrole = "learner"\nmodel = {listed}\n'
    topology = read(lora + SOLVER + JUDGE + JUDGE.replace("judge", "third") + AGENT + shared)
    solver, *others = (written(root, topology, tag) for tag in topology.tags)
    children = {process.name: {"restarts": 1} for process in topology.processes()}
    solver.supervisor.write_text(json.dumps({"processes": children}))
    for paths, learner in zip(others, learners):
        restarts = run_of_files(RunFiles(paths)).restarts
        assert {name for name in restarts if name.startswith("learner")} == {learner}
