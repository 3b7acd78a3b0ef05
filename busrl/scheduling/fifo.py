"""In the order drawn: the policy without lengths, predictor or memory.

Talks to nothing. What it answers to the questions of the `Policy` protocol is what a policy answers that looks at
nothing but the draw. Knows nothing of slots, credit, workers or clocks.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence

from busrl.scheduling.groups import slot_priority
from busrl.scheduling.inflight import Record
from busrl.scheduling.pool import Present, as_draws
from busrl.scheduling.predictors import Candidate
from busrl.scheduling.strength import LearnerState


class Fifo:
    """In the order drawn."""

    name = "fifo"
    learns = False

    def __init__(self, horizon: int) -> None:
        if horizon < 1:
            raise ValueError(f"horizon = {horizon}: must be >= 1")
        self.horizon = horizon
        self._waiting: dict[int, Candidate] = {}
        self._draws: list[int] = []
        self._present = Present()

    def missing(self, draws: Iterable[int]) -> list[int]:
        return self._present.missing(as_draws(draws))

    def offer(self, candidates: Sequence[Candidate]) -> None:
        for candidate in candidates:
            if candidate.draw not in self._waiting:
                self._waiting[candidate.draw] = candidate
                self._present.set(candidate.draw)
                heapq.heappush(self._draws, candidate.draw)

    def next(self) -> Candidate | None:
        if not self._draws:
            return None
        draw = heapq.heappop(self._draws)
        self._present.clear(draw)
        return self._waiting.pop(draw)

    def feedback(self, state: LearnerState) -> None:
        """The order does not depend on the learner."""

    def unknown(self, draws: Iterable[int]) -> list[int]:
        return []

    def adopt(self, candidates: Sequence[Candidate]) -> None:
        """Nothing has to be known of open groups,"""

    def look(self, draws: Sequence[int], running: Sequence[int], rows: int) -> None:
        """nor of what is in flight,"""

    def finished(self, draws: Sequence[int], tokens: Sequence[int]) -> None:
        """nor of what came out."""

    def priority(self, draw: int, admission: int, probe: bool = False) -> int:
        return slot_priority(admission)

    def take_records(self) -> list[Record]:
        return []

    def told(self) -> dict[str, float]:
        return {}
