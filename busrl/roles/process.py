"""What every process of a run needs before it is a role: its title, its log, and its turn where only one may run.

Talks to the role's lock and to the process's own entry in the ring. Imports next to nothing, so that the broker, for
which everybody waits, is back in a fraction of a second. Knows nothing of the bus or of topologies.
"""

from __future__ import annotations

import contextlib
import logging
import math
import sys
import time
from collections.abc import Callable

import setproctitle

from busrl.errors import RunInUse
from busrl.ledger.errorlog import record_error
from busrl.paths import RunPaths
from busrl.ring import LockTimeout, OfdLock, Ring, RingError

TURN_S = 0.5
BURIAL_S = 10.0  # a dead holder is gone by then
log = logging.getLogger("busrl")


def configure_process(name: str) -> None:
    """Title for `ps`, and a log format whose lines can be read side by side with those of other processes."""
    setproctitle.setproctitle(title_of(name))
    logging.basicConfig(
        stream=sys.stderr, level=logging.INFO, format=f"%(asctime)s {name} %(levelname).1s %(message)s", force=True
    )


def title_of(name: str) -> str:
    """What `ps` shows for a process of a run."""
    return f"busrl:{name}"


def hold_again(lock: OfdLock, name: str) -> bool:
    """Whether the lock had to be taken again, since somebody removed its file; RunInUse if another process has it."""
    if lock.stands:
        return False
    with contextlib.suppress(RingError):  # what stands in its place keeps others out as well
        if not lock.try_acquire():
            raise RunInUse(
                f"another {name} (pid {OfdLock(lock.path).holder() or 'unknown'}) has served this run since somebody "
                f"removed {lock.path}; this one ends"
            )
        return True
    return False


def wait_for_turn(lock: OfdLock, ring: Ring, stopping: Callable[[], object], paths: RunPaths, name: str) -> bool:
    """Hold the lock of a role of which there is one; False if asked to stop meanwhile.

    A predecessor may take a moment to be buried, or live: waiting for it is declared, so nobody is killed for it. One
    that lives on is named in errors.jsonl.
    """
    if lock.try_acquire():
        return True
    holder, begun, told = lock.holder() or "unknown", time.monotonic(), False
    log.info("waits for pid %s, which holds %s", holder, lock.path)
    ring.activity(f"waits for pid {holder}", math.inf)
    while not stopping():
        with contextlib.suppress(LockTimeout):
            lock.acquire(TURN_S)
            ring.activity("")
            return True
        ring.progress()
        if not told and time.monotonic() - begun > BURIAL_S:
            told = True
            text = f"another {name} serves this run (pid {holder} holds {lock.path}); this one waits until it has ended"
            log.error(text)
            record_error(paths, name, "error", name, text)
    return False
