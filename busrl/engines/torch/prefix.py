"""Cache rows of no running sequence: rows of calls that ended, and rows of prompts that are computed in pieces.

Used by the torch engine, which computes and copies. A later call whose ids begin with all ids of a kept row takes the
row over and computes the rest alone. Knows nothing of models, weights or requests.

- A row holds the keys and values of exactly `ids`, from position 0. A call matches all of them or does not match.
- Rows that a sequence waits for stay. Other rows go when their time is over or, least recently used first, when a
  sequence needs a row: a kept row never delays a running sequence.
- A row can always be had: sequences that run or wait are at most as many as the rows, and each needs one.
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
    """A row that holds `ids`. It is given away after `until`, or earlier if it was used longest ago."""

    row: int
    ids: Ids
    until: float = math.inf
    waiting: int = 0  # sequences that will begin with it
    growing: bool = False  # a prompt with pieces still to come: only for the sequences that wait for it


class KeptRows:
    """The kept rows, each for `keep_s` seconds of `clock`; with 0 no row of a call that ended."""

    def __init__(self, keep_s: float, clock: Callable[[], float]) -> None:
        self.keep_s, self._clock = keep_s, clock
        self._at: dict[int, KeptRow] = {}

    def __len__(self) -> int:
        return len(self._at)

    @property
    def tokens(self) -> int:
        return sum(len(kept.ids) for kept in self._at.values())

    def park(self, row: int, ids: Ids) -> None:
        """Keep the row of a sequence that ended; `ids` are those whose keys and values it holds."""
        if self.keep_s > 0 and len(ids):
            self._at[row] = KeptRow(row, ids, self._clock() + self.keep_s)

    def find(self, ids: Ids) -> KeptRow | None:
        """The row with the longest beginning of `ids`; from now on one more sequence waits for it."""
        if not self._at:
            return None
        self._expire()
        fitting = [kept for kept in self._at.values() if not kept.growing and _begins(ids, kept.ids)]
        best = max(fitting, key=lambda kept: len(kept.ids), default=None)
        if best is not None:
            best.waiting += 1
        return best

    def release(self, kept: KeptRow, count: int = 1) -> None:
        """`count` sequences do not wait for it any more."""
        kept.waiting -= count
        kept.until = self._clock() + self.keep_s

    def has(self, row: int) -> bool:
        return row in self._at

    def drop(self, kept: KeptRow) -> None:
        """Give the row away, if that was not done."""
        if self._at.get(kept.row) is kept:
            del self._at[kept.row]

    def clear(self) -> None:
        self._at.clear()

    def occupy(self, row: int, kept: KeptRow | None, free: Iterable[int]) -> Copies:
        """Give `row` to a sequence that waited for `kept`, or for none: it begins with the ids of `kept`. `free`: rows
        without a running sequence. Returns the copies to make. The last sequence that waits takes the kept row away."""
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
        """A row for a prompt that is computed in pieces, for `waiting` sequences. It begins with the ids of `kept`, for
        which all of them wait, where there is one."""
        if kept is not None and kept.waiting == waiting:
            kept.growing = True
            return kept, []
        row = self._vacant(free, None)
        opened = self._at[row] = KeptRow(row, np.empty(0, np.int32), waiting=waiting, growing=True)
        if kept is None:
            return opened, []
        self.release(kept, waiting)
        opened.ids = kept.ids
        return opened, [(kept.row, row, len(kept.ids))]

    def closed_up(self, sources: list[int], targets: list[int]) -> Copies:
        """Make way for running sequences that move from `sources` to `targets`: what is kept there goes the other way.
        """
        copies: Copies = []
        for source, target in zip(sources, targets):
            copies += self._move(self._at.get(target), source)
        return copies

    # -- internals -----

    def _move(self, kept: KeptRow | None, row: int) -> Copies:
        if kept is None or kept.row == row:
            return []
        self.drop(kept)
        before, kept.row = kept.row, row
        self._at[row] = kept
        return [(before, row, len(kept.ids))]

    def _vacant(self, free: Iterable[int], leaving: KeptRow | None) -> int:
        """An empty row: the last free one, or else the kept row used longest ago, which is given away and may be the
        one that is leaving."""
        excluded = leaving.row if leaving is not None else -1
        row = max((row for row in free if row not in self._at and row != excluded), default=None)
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
