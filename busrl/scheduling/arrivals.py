"""An open stream: which prompts are there by now. Prompts of a stream arrive over time instead of lying ready.

Talks to nothing: it is given the times of the lines and a clock value. Knows nothing of files, policies or credit.

- Draw d is line d mod N of epoch d div N; a later epoch is the first one again, after it and one mean gap.
- The clock starts when it is first asked. A successor that finds groups admitted goes on where the last of them
  arrived, so a restart makes nobody wait again for what was there.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


class Arrivals:
    """`times`: seconds after the start at which each line arrives, ascending."""

    def __init__(self, times: Sequence[float]) -> None:
        self._times = np.asarray(times, np.float64)
        if not len(self._times) or np.any(np.diff(self._times) < 0) or self._times[0] < 0:
            raise ValueError("arrival times must be given, >= 0 and ascending")
        gap = float(self._times[-1] - self._times[0]) / max(1, len(self._times) - 1)
        self._period = float(self._times[-1]) + gap
        self._start: float | None = None

    def time_of(self, draw: int) -> float:
        """Seconds after the start at which a draw is there."""
        epoch, line = divmod(draw, len(self._times))
        return epoch * self._period + float(self._times[line])

    def count(self, now: float, admitted: int = 0) -> int:
        """Draws [0, count) are there at `now`; `admitted` groups were opened before this clock was started."""
        if self._start is None:
            self._start = now - (self.time_of(admitted - 1) if admitted else 0.0)
        passed = now - self._start
        if self._period < 1e-9:  # all at once, for ever
            return np.iinfo(np.int64).max
        epoch = int(passed // self._period)
        line = int(np.searchsorted(self._times, passed - epoch * self._period, side="right"))
        return epoch * len(self._times) + line
