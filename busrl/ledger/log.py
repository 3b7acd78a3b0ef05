"""Writing files that must not be lost: whole files by rename, and files of lines that only grow.

Talks to the file system; turns a full disk into `DiskFull` and any other failed write into `WriteFailed`. Knows
nothing of what the files hold.

- A file written whole is either the old one or the new one, also after a power cut.
- A file of lines never holds half a line before a whole one: what a killed writer left is cut before the next line.

The learner's write-ahead log: one record per step, whose append is the moment at which its samples are trained.

Talks to the files of one directory; the learner holds `learner.lock`, so there is one writer. Knows nothing of the
ring, of tensors or of the optimiser.

- A record is in the log whole or not at all: `append` returns after it is written (and durable, with `sync`), and
  raises after it is taken back. A disk that fills up leaves the log as it was.
- Steps grow strictly; records are read in that order. Nothing is ever changed in place.
- Half a record at the very end is what a killed writer leaves: it is cut at opening. Damage anywhere else is refused,
  but among records that a checkpoint has made superfluous, which are passed over.
- Old segments go only after a checkpoint, oldest first, so what remains always joins on to it. A checkpoint ends the
  segment, so that what it makes superfluous can go.

A segment `<number>.wal`, little endian: "BUSRLWAL", u32 layout, u32 crc32 of those 12 bytes; then records: "WREC",
u32 length, u32 crc32 of the length's 4 bytes and the payload, payload (msgpack map of `Record`). Layout 2 knows the
segments of an answer; files of layout 1 are read as they are, and appended to no more: who knows only layout 1 would
train them without their masks, so it must meet a head that it refuses.

The train log, `train.jsonl`: one line per optimiser step, for people and for the audit.

Written by the learner after a step; talks to one file. `step_lines` and `last_step` read metrics.jsonl as well. Knows
nothing of the write-ahead log's bytes, of the ring or of tensors.

- A line with step s takes the place of all earlier lines with a step >= s: that is how a replay after a restart, or a
  return to a checkpoint with `wal = "off"`, shows. Nothing in the file is ever changed.
- `crc` is the crc32 of the prompt line, so the file proves which prompt each uid was trained on.

`draws.log`: the samples that a start found dispatched but in no slot, and put back to be generated again.

Talks to one file of JSON lines. Knows nothing of fates or of the ring; the caller resets the fate afterwards.

- A line is durable before `put_back` returns, so a uid is on record here before it can be dispatched again.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import stat
import struct
import time
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from busrl.errors import DiskFull, FileCorrupt, LedgerError, MachineError, UserError, WriteFailed

# -- Writing files that must not be lost: whole files by rename, and files of lines that only grow --------------------


FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
TAIL_BYTES = 1 << 16  # of a file of lines, as `tail` reads it
REPLACED = ".replaced-"  # a directory whose successor is about to have its name


def write_error(path: Path, needed: int, exc: OSError) -> MachineError:
    """The typed error for a failed write of `needed` bytes to `path`."""
    if exc.errno not in FULL:
        return WriteFailed(f"{path}: writing {needed} bytes failed: {exc.strerror}; check the disk and its mount")
    free = shutil.disk_usage(path.parent).free
    return DiskFull(
        f"{path}: no space for {needed} bytes: {exc.strerror} ({free} bytes free on its file system); make space, "
        "nothing written before is lost"
    )


def write_all(fd: int, parts: Sequence[bytes], offset: int) -> int:
    """Write all parts at `offset`, also when the kernel takes them piecemeal; the new end."""
    written = os.pwritev(fd, parts, offset)
    total = sum(len(part) for part in parts)
    if written < total:  # the disk filled up in the middle; the next write says so
        rest = b"".join(parts)
        while written < total:
            written += os.pwrite(fd, rest[written:], offset + written)
    return offset + total


def sync_dir(directory: Path) -> None:
    """Make names created, renamed or removed in `directory` durable."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def finish_replacements(parent: Path) -> None:
    """A directory whose writer died between two names has its old name again; one that was replaced goes."""
    for path in parent.glob(f"{REPLACED}*"):
        final = parent / path.name.removeprefix(REPLACED)
        if final.exists():
            shutil.rmtree(path, ignore_errors=True)
        else:
            os.rename(path, final)
            sync_dir(parent)


