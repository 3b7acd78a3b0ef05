"""The course of a run, step by step, whichever way a step became known.

Pure. The learner's file and its bus message tell the same numbers, and either may come first, twice or not at all.

- A step is known by its number; the first that told of it is believed.
- The newest `KEPT` steps are kept, so a run of any length takes the same memory.
- How fast they follow each other is in what they tell: each knows the seconds since the one before it. So it is known
  before a second one was watched, and a replay tells the run's own speed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from busrl.monitor.seen import StepSeen

KEPT: Final = 4096
RECENT: Final = 10
PACE_S: Final = 20.0  # the speed is that of the newest steps which together took so long


@dataclass(frozen=True)
class Pace:
    """What the newest steps came to per second."""

    steps: float
    samples: float
    tokens: float


class Steps:
    """The newest steps in order."""

    def __init__(self) -> None:
        self._known: dict[int, StepSeen] = {}

    def add(self, seen: StepSeen) -> bool:
        """False if the step was known, or is older than what is kept."""
        if seen.step in self._known:
            return False
        if len(self._known) >= KEPT:
            oldest = min(self._known)
            if seen.step < oldest:
                return False
            del self._known[oldest]
        self._known[seen.step] = seen
        return True

    def __len__(self) -> int:
        return len(self._known)

    @property
    def newest(self) -> StepSeen | None:
        return self._known[max(self._known)] if self._known else None

    def numbers(self) -> list[int]:
        """The step numbers, oldest first."""
        return sorted(self._known)

    def pace(self, quiet_s: float) -> Pace | None:
        """How fast steps come when the last one is `quiet_s` ago; None if none of them tells how long it took."""
        told: list[StepSeen] = []
        span = 0.0
        for number in reversed(self.numbers()):
            one = self._known[number]
            if 0 < one.seconds < math.inf:
                told.append(one)
                span += one.seconds
            if span >= PACE_S:
                break
        if not told:
            return None
        # A step under way counts against the speed once it takes longer than those before it: a run may stand still.
        over = span + max(0.0, quiet_s - span / len(told))
        return Pace(len(told) / over, sum(one.samples for one in told) / over, sum(one.tokens for one in told) / over)

    def recent(self, of: Callable[[StepSeen], float | None]) -> float | None:
        """Mean of a number over the newest steps that tell it."""
        told = [value for step in self.numbers()[-RECENT:] if (value := of(self._known[step])) is not None]
        return sum(told) / len(told) if told else None

    def course(self, of: Callable[[StepSeen], float]) -> list[float]:
        """One number of every step, oldest first."""
        return [of(self._known[step]) for step in self.numbers()]
