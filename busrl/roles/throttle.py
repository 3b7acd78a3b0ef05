"""How often a warning of one kind is told: the first at once, the others counted and told together.

Pure: time comes from the caller. Knows nothing of logs or the bus.

- Of one kind at most one line is told every `every_s` seconds, and no occurrence is missing from the counts.
"""

from __future__ import annotations

from dataclasses import dataclass

EVERY_S = 5.0


@dataclass
class _Kind:
    """What was held back of one kind since the last line."""

    told: float
    held: int = 0
    latest: tuple[str, ...] = ()


class Throttle:
    """`admit` for each occurrence, `due` from time to time for what was held back."""

    def __init__(self, every_s: float = EVERY_S) -> None:
        self.every_s = every_s
        self._kinds: dict[str, _Kind] = {}

    def admit(self, kind: str, line: tuple[str, ...], now: float) -> bool:
        """Whether to tell this one now; if not, it is counted and comes back from `due`."""
        known = self._kinds.get(kind)
        if known is None:
            self._kinds[kind] = _Kind(now)
            return True
        known.held, known.latest = known.held + 1, line
        return False

    def due(self, now: float, everything: bool = False) -> list[tuple[int, tuple[str, ...]]]:
        """What was held back long enough: how many, and the latest of them. A kind that was quiet is forgotten."""
        found = []
        for kind, known in list(self._kinds.items()):
            if not everything and now - known.told < self.every_s:
                continue
            if known.held:
                found.append((known.held, known.latest))
                self._kinds[kind] = _Kind(now)
            else:
                del self._kinds[kind]
        return found
