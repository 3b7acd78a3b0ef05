"""Clocks and counts for a process that watches others: the time that counts against these, and their events.

Used by the keeper's gateway for its workers, by launch for its children and for errors from outside, and by the learner
for the time of its trigger. Pure: callers pass the time. Knows nothing of claims, messages or processes.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

MOST_NAMES, OTHERS = 256, "(others)"


class FairClock:
    """Time that may count against other processes: at most two ticks between two looks. For the rest of the time the
    watching process was late itself. `time`: the sum."""

    def __init__(self, tick_s: float, now: float) -> None:
        self._longest_s, self._last, self.time = 2 * tick_s, now, 0.0

    def passed(self, now: float) -> float:
        """Count the time since the last call; returns the seconds that count."""
        passed, self._last = min(max(0.0, now - self._last), self._longest_s), now
        self.time += passed
        return passed


class PausedClock:
    """Time that stands still while something is paused."""

    def __init__(self) -> None:
        self._lost_s, self._last, self._paused = 0.0, 0.0, False

    def time(self, now: float, paused: bool) -> float:
        """The time without all pauses, the present one included."""
        if self._paused:
            self._lost_s += now - self._last
        self._last, self._paused = now, paused
        return now - self._lost_s


class Tally:
    """Counts the events of workers: `add` one, `plain` gives all as JSON can hold them. Continues from `before`, which
    an earlier keeper wrote; anything unexpected in it is left out. Workers beyond the first `most` share a line."""

    def __init__(self, before: Any = None, most: int = MOST_NAMES) -> None:
        self._most = most
        self.workers: dict[str, Counter[str]] = {}
        self.latest: dict[str, str] = {}
        self.changed = False
        for name, counts in (before if isinstance(before, dict) else {}).items():
            if isinstance(counts, dict):
                self.workers[name] = Counter({k: v for k, v in counts.items() if isinstance(v, int)})
                if isinstance(counts.get("latest"), str):
                    self.latest[name] = counts["latest"]

    def add(self, name: str, event: str, count: int = 1, text: str = "") -> str:
        """Count an event; returns the name that it is counted under."""
        name = name or "(unnamed)"
        if name not in self.workers and len(self.workers) >= self._most:
            name = OTHERS
        self.workers.setdefault(name, Counter())[event] += count
        if text:
            self.latest[name] = f"{event}: {text}"[:300]
        self.changed = True
        return name

    def plain(self) -> dict[str, Any]:
        return {
            name: {**dict(sorted(counts.items())), **({"latest": self.latest[name]} if name in self.latest else {})}
            for name, counts in sorted(self.workers.items())
        }
