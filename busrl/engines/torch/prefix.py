"""Rows of the cache that belong to no running sequence: those of calls that ended, and prompts computed in pieces.

Used by the torch engine, which computes and copies. A later call whose ids begin with those of a row takes it over, and
computes the rest alone. Knows nothing of models, weights or requests.

- A row holds the keys and values of exactly `ids`, from position 0; it is found by all of them, never by a part.
- Rows that somebody waits for stay. The others go when their time is over or, least recently used first, when a
  sequence needs the row: what is kept is never in the way of what runs.
- There is always a row: those that run, and those for which somebody waits, are at most as many as there are rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np

from busrl.engines.tokens import Ids
from busrl.errors import BugError

Copies = list[tuple[int, int, int]]  # from which row to which, and how many positions; all at the same time


@dataclass(eq=False)
class KeptRow:
    """A row that holds `ids`. After `until` it is given away, or before if it is the one used longest ago."""

    row: int
    ids: Ids
    until: float = math.inf
    waiting: int = 0  # sequences that will begin with it
    growing: bool = False  # a prompt of which pieces are still to come: for those that wait alone


class KeptRows:
    """The rows that are kept, for `keep_s` seconds of `clock` each; with 0 none of a call that ended."""

    def __init__(self, keep_s: float, clock: Callable[[], float]) -> None:
        self.keep_s, self._clock = keep_s, clock
        self._at: dict[int, KeptRow] = {}

    def __len__(self) -> int:
        return len(self._at)

    @property
    def tokens(self) -> int:
        return sum(len(kept.ids) for kept in self._at.values())

    def park(self, row: int, ids: Ids) -> None:
        """The sequence in `row` has ended; `ids` are those whose keys and values the row holds."""
        if self.keep_s > 0 and len(ids):
            self._at[row] = KeptRow(row, ids, self._clock() + self.keep_s)

    def find(self, ids: Ids) -> KeptRow | None:
        """The row with the longest beginning of `ids`. One more sequence waits for it."""
        if not self._at:
            return None
        self._expire()
        fitting = [kept for kept in self._at.values() if not kept.growing and _begins(ids, kept.ids)]
        best = max(fitting, key=lambda kept: len(kept.ids), default=None)
        if best is not None:
            best.waiting += 1
        return best

    def release(self, kept: KeptRow, count: int = 1) -> None:
        """So many do not wait for it any more."""
        kept.waiting -= count
        kept.until = self._clock() + self.keep_s

    def has(self, row: int) -> bool:
        return row in self._at

    def drop(self, kept: KeptRow) -> None:
        """Give it away, if that was not done."""
        if self._at.get(kept.row) is kept:
            del self._at[kept.row]

    def clear(self) -> None:
        self._at.clear()

    def occupy(self, row: int, kept: KeptRow | None, free: Iterable[int]) -> Copies:
        """A sequence that waited for `kept`, or for none, has `row` now, and begins there with what is in it. `free`:
        rows without a running sequence. What has to be copied; the last one that waits takes the kept row away."""
        there = self._at.get(row)
        if kept is not None and kept.waiting == 1:
            self.drop(kept)
            if there is kept:
                return []
            return [*self._move(there, kept.row), (kept.row, row, len(kept.ids))]
        copies = self._move(there, self._vacant(free, there)) if there is not None else []
        if kept is not None:
            kept.waiting -= 1
            copies += [(kept.row, row, len(kept.ids))] if there is not kept else []
        return copies

    def open(self, kept: KeptRow | None, waiting: int, free: Iterable[int]) -> tuple[KeptRow, Copies]:
        """A row for a prompt that is computed in pieces, for `waiting` sequences, which all wait for `kept` where there
        is one: it begins with that."""
        if kept is not None and kept.waiting == waiting:
            kept.growing = True
            return kept, []
        row = self._vacant(free, None)
        made = self._at[row] = KeptRow(row, np.empty(0, np.int32), waiting=waiting, growing=True)
        if kept is None:
            return made, []
        self.release(kept, waiting)
        made.ids = kept.ids
        return made, [(kept.row, row, len(kept.ids))]

    def closed_up(self, sources: list[int], targets: list[int]) -> Copies:
        """Running sequences have gone from `sources` to `targets`: where what was kept there has to go."""
        found: Copies = []
        for source, target in zip(sources, targets):
            found += self._move(self._at.get(target), source)
        return found

    # -- internals -----

    def _move(self, kept: KeptRow | None, row: int) -> Copies:
        if kept is None or kept.row == row:
            return []
        self.drop(kept)
        before, kept.row = kept.row, row
        self._at[row] = kept
        return [(before, row, len(kept.ids))]

    def _vacant(self, free: Iterable[int], leaving: KeptRow | None) -> int:
        """A row where nothing is: the last one free, or that of the row used longest ago, which may be the one that is
        leaving; what was there is given away."""
        taken = leaving.row if leaving is not None else -1
        row = max((row for row in free if row not in self._at and row != taken), default=None)
        if row is not None:
            return row
        parked = [kept for kept in self._at.values() if not kept.waiting]
        oldest = min(parked, key=lambda kept: kept.until, default=None)
        if oldest is None:
            raise BugError("no row of the cache is free: more sequences run and wait than there are rows")
        self.drop(oldest)
        return oldest.row

    def _expire(self) -> None:
        now = self._clock()
        for kept in [kept for kept in self._at.values() if not kept.waiting and kept.until < now]:
            self.drop(kept)


def _begins(ids: Ids, beginning: Ids) -> bool:
    count = len(beginning)
    return len(ids) >= count and ids[count - 1] == beginning[-1] and bool(np.array_equal(ids[:count], beginning))
