"""Looks at the ring for `launch`: who is ready, whose counter moves, how full the slots are.

Talks to the ring, reading only; knows nothing of restarts or of the terminal. One look costs some microseconds, so a
few looks a second are nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from busrl.launch.progress import Row
from busrl.launch.supervisor import Child, Sight
from busrl.ring import Process, Ring

BUSY_WINDOW_S = 1.0


@dataclass
class _Load:
    """Busy time of one process since the last time it was worked out."""

    pid: int
    at: float
    busy_ns: int
    share: float = 0.0


class Watch:
    """The newest picture of the process table and the slots."""

    def __init__(self, ring: Ring) -> None:
        self._ring = ring
        self._entries: dict[int, Process] = {}
        self._loads: dict[str, _Load] = {}

    def look(self) -> None:
        """Read the process table."""
        self._entries = {process.pid: process for process in self._ring.processes()}

    @property
    def entries(self) -> dict[int, Process]:
        """The process table of the last look, by pid."""
        return self._entries

    def sight(self, pid: int) -> Sight | None:
        """What the ring says about a process; None if it does not map the ring (yet)."""
        entry = self._entries.get(pid)
        if entry is None:
            return None
        return Sight(entry.state == "ready", entry.progress, entry.activity, entry.deadline_s, entry.samples)

    def rows(self, children: Iterable[Child], now: float) -> tuple[Row, ...]:
        """One line per child for the display."""
        return tuple(self._row(child, now) for child in children)

    def _row(self, child: Child, now: float) -> Row:
        entry = self._entries.get(child.pid) if child.pid else None
        if entry is None:
            return Row(child.name, child.phase.value, restarts=child.restarts)
        load = self._loads.get(child.name)
        if load is None or load.pid != entry.pid:
            load = self._loads[child.name] = _Load(entry.pid, now, entry.busy_ns)
        elif now - load.at >= BUSY_WINDOW_S:
            share = (entry.busy_ns - load.busy_ns) / 1e9 / (now - load.at)
            self._loads[child.name] = _Load(entry.pid, now, entry.busy_ns, min(1.0, max(0.0, share)))
        return Row(child.name, child.phase.value, entry.activity, self._loads[child.name].share, child.restarts)

    def tokens(self) -> int:
        """Tokens that engines drew since the ring was made: those of dead workers and of lost samples too."""
        return self._ring.stats().tokens

    def slots(self) -> dict[str, int]:
        """How many slots are in which state."""
        return {name.lower(): count for name, count in self._ring.stats().occupancy.items()}
