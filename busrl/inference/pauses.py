"""Whether an engine is paused, and for how long it was in all. Knows nothing else."""

from __future__ import annotations

import time
from collections.abc import Callable


class Pauses:
    """running -> paused (`begin`) -> running (`end`); both may be called twice."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._begun: float | None = None
        self._seconds = 0.0

    @property
    def on(self) -> bool:
        return self._begun is not None

    @property
    def seconds(self) -> float:
        """All pauses so far, the present one included."""
        return self._seconds + (0.0 if self._begun is None else self._clock() - self._begun)

    def begin(self) -> None:
        if self._begun is None:
            self._begun = self._clock()

    def end(self) -> None:
        self._seconds, self._begun = self.seconds, None
