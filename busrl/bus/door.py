"""The TCP side of the broker: encrypted, and open to listed keys only.

Talks to libzmq (CURVE and its authentication protocol ZAP) and to the key directory; knows nothing of messages. The
local sockets are bound before, without encryption: libzmq takes the options that a socket has when it is bound, so one
socket serves both sides.

- The list is read at every handshake: a key that was added or removed counts at once, without a restart. A client that
  was refused does not try again by itself (libzmq), so it costs one handshake, and has to be started again.
- It fails closed: without the thread that answers, libzmq refuses everybody (ZAP_ENFORCE_DOMAIN).
- A refusal is counted by address and key; memory is bounded whatever knocks.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import zmq
from zmq.utils import z85

from busrl import keys
from busrl.bus.security import bind, tcp_pair

ZAP_ADDRESS: Final = "inproc://zeromq.zap.01"
DOMAIN: Final = b"busrl"
MAX_KNOCKERS: Final = 1024


@dataclass(frozen=True)
class Refusal:
    """Somebody who was not let in: from where, with which public key, and how often since it was last told."""

    address: str
    key: str
    count: int

    def __str__(self) -> str:
        times = "" if self.count == 1 else f" {self.count} times"
        return (
            f"refused {self.address or 'an unknown address'}{times}: key {self.key} is not in the allow-list; if it "
            "should be, `busrl keys add NAME --public KEY`"
        )


class Door:
    """`open` binds the tcp addresses of the broker's sockets; `refusals` says who was turned away since last asked."""

    def __init__(self, endpoint: str, directory: Path) -> None:
        self.endpoints = tcp_pair(endpoint)
        self._directory = directory
        self._pair = keys.server_pair(directory)
        self._lock = threading.Lock()
        self._refused: dict[tuple[str, str], int] = {}
        self._thread: threading.Thread | None = None

    @classmethod
    def of(cls, endpoint: str, key_directory: str) -> Door | None:
        """The door that `bus.endpoint` and `bus.keys` of a topology ask for; None for ipc, which needs none."""
        return None if endpoint == "ipc" else cls(endpoint, keys.directory_of(key_directory))

    def open(self, context: zmq.Context[Any], sockets: list[zmq.Socket[bytes]]) -> None:
        """Start to answer, then bind: nobody is let in by a door without a keeper."""
        answers = context.socket(zmq.REP)
        answers.bind(ZAP_ADDRESS)
        self._thread = threading.Thread(target=self._serve, args=(answers,), name="door", daemon=True)
        self._thread.start()
        for socket, endpoint in zip(sockets, self.endpoints):
            socket.setsockopt(zmq.CURVE_SERVER, 1)
            socket.setsockopt(zmq.CURVE_SECRETKEY, self._pair.secret.encode())
            socket.setsockopt(zmq.ZAP_DOMAIN, DOMAIN)
            socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
            bind(socket, endpoint)

    def refusals(self) -> list[Refusal]:
        """Who was turned away since the last call."""
        with self._lock:
            seen, self._refused = self._refused, {}
        return [Refusal(address, key, count) for (address, key), count in seen.items()]

    def close(self) -> None:
        """Wait for the thread, which ends with the context."""
        if self._thread is not None:
            self._thread.join()

    def _serve(self, answers: zmq.Socket[bytes]) -> None:
        try:
            while True:
                answers.send_multipart(self._answer(answers.recv_multipart()))
        except zmq.ContextTerminated:
            pass
        finally:
            answers.close(0)

    def _answer(self, frames: list[bytes]) -> list[bytes]:
        """The verdict on one handshake: version, request id, domain, address, identity, mechanism, key."""
        number = frames[1] if len(frames) > 1 else b""
        if len(frames) == 7 and frames[5] == b"CURVE" and len(frames[6]) == 32:
            key = z85.encode(frames[6]).decode()
            try:
                listed = keys.allowed(self._directory)
            except OSError:  # no descriptor left, say: the peer may try again, while after a 400 it gives up for good
                return [b"1.0", number, b"300", b"try again", b"", b""]
            name = next((name for name, public in listed.items() if public == key), "")
            if name:
                return [b"1.0", number, b"200", b"OK", name.encode(), b""]
            self._count(frames[3].decode(errors="replace"), key)
        return [b"1.0", number, b"400", b"not in the allow-list", b"", b""]

    def _count(self, address: str, key: str) -> None:
        with self._lock:
            if (address, key) not in self._refused and len(self._refused) >= MAX_KNOCKERS:
                address, key = "many addresses", "of many"
            self._refused[address, key] = self._refused.get((address, key), 0) + 1
