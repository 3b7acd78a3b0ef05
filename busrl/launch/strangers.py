"""Processes that hold the place of one of ours: a keeper, broker, scheduler or learner that this launch did not start.

Pure but for reading /proc: told what the ring's process table says, it answers whom to kill. Such a process may well do
the work (somebody started it by hand, or it outlived its launch): our own child then waits for its lock. It is never
by-passed; if it makes no progress it is killed by name, as our own would be, and the waiting child takes its place.

- Only a process whose title says that it is what the table says is killed: a pid alone may be somebody else's.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from pathlib import Path

from busrl.launch.supervisor import Child, Patience, Sight
from busrl.ring import Process


class Strangers:
    """`names`: those of the processes of which there is one each."""

    def __init__(self, names: Collection[str], patience: Patience) -> None:
        self._names, self._patience = names, patience
        self._known: dict[tuple[int, int], Child] = {}

    def look(self, entries: Iterable[Process], ours: Collection[int], passed_s: float) -> list[tuple[int, str]]:
        """The table was read, `passed_s` after the last time; pid and reason of each that has to be killed."""
        theirs = [one for one in entries if not one.remote and one.label in self._names]
        here = {(one.pid, one.index): one for one in theirs if one.pid not in ours}
        self._known = {key: self._known.get(key) or self._met(one) for key, one in here.items()}
        condemned = []
        for key, child in self._known.items():
            one = here[key]
            kill = child.looked(Sight(True, one.progress, one.activity, one.deadline_s), passed_s)
            if kill is not None and is_titled(one.pid, one.label):
                condemned.append((one.pid, f"{kill.why}; this launch did not start it, and it holds a lock of the run"))
        return condemned

    def _met(self, process: Process) -> Child:
        child = Child(process.label, self._patience)
        child.started(process.pid, 0.0)
        child.became_ready()
        return child


def is_titled(pid: int, name: str) -> bool:
    """Whether a process shows itself as this one of a run."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().rstrip(b"\0 ") == f"busrl:{name}".encode()
    except OSError:
        return False
