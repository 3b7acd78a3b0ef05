"""faster-fifo: one array there and back; it pickles them into shared memory."""

from __future__ import annotations

import faster_fifo
import numpy as np

from benchmarks.ring.rivals.measure import arguments, child, say, timed


def echo(up, there, back, size: int, count: int, copies: bool) -> None:
    source = np.ones(size, np.uint8)
    up.set()
    for _ in range(count):
        array = there.get(timeout=20.0)
        back.put(source if copies else array)


def main() -> None:
    options = arguments()
    there, back = (faster_fifo.Queue(max_size_bytes=16 << 20) for _ in range(2))
    source = np.ones(options.size, np.uint8)
    with child(echo, there, back, options.size, options.count, options.own):

        def once() -> None:
            there.put(source)
            back.get(timeout=20.0)

        say("faster-fifo", faster_fifo, timed(once, options.count))


if __name__ == "__main__":
    main()
