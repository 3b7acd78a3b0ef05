"""The groups that wait to be opened, in the order of a key and within a horizon of draws.

Data structures of the dispatch policies (`dispatch`): heaps with lazy deletion, and a string of flags. They know
nothing of where predictions come from, of slots, workers or clocks.

- Only a draw below the limit that the oldest waiting draw sets is ever taken.
- Taking and adding cost O(log n), a new key for all of them O(n log n).
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator

import numpy as np
import numpy.typing as npt

from busrl.scheduling.groups import Ints
from busrl.scheduling.lengths import Candidate

BEYOND = -1
SPARE = 1024


class WaitingGroup:
    """One waiting group. `since`: groups opened when it came within the horizon, BEYOND until then."""

    __slots__ = ("candidate", "predicted", "since")

    def __init__(self, candidate: Candidate, predicted: float) -> None:
        self.candidate, self.predicted, self.since = candidate, predicted, BEYOND


class Pool:
    """The groups that wait to be opened, in the order of a key, within a horizon of draws.

    key = per_token x predicted + per_draw x draw, 0 until `rekey`; the smallest is `first`, equal keys go by draw. A
    key is fixed when a group comes within the horizon and stays until `rekey`, so taking and adding cost O(log n).
    Only a draw below `limit(oldest waiting draw)` is ever taken; one that is added again has lost nothing.

    `way`: 1 or -1, the sign by which predictions alone would order them, the smallest being `best`.
    """

    def __init__(self, limit: Callable[[int], int], way: int) -> None:
        self._limit, self._way = limit, way
        self._per_token = self._per_draw = 0.0
        self.opened = 0  # groups taken so far
        self.near_sum = 0.0  # of the predictions of the groups within the horizon
        self.near_count = 0
        self._reached = 0  # the limit at the last `near`
        self._waiting: dict[int, WaitingGroup] = {}
        self._present = WaitingDraws()
        # Heaps with stale entries: one counts only while its draw waits, within the horizon.
        self._draws: list[int] = []
        self._beyond: list[int] = []
        self._near: list[tuple[float, int]] = []
        self._best: list[tuple[float, int]] = []

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[WaitingGroup]:
        return iter(self._waiting.values())

    def missing(self, draws: Iterable[int]) -> list[int]:
        return self._present.missing(draws)

    def add(self, candidate: Candidate, predicted: float) -> None:
        """A group begins to wait; one that waits already stays as it is."""
        draw = candidate.draw
        if draw in self._waiting:
            return
        self._waiting[draw] = WaitingGroup(candidate, predicted)
        self._present.set(draw)
        heapq.heappush(self._draws, draw)
        heapq.heappush(self._beyond, draw)

    def oldest(self) -> int | None:
        while self._draws and self._draws[0] not in self._waiting:
            heapq.heappop(self._draws)
        return self._draws[0] if self._draws else None

    def near(self) -> bool:
        """Let exactly the draws below the limit be within the horizon. False if nothing waits."""
        oldest = self.oldest()
        if oldest is None:
            return False
        limit = self._limit(oldest)
        if limit < self._reached:  # an older draw came back
            self._withdraw(limit)
        self._reached = limit
        while self._beyond and self._beyond[0] < limit:
            entry = self._waiting.get(heapq.heappop(self._beyond))
            if entry is not None and entry.since == BEYOND:
                entry.since = self.opened
                self.near_sum, self.near_count = self.near_sum + entry.predicted, self.near_count + 1
                draw, predicted = entry.candidate.draw, entry.predicted
                heapq.heappush(self._near, (self._per_token * predicted + self._per_draw * draw, draw))
                heapq.heappush(self._best, (self._way * predicted, draw))
        return True

    def first(self) -> WaitingGroup | None:
        """The entry with the smallest key within the horizon, as it was at the last `near`."""
        return self._peek(self._near)

    def best(self) -> WaitingGroup | None:
        """The entry within the horizon that would be taken by length alone."""
        return self._peek(self._best)

    def entry(self, draw: int) -> WaitingGroup | None:
        return self._waiting.get(draw)

    def take(self, entry: WaitingGroup) -> int:
        """Remove an entry; the number of groups that were opened since it came within the horizon."""
        draw = entry.candidate.draw
        del self._waiting[draw]
        self._present.clear(draw)
        self._leave(entry)
        self.opened += 1
        return self.opened - 1 - entry.since

    def rekey(self, per_token: float, per_draw: float) -> None:
        """Order by another key, and by the predictions as they are now. O(n log n): for when they have changed."""
        self._per_token, self._per_draw = per_token, per_draw
        near = [entry for entry in self._waiting.values() if entry.since != BEYOND]
        draws = np.fromiter((entry.candidate.draw for entry in near), np.int64, len(near))
        predicted = np.fromiter((entry.predicted for entry in near), np.float64, len(near))
        self.near_sum, self.near_count = float(predicted.sum()), len(near)
        self._near = _sorted(per_token * predicted + per_draw * draws, draws)
        self._best = _sorted(self._way * predicted, draws)

    def _leave(self, entry: WaitingGroup) -> None:
        self.near_count -= 1
        self.near_sum = self.near_sum - entry.predicted if self.near_count else 0.0

    def _withdraw(self, limit: int) -> None:
        """What came within the horizon and is not below the limit any more waits beyond it again."""
        for draw, entry in self._waiting.items():
            if draw >= limit and entry.since != BEYOND:
                self._leave(entry)
                entry.since = BEYOND
                heapq.heappush(self._beyond, draw)

    def _peek(self, heap: list[tuple[float, int]]) -> WaitingGroup | None:
        while heap:
            entry = self._waiting.get(heap[0][1])
            if entry is not None and entry.since != BEYOND:
                return entry
            heapq.heappop(heap)
        return None


def _sorted(keys: npt.NDArray[np.float64], draws: Ints) -> list[tuple[float, int]]:
    """Pairs in order, which is a heap."""
    order = np.lexsort((draws, keys))
    return list(zip(keys[order].tolist(), draws[order].tolist()))


class WaitingDraws:
    """Which draws wait, as a string of flags, so that a hundred thousand draws can be asked for at once.

    The first flag and the last are never set: they stand for all draws that lie beyond.
    """

    def __init__(self) -> None:
        self._base, self._flags = -1, bytearray(SPARE)

    def set(self, draw: int) -> None:
        if not 0 < draw - self._base < len(self._flags) - 1:
            self._make_room(draw)
        self._flags[draw - self._base] = 1

    def clear(self, draw: int) -> None:
        self._flags[draw - self._base] = 0

    def missing(self, draws: Iterable[int]) -> list[int]:
        draws = draws if isinstance(draws, np.ndarray) else np.fromiter(draws, np.int64)
        waits = np.frombuffer(self._flags, np.bool_).take(draws - self._base, mode="clip")
        found: list[int] = draws[~waits].tolist()
        return found

    def _make_room(self, draw: int) -> None:
        """Let the flags reach from the oldest draw that waits to `draw`, with room for as many again."""
        here = self._base + np.flatnonzero(np.frombuffer(self._flags, np.uint8))
        low, high = (min(draw, int(here[0])), max(draw, int(here[-1]))) if len(here) else (draw, draw)
        flags = np.zeros(2 * (high + 1 - low) + SPARE, np.uint8)
        flags[here + 1 - low] = 1
        self._base, self._flags = low - 1, bytearray(flags)
