"""The ring of model calls through the Python module, with callers and engines that are killed at named steps."""

from __future__ import annotations

import numpy as np
import pytest

from busrl.errors import NoSuchTransition, NotOwner, RingMismatch, SlotTooSmall
from busrl.ring import Ring, State

IDS = np.arange(20, dtype=np.int32)


class Calls:
    """A ring of calls; this process is a caller, another entry of it an engine."""

    def __init__(self, folder) -> None:
        self.folder, self.path = folder, str(folder / "calls")
        self.ring = Ring.create(self.path, slots=4, slot_bytes=4096, processes=8, uuid=bytes(16), calls=True)
        self.ring.register("agent", "agent/0")
        self.engine = Ring.attach(self.path, calls=True)
        self.engine.register("rollout", "rollout/0")

    def put(self, ids=IDS, **more):
        return self.ring.put_call(ids, b"details", **{"uid": 7, "max_new_tokens": 8, **more})

    def take(self) -> tuple[int, int]:
        [held] = self.engine.take(State.QUEUED, State.GENERATING, cls=None, limit=1)
        return held

    def answer(self, slot: int, word: int) -> int:
        self.engine.put(slot, word, "tokens", self.engine.get(slot, "prompt_ids") + 1, 0)
        return self.engine.commit_segment(slot, word, True)

    def states(self) -> dict[str, int]:
        return {name: n for name, n in self.ring.stats().occupancy.items() if n}


@pytest.fixture
def calls(folder):
    return Calls(folder)


def test_a_call_is_answered_in_place_and_its_slot_is_free_again(calls):
    slot, _ = calls.put(priority=3, admission=5, temperature=0.5)
    line = calls.ring.line(slot)
    assert (line["group"], line["step"], line["uid"]) == (calls.ring.index, calls.ring.epoch, 7)
    assert (line["priority"], line["admission"], line["prompt_tokens"], line["temperature"]) == (3, 5, 20, 0.5)
    claimed, word = calls.take()
    assert calls.engine.get(slot, "call").tobytes() == b"details" and claimed == slot
    done = calls.answer(slot, word)
    assert (calls.ring.get(slot, "tokens", 0) == IDS + 1).all()
    assert calls.ring.free_call(slot, done) and not calls.ring.free_call(slot, done)
    assert calls.states() == {"FREE": 4}


def test_a_full_ring_gives_no_slot_and_unanswerable_calls_are_refused(calls):
    assert all(calls.put() for _ in range(4)) and calls.put() is None
    with pytest.raises(SlotTooSmall, match="up to 4000 new tokens"):
        calls.put(max_new_tokens=4000)


def test_only_callers_free_resting_calls_and_only_engines_working_ones(calls):
    slot, word = calls.put()
    with pytest.raises(NotOwner, match=f"a call of process {calls.ring.index}"):
        calls.engine.free_call(slot, word)
    slot, word = calls.take()
    with pytest.raises(NotOwner):
        calls.ring.free_call(slot, word)
    assert calls.engine.free_call(slot, word) and calls.states() == {"FREE": 4}


def test_a_ring_attaches_as_its_own_kind_without_other_steps(calls, world):
    with pytest.raises(RingMismatch, match="its slots hold model calls, not samples"):
        Ring.attach(calls.path)
    with pytest.raises(RingMismatch, match="its slots hold samples, not model calls"):
        Ring.attach(world.path, calls=True)
    assert calls.ring.holds_calls and not world.ring.holds_calls
    with pytest.raises(NoSuchTransition, match="holds samples, not model calls"):
        world.ring.put_call(IDS, b"", uid=1, max_new_tokens=1)
    slot, _ = calls.put()
    _, word = calls.take()
    with pytest.raises(NoSuchTransition, match="one segment"):
        calls.engine.commit_segment(slot, word, False)


def test_calls_of_a_departed_caller_are_orphans_that_any_reaper_frees(calls):
    other = Ring.attach(calls.path, calls=True)
    other.register("agent", "agent/1")
    slot, _ = other.put_call(IDS, b"", uid=1, max_new_tokens=4)
    _, word = calls.take()
    other.close()
    assert calls.engine.is_orphan(slot) and calls.engine.reap() == []
    calls.answer(slot, word)
    [step] = calls.engine.reap()
    assert (step.label, step.frm, step.to) == ("agent/1", State.GENERATED, State.FREE)
    assert calls.states() == {"FREE": 4}


CHILD = """
ring = Ring.attach(folder + "/calls", calls=True)
ring.register("child", "child")
"""
CALLER = CHILD + """
slot, word = ring.put_call(np.arange(20, dtype=np.int32), b"x", uid=1, max_new_tokens=4)
assert ring.free_call(slot, word)
slot, word = ring.put_call(np.arange(20, dtype=np.int32), b"x", uid=2, max_new_tokens=4)
"""
ENGINE = CHILD + """
[(slot, word)] = ring.take(State.QUEUED, State.GENERATING, cls=None, limit=1)
ring.put(slot, word, "tokens", np.arange(4, dtype=np.int32), 0)
assert ring.commit_segment(slot, word, True)
"""
OF_CALLERS = ["dispatch.claimed:1", "dispatch.written:1", "dispatch.queued:1", "move.cas:1", "release.before:1",
              "release.after:1", "move.hinted:3"]
OF_ENGINES = ["claim.cas:1", "take.claimed:1", "put.stored:1", "commit.before:1", "commit.after:1", "move.cas:2"]


@pytest.mark.parametrize("point", OF_CALLERS)
def test_a_caller_killed_at_this_step_leaves_nothing_after_a_reaper(calls, world, point):
    world.child(CALLER, point).dies_by_sigkill()
    calls.engine.reap()
    assert calls.states() == {"FREE": 4} and len(calls.ring.processes()) == 2


@pytest.mark.parametrize("point", OF_ENGINES)
def test_an_engine_killed_at_this_step_leaves_a_call_that_is_answered(calls, world, point):
    slot, _ = calls.put()
    world.child(ENGINE, point).dies_by_sigkill()
    calls.ring.reap()
    if calls.states() == {"QUEUED": 1, "FREE": 3}:
        calls.answer(*calls.take())
    assert calls.states() == {"GENERATED": 1, "FREE": 3}
    assert len(calls.ring.get(slot, "tokens", 0)) in (4, 20)
    assert calls.ring.free_call(slot, int(calls.ring.line(slot)["word"]))
