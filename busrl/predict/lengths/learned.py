"""`learned`: lengths from the text alone, by a linear model of hashed features that is fitted as answers come.

Knows nothing of siblings. It ranks better and learns sooner than scikit-learn's online linear models and LightGBM
(docs/predictors.md). `Learning` is the base of all predictors that learn online.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from busrl.predict.lengths.base import Ints, Kept, Level, limited
from busrl.scheduling.predictor import Candidate, Floats, Observation, Predictor

# -- features of the text ------------------------------------------------------------------------------------

Hashes = npt.NDArray[np.uint64]

HEAD, TAIL = 600, 200  # characters that features come from
COUNTS = 6  # dense columns, see `_counts`
GAP, LETTER, DIGIT, IDEOGRAPH = 0, 1, 2, 3
BASE = 0x9E3779B97F4A7C15  # odd, so it has an inverse modulo 2^64
TAG = "\x01"  # begins a tag, so that a tag differs from every word of a text

# Ranges of code points, and their kinds; everything else above ASCII is a letter.
_RANGES = (
    (0x0, 0x30, GAP), (0x30, 0x3A, DIGIT), (0x3A, 0x41, GAP), (0x41, 0x5B, LETTER), (0x5B, 0x61, GAP),
    (0x61, 0x7B, LETTER), (0x7B, 0xAA, GAP), (0x2000, 0x2070, GAP), (0x2E80, 0x3000, IDEOGRAPH), (0x3000, 0x3040, GAP),
    (0x3040, 0xA000, IDEOGRAPH), (0xAC00, 0xD7B0, IDEOGRAPH), (0xF900, 0xFB00, IDEOGRAPH), (0xFE10, 0xFE70, GAP),
    (0xFF00, 0xFF10, GAP), (0xFF10, 0xFF1A, DIGIT), (0xFF1A, 0xFF21, GAP),
)
_KIND = np.full(1 << 16, LETTER, np.uint8)
for _low, _high, _kind in _RANGES:
    _KIND[_low:_high] = _kind
_KIND[1] = LETTER  # TAG


@dataclass(frozen=True)
class Features:
    """Features of `rows` prompts: `row`, `column`, `value` per hashed feature (sorted by row), and `counts[rows,
    COUNTS]`."""

    rows: int
    row: Ints
    column: Ints
    value: Floats
    counts: Floats

    def times(self, weights: Floats) -> Floats:
        """The product of the hashed features with a weight per column: a number per row."""
        return np.bincount(self.row, self.value * weights[self.column], self.rows).astype(np.float64, copy=False)

    def dense(self, size: int) -> npt.NDArray[np.float32]:
        """Unit vectors [rows, size] whose dot products approximate those of the hashed features (signed hashing)."""
        mixed = _mix(self.column.astype(np.uint64) + np.uint64(1))
        place = (mixed % np.uint64(size)).astype(np.int64)
        sign = np.where(mixed >> np.uint64(63), 1.0, -1.0)
        flat = np.bincount(self.row * size + place, self.value * sign, self.rows * size).reshape(self.rows, size)
        norm = np.sqrt(np.einsum("ij,ij->i", flat, flat))
        unit: npt.NDArray[np.float32] = (flat / np.maximum(norm, 1e-9)[:, None]).astype(np.float32)
        return unit


def features(candidates: Sequence[Candidate], bits: int) -> Features:
    """The features of some prompts, in their order: hashed words, pairs of words, and a few counts.

    One pass over the characters of all prompts, so that a prompt costs microseconds. Works for any script: an ideograph
    is a word of its own, and all digits are equal. Columns are hashes below `1 << bits`, the same in every process and
    version. A prompt's features depend on its text and tag alone; those of a very long text on both its ends.
    """
    rows = len(candidates)
    if not rows:
        none = np.zeros(0, np.int64)
        return Features(0, none, none, np.zeros(0), np.zeros((0, COUNTS)))
    words = _words([_text(c) for c in candidates])
    pairs = words.row[1:] == words.row[:-1]
    row = np.concatenate((words.row, words.row[1:][pairs]))
    hashes = np.concatenate((words.hash, _mix(words.hash[:-1] * np.uint64(BASE) + words.hash[1:])[pairs]))
    column = (hashes >> np.uint64(64 - bits)).astype(np.int64)
    both, times = np.unique((row << bits) | column, return_counts=True)
    return Features(rows, both >> bits, both & ((1 << bits) - 1), np.log2(1.0 + times), _counts(words, rows))


def _text(candidate: Candidate) -> str:
    text = candidate.prompt
    if len(text) > HEAD + TAIL:
        text = f"{text[:HEAD]} {text[-TAIL:]}"
    return f"{text.lower()} {TAG}{candidate.tag} \n"


class _Words(NamedTuple):
    """Words of all texts in their order: which text, hash, kind; and characters per text."""

    row: Ints
    hash: Hashes
    kind: npt.NDArray[np.uint8]
    characters: Ints


def _words(texts: Sequence[str]) -> _Words:
    sizes = np.fromiter(map(len, texts), np.int64, len(texts))
    codes = np.frombuffer("".join(texts).encode("utf-32-le", "surrogatepass"), np.uint32)
    kind = np.where(codes < 1 << 16, _KIND[codes & 0xFFFF], np.uint8(IDEOGRAPH))
    codes = np.where(kind == DIGIT, np.uint32(0x30), codes)
    begins = np.ones(len(codes), np.bool_)
    begins[1:] = (kind[1:] != kind[:-1]) | (kind[1:] == IDEOGRAPH)
    first = np.flatnonzero(begins)
    last = np.append(first[1:], len(codes))
    keep = kind[first] != GAP
    first, last = first[keep], last[keep]
    row = np.searchsorted(np.cumsum(sizes), first, side="right")
    return _Words(row, _hash(codes, first, last), kind[first], sizes)


def _hash(codes: npt.NDArray[np.uint32], first: Ints, last: Ints) -> Hashes:
    """A hash per word: the sum of the hashes of its characters, each with its place in the word."""
    place = np.arange(len(codes), dtype=np.int64)
    word = np.searchsorted(first, place, side="right") - 1
    inside = np.where(word >= 0, place - first[word], 0).astype(np.uint64)
    each = _mix(codes.astype(np.uint64) * np.uint64(BASE) + inside)
    total = np.concatenate((np.zeros(1, np.uint64), np.cumsum(each, dtype=np.uint64)))
    return _mix(total[last] - total[first])


def _mix(x: Hashes) -> Hashes:
    """Spread every bit over all bits (the finaliser of splitmix64)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: Hashes = x ^ (x >> np.uint64(31))
    return mixed


