"""Which learner step made which weight version, as far as the keeper has seen it. Pure.

A remote answer may hold tokens of older weights than those of its dispatch; the learner counts its age from the step
of the oldest. For a version that was never seen the newest older one counts: an answer may look too old, never too new.
"""

from __future__ import annotations

from bisect import bisect_right


class VersionSteps:
    """`note` what the ring's header says; `step_of` a version."""

    def __init__(self, keep: int = 4096) -> None:
        self._steps: dict[int, int] = {0: 0}
        self._keep = keep

    def note(self, version: int, step: int) -> None:
        """The header showed this pair. The two words are not read together: the smallest step seen is the right one."""
        self._steps[version] = min(step, self._steps.get(version, step))
        if len(self._steps) > self._keep:
            del self._steps[sorted(self._steps)[1]]  # 0 stays

    def step_of(self, version: int) -> int:
        known = sorted(self._steps)
        return self._steps[known[bisect_right(known, version) - 1]]
