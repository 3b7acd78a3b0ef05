"""A peer that speaks ZMTP badly: raw bytes for the broker's sockets, seeded.

An input is one connection's worth of bytes, or one frame on a connection whose handshake went well.
"""

from __future__ import annotations

import contextlib
import random
import socket
from collections.abc import Callable

TIMEOUT_S = 2.0
LISTENED = b"GOODBYE/"
OPENING = b"\xff" + bytes(8) + b"\x7f"


def dial(endpoint: str) -> socket.socket:
    """A bare connection to an ipc:// or tcp:// address."""
    scheme, _, rest = endpoint.partition("://")
    if scheme == "ipc":
        connection = socket.socket(socket.AF_UNIX)
        connection.settimeout(TIMEOUT_S)
        connection.connect(rest)
        return connection
    host, _, port = rest.rpartition(":")
    return socket.create_connection((host, int(port)), TIMEOUT_S)


def greeting(version: bytes = b"\x03\x01", mechanism: bytes = b"NULL") -> bytes:
    return OPENING + version + mechanism.ljust(20, b"\0") + b"\0" + bytes(31)


def frame(body: bytes, flags: int = 0) -> bytes:
    if len(body) < 256:
        return bytes([flags, len(body)]) + body
    return bytes([flags | 2]) + len(body).to_bytes(8, "big") + body


def ready(kind: bytes) -> bytes:
    return frame(b"\x05READY\x0bSocket-Type" + len(kind).to_bytes(4, "big") + kind, 4)


def handshake(kind: bytes) -> bytes:
    return greeting() + ready(kind)


def shake_hands(peer: socket.socket, kind: bytes) -> None:
    """A handshake that goes well: what is sent before the other side has said READY would be cut off."""
    peer.sendall(handshake(kind))
    heard = b""
    while b"Socket-Type" not in heard:
        data = peer.recv(4096)
        if not data:
            raise ConnectionResetError("the broker closed during the handshake")
        heard += data


class Garbage:
    """Makes inputs; the same seed makes the same ones."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)

    def connection(self) -> bytes:
        """What a bad peer sends before it goes away."""
        makers: list[Callable[[], bytes]] = [
            self._noise, self._greeted, self._cut, self._flipped, self._old, self._giant, self._commanded, self._parts,
        ]
        return self.random.choice(makers)()

    def frames(self, count: int) -> bytes:
        """Frames of a peer whose handshake went well: messages, subscriptions, commands, with any bytes in them."""
        take, some = self.random.random, self.random.randbytes
        garbage = bytearray()
        for _ in range(count):
            size = int(take() * 40)
            chance = take()
            if chance < 0.05:  # somebody listens to this
                garbage += frame(LISTENED, 1) + frame(some(size))
            elif chance < 0.15:
                garbage += frame(b"\x01" + some(size % 8))
            else:  # never MORE alone: an endless message is another test; a bad command ends the connection, so few
                garbage += frame(some(size), 4 if chance < 0.1505 else 0)
        return bytes(garbage)

    def _noise(self) -> bytes:
        return self.random.randbytes(self.random.randrange(4096))

    def _greeted(self) -> bytes:
        mechanism = self.random.choice([b"NULL", b"CURVE", b"PLAIN", b"GSSAPI", b"\xff" * 20, b""])
        return greeting(self.random.randbytes(2), mechanism) + self._noise()

    def _cut(self) -> bytes:
        whole = handshake(self._kind())
        return whole[: self.random.randrange(len(whole))]

    def _flipped(self) -> bytes:
        whole = bytearray(handshake(self._kind()) + self.frames(8))
        for _ in range(1 + self.random.randrange(6)):
            whole[self.random.randrange(len(whole))] = self.random.randrange(256)
        return bytes(whole)

    def _old(self) -> bytes:
        """Versions 1 and 2 of the protocol, which libzmq still speaks."""
        return self.random.choice([b"\x01\x00", OPENING + b"\x00", OPENING + b"\x01\x02\x00\x00"]) + self.frames(4)

    def _giant(self) -> bytes:
        size = self.random.choice([1 << 63, (1 << 63) - 1, (1 << 64) - 1, 1 << 40, 1 << 31, 5 << 20])
        return handshake(self._kind()) + b"\x02" + (size & (1 << 64) - 1).to_bytes(8, "big") + bytes(1000)

    def _commanded(self) -> bytes:
        names = [b"PING", b"PONG", b"READY", b"ERROR", b"SUBSCRIBE", b"CANCEL", b"MESSAGE", b"HELLO", b"\xff" * 255]
        name = self.random.choice(names)
        return handshake(self._kind()) + frame(bytes([len(name)]) + name + self._noise(), 4)

    def _parts(self) -> bytes:
        return handshake(b"PUB") + frame(self.random.randbytes(20), 1) * self.random.randrange(200)

    def _kind(self) -> bytes:
        return self.random.choice([b"PUB", b"SUB", b"XPUB", b"DEALER", b"ROUTER", b"REQ", b"", b"x" * 300])


def speak(endpoint: str, data: bytes) -> None:
    """Connect, say it, read what may come, go away. The broker may close at any point."""
    with contextlib.suppress(OSError), dial(endpoint) as peer:
        peer.sendall(data)
        peer.setblocking(False)
        peer.recv(4096)
