"""Locks by file: the lock of a role, the guard of a ring's file, and the samples that a reaper took back from the dead.

Talks to lock files through the C++ core, and to a ring's file through a descriptor of its own. Knows nothing of roles
or of the content of slots.
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
    """An open-file-description lock of a file, which is made if needed; the kernel drops the lock with its holder.

    The lock counts while its file has the name (it `stands`). If the name was removed, or leads to another file, the
    process must lock the file that has the name now, or it has lost the role. The file holds the holder's pid, for
    people. RingError if the name leads to something that is no file.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self._lock = CoreLock(path)

    def try_acquire(self) -> bool:
        """Take the lock; False if another process holds it. A lock that does not stand any more is taken again."""
        if self.stands:
            return True
        for _ in range(ATTEMPTS):
            lock = CoreLock(self.path)
            if not lock.try_acquire():
                return False
            if _is_named(lock.fileno(), self.path):
                self._use(lock)
                return True
            lock.release()  # its file was removed between open and lock: look at the file that has the name now
        return False

    def acquire(self, timeout_s: float) -> None:
        """Take the lock within the time; LockTimeout names its holder."""
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
        """Pid of the holder, -1 if the file has none; None if the lock is free."""
        return self._lock.holder()

    def fileno(self) -> int:
        return self._lock.fileno()

    @property
    def held(self) -> bool:
        """True while the lock is held, even of a file that has lost its name."""
        return self._lock.held

    @property
    def stands(self) -> bool:
        """True while the lock is held, of the file that has the name now."""
        return self._lock.held and _is_named(self._lock.fileno(), self.path)

    @property
    def inheritable(self) -> bool:
        """True if exec() keeps the lock, which is then free only when all children are gone."""
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
    """The guard of a ring file, against its removal. FileNotFoundError if there is no such file.

    A launch takes the guard of its ring right after it made or adopted the ring, and then checks that the ring still
    has its name. A process that removes a ring takes the guard first and holds it until the name is gone. So either the
    removal finds the guard taken, or the launch finds the name gone and makes another ring.
    """

    def __init__(self, file: Path) -> None:
        self._file = file
        self._fd = os.open(file, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)

    def try_take(self) -> bool:
        """Take the guard; False if another process holds it."""
        try:
            fcntl.fcntl(self._fd, fcntl.F_OFD_SETLK, _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, BYTE, 1, 0))
        except (BlockingIOError, PermissionError):
            return False
        return True

    def take(self, timeout_s: float = WAIT_S) -> bool:
        """Take the guard, after a removal under way; False if the ring has lost its name by then."""
        end = time.monotonic() + timeout_s
        while not self.try_take():
            if time.monotonic() > end:
                waited = f"another process has been removing it for {timeout_s:g} s"
                raise TimeoutError(f"{self._file}: {waited}; start again")
            time.sleep(LOOK_EVERY_S)
        return self.has_name()

    def has_name(self) -> bool:
        """True if the name still leads to the guarded file."""
        return _is_named(self._fd, self._file)

    def release(self) -> None:
        os.close(self._fd)


# -- samples of dead processes -----


Step = tuple[str, int, str, str]  # label and pid of the dead owner, from which state, to which


def taken_back(ring: Ring, reaped: Iterable[Reaped], what: str = "slots") -> Iterator[tuple[str, list[int]]]:
    """A text for each dead owner and step, with the uids of its samples.

    A slot that went back to FREE held no sample yet. In any other slot the sample stays, though its state may have
    changed since.
    """
    steps: dict[Step, list[int]] = {}
    for sample in reaped:
        uid = UID_NONE if sample.to == State.FREE else int(ring.line(sample.slot)["uid"])
        steps.setdefault((sample.label, sample.pid, sample.frm.name, sample.to.name), []).append(uid)
    for (label, pid, before, after), uids in steps.items():
        whose = f"{label} (pid {pid})" if pid else label  # of a caller the entry alone is known
        text = f"{len(uids)} {what} of {whose} went back from {before} to {after}: it died"
        yield text, [uid for uid in uids if uid != UID_NONE]
