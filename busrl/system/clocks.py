"""Clocks and counts for whoever watches other processes: the time that counts against them, and what each did.

Used by the keeper's gateway for its workers, by launch for its children and for errors from outside, and by the learner
for the time of its trigger. Talks to nothing: it is given the time. Knows nothing of claims, messages or processes.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

MOST_NAMES, OTHERS = 256, "(others)"


class FairClock:
    """Time that may count against other processes: at most two ticks between two looks, since for the rest of the time
    the looking process was late itself. `time`: their sum."""

    def __init__(self, tick_s: float, now: float) -> None:
        self._longest_s, self._last, self.time = 2 * tick_s, now, 0.0

    def passed(self, now: float) -> float:
        """The seconds since the last call that count."""
        passed, self._last = min(max(0.0, now - self._last), self._longest_s), now
        self.time += passed
        return passed


class PausedClock:
    """Time that stands still while something is paused."""

    def __init__(self) -> None:
        self._lost_s, self._last, self._paused = 0.0, 0.0, False

    def time(self, now: float, paused: bool) -> float:
        """`now` without all pauses, the present one included."""
        if self._paused:
            self._lost_s += now - self._last
        self._last, self._paused = now, paused
        return now - self._lost_s


class Tally:
    """`add` an event of a worker; `plain` is all of it as JSON can hold it. Continues from `before`, which an earlier
    keeper wrote; anything unexpected in it is left out."""

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
        """The name it is counted under: beyond `most` names all further ones are one."""
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