def _counts(words: _Words, rows: int) -> Floats:
    """1, log characters, log words, log numbers, numbers (bounded), share of ideographs among the words."""
    count = np.bincount(words.row, minlength=rows).astype(np.float64)
    numbers = np.bincount(words.row, words.kind == DIGIT, rows)
    ideographs = np.bincount(words.row, words.kind == IDEOGRAPH, rows)
    return np.column_stack((
        np.ones(rows), np.log1p(words.characters), np.log1p(count), np.log1p(numbers), np.minimum(numbers, 32) / 8,
        ideographs / np.maximum(count, 1),
    ))


# -- the linear model ----------------------------------------------------------------------------------------

BITS = 14
HASHED = 1 << BITS
ROWS, ENTRIES = 4096, 1 << 18
PENALTY = 30.0  # on hashed columns; measured from 1 to 100
ROUNDS = 3  # steps of conjugate gradients per fit
REFIT = 32  # fit again when the window has grown by 1 / REFIT of its entries
CENTRE = np.array([0.0, 3.5, 2.0, 1.0, 0.5, 0.0])  # of the counts, so that the intercept hardly depends on them


class Ridge(Kept):
    """A linear model of hashed text features, kept at the optimum of a sliding window of prompts.

    Ridge regression by conjugate gradients from the last solution: a few products per fit are as good as an exact
    solution, and need no learning rate. At most ROWS prompts and ENTRIES features; the oldest go. A prompt has one row,
    whatever the number of its answers; its target is their mean.
    """

    ROWS = ("size", "counts", "keys", "answers", "target")
    KEPT = ("weights", "column", "value", *ROWS, "fresh", "offset")

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
        logs: Floats = f.times(self.weights[:HASHED]) + (f.counts - CENTRE) @ self.weights[HASHED:] + self.offset
        return logs

    def update(self, key: int, target: float) -> bool:
        """Learn from one more answer of a prompt; False if the prompt is not in the window."""
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
        for name in self.ROWS:
            setattr(self, name, getattr(self, name)[over:])
        self._first += over

    def fit(self) -> None:
        """Improve the weights by ROUNDS rounds of conjugate gradients towards the optimum of the window."""
        self.fresh = 0
        problem = _Problem(self)
        # Rows with more answers count more: their variance is a prompt's, plus an answer's over the number of answers.
        self.offset = float(np.average(self.target, weights=problem.sure))
        self.weights = problem.improved(self.weights, self.target - self.offset)

    def load(self, state: Mapping[str, Any]) -> None:
        super().load(state)
        self._first, self._at = 0, {key: row for row, key in enumerate(self.keys.tolist())}

    def _fits(self, values: Mapping[str, Any]) -> bool:
        column, size = values["column"], values["size"]
        return (
            len(values["weights"]) == HASHED + COUNTS
            and len(column) == len(values["value"]) == size.sum()
            and len({len(values[name]) for name in self.ROWS}) == 1
            and not np.any((column < 0) | (column >= HASHED))
        )


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
        ))
        self.inverse = 1 / (squares + self.penalty)  # Jacobi's preconditioner

    def forward(self, weights: Floats) -> Floats:
        hashed = np.bincount(self.row, self.value * weights[self.column], len(self.counts))
        return hashed + self.counts @ weights[HASHED:]

    def back(self, errors: Floats) -> Floats:
        """The sum of the weighted errors per column."""
        errors = errors * self.sure
        hashed = np.bincount(self.column, self.value * errors[self.row], HASHED)
        return np.concatenate((hashed, self.counts.T @ errors))

    def improved(self, weights: Floats, targets: Floats) -> Floats:
        """`weights` after at most ROUNDS rounds; the error never grows."""
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


