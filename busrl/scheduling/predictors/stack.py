"""How much to trust each of several predictions: a linear mixture, fitted to how they did lately.

Pure arithmetic. Knows nothing of what is predicted.

- Until there is data the first source is followed alone.
- No source counts negatively. Old surprises fade.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from busrl.scheduling.predictors.base import Floats

LOOK_BACK = 2000  # prompts; at first the newer half of all, since the sources are still learning themselves
PENALTY = 2.0  # weight of the first guess, in prompts per unit of variance of a source


class Stack:
    """Mixes `sources` columns into one."""

    def __init__(self, sources: int) -> None:
        self.sources = sources
        self.square = np.zeros((sources + 1, sources + 1))
        self.cross = np.zeros(sources + 1)
        self.seen = 0
        self.weights = self._guess()

    def _guess(self) -> Floats:
        guess = np.zeros(self.sources + 1)
        guess[0] = 1.0
        return guess

    def mix(self, inputs: Floats) -> Floats:
        """[n, sources] -> [n]."""
        mixed: Floats = inputs @ self.weights[:-1] + self.weights[-1]
        return mixed

    def learn(self, inputs: Floats, real: Floats) -> None:
        """What each source had said, [n, sources], and what came out, [n]."""
        full = np.column_stack((inputs, np.ones(len(inputs))))
        self.seen = min(self.seen + len(inputs), LOOK_BACK)
        keep = max(0.0, 1 - 2 * len(inputs) / self.seen)
        self.square = keep * self.square + full.T @ full
        self.cross = keep * self.cross + full.T @ real
        self._solve()

    def _solve(self) -> None:
        """Least squares near the guess; a source that would count negatively is left out, the worst one first."""
        used, guess = np.ones(self.sources + 1, np.bool_), self._guess()
        penalty = np.full(self.sources + 1, PENALTY)
        penalty[-1] = 1e-3
        while True:
            square = self.square[np.ix_(used, used)] + np.diag(penalty[used])
            found = np.linalg.solve(square, self.cross[used] + penalty[used] * guess[used])
            weights = np.zeros(self.sources + 1)
            weights[used] = found
            worst = int(np.argmin(weights[:-1]))
            if weights[worst] >= 0:
                break
            used[worst] = False
        self.weights = weights

    def state(self) -> dict[str, Any]:
        return {"square": self.square.copy(), "cross": self.cross.copy(), "seen": self.seen}

    def load(self, state: Mapping[str, Any]) -> None:
        square, cross = np.array(state["square"], np.float64), np.array(state["cross"], np.float64)
        if square.shape != self.square.shape or cross.shape != self.cross.shape or not np.isfinite(square).all():
            raise ValueError("a mixture of other sources")
        self.square, self.cross, self.seen = square, cross, int(state["seen"])
        self._solve()
