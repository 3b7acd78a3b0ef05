"""A process of several models: how it is made, when it ends, what it begins after a death, and what holds whom up."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from role_parts import held
from tagged import AGENT, JUDGE, SOLVER, Read
from test_model_directories import opened

from busrl.bus import Endpoint
from busrl.launcher.processes import Deaths
from busrl.launcher.rundir import OpenRun
from busrl.launcher.summary import EventLog, Journal
from busrl.launcher.supervisor import Child, Exit
from busrl.protocol import messages as m
from busrl.roles import version_pin
from busrl.roles.__main__ import maker
from busrl.roles.actor import Actor, Parts
from busrl.roles.bus import Bus
from busrl.roles.learner import publish
from busrl.roles.process import RoleLock
from busrl.roles.rollout import Rollout
from busrl.roles.validator import RoundPin
from busrl.several.shared_learner import ModelLearner, SharedLearner
from busrl.states import HeaderWord, RunPhase
from busrl.topology import Topology
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


def test_a_process_is_made_once_from_one_reading(shared: OpenRun, monkeypatch: pytest.MonkeyPatch) -> None:
    read, count = Topology.from_json, Counter[str]()

    def counted(text: str) -> Topology:
        count["read"] += 1
        return read(text)

    monkeypatch.setattr(Topology, "from_json", counted)
    for name, kind, reads in (("learner", SharedLearner, 1), ("rollout/0", Rollout, 1), ("bus", Bus, 0)):
        count.clear()
        made = maker(name.partition("/")[0], shared.paths, name)(str(shared.paths.root), name)
        assert type(made) is kind and count["read"] == reads, name


STOP = m.Stop(reason="enough", sender="launch")


@pytest.mark.parametrize(("kind", "name"), [(SharedLearner, "learner"), (Rollout, "rollout/0")])
def test_a_stop_counts_once_every_model_has_ended(shared: OpenRun, kind: type[Actor], name: str) -> None:
    """The one that has made its steps first is the one in whose ring the process is."""
    process = kind(shared.paths.root, name, parts_of(shared))
    for tags in ((), ("solver",)):
        done(shared, *tags)
        process.receive(STOP)
        assert not process.stopping, f"{tags} are done, and the judge needs the process"
    done(shared, "judge")
    process.receive(STOP)
    assert process.stopping == "STOP: enough"


def works_until(process: SharedLearner, there: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not there():
        assert time.monotonic() < end
        process.work()


def versions(run: OpenRun) -> list[int]:
    return [each.ring.header(HeaderWord.VERSION) for each in run.every]


def test_a_held_version_keeps_no_other_model_from_its_next(shared: OpenRun) -> None:
    pytest.importorskip("peft")
    process = learner_of(shared)
    for each in shared.every:
        each.ring.set_header(HeaderWord.UNPUBLISHED_GROUPS, 1000)  # the engines wait for a version
    judge = shared.every[1]
    with held(judge.paths):
        works_until(process, lambda: versions(shared)[0] == 1)
        works_until(process, lambda: "held by validation" in {entry.activity for entry in judge.ring.processes()})
        assert versions(shared) == [1, 0]
    works_until(process, lambda: versions(shared) == [1, 1])
    assert "held by validation" not in {entry.activity for entry in judge.ring.processes()}
    process.teardown()


def hold_of(run: OpenRun, now: list[float], told: list[str], monkeypatch: pytest.MonkeyPatch) -> publish.Hold:
    """The hold of a model's version as its learner sees it, at the time `now`; `told`: what it warns of."""
    monkeypatch.setattr("busrl.roles.learner.publish.time.monotonic", lambda: now[0])
    topology = SimpleNamespace(dedicated=False, limits=SimpleNamespace(work_s=10.0))
    learner: Any = SimpleNamespace(
        ring=run.ring, topology=topology, shown=SimpleNamespace(progress=lambda: None),
        warn=lambda _, text: told.append(text))
    return publish.Hold(learner)


