"""Where the ranks of a learner meet rank 0: a Unix socket for those of its host, a TCP port for those of others.

Used by `leader` and `follower`. Talks to sockets, and to the file that says where the port is, which home's relay reads
to the hosts that may know; knows nothing of messages, models or process groups.

- Port and secret are new with every attempt: a rank of an earlier one finds nobody, or is refused.
- Over TCP both sides prove that they know the secret before a message is read; it never travels here. What follows is
  in clear, as the tensors of the process group are.
- A TCP connection whose other end is gone without a word ends within the given time, also while nobody speaks.
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

from busrl import files
from busrl.errors import DeviceMissing

PROOF_S = 5.0
SIZE = 32  # bytes of a nonce, and of a proof
SIOCGIFADDR = 0x8915
VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


@dataclass(frozen=True)
class Place:
    """Where rank 0 listens for ranks of other hosts, and what proves that they are some."""

    address: str
    port: int
    secret: str


@dataclass(frozen=True)
class Away:
    """What a rank of another host has in the place of home's files. `place`: asks home where rank 0 listens, None:
    nowhere just now. `folder`: for copies of home's files."""

    host: str
    place: Callable[[], Place | None]
    folder: Path


class Door:
    """Takes connections of ranks."""

    def __init__(self, here: socket.socket, there: socket.socket | None, secret: str, silent_s: float) -> None:
        self._here, self._there, self._secret, self._silent_s = here, there, secret, silent_s

    def accept(self, wait_s: float) -> socket.socket | None:
        """The next one; None if nobody came, or somebody who is no rank."""
        for one in select.select([one for one in (self._here, self._there) if one is not None], [], [], wait_s)[0]:
            connected: socket.socket = one.accept()[0]
            if one is self._here or _proved(connected, self._secret, b"0", b"r", first=True):
                return connected if one is self._here else _watched(connected, self._silent_s)
            connected.close()
        return None


@contextlib.contextmanager
def door(file: Path, note: Path, address: str, silent_s: float) -> Iterator[Door]:
    """Listen at `file`, which only this user can open, and with an `address` at a port there; `note` says where."""
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
        yield Door(here, there, secret, silent_s)


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
    if not _proved(connected, place.secret, b"r", b"0", first=False):
        connected.close()
        raise ConnectionRefusedError(0, "it is of another attempt")
    return _watched(connected, silent_s)


def _proved(connected: socket.socket, secret: str, own: bytes, other: bytes, first: bool) -> bool:
    """Whether the other side proves itself; this one does too. Both send a nonce, then whoever connects its proof, then
    rank 0 (`first`) its own: it gives none to whoever has none."""

    def proof(of: bytes, nonces: bytes) -> bytes:
        return hmac.digest(bytes.fromhex(secret), of + nonces, "sha256")

    connected.settimeout(PROOF_S)
    until, nonce = time.monotonic() + PROOF_S, secrets.token_bytes(SIZE)
    try:
        connected.sendall(nonce)
        theirs = _exactly(connected, until)
        both = nonce + theirs if first else theirs + nonce
        if not first:
            connected.sendall(proof(own, both))
        if not hmac.compare_digest(_exactly(connected, until), proof(other, both)):
            return False
        if first:
            connected.sendall(proof(own, both))
    except OSError:
        return False
    return True


def _exactly(connected: socket.socket, until: float) -> bytes:
    """ConnectionError if it ends before, TimeoutError if it is too slow, however many bytes it sends one by one."""
    found = b""
    while len(found) < SIZE:
        connected.settimeout(max(1e-3, until - time.monotonic()))
        if not (piece := connected.recv(SIZE - len(found))):
            raise ConnectionResetError(0, "it ended")
        found += piece
    return found


def _watched(connected: socket.socket, silent_s: float) -> socket.socket:
    """The kernel asks a silent other end whether it is there, three times within `silent_s`."""
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
    """Let Gloo and NCCL of this process listen on the interface with that address, if the environment does not say."""
    if all(name in os.environ for name in VARIABLES):
        return
    found = interface_of(address)
    for name in VARIABLES:
        os.environ.setdefault(name, found)


def interface_of(address: str) -> str:
    """The network interface whose IPv4 address that is. DeviceMissing: none has it as its first one."""
    names = [name for _, name in socket.if_nameindex()]
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as one:
        for name in names:
            with contextlib.suppress(OSError):  # it has none
                found = fcntl.ioctl(one, SIOCGIFADDR, struct.pack("256s", name.encode()))
                if socket.inet_ntoa(found[20:24]) == address:
                    return name
    raise DeviceMissing(
        f"no network interface has {address} as its first IPv4 address ({', '.join(names)} are there): name it by "
        f"env = {{ {VARIABLES[0]} = \"...\", {VARIABLES[1]} = \"...\" }} in the learner's [[process]]"
    )
