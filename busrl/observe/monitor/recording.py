"""Recordings: the file, the recorder that fills one from a run's tap, and the replayer that publishes one again.

Talks to the tap and the ring of a run (read-only), to recordings, and to the one socket that a replay binds. The format
(docs/monitor.md; all numbers little endian, crc32 as in zip):

    header:  8 bytes "BUSRLREC", u32 format, u32 bytes of the map, u32 crc32 of the map, the map (msgpack)
    record:  u32 bytes of the payload, u32 crc32 of the payload, payload
    payload: u64 monotonic ns, u8 kind, u8 0, u16 bytes of the topic, topic, body

- A record is complete or it counts as missing: reading stops at the first one that is cut or damaged, and says so.
- Recording cannot hurt the run: the tap drops messages rather than make it wait, the recorder stops before it fills the
  disk, and it reads in batches, which costs a tenth of a wake-up for each message.
- The time of a record is when its message was sent, by the sender's clock, but never before the time of the record
  before it, and never after it was read.
- A replay refuses an address that another process serves, or that lies in the socket directory of a run. It begins when
  a listener's subscriptions are complete: one to everything (a monitor), or to a PING topic, which an `Endpoint`
  subscribes to last, or others, once no more have come for a second.
- A replay loses no message: it waits for a slow listener, and ends with an error when that has read nothing for long,
  or when the last listener has left.
"""

from __future__ import annotations

import errno
import math
import os
import re
import shutil
import socket as sockets
import struct
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from enum import IntEnum
from pathlib import Path
from typing import Any, BinaryIO, Final, NamedTuple

import msgspec
import zmq

import busrl
from busrl.bus.addresses import check_endpoint, private_directory, private_umask
from busrl.bus.broker import EVERYTHING, StopRequest
from busrl.bus.endpoint import DEFAULT_HWM, DEFAULT_MAX_BYTES, Tap, configure
from busrl.errors import BadEndpoint, DiskFull, FileCorrupt, NoSuchRun, PeerTimeout, RunInUse, UserError
from busrl.observe.monitor.sources import ReplayMark, require_ipc
from busrl.paths import SHM, RunPaths
from busrl.protocol.messages import VERSION
from busrl.status.reader import RingLook, holder_of
from busrl.status.runfiles import RunFiles
from busrl.status.state import Facts
from busrl.status.view import status

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
    """Kinds of records. A reader skips other kinds."""

    MESSAGE = 0  # a message of the bus: its topic and its bytes
    LOOK = 1  # a look at the ring (RingRecord, msgpack)
    DROPS = 2  # Drops: the messages that were missed so far
    END = 3  # End: the last record of a recording that ended in order


class Drops(msgspec.Struct):
    """Messages that were sent so far during the recording and did not reach it; by sender and topic."""

    missed: int
    by: dict[str, int] = msgspec.field(default_factory=dict)


class End(msgspec.Struct):
    """The end of a recording: why it ended, and its sums."""

    why: str
    messages: int
    bytes: int
    missed: int


class Header(msgspec.Struct):
    """The head of a recording. `wall_ns` and `monotonic_ns` are the same instant: its start."""

    protocol: int
    uuid: str
    wall_ns: int
    monotonic_ns: int
    busrl: str = ""
    host: str = ""
    facts: Facts = Facts()


class RecordedFrame(NamedTuple):
    at_ns: int
    kind: int
    topic: bytes
    body: bytes


class Writer:
    """A new recording that is written. DiskFull if there is no room; the records before that stay readable."""

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
        """Append a record, at this time (default: now) or that of the record before it if that is later."""
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
            with suppress(OSError):  # there is no room for what is still buffered
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


