"""`history`: finished siblings, the same prompt before, and prompts with a near text.

Near prompts say what to expect of one that has no answers yet; its own answers then correct that, siblings most. Knows
nothing of models of text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from busrl.scheduling.lengths.base import Candidate, Evidence, Floats, Ints, PromptTable, Table, key_of
from busrl.scheduling.lengths.learned import BITS, Features, Fresh, Learning, features

DIMENSIONS = 64
SQUARINGS = 4  # similarity to the power of 2^4
LEAST = 1e-12  # weight below which nothing is near


class Neighbours(Table):
    """Prompts whose text is near: an index of at most `capacity` unit vectors (the oldest go) over a table of prompts.

    Every vector is compared (one matrix product for a whole batch); a neighbour weighs its similarity to the power of
    16, so only near ones count. A prompt is no neighbour of itself. `known`: its row in the table of prompts.
    """

    KEPT = ("vectors", "keys")
    KEYS, PLACE = "keys", "next"

    def __init__(self, table: PromptTable, capacity: int) -> None:
        super().__init__(capacity)
        self.table = table
        self.vectors = np.zeros((capacity, DIMENSIONS), np.float32)
        self.keys, self.known = np.zeros((2, capacity), np.int64)

    def add(self, keys: Sequence[int], rows: Ints, f: Features) -> None:
        """Prompts with their rows in the table; one that is known already stays where it is."""
        vectors = f.dense(DIMENSIONS)
        for i, key in enumerate(keys):
            if key not in self._row:
                row = self.new(key)
                self.vectors[row], self.known[row] = vectors[i], rows[i]

    def predict(self, f: Features, keys: Sequence[int], typical: float) -> Floats:
        """Weighted mean per row of `f`; `typical` where nothing is near."""
        used = len(self)
        if not used:
            return np.full(f.rows, typical)
        weights = f.dense(DIMENSIONS) @ self.vectors[:used].T
        np.maximum(weights, 0, out=weights)
        for _ in range(SQUARINGS):
            np.multiply(weights, weights, out=weights)
        own = self.rows(keys)
        weights[np.flatnonzero(own >= 0), own[own >= 0]] = 0
        value, sure = self._values(used, typical)
        total = weights @ sure
        found = (weights @ (sure * value)) / np.maximum(total, LEAST)
        return typical + np.where(total > LEAST, found, 0.0).astype(np.float64)

    def _values(self, used: int, typical: float) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
        """Of each neighbour: the mean of its answers (around `typical`), and how sure that is, 0 to 1."""
        rows = self.known[:used]
        count, mean = self.table.overall(rows)
        sure = np.where(self.table.key[rows] == self.keys[:used], count / (count + 1), 0.0)
        return (mean - typical).astype(np.float32), sure.astype(np.float32)

    def load(self, state: Mapping[str, Any]) -> None:
        """After the table, in which it looks up its rows: a key that has gone is seen in `_values`."""
        super().load(state)
        self.known = np.maximum(self.table.rows(self.keys.tolist()), 0)


PROMPTS = 1 << 16  # prompts remembered, about 200 bytes each
VECTORS = 4096  # texts compared with


class HistoryPredictor(Learning):
    """Length from the lengths of other answers."""

    name = "history"

    def __init__(self, prompts: int = PROMPTS, vectors: int = VECTORS) -> None:
        super().__init__()
        self.bounds = prompts, min(prompts, vectors)
        self.table = PromptTable(prompts)
        self.evidence = Evidence(self.table)
        self.neighbours = Neighbours(self.table, self.bounds[1])
        self.parts = {"evidence": self.evidence, "neighbours": self.neighbours}

    def _empty(self) -> HistoryPredictor:
        return HistoryPredictor(*self.bounds)

    def _expect(self, candidates: Sequence[Candidate]) -> Floats:
        keys, f = keyed(candidates)
        return self.evidence.combine(candidates, keys, self.neighbours.predict(f, keys, self.level.typical))

    def _answer(self, candidate: Candidate, value: float) -> bool:
        return not self.evidence.add(candidate, value)

    def _learn(self, fresh: Sequence[Fresh]) -> None:
        keys, f = keyed([one.candidate for one in fresh])
        near = self.neighbours.predict(f, keys, self.level.typical)
        self.evidence.surprised(np.array([one.first for one in fresh]) - near)
        self.neighbours.add(keys, self.table.rows(keys), f)


def keyed(candidates: Sequence[Candidate]) -> tuple[list[int], Features]:
    """Keys and features of some prompts."""
    return [key_of(candidate) for candidate in candidates], features(candidates, BITS)
