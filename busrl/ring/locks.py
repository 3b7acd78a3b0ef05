"""Locks by file: the lock of a role, the guard of a ring's file, and the samples that a reaper took back from the dead.

Talks to lock files through the C++ core, and to a ring's file through a descriptor of its own. Knows nothing of what
the slots hold, or of roles.
"""

from __future__ import annotations

import fcntl
import os
import struct
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from busrl._ring import UID_NONE, Reaped, Ring
from busrl._ring import OfdLock as CoreLock
from busrl.states import State

ATTEMPTS = 16
BYTE = 1 << 40  # of the ring's file, far beyond its end; the first bytes are those of the process table
WAIT_S = 10.0  # a removal takes milliseconds
LOOK_EVERY_S = 0.005
_FLOCK = struct.Struct("hhqqi4x")  # struct flock of 64-bit Linux


class OfdLock:
    """An open-file-description lock of a file that is made if it is not there; the kernel drops it with its holder.

    The lock counts while its file is the one that has the name. A process that finds the name removed, or taken by
    another file, takes the lock of the file that has it now, or has lost the role. The file holds the holder's pid for
    people. RingError where the name is one of something else than a file.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self._lock = CoreLock(path)

    def try_acquire(self) -> bool:
        """Hold it; False if another process does. A lock that is held but does not stand any more is taken again."""
        if self.stands:
            return True
        for _ in range(ATTEMPTS):
            lock = CoreLock(self.path)
            if not lock.try_acquire():
                return False
            if _is_named(lock.fileno(), self.path):
                self._use(lock)
                return True
            lock.release()  # removed between open and lock: another may hold the one that has the name
        return False

    def acquire(self, timeout_s: float) -> None:
        """Hold it within the time; LockTimeout names the process that keeps it."""
        end = time.monotonic() + timeout_s
        while not self.stands:
            lock = CoreLock(self.path)
            lock.acquire(max(0.0, end - time.monotonic()))
            if _is_named(lock.fileno(), self.path):
                self._use(lock)
            else:
                lock.release()

    def _use(self, lock: CoreLock) -> None:
        if self._lock.held:
            lock.inheritable = self._lock.inheritable
            self._lock.release()
        self._lock = lock

    def release(self) -> None:
        self._lock.release()

    def holder(self) -> int | None:
        """Pid of the process that took the lock, -1 if the file names none; None if the lock is free."""
        return self._lock.holder()

    def fileno(self) -> int:
        return self._lock.fileno()

    @property
    def held(self) -> bool:
        """Held, if only on a file that has lost its name."""
        return self._lock.held

    @property
    def stands(self) -> bool:
        """Held, and on the file that has the name now."""
        return self._lock.held and _is_named(self._lock.fileno(), self.path)

    @property
    def inheritable(self) -> bool:
        """Kept over exec(), on purpose: then the lock is free only when all children are gone."""
        return self._lock.inheritable

    @inheritable.setter
    def inheritable(self, on: bool) -> None:
        self._lock.inheritable = on


def _is_named(fd: int, path: str | Path) -> bool:
    try:
        return os.path.samestat(os.lstat(path), os.fstat(fd))
    except OSError:
        return False


class RingGuard:
    """The guard of one ring file, held or not. FileNotFoundError if there is no such file.

    A launch takes the guard of its ring right after it made or adopted it, and then looks whether the ring still has
    its name. A process that removes a ring takes the guard first and holds it until the name is gone. So the removal
    sees the launch, or the launch sees that it has to make another ring.
    """

    def __init__(self, file: Path) -> None:
        self._file = file
        self._fd = os.open(file, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)

    def try_take(self) -> bool:
        """Hold it; False if another process does."""
        try:
            fcntl.fcntl(self._fd, fcntl.F_OFD_SETLK, _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, BYTE, 1, 0))
        except (BlockingIOError, PermissionError):
            return False
        return True

    def take(self, timeout_s: float = WAIT_S) -> bool:
        """Hold it, once a removal of the ring is done; False if the ring has lost its name by then."""
        end = time.monotonic() + timeout_s
        while not self.try_take():
            if time.monotonic() > end:
                waited = f"another process has been removing it for {timeout_s:g} s"
                raise TimeoutError(f"{self._file}: {waited}; start again")
            time.sleep(LOOK_EVERY_S)
        return self.has_name()

    def has_name(self) -> bool:
        """True if the file that it guards is still the one of that name."""
        return _is_named(self._fd, self._file)

    def release(self) -> None:
        os.close(self._fd)


# -- samples of dead processes -----


Step = tuple[str, int, str, str]  # label and pid of the dead owner, from which state, to which


def taken_back(ring: Ring, reaped: Iterable[Reaped], what: str = "slots") -> Iterator[tuple[str, list[int]]]:
    """Texts, one for each dead owner and step, and the samples that it is about.

    A slot that went back to FREE held no sample yet; any other keeps its sample, which may only have moved on since.
    """
    steps: dict[Step, list[int]] = {}
    for one in reaped:
        uid = UID_NONE if one.to == State.FREE else int(ring.line(one.slot)["uid"])
        steps.setdefault((one.label, one.pid, one.frm.name, one.to.name), []).append(uid)
    for (label, pid, before, after), uids in steps.items():
        whose = f"{label} (pid {pid})" if pid else label  # of a caller the entry alone is known
        text = f"{len(uids)} {what} of {whose} went back from {before} to {after}: it died"
        yield text, [uid for uid in uids if uid != UID_NONE]
