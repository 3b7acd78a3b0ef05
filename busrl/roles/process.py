"""A process of a run before it is a role: its title, its log, and the lock of a role of which there is one.

Talks to the lock and to the process's own entry in the ring. Knows nothing of the bus or of topologies. All processes
wait for the broker, which imports this: it imports neither NumPy nor the topology, which would take long.
"""

from __future__ import annotations

import contextlib
import logging
import math
import sys
import time
from collections.abc import Callable

import setproctitle

from busrl.errors import LockTimeout, RingError, RunInUse
from busrl.ledger.errors import record_error
from busrl.paths import RunPaths
from busrl.ring import OfdLock, Ring

LOCK_LOOK_S = 0.5
PREDECESSOR_S = 10.0  # a dead holder's lock is free by then
log = logging.getLogger("busrl")


def configure_process(name: str) -> None:
    """Title for `ps`, and a log format whose lines can be read side by side with those of other processes."""
    setproctitle.setproctitle(f"busrl:{name}")
    logging.basicConfig(
        stream=sys.stderr, level=logging.INFO, format=f"%(asctime)s {name} %(levelname).1s %(message)s", force=True
    )


class RoleLock:
    """The lock of a role of which there is one; its file names the holder's pid."""

    def __init__(self, paths: RunPaths, name: str) -> None:
        self._paths, self._name = paths, name
        self.lock = OfdLock(str(paths.lock(name)))

    def acquire(self, ring: Ring, stopping: Callable[[], object]) -> bool:
        """Hold the lock; False if asked to stop meanwhile.

        A predecessor may be ending, or alive: the wait is declared as an activity, so the supervisor does not kill this
        process for it. After `PREDECESSOR_S` a line in errors.jsonl names the holder.
        """
        if self.lock.try_acquire():
            return True
        holder, begun, reported = self.lock.holder() or "unknown", time.monotonic(), False
        log.info("waits for pid %s, which holds %s", holder, self.lock.path)
        ring.activity(f"waits for pid {holder}", math.inf)
        while not stopping():
            with contextlib.suppress(LockTimeout):
                self.lock.acquire(LOCK_LOOK_S)
                ring.activity("")
                return True
            ring.progress()
            if not reported and time.monotonic() - begun > PREDECESSOR_S:
                reported = True
                self._report(holder)
        return False

    def _report(self, holder: int | str) -> None:
        served = f"another {self._name} serves this run (pid {holder} holds {self.lock.path})"
        text = f"{served}; this one waits until it has ended"
        log.error(text)
        record_error(self._paths, self._name, "error", self._name, text)

    def keep(self) -> str:
        """Hold the lock again if its file was removed: the path then, else "". RunInUse if another process has it."""
        if self.lock.stands:
            return ""
        path = str(self.lock.path)
        with contextlib.suppress(RingError):  # whatever has the file's name now keeps other processes out as well
            if not self.lock.try_acquire():
                holder = OfdLock(path).holder() or "unknown"
                raise RunInUse(
                    f"another {self._name} (pid {holder}) has served this run since {path} was removed; this one ends"
                )
            return path
        return ""
