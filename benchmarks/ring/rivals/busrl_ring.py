"""busrl, Python: a slot with one array goes to another process and comes back.

There: claim for the reward, view of the array, commit. Here: claim for training, view of the array. With `--own` the
other side puts an array of its own beside it, and that one is looked at here. The slots are dispatched and freed
outside the clock. `--fill` copies private arrays into the slot; without it the room is only set aside, as iceoryx2
lends it.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path

import numpy as np

import busrl.ring as busrl_ring
from benchmarks.ring.rivals.measure import WARM, arguments, child, pin, say
from busrl.ring import Fates, Ring, State

SLOTS = 2  # more would leave the cache, which a rival with one buffer does not
SPIN_S = 1.0
TIMEOUT_S = 20.0
WAIT = {"cls": None, "limit": 1, "timeout_s": TIMEOUT_S, "spin_s": SPIN_S}
GENERATED, REWARDING, REWARDED, TRAINING = State.GENERATED, State.REWARDING, State.REWARDED, State.TRAINING


def join(folder: str, label: str) -> Ring:
    ring = Ring.attach(f"{folder}/ring")
    ring.bind_fates(Fates(f"{folder}/fates", create=True, capacity=1 << 22))
    ring.register("bench", label)
    return ring


def write(ring: Ring, slot: int, word: int, name: str, size: int, source: np.ndarray | None) -> None:
    if source is None:
        ring.alloc(slot, word, name, "uint8", size)
    else:
        ring.put(slot, word, name, source)


def echo(up, folder: str, size: int, count: int, fill: bool, copies: bool) -> None:
    pin(1)
    ring, source = join(folder, "there"), np.ones(size, np.uint8) if fill else None
    up.set()
    for _ in range(count):
        [(slot, word)] = ring.take(GENERATED, REWARDING, **WAIT)
        ring.get(slot, "there")
        if copies:
            write(ring, slot, word, "back", size, source)
        ring.release(slot, word, REWARDED)


def prepare(ring: Ring, uid: int) -> list[tuple[int, int]]:
    for k in range(SLOTS):
        ring.dispatch(
            uid=uid + k, group=0, admission=uid + k, member=0, group_size=1, cls=0, task=b"x", prompt_crc=0,
            max_new_tokens=1, temperature=1.0,
        )
    return ring.take(State.QUEUED, State.GENERATING, cls=None, limit=SLOTS)


def main() -> None:
    options = arguments()
    source = np.ones(options.size, np.uint8) if options.fill else None
    spent: list[float] = []
    with tempfile.TemporaryDirectory(prefix="busrl.bench.", dir="/dev/shm") as folder:
        room = 2 * (options.size + 64) + 4096
        owner = Ring.create(f"{folder}/ring", slots=SLOTS, slot_bytes=room, processes=8, uuid=bytes(16))
        ring = join(folder, "here")
        rounds = options.count // SLOTS
        answer = "back" if options.own else "there"
        with child(echo, folder, options.size, rounds * SLOTS, options.fill, options.own):
            pin(0)
            for uid in range(0, rounds * SLOTS, SLOTS):
                for slot, word in prepare(ring, uid):
                    start = time.perf_counter()
                    write(ring, slot, word, "there", options.size, source)
                    ring.commit_segment(slot, word, True)
                    [(slot, word)] = ring.take(REWARDED, TRAINING, **WAIT)
                    ring.get(slot, answer)
                    spent.append(time.perf_counter() - start)
                    ring.finish(slot, word, "T")
        ring.close()
        owner.close()
        Path(folder, "ring").unlink()
    say("busrl", busrl_ring, statistics.median(spent[int(len(spent) * WARM) :]))


if __name__ == "__main__":
    main()
