"""The learner's write-ahead log: one record per step, whose append is the moment at which its samples are trained.

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
u32 length, u32 crc32 of the length's 4 bytes and the payload, payload (msgpack map of `Record`). The layout is 3, or 4
where a sample has `keys`, or 5 where one has routes; a file of another one is refused.
"""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from busrl.errors import FileCorrupt, LedgerError, WriteFailed
from busrl.system import files

MAGIC = b"BUSRLWAL"
LAYOUT, KEYED, ROUTED = 3, 4, 5
MARK = b"WREC"
SEGMENT_BYTES = 64 << 20
_LENGTH = struct.Struct("<I")
_FRAME = struct.Struct("<4sII")


_STARTS = {layout: MAGIC + _LENGTH.pack(layout) for layout in (LAYOUT, KEYED, ROUTED)}
_HEADS = {layout: start + _LENGTH.pack(zlib.crc32(start)) for layout, start in _STARTS.items()}
HEAD = _HEADS[LAYOUT]
TURN = 4  # numbers of a turn in a record
FAST = 1  # zlib's level for routes
REMEDY = "Restore it, or remove it: what no checkpoint holds of its steps is lost then, and `busrl audit` names what"


def _no_segments() -> list[int]:
    """A default that `omit_defaults` does not leave out: every sample of the log has the key, for other readers too."""
    return []


