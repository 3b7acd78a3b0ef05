"""What a process says of long work: the innermost piece, and after it the one around it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from role_parts import parts

from busrl.errors import RankLost, Stopped, WeightsTimeout
from busrl.paths import RunPaths
from busrl.ring import State
from busrl.roles import actor
from busrl.roles.actor import Actor, WorkDeadline
from busrl.roles.learner import publish
from busrl.roles.learner.loop import Progress
from busrl.roles.rollout import Rollout


class Told:
    """A ring that notes what is declared."""

    def __init__(self) -> None:
        self.said: list[tuple[Any, ...]] = []

    def activity(self, *what: Any) -> None:
        self.said.append(what)

    def progress(self) -> None:
        pass


class Worker(Actor):
    ring: Any

    def work(self) -> bool:
        return False


@pytest.fixture
def worker(tmp_path: Path) -> Worker:
    return Worker(tmp_path, "worker", parts(SimpleNamespace(dedicated=False), Told()))


class Ends(Worker):
    """Does not get ready: `problem` ends it."""

    def __init__(self, run: Path, problem: Exception) -> None:
        super().__init__(run, "rank/1", parts())
        self.problem = problem

    def _connect(self) -> None:
        pass

    def _leave(self) -> None:
        pass

    def setup(self) -> None:
        raise self.problem


def test_a_process_stopped_before_ready_ends_in_order_without_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(actor, "configure_process", lambda name: None)
    monkeypatch.setattr(actor.signal, "signal", lambda number, handler: None)
    ring = SimpleNamespace(register=lambda role, name: None)
    monkeypatch.setattr(actor, "Ring", SimpleNamespace(attach=lambda name: ring))
    assert Ends(tmp_path, Stopped("while rank 0 was waited for")).main() == 0
    assert not RunPaths(tmp_path).errors.exists()
    with pytest.raises(RankLost):
        Ends(tmp_path, RankLost("rank 0 has ended")).main()
    assert '"critical"' in RunPaths(tmp_path).errors.read_text()


def test_work_within_work_gives_the_outer_ones_name_and_time_back(worker: Worker) -> None:
    with worker.activity("step", 600.0), worker.activity("held by validation", 630.0):
        pass
    assert worker.ring.said == [("step", 600.0), ("held by validation", 630.0), ("step", 600.0), ("",)]


def test_what_a_process_waits_for_is_shown_while_nothing_is_declared(worker: Worker) -> None:
    worker.shown.waits("groups", 7)
    worker.shown.waits("groups", 7)
    with worker.activity("step", 600.0):
        worker.shown.usually("in the function of a name that is long")
    worker.shown.usually("in the function of a name that is long", again=True)
    worker.shown.waits("")
    cut = "in the function of a name that "
    assert worker.ring.said == [("waits: groups, group 7",), ("step", 600.0), (cut,), (cut,), ("",)]


class Engine:
    """Notes what was declared while it steps."""

    def __init__(self, worker: Any, drawing: int) -> None:
        self.worker, self.decoding, self.active = worker, drawing, 4
        self.during: list[tuple[Any, ...]] = []

    def step(self) -> list[Any]:
        self.during.append(tuple(self.worker.ring.said[-1:]))
        return []


def rollout(run: Path, drawing: int, joined: bool) -> Any:
    role: Any = Rollout(run, "rollout/0", parts(SimpleNamespace(limits=SimpleNamespace(ready_s=1.0)), Told()))
    role.joined, role.deadline = joined, WorkDeadline(30.0, 77.0)
    role.engine = Engine(role, drawing)
    return role


@pytest.mark.parametrize(
    ("drawing", "joined", "declared"), [(4, True, True), (1, False, True), (4, False, False)]
)
def test_only_a_decoding_step_that_may_compute_long_prompts_is_declared(
    tmp_path: Path, drawing: int, joined: bool, declared: bool
) -> None:
    role = rollout(tmp_path, drawing, joined)
    role.step_engine(joining=role.joined or drawing < role.engine.active)
    assert role.engine.during == [((("prefill", 77.0),) if declared else ())]
    assert not role.joined


def test_a_worker_waits_for_weights_only_while_a_learner_gets_on(tmp_path: Path) -> None:
    role = rollout(tmp_path, 0, False)
    progress = iter([*range(40), *[40] * 99])
    role.ring.processes = lambda: [SimpleNamespace(role="learner", pid=1, progress=next(progress))]
    waits = []

    def late(version: int, timeout_s: float) -> None:
        waits.append(timeout_s)
        raise WeightsTimeout("not yet")

    role.receiver = SimpleNamespace(wait_for=late)
    with pytest.raises(WeightsTimeout, match="no version 3, and no progress of a learner for 1 s"):
        role.wait_for_weights(3)
    assert len(waits) > 40, "it had given up after one second of turns"


class Held:
    """A ring whose validator collects `results`, one with each look, and then holds on without any."""

    def __init__(self, results: int, lets_go: bool) -> None:
        self.left, self.lets_go, self.moved, self.passed_s = results, lets_go, 0, 0.0

    def transitions(self, state: State) -> int:
        self.left -= self.left > 0
        return -self.left

    def header(self, name: str) -> int:
        return 0 if self.lets_go and not self.left else 1

    def activity(self, *what: Any) -> None: ...

    def progress(self) -> None:
        self.moved += 1

    def wait(self, state: State, seen: int, timeout_s: float) -> int:
        self.passed_s += 9.0
        return seen


@pytest.mark.parametrize("lets_go", [True, False])
def test_a_publication_waits_for_a_validation_with_results_alone(
    lets_go: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    ring, told = Held(results=50, lets_go=lets_go), []
    monkeypatch.setattr(publish.time, "monotonic", lambda: ring.passed_s)
    monkeypatch.setattr(publish.version_pin, "pinned_by", lambda ring: ring.header("hold"))
    monkeypatch.setattr(publish.version_pin, "name_of", lambda ring, holder: "validator (pid 7)")
    monkeypatch.setattr(publish.version_pin, "results_of", lambda ring, holder: 0)
    monkeypatch.setattr(publish, "make_sender", lambda *settings: SimpleNamespace(pause_engines=lambda *of: None))
    monkeypatch.setattr(publish.TransportSettings, "of", lambda topology, paths: None)
    topology = SimpleNamespace(
        dedicated=False, limits=SimpleNamespace(work_s=10.0), experiments=SimpleNamespace(forced_age=0)
    )
    worker: Any = Worker(tmp_path, "learner", parts(topology, ring))
    worker.warn = lambda where, text: told.append(text)
    publish.Publisher(worker, highest=0).fence(1)
    assert ring.passed_s > 400.0 and ring.moved >= 50, "each result is waited for, and is progress"
    text = "validator (pid 7) holds the version and had no result for 10 s; publishing without it"
    assert told == ([] if lets_go else [text])


def test_each_micro_batch_of_a_learner_is_progress_and_ends_a_piece() -> None:
    """It may accumulate for longer than limits.progress_s while a step fills up."""
    deadline, moved = WorkDeadline(30.0, 600.0), list[int]()
    on_progress = Progress(deadline, lambda: moved.append(1))
    assert deadline.begin() == 600.0, "the first may take as long as any"
    for _ in range(3):
        on_progress()
    assert len(moved) == 3
    assert deadline.begin() == 30.0, "micro-batches are known to be quick: standing still is found"


def test_the_patience_with_a_piece_of_work_follows_the_longest_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(actor.time, "monotonic", lambda: now[0])
    pieces, allowed = WorkDeadline(progress_s=30.0, work_s=600.0), []
    for seconds in (0.1, 2.0, 0.1, 40.0, 1.0):
        allowed.append(pieces.begin())
        now[0] += seconds
        pieces.ended()
    assert [*allowed, pieces.begin()] == [600.0, 30.0, 100.0, 100.0, 600.0, 600.0]
