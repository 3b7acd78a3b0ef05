"""Which group is opened next: the order of dispatch, within a horizon, behind one interface.

Talks to a predictor of answer lengths. Knows nothing of slots, credit, workers or clocks: how long a group has waited
is how early it was drawn, so that a simulated, a live and a restarted scheduler decide alike.

- Reordering stays within a horizon of H draws: a draw is opened only while it is less than H beyond the oldest draw
  that is still waiting.
- Nothing starves: between the moment a draw comes within the horizon and its opening, at most 2H - 2 other groups are
  opened. (They are draws from o to d + H - 1, o being the oldest waiting then, and d <= o + H - 1.) Aging makes
  the wait shorter, the horizon makes it bounded.
- Same offers and feedback, same order.
- All members of a group are opened together, and slots are served in opening order, so siblings finish close together.

Shortest-first raises no throughput in a closed loop with bounded slots; it makes the first groups of a stream ready
earlier.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from busrl.scheduling.predictors import Candidate, Predictor, make_predictor

REFERENCE_UPDATES = 20  # updates whose mean entropy is the reference
EMA = 0.9
HIGH, LOW = 1.3, 0.6  # entropy over reference at which the preference for short answers is full, or gone


@dataclass(frozen=True)
class LearnerState:
    """What the learner tells about itself; the part of LEARNER_STATE_UPDATE that policies use."""

    step: int
    entropy: float


class Policy(Protocol):
    """Order of the waiting groups. The caller keeps it supplied with the oldest draws that have no fate yet."""

    name: str
    horizon: int

    def missing(self, draws: Iterable[int]) -> list[int]:
        """Those of `draws` that were not offered yet, so that only their prompts need to be read."""
        ...

    def offer(self, candidates: Sequence[Candidate]) -> None:
        """Add waiting groups; one that is offered again (its dispatch failed) has lost nothing."""
        ...

    def next(self) -> Candidate | None:
        """The group to open now; it leaves the pool. None if the pool is empty."""
        ...

    def feedback(self, state: LearnerState) -> None:
        """A learner state, in the order of its steps."""
        ...


@dataclass
class _Waiting:
    candidate: Candidate
    predicted: float


class Fifo:
    """In the order drawn."""

    name = "fifo"

    def __init__(self, horizon: int) -> None:
        if horizon < 1:
            raise ValueError(f"horizon = {horizon}: must be >= 1")
        self.horizon = horizon
        self._pool: dict[int, _Waiting] = {}

    def missing(self, draws: Iterable[int]) -> list[int]:
        return [draw for draw in draws if draw not in self._pool]

    def offer(self, candidates: Sequence[Candidate]) -> None:
        if candidates:
            for candidate, predicted in zip(candidates, self._predict(candidates)):
                self._pool[candidate.draw] = _Waiting(candidate, predicted)

    def next(self) -> Candidate | None:
        if not self._pool:
            return None
        chosen = self._choose(min(self._pool)).candidate
        del self._pool[chosen.draw]
        return chosen

    def feedback(self, state: LearnerState) -> None:
        """The order does not depend on the learner."""

    def _predict(self, candidates: Sequence[Candidate]) -> Sequence[float]:
        return [0.0] * len(candidates)

    def _choose(self, oldest: int) -> _Waiting:
        """The next one; `oldest` is the smallest draw in the pool."""
        return self._pool[oldest]


class Sjf(Fifo):
    """Shortest predicted answer first, softened by aging and by the learner's entropy.

    key = strength x predicted / mean predicted + aging x 2 x draw / H; the smallest is next, ties go by draw. With
    aging 0.5, having been drawn H groups earlier is worth one mean length. High entropy (against its reference) raises
    the strength to 1, as answers are then wanted early; low entropy takes it to 0, which is the order drawn.
    """

    name = "sjf"

    def __init__(self, horizon: int, predictor: Predictor, aging: float = 0.5) -> None:
        super().__init__(horizon)
        if aging < 0:
            raise ValueError(f"aging = {aging}: must be >= 0")
        self.predictor, self.aging = predictor, aging
        self.strength = 1.0
        self._reference = _Reference()

    def feedback(self, state: LearnerState) -> None:
        ratio = self._reference.add(state.entropy)
        if ratio is not None:
            self.strength = min(1.0, max(0.0, (ratio - LOW) / (HIGH - LOW)))

    def _predict(self, candidates: Sequence[Candidate]) -> Sequence[float]:
        found: list[float] = self.predictor.predict(candidates).tolist()
        return found

    def _choose(self, oldest: int) -> _Waiting:
        within = [w for draw, w in self._pool.items() if draw < oldest + self.horizon]
        per_token = self.strength * len(within) / max(1e-9, sum(w.predicted for w in within))
        per_draw = 2.0 * self.aging / self.horizon

        def key(w: _Waiting) -> tuple[float, int]:
            draw = w.candidate.draw
            return per_token * w.predicted + per_draw * (draw - oldest), draw

        return min(within, key=key)


class _Reference:
    """Entropy relative to the mean of the first updates, smoothed; None until there is a reference."""

    def __init__(self) -> None:
        self._first: list[float] = []
        self._mean = 0.0
        self._smooth = 0.0

    def add(self, entropy: float) -> float | None:
        if len(self._first) < REFERENCE_UPDATES:
            self._first.append(entropy)
            self._mean = self._smooth = sum(self._first) / len(self._first)
            return None
        self._smooth = EMA * self._smooth + (1 - EMA) * entropy
        return self._smooth / self._mean if self._mean > 0 else None


def make_policy(name: str, horizon: int, predictor: str | Predictor = "rules", aging: float = 0.5) -> Policy:
    """The policy that `scheduler.policy` names."""
    if name == "fifo":
        return Fifo(horizon)
    if name == "sjf":
        return Sjf(horizon, make_predictor(predictor) if isinstance(predictor, str) else predictor, aging)
    raise ValueError(f"policy = {name!r}: must be fifo or sjf")
