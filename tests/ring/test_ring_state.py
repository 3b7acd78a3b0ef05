"""The state machine and its bookkeeping as Python sees them: claims, hints, waits, counters, the process table."""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path

import numpy as np
import pytest

from busrl import _ring
from busrl.errors import (
    BadTensor,
    FateRefused,
    NoSuchTensor,
    NoSuchTransition,
    NotOwner,
    NotRegistered,
    RingClosed,
    RingError,
)
from busrl.ring import UID_NONE, Ring, State, owner_of, segments_of, seq_of, state_of
from busrl.states import CRASH_POINTS, VALIDATE_BIT, Fate, HeaderWord

FATES_HPP = Path(__file__).resolve().parents[2] / "csrc" / "include" / "busrl" / "fates.hpp"


def test_states_header_words_and_codes_are_those_of_the_core():
    assert {state.name: int(state) for state in _ring.State} == {state.name: state.value for state in State}
    assert tuple(HeaderWord) == _ring.HEADER_WORDS and CRASH_POINTS == _ring.CRASH_POINTS
    assert _ring.UID_VALIDATE == VALIDATE_BIT
    codes = dict(re.findall(r"k([A-Z][a-z]+) = '(.)'", FATES_HPP.read_text()))
    assert codes == {name.title(): Fate[name].letter for name in ("DISPATCHED", "TRAINED", "VALIDATED")}


def test_a_sample_lives_and_every_word_differs_from_all_before(world):
    slot, word = world.dispatch(3)
    seen = [word]
    for _ in range(2):
        [(slot, word)] = world.take(State.QUEUED, State.GENERATING)
        assert owner_of(word) == world.ring.index
        seen += [word, world.generate(slot, word, done=False)]
    [(slot, word)] = world.take(State.QUEUED, State.GENERATING)
    seen += [word, world.generate(slot, word)]
    assert segments_of(seen[-1]) == 3 and state_of(seen[-1]) == State.GENERATED
    word = world.ring.claim(slot, seen[-1], State.REWARDING)
    seen += [word, world.ring.release(slot, word, State.GENERATED)]
    word = world.ring.claim(slot, seen[-1], State.REWARDING)
    seen += [word, world.ring.release(slot, word, State.REWARDED)]
    word = world.ring.claim(slot, seen[-1], State.TRAINING)
    assert world.ring.finish(slot, word, "T")
    seen += [word, int(world.ring.words()[slot])]
    assert len(set(seen)) == len(seen) and 0 not in seen
    assert [seq_of(w) for w in seen] == sorted(seq_of(w) for w in seen)


def test_the_line_shows_what_was_dispatched_and_what_its_owner_wrote(world):
    world.ring.dispatch(
        uid=9, group=1, admission=7, member=1, group_size=8, cls=2, task=b"t", prompt_crc=5, priority=-3,
        max_new_tokens=64, temperature=0.5, top_p=0.9, version=11, step=4,
    )
    [(slot, word)] = world.take(State.QUEUED, State.GENERATING)
    world.ring.set(slot, word, reward=0.25, finish=1, response_tokens=17, version=12, flags=3)
    line = world.ring.line(slot)
    expected = {
        "uid": 9, "group": 1, "admission": 7, "member": 1, "group_size": 8, "cls": 2, "prompt_crc": 5, "priority": -3,
        "max_new_tokens": 64, "temperature": 0.5, "version": 12, "step": 4, "reward": 0.25, "finish": 1,
        "response_tokens": 17, "attempt": 1, "flags": 3, "state": State.GENERATING, "owner": world.ring.index,
    }
    assert {name: line[name].item() for name in expected} == expected
    assert world.ring.lines()[slot] == line and line["top_p"] == np.float32(0.9)
    assert world.ring.lines()["uid"][1] == UID_NONE


@pytest.mark.parametrize("field", ["uid", "word", "changed_ns", "last_commit_seq", "nonsense"])
def test_fields_of_the_ring_itself_can_not_be_set(world, field):
    world.dispatch(1)
    [(slot, word)] = world.take(State.QUEUED, State.GENERATING)
    with pytest.raises((RingError, TypeError)):
        world.ring.set(slot, word, **{field: 1})


def test_two_claimers_of_one_word_have_one_winner(world):
    slot, word = world.dispatch(1)
    other = Ring.attach(world.path)
    other.register("other", "other")
    assert other.claim(slot, word, State.GENERATING)
    assert world.ring.claim(slot, word, State.GENERATING) == 0


