"""Prompts whose text is near: a bounded index of unit vectors, and the weighted mean of what their answers were.

Every vector of the index is compared (one matrix product for a whole batch); a neighbour weighs its similarity to the
power of 16, so only near ones count. Pure NumPy. Knows nothing of text or tokens.

- At most `capacity` vectors; the oldest go.
- A prompt is no neighbour of itself: what its own answers say is counted elsewhere.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from busrl.scheduling.predictors.base import Floats
from busrl.scheduling.predictors.features import Features
from busrl.scheduling.predictors.table import PromptTable

DIMENSIONS = 64
SQUARINGS = 4  # similarity to the power of 2^4
LEAST = 1e-12  # weight below which nothing is near


class Neighbours:
    """An index over the rows of a table of prompts."""

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
