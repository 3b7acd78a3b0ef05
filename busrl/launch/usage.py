"""What each process of a run used: CPU seconds, and the share of the training time that it was busy.

Talks to /proc and is given the ring's process table. Training time runs from the learner's first step that was seen to
the last look before the end, so that imports and model loading are left out of the shares. Knows nothing of samples.

- A process that was started again counts on: what its predecessors used is kept.
- A process's own children (the judges of a reward worker) count as its own.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from busrl.ring import Process

TICKS = os.sysconf("SC_CLK_TCK")
LOOK_EVERY_S = 0.5


@dataclass
class _Used:
    """Of one name: seconds of earlier incarnations, of the present one, and both when training began."""

    pid: int = 0
    cpu_before: float = 0.0
    cpu: float = 0.0
    busy_before: float = 0.0
    busy: float = 0.0
    cpu_at_start: float = 0.0
    busy_at_start: float = 0.0

    def seen(self, pid: int, cpu: float, busy: float) -> None:
        if pid != self.pid:
            self.cpu_before, self.busy_before = self.cpu_before + self.cpu, self.busy_before + self.busy
            self.pid = pid
        self.cpu, self.busy = cpu, busy

    @property
    def cpu_total(self) -> float:
        return self.cpu_before + self.cpu

    @property
    def busy_total(self) -> float:
        return self.busy_before + self.busy


class Usage:
    """Fed with a look now and then; `summary` at the end."""

    def __init__(self) -> None:
        self._used: dict[str, _Used] = {}
        self._next = 0.0
        self._began: float | None = None
        self._ended = 0.0

    def look(self, pids: Iterable[tuple[str, int]], entries: dict[int, Process], step: int, now: float) -> None:
        """`pids`: name and pid of every living process; `step`: the learner's. Cheap: reads /proc twice a second."""
        if now < self._next:
            return
        self._next = now + LOOK_EVERY_S
        for name, pid in pids:
            entry = entries.get(pid)
            used = self._used.setdefault(name, _Used())
            # An entry that is gone while its process still ends says nothing new.
            busy = entry.busy_ns / 1e9 if entry else used.busy if used.pid == pid else 0.0
            used.seen(pid, cpu_of(pid, children=pid != os.getpid()), busy)
        if step > 0 and self._began is None:
            self._began = now
            for used in self._used.values():
                used.cpu_at_start, used.busy_at_start = used.cpu_total, used.busy_total
        self._ended = now

    def summary(self) -> dict[str, dict[str, Any]]:
        """Per process: cpu_s in all, and the shares of the training time; None where nothing was trained."""
        return {name: self._of(used) for name, used in self._used.items()}

    def _of(self, used: _Used) -> dict[str, Any]:
        span = self._ended - self._began if self._began is not None else 0.0
        if span <= 0:
            return {"cpu_s": round(used.cpu_total, 2), "cpu_share": None, "busy_share": None}
        return {
            "cpu_s": round(used.cpu_total, 2),
            "cpu_share": round((used.cpu_total - used.cpu_at_start) / span, 4),
            "busy_share": round(min(1.0, (used.busy_total - used.busy_at_start) / span), 4),
        }


def cpu_of(pid: int, children: bool = True) -> float:
    """CPU seconds of a process, and with `children` those it has waited for and the living ones; 0 if it is gone."""
    total = 0.0
    with contextlib.suppress(OSError, ValueError, IndexError):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        total = sum(int(field) for field in fields[11 : 15 if children else 13]) / TICKS
        living = Path(f"/proc/{pid}/task/{pid}/children").read_text().split() if children else []
        for child in living:
            total += cpu_of(int(child))
    return total
