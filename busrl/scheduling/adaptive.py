"""Short first while feeding a stream, long first when closing a synchronous round, rows kept for the long tail.

Builds on `ordered`. Knows nothing of slots, credit, workers or clocks; how many rows there are and how many members of
each open group run is told to `look`.

- In rounds (`round_groups` > 0) a round is the next `round_groups` draws, longest first: what is trained together is
  what would have been without a policy, only its order is another. No prompt waits for a later round.
- In a stream `tail_share` of the rows belong to long groups: while fewer work on them and one waits, the oldest long
  one is opened next. A group is long when its prediction lies above the `TAIL` quantile of those offered lately.
- The reserve is accounting, not a partition: rows are never kept empty for it.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Sequence

import numpy as np

from busrl.scheduling.ordered import Ordered
from busrl.scheduling.pool import Entry
from busrl.scheduling.predictors import Candidate, Predictor

TAIL = 0.75
OFFERS_KEPT = 1024
QUANTILE_EVERY = 64  # the quantile is computed anew after so many offers
MOST_TAIL = 0.9


class Adaptive(Ordered):
    """`tail_share`: 0 to 0.9 of the rows; `round_groups`: groups of a synchronous round, 0 in a stream."""

    name = "adaptive"

    def __init__(
        self,
        horizon: int,
        predictor: Predictor,
        aging: float = 0.5,
        *,
        tail_share: float = 0.25,
        round_groups: int = 0,
        window: int = 1,
        group_size: int = 1,
    ) -> None:
        if not 0 <= tail_share <= MOST_TAIL:
            raise ValueError(f"tail_share = {tail_share}: must be between 0 and {MOST_TAIL}")
        if round_groups > horizon:
            raise ValueError(f"horizon = {horizon}: must be >= the {round_groups} groups of a round")
        self.tail_share, self.round_groups = tail_share, round_groups
        self.rows = 0
        self._offered: deque[float] = deque(maxlen=OFFERS_KEPT)
        self._fresh = 0
        self._long = np.inf  # predictions above are long
        self._tail: list[int] = []  # heap of long draws, stale ones among them
        super().__init__(horizon, predictor, aging, window=window, group_size=group_size)

    @property
    def way(self) -> int:
        return -1 if self.round_groups else 1

    def offer(self, candidates: Sequence[Candidate]) -> None:
        super().offer(candidates)
        if self.tail_share and not self.round_groups:
            self._learn_tail([entry for c in candidates if (entry := self.pool.entry(c.draw)) is not None])

    def look(self, draws: Sequence[int], running: Sequence[int], rows: int) -> None:
        super().look(draws, running, rows)
        self.rows = rows

    def told(self) -> dict[str, float]:
        found = super().told()
        if self.round_groups:
            return found | {"wait_bound": float(self.round_groups - 1)}
        return found | {"tail_rows": float(self.inflight.tail_rows), "tail_reserved": self.tail_share * self.rows}

    def _limit(self, oldest: int) -> int:
        if self.round_groups:
            return (oldest // self.round_groups + 1) * self.round_groups
        return super()._limit(oldest)

    def _scale(self) -> tuple[float, float]:
        # The order inside a round changes when it ends, not what is learned from it: no aging, always full strength.
        return (-1.0, 0.0) if self.round_groups else super()._scale()

    def _choose(self) -> Entry:
        if self.inflight.tail_rows + self.group_size <= self.tail_share * self.rows:
            entry = self._oldest_long()
            if entry is not None:
                return entry
        return super()._choose()

    def _oldest_long(self) -> Entry | None:
        while self._tail:
            entry = self.pool.entry(self._tail[0])
            if entry is not None:
                return self.pool.waiting(self._tail[0])
            heapq.heappop(self._tail)
        return None

    def _is_tail(self, entry: Entry) -> bool:
        return entry.predicted > self._long

    def _learn_tail(self, entries: Sequence[Entry]) -> None:
        """Take predictions into the quantile, and the draws of the long ones into the heap."""
        self._offered.extend(entry.predicted for entry in entries)
        self._fresh += len(entries)
        if self._fresh and (self._fresh >= QUANTILE_EVERY or len(self._offered) < QUANTILE_EVERY):
            self._fresh = 0
            self._long = float(np.quantile(np.fromiter(self._offered, np.float64), TAIL))
        for entry in entries:
            if self._is_tail(entry):
                heapq.heappush(self._tail, entry.candidate.draw)
