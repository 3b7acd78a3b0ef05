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

Which version of the weights is newest in the shared-memory segment, read without torch and without copying it.

Used by the receiver of `weights.shm`, which adds the copy, and as it stands by a process that has no model (the
scripted engine). Talks to one file in /dev/shm (`weights.segment`). Knows nothing of tensors.

- A version is named only if its buffer is complete and was not written to while its words were read.

Weights through shared memory: the learner writes one of two buffers, engines on the host copy the newest one.

Used by the learner and by everybody with an engine, behind `weights.base`. Talks to one file in /dev/shm
(`weights.segment`); which version is newest is read by `weights.versions`, what changed by `weights.sparse`. Knows
nothing of the bus or of models.

- One copy each way: the tensors go straight into a buffer, a buffer straight into the tensors. The writer leaves a
  buffer alone while somebody reads it, and each buffer has a sequence word, odd while it is written: a copy that was
  overtaken all the same (its reader was stopped), or whose writer died in its middle, is made again before `fetch`
  returns. So the engine, which waits in `fetch`, never runs with half a version; a `fetch` that raises after it has
  begun says that the model may not be used.
- Where the machine may reorder memory accesses (all but x86-64) a digest of the values decides as well, elsewhere if
  the learner was asked to write one (weights.checksum).
- With sparse updates a version may be a frame in the log behind the newest full one; who has that full version takes
  the frames since, who has not takes it and all its frames.
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
import threading
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

from busrl.errors import SharedMemoryFull, UserError, WeightsTimeout
from busrl.weights.base import NOTHING, Copies, Hook, Kind
from busrl.weights.sparse import Refused, Shadow, apply, foot_of, split, unpack
from busrl.weights.tensors import BoundTensors, Manifest, is_plain

if TYPE_CHECKING:
    import torch



# -- The shared-memory segment of the weights: its bytes, how it is made and how it is recognised ---------------------


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


def attach_segment(path: Path, writable: bool = False) -> Segment | None:
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


def create_segment(path: Path, manifest: Manifest, log_bytes: int = 0) -> Segment:
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


# -- Which version of the weights is newest in the shared-memory segment, read without torch and without copying it ---


LOOK_EVERY_S = 0.005


class VersionReceiver:
    """Follows the newest version; a fetch only notes which one it is. `timeout_s` bounds a fetch."""

    kind: Kind = "tensors"

    def __init__(self, path: str | Path, *, timeout_s: float = 10.0) -> None:
        self.path = Path(path)
        self._timeout_s = timeout_s
        self._segment: Segment | None = None

    def newest(self) -> tuple[int, int]:
        segment = self._current()
        while segment is not None and (k := segment.newest()) is not None:
            seq, stamp = int(segment.buffer[k][SEQ]), segment.stamp(k)
            if not seq & 1 and int(segment.buffer[k][SEQ]) == seq:
                return stamp
        return NOTHING

    def wait_for(self, version: int, timeout_s: float) -> tuple[int, int]:
        """Nothing in another process's memory can be waited on, so this looks every few milliseconds."""
        deadline, pause = time.monotonic() + timeout_s, threading.Event()
        while (found := self.newest())[0] < version:
            if time.monotonic() > deadline:
                raise WeightsTimeout(f"{self._where()}: no version {version} after {timeout_s:g} s, newest {found[0]}")
            pause.wait(LOOK_EVERY_S)
        return found

    def fetch(self, params: dict[str, torch.Tensor]) -> tuple[int, int]:
        deadline = time.monotonic() + self._timeout_s
        while True:
            segment = self._current()
            stamp = None if segment is None else self._take(segment, params)
            if stamp is not None:
                return stamp
            if segment is None or segment.newest() is None or time.monotonic() > deadline:
                raise WeightsTimeout(f"{self._where()}: no complete version within {self._timeout_s:g} s{self._why()}")

    def close(self) -> None:
        if self._segment is not None:
            self._segment.close()
            self._segment = None

    def _take(self, segment: Segment, params: dict[str, torch.Tensor]) -> tuple[int, int] | None:
        """Make the newest complete version one's own; None if it was written to meanwhile. Here: take note of it."""
        stamp = self.newest()
        return None if stamp == NOTHING else stamp

    def _current(self) -> Segment | None:
        """The segment that the path leads to now."""
        if self._segment is not None and not self._segment.still_named():
            self.close()
        if self._segment is None:
            self._segment = attach_segment(self.path)
        return self._segment

    def _why(self) -> str:
        """What a fetch that found a version has against it; empty if it found none."""
        return ""

    def _where(self) -> str:
        """The path, and what its writer was doing."""
        if self._segment is None:
            return f"{self.path} is not there: the learner has published nothing yet"
        pid = self._segment.writer_pid
        alive = "alive" if os.path.exists(f"/proc/{pid}") else "dead"
        torn = [int(words[WRITING]) for words in self._segment.buffer if int(words[SEQ]) & 1]
        doing = f", in the middle of version {torn[0]}" if torn else ""
        return f"{self.path}: writer pid {pid} is {alive}{doing}"


