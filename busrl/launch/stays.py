"""How long slots stay in each state, by Little's law: mean slots in a state / entries into it per second.

Pure: fed with the ring's counts four times a second while the learner trains. Sampled by the clock and not when
something happens, so that no phase of the run counts more than it lasts. Knows nothing of samples.
"""

from __future__ import annotations

from collections.abc import Mapping

EVERY_S = 0.25


class Stays:
    """Look now and then; `summary` at the end."""

    def __init__(self) -> None:
        self._sums: dict[str, int] = {}
        self._looks = 0
        self._first: tuple[float, dict[str, int]] | None = None
        self._last: tuple[float, dict[str, int]] = (0.0, {})
        self._next = 0.0

    def look(self, occupancy: Mapping[str, int], transitions: Mapping[str, int], step: int, now: float) -> None:
        """`occupancy`: slots by state; `transitions`: entries into each, ever; `step`: the learner's."""
        if step < 1 or now < self._next:
            return
        self._next = now + EVERY_S
        for state, count in occupancy.items():
            self._sums[state] = self._sums.get(state, 0) + count
        self._looks += 1
        self._last = now, dict(transitions)
        if self._first is None:
            self._first = self._last

    def summary(self) -> dict[str, dict[str, float]]:
        """By state: mean slots, entries per second, seconds that one stays (0 where none came); empty without looks."""
        if self._first is None or self._last[0] <= self._first[0]:
            return {}
        span = self._last[0] - self._first[0]
        found = {}
        for state, total in self._sums.items():
            mean = total / self._looks
            rate = (self._last[1].get(state, 0) - self._first[1].get(state, 0)) / span
            stay = mean / rate if rate > 0 else 0.0
            found[state.lower()] = {"mean": round(mean, 3), "per_s": round(rate, 3), "stay_s": round(stay, 6)}
        return found
