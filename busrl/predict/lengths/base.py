"""Parts that length predictors share: a table of prompts, levels and evidence, and a predictor that knows the lengths.

Implements the protocol of `busrl.scheduling.predictor`. A prediction is in tokens, but only its order matters: judge a
predictor by Kendall's tau, not by its error. Knows nothing of groups' fates, ages or the use of the number.

- The same observations in the same order give the same predictor, also through `state` and `load`.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from busrl.scheduling.predictor import Candidate, Floats, Predictor

Ints = npt.NDArray[np.int64]


def limited(tokens: Floats, candidates: Sequence[Candidate]) -> Floats:
    """`tokens` kept within 1 and the limit of each candidate."""
    limit = np.fromiter((c.max_new_tokens for c in candidates), np.float64, len(candidates))
    return np.clip(tokens, 1.0, np.maximum(1.0, limit))


# -- state ---------------------------------------------------------------------------------------------------


class Kept:
    """A learner whose state is the attributes that `KEPT` names: arrays and numbers."""

    KEPT: ClassVar[tuple[str, ...]] = ()

    def state(self) -> dict[str, Any]:
        return {name: copy(getattr(self, name)) for name in self.KEPT}

    def load(self, state: Mapping[str, Any]) -> None:
        """Continue from a `state`; ValueError for other shapes and for numbers that are not finite."""
        self.__dict__.update(self._read(state))

    def _read(self, state: Mapping[str, Any]) -> dict[str, Any]:
        values = {}
        for name in self.KEPT:
            present = np.asarray(getattr(self, name))
            value = np.array(state[name], present.dtype)
            if value.ndim != present.ndim or value.shape[1:] != present.shape[1:] or not np.isfinite(value).all():
                raise ValueError(f"{name} of a {type(self).__name__}: another shape, or not finite")
            values[name] = value if present.ndim else value.item()
        if not self._fits(values):
            raise ValueError(f"not the state of a {type(self).__name__}: sizes do not match")
        return values

    def _fits(self, values: Mapping[str, Any]) -> bool:
        return True


class Table(Kept):
    """Columns (arrays named in `KEPT`) of `capacity` rows, one per key in column `KEYS`; when all are used, the oldest
    row goes. `PLACE`: the name of the next row's number in the state."""

    KEYS: ClassVar[str]
    PLACE: ClassVar[str]

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._next = 0
        self._row: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._row)

    def rows(self, keys: Sequence[int]) -> Ints:
        """The row of each key, -1 where there is none."""
        find = self._row.get
        return np.fromiter((find(key, -1) for key in keys), np.int64, len(keys))

    def new(self, key: int) -> int:
        """A row of zeros for a key that has none."""
        row, keys = self._next, getattr(self, self.KEYS)
        if len(self) == self.capacity:
            del self._row[int(keys[row])]
        for name in self.KEPT:
            getattr(self, name)[row] = 0
        keys[row], self._row[key] = key, row
        self._next = (row + 1) % self.capacity
        return row

    def state(self) -> dict[str, Any]:
        return {**{name: getattr(self, name)[: len(self)].copy() for name in self.KEPT}, self.PLACE: self._next}

    def load(self, state: Mapping[str, Any]) -> None:
        columns, place = self._read(state), int(state[self.PLACE])
        used = len(columns[self.KEYS])
        if not 0 <= place <= used:
            raise ValueError(f"{self.PLACE} = {place} lies outside of the table")
        for name, column in columns.items():
            getattr(self, name)[:used] = column
        self._next = (place if used == self.capacity else used) % self.capacity
        self._row = {key: row for row, key in enumerate(columns[self.KEYS].tolist())}

    def _fits(self, columns: Mapping[str, Any]) -> bool:
        sizes = {len(column) for column in columns.values()}
        return len(sizes) == 1 and max(sizes) <= self.capacity


# -- prompts -------------------------------------------------------------------------------------------------

MEMORY = 16.0