def write_whole(path: Path, data: bytes | Iterable[bytes]) -> None:
    """Replace `path` by `data`, in one piece or several, so that a reader, or a restart after a power cut, sees the old
    or the new bytes."""
    temporary, end = path.with_name(f".{path.name}.{os.getpid()}.new"), 0
    try:
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            for part in [data] if isinstance(data, bytes) else data:
                end = write_all(fd, [part], end)
            os.fsync(fd)
        finally:
            os.close(fd)
        os.replace(temporary, path)
        sync_dir(path.parent)
    except OSError as exc:
        temporary.unlink(missing_ok=True)
        raise write_error(path, len(data) if isinstance(data, bytes) else end, exc) from exc


def show_whole(path: Path, value: Mapping[str, Any]) -> None:
    """Replace `path` by `value` as JSON for people to read: a full disk costs it its freshness, and nobody is told."""
    temporary = path.with_name(f".{path.name}.new")
    with contextlib.suppress(OSError):
        temporary.write_text(json.dumps(value, indent=1) + "\n")
        os.replace(temporary, path)


def json_lines(path: Path, tail: int = 0) -> Iterator[dict[str, Any]]:
    """The maps in a file of JSON lines, in order; what is none is passed over. `tail`: only of its last bytes."""
    try:
        with open(path, "rb") as file:
            if 0 < tail < os.fstat(file.fileno()).st_size:
                file.seek(-tail, os.SEEK_END)
                file.readline()
            for text in file:
                with contextlib.suppress(msgspec.DecodeError, UnicodeDecodeError, RecursionError):
                    value = msgspec.json.decode(text)
                    if isinstance(value, dict):
                        yield value
    except (FileNotFoundError, IsADirectoryError):
        return


class LineFile:
    """A file of lines that one process appends to; `sync=True` makes each line durable before `append` returns.

    A line goes to the end of the file that has the name now: somebody may empty, remove or rotate it meanwhile.
    `UserError` where the name is one of something else than a file.
    """

    def __init__(self, path: str | os.PathLike[str], *, sync: bool = False) -> None:
        self.path = Path(path)
        self.sync = sync
        self.shortened = False  # whether lines of ours were taken away since
        self._torn = False
        self._fd = self._opened()
        self._end = os.fstat(self._fd).st_size

    def append(self, line: bytes) -> None:
        """Add one line (without its newline); on failure the file is as before."""
        data = line + b"\n"
        self._follow()
        before = os.fstat(self._fd).st_size
        self.shortened |= before < self._end
        if before and os.pread(self._fd, 1, before - 1) != b"\n":
            if self._torn:
                before = _cut_half_line(self._fd)
            else:  # somebody else's half a line: ours must not become a part of it
                data = b"\n" + data
        self._torn = True
        try:
            _append_all(self._fd, data)
            if self.sync:
                os.fdatasync(self._fd)
        except OSError as exc:
            with contextlib.suppress(OSError):
                os.ftruncate(self._fd, before)
            raise write_error(self.path, len(data), exc) from exc
        self._torn, self._end = False, before + len(data)

    def flush(self) -> None:
        """Make all lines so far durable."""
        try:
            os.fdatasync(self._fd)
        except OSError as exc:
            raise write_error(self.path, 0, exc) from exc

    def size(self) -> int:
        """Bytes of the file that the last line went to."""
        return os.fstat(self._fd).st_size

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _opened(self) -> int:
        """A descriptor of the file, made if it is not there, without half a line at its end."""
        try:
            fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NONBLOCK, 0o600)
        except OSError as exc:
            if exc.errno in FULL:
                raise write_error(self.path, 0, exc) from exc
            raise _no_file(self.path, str(exc.strerror)) from None
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            os.close(fd)
            raise _no_file(self.path, "it is no regular file")
        try:
            _cut_half_line(fd)
        except OSError as exc:
            os.close(fd)
            raise write_error(self.path, 0, exc) from exc
        return fd

    def _follow(self) -> None:
        """Go over to the file that has the name now. A directory that was moved took the file along."""
        try:
            if os.path.samestat(os.stat(self.path), os.fstat(self._fd)):
                return
        except OSError:
            if not self.path.parent.is_dir():
                return
        new = self._opened()
        os.close(self._fd)
        self._fd = new


def _no_file(path: Path, why: str) -> UserError:
    return UserError(f"{path}: can not be opened for lines: {why}; move away what is there, busrl makes a new file")


def _append_all(fd: int, data: bytes) -> None:
    """Write at the end of a file opened for appending, also when the kernel takes the bytes piecemeal."""
    while data:
        data = data[os.write(fd, data) :]