class Recording(AbstractContextManager["Recording"]):
    """A recording that is read: its `header` and its `entries`. `torn` says where and why reading stopped early."""

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
    """Summarise a recording: `header`, `messages` by name, `seconds`, `missed`, how it `ended`, where it is `torn`."""
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
    """A recorder of a run: `run` records until the run ends, a bound is reached or `stop` is called, and returns the
    last record."""

    def __init__(self, paths: RunPaths, out: Path, seconds: float = math.inf, limit_bytes: float = math.inf) -> None:
        self._files, self._seconds, self._limit_bytes, self._out = RunFiles(paths), seconds, limit_bytes, out
        facts = self._files.facts()
        self._look = RingLook(paths, group_size=facts.group_size)
        refuse_if_over(paths, self._look)
        begun = {"wall_ns": time.time_ns(), "monotonic_ns": time.monotonic_ns()}
        header = Header(VERSION, facts.uuid, **begun, busrl=busrl.__version__, host=os.uname().nodename, facts=facts)
        self._writer = Writer(out, header)
        self._tap = Tap(self._files.tap())
        self._reason, self._stopped = "", StopRequest()
        self._missed_written = 0
        self._absent = 0
        self.messages = self.bytes = 0

    def stop(self, why: str) -> None:
        self._reason = self._reason or why
        self._stopped.set()

    def run(self) -> End:
        end, next_look = time.monotonic() + self._seconds, 0.0
        try:
            while not (why := self._reason):
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
        for message in came:
            ago = wall - message.envelope.time_ns if message.envelope is not None else 0
            self._writer.add(Kind.MESSAGE, message.topic, message.body, mono - max(0, ago))
            self.messages += 1
            self.bytes += len(message.body)

    def _once_a_second(self) -> None:
        self._write_drops()
        seen = self._look.look()
        if seen is not None:
            self._writer.add(Kind.LOOK, LOOK_TOPIC, msgspec.msgpack.encode(seen))
        # Twice in a row: a launch that was just started has a ring without a registered process.
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
    """NoSuchRun, with the first line of `busrl status`, if no process runs there; a launch that just starts counts."""
    seen = look.look()
    if seen is not None and (seen.living or holder_of(paths) is not None):
        return
    look.close()
    if look.damage:
        raise NoSuchRun(f"{paths.root}: its ring is damaged, so nothing was recorded: {look.damage}")
    line = status(paths.root).splitlines()[0]
    raise NoSuchRun(f"{paths.root}: nothing runs there, so nothing was recorded; `busrl status` says: {line}")


# -- the replayer ------------------------------------------------------------------------------------------------------

STALLED_S: Final = 15.0  # longer than the transport's heartbeats take to cut off a listener that was stopped
LINGER_MS: Final = 15_000
QUIET_S: Final = 1.0  # between the subscriptions of a listener that shows no sign of having all
REPLAY_TOPIC: Final = b"REPLAY/"
PING, STOP = b"PING/", b"STOP/"


