"""The learning rate of a step: warm-up counted in groups, coupled to the size of the step.

Pure; called by the learner. Knows nothing of the optimiser.

- Everything counts groups, not steps: with a trigger that may fire early a step has no fixed size.
- The coupling is sqrt(groups / n_min), the change that keeps the noise of Adam's update the same, within [0.5, 2].
"""

from __future__ import annotations

import math
from dataclasses import dataclass

COUPLING_LOW, COUPLING_HIGH = 0.5, 2.0


@dataclass(frozen=True)
class Schedule:
    """`lr` is for steps of `n_min` groups; `warmup_groups` = 0 starts at full size."""

    lr: float
    n_min: int
    warmup_groups: int = 0

    def __call__(self, trained: int, groups: int) -> float:
        """The rate of a step of `groups` groups after `trained` groups were trained before it."""
        return self.lr * self.warmup(trained + groups) * self.coupling(groups)

    def warmup(self, seen: int) -> float:
        """Rises in a line from 0, this step's groups included, so that the first step is not wasted."""
        return 1.0 if self.warmup_groups <= 0 else min(1.0, seen / self.warmup_groups)

    def coupling(self, groups: int) -> float:
        return min(max(math.sqrt(groups / self.n_min), COUPLING_LOW), COUPLING_HIGH)