def _cut_half_line(fd: int) -> int:
    """The end of the last whole line, at which the file now ends."""
    size = os.fstat(fd).st_size
    end, block = size, 1 << 16
    while end > 0:
        start = max(0, end - block)
        newline = os.pread(fd, end - start, start).rfind(b"\n")
        if newline >= 0:
            end = start + newline + 1
            break
        end = start
    if end < size:
        os.ftruncate(fd, end)
    return end


def tail(path: Path) -> list[bytes]:
    """The last lines of a file that somebody may be writing, the first of them perhaps cut; none if it is not there."""
    try:
        with open(path, "rb") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - TAIL_BYTES))
            return file.read(TAIL_BYTES).split(b"\n")
    except OSError:
        return []


# -- The learner's write-ahead log: one record per step, whose append is the moment at which its samples are trained --


MAGIC = b"BUSRLWAL"
LAYOUT, OLD_LAYOUT = 2, 1
MARK = b"WREC"
SEGMENT_BYTES = 64 << 20
_LENGTH = struct.Struct("<I")
_FRAME = struct.Struct("<4sII")


def _head(layout: int) -> bytes:
    start = MAGIC + _LENGTH.pack(layout)
    return start + _LENGTH.pack(zlib.crc32(start))


HEAD, OLD_HEAD = _head(LAYOUT), _head(OLD_LAYOUT)
HEADS = (HEAD, OLD_HEAD)  # of one size
REMEDY = "Restore it, or remove it: what no checkpoint holds of its steps is lost then, and `busrl audit` names what"


class SampleRecord(msgspec.Struct, kw_only=True):
    """One trained trajectory: enough to train it again, without the ring. Arrays are little-endian bytes."""

    uid: int
    group: int
    admission: int
    member: int
    attempt: int
    prompt_crc: int
    reward: float
    temperature: float
    version: int
    step: int
    finish: int
    prompt_ids: bytes  # int32
    token_ids: bytes  # int32
    logprobs: bytes  # float32, one per token
    versions: bytes  # uint32, one per token
    segments: list[int] = []  # tokens of each segment; left out when there is one

    def prompt_array(self) -> npt.NDArray[np.int32]:
        return np.frombuffer(self.prompt_ids, "<i4")

    def token_array(self) -> npt.NDArray[np.int32]:
        return np.frombuffer(self.token_ids, "<i4")

    def logprob_array(self) -> npt.NDArray[np.float32]:
        return np.frombuffer(self.logprobs, "<f4")

    def version_array(self) -> npt.NDArray[np.uint32]:
        return np.frombuffer(self.versions, "<u4")

    @property
    def earlier(self) -> int:
        """Tokens of all segments but the last."""
        return sum(self.segments[:-1])


class Record(msgspec.Struct, kw_only=True):
    """One step: `version` is the highest version published so far, `groups` the groups in the order trained.

    `dmmpt` says whether mastered tokens are left out of it.
    """

    step: int
    version: int
    cause: str
    groups: list[int]
    samples: list[SampleRecord]
    dmmpt: bool = False


class _Brief(msgspec.Struct):
    """What opening needs of a record."""

    step: int
    version: int


@dataclass
class _Segment:
    path: Path
    steps: list[int]  # of its records, ascending
    size: int
    file: tuple[int, int] = (0, 0)  # device and inode
    old: bool = False  # of an earlier layout: nothing is appended

    @property
    def last_step(self) -> int:
        """Of its records; -1 with none."""
        return self.steps[-1] if self.steps else -1


@dataclass(frozen=True)
class WalStats:
    """What the log holds now: segments, bytes, newest step, highest version, and what opening cut off."""

    segments: int
    nbytes: int
    last_step: int
    last_version: int
    cut_bytes: int


def frames(data: bytes, start: int = len(HEAD)) -> Iterator[tuple[memoryview, int]]:
    """Each whole record's payload and the offset after it, from `start` until the first that is not whole."""
    view, at = memoryview(data), start
    while (end := _frame_end(view, at)) > 0:
        yield view[at + _FRAME.size : end], end
        at = end


def _frame_end(view: memoryview, at: int) -> int:
    """The end of the whole record at `at`; 0 if there is none."""
    if at + _FRAME.size > len(view):
        return 0
    mark, length, crc = _FRAME.unpack_from(view, at)
    end = int(at + _FRAME.size + length)
    if mark != MARK or end > len(view):
        return 0
    return end if zlib.crc32(view[at + _FRAME.size : end], zlib.crc32(view[at + 4 : at + 8])) == crc else 0


