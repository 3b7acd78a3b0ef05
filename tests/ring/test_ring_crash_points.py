"""A child is killed at every named step of a sample's life; reaping and the ordinary path then end every sample.

Every step in every state is tried by csrc/tests/crash_points.cpp; here the same goes through the Python module, with
the steps that are only there (`put`). What the source names, these tests and the models must name too.
"""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from busrl.ring import State

CSRC = Path(__file__).resolve().parents[2] / "csrc"

# A whole life: one sample is trained, the next is dropped.
LIFE = """
ring.register("child", "child")
assert dispatch(1)
[(slot, word)] = take(State.QUEUED, State.GENERATING)
ring.put(slot, word, "tokens", np.arange(8, dtype=np.int32), 0)
assert ring.commit_segment(slot, word, True)
[(slot, word)] = take(State.GENERATED, State.REWARDING)
assert ring.release(slot, word, State.REWARDED)
[(slot, word)] = take(State.REWARDED, State.TRAINING)
assert ring.finish(slot, word, "T")
slot, word = dispatch(2)
assert ring.drop(slot, word, "f")
"""

# crash point -> state of the sample's slot, and its fate, after the reaper has passed.
AFTER = {
    "register.lock:1": ("FREE", ""),
    "register.cas:1": ("FREE", ""),
    "dispatch.claimed:1": ("FREE", ""),
    "dispatch.reserved:1": ("FREE", ""),
    "dispatch.written:1": ("FREE", ""),
    "dispatch.uid:1": ("FREE", ""),
    "dispatch.fate:1": ("QUEUED", "D"),
    "dispatch.queued:1": ("QUEUED", "D"),
    "claim.cas:1": ("QUEUED", "D"),
    "take.claimed:1": ("QUEUED", "D"),
    "put.copied:1": ("QUEUED", "D"),
    "put.stored:1": ("QUEUED", "D"),
    "commit.before:1": ("QUEUED", "D"),
    "commit.after:1": ("GENERATED", "D"),
    "claim.cas:2": ("GENERATED", "D"),
    "release.before:1": ("GENERATED", "D"),
    "release.after:1": ("REWARDED", "D"),
    "claim.cas:3": ("REWARDED", "D"),
    # Between a change of state and its hint: the reaper's rescan finds the slot.
    "move.cas:1": ("FREE", ""),
    "move.cas:2": ("QUEUED", "D"),
    "move.cas:4": ("GENERATED", "D"),
    "move.hinted:4": ("GENERATED", "D"),
    "move.cas:6": ("REWARDED", "D"),
    "move.cas:8": ("FREE", "T"),
    "finish.fate:1": ("REWARDED", "T"),
    "finish.free:1": ("FREE", "T"),
}


@pytest.mark.parametrize("point", AFTER)
def test_a_death_at_this_step_leaves_a_sample_that_anybody_can_finish(world, point):
    state, fate = AFTER[point]
    world.child(LIFE, point).dies_by_sigkill()
    reaped = world.ring.reap()
    assert all(r.label == "child" for r in reaped) and len(reaped) <= 1
    assert world.states() == ({"FREE": 8} if state == "FREE" else {state: 1, "FREE": 7})
    assert world.fate(1) == fate
    assert [p.label for p in world.ring.processes()] == ["parent"]
    if not fate:
        assert world.dispatch(1)
    world.finish_everything()
    assert world.fate(1) == "T" and world.states() == {"FREE": 8}


DROPS = ["drop.cas:1", "drop.fate:1"]
REAPS = ["reap.before:2", "reap.cas:1", "reap.cas:3", "reap.entry:1"]


def points_of_the_source() -> set[str]:
    """The names that crash_point() is called with anywhere in csrc/, tests left out."""
    files = [path for path in CSRC.rglob("*.[ch]pp") if path.relative_to(CSRC).parts[0] not in ("tests", "build")]
    return {name for path in files for name in re.findall(r'crash_point\("([a-z._]+)"\)', path.read_text())}


# What a keeper does in the name of a worker without a mapping: csrc/tests/crash_points.cpp and tests/hosts have it.
OF_THE_GATEWAY = {"remote.described", "remote.entered", "remote.rested", "expire.before"}
# Memory of long answers, which the models do not know: csrc/tests/crash_points.cpp and storm_kill.cpp.
OF_MEMORY = {"cut.lowered", "cut.punched", "trim.claimed"}
ELSEWHERE = OF_THE_GATEWAY | OF_MEMORY


def test_every_crash_point_of_the_source_kills_a_process_here():
    assert {point.split(":")[0] for point in [*AFTER, *DROPS, *REAPS]} == points_of_the_source() - ELSEWHERE


def test_every_crash_point_of_the_source_is_a_step_of_the_models():
    """`make -C csrc model` fails when a process was not killed after each of these."""
    listed = (CSRC / "model" / "coverage.hpp").read_text().split("kSteps[] = {")[1].split("}")[0]
    assert set(re.findall(r'"([a-z._]+)"', listed)) == points_of_the_source() - ELSEWHERE


