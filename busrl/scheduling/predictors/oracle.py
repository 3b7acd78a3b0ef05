"""`oracle`: knows the lengths beforehand. For simulations and for runs of the scripted engine only.

Is given a function from draws to the real lengths of their answers. Knows nothing of files; a run with a real model
has nothing to give it, and its topology is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from busrl.scheduling.predictors.base import Candidate, Finished, Floats, limited

LengthsOf = Callable[[int], Sequence[int]]


class OraclePredictor:
    """The mean length of a group's answers, each cut at the limit."""

    name = "oracle"

    def __init__(self, lengths_of: LengthsOf) -> None:
        self.lengths_of = lengths_of

    def predict(self, candidates: Sequence[Candidate]) -> Floats:
        means = (float(np.minimum(self.lengths_of(c.draw), c.max_new_tokens).mean()) for c in candidates)
        return limited(np.fromiter(means, np.float64, len(candidates)), candidates)

    def observe(self, finished: Sequence[Finished]) -> None:
        """It knows already."""

    def state(self) -> dict[str, Any]:
        return {}

    def load(self, state: Mapping[str, Any]) -> None:
        """There is nothing to take over."""
