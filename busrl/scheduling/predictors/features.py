"""Hashed features of prompts: words, pairs of words, and a few counts, made for a whole batch at once.

Talks to nothing. One pass over the characters of all prompts in NumPy, so that a prompt costs microseconds. Works for
any script: an ideograph is a word of its own, digits are all alike. Knows nothing of lengths or models.

- A feature is (row, column, value); columns are hashes below `1 << bits`, the same in every process and version.
- A prompt's features depend on its text and tag alone; of a very long text the beginning and the end are looked at.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from busrl.scheduling.predictors.base import Candidate, Floats

Ints = npt.NDArray[np.int64]
Hashes = npt.NDArray[np.uint64]

HEAD, TAIL = 600, 200  # characters looked at
COUNTS = 6  # dense columns, see `_counts`
GAP, LETTER, DIGIT, IDEOGRAPH = 0, 1, 2, 3
BASE = 0x9E3779B97F4A7C15  # odd, so it has an inverse modulo 2^64
TAG = "\x01"  # begins a tag, so that it is no word of the text

# Code points from (a) to (b) and what they are; everything else above ASCII is a letter.
_RANGES = (
    (0x0, 0x30, GAP), (0x30, 0x3A, DIGIT), (0x3A, 0x41, GAP), (0x41, 0x5B, LETTER), (0x5B, 0x61, GAP),
    (0x61, 0x7B, LETTER), (0x7B, 0xAA, GAP), (0x2000, 0x2070, GAP), (0x2E80, 0x3000, IDEOGRAPH), (0x3000, 0x3040, GAP),
    (0x3040, 0xA000, IDEOGRAPH), (0xAC00, 0xD7B0, IDEOGRAPH), (0xF900, 0xFB00, IDEOGRAPH), (0xFE10, 0xFE70, GAP),
    (0xFF00, 0xFF10, GAP), (0xFF10, 0xFF1A, DIGIT), (0xFF1A, 0xFF21, GAP),
)  # fmt: skip
_KIND = np.full(1 << 16, LETTER, np.uint8)
for _low, _high, _kind in _RANGES:
    _KIND[_low:_high] = _kind
_KIND[1] = LETTER  # TAG


@dataclass(frozen=True)
class Features:
    """Of `rows` prompts: `row`, `column`, `value` per hashed feature (sorted by row), and `counts[rows, COUNTS]`."""

    rows: int
    row: Ints
    column: Ints
    value: Floats
    counts: Floats

    def times(self, weights: Floats) -> Floats:
        """Hashed features times one weight per column: a number per row."""
        return np.bincount(self.row, self.value * weights[self.column], self.rows).astype(np.float64, copy=False)

    def dense(self, size: int) -> npt.NDArray[np.float32]:
        """Unit vectors [rows, size] whose products are near those of the hashed features (signed hashing)."""
        mixed = _mix(self.column.astype(np.uint64) + np.uint64(1))
        place = (mixed % np.uint64(size)).astype(np.int64)
        sign = np.where(mixed >> np.uint64(63), 1.0, -1.0)
        flat = np.bincount(self.row * size + place, self.value * sign, self.rows * size).reshape(self.rows, size)
        norm = np.sqrt(np.einsum("ij,ij->i", flat, flat))
        unit: npt.NDArray[np.float32] = (flat / np.maximum(norm, 1e-9)[:, None]).astype(np.float32)
        return unit


def features(candidates: Sequence[Candidate], bits: int) -> Features:
    """The features of some prompts, in their order."""
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


@dataclass(frozen=True)
class _Words:
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
    """A hash per word from sums over all its characters' hashes by place in the word."""
    place = np.arange(len(codes), dtype=np.int64)
    word = np.searchsorted(first, place, side="right") - 1
    inside = np.where(word >= 0, place - first[word], 0).astype(np.uint64)
    each = _mix(codes.astype(np.uint64) * np.uint64(BASE) + inside)
    total = np.concatenate((np.zeros(1, np.uint64), np.cumsum(each, dtype=np.uint64)))
    return _mix(total[last] - total[first])


def _mix(x: Hashes) -> Hashes:
    """Spreads every bit over all bits (the finaliser of splitmix64)."""
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
    ))  # fmt: skip
