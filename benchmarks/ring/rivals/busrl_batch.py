"""busrl, Python: `--batch` slots go to another process, which claims what it finds, and come back.

Each slot gets an array of `--size` bytes copied in, is looked at there, committed, and looked at here.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

import numpy as np

import busrl.ring as busrl_ring
from benchmarks.ring.rivals.busrl_ring import GENERATED, REWARDED, REWARDING, TRAINING, join
from benchmarks.ring.rivals.measure import Trips, arguments, child, pin, say
from busrl.ring import Ring, State


def echo(up, folder: str, total: int, batch: int) -> None:
    pin(1)
    ring = join(folder, "there")
    up.set()
    while total > 0:
        taken = ring.take(GENERATED, REWARDING, cls=None, limit=batch, timeout_s=20.0, spin_s=1.0)
        for slot, word in taken:
            ring.get(slot, "data")
            ring.release(slot, word, REWARDED)
        total -= len(taken)


def once(ring: Ring, held: list[tuple[int, int]], source: np.ndarray) -> list[tuple[int, int]]:
    for slot, word in held:
        ring.put(slot, word, "data", source)
        ring.commit_segment(slot, word, True)
    back: list[tuple[int, int]] = []
    while len(back) < len(held):
        taken = ring.take(REWARDED, TRAINING, cls=None, limit=len(held), timeout_s=20.0, spin_s=1.0)
        for slot, _word in taken:
            ring.get(slot, "data")
        back += taken
    return back


def main() -> None:
    options = arguments()
    source = np.ones(options.size, np.uint8)
    trips = Trips(options.count)
    with tempfile.TemporaryDirectory(prefix="busrl.bench.", dir="/dev/shm") as folder:
        owner = Ring.create(
            f"{folder}/ring", slots=options.batch, slot_bytes=options.size + 4096, processes=8, uuid=bytes(16)
        )
        ring = join(folder, "here")
        with child(echo, folder, options.count * options.batch, options.batch):
            pin(0)
            for uid in range(0, options.count * options.batch, options.batch):
                for k in range(options.batch):
                    ring.dispatch(
                        uid=uid + k, group=0, admission=uid + k, member=0, group_size=1, cls=0, task=b"x",
                        prompt_crc=0, max_new_tokens=1, temperature=1.0,
                    )
                held = ring.take(State.QUEUED, State.GENERATING, cls=None, limit=options.batch)
                start = time.perf_counter()
                back = once(ring, held, source)
                trips.add(time.perf_counter() - start)
                for slot, word in back:
                    ring.finish(slot, word, "T")
            trips.end()
        ring.close()
        owner.close()
        Path(folder, "ring").unlink()
    say("busrl", busrl_ring, trips, batch=options.batch)


if __name__ == "__main__":
    main()
