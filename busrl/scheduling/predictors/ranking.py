"""How well an order was predicted: Kendall's tau of predictions against what came out.

Pure arithmetic. Knows nothing of predictors.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

BLOCK = 1024  # rows compared at once: bounds the memory


def kendall_tau(predicted: Sequence[float] | npt.ArrayLike, actual: Sequence[float] | npt.ArrayLike) -> float:
    """Ranking quality, -1 to 1 (tau-b, ties corrected); 0 where one side does not vary. For some thousand pairs."""
    p, a = np.asarray(predicted, np.float64), np.asarray(actual, np.float64)
    agree = ordered_p = ordered_a = 0
    for start in range(0, len(p), BLOCK):
        signs_p = _signs(p, start)
        signs_a = _signs(a, start)
        agree += int((signs_p * signs_a).sum(dtype=np.int64))
        ordered_p += int(np.count_nonzero(signs_p))
        ordered_a += int(np.count_nonzero(signs_a))
    return agree / (float(ordered_p) * float(ordered_a)) ** 0.5 if ordered_p and ordered_a else 0.0


def _signs(values: npt.NDArray[np.float64], start: int) -> npt.NDArray[np.int8]:
    """Order of some values against all: 1 above, -1 below, 0 equal."""
    rows = values[start : start + BLOCK, None]
    return (rows > values).astype(np.int8) - (rows < values).astype(np.int8)
