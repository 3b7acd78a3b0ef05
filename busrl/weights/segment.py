"""The shared-memory segment of the weights: its bytes, how it is made and how it is recognised.

Used by the sender and the receivers of `weights.shm`. Knows nothing of who publishes when.

Little-endian, 8-byte words: a 4096-byte header, the manifest as JSON, two buffers, and behind each a log of changes,
all at multiples of 4096.
    0x00 magic "busrlwts"    0x08 layout    0x10 size of file    0x18 manifest offset    0x20 manifest bytes
    0x28 bytes of a buffer   0x30 offset of buffer 0             0x38 offset of buffer 1 0x40 writer's pid
    0x48 bytes of a log      0x50 offset of log 0                0x58 offset of log 1
    0x80 + 64 k, buffer k:   +0 seq (odd: being written)  +8 version  +16 step  +24 digest  +32 version being written
                             +40 bytes of its log in use
A log holds frames of `weights.sparse`; with none, buffer k is of its version and step, else of the last frame's.

- A segment appears under its name complete, by a rename; a file that is not complete never has that name.
- The writer never touches the newest complete buffer, so one complete version is always there after the first.
- Bytes 1 and 2 of the file are locks (of open files, so that the kernel gives up those of the dead): who reads buffer
  k shares lock k, who writes it holds it alone. A reader needs no write access for that.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import struct
import time
from pathlib import Path

import numpy as np
import numpy.typing as npt

from busrl.errors import SharedMemoryFull, UserError
from busrl.weights.manifest import Manifest
from busrl.weights.sparse import foot_of

MAGIC = int.from_bytes(b"busrlwts", "little")
LAYOUT = 2
HEADER = 4096
PAGE = 4096
W_MAGIC, W_LAYOUT, W_SIZE, W_MANIFEST, W_MANIFEST_BYTES, W_BYTES, W_BUFFERS, W_PID = 0, 1, 2, 3, 4, 5, 6, 8
W_LOG_BYTES, W_LOGS = 9, 10
BUFFER_WORDS, FIRST_BUFFER_WORD = 8, 16
SEQ, VERSION, STEP, CHECKSUM, WRITING, LOGGED = 0, 1, 2, 3, 4, 5
POPULATE_READ, POPULATE_WRITE, HUGE_PAGES = 22, 23, 14  # advice that Python has no names for
LOCK_LOOK_S = 0.001

Words = npt.NDArray[np.uint64]
Bytes = npt.NDArray[np.uint8]


class Segment:
    """A mapping of the file; `inode` tells whether the name means another file by now."""

    def __init__(self, path: Path, descriptor: int, writable: bool) -> None:
        status = os.fstat(descriptor)
        self.path = path
        self.inode = status.st_ino
        self._file = os.dup(descriptor)  # the locks are of this open file
        self._writable = writable
        access = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        self._map = mmap.mmap(descriptor, status.st_size, mmap.MAP_SHARED, access)
        self.words: Words = np.frombuffer(self._map, np.uint64, HEADER // 8)
        whole: Bytes = np.frombuffer(self._map, np.uint8)
        start = int(self.words[W_MANIFEST])
        self.manifest_json = whole[start : start + int(self.words[W_MANIFEST_BYTES])].tobytes()
        self.manifest = Manifest.from_json(self.manifest_json)
        nbytes = int(self.words[W_BYTES])
        offsets = [int(self.words[W_BUFFERS + k]) for k in range(2)]
        self.data = [whole[offset : offset + nbytes] for offset in offsets]
        log_bytes = int(self.words[W_LOG_BYTES])
        logs = [int(self.words[W_LOGS + k]) for k in range(2)]
        self.log = [whole[offset : offset + log_bytes] for offset in logs]
        self.buffer = [self.words[FIRST_BUFFER_WORD + BUFFER_WORDS * k :][:BUFFER_WORDS] for k in range(2)]

    def newest(self) -> int | None:
        """Index of the complete buffer with the highest version, None if neither is complete."""
        found: int | None = None
        for k, words in enumerate(self.buffer):
            seq = int(words[SEQ])
            if seq and not seq & 1 and (found is None or self.stamp(k) > self.stamp(found)):
                found = k
        return found

    def stamp(self, k: int) -> tuple[int, int]:
        """Version and step of buffer k with its log."""
        version, step, size = foot_of(self.log[k][: int(self.buffer[k][LOGGED])])
        return (version, step) if size else (int(self.buffer[k][VERSION]), int(self.buffer[k][STEP]))

    def prefault(self) -> None:
        """Map all pages of both buffers now, and in large ones where the machine has them: a fault in the middle of
        a copy costs more than the copy of its page."""
        for k in range(2):
            start, size = int(self.words[W_BUFFERS + k]), _round_up(len(self.data[k]))
            for advice in (HUGE_PAGES, POPULATE_WRITE if self._writable else POPULATE_READ):
                with contextlib.suppress(OSError):  # an older kernel, or none to be had: the pages come one by one
                    if size:
                        self._map.madvise(advice, start, size)

    def lock(self, k: int, alone: bool, patience_s: float = 0.0) -> bool:
        """Take the lock of buffer k; False if it is not to be had before the deadline."""
        deadline = time.monotonic() + patience_s
        kind = fcntl.F_WRLCK if alone else fcntl.F_RDLCK
        while not self._set_lock(k, kind):
            if time.monotonic() >= deadline:
                return False
            time.sleep(LOCK_LOOK_S)
        return True

    def unlock(self, k: int) -> None:
        self._set_lock(k, fcntl.F_UNLCK)

    def _set_lock(self, k: int, kind: int) -> bool:
        try:
            fcntl.fcntl(self._file, fcntl.F_OFD_SETLK, struct.pack("hhqqi4x", kind, os.SEEK_SET, 1 + k, 1, 0))
        except (BlockingIOError, PermissionError):
            return False
        return True

    @property
    def writer_pid(self) -> int:
        return int(self.words[W_PID])

    def still_named(self) -> bool:
        """Whether the path still leads to this file (a restarted learner may have put another one there)."""
        try:
            return os.stat(self.path).st_ino == self.inode
        except FileNotFoundError:
            return False

    def close(self) -> None:
        self.buffer, self.data, self.log = [], [], []
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
        self.words = np.empty(0, np.uint64)
        try:
            self._map.close()
        except BufferError:
            pass  # a view of it is still alive somewhere; the mapping ends with it


def attach(path: Path, writable: bool = False) -> Segment | None:
    """The segment of that name, None if there is no such file or it is not a segment of this layout.

    UserError for a file of another user: its owner could change the weights, or read them.
    """
    try:
        descriptor = os.open(path, (os.O_RDWR if writable else os.O_RDONLY) | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}; it is no file of this run, have it removed") from None
    try:
        owner = os.fstat(descriptor).st_uid
        if owner != os.geteuid():
            raise UserError(f"{path} belongs to user {owner}, not to you ({os.geteuid()}): have it removed")
        head = np.frombuffer(os.pread(descriptor, 24, 0).ljust(24, b"\0"), np.uint64)
        if (head[0], head[1], head[2]) != (MAGIC, LAYOUT, os.fstat(descriptor).st_size):
            return None
        return Segment(path, descriptor, writable)
    finally:
        os.close(descriptor)


def create(path: Path, manifest: Manifest, log_bytes: int = 0) -> Segment:
    """A new segment under that name, in place of one that may be there; readable by this user only."""
    text = manifest.to_json()
    first = _round_up(HEADER + len(text))
    second = first + _round_up(manifest.nbytes)
    logs = second + _round_up(manifest.nbytes)
    size = logs + 2 * _round_up(log_bytes)
    temporary = path.with_name(f"{path.name}.{os.getpid()}.new")
    temporary.unlink(missing_ok=True)
    descriptor = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        _allocate(descriptor, path, size)
        words = np.zeros(HEADER // 8, np.uint64)
        words[: W_PID + 1] = (MAGIC, LAYOUT, size, HEADER, len(text), manifest.nbytes, first, second, os.getpid())
        words[W_LOG_BYTES : W_LOGS + 2] = (log_bytes, logs, logs + _round_up(log_bytes))
        os.pwrite(descriptor, words.tobytes(), 0)
        os.pwrite(descriptor, text, HEADER)
        os.rename(temporary, path)
        return Segment(path, descriptor, writable=True)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    finally:
        os.close(descriptor)


def _allocate(descriptor: int, path: Path, size: int) -> None:
    """Reserve all pages now: running out later would be a bus error in the middle of a copy."""
    try:
        os.posix_fallocate(descriptor, 0, size)
    except OSError as problem:
        if problem.errno != errno.ENOSPC:
            raise
        free = os.statvfs(path.parent).f_bavail * os.statvfs(path.parent).f_frsize
        raise SharedMemoryFull(
            f"{path}: two buffers of weights need {size} bytes, {path.parent} has {free} free; "
            'free some, mount it larger, or use weights.transport = "broadcast"'
        ) from problem


def _round_up(size: int) -> int:
    return -(-size // PAGE) * PAGE
