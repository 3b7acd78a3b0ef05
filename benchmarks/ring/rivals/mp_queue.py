"""multiprocessing.Queue: one array there and back; it pickles and pipes them."""

from __future__ import annotations

import multiprocessing
import platform

import numpy as np

from benchmarks.ring.rivals.measure import SPAWN, arguments, child, say, timed


def echo(up, there, back, size: int, count: int, copies: bool) -> None:
    source = np.ones(size, np.uint8)
    up.set()
    for _ in range(count):
        array = there.get()
        back.put(source if copies else array)
    back.close()
    back.join_thread()


def main() -> None:
    options = arguments()
    there, back, source = SPAWN.Queue(16), SPAWN.Queue(16), np.ones(options.size, np.uint8)
    with child(echo, there, back, options.size, options.count, options.own):

        def once() -> None:
            there.put(source)
            back.get(timeout=20.0)

        trips = timed(once, options.count)
    multiprocessing.__version__ = f"Python {platform.python_version()}"  # type: ignore[attr-defined]
    say("mp.Queue", multiprocessing, trips)


if __name__ == "__main__":
    main()
