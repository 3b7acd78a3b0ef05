"""Which process it is, beyond its number: a pid together with the moment at which that process began.

Used where one process has to know whether another one, whose memory it uses, still lives. Talks to /proc only.

- A number that was given to a new process is another mark: nobody is taken for a dead one.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

STATE, STARTED = 0, 19  # fields of /proc/PID/stat after the name
ENDED = ("Z", "X")


@dataclass(frozen=True)
class Mark:
    """One process. `started` is in clock ticks since the machine began; (0, 0) is nobody."""

    pid: int
    started: int

    @classmethod
    def of(cls, pid: int) -> Mark:
        """The process that has the number now; nobody if there is none."""
        fields = _stat(pid)
        return cls(pid, int(fields[STARTED])) if fields else NOBODY

    @classmethod
    def mine(cls) -> Mark:
        return cls.of(os.getpid())

    @property
    def alive(self) -> bool:
        """Whether it runs (or is stopped); not if it has ended and only waits to be buried."""
        fields = _stat(self.pid) if self.pid else []
        return bool(fields) and fields[STATE] not in ENDED and int(fields[STARTED]) == self.started

    def __str__(self) -> str:
        return f"pid {self.pid}, {'alive' if self.alive else 'dead'}" if self.pid else "nobody"


NOBODY = Mark(0, 0)


def _stat(pid: int) -> list[str]:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()
    except OSError:
        return []
