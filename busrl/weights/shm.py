"""Weights through shared memory: the learner writes one of two buffers, engines on the host copy the newest one.

ShmSender is the learner's side, ShmReceiver that of a process with an engine. VersionReceiver serves a process without
a model (the scripted engine), which never loads torch. They talk to one file in /dev/shm. Knows nothing of the bus or
of models.

Little-endian, 8-byte words: a 4096-byte header, the manifest as JSON, two buffers, and behind each a log of changes,
all at multiples of 4096.
    0x00 magic "busrlwts"    0x08 layout    0x10 size of file    0x18 manifest offset    0x20 manifest bytes
    0x28 bytes of a buffer   0x30 offset of buffer 0             0x38 offset of buffer 1 0x40 writer's pid
    0x48 bytes of a log      0x50 offset of log 0                0x58 offset of log 1
    0x80 + 64 k, buffer k:   +0 seq (odd: being written)  +8 version  +16 step  +24 digest  +32 version being written
                             +40 bytes of its log in use
A log holds frames of `weights.sparse`. Buffer k has the version and step of the last frame in its log, or its own if
the log is empty.

- A segment gets its name, by a rename, when it is complete.
- The writer never touches the newest complete buffer, so there is always a complete version after the first.
- Bytes 1 and 2 of the file are locks (of open files, so the kernel releases those of a dead process): a reader of
  buffer k shares lock k, its writer holds it alone. A shared lock needs no write access.
- Each way makes one copy: tensors to buffer, buffer to tensors. A copy that was overtaken all the same (its reader was
  stopped), or whose writer died in the middle, shows in the buffer's sequence word and is repeated before `fetch`
  returns. So an engine, which waits in `fetch`, never runs with half a version. If `fetch` fails after it has begun to
  copy, its error says that the model must not be used.
- Where the machine may reorder stores (all but x86-64) a digest of the values is compared too; elsewhere only with
  weights.checksum.
- With sparse updates a version may be a frame in the log behind the newest full version. A receiver with that full
  version takes the frames since its own version; any other takes the full version and all its frames.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import mmap
import os
import platform
import struct
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from busrl.errors import SharedMemoryFull, UserError, WeightsTimeout
from busrl.system import files
from busrl.weights.base import (
    NOTHING,
    GroupCallbacks,
    Sender,
    TensorReceiver,
    Write,
    alive,
    is_named,
    open_own,
    poll,
)
from busrl.weights.sparse import Follower, FrameError, Shadow, compare, foot_of, split, unpack
from busrl.weights.tensors import Manifest, block_of, is_plain, new_block

if TYPE_CHECKING:
    import torch

    from busrl.weights.factory import TransportSettings

log = logging.getLogger("busrl")
MAGIC = int.from_bytes(b"busrlwts", "little")
LAYOUT = 2
HEADER = 4096
PAGE = 4096
W_MANIFEST, W_MANIFEST_BYTES, W_BYTES, W_BUFFERS, W_PID, W_LOG_BYTES, W_LOGS = 3, 4, 5, 6, 8, 9, 10
BUFFER_WORDS, FIRST_BUFFER_WORD = 8, 16
SEQ, VERSION, STEP, CHECKSUM, WRITING, LOGGED = 0, 1, 2, 3, 4, 5
POPULATE_READ, POPULATE_WRITE, HUGE_PAGES = 22, 23, 14  # advice to the kernel without a name in Python
LOCK_LOOK_S = 0.001
ORDERED_STORES = platform.machine() in ("x86_64", "AMD64")
PATIENCE_S = 1.0  # a copy takes a fraction of it; a reader that was stopped in a copy repeats it

Words = npt.NDArray[np.uint64]
Bytes = npt.NDArray[np.uint8]


# -- the file --------------------------------------------------------------------------------------------------


class Segment:
    """A mapping of the file; its `inode` shows whether the name leads to another file by now."""

    def __init__(self, descriptor: int, writable: bool) -> None:
        status = os.fstat(descriptor)
        self.inode = status.st_ino
        self._file = os.dup(descriptor)  # the open file that has the locks
        self._writable = writable
        access = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        self._map = mmap.mmap(descriptor, status.st_size, mmap.MAP_SHARED, access)
        self.words: Words = np.frombuffer(self._map, np.uint64, HEADER // 8)
        data: Bytes = np.frombuffer(self._map, np.uint8)
        start = int(self.words[W_MANIFEST])
        self.manifest = Manifest.from_json(data[start : start + int(self.words[W_MANIFEST_BYTES])].tobytes())
        nbytes, log_bytes = int(self.words[W_BYTES]), int(self.words[W_LOG_BYTES])
        self.data = [data[at : at + nbytes] for at in map(int, self.words[W_BUFFERS : W_BUFFERS + 2])]
        self.log = [data[at : at + log_bytes] for at in map(int, self.words[W_LOGS : W_LOGS + 2])]
        self.buffer = [self.words[FIRST_BUFFER_WORD + BUFFER_WORDS * k :][:BUFFER_WORDS] for k in range(2)]

    def newest(self) -> int | None:
        """Index of the complete buffer with the highest version, None if neither is complete."""
        seqs = [int(words[SEQ]) for words in self.buffer]
        return max((k for k, seq in enumerate(seqs) if seq and not seq & 1), key=self.stamp, default=None)

    def stamp(self, k: int) -> tuple[int, int]:
        """(version, step) of buffer k with its log."""
        version, step, size = foot_of(self.log[k][: int(self.buffer[k][LOGGED])])
        return (version, step) if size else (int(self.buffer[k][VERSION]), int(self.buffer[k][STEP]))

    def begin(self, k: int, version: int) -> None:
        """Mark buffer k as being written: it holds no version until `complete`."""
        words = self.buffer[k]
        words[WRITING] = version
        words[SEQ] = (int(words[SEQ]) + 1) | 1  # odd, even if a dead writer left an odd number
        words[LOGGED] = 0

    def complete(self, k: int, version: int, step: int, digest: int) -> None:
        """Mark buffer k as a whole version; `digest` 0: it has none."""
        words = self.buffer[k]
        words[VERSION], words[STEP], words[CHECKSUM] = version, step, digest
        words[SEQ] = int(words[SEQ]) + 1

    def prefault(self) -> None:
        """Map all pages of both buffers now, in large pages if possible: a fault costs more than copying its page."""
        for k in range(2):
            start, size = int(self.words[W_BUFFERS + k]), _round_up(len(self.data[k]))
            for advice in (HUGE_PAGES, POPULATE_WRITE if self._writable else POPULATE_READ):
                with contextlib.suppress(OSError):  # an older kernel or no memory: pages come one by one
                    if size:
                        self._map.madvise(advice, start, size)

    def lock(self, k: int, alone: bool, patience_s: float = 0.0) -> bool:
        """Take the lock of buffer k; False if another process keeps it past the deadline."""
        kind = fcntl.F_WRLCK if alone else fcntl.F_RDLCK
        return poll(lambda: self._set_lock(k, kind), patience_s, LOCK_LOOK_S)

    def unlock(self, k: int) -> None:
        self._set_lock(k, fcntl.F_UNLCK)

    def _set_lock(self, k: int, kind: int) -> bool:
        try:
            fcntl.fcntl(self._file, fcntl.F_OFD_SETLK, struct.pack("hhqqi4x", kind, os.SEEK_SET, 1 + k, 1, 0))
        except (BlockingIOError, PermissionError):
            return False
        return True

    def close(self) -> None:
        self.buffer, self.data, self.log = [], [], []
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
        self.words = np.empty(0, np.uint64)
        with contextlib.suppress(BufferError):  # a view is still alive; the mapping ends with it
            self._map.close()


def attach_segment(path: Path, writable: bool = False) -> Segment | None:
    """The segment of that name, None if there is no such file or it is not a segment of this layout. UserError for a
    file of another user."""
    descriptor = open_own(path, os.O_RDWR if writable else os.O_RDONLY)
    if descriptor is None:
        return None
    try:
        head = np.frombuffer(os.pread(descriptor, 24, 0).ljust(24, b"\0"), np.uint64)
        if (head[0], head[1], head[2]) != (MAGIC, LAYOUT, os.fstat(descriptor).st_size):
            return None
        return Segment(descriptor, writable)
    finally:
        os.close(descriptor)


def create_segment(path: Path, manifest: Manifest, log_bytes: int = 0) -> Segment:
    """Make a segment under that name, in place of an older one; readable by this user only."""
    text = manifest.to_json()
    first = _round_up(HEADER + len(text))
    second = first + _round_up(manifest.nbytes)
    logs = second + _round_up(manifest.nbytes)
    size = logs + 2 * _round_up(log_bytes)
    with files.replacing(path, durable=False) as descriptor:
        _allocate(descriptor, path, size)
        words = np.zeros(HEADER // 8, np.uint64)
        words[: W_PID + 1] = (MAGIC, LAYOUT, size, HEADER, len(text), manifest.nbytes, first, second, os.getpid())
        words[W_LOG_BYTES : W_LOGS + 2] = (log_bytes, logs, logs + _round_up(log_bytes))
        os.pwrite(descriptor, words.tobytes(), 0)
        os.pwrite(descriptor, text, HEADER)
        return Segment(descriptor, writable=True)


def _allocate(descriptor: int, path: Path, size: int) -> None:
    """Reserve all pages now: running out of memory later would be a SIGBUS in the middle of a copy."""
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


# -- the sender ------------------------------------------------------------------------------------------------


class ShmSender(Sender):
    """Writes versions. The learner's lock allows one sender per path. `threshold` 0: no sparse updates."""

    def __init__(
        self, path: str | Path, *, checksums: bool = False, threshold: float = 0.0, key_every: int = 32
    ) -> None:
        self.path = Path(path)
        self._checksums = checksums or not ORDERED_STORES
        self._threshold, self._key_every = threshold, key_every
        self._shadow: Shadow | None = None
        self._segment = attach_segment(self.path, writable=True)
        self._inherited = self._segment is not None  # of an earlier learner, perhaps of another run

    def newest(self) -> tuple[int, int]:
        k = None if self._segment is None else self._segment.newest()
        return NOTHING if self._segment is None or k is None else self._segment.stamp(k)

    def publish(self, version: int, step: int, tensors: Mapping[str, torch.Tensor]) -> None:
        newest, _ = self.newest()
        if version <= newest and not self._inherited:
            raise UserError(f"{self.path}: version {version} is not above {newest}, which is published; versions grow")
        segment = self._for(tensors, above=newest < version)
        if not self._write_changes(segment, newest, version, step, tensors):
            self._write_all(segment, version, step, tensors)

    def close(self) -> None:
        self._shadow = None
        if self._segment is not None:
            self._segment.close()
            self._segment = None

    def _write_all(self, segment: Segment, version: int, step: int, tensors: Mapping[str, torch.Tensor]) -> None:
        k = 1 - (segment.newest() or 0)  # never the newest complete one; 1 if there is none
        if not segment.lock(k, alone=True, patience_s=PATIENCE_S):
            log.warning("weights: a reader of version %d is stopped in its copy; overwriting it", segment.stamp(k)[0])
        segment.begin(k, version)
        flat = block_of(segment.data[k])
        segment.manifest.gather(tensors, flat, self.hook)
        digest = segment.manifest.digest(segment.manifest.views(flat), version, step) if self._checksums else 0
        segment.complete(k, version, step, digest)
        segment.unlock(k)
        self._remember(segment, flat)

    def _remember(self, segment: Segment, flat: torch.Tensor) -> None:
        """Keep a copy to compare the next version with."""
        if not len(segment.log[0]):
            return
        if self._shadow is None:
            block = new_block(segment.manifest.nbytes)
            self._shadow = Shadow(segment.manifest, block, self._threshold, self._key_every, self._checksums)
        self._shadow.block.copy_(flat)
        self._shadow.full()

    def _write_changes(
        self, segment: Segment, newest: int, version: int, step: int, tensors: Mapping[str, torch.Tensor]
    ) -> bool:
        """Append what changed to the log of the newest buffer; False if all values have to be written."""
        k, shadow = segment.newest(), self._shadow
        if k is None or shadow is None:
            return False
        words, area = segment.buffer[k], segment.log[k]
        used = int(words[LOGGED])
        frame = shadow.frame(tensors, newest, version, step, len(area) - used)
        if frame is None:
            return False
        area[used : used + len(frame)] = np.frombuffer(frame, np.uint8)
        self._reached("frame")
        words[LOGGED] = used + len(frame)  # from here on it counts
        return True

    def _for(self, tensors: Mapping[str, torch.Tensor], above: bool) -> Segment:
        """The segment for these tensors: the present one, or a new one if that is of another run or model. A new one
        too if the file was removed, since processes that attach by its name would not find the present one."""
        inherited, self._inherited = self._inherited, False
        present = self._segment
        if present is not None and above and is_named(self.path, present.inode) and self._suits(present, tensors):
            if inherited:
                present.words[W_PID] = os.getpid()
                present.prefault()
            return present
        self.close()
        manifest = Manifest.of(tensors)
        self._segment = create_segment(self.path, manifest, self._log_bytes(manifest))
        self._segment.prefault()
        return self._segment

    def _suits(self, segment: Segment, tensors: Mapping[str, torch.Tensor]) -> bool:
        return segment.manifest.matches(tensors) and len(segment.log[0]) == self._log_bytes(segment.manifest)

    def _log_bytes(self, manifest: Manifest) -> int:
        return manifest.nbytes // 2 if self._threshold and Shadow.fits(manifest) else 0


