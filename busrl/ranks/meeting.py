"""The place where the ranks of a learner meet rank 0: a Unix socket for those of its host, a TCP port for those of
others.

Used by `leader` and `follower`. Talks to sockets, and to the file with the port, which home's relay gives to allowed
hosts; knows nothing of messages, models or process groups.

- Port and secret are new with every attempt: a rank of an earlier attempt finds no listener, or is refused.
- Over TCP both sides prove that they have the secret before a message is read; the secret itself is not sent here.
  Later messages are not encrypted, like the tensors of the process group.
- A TCP connection whose other end vanished ends within the given time, also without traffic.
"""

from __future__ import annotations

import contextlib
import fcntl
import hmac
import json
import os
import secrets
import select
import socket
import struct
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from busrl.errors import DeviceMissing
from busrl.system import files

PROOF_S = 5.0
MOST_VISITORS = 64  # that prove themselves at the same time
SIZE = 32  # bytes of a nonce, and of a proof
SIOCGIFADDR = 0x8915
VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


@dataclass(frozen=True)
class Place:
    """The place where rank 0 listens for ranks of other hosts, and the secret that these must prove."""

    address: str
    port: int
    secret: str


@dataclass(frozen=True)
class Away:
    """Replaces home's files for a rank of another host. `place()` asks home for the place of rank 0; None: rank 0 does
    not listen. `folder`: for copies of home's files."""

    host: str
    place: Callable[[], Place | None]
    folder: Path


@dataclass
class Visitor:
    """A connection from elsewhere without a proof yet: the bytes that it has sent, and its deadline."""

    connected: socket.socket
    nonce: bytes
    until: float
    sent: bytes = b""


class Door:
    """Takes connections of ranks. A silent connection from elsewhere does not delay others."""

    def __init__(self, here: socket.socket, there: socket.socket | None, secret: str, silent_s: float) -> None:
        self._here, self._there, self._secret, self._silent_s = here, there, secret, silent_s
        self._visitors: dict[int, Visitor] = {}  # by descriptor, the one that came first in front

    def accept(self, wait_s: float) -> socket.socket | None:
        """The next connection of a rank; None if there is none, or one came that is no rank."""
        until = time.monotonic() + wait_s
        while True:
            now, dues = time.monotonic(), [visitor.until for visitor in self._visitors.values()]
            ready = self._ready(max(0.0, min([until, *dues]) - now))
            if self._here.fileno() in ready:
                return self._here.accept()[0]
            if self._there is not None and self._there.fileno() in ready:
                self._receive(self._there.accept()[0])
            speaking = [visitor for fd, visitor in self._visitors.items() if fd in ready]
            for visitor in speaking:
                if self._has_all(visitor):
                    return self._judged(visitor)
            if late := [visitor for visitor in self._visitors.values() if visitor.until <= time.monotonic()]:
                self._leave(late[0])
                return None
            if time.monotonic() >= until:
                return None

    def close(self) -> None:
        for visitor in list(self._visitors.values()):
            self._leave(visitor)

    def _ready(self, wait_s: float) -> set[int]:
        poller = select.poll()  # no bound on a descriptor's number
        for listening in (self._here, self._there, *(visitor.connected for visitor in self._visitors.values())):
            if listening is not None:
                poller.register(listening, select.POLLIN)
        return {number for number, _ in poller.poll(1000 * wait_s)}

    def _receive(self, connected: socket.socket) -> None:
        """Begin the proof of a visitor; among too many the oldest is dismissed."""
        if len(self._visitors) >= MOST_VISITORS:
            self._leave(next(iter(self._visitors.values())))
        visitor = Visitor(connected, secrets.token_bytes(SIZE), time.monotonic() + PROOF_S)
        self._visitors[connected.fileno()] = visitor
        connected.setblocking(False)
        with contextlib.suppress(OSError):  # it is gone: the read notices
            connected.send(visitor.nonce)

    def _has_all(self, visitor: Visitor) -> bool:
        """Read the bytes that have arrived. True at the end of the connection, or of nonce and proof."""
        try:
            piece = visitor.connected.recv(2 * SIZE - len(visitor.sent))
        except OSError:
            piece = b""
        visitor.sent += piece
        return not piece or len(visitor.sent) == 2 * SIZE

    def _judged(self, visitor: Visitor) -> socket.socket | None:
        theirs, proof = visitor.sent[:SIZE], visitor.sent[SIZE:]
        both, connected = visitor.nonce + theirs, visitor.connected
        if not hmac.compare_digest(proof, _proof(self._secret, b"r", both)):
            self._leave(visitor)
            return None
        del self._visitors[connected.fileno()]
        connected.settimeout(PROOF_S)
        with contextlib.suppress(OSError):
            connected.sendall(_proof(self._secret, b"0", both))
        return _watched(connected, self._silent_s)

    def _leave(self, visitor: Visitor) -> None:
        del self._visitors[visitor.connected.fileno()]
        visitor.connected.close()