# -- Weights through shared memory: the learner writes one of two buffers, engines on the host copy the newest one ----


log = logging.getLogger("busrl")
ORDERED_STORES = platform.machine() in ("x86_64", "AMD64")
PATIENCE_S = 1.0  # a copy takes a fraction of it; a reader that was stopped in one does it again


class ShmSender(Copies):
    """Writes versions. One at a time per path: the learner's lock sees to that. `threshold` 0: no sparse updates."""

    def __init__(
        self,
        path: str | Path,
        *,
        checksums: bool = not ORDERED_STORES,
        threshold: float = 0.0,
        key_every: int = 32,
    ) -> None:
        self.path = Path(path)
        self.hook: Hook | None = None  # called with the name of each tensor copied
        self._checksums = checksums
        self._threshold, self._key_every = threshold, key_every
        self._shadow: Shadow | None = None
        self._segment = attach_segment(self.path, writable=True)
        self._inherited = self._segment is not None  # from a learner before this one, perhaps of another run

    def newest(self) -> tuple[int, int]:
        k = None if self._segment is None else self._segment.newest()
        return NOTHING if self._segment is None or k is None else self._segment.stamp(k)

    def publish(self, version: int, step: int, named: dict[str, torch.Tensor]) -> None:
        newest, _ = self.newest()
        if version <= newest and not self._inherited:
            raise UserError(f"{self.path}: version {version} is not above {newest}, which is published; versions grow")
        segment = self._for(named, above=newest < version)
        if not self._write_changes(segment, newest, version, step, named):
            self._write_all(segment, version, step, named)

    def close(self) -> None:
        self._shadow = None
        if self._segment is not None:
            self._segment.close()
            self._segment = None

    def _write_all(self, segment: Segment, version: int, step: int, named: dict[str, torch.Tensor]) -> None:
        k = 1 - (segment.newest() or 0)  # never the newest complete one; 1 if there is none
        if not segment.lock(k, alone=True, patience_s=PATIENCE_S):
            log.warning("weights: a reader of version %d is stopped in its copy; writing over it", segment.stamp(k)[0])
        words = segment.buffer[k]
        words[WRITING] = version
        words[SEQ] = (int(words[SEQ]) + 1) | 1  # odd, also over what a dead writer left
        words[LOGGED] = 0
        flat = torch.from_numpy(segment.data[k])
        segment.manifest.gather(named, flat, self.hook)
        words[VERSION], words[STEP] = version, step
        digest = segment.manifest.digest(segment.manifest.views(flat), version, step) if self._checksums else 0
        words[CHECKSUM] = digest
        words[SEQ] = int(words[SEQ]) + 1
        segment.unlock(k)
        self._remember(segment, flat)

    def _remember(self, segment: Segment, flat: torch.Tensor) -> None:
        """Keep a copy to compare the next version with."""
        if not len(segment.log[0]):
            return
        if self._shadow is None:
            block = torch.empty(segment.manifest.nbytes, dtype=torch.uint8)
            self._shadow = Shadow(segment.manifest, block, self._threshold, self._checksums)
        self._shadow.block.copy_(flat)
        self._shadow.full()

    def _write_changes(
        self, segment: Segment, newest: int, version: int, step: int, named: dict[str, torch.Tensor]
    ) -> bool:
        """Append what changed to the log of the newest buffer; False if all values shall be written."""
        k, shadow = segment.newest(), self._shadow
        if k is None or shadow is None or shadow.since_key + 1 >= self._key_every:
            return False
        words, area = segment.buffer[k], segment.log[k]
        used = int(words[LOGGED])
        frame = shadow.frame(named, newest, version, step, len(area) - used)
        if frame is None:
            return False
        area[used : used + len(frame)] = np.frombuffer(frame, np.uint8)
        if self.hook is not None:
            self.hook("frame")
        words[LOGGED] = used + len(frame)  # from here on it counts
        return True

    def _for(self, named: dict[str, torch.Tensor], above: bool) -> Segment:
        """The segment for this layout: the one there is, or a new one in place of another run's or model's.

        Or of one whose file was removed: whoever maps it still has its old versions, and nobody would get a new one.
        """
        inherited, self._inherited = self._inherited, False
        mine = self._segment
        if mine is not None and above and mine.still_named() and self._suits(mine, named):
            if inherited:
                mine.words[W_PID] = os.getpid()
                mine.prefault()
            return mine
        self.close()
        manifest = Manifest.of(named)
        log_bytes = manifest.nbytes // 2 if self._threshold and Shadow.fits(manifest) else 0
        self._segment = create_segment(self.path, manifest, log_bytes)
        self._segment.prefault()
        return self._segment

    def _suits(self, segment: Segment, named: dict[str, torch.Tensor]) -> bool:
        return segment.manifest.matches(named) and bool(len(segment.log[0])) == (
            bool(self._threshold) and Shadow.fits(segment.manifest)
        )