def test_arrows_that_do_not_exist_are_refused_by_name(world):
    slot, word = world.dispatch(1)
    with pytest.raises(NoSuchTransition, match="QUEUED -> TRAINING"):
        world.ring.claim(slot, word, State.TRAINING)
    with pytest.raises(NoSuchTransition, match="FREE -> DROPPED"):
        world.ring.drop(1, int(world.ring.words()[1]), "f")
    with pytest.raises(NoSuchTransition):
        world.ring.take(State.QUEUED, State.REWARDING, cls=None, limit=1)
    assert not world.ring.drop(slot, 0, "f")


def test_an_owner_may_drop_what_it_holds(world):
    world.dispatch(1)
    [(slot, word)] = world.take(State.QUEUED, State.GENERATING)
    assert world.ring.drop(slot, word, "M") and world.fate(1) == "M"
    assert world.ring.stats().drops == {"M": 1} and world.states() == {"FREE": 8}


def test_a_sample_with_a_fate_is_dispatched_again_only_once_taken_back(world):
    slot, word = world.dispatch(1)
    assert world.ring.drop(slot, word, "f")
    with pytest.raises(FateRefused, match="'f'"):
        world.dispatch(1)
    world.train.store(2, "D")  # its slot was lost with an older ring
    with pytest.raises(FateRefused, match="'D'"):
        world.dispatch(2)
    assert world.train.store(2, 0) and world.dispatch(2)


def test_calls_that_need_an_entry_or_fates_say_so(world):
    stranger = Ring.attach(world.path)
    with pytest.raises(NotRegistered, match="call register"):
        stranger.take(State.QUEUED, State.GENERATING, cls=None, limit=1)
    stranger.register("s", "s")
    with pytest.raises(FateRefused, match="bind_fates"):
        world.dispatch(1, ring=stranger)
    stranger.close()
    stranger.close()
    with pytest.raises(RingClosed):
        stranger.lines()
    assert stranger.closed and stranger.index == 0


def test_a_waiter_is_woken_by_a_transition(world):
    seen = world.ring.transitions(State.QUEUED)
    child = world.child(
        f"ring.register('w', 'w'); say('waiting'); say(ring.wait(State.QUEUED, {seen}, 30.0)); "
        "say(take(State.QUEUED, State.GENERATING) != []); hear()"  # its end would queue the slot again
    )
    assert child.hear() == "waiting"
    world.dispatch(1)
    assert int(child.hear()) == seen + 1
    assert child.hear() == "True"
    assert world.ring.wait(State.QUEUED, seen, 30.0) == seen + 1  # already past: returns at once


def test_a_wait_ends_at_its_time_and_at_ctrl_c(world):
    seen = world.ring.transitions(State.QUEUED)
    assert world.ring.wait(State.QUEUED, seen, 0.02) == seen
    # A shell starts jobs in the background with SIGINT ignored, which children inherit.
    child = world.child(
        "import signal\nsignal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "try:\n    say('waiting')\n    ring.wait(2, 0, 60.0)\nexcept KeyboardInterrupt:\n    say('stopped')"
    )
    assert child.hear() == "waiting"
    os.kill(child.process.pid, signal.SIGINT)
    assert child.hear() == "stopped"


def test_the_process_table_shows_what_everybody_does(world):
    world.ring.activity("compile", deadline_s=600)
    world.ring.add(busy_ns=5, tokens=7)
    world.ring.add(tokens=1, samples=2, idle_ns=3)
    world.ring.set_version_seen(12)
    [before] = world.ring.processes()
    world.ring.progress()
    world.ring.set_ready()
    [me] = world.ring.processes()
    assert (before.state, me.state) == ("starting", "ready") and me.progress == before.progress + 1
    assert (me.pid, me.role, me.activity, me.deadline_s) == (os.getpid(), "parent", "compile", 600.0)
    assert (me.busy_ns, me.idle_ns, me.tokens, me.samples, me.version) == (5, 3, 8, 2, 12)


def test_header_words_are_shared_and_compared_and_swapped(world):
    other = Ring.attach(world.path)
    for k, name in enumerate(HeaderWord):
        world.ring.set_header(name, k + 1)
    assert [other.header(name) for name in HeaderWord] == list(range(1, 9))
    assert other.cas_header("hold", 5, 50) and not other.cas_header("hold", 5, 51)
    assert world.ring.header("hold") == 50
    with pytest.raises(RingError, match="no word"):
        world.ring.header("nonsense")


def test_counts_follow_the_work(world):
    world.dispatch(1)
    world.finish_everything()
    stats = world.ring.stats()
    assert (stats.dispatched, stats.claims, stats.commits, stats.finished) == (1, 3, 2, 1)
    assert stats.transitions["QUEUED"] == 1 and stats.occupancy["FREE"] == 8


def test_labels_longer_than_their_field_are_cut_and_stay_text(world):
    other = Ring.attach(world.path)
    other.register("prüfer", "ü" * 100)
    [_, process] = world.ring.processes()
    assert process.role == "prüfer" and process.label.startswith("ü" * 19) and "ü" * 19 in repr(process)


