"""Publishes a recording again, on an endpoint of its own: as it was, faster, or as fast as the listener reads.

Talks to a recording and to the one socket that it binds; it never connects to anything. Knows nothing of runs.

- It refuses an address that somebody serves, or that lies in the socket directory of a run.
- It begins when a listener's subscriptions are complete: one to everything (a monitor), or to a PING topic, which an
  `Endpoint` subscribes to last, or others, once no more have come for a second. Nothing is lost on the way: it waits
  for a slow listener, and ends with an error when that has read nothing for long, or when the last listener has left.
"""

from __future__ import annotations

import errno
import math
import os
import re
import shutil
import socket as sockets
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

import msgspec
import zmq

from busrl.bus.broker import EVERYTHING
from busrl.bus.endpoint import DEFAULT_HWM, DEFAULT_MAX_BYTES, configure
from busrl.bus.security import check_endpoint, private_directory, private_umask
from busrl.errors import BadEndpoint, PeerTimeout, RunInUse
from busrl.monitor.recording import Drops, Kind, RecordedFrame, Recording
from busrl.monitor.sources import ReplayMark, require_ipc
from busrl.paths import SHM, RunPaths

STALLED_S: Final = 15.0  # longer than a listener that was stopped takes to be cut off by the transport's heartbeats
LINGER_MS: Final = 15_000
QUIET_S: Final = 1.0  # between the subscriptions of a listener that shows no sign of having all
REPLAY_TOPIC: Final = b"REPLAY/"
PING, STOP = b"PING/", b"STOP/"


class Replayer:
    """Binds at once; `run` waits for a listener and publishes. Use with `with`."""

    def __init__(self, recording: Recording, bind: str, *, speed: float = 0.0) -> None:
        """`speed` 1 is as it was, N is N times as fast, 0 as fast as the listener reads."""
        self._recording, self._bind, self._speed = recording, bind, speed
        self._messages = self._missed = 0
        self._stopped = False
        self._subscribed_at = 0.0
        self._subscribed: set[bytes] = set()  # topics that somebody is subscribed to
        refuse_if_served(bind)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._bound()

    def run(self, wait_s: float, begun: Callable[[], None] = lambda: None) -> int:
        """Wait so long for a listener, then publish everything; how many messages that were. PeerTimeout by name."""
        self._await_listener(wait_s)
        begun()
        self._mark("running")
        try:
            self._publish_all()
        except PeerTimeout:
            if self._subscribed or not self._stopped:
                raise
            return self._messages  # a listener that leaves because the run stops has seen all there is for it
        self._mark("over")
        return self._messages

    def close(self) -> None:
        """Let what is queued leave, and take the socket away; idempotent."""
        if self._context.closed:
            return
        self._socket.close(LINGER_MS)
        self._context.term()
        Path(self._bind.removeprefix("ipc://")).unlink(missing_ok=True)

    def __enter__(self) -> Replayer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _bound(self) -> zmq.Socket[bytes]:
        made = self._context.socket(zmq.XPUB)
        configure(made, DEFAULT_HWM, DEFAULT_MAX_BYTES)
        made.setsockopt(zmq.XPUB_NODROP, 1)
        made.setsockopt(zmq.XPUB_VERBOSE, 1)
        try:
            with private_umask():
                made.bind(self._bind)
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            if error.errno == errno.EADDRINUSE:
                raise _served(self._bind) from None
            raise BadEndpoint(f"{self._bind} cannot be bound: {error.strerror}; choose another with --bind") from None
        return made

    def _await_listener(self, wait_s: float) -> None:
        """Until a listener has all its subscriptions, or shows no sign of having more."""
        end, left = time.monotonic() + wait_s, wait_s
        while True:
            self._subscriptions(min(left, QUIET_S / 4))
            now = time.monotonic()
            left = end - now
            if any(one == b"" or one.startswith(PING) for one in self._subscribed):
                return
            if self._subscribed and (now - self._subscribed_at >= QUIET_S or left <= 0):
                return  # a foreign listener, which need not have a PING topic
            if left <= 0:
                raise PeerTimeout(f"nobody listened at {self._bind} within {wait_s:g} s; nothing was published")

    def _publish_all(self) -> None:
        start, first = time.monotonic(), None
        for entry in self._recording.entries():
            first = entry.at_ns if first is None else first
            left = math.inf if self._speed > 0 else 0.0
            while left > 0:  # look after listeners until it is time for this one
                left = start + (entry.at_ns - first) / 1e9 / self._speed - time.monotonic()
                self._serve(left)
            self._publish(entry)

    def _serve(self, timeout_s: float) -> None:
        if EVERYTHING in self._subscriptions(timeout_s):
            self._mark("running")  # a listener that came later wants to know as well what this is
        if not self._subscribed:
            raise PeerTimeout(f"the last listener at {self._bind} left after {self._messages} messages")

    def _subscriptions(self, timeout_s: float) -> list[bytes]:
        """Wait for subscriptions that begin or end, and keep account of them."""
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
        while True:
            try:
                self._socket.send_multipart(frames, zmq.NOBLOCK)
                return
            except zmq.Again:
                if not self._socket.poll(int(STALLED_S * 1000), zmq.POLLOUT):
                    raise PeerTimeout(
                        f"a listener at {self._bind} has read nothing for {STALLED_S:g} s; the replay stopped "
                        f"after {self._messages} messages"
                    ) from None


@contextmanager
def own_endpoint() -> Iterator[str]:
    """An address in a directory of this process alone, which is removed afterwards."""
    folder = private_directory(RunPaths.of("/").runtime_dir.parent / f"replay-{os.getpid()}")
    try:
        yield f"ipc://{folder}/bus.sock"
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        with suppress(OSError):
            folder.parent.rmdir()  # if no run and no other replay is there


def refuse_if_served(endpoint: str) -> None:
    """RunInUse if somebody serves this address, or it belongs to a run: binding would take it away from them."""
    check_endpoint(require_ipc(endpoint))
    path = Path(endpoint.removeprefix("ipc://"))
    folder = path.parent.resolve()
    if re.fullmatch(r"[0-9a-f]{12}", folder.name) and list(SHM.glob(f"busrl.*.{folder.name}.ring")):
        raise RunInUse(f"{endpoint} is in the socket directory of a run; a replay needs an endpoint of its own")
    if not folder.exists():
        private_directory(folder)
    try:
        kind = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(kind):
        raise BadEndpoint(f"{endpoint}: a file of that name exists and is no socket; choose another name")
    with sockets.socket(sockets.AF_UNIX, sockets.SOCK_STREAM) as client:
        client.settimeout(1.0)
        try:
            client.connect(str(path))
        except (ConnectionRefusedError, FileNotFoundError):
            return
        except OSError:  # a full queue: somebody is there who does not get round to it
            pass
    raise _served(endpoint)


def _served(endpoint: str) -> RunInUse:
    return RunInUse(f"{endpoint} is served by another process; a replay needs an endpoint of its own (--bind)")
