"""Recordings: the file, how it is written and how it is read again, and the recorder that fills one from a run's tap.

Talks to the tap, the ring (read-only) and one new file. Knows nothing of replays. The format (docs/monitor.md):

    header:  8 bytes "BUSRLREC", u32 format, u32 bytes of the map, u32 crc32 of the map, the map (msgpack)
    record:  u32 bytes of the payload, u32 crc32 of the payload, payload
    payload: u64 monotonic ns, u8 kind, u8 0, u16 bytes of the topic, topic, body

All numbers are little endian. crc32 is the one of zip and zlib.

- A record is whole or it is not there: reading stops at the first one that is cut or damaged, and says so.
- A writer appends only, so whatever ends it, what it had written before can be read.
- Recording cannot hurt the run: the tap drops for it rather than wait, and it stops before it fills the disk that the
  run writes its log to.
- What was missed is counted from the senders' own numbers and stands in the file.
- The recorder reads in batches, which costs the machine of the run a tenth of waking up for each message. A record's
  time is when its message was sent, by the sender's clock, but never before the record before it or after it was read.
"""

from __future__ import annotations

import math
import os
import shutil
import struct
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from enum import IntEnum
from pathlib import Path
from typing import Any, BinaryIO, Final, NamedTuple

import msgspec

import busrl
from busrl.bus import StopRequest
from busrl.bus.endpoint import Tap
from busrl.errors import DiskFull, FileCorrupt, NoSuchRun, UserError
from busrl.monitor.runfiles import RunFiles
from busrl.monitor.sources import RingLook, holder_of
from busrl.monitor.state import Facts
from busrl.monitor.status import status
from busrl.paths import RunPaths
from busrl.protocol.messages import VERSION

# -- the file ----------------------------------------------------------------------------------------------------------

MAGIC: Final = b"BUSRLREC"
FORMAT: Final = 1
FIXED: Final = struct.Struct("<8sIII")
FRAME: Final = struct.Struct("<II")
PAYLOAD: Final = struct.Struct("<QBBH")
MAX_PAYLOAD: Final = 1 << 24
MAX_HEADER: Final = 1 << 20
BUFFER: Final = 1 << 16


class Kind(IntEnum):
    """What a record holds. A reader passes over kinds that it does not know."""

    MESSAGE = 0  # a message of the bus: its topic and its bytes
    LOOK = 1  # a look at the ring (RingRecord, msgpack)
    DROPS = 2  # Drops: what was missed so far
    END = 3  # End: the last record of a recording that was ended in order


class Drops(msgspec.Struct):
    """Messages that were sent while this recorded and did not reach it, so far; by sender and topic."""

    missed: int
    by: dict[str, int] = msgspec.field(default_factory=dict)


class End(msgspec.Struct):
    """Why the recording ended, and its sums."""

    why: str
    messages: int
    bytes: int
    missed: int


class Header(msgspec.Struct):
    """What a recording says of itself. `wall_ns` and `monotonic_ns` are one instant: the start."""

    protocol: int
    uuid: str
    wall_ns: int
    monotonic_ns: int
    busrl: str = ""
    host: str = ""
    facts: Facts = Facts()


class RecordedFrame(NamedTuple):
    """One record."""

    at_ns: int
    kind: int
    topic: bytes
    body: bytes