# -- learning online -----------------------------------------------------------------------------------------

WORTH = 16
HIGHEST_LOG = 40.0


@dataclass
class Fresh:
    """A prompt whose text is not learned yet: its first answer, and the mean of all so far (logs)."""

    candidate: Candidate
    first: float
    mean: float
    answers: int = 1

    def add(self, value: float) -> None:
        self.answers += 1
        self.mean += (value - self.mean) / self.answers


class Learning(Predictor, ABC):
    """The base of predictors that learn online, from logs of lengths: twice the length is as wrong as half of it.

    An answer counts at once for its prompt. The texts of new prompts are learned in batches of `WORTH` (at the start
    smaller), since a batch costs hardly more than one prompt. Predicting changes nothing.
    """

    name = ""

    def __init__(self) -> None:
        self.level = Level()
        self.prompts = 0  # prompts whose text was learned
        self.parts: Mapping[str, Kept] = {}  # of a subclass, by name in the state
        self._fresh: dict[int, Fresh] = {}  # by draw

    def predict(self, candidates: Sequence[Candidate]) -> Floats:
        if not candidates:
            return np.zeros(0)
        logs = self._expect(candidates) + self.level.value
        return limited(np.exp(np.minimum(logs, HIGHEST_LOG)), candidates)

    def observe(self, finished: Sequence[Observation]) -> None:
        for candidate, tokens in finished:
            value = self.level.relative(tokens)
            learned = self._answer(candidate, value)
            waiting = self._fresh.get(candidate.draw)
            if waiting is not None:
                waiting.add(value)
            elif not learned:
                self._fresh[candidate.draw] = Fresh(candidate, value, value)
        if self._fresh and len(self._fresh) >= min(WORTH, 1 + self.prompts // 4):
            fresh, self._fresh = list(self._fresh.values()), {}
            self.prompts += len(fresh)
            self._learn(fresh)

    def state(self) -> dict[str, Any]:
        parts = {name: part.state() for name, part in self.parts.items()}
        waiting = [asdict(prompt) for prompt in self._fresh.values()]
        return {"level": self.level.state(), "prompts": self.prompts, "fresh": waiting, **parts}

    def load(self, state: Mapping[str, Any]) -> None:
        other = deepcopy(self)  # so that a state that does not fit changes nothing
        other.level.load(state["level"])
        other.prompts, other._fresh = int(state["prompts"]), {}
        for entry in state["fresh"]:
            fresh = Fresh(**{**entry, "candidate": Candidate(**entry["candidate"])})
            other._fresh[fresh.candidate.draw] = fresh
        for name, part in other.parts.items():
            part.load(state[name])
        self.__dict__.update(other.__dict__)

    @abstractmethod
    def _expect(self, candidates: Sequence[Candidate]) -> Floats:
        """Logs of lengths, around the level."""

    @abstractmethod
    def _answer(self, candidate: Candidate, value: float) -> bool:
        """Count an answer, as a log around the level; False if the text of its prompt is not learned yet."""

    @abstractmethod
    def _learn(self, fresh: Sequence[Fresh]) -> None:
        """Learn the texts of new prompts."""


class LearnedPredictor(Learning):
    """The predictor `learned`: length from the text alone."""

    name = "learned"

    def __init__(self) -> None:
        super().__init__()
        self.ridge = Ridge()
        self.parts = {"ridge": self.ridge}

    def _expect(self, candidates: Sequence[Candidate]) -> Floats:
        if not len(self.ridge):
            return np.full(len(candidates), self.level.typical)
        return self.ridge.predict(features(candidates, BITS))

    def _answer(self, candidate: Candidate, value: float) -> bool:
        return self.ridge.update(candidate.draw, value)

    def _learn(self, fresh: Sequence[Fresh]) -> None:
        add_to(self.ridge, fresh, features([prompt.candidate for prompt in fresh], BITS))


def add_to(ridge: Ridge, fresh: Sequence[Fresh], f: Features) -> None:
    """Add the rows of new prompts with their features `f`."""
    draws, means = [prompt.candidate.draw for prompt in fresh], np.array([prompt.mean for prompt in fresh])
    ridge.add(draws, f, means, np.array([prompt.answers for prompt in fresh], np.float64))