@contextlib.contextmanager
def door(file: Path, note: Path, address: str, silent_s: float) -> Iterator[Door]:
    """Listen at `file`, which only this user can open, and, with an `address`, at a port of it, written to `note`."""
    file.unlink(missing_ok=True)
    with contextlib.ExitStack() as stack:
        here = stack.enter_context(socket.socket(socket.AF_UNIX))
        before = os.umask(0o177)
        try:
            here.bind(str(file))
        finally:
            os.umask(before)
        stack.callback(file.unlink, missing_ok=True)
        here.listen()
        there, secret = None, secrets.token_hex(SIZE)
        if address:
            there = stack.enter_context(socket.create_server((address, 0), backlog=512))
            place = Place(address, there.getsockname()[1], secret)
            files.replace(note, json.dumps(asdict(place)).encode())
            stack.callback(note.unlink, missing_ok=True)
        opened = Door(here, there, secret, silent_s)
        stack.callback(opened.close)
        yield opened


def connect(file: Path, away: Away | None, silent_s: float) -> socket.socket:
    """A connection to rank 0. OSError: it does not listen, or is of another attempt."""
    if away is None:
        connected = socket.socket(socket.AF_UNIX)
        try:
            connected.connect(str(file))
        except OSError:
            connected.close()
            raise
        return connected
    place = away.place()
    if place is None:
        raise ConnectionRefusedError(0, "home knows of no learner that waits for ranks")
    connected = socket.create_connection((place.address, place.port), PROOF_S)
    if not _proved(connected, place.secret):
        connected.close()
        raise ConnectionRefusedError(0, "it is of another attempt")
    return _watched(connected, silent_s)


def _proved(connected: socket.socket, secret: str) -> bool:
    """True if rank 0 at the other end proves itself; this side does too. Both send a nonce, then this side its proof,
    then rank 0 its own, only after a right proof."""
    until, nonce = time.monotonic() + PROOF_S, secrets.token_bytes(SIZE)
    connected.settimeout(PROOF_S)
    try:
        connected.sendall(nonce)
        both = _exactly(connected, until) + nonce
        connected.sendall(_proof(secret, b"r", both))
        return hmac.compare_digest(_exactly(connected, until), _proof(secret, b"0", both))
    except OSError:
        return False


def _proof(secret: str, of: bytes, nonces: bytes) -> bytes:
    return hmac.digest(bytes.fromhex(secret), of + nonces, "sha256")


def _exactly(connected: socket.socket, until: float) -> bytes:
    """Receive SIZE bytes. ConnectionError if the connection ends before, TimeoutError after `until`."""
    received = b""
    while len(received) < SIZE:
        connected.settimeout(max(1e-3, until - time.monotonic()))
        if not (piece := connected.recv(SIZE - len(received))):
            raise ConnectionResetError(0, "it ended")
        received += piece
    return received


def _watched(connected: socket.socket, silent_s: float) -> socket.socket:
    """Let the kernel probe a silent other end, three times within `silent_s`."""
    every = max(1, int(silent_s / 4))
    for level, option, value in (
        (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1), (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, every),
        (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, every), (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
        (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * silent_s)),
        (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
    ):
        connected.setsockopt(level, option, value)
    return connected


# -- the network of the process group --------------------------------------------------


def use_network_of(address: str) -> None:
    """Let Gloo and NCCL of this process use the interface with that address, unless the environment names one."""
    if all(name in os.environ for name in VARIABLES):
        return
    interface = interface_of(address)
    for name in VARIABLES:
        os.environ.setdefault(name, interface)


def interface_of(address: str) -> str:
    """The network interface whose IPv4 address that is. DeviceMissing: none has it as its first one."""
    names = [name for _, name in socket.if_nameindex()]
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for name in names:
            with contextlib.suppress(OSError):  # it has none
                answer = fcntl.ioctl(probe, SIOCGIFADDR, struct.pack("256s", name.encode()))
                if socket.inet_ntoa(answer[20:24]) == address:
                    return name
    raise DeviceMissing(
        f"no network interface has {address} as its first IPv4 address ({', '.join(names)} are there): name it by "
        f"env = {{ {VARIABLES[0]} = \"...\", {VARIABLES[1]} = \"...\" }} in the learner's [[process]]"
    )
