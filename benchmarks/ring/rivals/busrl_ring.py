"""busrl, Python: a slot with one array goes to another process and comes back.

There: claim for the reward, view of the array, commit. Here: claim for training, view of the array. With `--own` the
other side puts an array of its own beside it, and that one is looked at here. The slots are dispatched and freed
outside the clock. `--fill` copies private arrays into the slot; without it the room is only set aside, as iceoryx2
lends it. Both sides wait by looking, each on a core of its own; with `--blocking` they sleep until they are woken, as
every process of a run does.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

import numpy as np

import busrl.ring as busrl_ring
from benchmarks.ring.rivals.measure import Trips, arguments, child, pin, say
from busrl.ring import Fates, Ring, State

SLOTS = 2  # more would leave the cache, which a rival with one buffer does not
SPIN_S = 1.0
TIMEOUT_S = 20.0
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


def waiting(blocking: bool, place: int) -> dict[str, object]:
    """How this process waits; one that looks all the time has a core of its own."""
    if not blocking:
        pin(place)
    return {"cls": None, "limit": 1, "timeout_s": TIMEOUT_S, "spin_s": 0.0 if blocking else SPIN_S}


def echo(up, folder: str, size: int, count: int, fill: bool, copies: bool, blocking: bool) -> None:
    wait = waiting(blocking, 1)
    ring, source = join(folder, "there"), np.ones(size, np.uint8) if fill else None
    up.set()
    for _ in range(count):
        [(slot, word)] = ring.take(GENERATED, REWARDING, **wait)
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
    with tempfile.TemporaryDirectory(prefix="busrl.bench.", dir="/dev/shm") as folder:
        room = 2 * (options.size + 64) + 4096
        owner = Ring.create(f"{folder}/ring", slots=SLOTS, slot_bytes=room, processes=8, uuid=bytes(16))
        ring = join(folder, "here")
        rounds = options.count // SLOTS
        answer = "back" if options.own else "there"
        trips, blocking = Trips(rounds * SLOTS), options.blocking
        with child(echo, folder, options.size, rounds * SLOTS, options.fill, options.own, blocking):
            wait = waiting(blocking, 0)
            for uid in range(0, rounds * SLOTS, SLOTS):
                for slot, word in prepare(ring, uid):
                    start = time.perf_counter()
                    write(ring, slot, word, "there", options.size, source)
                    ring.commit_segment(slot, word, True)
                    [(slot, word)] = ring.take(REWARDED, TRAINING, **wait)
                    ring.get(slot, answer)
                    trips.add(time.perf_counter() - start)
                    ring.finish(slot, word, "T")
            trips.end()
        ring.close()
        owner.close()
        Path(folder, "ring").unlink()
    say("busrl blocking" if options.blocking else "busrl", busrl_ring, trips)


if __name__ == "__main__":
    main()
