"""Counts of what remote workers did and of what they were refused, by name, for `busrl status`.

Pure; the keeper writes it to a file. Knows nothing of slots. Names come from outside, so their number is bounded.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

BAD = ("malformed", "version", "oversize", "refused", "not_yours", "full", "too_large")  # a person should look at these
MOST_NAMES = 256
OTHERS = "(others)"


class Tally:
    """`add` an event of a worker; `plain` is all of it as JSON can hold it."""

    def __init__(self, before: Any = None) -> None:
        self.workers: dict[str, Counter[str]] = {}
        self.latest: dict[str, str] = {}
        self.changed = False
        self._load(before)

    def add(self, name: str, event: str, count: int = 1, text: str = "") -> None:
        name = self._known(name)
        self.workers.setdefault(name, Counter())[event] += count
        if text:
            self.latest[name] = f"{event}: {text}"[:300]
        self.changed = True

    def plain(self) -> dict[str, Any]:
        return {
            name: {**dict(sorted(counts.items())), **({"latest": self.latest[name]} if name in self.latest else {})}
            for name, counts in sorted(self.workers.items())
        }

    def _known(self, name: str) -> str:
        name = name or "(unnamed)"
        return name if name in self.workers or len(self.workers) < MOST_NAMES else OTHERS

    def _load(self, before: Any) -> None:
        """Go on from what an earlier keeper wrote; anything unexpected in it is left out."""
        for name, counts in (before if isinstance(before, dict) else {}).items():
            if isinstance(counts, dict):
                self.workers[str(name)] = Counter({k: v for k, v in counts.items() if isinstance(v, int)})
                if isinstance(counts.get("latest"), str):
                    self.latest[str(name)] = counts["latest"]