class Writer:
    """Appends records to a new file. DiskFull if it cannot; what was written stays readable."""

    def __init__(self, path: Path, header: Header) -> None:
        self.path, self.bytes, self._last_at = path, 0, 0
        try:
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        except FileExistsError:
            raise UserError(f"{path} exists; choose another name, or remove it") from None
        except OSError as error:
            raise UserError(f"{path} cannot be made: {error.strerror}; choose another place with -o") from None
        self._file = open(fd, "wb", buffering=BUFFER)  # noqa: SIM115
        packed = msgspec.msgpack.encode(header)
        self._write(FIXED.pack(MAGIC, FORMAT, len(packed), zlib.crc32(packed)) + packed)
        self.flush()

    def add(self, kind: Kind, topic: bytes, body: bytes, at_ns: int | None = None) -> None:
        """One record; its time is now unless it is given, and never before that of the one before it."""
        at = self._last_at = max(self._last_at, time.monotonic_ns() if at_ns is None else at_ns)
        payload = PAYLOAD.pack(at, kind, 0, len(topic)) + topic + body
        self._write(FRAME.pack(len(payload), zlib.crc32(payload)) + payload)

    def flush(self) -> None:
        with self._full_disk():
            self._file.flush()

    def close(self) -> None:
        """Write out, sync, close; idempotent."""
        if self._file.closed:
            return
        try:
            with self._full_disk():
                self._file.flush()
                os.fsync(self._file.fileno())
        finally:
            with suppress(OSError):  # what is still buffered has no place
                self._file.close()

    def _write(self, data: bytes) -> None:
        with self._full_disk():
            self.bytes += self._file.write(data)

    @contextmanager
    def _full_disk(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise DiskFull(
                f"{self.path}: {error.strerror} after {self.bytes:,} bytes; what was written before can be replayed. "
                "Make room, or record for a shorter time"
            ) from None


class Recording:
    """A recording that is read: `header`, then iterate over `entries`. `torn` says where and why reading stopped."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path, self.torn = Path(path), ""
        try:
            self._file: BinaryIO = open(self.path, "rb")  # noqa: SIM115
        except OSError as error:
            raise UserError(f"{path}: {error.strerror}; name a file that `busrl record` wrote") from None
        try:
            self.header = self._read_header()
        except BaseException:
            self._file.close()
            raise
        self._begin = self._file.tell()

    def entries(self) -> Iterator[RecordedFrame]:
        """Every whole record in order, from the first one."""
        self._file.seek(self._begin)
        self.torn = ""
        while True:
            at = self._file.tell()
            frame = self._file.read(FRAME.size)
            if not frame:
                return
            entry = self._entry(frame)
            if isinstance(entry, str):
                self.torn = f"{entry} at byte {at:,}; what stands before it is whole"
                return
            yield entry

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> Recording:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _entry(self, frame: bytes) -> RecordedFrame | str:
        if len(frame) < FRAME.size:
            return "a record is cut"
        size, crc = FRAME.unpack(frame)
        if not PAYLOAD.size <= size <= MAX_PAYLOAD:
            return "a record is damaged"
        payload = self._file.read(size)
        if len(payload) < size:
            return "a record is cut"
        at_ns, kind, _, topic_bytes = PAYLOAD.unpack_from(payload)
        begin = PAYLOAD.size + topic_bytes
        if zlib.crc32(payload) != crc or begin > size:
            return "a record is damaged"
        return RecordedFrame(at_ns, kind, payload[PAYLOAD.size : begin], payload[begin:])

    def _read_header(self) -> Header:
        fixed = self._file.read(FIXED.size)
        if len(fixed) < FIXED.size or not fixed.startswith(MAGIC):
            raise UserError(f"{self.path}: this is no recording of busrl (it does not begin with {MAGIC.decode()})")
        _, number, size, crc = FIXED.unpack(fixed)
        if number != FORMAT:
            raise UserError(f"{self.path}: recording format {number}, this program reads {FORMAT}; use a newer busrl")
        packed = self._file.read(size) if size <= MAX_HEADER else b""
        if len(packed) < size or zlib.crc32(packed) != crc:
            raise FileCorrupt(f"{self.path}: its header is damaged, so it cannot be read; record again")
        try:
            return msgspec.msgpack.decode(packed, type=Header)
        except ValueError as error:
            raise FileCorrupt(
                f"{self.path}: its header is not understood ({error}); was it written by another busrl?"
            ) from None


def summary(path: str | os.PathLike[str]) -> dict[str, Any]:
    """What a recording holds: `header`, `messages` by name, `seconds`, `missed`, how it `ended`, where it is `torn`."""
    with Recording(path) as recording:
        names: dict[str, int] = {}
        missed, ended, last = 0, "", recording.header.monotonic_ns
        for entry in recording.entries():
            last = entry.at_ns
            if entry.kind == Kind.MESSAGE:
                name = entry.topic.partition(b"/")[0].decode(errors="replace")
                names[name] = names.get(name, 0) + 1
            elif entry.kind == Kind.DROPS:
                missed = msgspec.msgpack.decode(entry.body, type=Drops).missed
            elif entry.kind == Kind.END:
                ended = msgspec.msgpack.decode(entry.body, type=End).why
        return {
            "header": recording.header, "messages": names, "missed": missed, "ended": ended, "torn": recording.torn,
            "seconds": (last - recording.header.monotonic_ns) / 1e9,
        }


# -- the recorder ------------------------------------------------------------------------------------------------------

LOOK_EVERY_S: Final = 1.0
WAKE_S: Final = 0.2
FREE_BYTES: Final = 256 << 20  # left to others on the file system of the recording
LOOK_TOPIC: Final = b"LOOK/"


class Recorder:
    """`run` records until the end, or within its bounds, and gives its last record; `stop` asks for the end."""

    def __init__(self, paths: RunPaths, out: Path, seconds: float = math.inf, limit_bytes: float = math.inf) -> None:
        self._files, self._seconds, self._limit_bytes, self._out = RunFiles(paths), seconds, limit_bytes, out
        facts = self._files.facts()
        self._look = RingLook(paths, group_size=facts.group_size)
        refuse_if_over(paths, self._look)
        begun = {"wall_ns": time.time_ns(), "monotonic_ns": time.monotonic_ns()}
        header = Header(VERSION, facts.uuid, **begun, busrl=busrl.__version__, host=os.uname().nodename, facts=facts)
        self._writer = Writer(out, header)
        self._tap = Tap(self._files.tap())
        self._asked, self._stopped = "", StopRequest()
        self._missed_written = 0
        self._absent = 0
        self.messages = self.bytes = 0

    def stop(self, why: str) -> None:
        self._asked = self._asked or why
        self._stopped.set()

    def run(self) -> End:
        end, next_look = time.monotonic() + self._seconds, 0.0
        try:
            while not (why := self._asked):
                now = time.monotonic()
                if now >= next_look:
                    next_look = now + LOOK_EVERY_S
                    self._once_a_second()
                if now >= end:
                    self.stop("the time is over")
                self._stopped.wait(max(0.0, min(WAKE_S, end - now)))
                self._drain()
            return self._finish(why)
        finally:
            self._tap.close()
            self._look.close()
            self._writer.close()

    def _drain(self) -> None:
        came = self._tap.take()
        mono, wall = time.monotonic_ns(), time.time_ns()
        for one in came:
            ago = wall - one.envelope.time_ns if one.envelope is not None else 0
            self._writer.add(Kind.MESSAGE, one.topic, one.body, mono - max(0, ago))
            self.messages += 1
            self.bytes += len(one.body)

    def _once_a_second(self) -> None:
        self._write_drops()
        seen = self._look.look()
        if seen is not None:
            self._writer.add(Kind.LOOK, LOOK_TOPIC, msgspec.msgpack.encode(seen))
        # Twice in a row: a launch that was just started has a ring, and nobody registered in it.
        self._absent = 0 if seen is not None and seen.living else self._absent + 1
        if self._absent >= 2:
            self.stop("the run has ended")
        self._writer.flush()
        if self._writer.bytes >= self._limit_bytes:
            self.stop(f"the limit of {self._limit_bytes:,.0f} bytes is reached")
        elif shutil.disk_usage(self._out.parent).free < FREE_BYTES:
            self.stop(f"less than {FREE_BYTES >> 20} MiB are free where {self._out} is")

    def _write_drops(self) -> None:
        gaps = self._tap.gaps
        if gaps.missed != self._missed_written:
            self._missed_written = gaps.missed
            by = {f"{sender} {topic}": count for (sender, topic), count in gaps.missed_by.items()}
            self._writer.add(Kind.DROPS, b"", msgspec.msgpack.encode(Drops(gaps.missed, by)))

    def _finish(self, why: str) -> End:
        self._drain()
        self._write_drops()
        end = End(why, self.messages, self.bytes, self._tap.gaps.missed)
        self._writer.add(Kind.END, b"", msgspec.msgpack.encode(end))
        return end


def refuse_if_over(paths: RunPaths, look: RingLook) -> None:
    """NoSuchRun if nobody runs there, in the words of `busrl status`; a launch that just starts is somebody."""
    seen = look.look()
    if seen is not None and (seen.living or holder_of(paths) is not None):
        return
    look.close()
    if look.damage:
        raise NoSuchRun(f"{paths.root}: its ring is damaged, so nothing was recorded: {look.damage}")
    said = status(paths.root).splitlines()[0]
    raise NoSuchRun(f"{paths.root}: nothing runs there, so nothing was recorded; `busrl status` says: {said}")
