"""Direct connections between a run and other hosts, and among these: ROUTERs answer, DEALERs ask, both with CURVE keys.

Talks to sockets; questions and answers are in `busrl.hosts.questions`. The bus loses messages and bounds their size.
Weights and topologies bear neither, so they travel here. Knows nothing of rings, weights or runs.

- A question without an answer is sent again; an answer to an earlier question is dropped.
- The name of a host is that of its key in the allow-list, which libzmq gives with every message.
- Both sides drop messages beyond their high-water marks instead of growing.
"""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import zmq

from busrl.bus.addresses import allow_many_connections, host_and_port
from busrl.bus.broker import CurveListener
from busrl.bus.endpoint import HANDSHAKE_MS, encrypt
from busrl.curve import ClientKeys
from busrl.errors import PeerTimeout
from busrl.hosts import questions as q

HWM = 64
MOST_BYTES = 1 << 30  # of a frame: a piece of weights, or a manifest
BEAT_MS, SILENT_MS = 500, 2000
RECONNECT_MS, RECONNECT_MOST_MS = 100, 1000
BACKLOG = 1024  # connections that wait to be accepted: those of strangers end with their handshake's time
AGAIN_S = 2.0  # after which a question without an answer is sent again
LINGER_MS = 500  # for the last answers of a run


class Request(NamedTuple):
    """A question and its sender: the socket's name for the way back, and the name that the key is listed under."""

    peer: bytes
    name: str
    question: q.AnyQuestion


class Answering:
    """The side that answers. `listener` opens the endpoint and checks keys; `place` is the address that it got."""

    def __init__(self, listener: CurveListener) -> None:
        allow_many_connections()
        self.listener = listener
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.socket = self._context.socket(zmq.ROUTER)
        _configure(self.socket)
        listener.open(self._context, [self.socket])
        self.place = str(self.socket.get_string(zmq.LAST_ENDPOINT)).rstrip("\0")

    def waiting(self, timeout_s: float) -> Iterator[Request]:
        """Yield the questions that came since the last call, at most HWM; bytes that are no question are dropped."""
        for turn in range(HWM):
            if not self.socket.poll(0 if turn else int(1000 * timeout_s)):
                return
            frames = self.socket.recv_multipart(copy=False)
            if len(frames) == 2 and (question := q.question(frames[1].bytes)) is not None:
                yield Request(frames[0].bytes, str(frames[1].get("User-Id")), question)

    def answer(self, request: Request, reply: q.Reply, data: memoryview | bytes | None = None) -> None:
        """Send a reply, with the bytes of a piece; a host that is gone or does not read gets nothing."""
        reply.number = request.question.number
        frames: list[memoryview | bytes] = [request.peer, q.encode(reply), *([] if data is None else [data])]
        self.socket.send_multipart(frames, zmq.NOBLOCK, copy=data is None)

    def close(self) -> None:
        """Close; replies that wait are still sent, for as long as LINGER_MS."""
        self.socket.close(LINGER_MS)
        self._context.term()
        self.listener.close()


class Asking:
    """The side that asks, for one thread; several questions may be open."""

    def __init__(self, endpoint: str, keys: ClientKeys, host: str) -> None:
        self.endpoint, self.host, self.key = endpoint, host, keys.pair.public
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.socket = self._context.socket(zmq.DEALER)
        _configure(self.socket)
        self.socket.setsockopt(zmq.RECONNECT_IVL, RECONNECT_MS)
        self.socket.setsockopt(zmq.RECONNECT_IVL_MAX, RECONNECT_MOST_MS)
        encrypt(self.socket, keys)
        self._refusals = self.socket.get_monitor_socket(int(zmq.EVENT_HANDSHAKE_FAILED_AUTH))
        self.socket.connect(endpoint)
        self._number = time.time_ns() // 1000  # above those of earlier lives, whose answers may still come

    def ask(self, question: q.Question, timeout_s: float) -> q.AnyReply:
        """The answer; the question is sent again every AGAIN_S, as a connection that breaks loses messages.
        PeerTimeout: no answer came."""
        end, numbers = time.monotonic() + timeout_s, set[int]()
        while time.monotonic() < end:
            numbers.add(self.post(question))
            again = min(end, time.monotonic() + AGAIN_S)
            while (left := again - time.monotonic()) > 0:
                answer = self.receive(left)
                if answer is not None and answer[0].number in numbers:
                    return answer[0]
        raise PeerTimeout(
            f"{self.endpoint} did not answer for {timeout_s:g} s: see that the run is there (`busrl status`), that "
            f"this host can reach the port, and that {self.host}'s key is listed (`busrl keys list` on the run's host)"
        )

    @property
    def refused(self) -> bool:
        """Check whether the other side has refused this key."""
        return bool(self._refusals.poll(0))

    def post(self, question: q.Question) -> int:
        """Send a question without waiting; returns its number."""
        self._number += 1
        question.number, question.host = self._number, self.host
        with contextlib.suppress(zmq.Again):  # no other side, and a full queue: the question is sent again later
            self.socket.send(q.encode(question), zmq.NOBLOCK)
        return self._number

    def receive(self, timeout_s: float) -> tuple[q.AnyReply, memoryview] | None:
        """The next answer with the bytes that came with it; None if none came."""
        if not self.socket.poll(int(1000 * timeout_s)):
            return None
        frames = self.socket.recv_multipart(copy=False)
        reply = q.reply(frames[0].bytes)
        return None if reply is None else (reply, frames[1].buffer if len(frames) > 1 else memoryview(b""))

    def here(self) -> Iterator[tuple[q.AnyReply, memoryview]]:
        """Yield the answers that are here, at most HWM."""
        for _ in range(HWM):
            if (answer := self.receive(0)) is None:
                return
            yield answer

    def close(self) -> None:
        self.socket.disable_monitor()
        self._refusals.close(0)  # or the context would wait for it
        self.socket.close(0)
        self._context.term()


def wait(timeout_s: float, ends: Iterable[Asking | Answering]) -> None:
    """Wait until one of these has something to read, or the time is over."""
    poller = zmq.Poller()
    for end in ends:
        poller.register(end.socket, zmq.POLLIN)
    poller.poll(int(1000 * timeout_s))


def address_towards(endpoint: str) -> str:
    """The address of this host from which it reaches `endpoint`. OSError: it reaches it from none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(host_and_port(endpoint))  # sends nothing
        return str(probe.getsockname()[0])


def _configure(socket: zmq.Socket[bytes]) -> None:
    options = {
        zmq.LINGER: 0, zmq.SNDHWM: HWM, zmq.RCVHWM: HWM, zmq.MAXMSGSIZE: MOST_BYTES, zmq.HEARTBEAT_IVL: BEAT_MS,
        zmq.HEARTBEAT_TIMEOUT: SILENT_MS, zmq.TCP_KEEPALIVE: 1,
        zmq.HANDSHAKE_IVL: HANDSHAKE_MS, zmq.BACKLOG: BACKLOG,
    }
    for option, value in options.items():
        socket.setsockopt(option, value)
