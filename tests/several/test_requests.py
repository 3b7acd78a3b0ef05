"""Requests to a run about one of its models: the number of its processes, its checkpoints, and the next start."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tagged import AGENT, JUDGE, SERVED, SOLVER, Read
from test_model_directories import left, opened

from busrl.errors import TopologyError, UserError
from busrl.launcher.control import ControlDesk
from busrl.launcher.rundir import OpenRun
from busrl.ledger.audit.inforce import timeline_of
from busrl.ledger.controls import Controls, read_lines
from busrl.paths import RunPaths
from busrl.preflight import changeable
from busrl.protocol import messages as m
from busrl.protocol.codec import address
from busrl.states import HeaderWord, RunPhase
from busrl.topology import Topology
from busrl.topology.recorded import recorded

FOLLOWER = '[[model]]\ntag = "old"\nfollow = { model = "solver", every = 10 }\n'
LORA = '[lora]\nrank = 4\n[weights]\ntransport = "lora_hotswap"\n'
LEARNER = '[[process]]\nrole = "learner"\nmodel = ["judge", "solver"]\n'
TWO = '[[process]]\nrole = "rollout"\nmodel = "judge"\ncount = 2\n'


class Words(dict[HeaderWord, int]):
    """The header of a ring."""

    def header(self, word: HeaderWord) -> int:
        return self.get(word, 0)

    def set_header(self, word: HeaderWord, value: int) -> None:
        self[word] = value


class FileRun(SimpleNamespace):
    """A run of files and header words alone."""

    use, every, trained, of_models = OpenRun.use, OpenRun.every, OpenRun.trained, OpenRun.of_models
    beside: tuple[Any, ...] = ()


class Desk(ControlDesk):
    """The desk of a run of several models without processes. `steps`: of each that learns."""

    def __init__(self, root: Path, topology: Topology, **steps: int) -> None:
        def run_of(tag: str) -> Any:
            own, paths = topology.of(tag), topology.paths_of(tag, RunPaths.of(root))
            paths.root.mkdir(parents=True, exist_ok=True)
            return FileRun(paths=paths, topology=own, ring=Words({HeaderWord.STEP: steps.get(tag, 0)}), written={})

        self.runs = {tag: run_of(tag) for tag in topology.tags}
        self.run = self.runs[topology.lead]
        self.run.beside = tuple(run for run in self.runs.values() if run is not self.run)
        names = {process.name: process for process in topology.processes()}
        super().__init__(self.run, names, self, print)

    def adopt(self, topology: Topology) -> None:
        self.names = [process.name for process in topology.processes()]

    def unsettled(self) -> list[str]:
        return []

    def ask(self, verb: str, key: str = "", value: str = "", number: str = "") -> m.ControlDone:
        self.count = getattr(self, "count", 0) + 1
        message = m.Control(id=number or str(self.count), verb=verb, key=key, value=value, who="a test")
        message.proof = message.proof_with(self.run.paths.control_key.read_bytes())
        return self.handle(message)

    def follows(self, name: str) -> None:
        """Have a process follow all requests so far."""
        beat = m.Heartbeat(control=self.run.paths.control.stat().st_size)
        beat.sender = address(name)
        self.note_heartbeat(beat)

    def checkpoint(self, tag: str, step: int) -> Path:
        folder: Path = self.runs[tag].paths.checkpoints / f"global_step_{step}"
        folder.mkdir(parents=True)
        (folder / "meta.json").write_text("{}")
        return folder


# -- the number of processes -----


def test_each_model_is_scaled_by_itself_over_the_next_start_too(read: Read, tmp_path: Path) -> None:
    desk = Desk(tmp_path / "run", read(SOLVER + SERVED + FOLLOWER + AGENT, "learner.checkpoint_every=10"))
    for key, value, names in (
        ("model.judge.rollout", "3", {"rollout/1", "rollout/4", "rollout/7"}),
        ("rollout", "2", {"rollout/0", "rollout/3"}),
        ("model.old.rollout", "2", {"rollout/2", "rollout/5"}),
        ("agent", "2", {"agent/0", "agent/1"}),
    ):
        answer = desk.ask("scale", key, value)
        assert answer.ok and names <= {*desk.names}, answer.text
    for tag, run in desk.runs.items():
        on_disk = Topology.from_json(run.paths.topology.read_text())
        assert on_disk == run.topology == desk.run.topology.of(tag)
    keys = ["model.judge.process.rollout.count", "model.solver.process.rollout.count",
            "model.old.process.rollout.count", "process.agent.count"]
    overrides = Controls.read(desk.run.paths).overrides()
    assert overrides == [f"{key}={count}" for key, count in zip(keys, (3, 2, 2, 2))]
    again = read(SOLVER + SERVED + FOLLOWER + AGENT, "learner.checkpoint_every=10", *overrides)
    assert [process.name for process in again.processes()] == desk.names


def test_a_count_at_a_start_is_of_the_models_own_entries(read: Read) -> None:
    t = read(SOLVER + JUDGE + AGENT + TWO, "model.solver.process.rollout.count=4")
    counts = {tag: sum(t.tag_of(process.name) == tag for process in t.processes() if process.role == "rollout")
              for tag in t.tags}
    assert counts == {"solver": 4, "judge": 2}


@pytest.mark.parametrize(("key", "value", "why"), [
    ("model.judge.agent", "2", "process.agent.count is the run's, the same for all models"),
    ("model.judge.learner", "2", "a run has one of them"),
    ("model.judge.rollout", "two", "expected a whole number"),
    ("model.judge.rollout", "0", "no process serves judge"),
    ("model.old.rollout", "9", "solver keeps"),
])
def test_a_number_that_a_model_cannot_have_is_refused(
    key: str, value: str, why: str, read: Read, tmp_path: Path
) -> None:
    topology = read(SOLVER + SERVED + FOLLOWER + AGENT, "learner.checkpoint_every=10")
    desk = Desk(tmp_path / "run", topology)
    answer = desk.ask("scale", key, value)
    assert not answer.ok and why in answer.text and desk.run.topology is topology, answer.text


def test_keys_without_a_model_are_those_of_the_lead(read: Read) -> None:
    t = read(SOLVER + JUDGE + AGENT)
    assert changeable.whole_key(t, "learner.lr") == "model.solver.learner.lr"
    assert changeable.whole_key(t, "scheduler.policy") == "scheduler.policy"
    after = changeable.changed(t, "model.solver.learner.lr", "1e-6")
    assert (after.learner.lr, after.of("judge").learner.lr) == (1e-6, 1e-4)
    again = read(SOLVER + JUDGE + AGENT, "model.solver.learner.lr=1e-6")
    assert (again.learner.lr, again.of("judge").learner.lr) == (1e-6, 1e-4)
    with pytest.raises((TopologyError, UserError)):
        changeable.changed(t, "model.judge.run.seed", "1")


# -- checkpoints -----


def test_a_checkpoint_is_asked_of_every_model_that_learns(read: Read, tmp_path: Path) -> None:
    desk = Desk(tmp_path / "run", read(SOLVER + JUDGE + FOLLOWER + AGENT, "learner.checkpoint_every=10"),
                solver=7, judge=3)
    first = desk.ask("checkpoint", number="a")
    assert first.ok and first.waits == ["learner", "learner/judge"]
    assert first.text == "of solver: step 7, judge: step 3 or a later one"
    assert Controls.read(desk.run.paths).checkpoints == {"solver": 7, "judge": 3}
    mine, desk_judge = desk.checkpoint("solver", 7), desk.runs["judge"].ring
    desk.follows("learner")
    desk.follows("learner/judge")
    lost = desk.ask("checkpoint", number="a")
    assert not lost.ok and f"{mine} is written" in lost.text and "the learner/judge could not write it" in lost.text
    other = desk.checkpoint("judge", 4)
    assert desk.ask("checkpoint", number="a").text == f"{mine} is written; {other} is written"
    desk_judge.set_header(HeaderWord.RUN_STATE, RunPhase.FINISHING)  # its learner has ended
    assert desk.ask("checkpoint").waits == ["learner"]


def test_a_checkpoint_of_one_model_asks_no_other(read: Read, tmp_path: Path) -> None:
    desk = Desk(tmp_path / "run", read(SOLVER + JUDGE + FOLLOWER + AGENT, "learner.checkpoint_every=10"),
                solver=7, judge=3)
    asked = desk.ask("checkpoint", "judge")
    assert asked.ok and asked.waits == ["learner/judge"]
    assert Controls.read(desk.run.paths).checkpoints == {"judge": 3}
    for tag in ("old", "else"):
        answer = desk.ask("checkpoint", tag)
        assert not answer.ok and answer.text == f"{tag}: no model of this run that learns; there are solver, judge"
    for run in desk.runs.values():
        run.ring.set_header(HeaderWord.STEP, 0)
    assert "no step is done yet" in desk.ask("checkpoint").text


def test_a_checkpoint_of_one_model_waits_for_its_shared_learner(read: Read, tmp_path: Path) -> None:
    desk = Desk(tmp_path / "run", read(LORA + SOLVER + JUDGE + AGENT + LEARNER), solver=7, judge=3)
    solver = desk.checkpoint("solver", 7)
    asked = desk.ask("checkpoint", "judge", number="a")
    assert asked.ok and asked.waits == ["learner"], asked.text
    desk.follows("learner")
    lost = desk.ask("checkpoint", number="a")
    assert not lost.ok and lost.text == "the learner could not write it: see errors.jsonl"
    judge = desk.checkpoint("judge", 3)
    assert desk.ask("checkpoint", number="a").text == f"{judge} is written"
    desk.runs["solver"].ring.set_header(HeaderWord.RUN_STATE, RunPhase.FINISHING)  # the judge's part goes on
    assert desk.ask("set", "model.judge.learner.lr", "1e-5").waits == ["learner"]
    assert desk.ask("checkpoint", number="b").waits == ["learner"]
    desk.follows("learner")
    assert desk.ask("checkpoint", number="b").text == f"{solver} is written; {judge} is written"


def test_a_model_that_has_ended_is_asked_for_no_checkpoint(read: Read, tmp_path: Path) -> None:
    desk = Desk(tmp_path / "run", read(LORA + SOLVER + JUDGE + AGENT + LEARNER), solver=7, judge=3)
    desk.runs["solver"].ring.set_header(HeaderWord.RUN_STATE, RunPhase.FINISHING)
    asked = desk.ask("checkpoint", number="a")  # somebody has removed the solver's last one
    assert asked.ok and asked.text == "of judge: step 3 or a later one"
    refused = desk.ask("checkpoint", "solver")
    assert not refused.ok and refused.text == "solver has made its steps: its learner writes no checkpoint any more"


# -- the next start -----


@pytest.mark.parametrize("tag", ["solver", "judge"])
def test_a_ring_is_adopted_after_its_models_limits_were_set(read: Read, tmp_path: Path, tag: str) -> None:
    override = f"model.{tag}.learner.trigger.n_min=2"
    with opened(tmp_path / "run", read(SOLVER + JUDGE + AGENT)) as run:
        run.use(changeable.changed(run.topology, *override.split("=")))
        left(run)  # launch is killed: the rings stay
    again = changeable.with_sizes_of(read(SOLVER + JUDGE + AGENT, override), recorded(run.paths.topology))
    with opened(tmp_path / "run", again) as next_run:
        assert sum("adopted the ring" in note for note in next_run.notes) == 2, next_run.notes
        assert next_run.topology.of(tag).learner.trigger.n_min == 2


# -- the audit -----


def test_a_bound_set_for_one_model_counts_in_its_audit_alone(read: Read, tmp_path: Path) -> None:
    desk = Desk(tmp_path / "run", read(SOLVER + JUDGE + AGENT, "ring.slots=256"), solver=7, judge=3)
    before = desk.runs["judge"].topology.weights.max_staleness
    assert desk.ask("set", "model.judge.weights.max_staleness", str(before + 1)).ok
    assert [line.steps for line in read_lines(desk.run.paths)] == [{"solver": 7, "judge": 3}]
    for tag, bounds in (("solver", {before}), ("judge", {before, before + 1})):
        run = desk.runs[tag]
        timeline = timeline_of(run.paths.root, run.topology.to_dict())
        assert {promise.bound for promise in timeline.during(0, 100)} == bounds
        assert {promise.bound for promise in timeline.during(0, 2)} == {before}