def key_of(candidate: Candidate) -> int:
    """64 bits that name a prompt and its tag, the same in every process."""
    text = f"{candidate.prompt}\0{candidate.tag}".encode("utf-8", "surrogatepass")
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little", signed=True)


class PromptTable(Table):
    """Running means by prompt.

    The answers of a prompt's newest draw are siblings, and counted apart from earlier answers. Of the earlier ones
    about the newest `MEMORY` count, so that the mean follows a prompt whose answers grow. `count` and `mean` are of the
    newest draw, `old_count` and `old_mean` of the draws before.
    """

    KEPT = ("key", "draw", "count", "mean", "old_count", "old_mean")
    KEYS, PLACE = "key", "oldest"

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self.key, self.draw = np.zeros((2, capacity), np.int64)
        self.count, self.mean, self.old_count, self.old_mean = np.zeros((4, capacity))

    def row(self, key: int) -> int:
        row = self._row.get(key, -1)
        if row < 0:
            row = self.new(key)
            self.draw[row] = -1
        return row

    def add(self, row: int, draw: int, value: float) -> None:
        if draw < self.draw[row]:  # a straggler of an earlier draw
            self._add_old(row, 1.0, value)
            return
        if draw > self.draw[row]:
            self._add_old(row, self.count[row], self.mean[row])
            self.draw[row], self.count[row], self.mean[row] = draw, 0.0, 0.0
        self.count[row] += 1
        self.mean[row] += (value - self.mean[row]) / self.count[row]

    def overall(self, rows: Ints) -> tuple[Floats, Floats]:
        """Count and mean of all answers of some rows."""
        count = self.count[rows] + self.old_count[rows]
        total = self.count[rows] * self.mean[rows] + self.old_count[rows] * self.old_mean[rows]
        return count, total / np.maximum(count, 1e-9)

    def _add_old(self, row: int, count: float, mean: float) -> None:
        if count > 0:
            remembered = min(self.old_count[row], max(0.0, MEMORY - count))
            self.old_mean[row] = (remembered * self.old_mean[row] + count * mean) / (remembered + count)
            self.old_count[row] = remembered + count

    def state(self) -> dict[str, Any]:
        return {**super().state(), "oldest": self._next if len(self) == self.capacity else 0}


# -- level ---------------------------------------------------------------------------------------------------

SETTLED = 1000  # answers; also how many the moving mean looks back


class Level(Kept):
    """Moving mean of the natural log of lengths, so that a length of long ago compares with one of today.

    The level is 0 until `SETTLED` answers were seen; then it is how far the mean has moved since.
    """

    KEPT = ("answers", "mean", "base")

    def __init__(self) -> None:
        self.answers, self.mean, self.base = 0, 0.0, 0.0

    @property
    def value(self) -> float:
        """The distance by which the mean of the log has moved."""
        return self.mean - self.base if self.answers > SETTLED else 0.0

    @property
    def typical(self) -> float:
        """The mean of the log, around the level: the expectation for a prompt without any evidence."""
        return self.mean - self.value if self.answers else math.log(256)

    def relative(self, tokens: int) -> float:
        """Count an answer; returns the log of its length, around the level."""
        log = math.log(max(1, tokens))
        self.answers += 1
        self.mean += (log - self.mean) / min(self.answers, SETTLED)
        if self.answers == SETTLED:
            self.base = self.mean
        return log - self.value


# -- evidence ------------------------------------------------------------------------------------------------

LOOK_BACK = 400  # surprises in the mean of a variance
AT_FIRST = 20  # surprises; the weight of the first guess of a variance
LEAST = 0.02
OUTLIER = 2.5  # standard deviations; a larger surprise counts as this one


class Variance:
    """Moving mean of squared surprises."""

    def __init__(self, guess: float) -> None:
        self.mean, self.seen = guess, float(AT_FIRST)

    def add(self, square: float, beside: float = 0.0) -> None:
        """Count a squared surprise, of which `beside` is the expected share of another cause."""
        self.seen = min(self.seen + 1, LOOK_BACK)
        bounded = min(square, OUTLIER**2 * (self.value + beside))
        self.mean += (bounded - beside - self.mean) / self.seen

    @property
    def value(self) -> float:
        return max(LEAST, self.mean)