# -- receivers -------------------------------------------------------------------------------------------------


class VersionReceiver(TensorReceiver):
    """Follows the numbers of versions without their values; `fetch` returns the newest, within `timeout_s`. A version
    counts only if its buffer is complete and was not written to while its words were read."""

    def __init__(self, path: str | Path, *, timeout_s: float = 10.0) -> None:
        self.path = Path(path)
        self._timeout_s = timeout_s
        self._segment: Segment | None = None
        self._problem = ""  # why `fetch` did not accept the version that it found

    def newest(self) -> tuple[int, int]:
        segment = self._current()
        while segment is not None and (k := segment.newest()) is not None:
            seq, stamp = int(segment.buffer[k][SEQ]), segment.stamp(k)
            if not seq & 1 and int(segment.buffer[k][SEQ]) == seq:
                return stamp
        return NOTHING

    def fetch(self, params: dict[str, torch.Tensor]) -> tuple[int, int]:
        deadline = time.monotonic() + self._timeout_s
        while True:
            segment = self._current()
            if segment is not None and (stamp := self._copy(segment, params)) is not None:
                return stamp
            if segment is None or segment.newest() is None or time.monotonic() > deadline:
                why = f"; {self._problem}: the model holds parts of it and must not be used" if self._problem else ""
                raise WeightsTimeout(f"{self._writer()}: no complete version within {self._timeout_s:g} s{why}")

    def close(self) -> None:
        if self._segment is not None:
            self._segment.close()
            self._segment = None

    def _copy(self, segment: Segment, params: dict[str, torch.Tensor]) -> tuple[int, int] | None:
        """Take the newest complete version (here its number alone); None if it was written to meanwhile."""
        stamp = self.newest()
        return None if stamp == NOTHING else stamp

    def _current(self) -> Segment | None:
        if self._segment is not None and not is_named(self.path, self._segment.inode):
            self.close()
        if self._segment is None:
            self._segment = attach_segment(self.path)
        return self._segment

    def _writer(self) -> str:
        if self._segment is None:
            return f"{self.path} does not exist: the learner has published nothing yet"
        pid = int(self._segment.words[W_PID])
        torn = [int(words[WRITING]) for words in self._segment.buffer if int(words[SEQ]) & 1]
        doing = f", in the middle of version {torn[0]}" if torn else ""
        return f"{self.path}: writer pid {pid} is {alive(pid)}{doing}"


