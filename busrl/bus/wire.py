"""Two frames out, two frames in: what an endpoint asks of its PUB and SUB socket, as cheaply as it can be had.

Talks to pyzmq's sockets in one of two ways, chosen once a process (`KIND`): `busrl._wire`, which calls the libzmq that
pyzmq has loaded, or, where that can not be reached, pyzmq's compiled sockets without the Python layer over them. Both
behave alike, and the tests hold both to it. Knows nothing of messages.

- `receive` gives what is here, a bounded number: topics and payloads, and single frames that belong to no message (one
  that came alone, each one after the second of its message). With WAIT it waits, at most the socket's RCVTIMEO.
- An empty list says that nothing is here; a list that is not empty does not say that nothing more is.
- After `close` nothing touches the sockets, which stay their owner's to close.
"""

from __future__ import annotations

import sys
from typing import Final, Protocol

import zmq
from zmq.backend import Socket as CompiledSocket

from busrl import _wire

WAIT: Final = 0
NOBLOCK: Final = int(zmq.NOBLOCK)
SNDMORE: Final = int(zmq.SNDMORE | zmq.NOBLOCK)
RCVMORE: Final = int(zmq.RCVMORE)
EVENTS: Final = int(zmq.EVENTS)
POLLIN: Final = int(zmq.POLLIN)
BURST: Final = 4
Frames = tuple[bytes, ...]


class Wire(Protocol):
    """The two sockets of one endpoint."""

    def send(self, topic: bytes, payload: bytes, /) -> None: ...
    def receive(self, flags: int, /) -> list[Frames]: ...
    def close(self) -> None: ...


def _reach() -> str:
    """The version of pyzmq's libzmq, "" if its functions are not to be seen in pyzmq's compiled part."""
    try:
        return _wire.use(sys.modules[CompiledSocket.__module__].__file__ or "")
    except LookupError:
        return ""


_VERSION: Final = _reach()
KIND: Final = f"libzmq {_VERSION}" if _VERSION else "pyzmq"


def open_wire(pub: zmq.Socket[bytes], sub: zmq.Socket[bytes]) -> Wire:
    """The wire of these two sockets, of the kind that this process has."""
    return _wire.Wire(pub, sub, zmq.ZMQError) if _VERSION else PlainWire(pub, sub)


class PlainWire:
    """Through pyzmq's compiled sockets: the flag enumerations of the layer over them cost more than sending."""

    def __init__(self, pub: zmq.Socket[bytes], sub: zmq.Socket[bytes]) -> None:
        self._send = CompiledSocket.send.__get__(pub)
        self._recv = CompiledSocket.recv.__get__(sub)
        self._get = CompiledSocket.get.__get__(sub)
        self._tail = False  # the next frame belongs to a message whose first two were handed out
        self._burst = 0  # messages since the socket was last empty

    def send(self, topic: bytes, payload: bytes, /) -> None:
        """Both frames, or none: a PUB socket drops whole messages."""
        self._send(topic, SNDMORE)
        self._send(payload, NOBLOCK)

    def receive(self, flags: int, /) -> list[Frames]:
        """At most one message, as the module's head says."""
        first = self._next(flags)
        if first is None:
            return []
        more = bool(self._get(RCVMORE))
        if self._tail or not more:
            self._tail = self._tail and more
            return [(first,)]
        second: bytes = self._recv(NOBLOCK)
        self._tail = bool(self._get(RCVMORE))
        return [(first, second)]

    def close(self) -> None:
        """Nothing to forget: a closed socket of pyzmq says so itself."""

    def _next(self, flags: int) -> bytes | None:
        """The next frame. How many came in a row tells whether to ask first: pyzmq's exception costs ten times that."""
        if flags and self._burst < BURST and not self._get(EVENTS) & POLLIN:
            self._burst = 0
            return None
        try:
            frame: bytes = self._recv(flags)
        except zmq.Again:
            self._burst = 0
            return None
        self._burst += 1
        return frame
