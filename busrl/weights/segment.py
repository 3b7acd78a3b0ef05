"""The shared-memory segment of the weights: its bytes, how it is made and how it is recognised.

Used by the sender and the receivers of `weights.shm`. Knows nothing of who publishes when.

Little-endian, 8-byte words: a 4096-byte header, the manifest as JSON, then two buffers at multiples of 4096.
    0x00 magic "busrlwts"    0x08 layout    0x10 size of file    0x18 manifest offset    0x20 manifest bytes
    0x28 bytes of a buffer   0x30 offset of buffer 0             0x38 offset of buffer 1 0x40 writer's pid
    0x80 + 64 k, buffer k:   +0 seq (odd: being written)  +8 version  +16 step  +24 checksum  +32 version being written
The checksum word is 0, or 1 << 32 | crc32 of (version, step, bytes).

- A segment appears under its name complete, by a rename; a file that is not complete never has that name.
- The writer never touches the newest complete buffer, so one complete version is always there after the first.
"""

from __future__ import annotations

import errno
import mmap
import os
import zlib
from pathlib import Path

import numpy as np
import numpy.typing as npt

from busrl.errors import SharedMemoryFull, UserError
from busrl.weights.manifest import Manifest

MAGIC = int.from_bytes(b"busrlwts", "little")
LAYOUT = 1
HEADER = 4096
PAGE = 4096
W_MAGIC, W_LAYOUT, W_SIZE, W_MANIFEST, W_MANIFEST_BYTES, W_BYTES, W_BUFFERS, W_PID = 0, 1, 2, 3, 4, 5, 6, 8
BUFFER_WORDS, FIRST_BUFFER_WORD = 8, 16
SEQ, VERSION, STEP, CHECKSUM, WRITING = 0, 1, 2, 3, 4

Words = npt.NDArray[np.uint64]
Bytes = npt.NDArray[np.uint8]


class Segment:
    """A mapping of the file; `inode` tells whether the name means another file by now."""

    def __init__(self, path: Path, descriptor: int, writable: bool) -> None:
        status = os.fstat(descriptor)
        self.path = path
        self.inode = status.st_ino
        access = mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ
        self._map = mmap.mmap(descriptor, status.st_size, access=access)
        self.words: Words = np.frombuffer(self._map, np.uint64, HEADER // 8)
        whole: Bytes = np.frombuffer(self._map, np.uint8)
        start = int(self.words[W_MANIFEST])
        self.manifest_json = whole[start : start + int(self.words[W_MANIFEST_BYTES])].tobytes()
        self.manifest = Manifest.from_json(self.manifest_json)
        nbytes = int(self.words[W_BYTES])
        offsets = [int(self.words[W_BUFFERS + k]) for k in range(2)]
        self.data = [whole[offset : offset + nbytes] for offset in offsets]
        self.buffer = [self.words[FIRST_BUFFER_WORD + BUFFER_WORDS * k :][:BUFFER_WORDS] for k in range(2)]

    def newest(self) -> int | None:
        """Index of the complete buffer with the highest version, None if neither is complete."""
        found: int | None = None
        for k, words in enumerate(self.buffer):
            seq = int(words[SEQ])
            if seq and not seq & 1 and (found is None or words[VERSION] > self.buffer[found][VERSION]):
                found = k
        return found

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
        self.buffer, self.data = [], []
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


def create(path: Path, manifest: Manifest) -> Segment:
    """A new segment under that name, in place of one that may be there; readable by this user only."""
    text = manifest.to_json()
    first = _round_up(HEADER + len(text))
    second = first + _round_up(manifest.nbytes)
    size = second + _round_up(manifest.nbytes)
    temporary = path.with_name(f"{path.name}.{os.getpid()}.new")
    temporary.unlink(missing_ok=True)
    descriptor = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        _allocate(descriptor, path, size)
        words = np.zeros(HEADER // 8, np.uint64)
        words[: W_PID + 1] = (MAGIC, LAYOUT, size, HEADER, len(text), manifest.nbytes, first, second, os.getpid())
        os.pwrite(descriptor, words.tobytes(), 0)
        os.pwrite(descriptor, text, HEADER)
        os.rename(temporary, path)
        return Segment(path, descriptor, writable=True)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    finally:
        os.close(descriptor)


def checksum(version: int, step: int, data: Bytes) -> int:
    """The checksum word of a buffer; never 0."""
    head = version.to_bytes(8, "little") + step.to_bytes(8, "little")
    return 1 << 32 | zlib.crc32(data.data, zlib.crc32(head))


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
