"""Which prompts a measurement asks, and what it makes of their rewards: the same for a round of validation during a run
and for `busrl evaluate` after it.

Pure. Knows nothing of files, engines or rewards. The mark of a validation sample's uid stands here, since what is drawn
for a sample depends on its uid.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

VALIDATE_BIT = 1 << 62
SUBSET_SEED = 0  # runs that differ in run.seed are compared on the same prompts


def lines_of(samples: int, lines: int) -> npt.NDArray[np.int64]:
    """The line of the file that each sample of a round asks: one drawn from each of `samples` equal stretches of a
    longer file (the same for every round and seed of a run), a shorter file from its beginning, again and again."""
    places = np.arange(samples, dtype=np.int64)
    if samples >= lines:
        return places % lines
    edges = np.arange(samples + 1, dtype=np.int64) * lines // samples
    return np.random.Generator(np.random.PCG64(SUBSET_SEED)).integers(edges[:-1], edges[1:])


def mean_over_prompts(values: Mapping[int, float], asked: npt.NDArray[np.int64]) -> float:
    """The mean over prompts of the mean over each one's samples; `values` by a sample's place in the round. 0.0 without
    any."""
    of_prompt: dict[int, list[float]] = {}
    for place, value in values.items():
        of_prompt.setdefault(int(asked[place]), []).append(value)
    return float(np.mean([np.mean(found) for found in of_prompt.values()])) if of_prompt else 0.0


def standard_error(values: Mapping[int, float], asked: npt.NDArray[np.int64]) -> float | None:
    """Of that mean, as if the prompts had been drawn from many more; None with fewer than two of them."""
    of_prompt: dict[int, list[float]] = {}
    for place, value in values.items():
        of_prompt.setdefault(int(asked[place]), []).append(value)
    means = [np.mean(found) for found in of_prompt.values()]
    return float(np.std(means, ddof=1) / np.sqrt(len(means))) if len(means) > 1 else None
