"""Starts the sides of a comparison, each in a session of its own, and counts the CPU seconds of all their processes.

Every process that a program of benchmarks/ starts is started here (held by tests/tools/test_sides.py). Talks to the
kernel alone; knows nothing of what a side computes.

- Linux shares the CPU by session (autogroup): a rival in the session of a busy shell, or of the program that measures,
  gets a share of that session's share. On a loaded machine that made one up to 13 times slower by the clock.
- CPU seconds are those of a process and of all its descendants, ended ones included.
"""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TICKS = os.sysconf("SC_CLK_TCK")


def started(command: Sequence[str], **how: Any) -> subprocess.Popen[Any]:
    """Start a command in a session of its own; `how` as for Popen."""
    return subprocess.Popen(command, start_new_session=True, **how)


@dataclass(frozen=True)
class Ended:
    """What a side printed, and its seconds and CPU seconds from its start to its end."""

    code: int
    output: str
    errors: str
    seconds: float
    cpu_seconds: float


def ran(
    command: Sequence[str], *, timeout_s: float | None = None, env: Mapping[str, str] | None = None,
    cwd: str | Path | None = None, check: bool = False, keep_errors: bool = True,
) -> Ended:
    """Run a command to its end in a session of its own.

    Raises TimeoutExpired after `timeout_s`; with `check` CalledProcessError if its code is not 0. Without `keep_errors`
    what it writes to stderr goes where ours goes.
    """
    errors_to = subprocess.PIPE if keep_errors else None
    before, begun = _children_s(), time.monotonic()
    child = started(command, stdout=subprocess.PIPE, stderr=errors_to, text=True, env=env, cwd=cwd)
    try:
        output, errors = child.communicate(timeout=timeout_s)
    except BaseException:
        end_session(child)
        raise
    if check and child.returncode:
        raise subprocess.CalledProcessError(child.returncode, command, output, errors)
    seconds, cpu_seconds = time.monotonic() - begun, _children_s() - before
    return Ended(child.returncode, output, errors or "", seconds, cpu_seconds)


def end_session(child: subprocess.Popen[Any]) -> None:
    """Kill a side with all of its session, and the descendants that took a session of their own."""
    family = CpuOfTree(child.pid).members()
    for pid in family:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue  # it has just ended
    child.wait()


def _children_s() -> float:
    """CPU seconds of all children that were waited for, and of theirs."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


class CpuOfTree:
    """CPU seconds that a process and all that descend from it have used so far.

    A living process counts with its own clock (nanoseconds) and with what it waited for (hundredths of a second). One
    that was seen stays a member when its parent ends before it.
    """

    def __init__(self, root: int) -> None:
        self.root = root
        self._last: dict[tuple[int, int], float] = {}  # (pid, start) of each member -> seconds when last looked at
        self._parents: dict[int, int] = {}
        self._gone = 0.0  # of members whose parent was no member any more when they ended

    def now(self, *, look: bool = True) -> float:
        """Seconds so far. Without `look` only members of the last look count, which costs no time."""
        if look:
            self._look()
        for pid, begun in self._last:
            self._last[pid, begun] = _cpu_s(pid, begun) or self._last[pid, begun]
        return self._gone + sum(self._last.values())

    def by_name(self) -> dict[str, float]:
        """Seconds so far by the name of a living process, as `ps` shows it; what has ended is in its parent's."""
        self.now()
        names: dict[str, float] = {}
        for (pid, _), seconds in self._last.items():
            try:
                name = Path(f"/proc/{pid}/comm").read_text().strip()
            except OSError:
                continue  # it has just ended
            names[name] = names.get(name, 0.0) + seconds
        return names

    def members(self) -> list[int]:
        """The living ones, the root first."""
        self._look()
        return [self.root, *(pid for pid, _ in self._last if pid != self.root)]

    def _look(self) -> None:
        stats = {int(entry.name): stat for entry in Path("/proc").glob("[0-9]*") if (stat := _stat(entry.name))}
        living = {(pid, begun) for pid, (_, begun, _) in stats.items()}
        before = set(self._parents)
        for member in [member for member in self._last if member not in living]:
            last, parent = self._last.pop(member), self._parents.pop(member[0], 0)
            if parent not in before:  # else the parent, which waited for it, has its seconds
                self._gone += last
        known = {pid for pid, _ in self._last} | {self.root}
        for pid, (parent, begun, _) in stats.items():
            above = pid
            while above in stats and above not in known:
                above = stats[above][0]
            if above in known and (pid, begun) not in self._last:
                self._last[pid, begun] = 0.0
            if above in known:
                self._parents[pid] = parent


def _stat(pid: str | int) -> tuple[int, int, float] | None:
    """Parent, start in ticks, and seconds of waited-for children of a process; None if it is gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return int(fields[1]), int(fields[19]), (int(fields[13]) + int(fields[14])) / TICKS


def _cpu_s(pid: int, begun: int) -> float:
    """CPU seconds of a living process and of what it waited for; 0 if it is gone."""
    stat = _stat(pid)
    if stat is None or stat[1] != begun:
        return 0.0
    try:
        return time.clock_gettime(~pid << 3 | 2) + stat[2]  # the kernel's name of the clock of a process
    except OSError:
        return 0.0