class Replayer(AbstractContextManager["Replayer"]):
    """A replay of a recording: binds at once; `run` waits for a listener and publishes. Use with `with`."""

    def __init__(self, recording: Recording, bind: str, *, speed: float = 0.0) -> None:
        """Bind the endpoint. `speed` N is N times that of the run, 0 as fast as the listener reads."""
        self._recording, self._bind, self._speed = recording, bind, speed
        self._messages = self._missed = 0
        self._stopped = False
        self._subscribed_at = 0.0
        self._subscribed: set[bytes] = set()  # topics with a subscriber
        refuse_if_served(bind)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._bound()

    def run(self, wait_s: float, begun: Callable[[], None] = lambda: None) -> int:
        """Wait so long for a listener, then publish everything; the number of messages. PeerTimeout if none comes, or
        if the last one leaves or reads nothing."""
        self._await_listener(wait_s)
        begun()
        self._mark("running")
        try:
            self._publish_all()
        except PeerTimeout:
            if self._subscribed or not self._stopped:
                raise
            return self._messages  # the listener has left because of STOP, with all that it listens for
        self._mark("over")
        return self._messages

    def close(self) -> None:
        """Send what is queued, and remove the socket; idempotent."""
        if self._context.closed:
            return
        self._socket.close(LINGER_MS)
        self._context.term()
        Path(self._bind.removeprefix("ipc://")).unlink(missing_ok=True)

    def __exit__(self, *_: object) -> None:
        self.close()

    def _bound(self) -> zmq.Socket[bytes]:
        socket = self._context.socket(zmq.XPUB)
        configure(socket, DEFAULT_HWM, DEFAULT_MAX_BYTES)
        socket.setsockopt(zmq.XPUB_NODROP, 1)
        socket.setsockopt(zmq.XPUB_VERBOSE, 1)
        socket.setsockopt(zmq.SNDTIMEO, int(STALLED_S * 1000))
        try:
            with private_umask():
                socket.bind(self._bind)
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            if error.errno == errno.EADDRINUSE:
                raise _served(self._bind) from None
            raise BadEndpoint(f"{self._bind} cannot be bound: {error.strerror}; choose another with --bind") from None
        return socket

    def _await_listener(self, wait_s: float) -> None:
        """Wait until a listener's subscriptions are complete, or until no more have come for `QUIET_S`."""
        end, left = time.monotonic() + wait_s, wait_s
        while True:
            self._subscriptions(min(left, QUIET_S / 4))
            now = time.monotonic()
            left = end - now
            if any(topic == b"" or topic.startswith(PING) for topic in self._subscribed):
                return
            if self._subscribed and (now - self._subscribed_at >= QUIET_S or left <= 0):
                return  # a foreign listener, which may have no PING topic
            if left <= 0:
                raise PeerTimeout(f"nobody listened at {self._bind} within {wait_s:g} s; nothing was published")

    def _publish_all(self) -> None:
        start, first = time.monotonic(), None
        for entry in self._recording.entries():
            first = entry.at_ns if first is None else first
            left = math.inf if self._speed > 0 else 0.0
            while left > 0:  # serve listeners until it is time for this record
                left = start + (entry.at_ns - first) / 1e9 / self._speed - time.monotonic()
                self._serve(left)
            self._publish(entry)

    def _serve(self, timeout_s: float) -> None:
        if EVERYTHING in self._subscriptions(timeout_s):
            self._mark("running")  # for a listener that came later
        if not self._subscribed:
            raise PeerTimeout(f"the last listener at {self._bind} left after {self._messages} messages")

    def _subscriptions(self, timeout_s: float) -> list[bytes]:
        """Wait for changes of subscriptions, and record them; the changes."""
        changes: list[bytes] = []
        if self._socket.poll(max(0, min(60_000, int(timeout_s * 1000)))):
            with suppress(zmq.Again):
                for _ in range(1024):
                    changes.append(self._socket.recv(zmq.NOBLOCK))
        for change in changes:
            keep = self._subscribed.add if change[:1] == b"\x01" else self._subscribed.discard
            keep(change[1:])
            self._subscribed_at = time.monotonic()
        return changes

    def _publish(self, entry: RecordedFrame) -> None:
        if entry.kind == Kind.MESSAGE:
            self._messages += 1
            if self._messages % 256 == 0:
                self._serve(0.0)
            self._stopped = self._stopped or entry.topic == STOP
            self._send(entry.topic, entry.body)
        elif entry.kind == Kind.LOOK:
            self._send(entry.topic, entry.body)
        elif entry.kind == Kind.DROPS:
            self._missed = msgspec.msgpack.decode(entry.body, type=Drops).missed
            self._mark("running")

    def _mark(self, phase: str) -> None:
        facts = self._recording.header.facts
        mark = ReplayMark(phase, facts, self._speed, self._messages, self._missed)
        self._send(REPLAY_TOPIC, msgspec.msgpack.encode(mark))

    def _send(self, *frames: bytes) -> None:
        try:
            self._socket.send_multipart(frames)
        except zmq.Again:
            raise PeerTimeout(
                f"a listener at {self._bind} has read nothing for {STALLED_S:g} s; the replay stopped after "
                f"{self._messages} messages"
            ) from None


@contextmanager
def own_endpoint() -> Iterator[str]:
    """Make an address in a directory of this process alone, which is removed afterwards."""
    folder = private_directory(RunPaths.of("/").runtime_dir.parent / f"replay-{os.getpid()}")
    try:
        yield f"ipc://{folder}/bus.sock"
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        with suppress(OSError):
            folder.parent.rmdir()  # if no run and no other replay has a folder there


def refuse_if_served(endpoint: str) -> None:
    """RunInUse if another process serves this address, or if it belongs to a run: binding would take it away."""
    check_endpoint(require_ipc(endpoint))
    path = Path(endpoint.removeprefix("ipc://"))
    folder = path.parent.resolve()
    if re.fullmatch(r"[0-9a-f]{12}", folder.name) and list(SHM.glob(f"busrl.*.{folder.name}.ring")):
        raise RunInUse(f"{endpoint} is in the socket directory of a run; a replay needs an endpoint of its own")
    if not folder.exists():
        private_directory(folder)
    if not os.path.lexists(path):
        return
    if path.is_symlink() or not path.is_socket():
        raise BadEndpoint(f"{endpoint}: a file of that name exists and is no socket; choose another name")
    with sockets.socket(sockets.AF_UNIX, sockets.SOCK_STREAM) as client:
        client.settimeout(1.0)
        try:
            client.connect(str(path))
        except (ConnectionRefusedError, FileNotFoundError):
            return
        except OSError:  # a full queue: a process serves it, and is late
            pass
    raise _served(endpoint)


def _served(endpoint: str) -> RunInUse:
    return RunInUse(f"{endpoint} is served by another process; a replay needs an endpoint of its own (--bind)")
