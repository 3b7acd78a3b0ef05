"""How far a policy departs from the order drawn, as the learner's entropy asks for it.

Talks to nothing: learner states come in, a number from 0 (as drawn) to 1 (by length) comes out. Knows nothing of
prompts or lengths.

- Without a reference (the first updates) the strength is 1.
- It moves in steps of 1 / LEVELS, so that whoever keeps an order by it has to sort again only now and then.
"""

from __future__ import annotations

from dataclasses import dataclass

REFERENCE_UPDATES = 20  # updates whose mean entropy is the reference
EMA = 0.9
HIGH, LOW = 1.3, 0.6  # entropy over reference at which the preference for a length is full, or gone
LEVELS = 16


@dataclass(frozen=True)
class LearnerState:
    """What the learner tells about itself; the part of LEARNER_STATE_UPDATE that policies use."""

    step: int
    entropy: float


class Strength:
    """High entropy (against its reference) takes the strength to 1: answers are wanted early. Low takes it to 0."""

    def __init__(self) -> None:
        self.value = 1.0
        self._reference = _Reference()

    def feed(self, state: LearnerState) -> bool:
        """Take one learner state; True if the strength is another now."""
        ratio = self._reference.add(state.entropy)
        if ratio is None:
            return False
        wanted = round(min(1.0, max(0.0, (ratio - LOW) / (HIGH - LOW))) * LEVELS) / LEVELS
        changed, self.value = wanted != self.value, wanted
        return changed


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