@dataclass
class _At:
    """Where in a segment the values in the model come from."""

    segment: Segment
    k: int
    seq: int
    logged: int
    sums: list[int]


class ShmReceiver(VersionReceiver):
    """Copies the newest version. `timeout_s` bounds a fetch that keeps being overtaken."""

    def __init__(self, path: str | Path, *, timeout_s: float = 10.0) -> None:
        super().__init__(path, timeout_s=timeout_s)
        self.hook: Callable[[str], None] | None = None  # called between a copy and its check; for fault tests
        self._staging = torch.empty(0, dtype=torch.uint8)
        self._held = BoundTensors()  # the tensors that `_at` is true of
        self._at: _At | None = None
        self._problem = ""

    def _take(self, segment: Segment, params: dict[str, torch.Tensor]) -> tuple[int, int] | None:
        k = segment.newest()
        if k is None or not segment.lock(k, alone=False):
            return None
        try:
            at = self._at
            self._at = None  # until it is known to be true again
            segment.manifest.check(params)
            at = self._follow(segment, k, at, params) or self._whole(segment, k, params)
            stamp = segment.stamp(k)
            if at is None:
                return None
            if int(segment.buffer[k][LOGGED]) != at.logged:  # the next turn follows from here
                self._at = at
                self._held.take(params)
                return None
        except Refused as problem:
            self._problem = str(problem)
            return None
        finally:
            segment.unlock(k)
        self._at, self._problem = at, ""
        self._held.take(params)
        return stamp

    def _follow(self, segment: Segment, k: int, at: _At | None, params: dict[str, torch.Tensor]) -> _At | None:
        """Put the frames in place that came since; None if the model holds nothing that they follow."""
        seq = int(segment.buffer[k][SEQ])
        if at is None or (at.segment, at.k, at.seq) != (segment, k, seq) or not self._held.same(params):
            return None
        try:
            return self._frames(at, params)
        except Refused as problem:
            log.warning("weights: %s; all values are taken", problem)
            return None

    def _whole(self, segment: Segment, k: int, params: dict[str, torch.Tensor]) -> _At | None:
        """Copy buffer k, and its frames after it; None if it was written to meanwhile."""
        words = segment.buffer[k]
        seq, stamp, digest = int(words[SEQ]), (int(words[VERSION]), int(words[STEP])), int(words[CHECKSUM])
        if seq & 1:
            return None
        flat = self._flat(segment, k)
        if digest and not all(map(is_plain, params.values())):
            flat = self._stage(flat)
            self._compare(segment, segment.manifest.views(flat), stamp, digest)
        segment.manifest.scatter(flat, params)
        if self.hook is not None:
            self.hook("copied")
        if int(words[SEQ]) != seq:
            self._problem = f"version {stamp[0]} was written over while it was copied"
            return None
        if digest and flat is not self._staging:
            self._compare(segment, params, stamp, digest)
        return self._frames(_At(segment, k, seq, 0, [0] * len(segment.manifest.entries)), params)

    def _frames(self, at: _At, params: dict[str, torch.Tensor]) -> _At:
        """Put the frames of the log in place from where `at` is; Refused if one is damaged or does not fit."""
        end = int(at.segment.buffer[at.k][LOGGED])
        for data in split(at.segment.log[at.k][at.logged : end]):
            frame = unpack(data)
            apply(frame, at.segment.manifest, params, at.sums)
            if frame.whole and all(map(is_plain, params.values())):
                self._compare(at.segment, params, (frame.version, frame.step), frame.whole)
        at.logged = end
        return at

    def _compare(
        self, segment: Segment, named: dict[str, torch.Tensor], stamp: tuple[int, int], digest: int
    ) -> None:
        if segment.manifest.digest(named, *stamp) != digest:
            raise Refused(f"the values of version {stamp[0]} do not match their digest")

    def _flat(self, segment: Segment, k: int) -> torch.Tensor:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it is mapped to be read only, and is only read
            return torch.from_numpy(segment.data[k])

    def _stage(self, flat: torch.Tensor) -> torch.Tensor:
        """A copy of one's own, on the way to an accelerator: what is checked there is what arrives."""
        if len(self._staging) != len(flat):
            self._staging = torch.empty(len(flat), dtype=torch.uint8)
        self._staging.copy_(flat)
        return self._staging

    def _current(self) -> Segment | None:
        before, segment = self._segment, super()._current()
        if segment is not None and segment is not before:
            segment.prefault()
        return segment

    def _why(self) -> str:
        return f"; {self._problem}: the model holds parts of it and must not be used" if self._problem else ""