class SampleRecord(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A trained trajectory: enough to train it again, without the ring. Arrays are little-endian bytes.

    An episode of several turns has `seqs`, the lengths of its sequences, and `turns`, four numbers each: sequence,
    begin and end of what was sampled in it, and 2 x the number of the call + 1 where it is trained (+ 0 where not);
    sorted by sequence and begin. Then `prompt_ids` is empty, `token_ids` holds the sequences one after another, and
    log-probabilities and versions have one per sampled id, turn after turn. `reward` includes `turn_rewards`, of which
    there is one per turn or none; so it is with `keys`, by which turns are compared ("": by their number).

    Of a mixture of experts `routes_shape` has layers with experts, experts of a token, and experts in all. `routes`
    are ids of experts, one byte each for up to 256 experts, else two: [rows, layers, experts of a token], a row for the
    position before each token, of an episode for each id of a sequence but for those from the last end of a turn in it
    on, and for that last one. `prompt_routes` are those of the prompt but for its last id, or none. In a file they are
    compressed (zlib), or left out: then the shape alone stands there.
    """

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
    segments: list[int] = msgspec.field(default_factory=_no_segments)  # tokens of each, empty when there is one
    seqs: list[int] = []
    turns: list[int] = []
    turn_rewards: list[float] = []
    keys: list[str] = []
    routes: bytes = b""
    prompt_routes: bytes = b""
    routes_shape: list[int] = []

    def prompt_array(self) -> npt.NDArray[np.int32]:
        return np.frombuffer(self.prompt_ids, "<i4")

    def token_array(self) -> npt.NDArray[np.int32]:
        return np.frombuffer(self.token_ids, "<i4")

    def logprob_array(self) -> npt.NDArray[np.float32]:
        return np.frombuffer(self.logprobs, "<f4")

    def version_array(self) -> npt.NDArray[np.uint32]:
        return np.frombuffer(self.versions, "<u4")

    def route_arrays(self) -> tuple[npt.NDArray[Any] | None, npt.NDArray[Any] | None]:
        """The arrays of `routes` and `prompt_routes`; None for those that are not there."""
        if not self.routes:
            return None, None
        layers, top_k, experts = self.routes_shape
        dtype, shape = np.dtype("u1" if experts <= 256 else "<u2"), (-1, layers, top_k)
        prompt = np.frombuffer(self.prompt_routes, dtype).reshape(shape) if self.prompt_routes else None
        return np.frombuffer(self.routes, dtype).reshape(shape), prompt

    def turn_array(self) -> npt.NDArray[np.int64]:
        """[turns, 4], as above; one row with the whole answer for a sample without `turns`."""
        if self.turns:
            return np.array(self.turns, np.int64).reshape(-1, TURN)
        begin = len(self.prompt_ids) // 4
        return np.array([[0, begin, begin + self.tokens, 1]])

    def turn_lengths(self) -> npt.NDArray[np.int64]:
        turns = self.turn_array()
        return turns[:, 2] - turns[:, 1]

    def turn_calls(self) -> npt.NDArray[np.int64]:
        """The number of the call that each turn answered, in the order of the episode."""
        return self.turn_array()[:, 3] // 2

    def turns_trained(self) -> npt.NDArray[np.bool_]:
        """Flags of the turns that are trained at all."""
        return (self.turn_array()[:, 3] % 2).astype(bool)

    @property
    def tokens(self) -> int:
        """The count of sampled tokens."""
        return len(self.logprobs) // 4

    @property
    def earlier(self) -> int:
        """Tokens of all segments but the last."""
        return sum(self.segments[:-1])


class Terms(msgspec.Struct, frozen=True, omit_defaults=True):
    """Terms in force when the groups of a step were taken. They decide what of them is trained: the topology may say
    something else by the time that the record is read."""

    bound: int | None = None  # steps that a group may be old; None: nothing is promised
    masks_old: bool = False  # tokens above the bound are context
    last_segment: bool = False  # only the last segment of an answer is trained
    masks_cut: bool = False  # cut answers are not trained


class Record(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A step: `version` is the highest version published so far, `groups` the groups in the order trained."""

    step: int
    version: int
    cause: str
    groups: list[int]
    samples: list[SampleRecord]
    terms: Terms | None = None  # None: as the topology says


def _packed(record: Record, keep: bool) -> Record:
    """The record as a file has it: its routes compressed, or without them."""

    def packed(sample: SampleRecord) -> SampleRecord:
        if not keep:
            return msgspec.structs.replace(sample, routes=b"", prompt_routes=b"")
        return _with_routes(sample, lambda part: zlib.compress(part, FAST))

    return msgspec.structs.replace(record, samples=[*map(packed, record.samples)])


def _unpacked(record: Record) -> Record:
    record.samples = [_with_routes(sample, zlib.decompress) for sample in record.samples]
    return record


def _with_routes(sample: SampleRecord, change: Callable[[bytes], bytes]) -> SampleRecord:
    parts = {"routes": sample.routes, "prompt_routes": sample.prompt_routes}
    return msgspec.structs.replace(sample, **{name: change(part) for name, part in parts.items() if part})


class _Brief(msgspec.Struct):
    """The fields of a record that opening needs."""

    step: int
    version: int


@dataclass
class _Segment:
    path: Path
    steps: list[int]  # of its records, ascending
    size: int
    file: os.stat_result
    layout: int = LAYOUT

    @property
    def last_step(self) -> int:
        """The last step of its records; -1 with none."""
        return self.steps[-1] if self.steps else -1


def frames(data: bytes, start: int = len(HEAD)) -> Iterator[tuple[memoryview, int]]:
    """Each whole record's payload and the offset after it, from `start` until the first that is not whole."""
    view, at = memoryview(data), start
    while (end := _frame_end(view, at)) > 0:
        yield view[at + _FRAME.size : end], end
        at = end


def payloads(data: bytes, size: int) -> Iterator[memoryview]:
    """The payload of each whole record of a segment's first `size` bytes; a damaged one is passed over."""
    at = len(HEAD)
    while at:
        for payload, end in frames(data, at):
            at = end
            yield payload
        at = later_record(data, at) if at < size else 0


def _frame_end(view: memoryview, at: int) -> int:
    """The end of the whole record at `at`; 0 if there is none."""
    if at + _FRAME.size > len(view):
        return 0
    mark, length, crc = _FRAME.unpack_from(view, at)
    end = int(at + _FRAME.size + length)
    if mark != MARK or end > len(view):
        return 0
    return end if zlib.crc32(view[at + _FRAME.size : end], zlib.crc32(view[at + 4 : at + 8])) == crc else 0


def later_record(data: bytes, at: int) -> int:
    """Find where a whole record begins after `at`; 0 if nowhere."""
    while (at := data.find(MARK, at + 1)) > 0:
        if _frame_end(memoryview(data), at):
            return at
    return 0


class Wal:
    """The log in `directory`, opened for appending.

    `sync=True` makes every record durable before `append` returns; without it a record survives the death of every
    process, but not a power cut. `routes`: keep those of a mixture of experts. `superseded`: the step up to which the
    records are not needed any more. `damage` lists what was passed over, `cut_bytes` counts what opening cut off;
    `last_step` and `last_version` are the highest ever seen here, -1 with none.
    """

    def __init__(
        self, directory: str | os.PathLike[str], *, sync: bool = True, segment_bytes: int = SEGMENT_BYTES,
        superseded: int = -1, routes: bool = True,
    ) -> None:
        self.directory = Path(directory)
        self.sync, self.routes = sync, routes
        self.segment_bytes = segment_bytes
        self.damage: list[str] = []
        self.last_step = self.last_version = -1
        self.cut_bytes = 0
        self._superseded = superseded
        self._looks = 0
        self._doubts: list[str] = []  # damage whose extent only the next whole record shows
        self._segments: list[_Segment] = []
        self._number = 0
        self._fd = -1
        self._broken = ""
        if not self.directory.exists():
            self.directory.mkdir(parents=True)
            files.sync(self.directory.parent)
        self._open()

    def append(self, record: Record) -> None:
        """Commit a record: once this returns its samples are trained; if it raises they are not."""
        if self._broken:
            raise WriteFailed(f"{self.directory}: {self._broken}; restart the learner, which reads what is there")
        if record.step <= self.last_step:
            raise LedgerError(
                f"{self.directory}: a record of step {record.step} after step {self.last_step}: steps must grow"
            )
        routed = any(sample.routes_shape for sample in record.samples)
        payload = msgspec.msgpack.encode(_packed(record, self.routes) if routed else record)
        length = _LENGTH.pack(len(payload))
        head = MARK + length + _LENGTH.pack(zlib.crc32(payload, zlib.crc32(length)))
        full = bool(self._segments) and self._segments[-1].size + len(head) + len(payload) > self.segment_bytes
        layout = ROUTED if routed else KEYED if any(sample.keys for sample in record.samples) else LAYOUT
        if self._fd < 0 or (full and self._segments[-1].steps) or self._segments[-1].layout < layout:
            self._begin_segment(layout)
        segment = self._segments[-1]
        segment.size = self._commit(segment, [head, payload])
        segment.steps.append(record.step)
        self.last_step = record.step
        self.last_version = max(self.last_version, record.version)

    def steps(self) -> list[int]:
        """The steps of all records that are there, ascending."""
        return [step for segment in self._segments for step in segment.steps]

    def records(self, after: int = -1) -> Iterator[Record]:
        decoder = msgspec.msgpack.Decoder(Record)
        for segment in list(self._segments):
            if segment.last_step <= after:
                continue
            for record in map(decoder.decode, payloads(segment.path.read_bytes(), segment.size)):
                if record.step > after:
                    yield _unpacked(record) if segment.layout == ROUTED else record

    def drop_before(self, step: int) -> int:
        """Remove the segments with no record of step `step` or later (a checkpoint's step + 1). Returns how many."""
        dropped = 0
        while self._segments and self._segments[0].last_step < step:
            if len(self._segments) == 1:
                self.end_segment()
            self._segments[0].path.unlink(missing_ok=True)
            del self._segments[0]
            dropped += 1
        if dropped:
            files.sync(self.directory)
        return dropped

    def fault(self) -> str:
        """Name a change of the files from outside by which a restart would miss records; empty for none. Each call
        looks at the newest segment and, in turn, at one of all."""
        self._looks += 1
        turn = self._looks % max(1, len(self._segments))
        for segment in [*self._segments[-1:], *self._segments[turn : turn + 1]]:
            try:
                now = os.stat(segment.path)
            except OSError as exc:
                return f"{segment.path} cannot be found any more ({exc.strerror})"
            if not os.path.samestat(now, segment.file):
                return f"{segment.path} is another file than the one that was written"
            if now.st_size != segment.size:
                return f"{segment.path} has {now.st_size} bytes, {segment.size} were written"
        return ""

    def renew(self) -> None:
        """Begin an empty log, after a checkpoint that has made all records superfluous."""
        self.end_segment()
        for segment in self._segments:
            try:
                segment.path.unlink(missing_ok=True)
            except OSError:  # something else has the name now
                segment.path.rename(segment.path.with_name(f"{segment.path.name}.aside"))
        self._segments.clear()
        self.damage.clear()

    def end_segment(self) -> None:
        """Let the next record begin a new segment."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    close = end_segment

    def __enter__(self) -> Wal:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- appending -----

    def _begin_segment(self, layout: int) -> None:
        path = self.directory / f"{self._number + 1:08d}.wal"
        fd = -1
        try:
            self.directory.mkdir(exist_ok=True)
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            files.write_all(fd, [_HEADS[layout]], 0)
            if self.sync:
                os.fsync(fd)
                files.sync(self.directory)
        except OSError as exc:
            if fd >= 0:
                os.close(fd)
                path.unlink(missing_ok=True)
            raise files.write_error(path, len(HEAD), exc) from exc
        self.end_segment()
        self._fd, self._number = fd, self._number + 1
        self._segments.append(_Segment(path, [], len(HEAD), os.fstat(fd), layout))

    def _commit(self, segment: _Segment, parts: list[bytes]) -> int:
        try:
            end = files.write_all(self._fd, parts, segment.size)
            if self.sync:
                os.fdatasync(self._fd)
        except OSError as exc:
            try:
                os.ftruncate(self._fd, segment.size)
            except OSError as problem:  # nobody knows what a restart will read: nothing more is appended
                self._broken = f"a record that failed could not be removed either ({problem.strerror})"
            raise files.write_error(segment.path, sum(map(len, parts)), exc) from exc
        return end

    # -- opening -----

    def _open(self) -> None:
        paths = sorted(path for path in self.directory.glob("*.wal") if path.stem.isdigit())
        for path in paths:
            self._number = max(self._number, int(path.stem))
            self._read_segment(path, newest=path == paths[-1])
        if self._doubts:
            raise FileCorrupt(self._doubts[0])
        if self._segments and self._segments[-1].size < self.segment_bytes:
            self._fd = os.open(self._segments[-1].path, os.O_RDWR | os.O_CLOEXEC)

    def _read_segment(self, path: Path, *, newest: bool) -> None:
        data = path.read_bytes()
        if newest and len(data) < len(HEAD):  # killed while it began the segment
            path.unlink()
            self.cut_bytes += len(data)
            return
        layout = next((layout for layout, head in _HEADS.items() if data.startswith(head)), 0)
        if not layout:
            text = f"{path}: does not begin with {MAGIC!r}, layout 3, 4 or 5; it is no log of this busrl. {REMEDY}"
            if newest:
                raise FileCorrupt(text)
            self._doubts.append(text)
            self._segments.append(_Segment(path, [], len(data), path.stat()))
            return
        segment = _Segment(path, [], len(HEAD), path.stat(), layout)
        self._segments.append(segment)
        while True:
            for payload, end in frames(data, segment.size):
                self._note(segment, payload, end)
            if segment.size == len(data):
                break
            later = later_record(data, segment.size)
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
        if brief.step <= self.last_step:
            raise FileCorrupt(f"{segment.path}: step {brief.step} after step {self.last_step}: steps must grow")
        segment.steps.append(brief.step)
        self.last_step = brief.step
        segment.size = end
        self.last_version = max(self.last_version, brief.version)

    def _doubt(self, segment: _Segment, later: int) -> None:
        self._doubts.append(
            f"{segment.path}: the record at byte {segment.size} is damaged, and records follow it"
            f"{f' at byte {later}' if later else ''}; they were trained, so it is not cut. {REMEDY}"
        )

    def _cut(self, segment: _Segment, data: bytes) -> None:
        with open(segment.path, "rb+", buffering=0) as file:
            file.truncate(segment.size)
            os.fsync(file.fileno())
        self.cut_bytes += len(data) - segment.size