def _file_of(info: os.stat_result) -> tuple[int, int]:
    return info.st_dev, info.st_ino


def _later_record(data: bytes, at: int) -> int:
    """Where a whole record begins after `at`; 0 if nowhere."""
    while (at := data.find(MARK, at + 1)) > 0:
        if _frame_end(memoryview(data), at):
            return at
    return 0


class Wal:
    """The log in `directory`, opened for appending.

    `sync=True` makes every record durable before `append` returns; without it a record survives the death of every
    process, but not a power cut. `superseded`: the step up to which nobody needs the records any more. `damage` says
    what was passed over.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        sync: bool = True,
        segment_bytes: int = SEGMENT_BYTES,
        superseded: int = -1,
    ) -> None:
        self.directory = Path(directory)
        self.sync = sync
        self.segment_bytes = segment_bytes
        self.damage: list[str] = []
        self._superseded = superseded
        self._looks = 0
        self._doubts: list[str] = []  # damage whose extent only the next whole record shows
        self._encoder = msgspec.msgpack.Encoder()
        self._segments: list[_Segment] = []
        self._last_step = -1
        self._last_version = -1
        self._cut_bytes = 0
        self._number = 0
        self._fd = -1
        self._broken = ""
        if not self.directory.exists():
            self.directory.mkdir(parents=True)
            sync_dir(self.directory.parent)
        self._open()

    @property
    def last_step(self) -> int:
        """Newest step that was ever seen here; -1 if none."""
        return self._last_step

    @property
    def last_version(self) -> int:
        """Highest version of any record seen here; -1 if none."""
        return self._last_version

    def stats(self) -> WalStats:
        nbytes = sum(segment.size for segment in self._segments)
        return WalStats(len(self._segments), nbytes, self._last_step, self._last_version, self._cut_bytes)

    def append(self, record: Record) -> None:
        """Commit a record: once this returns its samples are trained; if it raises they are not."""
        self._refuse(record)
        payload = self._encoder.encode(record)
        length = _LENGTH.pack(len(payload))
        head = MARK + length + _LENGTH.pack(zlib.crc32(payload, zlib.crc32(length)))
        segment = self._segment_for(len(head) + len(payload))
        segment.size = self._commit(segment, [head, payload])
        segment.steps.append(record.step)
        self._last_step = record.step
        self._last_version = max(self._last_version, record.version)

    def steps(self) -> list[int]:
        """The steps of all records that are there, ascending."""
        return [step for segment in self._segments for step in segment.steps]

    def records(self, after: int = -1) -> Iterator[Record]:
        """The records with a step above `after`, in order."""
        decoder = msgspec.msgpack.Decoder(Record)
        for segment in list(self._segments):
            if segment.last_step <= after:
                continue
            data, at = segment.path.read_bytes(), len(HEAD)
            while at:
                for payload, end in frames(data, at):
                    at = end
                    record = decoder.decode(payload)
                    if record.step > after:
                        yield record
                at = _later_record(data, at) if at < segment.size else 0

    def drop_before(self, step: int) -> int:
        """Remove the segments that hold only records with a step below `step`; how many. After a checkpoint of step n,
        call it with n + 1."""
        dropped = 0
        while self._segments and self._segments[0].last_step < step:
            if len(self._segments) == 1:
                self._close_segment()
            self._segments[0].path.unlink(missing_ok=True)
            del self._segments[0]
            dropped += 1
        if dropped:
            sync_dir(self.directory)
        return dropped

    def fault(self) -> str:
        """What somebody else did to the files, so that a restart would not find all records; empty if nothing.
        Each call looks at the newest segment and, in turn, at one of all."""
        self._looks += 1
        one_of_all = self._segments[self._looks % len(self._segments)] if self._segments else None
        for segment in [*self._segments[-1:], one_of_all]:
            if segment is None:
                continue
            try:
                now = os.stat(segment.path)
            except OSError as exc:
                return f"{segment.path} can not be found any more ({exc.strerror})"
            if (now.st_dev, now.st_ino) != segment.file:
                return f"{segment.path} is another file than the one that was written"
            if now.st_size != segment.size:
                return f"{segment.path} has {now.st_size} bytes, {segment.size} were written"
        return ""

    def renew(self) -> None:
        """Begin anew, after a checkpoint that has made all records superfluous."""
        self._close_segment()
        for segment in self._segments:
            try:
                segment.path.unlink(missing_ok=True)
            except OSError:  # something else has the name now
                segment.path.rename(segment.path.with_name(f"{segment.path.name}.aside"))
        self._segments.clear()
        self.damage.clear()

    def end_segment(self) -> None:
        """Let the next record begin a new segment."""
        self._close_segment()

    def flush(self) -> None:
        """Make everything appended so far durable (for `sync=False`)."""
        if self._fd >= 0:
            os.fdatasync(self._fd)

    def close(self) -> None:
        self._close_segment()

    def __enter__(self) -> Wal:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ------------------------------------------------------------------------------------------------ appending

    def _refuse(self, record: Record) -> None:
        if self._broken:
            raise WriteFailed(f"{self.directory}: {self._broken}; restart the learner, which reads what is there")
        if record.step <= self._last_step:
            raise LedgerError(
                f"{self.directory}: a record of step {record.step} after step {self._last_step}: steps must grow"
            )

    def _segment_for(self, nbytes: int) -> _Segment:
        """The open segment, or a new one if there is none or it is full."""
        if self._fd < 0 or self._full(self._segments[-1], nbytes):
            self._begin_segment()
        return self._segments[-1]

    def _full(self, segment: _Segment, nbytes: int) -> bool:
        return segment.last_step >= 0 and segment.size + nbytes > self.segment_bytes

    def _begin_segment(self) -> None:
        path = self.directory / f"{self._number + 1:08d}.wal"
        fd = -1
        try:
            self.directory.mkdir(exist_ok=True)
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            write_all(fd, [HEAD], 0)
            if self.sync:
                os.fsync(fd)
                sync_dir(self.directory)
        except OSError as exc:
            if fd >= 0:
                os.close(fd)
                path.unlink(missing_ok=True)
            raise write_error(path, len(HEAD), exc) from exc
        self._close_segment()
        self._fd, self._number = fd, self._number + 1
        self._segments.append(_Segment(path, [], len(HEAD), _file_of(os.fstat(fd))))

    def _commit(self, segment: _Segment, parts: list[bytes]) -> int:
        try:
            end = write_all(self._fd, parts, segment.size)
            if self.sync:
                os.fdatasync(self._fd)
        except OSError as exc:
            self._take_back(segment)
            raise write_error(segment.path, sum(map(len, parts)), exc) from exc
        return end

    def _take_back(self, segment: _Segment) -> None:
        """Remove a record that could not be written whole. If even that fails nobody knows what a restart will read,
        so nothing more is appended."""
        try:
            os.ftruncate(self._fd, segment.size)
        except OSError as exc:
            self._broken = f"a record that failed could not be removed either ({exc.strerror})"

    def _close_segment(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    # -------------------------------------------------------------------------------------------------- opening

    def _open(self) -> None:
        paths = sorted(path for path in self.directory.glob("*.wal") if path.stem.isdigit())
        for path in paths:
            self._number = max(self._number, int(path.stem))
            self._read_segment(path, newest=path == paths[-1])
        if self._doubts:
            raise FileCorrupt(self._doubts[0])
        if self._segments and not self._segments[-1].old and self._segments[-1].size < self.segment_bytes:
            self._fd = os.open(self._segments[-1].path, os.O_RDWR | os.O_CLOEXEC)

    def _read_segment(self, path: Path, *, newest: bool) -> None:
        data = path.read_bytes()
        if newest and len(data) < len(HEAD):  # killed while it began the segment
            path.unlink()
            self._cut_bytes += len(data)
            return
        if data[: len(HEAD)] not in HEADS:
            text = (
                f"{path}: does not begin with {MAGIC!r}, layout {OLD_LAYOUT} or {LAYOUT}; it is no log of this busrl. "
                f"{REMEDY}"
            )
            if newest:
                raise FileCorrupt(text)
            self._doubts.append(text)
            self._segments.append(_Segment(path, [], len(data), _file_of(path.stat()), old=True))
            return
        segment = _Segment(path, [], len(HEAD), _file_of(path.stat()), data[: len(HEAD)] == OLD_HEAD)
        self._segments.append(segment)
        while True:
            for payload, end in frames(data, segment.size):
                self._note(segment, payload, end)
            if segment.size == len(data):
                break
            later = _later_record(data, segment.size)
            if newest and not later:
                self._cut(segment, data)
                break
            self._doubt(segment, later)
            segment.size = later or len(data)

    def _note(self, segment: _Segment, payload: memoryview, end: int) -> None:
        brief = msgspec.msgpack.decode(payload, type=_Brief)
        if self._doubts and brief.step - 1 > self._superseded:
            raise FileCorrupt(self._doubts[0])
        self.damage += self._doubts
        self._doubts.clear()
        if brief.step <= self._last_step:
            raise FileCorrupt(f"{segment.path}: step {brief.step} after step {self._last_step}: steps must grow")
        segment.steps.append(brief.step)
        self._last_step = brief.step
        segment.size = end
        self._last_version = max(self._last_version, brief.version)

    def _doubt(self, segment: _Segment, later: int) -> None:
        self._doubts.append(
            f"{segment.path}: the record at byte {segment.size} is damaged, and records follow it"
            f"{f' at byte {later}' if later else ''}; they were trained, so it is not cut. {REMEDY}"
        )

    def _cut(self, segment: _Segment, data: bytes) -> None:
        """Cut half a record off the newest segment."""
        fd = os.open(segment.path, os.O_RDWR | os.O_CLOEXEC)
        try:
            os.ftruncate(fd, segment.size)
            os.fsync(fd)
        finally:
            os.close(fd)
        self._cut_bytes += len(data) - segment.size


# -- The train log, `train.jsonl`: one line per optimiser step, for people and for the audit --------------------------


TRAIN_TAIL_BYTES = 1 << 20  # of lines of thousands of samples


class TrainLine(msgspec.Struct, kw_only=True):
    """One step; each sample is [uid, attempt, crc]."""

    step: int
    version: int
    cause: str
    samples: list[tuple[int, int, int]]


def of_step(row: Mapping[str, Any]) -> bool:
    """Whether a line of train.jsonl or metrics.jsonl is a step's: one with a `kind` tells of groups that ended without
    a step, under the number of the step before them."""
    return "kind" not in row


def step_lines(path: Path, tail: int = 0) -> list[dict[str, Any]]:
    """The lines of steps, in order: what every reader of metrics.jsonl means by its rows. Empty where there is no file;
    `tail`: only of its last bytes."""
    return [row for row in json_lines(path, tail) if of_step(row)]


def last_step(path: Path) -> int:
    """The newest step that has a line, by the end of the file; 0 if none has."""
    for tail in (TRAIN_TAIL_BYTES, 0):  # the whole file only where its end is damaged
        steps = [int(row["step"]) for row in step_lines(path, tail) if isinstance(row.get("step"), int)]
        if steps:
            return steps[-1]
    return 0


class TrainLog:
    """Appends to `train.jsonl`; half a line of a killed predecessor is cut at opening."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._lines = LineFile(path)

    def append(self, record: Record) -> None:
        """The line of a record that was trained, also when it was replayed."""
        self.append_step(record.step, record.version, record.cause, record.samples)

    def append_step(self, step: int, version: int, cause: str, samples: Iterable[SampleRecord]) -> None:
        """The line of a step that has no record."""
        entries = [(sample.uid, sample.attempt, sample.prompt_crc) for sample in samples]
        line = TrainLine(step=step, version=version, cause=cause, samples=entries)
        self._lines.append(msgspec.json.encode(line))

    @property
    def shortened(self) -> bool:
        """Whether somebody took lines away while it was open."""
        return self._lines.shortened

    def flush(self) -> None:
        """Make all lines durable: before a checkpoint, so that its samples have their lines after a power cut too."""
        self._lines.flush()

    def close(self) -> None:
        self._lines.close()


# -- `draws.log`: the samples that a start found dispatched but in no slot, and put back to be generated again --------


class PutBack(msgspec.Struct, kw_only=True):
    """One batch of put-backs and why they were made."""

    time_ns: int
    why: str
    uids: list[int]


class DrawsLog:
    """Appends put-backs; one process at a time (the start holds the run's lock)."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._lines = LineFile(path, sync=True)

    def put_back(self, uids: Iterable[int], why: str) -> None:
        """Record that these uids go back to "none" and may be dispatched again."""
        entry = PutBack(time_ns=time.time_ns(), why=why, uids=sorted(uids))
        if entry.uids:
            self._lines.append(msgspec.json.encode(entry))

    def close(self) -> None:
        self._lines.close()


def read_draws(path: str | os.PathLike[str]) -> list[PutBack]:
    """All put-backs in order; none if there is no file. Half a last line was never acted upon and is left out."""
    file = Path(path)
    if not file.exists():
        return []
    whole, _, _ = file.read_bytes().rpartition(b"\n")
    return [msgspec.json.decode(line, type=PutBack) for line in whole.splitlines() if line]
