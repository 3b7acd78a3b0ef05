"""What a prompt's own answers say, put together with what was expected without them.

Normal distributions of the log of a length: an expectation with its variance, the mean of earlier answers to the
prompt, the mean of finished siblings, each weighed by how sure it is. The three variances are learned from surprises.
Pure arithmetic. Knows nothing of text.

- Without answers of its own, a prompt gets its expectation unchanged.
- The more siblings have finished, the less the expectation counts (shrinkage).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from busrl.scheduling.predictors.base import Candidate, Floats
from busrl.scheduling.predictors.table import PromptTable, key_of

LOOK_BACK = 400  # surprises that a variance is the mean of
AT_FIRST = 20  # surprises that the first guess of a variance is worth
LEAST = 0.02
OUTLIER = 2.5  # standard deviations; an answer that is further off counts as if it were so far off


class Variance:
    """Moving mean of squared surprises."""

    def __init__(self, guess: float) -> None:
        self.mean, self.seen = guess, float(AT_FIRST)

    def add(self, square: float, beside: float = 0.0) -> None:
        """A squared surprise, of which `beside` is expected from another cause."""
        self.seen = min(self.seen + 1, LOOK_BACK)
        bounded = min(square, OUTLIER**2 * (self.value + beside))
        self.mean += (bounded - beside - self.mean) / self.seen

    @property
    def value(self) -> float:
        return max(LEAST, self.mean)


class Evidence:
    """Own answers of prompts. Logs are relative to a level that the caller keeps."""

    def __init__(self, table: PromptTable) -> None:
        self.table = table
        self.answer = Variance(0.2)  # of one answer around its prompt
        self.expected = Variance(0.3)  # of a prompt around its expectation
        self.drift = Variance(0.1)  # of a prompt around its earlier answers

    def combine(self, candidates: Sequence[Candidate], keys: Sequence[int], expected: Floats) -> Floats:
        """The expectation, corrected by what is known of each prompt itself."""
        rows = self.table.rows(keys)
        if not (rows >= 0).any():
            return expected
        rows, known = np.maximum(rows, 0), rows >= 0
        draws = np.fromiter((c.draw for c in candidates), np.int64, len(candidates))
        same = known & (self.table.draw[rows] == draws)
        earlier = known & (self.table.draw[rows] < draws)  # then all its answers are earlier ones
        count, mean = self.table.overall(rows)
        own_count, own_mean = np.where(same, self.table.count[rows], 0.0), self.table.mean[rows]
        old_count = np.where(same, self.table.old_count[rows], np.where(earlier, count, 0.0))
        old_mean = np.where(same, self.table.old_mean[rows], mean)
        noise = self.answer.value
        own = own_count / noise
        old = np.where(old_count > 0, 1 / (self.drift.value + noise / np.maximum(old_count, 1)), 0.0)
        prior = 1 / self.expected.value
        # One answer may be an outlier; several that agree are none.
        far = OUTLIER * np.sqrt(self.expected.value + noise) * np.maximum(own_count, 1)
        surprise = np.clip(own_mean - expected, -far, far)
        together: Floats = expected + (own * surprise + old * (old_mean - expected)) / (prior + own + old)
        return together

    def add(self, candidate: Candidate, value: float) -> bool:
        """An answer; True if it is the first one of its draw."""
        table = self.table
        row = table.row(key_of(candidate))
        siblings = table.count[row] if table.draw[row] == candidate.draw else 0.0
        if siblings:
            self.answer.add((value - table.mean[row]) ** 2 * siblings / (siblings + 1))
        elif table.draw[row] < candidate.draw:
            self._learn_drift(row, value)
        newest = not siblings and candidate.draw > table.draw[row]
        table.add(row, candidate.draw, value)
        return bool(newest)

    def _learn_drift(self, row: int, value: float) -> None:
        count, mean = self.table.overall(np.array([row]))
        if count[0]:
            self.drift.add((value - float(mean[0])) ** 2, self.answer.value * (1 + 1 / float(count[0])))

    def surprised(self, surprises: Floats) -> None:
        """First answers of draws, minus what was expected of them."""
        noise = self.answer.value
        for square in (surprises**2).tolist():
            self.expected.add(square, noise)

    def state(self) -> dict[str, Any]:
        variances = {name: [v.mean, v.seen] for name, v in self._variances().items()}
        return {"table": self.table.state(), "variances": variances}

    def load(self, state: Mapping[str, Any]) -> None:
        for name, variance in self._variances().items():
            variance.mean, variance.seen = map(float, state["variances"][name])
            if not (math.isfinite(variance.mean) and variance.seen > 0):
                raise ValueError("a variance that is no number")
        self.table.load(state["table"])

    def _variances(self) -> dict[str, Variance]:
        return {"answer": self.answer, "expected": self.expected, "drift": self.drift}
