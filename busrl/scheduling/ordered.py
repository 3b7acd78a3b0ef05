"""Shortest first and longest first: by predicted length, softened by aging and by the learner's entropy.

Talks to a predictor of answer lengths. Knows nothing of slots, credit, workers or clocks: how long a group has waited
is how early it was drawn.

- key = strength x (+-) predicted / mean + aging x 2 x draw / H; the smallest is next, ties go by draw.
- Aging is linear in the draw, so it never changes which of two waiting groups goes first: keys stay as they are until
  the strength, the mean (by a quarter) or the predictions change.
- A group is overtaken by at most min(H - 1, spread x H / (2 x aging)) groups drawn after it, spread being the largest
  difference of two predictions over their mean; and it waits for at most 2H - 2 groups in all (see `policy`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import ClassVar

from busrl.scheduling.inflight import InFlight, Open, Record
from busrl.scheduling.pool import Entry, Pool
from busrl.scheduling.predictors import Candidate, Predictor
from busrl.scheduling.slotorder import SlotOrder
from busrl.scheduling.strength import LearnerState, Strength

DRIFT = 0.25  # the mean may move by this much before the keys are computed anew
REFRESH = 4  # predictions are made anew after this many finished members for each waiting group,
REFRESH_AT_LEAST = 256  # and not before so many
RECENT = 0.99  # memory of the promoted share


class Ordered:
    """By length. `direction`: 1 shortest first, -1 longest first. `window`: the learner's W, for slot priorities.

    With aging 0.5, having been drawn H groups earlier is worth one mean length. High entropy raises the strength to 1,
    as answers are then wanted early; low entropy takes it to 0, which is the order drawn (`strength`).
    """

    name = ""
    direction: ClassVar[int] = 1
    learns = True

    def __init__(
        self, horizon: int, predictor: Predictor, aging: float = 0.5, *, window: int = 1, group_size: int = 1
    ) -> None:
        if horizon < 1:
            raise ValueError(f"horizon = {horizon}: must be >= 1")
        if aging < 0:
            raise ValueError(f"aging = {aging}: must be >= 0")
        self.horizon, self.predictor, self.aging, self.group_size = horizon, predictor, aging, group_size
        self.strength = Strength()
        self.order = SlotOrder(window, self.way)
        self.inflight = InFlight()
        self.pool = Pool(self._limit, self.way)
        self.promoted = 0.0  # share of the groups opened lately that length alone would have put later
        self._mean = 0.0
        self._observed = 0

    @property
    def way(self) -> int:
        """The direction in which lengths are taken now."""
        return self.direction

    # -- waiting groups -------------------------------------------------------------------------------------------

    def missing(self, draws: Iterable[int]) -> list[int]:
        return self.pool.missing(draws)

    def offer(self, candidates: Sequence[Candidate]) -> None:
        if candidates:
            for candidate, predicted in zip(candidates, self.predictor.predict(candidates).tolist()):
                self.pool.add(candidate, predicted)

    def next(self) -> Candidate | None:
        if not self.pool.near():
            return None
        self._keep_scale()
        entry = self._choose()
        best = self.pool.best()
        jumped = best is not None and self.way * entry.predicted > self.way * best.predicted
        self.promoted = RECENT * self.promoted + (1 - RECENT) * jumped
        wait = self.pool.take(entry)
        group = Open(entry.candidate, entry.predicted, wait, self._is_tail(entry))
        self.inflight.opened(group, self.group_size)
        return entry.candidate

    def feedback(self, state: LearnerState) -> None:
        if self.strength.feed(state):
            self._rekey()

    # -- open groups ----------------------------------------------------------------------------------------------

    def unknown(self, draws: Iterable[int]) -> list[int]:
        return self.inflight.unknown(draws)

    def adopt(self, candidates: Sequence[Candidate]) -> None:
        if candidates:
            for candidate, predicted in zip(candidates, self.predictor.predict(candidates).tolist()):
                entry = Entry(candidate, predicted)
                self.inflight.opened(Open(candidate, predicted, tail=self._is_tail(entry)), 0)

    def look(self, draws: Sequence[int], running: Sequence[int], rows: int) -> None:
        self.inflight.look(draws, running)

    def finished(self, draws: Sequence[int], tokens: Sequence[int]) -> None:
        pairs = self.inflight.finished(draws, tokens)
        if not pairs:
            return
        self.predictor.observe(pairs)
        self._observed += len(pairs)
        if self._observed >= max(REFRESH_AT_LEAST, REFRESH * len(self.pool)):
            self._refresh()

    def priority(self, draw: int, admission: int, probe: bool = False) -> int:
        group = self.inflight.get(draw)
        if probe:
            return self.order.probe()
        return self.order.sample(admission, group.estimate if group else 1.0)

    # -- telling --------------------------------------------------------------------------------------------------

    def take_records(self) -> list[Record]:
        return self.inflight.take_records()

    def told(self) -> dict[str, float]:
        waits = self.inflight.waits
        return {
            "strength": self.strength.value,
            "promoted": round(self.promoted, 4),
            "wait_mean": round(sum(waits) / len(waits), 2) if waits else 0.0,
            "wait_max": float(max(waits, default=0)),
            "wait_bound": 2.0 * self.horizon - 2,
        }

    # -- inside ---------------------------------------------------------------------------------------------------

    def _limit(self, oldest: int) -> int:
        return oldest + self.horizon

    def _choose(self) -> Entry:
        entry = self.pool.first()
        assert entry is not None, "within the horizon there is always the oldest draw"
        return entry

    def _is_tail(self, entry: Entry) -> bool:
        return False

    def _keep_scale(self) -> None:
        mean = self.pool.near_sum / max(1, self.pool.near_count)
        if abs(mean - self._mean) > DRIFT * self._mean:
            self._rekey()

    def _rekey(self) -> None:
        self._mean = max(1e-9, self.pool.near_sum / max(1, self.pool.near_count))
        self.pool.rekey(*self._scale())

    def _scale(self) -> tuple[float, float]:
        """What a predicted token and a draw add to a key."""
        return self.strength.value * self.way / self._mean, 2.0 * self.aging / self.horizon

    def _refresh(self) -> None:
        """Predict the waiting groups anew, after the predictor has seen what others came to."""
        self._observed = 0
        entries = list(self.pool)
        if entries:
            found = self.predictor.predict([entry.candidate for entry in entries]).tolist()
            for entry, predicted in zip(entries, found):
                entry.predicted = predicted
            self._rekey()


class Sjf(Ordered):
    """Shortest predicted answer first: the first groups of a stream are ready earlier."""

    name = "sjf"
    direction = 1


class Ljf(Ordered):
    """Longest predicted answer first: what is started last is short, so that a round ends soon after its last start."""

    name = "ljf"
    direction = -1
