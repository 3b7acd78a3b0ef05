"""The random numbers of a sample: one stream for each (run seed, uid, segment), drawn when the request arrives.

Used by the engines; talks to nothing. A counter-based generator makes the streams independent without any state to
keep: the key is (seed, uid), the segment sits in the counter, and a repeated draw gives the same numbers.

- Uniforms lie strictly inside (0, 1) on a grid of 2**-32, so u * total < total holds in float64.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

_MASK = (1 << 64) - 1


class Streams:
    """Draws uniforms for samples. One generator is re-keyed for each, which is cheaper than making one."""

    def __init__(self) -> None:
        self._philox = np.random.Philox(key=0)
        self._buffer = np.zeros(4, np.uint64)

    def uniforms(self, seed: int, uid: int, segment: int, count: int) -> npt.NDArray[np.float64]:
        """The first `count` numbers of the stream; a longer draw begins with the same ones."""
        key = np.array([uid & _MASK, seed & _MASK], np.uint64)
        counter = np.array([0, 0, segment & _MASK, 0], np.uint64)
        self._philox.state = {
            "bit_generator": "Philox",
            "state": {"counter": counter, "key": key},
            "buffer": self._buffer,
            "buffer_pos": 4,
            "has_uint32": 0,
            "uinteger": 0,
        }
        words: npt.NDArray[np.uint64] = self._philox.random_raw(count)
        drawn: npt.NDArray[np.float64] = ((words >> np.uint64(32)).astype(np.float64) + 0.5) * 2.0**-32
        return drawn
