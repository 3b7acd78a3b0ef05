"""A switch on the mean entropy of the policy: ON below 0.9 sigma, OFF above 1.1 sigma, unchanged in between.

Pure. Decides when mastered tokens are left out of the loss (`experiments.dmmpt = "gate"`): always on, entropy rises
without end. Fed once per step with the entropy over all trained tokens, those left out included, so that it does not
measure its own doing. Knows nothing of losses.

- The entropy is smoothed with beta 0.9 and corrected for its start; the state is two numbers and a flag.
"""

from __future__ import annotations

import math
from typing import Any

BETA = 0.9
ON_BELOW, OFF_ABOVE = 0.9, 1.1  # of sigma


class EntropyGate:
    """`observe` each step's entropy in nats; `on` holds for the steps that follow."""

    def __init__(self, sigma: float) -> None:
        if not sigma > 0:
            raise ValueError(f"sigma = {sigma}: must be above 0 nats")
        self.sigma, self.on = sigma, False
        self._sum = self._weight = 0.0

    @property
    def entropy(self) -> float:
        """The smoothed entropy; NaN before the first step."""
        return self._sum / self._weight if self._weight else math.nan

    def observe(self, entropy: float) -> bool:
        """Take in a step; True if the switch moved. A number that is none changes nothing."""
        if not math.isfinite(entropy):
            return False
        self._sum = BETA * self._sum + (1 - BETA) * entropy
        self._weight = BETA * self._weight + (1 - BETA)
        before = self.on
        if self.entropy < ON_BELOW * self.sigma:
            self.on = True
        elif self.entropy > OFF_ABOVE * self.sigma:
            self.on = False
        return self.on != before

    def state(self) -> dict[str, Any]:
        """For a checkpoint."""
        return {"on": self.on, "sum": self._sum, "weight": self._weight}

    def load(self, state: dict[str, Any]) -> None:
        """The counterpart."""
        self.on, self._sum, self._weight = bool(state["on"]), float(state["sum"]), float(state["weight"])
