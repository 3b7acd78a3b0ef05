"""Lengths as logarithms around a level that moves while the policy is trained.

Pure arithmetic. A length measured long ago is compared with one of today by its distance from the level of its time.

- The level is 0 until `SETTLED` answers were seen; then it is how far the mean has moved since.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

SETTLED = 1000  # answers; also how many the moving mean looks back


class Level:
    """Moving mean of the natural log of lengths."""

    def __init__(self) -> None:
        self.answers = 0
        self.mean = 0.0
        self._base = 0.0

    @property
    def value(self) -> float:
        """How far the mean of the log has moved."""
        return self.mean - self._base if self.answers > SETTLED else 0.0

    @property
    def typical(self) -> float:
        """Mean of the log, around the level: what a prompt has of which nothing is known."""
        return self.mean - self.value if self.answers else math.log(256)

    def relative(self, tokens: int) -> float:
        """Count an answer; its log, around the level."""
        log = math.log(max(1, tokens))
        self.answers += 1
        self.mean += (log - self.mean) / min(self.answers, SETTLED)
        if self.answers == SETTLED:
            self._base = self.mean
        return log - self.value

    def state(self) -> dict[str, Any]:
        return {"answers": self.answers, "mean": self.mean, "base": self._base}

    def load(self, state: Mapping[str, Any]) -> None:
        if not (math.isfinite(state["mean"]) and math.isfinite(state["base"])):
            raise ValueError("a level that is no number")
        self.answers, self.mean, self._base = int(state["answers"]), float(state["mean"]), float(state["base"])
