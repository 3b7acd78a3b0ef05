"""A process of several models: when it counts as done, what it begins after a death, and whom a request awaits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path

import pytest
from tagged import AGENT, JUDGE, SOLVER, Read
from test_model_directories import opened

from busrl.bus import Endpoint
from busrl.launcher.processes import Deaths
from busrl.launcher.rundir import OpenRun
from busrl.launcher.summary import EventLog, Journal
from busrl.launcher.supervisor import Child, Exit
from busrl.roles.actor import Parts
from busrl.roles.process import RoleLock
from busrl.several.shared_learner import ModelLearner, SharedLearner
from busrl.states import HeaderWord, RunPhase
from busrl.training.model import load

LORA = '[lora]\nrank = 4\n[weights]\ntransport = "lora_hotswap"\n'
LEARNER = '[[process]]\nrole = "learner"\nmodel = ["judge", "solver"]\n'

BUSES: list[Endpoint] = []


@pytest.fixture(autouse=True)
def closed_buses() -> Iterator[None]:
    """A context of ZeroMQ that is left to the collector may wait for ever."""
    yield
    while BUSES:
        BUSES.pop().close()


@pytest.fixture
def shared(tmp_path: Path, read: Read) -> Iterator[OpenRun]:
    """A run whose one learner trains two models, the solver and the judge."""
    with opened(tmp_path / "run", read(LORA + SOLVER + JUDGE + AGENT + LEARNER)) as run:
        run.ring.register("learner", "learner")
        yield run


def done(run: OpenRun, *tags: str) -> None:
    """These models have made their steps."""
    for each in run.every:
        if each.topology.tag in tags:
            each.ring.set_header(HeaderWord.RUN_STATE, RunPhase.FINISHING)


def test_a_shared_learner_is_started_again_until_all_models_are_done(shared: OpenRun) -> None:
    done(shared, "solver")
    assert not shared.has_made_steps("learner"), "its end with 0 counts as its goal, and the judge is never trained"
    done(shared, "judge")
    assert shared.has_made_steps("learner")


def test_a_learner_of_one_model_is_done_without_the_others(tmp_path: Path, read: Read) -> None:
    with opened(tmp_path / "run", read(SOLVER + JUDGE + AGENT)) as run:
        done(run, "judge")
        assert run.has_made_steps("learner/judge") and not run.has_made_steps("learner")


def parts_of(run: OpenRun) -> Parts:
    bus = Endpoint("learner", run.paths.frontend, run.paths.backend, subscribe=[], hwm=100)
    BUSES.append(bus)
    return Parts(run.topology, run.ring, bus, run.fates, run.validate_fates)


def learner_of(run: OpenRun) -> SharedLearner:
    """The learner's process in its next life."""
    process = SharedLearner(run.paths.root, "learner", parts_of(run))
    process.setup()
    return process


def deaths_until_given_up(run: OpenRun, most: int, step: Callable[[int], None]) -> int:
    """Deaths of the learner after it was ready until the run ends for them, `step` done before each; `most` at most."""
    names = {process.name: process for process in run.topology.processes()}
    child = Child("learner", run.topology.limits)
    journal = Journal(run.paths, lambda line: None, EventLog(run.paths, [child], [child.name]))
    deaths = Deaths(run, names, journal)
    with closing(journal):
        for at in range(most):
            step(at)
            child.started(1, 0.0)
            child.became_ready()
            if deaths.judge(child, Exit(1)):
                return at
    return most


def test_steps_of_any_model_are_work_of_a_shared_learner(shared: OpenRun) -> None:
    most = 3 * shared.topology.limits.crash_attempts
    for each in shared.every:
        assert deaths_until_given_up(shared, most, partial(each.ring.set_header, HeaderWord.STEP)) == most
    assert deaths_until_given_up(shared, most, lambda at: None) < most


def test_a_long_step_of_one_model_is_progress_in_all_rings(tmp_path: Path, read: Read) -> None:
    third = JUDGE.replace("judge", "third")
    listed = LEARNER.replace('"solver"', '"solver", "third"')
    with opened(tmp_path / "run", read(LORA + SOLVER + JUDGE + third + AGENT + listed)) as run:
        run.ring.register("learner", "learner")
        process = SharedLearner(run.paths.root, "learner", parts_of(run))
        shown = [process.parts_of(each.topology)[1] for each in run.every]

        def entries() -> list[tuple[str, int, int]]:
            tables = [[entry for entry in each.ring.processes() if entry.label == "learner"] for each in run.every]
            return [(entry.activity, round(entry.deadline_s), entry.progress) for (entry,) in tables]

        for at, of_one in enumerate(shown):
            of_one.usually(f"waits: {at}")
        usual = [(f"waits: {at}", 0) for at in range(3)]
        for of_one in shown:
            before = entries()
            assert [entry[:2] for entry in before] == usual
            with of_one.activity("step", 60.0), of_one.activity("checkpoint", 30.0):
                assert {entry[:2] for entry in entries()} == {("checkpoint", 30)}
                of_one.progress()
            assert all(now[2] > then[2] for now, then in zip(entries(), before)), "launch and engines see it go on"
        process.close_rings()


class Locked(SharedLearner):
    """The process with its lock, as `main` holds it."""

    def __init__(self, run: OpenRun) -> None:
        super().__init__(run.paths.root, "learner", parts_of(run))
        self._lock = RoleLock(self.paths, self.worker_id)
        assert self._lock.acquire(self.ring, lambda: False)


def test_a_part_looks_at_the_lock_of_its_process(shared: OpenRun) -> None:
    process, lock = Locked(shared), shared.paths.lock("learner")
    for each in shared.every:
        member = ModelLearner(process, each.topology, load)
        lock.unlink()
        member.keep_lock()  # before it commits a step
        assert lock.exists(), each.topology.tag
    process.close_rings()


def test_a_solved_model_is_not_begun_again_after_a_death(shared: OpenRun) -> None:
    pytest.importorskip("peft")
    done(shared, "solver")  # nothing was left to learn, after 0 of its 9 steps
    process = learner_of(shared)
    process.work()
    assert [member.topology.tag for member in process.members] == ["judge"] and not process.stopping
    process.teardown()
    done(shared, "judge")
    last = learner_of(shared)
    last.work()
    assert not last.members and last.stopping == "all steps are done"
    last.teardown()