class Evidence(Kept):
    """The evidence of a prompt's own answers, combined with the expectation without them.

    Three normal distributions of the log of a length (relative to a level that the caller keeps): the expectation, the
    mean of earlier answers to the prompt, and the mean of finished siblings, each weighted by its inverse variance. The
    three variances are learned from surprises. Without answers of its own a prompt gets its expectation unchanged; the
    more siblings have finished, the less the expectation counts (shrinkage).
    """

    def __init__(self, table: PromptTable) -> None:
        self.table = table
        self.answer = Variance(0.2)  # of one answer around its prompt
        self.expected = Variance(0.3)  # of a prompt around its expectation
        self.drift = Variance(0.1)  # of a prompt around its earlier answers
        self.variances = {"answer": self.answer, "expected": self.expected, "drift": self.drift}

    def combine(self, candidates: Sequence[Candidate], keys: Sequence[int], expected: Floats) -> Floats:
        """The expectation, corrected by the answers to each prompt itself."""
        rows = self.table.rows(keys)
        if not (rows >= 0).any():
            return expected
        rows, present = np.maximum(rows, 0), rows >= 0
        draws = np.fromiter((c.draw for c in candidates), np.int64, len(candidates))
        same = present & (self.table.draw[rows] == draws)
        earlier = present & (self.table.draw[rows] < draws)  # then all its answers are earlier ones
        count, mean = self.table.overall(rows)
        own_count, own_mean = np.where(same, self.table.count[rows], 0.0), self.table.mean[rows]
        old_count = np.where(same, self.table.old_count[rows], np.where(earlier, count, 0.0))
        old_mean = np.where(same, self.table.old_mean[rows], mean)
        noise = self.answer.value
        of_siblings = own_count / noise
        of_earlier = np.where(old_count > 0, 1 / (self.drift.value + noise / np.maximum(old_count, 1)), 0.0)
        prior = 1 / self.expected.value
        # One answer may be an outlier; several answers that agree are not.
        far = OUTLIER * np.sqrt(self.expected.value + noise) * np.maximum(own_count, 1)
        surprise = np.clip(own_mean - expected, -far, far)
        weighted = of_siblings * surprise + of_earlier * (old_mean - expected)
        together: Floats = expected + weighted / (prior + of_siblings + of_earlier)
        return together

    def add(self, candidate: Candidate, value: float) -> bool:
        """Count an answer; True if it is the first of its draw."""
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
        """Learn from the first answers of draws, minus their expectations."""
        noise = self.answer.value
        for square in (surprises**2).tolist():
            self.expected.add(square, noise)

    def state(self) -> dict[str, Any]:
        variances = {name: [v.mean, v.seen] for name, v in self.variances.items()}
        return {"table": self.table.state(), "variances": variances}

    def load(self, state: Mapping[str, Any]) -> None:
        for name, variance in self.variances.items():
            variance.mean, variance.seen = map(float, state["variances"][name])
            if not (math.isfinite(variance.mean) and variance.seen > 0):
                raise ValueError("a variance that is no number")
        self.table.load(state["table"])


# -- oracle --------------------------------------------------------------------------------------------------

LengthsOf = Callable[[int], Sequence[int]]


class OraclePredictor(Predictor):
    """The mean length of a group's answers, each cut at the limit, which `lengths_of` gives beforehand.

    For simulations and runs of the scripted engine only; the topology of a run with a real model is refused.
    """

    name = "oracle"

    def __init__(self, lengths_of: LengthsOf) -> None:
        self.lengths_of = lengths_of

    def predict(self, candidates: Sequence[Candidate]) -> Floats:
        means = (float(np.minimum(self.lengths_of(c.draw), c.max_new_tokens).mean()) for c in candidates)
        return limited(np.fromiter(means, np.float64, len(candidates)), candidates)