@pytest.mark.parametrize("point", DROPS)
def test_a_drop_that_was_cut_short_is_completed_by_anybody(world, point):
    world.child(LIFE, point).dies_by_sigkill()
    assert world.states() == {"DROPPED": 1, "FREE": 7}
    assert world.ring.reap() == []
    assert world.ring.finish_drops() == 1
    assert world.fate(2) == "f" and world.states() == {"FREE": 8}


@pytest.mark.parametrize("point", REAPS)
def test_a_reaper_killed_at_its_work_is_followed_by_the_next(world, point):
    for uid in range(4):
        world.dispatch(uid)
    victim = world.child("ring.register('victim', 'victim'); say(len(take(State.QUEUED, State.GENERATING, 4))); hear()")
    assert victim.hear() == "4"
    victim.kill()
    world.child("ring.register('reaper', 'reaper'); ring.reap()", point).dies_by_sigkill()
    world.ring.reap()
    assert world.states() == {"QUEUED": 4, "FREE": 4}
    assert [p.label for p in world.ring.processes()] == ["parent"]
    world.finish_everything()
    assert [world.fate(uid) for uid in range(4)] == ["T"] * 4


def test_a_uid_left_in_a_free_slot_is_not_revived_by_deaths(world):
    """Slot 0 still names uid 1, which lives in slot 1 with fate D, when the next dispatcher dies in slot 0."""
    world.dispatch(100)
    world.finish_everything()
    world.child(LIFE, "dispatch.uid:1").dies_by_sigkill()
    world.ring.reap()
    assert world.ring.line(0)["uid"] == 1 and world.states() == {"FREE": 8}
    slot, _ = world.dispatch(1)
    assert slot != 0
    world.child("ring.register('child', 'child'); dispatch(2)", "dispatch.claimed:1").dies_by_sigkill()
    assert [(r.slot, r.frm, r.to) for r in world.ring.reap()] == [(0, State.RESERVED, State.FREE)]
    lines = world.ring.lines()
    assert np.flatnonzero((lines["state"] != State.FREE) & (lines["uid"] == 1)).tolist() == [slot]


def test_a_retried_sample_counts_owner_deaths_and_records_a_lone_death(world):
    world.dispatch(1)
    for _ in range(2):
        world.child("ring.register('c', 'c'); take(State.QUEUED, State.GENERATING)", "take.claimed").dies_by_sigkill()
        world.ring.reap()
    assert world.ring.line(0)["attempt"] == 2 and world.ring.line(0)["alone_deaths"] == 0
    assert world.ring.take(State.QUEUED, State.GENERATING, cls=None, limit=1) == []
    for _ in range(2):
        alone = "ring.register('c', 'c'); [held] = take(State.QUEUED, State.GENERATING); ring.mark_alone(*held); "
        world.child(alone + "ring.put(*held, 'x', b'', 0)", "put.stored").dies_by_sigkill()
        world.ring.reap()
    line = world.ring.line(0)
    assert line["alone_deaths"] == 2
    assert world.ring.drop(0, int(line["word"]), "P") and world.fate(1) == "P"


# What a process writes into a slot that it owns, in each state in which it may: (prepared, claim, rest, segment).
WRITES = {
    "GENERATING": ("", "take(State.QUEUED, State.GENERATING)", "QUEUED", 0),
    "GENERATING with a segment": ("segment", "take(State.QUEUED, State.GENERATING)", "QUEUED", 1),
    "REWARDING": ("generated", "take(State.GENERATED, State.REWARDING)", "GENERATED", 255),
    "TRAINING": ("rewarded", "take(State.REWARDED, State.TRAINING)", "REWARDED", 255),
}


@pytest.mark.parametrize("point", ["put.copied:1", "put.stored:1"])
@pytest.mark.parametrize("state", WRITES)
def test_a_death_in_the_middle_of_a_write_leaves_what_was_committed(world, state, point):
    prepared, claim, rest, segment = WRITES[state]
    world.dispatch(1)
    if prepared:
        [(slot, word)] = world.take(State.QUEUED, State.GENERATING)
        assert world.generate(slot, word, done=prepared != "segment")
    if prepared == "rewarded":
        [(slot, word)] = world.take(State.GENERATED, State.REWARDING)
        assert world.ring.release(slot, word, State.REWARDED)
    put = f"[(slot, word)] = {claim}; ring.put(slot, word, 'half', np.ones(64), {segment})"
    world.child(f"ring.register('child', 'child'); {put}", point).dies_by_sigkill()
    assert [(r.slot, r.label) for r in world.ring.reap()] == [(0, "child")]
    assert world.states() == {rest: 1, "FREE": 7} and [p.label for p in world.ring.processes()] == ["parent"]
    if prepared:
        assert world.ring.get(0, "tokens", 0).tolist() == list(range(8))
    world.finish_everything()
    assert world.fate(1) == "T" and world.states() == {"FREE": 8}