def test_results_in_the_ring_of_another_model_keep_a_version_held(
    shared: OpenRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    judge, now, told = shared.every[1], [0.0], list[str]()
    hold = hold_of(judge, now, told, monkeypatch)
    assert not hold.lasts()
    with held(judge.paths) as validator:
        for _ in range(5):
            assert hold.lasts() and not told
            now[0] += 11.0
            validator.add(samples=1)
        assert hold.lasts()
        now[0] += 11.0
        assert not hold.lasts() and "had no result for 10 s; publishing without it" in told[0]
        validator.add(samples=1)
        assert hold.lasts() and len(told) == 1


def test_a_hold_that_was_released_counts_no_more(shared: OpenRun, monkeypatch: pytest.MonkeyPatch) -> None:
    """A new one of the same validator, with as many results, has its own time."""
    judge, now, told = shared.every[1], [0.0], list[str]()
    hold = hold_of(judge, now, told, monkeypatch)
    with held(judge.paths) as ring:
        assert hold.lasts()
        version_pin.unpin(ring)
        assert not hold.lasts()
        now[0] += 1000.0
        assert version_pin.pin(ring) and hold.lasts() and not told


def test_a_round_that_begins_behind_the_look_is_not_waited_for(
    shared: OpenRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("peft")
    process, judge = learner_of(shared), shared.every[1]
    member: Any = process.members[1]
    monkeypatch.setattr(member.publisher, "still_held", lambda: False)
    monkeypatch.setattr(publish.Hold, "lasts", lambda hold: pytest.fail("a second look, which may wait"))
    judge.ring.set_header(HeaderWord.UNPUBLISHED_GROUPS, 1000)
    with held(judge.paths):
        works_until(process, lambda: versions(shared)[1] == 1)
    process.teardown()


def test_a_learner_that_starts_under_a_hold_keeps_its_version_back(shared: OpenRun) -> None:
    pytest.importorskip("peft")
    judge = shared.every[1]
    judge.ring.set_header(HeaderWord.VERSION, 4)  # of a learner that was killed
    judge.ring.set_header(HeaderWord.UNPUBLISHED_GROUPS, 7)
    with held(judge.paths):
        process = learner_of(shared)
        for _ in range(5):
            process.work()
        assert versions(shared)[1] == 4 and judge.ring.header(HeaderWord.UNPUBLISHED_GROUPS) == 7
    works_until(process, lambda: versions(shared)[1] == 5)
    assert judge.ring.header(HeaderWord.UNPUBLISHED_GROUPS) == 0
    process.teardown()


def test_the_next_round_begins_once_a_kept_back_version_is_out(shared: OpenRun) -> None:
    pytest.importorskip("peft")
    process, judge, late = learner_of(shared), shared.every[1], list[str]()
    judge.ring.set_header(HeaderWord.UNPUBLISHED_GROUPS, 1000)
    with held(judge.paths) as ring:
        works_until(process, lambda: version_pin.keeps_back(judge.ring))
        pin = RoundPin(ring, set(), 60.0, late.append)
        pin.release()
        assert not pin.take(0.0) and not pin.take(60.0), "though nobody holds the version now"
        works_until(process, lambda: versions(shared)[1] == 1)
        assert pin.take(60.0) and version_pin.pinned_by(ring) and not late
        pin.release()
    process.teardown()


def test_a_model_ends_with_its_last_version_though_it_is_held(shared: OpenRun) -> None:
    pytest.importorskip("peft")
    process = learner_of(shared)
    judge = shared.every[1]
    judge.ring.set_header(HeaderWord.UNPUBLISHED_GROUPS, 1)
    done(shared, "judge")
    with held(judge.paths):
        for _ in range(5):
            process.work()
        assert len(process.members) == 2 and versions(shared) == [0, 0]
    works_until(process, lambda: len(process.members) == 1)
    assert versions(shared) == [0, 1] and not process.stopping
    process.teardown()


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
