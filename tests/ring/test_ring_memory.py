"""What a ring of very long answers takes of /dev/shm: a little for each slot, and what is held; the rest comes back.

A reaper gives memory back a second after its last use: the tests call it until that is so.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from busrl.ring import Fates, Ring, State
from busrl.topology.sizes import KEPT, ring_bytes

TOKENS = 128 << 10
SLOTS, SLOT_BYTES = 512, 12 * TOKENS + 16 * TOKENS + (64 << 10)
ANSWER = 12 * TOKENS
MIB = 1 << 20


@pytest.fixture
def ring(folder: Path) -> Iterator[Ring]:
    ring = Ring.create(str(folder / "ring"), slots=SLOTS, slot_bytes=SLOT_BYTES, processes=8, uuid=bytes(16))
    fates = Fates(str(folder / "fates.bin"), create=True, capacity=1 << 20)
    ring.bind_fates(fates, fates)
    ring.register("learner", "test")
    yield ring
    ring.close()


def resident(ring: Ring) -> int:
    return os.stat(ring.name).st_blocks * 512


def settled(ring: Ring, most: int, timeout_s: float = 20.0) -> bool:
    """True once reapers have brought the ring's memory down to `most` bytes."""
    deadline = time.monotonic() + timeout_s
    while resident(ring) > most and time.monotonic() < deadline:
        ring.reap()
        ring.wait(State.RESERVED, ring.transitions(State.RESERVED), 0.05)
    return resident(ring) <= most


def generate(ring: Ring, uid: int, tokens: int) -> None:
    ring.dispatch(uid=uid, group=uid, admission=uid, member=0, group_size=1, cls=0, task=b'{"prompt": "x"}',
                  prompt_crc=1, max_new_tokens=TOKENS, temperature=1.0)
    ((slot, word),) = ring.take(State.QUEUED, State.GENERATING, cls=None, limit=1, max_attempt=255)
    ring.put(slot, word, "tokens", np.full(tokens, uid, np.int32), 0)
    ring.put(slot, word, "logprobs", np.full(tokens, -1, np.float32), 0)
    ring.put(slot, word, "versions", np.full(tokens, uid, np.uint32), 0)
    assert ring.commit_segment(slot, word, True)


def train(ring: Ring, count: int) -> list[int]:
    """The first token of each; all of an answer must be its own."""
    sizes = []
    for slot, word in ring.take(State.GENERATED, State.REWARDING, cls=None, limit=count, max_attempt=255):
        ring.release(slot, word, State.REWARDED)
    for slot, word in ring.take(State.REWARDED, State.TRAINING, cls=None, limit=count, max_attempt=255):
        tokens = ring.get(slot, "tokens", 0).copy()
        assert (tokens == tokens[0]).all() and (ring.get(slot, "versions", 0) == tokens[0]).all()
        sizes.append(int(tokens[0]))
        assert ring.finish(slot, word, "T")
    return sizes


def test_resident_memory_follows_held_answers_over_more_than_would_fit(ring: Ring) -> None:
    assert os.stat(ring.name).st_size > 1800 * MIB
    empty = resident(ring)
    assert empty < SLOTS * (KEPT + (12 << 10)) + MIB
    in_use, trained = 0, []
    for uid in range(4 * SLOTS // 4):
        generate(ring, uid, TOKENS if uid % 4 else 1000)
        in_use += 1
        if in_use == 24:
            trained += train(ring, 16)
            in_use -= 16
            if len(trained) % 128 == 0:
                assert settled(ring, empty + in_use * ANSWER)
    trained += train(ring, SLOTS)
    assert sorted(trained) == list(range(SLOTS)) and settled(ring, empty)


def test_the_next_long_answer_in_a_slot_finds_its_memory_there(folder: Path) -> None:
    ring = Ring.create(str(folder / "one"), slots=1, slot_bytes=SLOT_BYTES, processes=8, uuid=bytes(16))
    fates = Fates(str(folder / "fates.bin"), create=True, capacity=1 << 20)
    ring.bind_fates(fates, fates)
    ring.register("learner", "test")
    generate(ring, 0, TOKENS)
    held = resident(ring)
    for uid in range(1, 4):
        assert train(ring, 1) == [uid - 1] and resident(ring) == held
        generate(ring, uid, TOKENS)
    assert resident(ring) == held and ring.stats().transitions["RESERVED"] == 4
    ring.close()


def test_a_short_answer_after_a_long_one_keeps_none_of_its_memory(ring: Ring) -> None:
    empty = resident(ring)
    for uid in range(SLOTS + 1):
        generate(ring, uid, TOKENS if uid == 0 else 1000)
        assert train(ring, 1) == [uid]
    assert resident(ring) - empty < 64 << 10


def test_what_check_counts_is_what_the_file_takes(ring: Ring) -> None:
    assert 0 <= ring_bytes(SLOTS, SLOT_BYTES, 8) - os.stat(ring.name).st_size < 64 << 10
    counted = ring_bytes(SLOTS, SLOT_BYTES, 8, ANSWER)
    empty = resident(ring)
    for uid in range(8):
        generate(ring, uid, TOKENS)
    expected = empty + (resident(ring) - empty) // 8 * SLOTS
    assert expected <= counted < 1.05 * expected


def test_short_answers_take_nothing_more(ring: Ring) -> None:
    empty = resident(ring)
    for uid in range(32):
        generate(ring, uid, 5000)
    assert resident(ring) == empty
    train(ring, 32)
    assert ring.stats().transitions["RESERVED"] == 32


def test_a_reader_of_a_long_answer_gets_a_copy_outliving_its_memory(ring: Ring) -> None:
    generate(ring, 7, TOKENS)
    stranger = Ring.attach(ring.name, read_only=True)
    seen = stranger.get(0, "tokens", 0)
    assert not seen.flags.writeable and stranger.tensors(0)[("versions", 0)][-1] == 7
    empty = resident(ring) - ANSWER
    train(ring, 1)
    assert settled(ring, empty + (64 << 10))
    assert (seen == 7).all() and stranger.tensors(0) == {}
    stranger.close()
