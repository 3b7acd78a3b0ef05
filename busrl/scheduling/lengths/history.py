"""`history`: finished siblings, the same prompt before, and prompts with a near text.

Near prompts say what to expect of one that has no answers yet; its own answers then correct that, siblings most. Knows
nothing of models of text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from busrl.scheduling.lengths.base import Candidate, Evidence, Floats, PromptTable, key_of
from busrl.scheduling.lengths.learned import BITS, Features, Fresh, Learning, features

DIMENSIONS = 64
SQUARINGS = 4  # similarity to the power of 2^4
LEAST = 1e-12  # weight below which nothing is near


class Neighbours:
    """Prompts whose text is near: an index of at most `capacity` unit vectors (the oldest go) over a table of prompts.

    Every vector is compared (one matrix product for a whole batch); a neighbour weighs its similarity to the power of
    16, so only near ones count. A prompt is no neighbour of itself.
    """

    def __init__(self, table: PromptTable, capacity: int) -> None:
        self.table, self.capacity = table, capacity
        self.vectors = np.zeros((0, DIMENSIONS), np.float32)
        self.keys, self.rows = np.zeros(0, np.int64), np.zeros(0, np.int64)
        self._next = 0
        self._place: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._place)

    def add(self, keys: Sequence[int], rows: npt.NDArray[np.int64], f: Features) -> None:
        """Prompts with their rows in the table; one that is known already stays where it is."""
        vectors = f.dense(DIMENSIONS)
        for i, key in enumerate(keys):
            if key not in self._place:
                self._put(key, int(rows[i]), vectors[i])

    def _put(self, key: int, row: int, vector: npt.NDArray[np.float32]) -> None:
        place = self._next
        if place == len(self.keys) < self.capacity:
            self._grow()
        if self._place.get(int(self.keys[place]), -1) == place:
            del self._place[int(self.keys[place])]
        self.vectors[place], self.keys[place], self.rows[place] = vector, key, row
        self._place[key] = place
        self._next = (place + 1) % self.capacity

    def _grow(self) -> None:
        more = min(self.capacity, max(256, 2 * len(self.keys))) - len(self.keys)
        self.vectors = np.concatenate((self.vectors, np.zeros((more, DIMENSIONS), np.float32)))
        self.keys = np.append(self.keys, np.zeros(more, np.int64))
        self.rows = np.append(self.rows, np.zeros(more, np.int64))

    def predict(self, f: Features, keys: Sequence[int], typical: float) -> Floats:
        """Weighted mean per row of `f`; `typical` where nothing is near."""
        used = len(self)
        if not used:
            return np.full(f.rows, typical)
        weights = f.dense(DIMENSIONS) @ self.vectors[:used].T
        np.maximum(weights, 0, out=weights)
        for _ in range(SQUARINGS):
            np.multiply(weights, weights, out=weights)
        for i, key in enumerate(keys):
            place = self._place.get(key, -1)
            if place >= 0:
                weights[i, place] = 0
        value, sure = self._values(used, typical)
        total = weights @ sure
        found = (weights @ (sure * value)) / np.maximum(total, LEAST)
        return typical + np.where(total > LEAST, found, 0.0).astype(np.float64)

    def _values(self, used: int, typical: float) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
        """Of each neighbour: the mean of its answers (around `typical`), and how sure that is, 0 to 1."""
        rows = self.rows[:used]
        count, mean = self.table.overall(rows)
        sure = np.where(self.table.key[rows] == self.keys[:used], count / (count + 1), 0.0)
        return (mean - typical).astype(np.float32), sure.astype(np.float32)

    def state(self) -> dict[str, Any]:
        used = len(self)
        return {"vectors": self.vectors[:used].copy(), "keys": self.keys[:used].copy(), "next": self._next}

    def load(self, state: Mapping[str, Any]) -> None:
        """After the table: its rows are looked up again, and who is no longer in it stays out."""
        keys, vectors = np.array(state["keys"], np.int64), np.array(state["vectors"], np.float32)
        if vectors.shape != (len(keys), DIMENSIONS) or len(keys) > self.capacity or not np.isfinite(vectors).all():
            raise ValueError("an index of another shape")
        if not 0 <= int(state["next"]) <= len(keys):
            raise ValueError("an index whose next place lies outside of it")
        self.keys, self.vectors, self._next = keys, vectors, int(state["next"]) % self.capacity
        self.rows = np.maximum(self.table.rows(keys.tolist()), 0)  # a key that has gone is seen in `_values`
        self._place = {key: place for place, key in enumerate(keys.tolist())}


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

    def _empty(self) -> HistoryPredictor:
        return HistoryPredictor(*self.bounds)

    def _expect(self, candidates: Sequence[Candidate]) -> Floats:
        keys = [key_of(candidate) for candidate in candidates]
        near = self.neighbours.predict(features(candidates, BITS), keys, self.level.typical)
        return self.evidence.combine(candidates, keys, near)

    def _answer(self, candidate: Candidate, value: float) -> bool:
        return not self.evidence.add(candidate, value)

    def _learn(self, fresh: Sequence[Fresh]) -> None:
        candidates = [one.candidate for one in fresh]
        keys, f = [key_of(candidate) for candidate in candidates], features(candidates, BITS)
        near = self.neighbours.predict(f, keys, self.level.typical)
        self.evidence.surprised(np.array([one.first for one in fresh]) - near)
        self.neighbours.add(keys, self.table.rows(keys), f)

    def _state(self) -> dict[str, Any]:
        return {"evidence": self.evidence.state(), "neighbours": self.neighbours.state()}

    def _load(self, state: Mapping[str, Any]) -> None:
        self.evidence.load(state["evidence"])
        self.neighbours.load(state["neighbours"])
