"""The learning rate of a step: warm-up, decay, and how it follows the number of groups in the step. Pure.

Used by the learner. Knows nothing of optimisers, models or clocks.

- All is counted in groups: with a trigger that may fire early a step has no fixed size.
- The coupling to that size is sqrt(groups / n_min) within [0.5, 2], which keeps the noise of Adam's update the same.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

COUPLING_LOW, COUPLING_HIGH = 0.5, 2.0


@dataclass(frozen=True)
class Schedule:
    """`lr` for steps of `n_min` groups, times warm-up, decay and coupling."""

    lr: float
    n_min: int
    warmup_groups: int = 0
    decay: str = "none"
    decay_groups: int = 0  # from the end of the warm-up on
    decay_to: float = 0.0  # a share of `lr`

    def __call__(self, trained: int, groups: int) -> float:
        """The rate of a step of `groups` groups after `trained` groups were trained before it."""
        return self.lr * self.warmup(trained + groups) * self.left(trained) * self.coupling(groups)

    def warmup(self, seen: int) -> float:
        """Rises in a line from 0, this step's groups included, so that the first step is not wasted."""
        return 1.0 if self.warmup_groups <= 0 else min(1.0, seen / self.warmup_groups)

    def left(self, seen: int) -> float:
        """Falls from 1 to decay_to over decay_groups groups and stays there; what this step adds is not counted."""
        if self.decay == "none" or self.decay_groups <= 0:
            return 1.0
        done = min(max(seen - self.warmup_groups, 0) / self.decay_groups, 1.0)
        shape = 1.0 - done if self.decay == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
        return self.decay_to + (1.0 - self.decay_to) * shape

    def coupling(self, groups: int) -> float:
        return min(max(math.sqrt(groups / self.n_min), COUPLING_LOW), COUPLING_HIGH)
