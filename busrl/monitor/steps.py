"""The course of a run, step by step, whichever way a step became known.

Pure. The learner's file and its bus message tell the same numbers, and either may come first, twice or not at all.

- A step is known by its number; the first that told of it is believed.
- The newest `KEPT` steps are kept, so a run of any length takes the same memory.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from busrl.monitor.seen import StepSeen

KEPT: Final = 4096


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

    def course(self, of: Callable[[StepSeen], float]) -> list[float]:
        """One number of every step, oldest first."""
        return [of(self._known[step]) for step in self.numbers()]
