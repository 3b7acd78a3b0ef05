"""Ties of a process to its parent: its death with it, its cores, and who takes over the children that it leaves.

Talks to the kernel (prctl(2), sched_setaffinity(2)). Used between a fork and the program after it, so it allocates
little and imports the standard library only. Knows nothing of what the processes do.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
from collections.abc import Iterator, Sequence

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
_libc = ctypes.CDLL(None, use_errno=True)


def die_with(parent: int) -> None:
    """Let the kernel kill this process when its parent's thread that forked it ends; at once if `parent` has ended."""
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it died before the line above: no signal would come any more
        os._exit(1)


def bind(cores: Sequence[int]) -> None:
    """Bind this process to these cores, as far as they are there; to none named: as its parent."""
    if cores:
        with contextlib.suppress(OSError):  # a core was removed since the topology was checked
            os.sched_setaffinity(0, cores)


@contextlib.contextmanager
def adopting_orphans() -> Iterator[None]:
    """Adopt each descendant whose parent ends meanwhile. OSError if the kernel does not allow that.

    Not for longer than it takes: who adopts an orphan has to wait for its end, too.
    """
    _take_orphans(1)
    try:
        yield
    finally:
        _take_orphans(0)


def _take_orphans(flag: int) -> None:
    if _libc.prctl(PR_SET_CHILD_SUBREAPER, flag, 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"the kernel does not let a process adopt orphans: {os.strerror(number)}")
