"""What is known about each prompt from its own answers: those of the newest draw, and earlier ones.

A bounded table, prompt -> row, of running means. Pure. Knows nothing of where its numbers come from.

- At most `capacity` prompts; the one first seen longest ago goes.
- Answers of the newest draw of a prompt are its siblings, counted apart from all earlier ones; of those the newest
  `MEMORY` count, so that a prompt whose answers grow is followed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from busrl.scheduling.predictors.base import Candidate, Floats

MEMORY = 16.0
COLUMNS = ("key", "draw", "count", "mean", "old_count", "old_mean")


def key_of(candidate: Candidate) -> int:
    """64 bits that name a prompt and its tag, the same in every process."""
    text = f"{candidate.prompt}\0{candidate.tag}".encode("utf-8", "surrogatepass")
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little", signed=True)


class PromptTable:
    """Means per prompt; `count` and `mean` of its newest draw, `old_count` and `old_mean` of the draws before."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.key, self.draw = np.zeros(0, np.int64), np.zeros(0, np.int64)
        self.count, self.mean = np.zeros(0), np.zeros(0)
        self.old_count, self.old_mean = np.zeros(0), np.zeros(0)
        self.used = self._oldest = 0
        self._row: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._row)

    def rows(self, keys: Sequence[int]) -> npt.NDArray[np.int64]:
        """The row of each key, -1 where there is none."""
        find = self._row.get
        return np.fromiter((find(key, -1) for key in keys), np.int64, len(keys))

    def row(self, key: int) -> int:
        """The row of a key, a new one if there is none."""
        row = self._row.get(key, -1)
        return row if row >= 0 else self._new(key)

    def add(self, row: int, draw: int, value: float) -> None:
        """An answer."""
        if draw < self.draw[row]:  # a straggler of an earlier draw
            self._add_old(row, 1.0, value)
            return
        if draw > self.draw[row]:
            self._add_old(row, self.count[row], self.mean[row])
            self.draw[row], self.count[row], self.mean[row] = draw, 0.0, 0.0
        self.count[row] += 1
        self.mean[row] += (value - self.mean[row]) / self.count[row]

    def overall(self, rows: npt.NDArray[np.int64]) -> tuple[Floats, Floats]:
        """Count and mean of all answers of some rows."""
        count = self.count[rows] + self.old_count[rows]
        total = self.count[rows] * self.mean[rows] + self.old_count[rows] * self.old_mean[rows]
        return count, total / np.maximum(count, 1e-9)

    def _add_old(self, row: int, count: float, mean: float) -> None:
        if count > 0:
            kept = min(self.old_count[row], max(0.0, MEMORY - count))
            self.old_mean[row] = (kept * self.old_mean[row] + count * mean) / (kept + count)
            self.old_count[row] = kept + count

    def _new(self, key: int) -> int:
        if self.used == len(self.key) < self.capacity:
            self._grow()
        if self.used < self.capacity:
            row = self.used
            self.used += 1
        else:
            row = self._oldest
            self._oldest = (row + 1) % self.capacity
            del self._row[int(self.key[row])]
        self._row[key] = row
        self.key[row], self.draw[row] = key, -1
        self.count[row] = self.mean[row] = self.old_count[row] = self.old_mean[row] = 0.0
        return row

    def _grow(self) -> None:
        room = min(self.capacity, max(1024, 2 * len(self.key)))
        for name in COLUMNS:
            column = getattr(self, name)
            setattr(self, name, np.concatenate((column, np.zeros(room - len(column), column.dtype))))

    def state(self) -> dict[str, Any]:
        return {**{name: getattr(self, name)[: self.used].copy() for name in COLUMNS}, "oldest": self._oldest}

    def load(self, state: Mapping[str, Any]) -> None:
        columns = [np.array(state[name], getattr(self, name).dtype) for name in COLUMNS]
        used = len(columns[0])
        if any(column.shape != (used,) or not np.isfinite(column).all() for column in columns) or used > self.capacity:
            raise ValueError("a table of prompts of another shape")
        if not 0 <= int(state["oldest"]) < self.capacity:
            raise ValueError("a table whose oldest row lies outside of it")
        for name, column in zip(COLUMNS, columns):
            setattr(self, name, column)
        self.used, self._oldest = used, int(state["oldest"])
        self._row = {key: row for row, key in enumerate(self.key.tolist())}
