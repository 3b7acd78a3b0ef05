"""The control connections of a broadcast: JSON lines between the learner's door and each engine that came through it.

Used by `weights.broadcast` (the door) and `weights.broadcast_receiver` (a wire). The address and a secret stand in a
file that only this user can read. Knows nothing of epochs, versions or tensors.

- A process that dies closes its wire, so its death is known at once; a stopped one is found by a deadline alone.
- No call blocks for longer than the time that it is given.
- Who does not say the secret in its first line is turned away, and so is a line that is too long.
- Any user of the machine can connect: at most `MOST_UNKNOWN` connections wait for their first line, the oldest goes for
  a new one, and who they belong to is told.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import logging
import secrets
import select
import socket
import time
from pathlib import Path
from typing import Any

from busrl.private import write_private

HOST = "127.0.0.1"  # the only one that is served
LONGEST_LINE = 64 << 20  # a manifest of a large model has about a hundred bytes per tensor
LONGEST_FROM_ENGINE = 64 << 10
SEND_PATIENCE_S = 1.0
INTRODUCE_S = 5.0
MOST_UNKNOWN = 64
MOST_AT_ONCE = 32  # let in before others are heard
TOLD_EVERY_S = 60.0
log = logging.getLogger("busrl")
Message = dict[str, Any]


class Wire:
    """One connection. `read` and `send` raise OSError when the other side is gone."""

    def __init__(self, connected: socket.socket, longest: int = LONGEST_LINE) -> None:
        connected.setblocking(False)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket = connected
        self.since = time.monotonic()
        self.known = False  # has said the secret
        self._longest = longest
        self._rest = b""
        self._ended = False

    @classmethod
    def to(cls, address: str, timeout_s: float) -> Wire:
        """Connect to a door."""
        host, _, port = address.partition("/")[0].rpartition(":")
        return cls(socket.create_connection((host, int(port)), timeout_s))

    def fileno(self) -> int:
        return self.socket.fileno()

    def send(self, message: Message) -> None:
        """Send a line; a peer that reads nothing for SEND_PATIENCE_S counts as gone."""
        left = memoryview(json.dumps(message, separators=(",", ":")).encode() + b"\n")
        deadline = time.monotonic() + SEND_PATIENCE_S
        while left:
            try:
                left = left[self.socket.send(left) :]
            except BlockingIOError:
                if not ready([self.socket], deadline - time.monotonic(), select.POLLOUT):
                    raise TimeoutError(f"it has read nothing for {SEND_PATIENCE_S:g} s") from None

    def read(self) -> list[Message]:
        """The lines that have come; ConnectionError once there are no more and never will be."""
        while not self._ended:
            try:
                piece = self.socket.recv(1 << 16)
            except BlockingIOError:
                break
            except OSError:
                piece = b""
            self._ended = not piece
            self._rest += piece
            if len(self._rest) > self._longest:
                if b"\n" not in self._rest:
                    raise ConnectionError(f"a line of more than {self._longest} bytes")
                break  # who sends without end is heard again, after the others
        *lines, self._rest = self._rest.split(b"\n")
        if self._ended and not lines:
            raise ConnectionError("its connection closed")
        return [_parsed(line) for line in lines]

    def close(self) -> None:
        self.socket.close()


class Bell:
    """Wakes a thread that waits on wires."""

    def __init__(self) -> None:
        self._in, self._out = socket.socketpair()
        self._in.setblocking(False)
        self._out.setblocking(False)

    def fileno(self) -> int:
        return self._out.fileno()

    def ring(self) -> None:
        with contextlib.suppress(OSError):  # full: it rings already; closed: nobody waits
            self._in.send(b"!")

    def still(self) -> None:
        with contextlib.suppress(OSError):
            while self._out.recv(4096):
                pass

    def close(self) -> None:
        self._in.close()
        self._out.close()


class Door:
    """Where engines come in. One thread uses it; any may `bell.ring()`."""

    def __init__(self, file: Path) -> None:
        self.file, self.host = file, HOST
        self.bell = Bell()
        self._listener = socket.create_server((HOST, 0), backlog=128)
        self._listener.setblocking(False)
        self._secret = secrets.token_hex(16)
        self._wires: set[Wire] = set()
        self._turned_away, self._next_told = 0, 0.0
        self.address = f"{HOST}:{self._listener.getsockname()[1]}/{self._secret}"
        write_private(file, self.address)

    def poll(self, timeout_s: float) -> list[tuple[Wire, Message | None]]:
        """What has been said since, None for a wire that is gone; returns early when there is something."""
        waited: list[Any] = [self._listener, self.bell, *self._wires]
        heard: list[tuple[Wire, Message | None]] = []
        for one in ready(waited, timeout_s):
            if one is self._listener:
                heard += [said for wire in self._let_in() for said in self._hear(wire)]
            elif one is self.bell:
                self.bell.still()
            else:
                heard += self._hear(one)
        self._turn_away()
        return heard

    def shut(self, wire: Wire) -> None:
        """End one connection."""
        self._wires.discard(wire)
        wire.close()

    def close(self) -> None:
        for wire in list(self._wires):
            self.shut(wire)
        self._listener.close()
        self.bell.close()
        with contextlib.suppress(OSError):
            if self.file.read_text() == self.address:  # not that of a successor
                self.file.unlink()

    def _let_in(self) -> list[Wire]:
        """Those who knocked; who belongs here has sent its line already."""
        new: list[Wire] = []
        with contextlib.suppress(OSError):
            while len(new) < MOST_AT_ONCE:
                new.append(Wire(self._listener.accept()[0], LONGEST_FROM_ENGINE))
                self._wires.add(new[-1])
        return new

    def _turn_away(self) -> None:
        """End connections that have said nothing for too long, or that are too many."""
        unknown = sorted((wire for wire in self._wires if not wire.known), key=lambda wire: wire.since)
        late = [wire for wire in unknown if time.monotonic() - wire.since > INTRODUCE_S]
        late += unknown[len(late) : max(len(late), len(unknown) - MOST_UNKNOWN)]
        for wire in late:
            if not self._turned_away or time.monotonic() > self._next_told:
                self._next_told = time.monotonic() + TOLD_EVERY_S
                log.warning(
                    "weights: %d connections to port %d said nothing and were ended, the latest of %s",
                    self._turned_away + len(late), self._listener.getsockname()[1], owner_of(wire.socket),
                )  # fmt: skip
            self._turned_away += 1
            self.shut(wire)

    def _hear(self, wire: Wire) -> list[tuple[Wire, Message | None]]:
        try:
            said = wire.read()
            if said and not wire.known:
                wire.known = hmac.compare_digest(str(said[0].get("secret")).encode(), self._secret.encode())
                if not wire.known:
                    raise ConnectionError("it does not know the secret")
            return [(wire, message) for message in said]
        except (OSError, ValueError):
            self.shut(wire)
            return [(wire, None)]


def ready(waited: list[Any], timeout_s: float, event: int = select.POLLIN) -> list[Any]:
    """Those of `waited` that can be read (or written) without blocking, after at most that long."""
    poller, by_number = select.poll(), {one.fileno(): one for one in waited}  # no bound on a file's number
    for number in by_number:
        poller.register(number, event)
    return [by_number[number] for number, _ in poller.poll(max(0, round(timeout_s * 1000)))]


def owner_of(connected: socket.socket) -> str:
    """Whose the other end of a connection on this machine is, as far as the kernel says."""
    try:
        port = connected.getpeername()[1]
        with open("/proc/net/tcp") as table:
            rows = [line.split() for line in table.readlines()[1:]]
        uid = next(row[7] for row in rows if int(row[1].rpartition(":")[2], 16) == port)
    except (OSError, StopIteration, ValueError, IndexError):
        return "an unknown user"
    return f"user {uid}"


def secret_of(address: str) -> str:
    """The secret in the text of an address file."""
    return address.partition("/")[2]


def _parsed(line: bytes) -> Message:
    try:
        message = json.loads(line)
    except RecursionError:
        raise ValueError("a line is nested too deeply") from None
    if not isinstance(message, dict):
        raise ValueError("a line is no object")
    return message