@dataclass
class _Position:
    """The place in a segment that the values in the model come from."""

    segment: Segment
    k: int
    seq: int
    logged: int = 0


class ShmReceiver(VersionReceiver):
    """Copies the newest version. `timeout_s` bounds a fetch that keeps being overtaken."""

    def __init__(self, path: str | Path, *, timeout_s: float = 10.0) -> None:
        super().__init__(path, timeout_s=timeout_s)
        self._staging: torch.Tensor | None = None
        self._tensors = Follower()  # the tensors with the values of `_at`
        self._at: _Position | None = None

    def _copy(self, segment: Segment, params: dict[str, torch.Tensor]) -> tuple[int, int] | None:
        k = segment.newest()
        if k is None or not segment.lock(k, alone=False):
            return None
        at, self._at = self._at, None  # until the copy is complete
        try:
            segment.manifest.check(params)
            at = self._follow(segment, k, at, params) or self._whole(segment, k, params)
            stamp, end = segment.stamp(k), int(segment.buffer[k][LOGGED])
        except FrameError as problem:
            self._problem = str(problem)
            return None
        finally:
            segment.unlock(k)
        self._at = at
        if at is None or at.logged != end:  # the next attempt follows from here
            return None
        self._problem = ""
        return stamp

    def _follow(
        self, segment: Segment, k: int, at: _Position | None, params: dict[str, torch.Tensor]
    ) -> _Position | None:
        """Apply the frames since `at`; None if the model does not hold what they follow."""
        seq = int(segment.buffer[k][SEQ])
        if at is None or (at.segment, at.k, at.seq) != (segment, k, seq) or not self._tensors.holds(params):
            return None
        try:
            return self._frames(at)
        except FrameError as problem:
            log.warning("weights: %s; all values are copied", problem)
            return None

    def _whole(self, segment: Segment, k: int, params: dict[str, torch.Tensor]) -> _Position | None:
        """Copy buffer k, and its frames after it; None if it was written to meanwhile."""
        words = segment.buffer[k]
        seq, stamp, digest = int(words[SEQ]), (int(words[VERSION]), int(words[STEP])), int(words[CHECKSUM])
        if seq & 1:
            return None
        flat = block_of(segment.data[k])
        staged = bool(digest) and not all(map(is_plain, params.values()))
        if staged:
            flat = self._stage(flat)
            compare(segment.manifest, segment.manifest.views(flat), stamp, digest)
        segment.manifest.scatter(flat, params)
        self._reached("copied")
        if int(words[SEQ]) != seq:
            self._problem = f"version {stamp[0]} was overwritten while it was copied"
            return None
        if digest and not staged:
            compare(segment.manifest, params, stamp, digest)
        self._tensors.start(segment.manifest, params)
        return self._frames(_Position(segment, k, seq))

    def _frames(self, at: _Position) -> _Position:
        """Apply the frames of the log after `at`; FrameError if one is damaged or does not fit."""
        end = int(at.segment.buffer[at.k][LOGGED])
        self._tensors.follow(map(unpack, split(at.segment.log[at.k][at.logged : end])))
        at.logged = end
        return at

    def _stage(self, flat: torch.Tensor) -> torch.Tensor:
        """Copy into staging memory on the way to an accelerator, so that the checked bytes are the bytes that arrive.
        """
        if self._staging is None or len(self._staging) != len(flat):
            self._staging = new_block(len(flat))
        self._staging.copy_(flat)
        return self._staging

    def _current(self) -> Segment | None:
        before, segment = self._segment, super()._current()
        if segment is not None and segment is not before:
            segment.prefault()
        return segment


# -- as a transport --------------------------------------------------------------------------------------------


def make_sender(settings: TransportSettings, callbacks: GroupCallbacks | None, write: Write | None) -> ShmSender:
    return ShmSender(
        settings.segment, checksums=settings.checksum, threshold=settings.threshold, key_every=settings.key_every,
    )


def make_receiver(settings: TransportSettings, name: str) -> ShmReceiver:
    return ShmReceiver(settings.segment, timeout_s=settings.timeout_s)
