"""A linear model of hashed text features, kept at the optimum of a sliding window of prompts.

Ridge regression by conjugate gradients that start from the last solution, so a few products per round are enough:
as good as solving it anew, with no learning rate to choose. Pure NumPy. Knows nothing of text or tokens.

- Bounded: at most ROWS prompts and ENTRIES features; the oldest go.
- A prompt has one row, whatever the number of its answers; its target is the mean of those.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from busrl.scheduling.predictors.base import Floats
from busrl.scheduling.predictors.features import COUNTS, Features

BITS = 14
HASHED = 1 << BITS
ROWS, ENTRIES = 4096, 1 << 18
PENALTY = 30.0  # on hashed columns; measured from 1 to 100
ROUNDS = 3  # steps of conjugate gradients per fit
REFIT = 32  # fit again when the window has grown by 1 / REFIT of its entries
CENTRE = np.array([0.0, 3.5, 2.0, 1.0, 0.5, 0.0])  # of the counts: keeps the intercept apart from them


class Ridge:
    """Targets of prompts from their features."""

    def __init__(self) -> None:
        self.weights = np.zeros(HASHED + COUNTS)
        self.column, self.value = np.zeros(0, np.int32), np.zeros(0, np.float32)
        self.size = np.zeros(0, np.int32)  # entries per row
        self.counts = np.zeros((0, COUNTS), np.float32)
        self.keys = np.zeros(0, np.int64)
        self.answers, self.target = np.zeros(0), np.zeros(0)
        self.fresh = 0  # entries since the last fit
        self.offset = 0.0
        self._first = 0  # rows that have gone
        self._at: dict[int, int] = {}  # key -> row, counted from the first one ever

    def __len__(self) -> int:
        return len(self.keys)

    def predict(self, f: Features) -> Floats:
        """A target per row of `f`."""
        found: Floats = f.times(self.weights[:HASHED]) + (f.counts - CENTRE) @ self.weights[HASHED:] + self.offset
        return found

    def update(self, key: int, target: float) -> bool:
        """One more answer of a prompt; False if the prompt is not in the window."""
        row = self._at.get(key, -1) - self._first
        if row < 0:
            return False
        self.answers[row] += 1
        self.target[row] += (target - self.target[row]) / self.answers[row]
        return True

    def add(self, keys: Sequence[int], f: Features, targets: Floats, answers: Floats) -> None:
        """New prompts, their features, and the mean of so many answers each; fits when enough has come."""
        for place, key in enumerate(keys, self._first + len(self)):
            self._at[key] = place
        self.keys = np.append(self.keys, np.array(keys, np.int64))
        self.target, self.answers = np.append(self.target, targets), np.append(self.answers, answers)
        self.counts = np.vstack((self.counts, (f.counts - CENTRE).astype(np.float32)))
        self.size = np.append(self.size, np.bincount(f.row, minlength=f.rows).astype(np.int32))
        self.column = np.append(self.column, f.column.astype(np.int32))
        self.value = np.append(self.value, f.value.astype(np.float32))
        self.fresh += len(f.column) + f.rows
        self._forget()
        if self.fresh * REFIT >= len(self.column):
            self.fit()

    def _forget(self) -> None:
        """Let the oldest rows go until the window is within its bounds."""
        over, entries = max(0, len(self) - ROWS), len(self.column) - ENTRIES
        if entries > 0:
            over = max(over, int(np.searchsorted(np.cumsum(self.size), entries)) + 1)
        if not over:
            return
        for row, key in enumerate(self.keys[:over].tolist(), self._first):
            if self._at.get(key) == row:
                del self._at[key]
        gone = int(self.size[:over].sum())
        self.column, self.value = self.column[gone:], self.value[gone:]
        self.keys, self.size, self.counts = self.keys[over:], self.size[over:], self.counts[over:]
        self.target, self.answers = self.target[over:], self.answers[over:]
        self._first += over

    def fit(self) -> None:
        """Some rounds of conjugate gradients towards the optimum of the window, from where the weights are."""
        self.fresh = 0
        problem = _Problem(self)
        # Rows with more answers are surer: variance of a prompt plus that of an answer over their number.
        self.offset = float(np.average(self.target, weights=problem.sure))
        self.weights = problem.improved(self.weights, self.target - self.offset)

    def state(self) -> dict[str, Any]:
        names = ("weights", "column", "value", "size", "counts", "keys", "answers", "target")
        return {**{name: getattr(self, name) for name in names}, "fresh": self.fresh, "offset": self.offset}

    def load(self, state: Mapping[str, Any]) -> None:
        rows = len(state["keys"])
        if len(state["weights"]) != HASHED + COUNTS or int(np.sum(state["size"])) != len(state["column"]):
            raise ValueError("a ridge model of another shape")
        if not all(len(state[name]) == rows for name in ("size", "counts", "answers", "target")):
            raise ValueError("columns of different lengths")
        if not np.isfinite(state["weights"]).all() or not np.isfinite(state["target"]).all():
            raise ValueError("numbers that are not finite")
        if len(state["column"]) and not 0 <= np.min(state["column"]) <= np.max(state["column"]) < HASHED:
            raise ValueError("columns that there are not")
        for name in ("weights", "column", "value", "size", "counts", "keys", "answers", "target"):
            setattr(self, name, np.array(state[name], getattr(self, name).dtype))
        self.fresh, self.offset = int(state["fresh"]), float(state["offset"])
        self._first, self._at = 0, {key: row for row, key in enumerate(self.keys.tolist())}


class _Problem:
    """The normal equations of a window, as products only."""

    def __init__(self, of: Ridge) -> None:
        self.column = of.column.astype(np.int64)
        self.row = np.repeat(np.arange(len(of)), of.size)
        self.value = of.value.astype(np.float64)
        self.counts = of.counts.astype(np.float64)
        self.sure = 2 * of.answers / (of.answers + 1)
        self.penalty = np.full(HASHED + COUNTS, PENALTY)
        self.penalty[HASHED:] = 1.0
        squares = np.concatenate((
            np.bincount(self.column, self.value**2 * self.sure[self.row], HASHED), self.sure @ self.counts**2,
        ))  # fmt: skip
        self.inverse = 1 / (squares + self.penalty)  # Jacobi's preconditioner

    def forward(self, weights: Floats) -> Floats:
        """Predictions of all rows."""
        hashed = np.bincount(self.row, self.value * weights[self.column], len(self.counts))
        return hashed + self.counts @ weights[HASHED:]

    def back(self, errors: Floats) -> Floats:
        """Sums of errors per column."""
        errors = errors * self.sure
        hashed = np.bincount(self.column, self.value * errors[self.row], HASHED)
        return np.concatenate((hashed, self.counts.T @ errors))

    def improved(self, weights: Floats, targets: Floats) -> Floats:
        """`weights` after some rounds; they never get worse."""
        rest = self.back(targets - self.forward(weights)) - self.penalty * weights
        along = scaled = self.inverse * rest
        size = float(rest @ scaled)
        for _ in range(ROUNDS):
            if size <= 1e-12:
                break
            turned = self.back(self.forward(along)) + self.penalty * along
            step = size / float(along @ turned)
            weights = weights + step * along
            rest = rest - step * turned
            scaled = self.inverse * rest
            size, before = float(rest @ scaled), size
            along = scaled + (size / before) * along
        return weights
