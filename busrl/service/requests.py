"""The two logs of a service: what clients asked for, written by the door, and what was answered, written by the tuner.

Talks to the files of one directory each, framed as the write-ahead log is (`busrl.ledger.wal`). Knows nothing of HTTP,
of bodies or models.

- A log has one writer. A record is there whole or not at all: half a record at the end, which a killed writer leaves,
  is cut by the next one; nobody was told of it.
- A reader follows the writer by itself and never needs a message: it reads on from where it was.
- A segment that has a successor may be replaced by one whose records have no body or payload. All else of a record
  stays for good, so that the order, the digests and the chains of a run can always be audited.
- `write` survives the death of every process; after `sync` also a power cut.
"""

from __future__ import annotations

import os
import struct
import threading
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import msgspec

from busrl.errors import FileCorrupt, WriteFailed
from busrl.ledger.wal import HEAD, MARK, frames, later_record
from busrl.system import files

SEGMENT_BYTES = 64 << 20
FRAME_BYTES = 12  # before the payload of a record
Record = TypeVar("Record", bound=msgspec.Struct)


class Request(msgspec.Struct, omit_defaults=True):
    """A client's wish. `id` is that of the session, model or sampler concerned, `seq` the number that the client gave
    it, `op` the operation. `digest` is of its meaning; `body` is unpacked, and of JSON has the fields that count.
    `about` holds what the door read of the body, for records of other kinds than `training`. `at`: when it was logged,
    in Unix seconds; `tokens`: of its data or its prompt."""

    kind: str  # session, finish, model, sampler, join, training, refused, sample, delete, ttl
    id: str
    seq: int = 0
    op: str = ""
    digest: bytes = b""
    body: bytes = b""
    about: dict[str, Any] = {}
    at: float = 0.0
    tokens: int = 0


class Answer(msgspec.Struct, omit_defaults=True):
    """The answer to the request `seq` of the model or sampler `id`. `state`: done, or by whose fault there is none,
    user or server. `chain` is of all requests of the model up to this one, in their order. `weights` is the number of
    the snapshot that a save made, or from which a sample was drawn; `tokens` were drawn, until `at` (Unix seconds)."""

    id: str
    seq: int
    digest: bytes
    state: str
    proto: bool = False  # the payload is protobuf, else JSON
    payload: bytes = b""
    chain: bytes = b""
    weights: int = 0
    at: float = 0.0
    tokens: int = 0


class Place(NamedTuple):
    """The place of a record's payload."""

    segment: int
    begin: int
    size: int


def head_of(payload: bytes) -> bytes:
    """The bytes that stand before the payload of a record, as in the write-ahead log."""
    length = struct.pack("<I", len(payload))
    return MARK + length + struct.pack("<I", zlib.crc32(payload, zlib.crc32(length)))


def segment_path(directory: Path, number: int) -> Path:
    return directory / f"{number:08d}.wal"


def segments(directory: Path) -> list[int]:
    """The numbers of the segments that are there, ascending."""
    return sorted(int(path.stem) for path in directory.glob("*.wal") if path.stem.isdigit())


def is_torn(data: bytes, at: int) -> bool:
    """True if the record at `at` goes on beyond the data: what lies in it is a client's, and no record."""
    begin = at + FRAME_BYTES
    if begin > len(data):
        return True
    (length,) = struct.unpack_from("<I", data, at + len(MARK))
    return data.startswith(MARK, at) and begin + int(length) > len(data)


def strip(directory: Path, number: int, kind: type[Record], bare: Callable[[Record], Record]) -> None:
    """Replace a segment that has a successor: each of its records by what `bare` leaves of it. DiskFull, WriteFailed:
    the segment is as it was."""
    decode, path = msgspec.msgpack.Decoder(kind).decode, segment_path(directory, number)
    kept = [msgspec.msgpack.encode(bare(decode(payload))) for payload, _ in frames(path.read_bytes())]
    files.replace(path, [HEAD, *(head_of(payload) + payload for payload in kept)])


