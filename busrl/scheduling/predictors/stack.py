"""How much to trust each of several predictions: a linear mixture, fitted to how they did lately.

Pure arithmetic. Remembers what each source said of the last prompts before it learned from them; what came out is
given at each fit, since more answers of a prompt may have come. Knows nothing of what is predicted.

- Until there is data the first source is followed alone.
- No source counts negatively. Newer prompts weigh more, as the sources are learning themselves.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from busrl.scheduling.predictors.base import Floats

LOOK_BACK = 1024  # prompts
PENALTY = 8.0  # weight of the first guess, in prompts per unit of variance of a source


class Stack:
    """Mixes `sources` columns into one."""

    def __init__(self, sources: int) -> None:
        self.sources = sources
        self.said = np.zeros((0, sources))
        self.keys = np.zeros(0, np.int64)
        self.weights = self._guess()

    def _guess(self) -> Floats:
        guess = np.zeros(self.sources + 1)
        guess[0] = 1.0
        return guess

    def mix(self, inputs: Floats) -> Floats:
        """[n, sources] -> [n]."""
        mixed: Floats = inputs @ self.weights[:-1] + self.weights[-1]
        return mixed

    def remember(self, keys: Sequence[int], inputs: Floats) -> None:
        """What each source says of new prompts, [n, sources]."""
        self.keys = np.append(self.keys, np.array(keys, np.int64))[-LOOK_BACK:]
        self.said = np.vstack((self.said, inputs))[-LOOK_BACK:]

    def fit(self, real: Floats, sure: Floats, centre: float) -> None:
        """What came out for each of `keys`, and how sure that is, 0 to 1; all is seen from `centre`.

        Least squares near the first guess; a source that would count negatively is left out, the worst one first.
        """
        weight = sure * np.arange(1, len(sure) + 1) / max(1, len(sure)) * 2
        full = np.column_stack((self.said - centre, np.ones(len(real))))
        square, cross = full.T @ (full * weight[:, None]), full.T @ ((real - centre) * weight)
        used, guess = np.ones(self.sources + 1, np.bool_), self._guess()
        penalty = np.full(self.sources + 1, PENALTY)
        penalty[-1] = 1e-3
        while True:
            both = square[np.ix_(used, used)] + np.diag(penalty[used])
            weights = np.zeros(self.sources + 1)
            weights[used] = np.linalg.solve(both, cross[used] + penalty[used] * guess[used])
            worst = int(np.argmin(weights[:-1]))
            if weights[worst] >= 0:
                break
            used[worst] = False
        self.weights = weights

    def state(self) -> dict[str, Any]:
        return {"said": self.said.copy(), "keys": self.keys.copy(), "weights": self.weights.copy()}

    def load(self, state: Mapping[str, Any]) -> None:
        said, keys, weights = (np.array(state[name], np.float64) for name in ("said", "keys", "weights"))
        if said.shape != (len(keys), self.sources) or weights.shape != self.weights.shape or len(keys) > LOOK_BACK:
            raise ValueError("a mixture of other sources")
        if not (np.isfinite(said).all() and np.isfinite(weights).all()):
            raise ValueError("a mixture that is no number")
        self.said, self.keys, self.weights = said, np.array(state["keys"], np.int64), weights
