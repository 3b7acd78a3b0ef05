"""Changed segments through the Python face: whoever only looks gets an answer or a RingError, nothing else."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from busrl.cli.rings import render_processes, states
from busrl.errors import RingError
from busrl.ring import Ring, State

SLOTS, PROCESSES = 3, 4
WORDS = [0, 1, 8, 64, 255, 256, 1 << 31, 1 << 32, 1 << 58, 63 << 58, 1 << 62, (1 << 63) - 1, 1 << 63, (1 << 64) - 1]


@pytest.fixture
def valid() -> Iterator[tuple[Path, bytes]]:
    """A ring with a finished slot, one being generated and one free, and a registered process."""
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="busrl.test.") as folder:
        from busrl.ring import Fates

        path = Path(folder) / "ring"
        ring = Ring.create(str(path), slots=SLOTS, slot_bytes=1024, processes=PROCESSES, uuid=bytes(16))
        ring.bind_fates(Fates(f"{folder}/fates", create=True, capacity=1 << 16), None)
        ring.register("test", "test")
        for uid in (1, 2):
            ring.dispatch(
                uid=uid, group=uid, admission=uid, member=0, group_size=1, cls=0, task=b"task", prompt_crc=0,
                max_new_tokens=1, temperature=1.0,
            )
        for slot, word in ring.take(State.QUEUED, State.GENERATING, cls=None, limit=2):
            ring.put(slot, word, "tokens", np.arange(4, dtype=np.int32), 0)
            ring.put(slot, word, "grid", np.zeros((2, 3), np.float32), 0)
            if slot == 0:
                ring.commit_segment(slot, word, True)
        yield path, path.read_bytes()
        ring.close()


def changed(content: bytes, chance: random.Random) -> bytes:
    damaged = bytearray(content)
    lines, tables = (int.from_bytes(content[at : at + 8], "little") for at in (0x50, 0x58))
    regions = [(0x80, 0x2000), (0x2000, 0x2000 + PROCESSES * 256), (lines, lines + SLOTS * 128)]
    regions += [(tables + slot * 6272, tables + slot * 6272 + 128 + 3 * 128) for slot in range(SLOTS)] * 2
    for _ in range(1 + chance.randrange(10)):
        low, high = chance.choice(regions)
        at = chance.randrange(low, high)
        if chance.random() < 0.5:
            damaged[at] = chance.randrange(256)
        else:
            at -= at % 8
            damaged[at : at + 8] = chance.choice(WORDS).to_bytes(8, "little")
    return bytes(damaged)


def look(ring: Ring) -> int:
    """What status, monitor and inspect do; how many arrays were read."""
    ring.stats(), ring.lines(), ring.words()
    states(ring)
    render_processes(ring)
    [repr(process) for process in ring.processes()]
    read = 0
    for slot in range(ring.n_slots):
        for what in (lambda at=slot: ring.tensors(at).values(), lambda at=slot: [ring.get(at, "tokens", 0)]):
            try:
                for array in what():
                    read += len(array.tobytes()) > 0
            except RingError:
                continue
    return read


@pytest.mark.parametrize(("inputs", "seed"), [(2_000, 1), pytest.param(100_000, 2, marks=pytest.mark.slow)])
def test_a_changed_segment_gives_answers_or_ring_errors(valid: tuple[Path, bytes], inputs: int, seed: int) -> None:
    path, content = valid
    chance = random.Random(seed)
    read = 0
    for _ in range(inputs):
        with open(path, "r+b") as file:
            file.write(changed(content, chance))
        ring = Ring.attach(str(path), read_only=True)
        read += look(ring)
        ring.close()
    assert read > inputs  # else nothing was looked at