def test_a_group_is_dispatched_in_one_call_until_no_slot_is_free(world):
    fields = {"group": 0, "admission": 0, "group_size": 8, "cls": 0, "task": b"t", "prompt_crc": 0}
    fields |= {"max_new_tokens": 1, "temperature": 1.0}
    first = world.ring.dispatch(uid=0, member=0, members=6, **fields)
    assert [int(world.ring.line(slot)["uid"]) for slot, _ in first] == list(range(6))
    assert [int(world.ring.line(slot)["member"]) for slot, _ in first] == list(range(6))
    assert len(world.ring.dispatch(uid=16, member=0, members=6, **fields)) == 2  # of 8 slots
    assert world.fate(17) == "D" and world.fate(18) == ""


def test_many_rewards_are_committed_in_one_call_by_their_owner_only(world):
    for uid in range(3):
        world.dispatch(uid)
    for slot, word in world.take(State.QUEUED, State.GENERATING):
        world.ring.put(slot, word, "text", b"%d" % slot, 0)
        world.ring.commit_segment(slot, word, True)
    held = world.take(State.GENERATED, State.REWARDING)
    assert world.ring.copies(held, "text", np.dtype("u1"), last_segment=True) == [b"%d" % slot for slot, _ in held]
    assert world.ring.lines([held[2][0], held[0][0]])["uid"].tolist() == [2, 0]
    assert world.ring.copies(held, "task", np.dtype("u1")) == [b'{"prompt": "%d"}' % uid for uid in range(3)]
    with pytest.raises(BadTensor, match="task: it is of another type"):
        world.ring.copies(held, "task", np.dtype("i4"))
    with pytest.raises(NoSuchTensor, match="logits"):
        world.ring.copies(held, "logits", np.dtype("f4"))
    assert all(world.ring.commit_rewards(held, [0.5, 1.0, 0.0]))
    assert [float(world.ring.line(slot)["reward"]) for slot, _ in held] == [0.5, 1.0, 0.0]
    with pytest.raises(NotOwner):
        world.ring.commit_rewards(held[:1], [1.0])
    with pytest.raises(NotOwner):
        world.ring.copies(held[:1], "task", np.dtype("u1"))


def test_a_take_with_a_timeout_returns_what_comes_and_else_nothing(world):
    start = time.monotonic()
    assert world.ring.take(State.QUEUED, State.GENERATING, cls=None, limit=1, timeout_s=0.2, spin_s=0.05) == []
    assert time.monotonic() - start >= 0.2
    child = world.child("""
    ring.register("child", "child")
    for spin_s in (0.0, 30.0):
        say("waits")
        [(slot, word)] = ring.take(State.QUEUED, State.GENERATING, cls=None, limit=1, timeout_s=30.0, spin_s=spin_s)
        say(slot)
        assert ring.release(slot, word, State.QUEUED)
        hear()
    """)
    for uid in (1, 2):
        assert child.hear() == "waits"
        assert world.dispatch(uid)
        child.hear()
        [(slot, word)] = world.ring.take(State.QUEUED, State.GENERATING, cls=None, limit=1, timeout_s=5.0)
        world.ring.drop(slot, word, "f")
        child.tell("on")


def test_hand_off_calls_name_what_is_wrong_with_their_arguments(world):
    ring = world.ring
    with pytest.raises(TypeError, match=r"release\(\) needs the argument to"):
        ring.release(0, 1)
    with pytest.raises(TypeError, match=r"take\(\) has no argument limits"):
        ring.take(State.QUEUED, State.GENERATING, cls=None, limits=1)
    with pytest.raises(TypeError, match="at most 3 arguments by place"):
        ring.release(0, 1, 2, 3)
    with pytest.raises(TypeError, match="twice"):
        ring.release(0, 1, 2, to=2)
    with pytest.raises(TypeError):
        ring.commit_segment("0", 1, True)
    with pytest.raises(OverflowError):
        ring.commit_segment(-1, 1, True)
    with pytest.raises(TypeError, match="32 bits"):
        ring.take(State.QUEUED, State.GENERATING, cls=1 << 40, limit=1)
    with pytest.raises(RingError, match="no state 99"):
        ring.take(99, State.GENERATING, cls=None, limit=1)
    with pytest.raises(TypeError, match="a name is a str"):
        ring.get(0, b"tokens")
    assert ring.take(np.int64(State.QUEUED), State.GENERATING, cls=np.uint32(0), limit=np.int32(1)) == []
    with pytest.raises(TypeError, match="Ring"):
        type(ring).take(object(), State.QUEUED, State.GENERATING, cls=None, limit=1)