class LogWriter:
    """Appends records to the log in `directory`, which is made where it is missing. The caller sees to it that there is
    no other writer, and may `sync` in another thread. FileCorrupt if there is damage before the end of the newest
    segment."""

    def __init__(self, directory: Path, segment_bytes: int = SEGMENT_BYTES) -> None:
        self._directory, self._segment_bytes = directory, segment_bytes
        self._file, self._open = -1, threading.Lock()  # held while the file must stay open
        self.cut_bytes = 0  # of half a record that a predecessor left
        if not directory.exists():
            directory.mkdir(parents=True)
            files.sync(directory.parent)
        present = segments(directory)
        self._number = present[-1] if present else 0
        self._size = self._whole_bytes() if present else 0
        if self._size:
            self._file = os.open(segment_path(directory, self._number), os.O_RDWR | os.O_CLOEXEC)
            os.ftruncate(self._file, self._size)

    def write(self, record: Request | Answer) -> Place:
        """Append a record. WriteFailed (DiskFull) leaves the log as it was."""
        payload = msgspec.msgpack.encode(record)
        if self._file < 0 or self._size + len(payload) > self._segment_bytes + len(HEAD):
            self._begin_segment()
        try:
            end = files.write_all(self._file, [head_of(payload), payload], self._size)
        except OSError as problem:
            os.ftruncate(self._file, self._size)
            raise files.write_error(segment_path(self._directory, self._number), len(payload), problem) from problem
        place, self._size = Place(self._number, end - len(payload), len(payload)), end
        return place

    def sync(self) -> None:
        """Make all that was written durable."""
        with self._open:
            if self._file >= 0:
                os.fdatasync(self._file)

    def close(self) -> None:
        with self._open:
            if self._file >= 0:
                os.close(self._file)
                self._file = -1

    # -- internals -----

    def _begin_segment(self) -> None:
        path = segment_path(self._directory, self._number + 1)
        if self._file >= 0:
            self.sync()
        try:
            file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        except OSError as problem:
            raise WriteFailed(f"{path}: {problem.strerror}") from problem
        try:
            files.write_all(file, [HEAD], 0)
        except OSError as problem:
            os.close(file)
            path.unlink()
            raise files.write_error(path, len(HEAD), problem) from problem
        files.sync(self._directory)
        self.close()
        self._file, self._number, self._size = file, self._number + 1, len(HEAD)

    def _whole_bytes(self) -> int:
        """The size of the newest segment without half a record at its end; 0 if even its head is not whole."""
        path = segment_path(self._directory, self._number)
        data = path.read_bytes()
        if len(data) < len(HEAD):
            path.unlink()
            self._number -= 1
            self.cut_bytes = len(data)
            return 0
        if not data.startswith(HEAD):
            raise FileCorrupt(f"{path}: does not begin as a log of this busrl does; restore it, or begin a new run")
        end = max((end for _, end in frames(data)), default=len(HEAD))
        if not is_torn(data, end) and (later := later_record(data, end)):
            raise FileCorrupt(f"{path}: the record at byte {end} is damaged, and whole ones follow it at byte {later}; "
                              "restore the file")
        self.cut_bytes = len(data) - end
        return end


class LogReader:
    """Follows the log in `directory`, which may not be there yet."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._number, self._at = 0, len(HEAD)

    def read(self) -> Iterator[tuple[bytes, Place]]:
        """The payloads of the whole records that were appended since the last call, each with its place. FileCorrupt
        where a record before the newest segment is damaged."""
        while self._number or self._begin():
            newest = not segment_path(self._directory, self._number + 1).exists()  # asked before the last look
            data = self._new_bytes()
            begin = self._at
            for payload, end in frames(data, 0):
                self._at = begin + end
                yield bytes(payload), Place(self._number, self._at - len(payload), len(payload))
            if newest:
                return
            if self._at < begin + len(data):
                path = segment_path(self._directory, self._number)
                raise FileCorrupt(f"{path}: the record at byte {self._at} is damaged; restore the file")
            self._number, self._at = self._number + 1, len(HEAD)

    def payload(self, place: Place) -> bytes:
        """The payload of a record; b"" if its segment was replaced since it was read."""
        with open(segment_path(self._directory, place.segment), "rb") as file:
            payload = os.pread(file.fileno(), place.size, place.begin)
            head = os.pread(file.fileno(), FRAME_BYTES, place.begin - FRAME_BYTES)
        return payload if len(payload) == place.size and head == head_of(payload) else b""

    # -- internals -----

    def _begin(self) -> bool:
        self._number = next(iter(segments(self._directory)), 0)
        return self._number > 0

    def _new_bytes(self) -> bytes:
        path = segment_path(self._directory, self._number)
        try:
            if path.stat().st_size <= self._at:
                return b""
            with open(path, "rb") as file:
                file.seek(self._at)
                return file.read()
        except FileNotFoundError:  # its writer died before it had a head; the next one makes it again
            return b""
