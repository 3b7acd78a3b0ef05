"""A process's connection to the bus: one PUB and one SUB socket, numbered messages, and counters of what was dropped;
and a listener at the broker's tap.

Talks to the broker through pyzmq's sockets, driven by `busrl._wire` where it can be. Knows nothing of the ring or of
what a message means. Use one endpoint in one thread.

**Where the bus may drop, and why that is safe.** A PUB socket drops while it is not connected, while the broker is
away, and when its queue of `hwm` messages is full; the broker drops for a slow subscriber in the same way; a SUB socket
that connects late never receives what came before. All of it is safe because messages are doorbells: the state lives in
the ring's slots, whoever waits for a message also looks at the ring on a timer, and with every message lost a run only
gets slower. Nothing is sent again; `msg_seq` lets the subscriber count what it missed.

- `send` never blocks, and succeeds when nobody subscribes.
- Names come from outside: what is remembered of them is bounded, whatever they are.
- Nothing that arrives can raise: bytes that are no message are counted, reported once per sender and kind, dropped.
- Only subscribed kinds are decoded. A ZeroMQ context belongs to one endpoint and is never used after a fork.
"""

from __future__ import annotations

import logging
import math
import os
import select
import sys
import time
import weakref
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

import msgspec
import zmq
from zmq.backend import Socket as CompiledSocket

from busrl import _wire
from busrl.bus.addresses import check_endpoint
from busrl.errors import BusClosed, BusNotReady, MessageTooLarge
from busrl.protocol import codec
from busrl.protocol.codec import Fault, Rejected, kind_of, topic
from busrl.protocol.messages import MAX_ACTIVITY, Heartbeat, Message, Ping, Pong, name_of

if TYPE_CHECKING:
    from busrl.curve import ClientKeys

# -- counting missed messages -----


class Gaps:
    """Counts, per sender and topic, the messages that a subscriber did not get. Pure: fed with envelopes.

    - The first message of a (sender, topic) is the base line: what came before it was not for this subscriber.
    - A number not above the last one is a repetition, or a new life of the sender if it was sent later.
    - Beyond `capacity` pairs, further ones are not followed.
    """

    def __init__(self, capacity: int = 4096) -> None:
        self.missed = 0
        self.repeated = 0
        self.missed_by: Counter[tuple[str, str]] = Counter()
        self._capacity = capacity
        self._last: dict[bytes, dict[str, list[int]]] = {}  # by topic and sender: msg_seq and time_ns
        self._followed = 0

    def seen(self, topic: bytes, message: Message | Envelope) -> None:
        seq, time_ns = message.msg_seq, message.time_ns
        try:
            last = self._last[topic][message.sender]
        except KeyError:
            if self._followed < self._capacity:
                self._followed += 1
                self._last.setdefault(topic, {})[message.sender] = [seq, time_ns]
            return
        ahead = seq - last[0]
        if ahead > 1:
            self._miss(message.sender, topic, ahead - 1)
        elif ahead < 1 and time_ns <= last[1]:
            self.repeated += 1
            return
        last[0], last[1] = seq, time_ns

    def tail(self, heartbeat: Message | Envelope, last_seqs: Mapping[str, int]) -> None:
        """Count what a heartbeat shows as lost: between the last number seen and its sender's last one of a topic."""
        for name, seq in last_seqs.items():
            topic = name.encode(errors="replace")
            last = self._last.get(topic, {}).get(heartbeat.sender)
            if last is not None and seq > last[0]:
                self._miss(heartbeat.sender, topic, seq - last[0])
                last[:] = seq, heartbeat.time_ns

    def _miss(self, sender: str, topic: bytes, count: int) -> None:
        self.missed += count
        self.missed_by[sender, topic.decode(errors="replace")] += count


# -- the two sockets -----


WAIT: Final = 0
NOBLOCK: Final = int(zmq.NOBLOCK)
SNDMORE: Final = int(zmq.SNDMORE | zmq.NOBLOCK)
RCVMORE: Final = int(zmq.RCVMORE)
EVENTS: Final = int(zmq.EVENTS)
POLLIN: Final = int(zmq.POLLIN)
Frames = tuple[bytes, ...]


class Wire(Protocol):
    """The two sockets of one endpoint, driven by `busrl._wire`, which calls the libzmq that pyzmq has loaded, or by
    `PlainWire` where that cannot be reached. Both behave alike, and the tests hold both to it.

    - `receive` returns what is here, a bounded number: topics and payloads, and single frames that belong to no message
      (one that came alone, each one after the second of its message). With WAIT it waits, at most RCVTIMEO.
    - An empty list says that nothing is here; a list that is not empty does not say that nothing more is.
    - After `close` nothing touches the sockets, which stay their owner's to close.
    """

    def send(self, topic: bytes, payload: bytes, /) -> None: ...
    def receive(self, flags: int, /) -> list[Frames]: ...
    def close(self) -> None: ...


def _reach() -> str:
    """The version of pyzmq's libzmq; empty if pyzmq's compiled part does not show its functions."""
    try:
        return _wire.use(sys.modules[CompiledSocket.__module__].__file__ or "")
    except LookupError:
        return ""


_VERSION: Final = _reach()
KIND: Final = f"libzmq {_VERSION}" if _VERSION else "pyzmq"


def open_wire(pub: zmq.Socket[bytes], sub: zmq.Socket[bytes]) -> Wire:
    return _wire.Wire(pub, sub, zmq.ZMQError) if _VERSION else PlainWire(pub, sub)


class PlainWire:
    """Through pyzmq's compiled sockets: the flag enumerations of the layer over them cost more than sending."""

    def __init__(self, pub: zmq.Socket[bytes], sub: zmq.Socket[bytes]) -> None:
        self._send = CompiledSocket.send.__get__(pub)
        self._recv = CompiledSocket.recv.__get__(sub)
        self._get = CompiledSocket.get.__get__(sub)
        self._tail = False  # the next frame belongs to a message whose first two were handed out

    def send(self, topic: bytes, payload: bytes, /) -> None:
        """Both frames, or none: a PUB socket drops whole messages."""
        self._send(topic, SNDMORE)
        self._send(payload, NOBLOCK)

    def receive(self, flags: int, /) -> list[Frames]:
        """At most one message; see `Wire`."""
        if flags and not self._get(EVENTS) & POLLIN:  # pyzmq's exception costs ten times as much
            return []
        try:
            first: bytes = self._recv(flags)
        except zmq.Again:
            return []
        more = bool(self._get(RCVMORE))
        if self._tail or not more:
            self._tail = self._tail and more
            return [(first,)]
        second: bytes = self._recv(NOBLOCK)
        self._tail = bool(self._get(RCVMORE))
        return [(first, second)]

    def close(self) -> None:
        """Nothing to do: a closed socket of pyzmq raises by itself."""


# -- the endpoint -----


DEFAULT_HWM: Final = 20_000
DEFAULT_MAX_BYTES: Final = 1 << 20
TRANSPORT_SLACK: Final = 4  # libzmq cuts the peer off at this multiple: below it the sender can still be named
MAX_REPORTED: Final = 1024
MAX_ROUTES: Final = 4096
LINGER_MS: Final = 250
HANDSHAKE_MS: Final = 5000  # half a handshake holds a descriptor no longer than this
MAX_ADDRESSED: Final = 1024  # addressed topics that an endpoint remembers; the numbers of the oldest begin again
RECEIVED_AHEAD: Final = 512  # messages that wait in the reader's own memory; the rest waits at the broker
MAX_LOOKS: Final = 4096  # messages looked at before the caller is asked again: a flood of refused ones cannot hold it
RECEIVE_SLICE_S: Final = 0.1  # the longest that a wait inside libzmq takes
PING_EVERY_S: Final = 0.05
PING_FIRST_S: Final = 0.004  # the pauses grow from here: a first ping is often quicker than the subscription

_log = logging.getLogger("busrl.bus")
_alive: weakref.WeakSet[Endpoint] = weakref.WeakSet()


def configure(socket: zmq.Socket[bytes], hwm: int, max_bytes: int) -> None:
    """The options that every socket of the bus has, the broker's included."""
    socket.setsockopt(zmq.LINGER, LINGER_MS)
    socket.setsockopt(zmq.SNDHWM, hwm)
    socket.setsockopt(zmq.RCVHWM, hwm)
    socket.setsockopt(zmq.MAXMSGSIZE, max_bytes * TRANSPORT_SLACK)
    socket.setsockopt(zmq.RECONNECT_IVL, 50)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, 200)  # a broker is back in a quarter of a second
    socket.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
    socket.setsockopt(zmq.HEARTBEAT_IVL, 1000)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 3000)


def encrypt(socket: zmq.Socket[bytes], keys: ClientKeys) -> None:
    """Talk only to the broker that has the secret of `keys.server`, and only encrypted: there is no fall-back."""
    socket.setsockopt(zmq.CURVE_SERVERKEY, keys.server.encode())
    socket.setsockopt(zmq.CURVE_PUBLICKEY, keys.pair.public.encode())
    socket.setsockopt(zmq.CURVE_SECRETKEY, keys.pair.secret.encode())


class MessageFaults(Protocol):
    """Faults on purpose, between the endpoint and its sockets (`busrl.faults` has them)."""

    def lets_out(self, topic: str) -> bool: ...
    def around(self, receive: Callable[[int], list[Frames]]) -> Callable[[int], list[Frames]]: ...
    def due_s(self) -> float: ...


@dataclass(slots=True)
class _Line:
    """A topic that this endpoint sends to, and the number of its last message there."""

    topic: str
    raw: bytes
    seq: int = 0


class _Subscription(NamedTuple):
    """A kind of message that this endpoint subscribes to: how it is decoded, and whether it is served here."""

    read: Callable[[bytes], Message]
    served: bool


class Endpoint:
    """A process's connection to the bus: `send`, `recv`, `drain`, `ready`. One thread, one process."""

    def __init__(
        self, name: str, frontend: str, backend: str, *, subscribe: Sequence[str] = (), hwm: int = DEFAULT_HWM,
        max_bytes: int = DEFAULT_MAX_BYTES, keys: ClientKeys | None = None,
        report: Callable[[str], None] = _log.warning, message_faults: MessageFaults | None = None,
        on_reject: Callable[[Rejected, str], None] | None = None,
    ) -> None:
        """`on_reject` gets what was dropped, and the name of the message in its topic."""
        self.name, self._frontend, self._backend = name, frontend, backend
        self._max_bytes, self._report, self._message_faults = max_bytes, report, message_faults
        self._on_reject = on_reject
        self._closed = ""
        self._reported: set[tuple[str, Fault]] = set()
        self.faults: Counter[Fault] = Counter()  # messages that came and were dropped
        self._lines: dict[tuple[type[Message], str], _Line] = {}
        self._addressed: deque[tuple[type[Message], str]] = deque()  # of these, the ones to one process, oldest first
        self.gaps = Gaps()  # what was lost on the way here
        self._pending: deque[Message] = deque(maxlen=max(hwm, MAX_LOOKS))  # came, not taken; the oldest may go
        self._token, self._echoed = "", False  # of the ping that `ready` waits for
        kinds: list[type[Message]] = [*map(kind_of, subscribe), Ping]
        self._kinds = {
            name_of(kind).encode(): _Subscription(codec.reader(kind, max_bytes), kind in (Heartbeat, Ping))
            for kind in kinds
        }
        self._routes: dict[bytes, _Subscription | None] = {}
        for endpoint in (frontend, backend):
            check_endpoint(endpoint, keys is not None)
        self._open(hwm, subscribe, keys)
        _alive.add(self)

    def _open(self, hwm: int, subscribe: Sequence[str], keys: ClientKeys | None) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._pub = self._context.socket(zmq.PUB)
        self._sub = self._context.socket(zmq.SUB)
        for socket, most in ((self._pub, hwm), (self._sub, min(hwm, RECEIVED_AHEAD))):
            configure(socket, most, self._max_bytes)
            if keys is not None:
                encrypt(socket, keys)
        for prefix in subscribe:
            self._sub.setsockopt(zmq.SUBSCRIBE, prefix.encode())
        # Last: subscriptions travel in order, so an echo proves that the others have reached the broker as well.
        self._sub.setsockopt(zmq.SUBSCRIBE, topic(Ping, self.name).encode())
        self._wire, faults = open_wire(self._pub, self._sub), self._message_faults
        self._send = self._wire.send
        self._receive = self._wire.receive if faults is None else faults.around(self._wire.receive)
        self._sub.setsockopt(zmq.RCVTIMEO, int(RECEIVE_SLICE_S * 1000))
        self._pub.connect(self._frontend)
        self._sub.connect(self._backend)
        self._fd = int(self._sub.getsockopt(zmq.FD))
        self._readable = select.poll()
        self._readable.register(self._fd, select.POLLIN)

    # sending

    def send(self, message: Message, to: str = "") -> None:
        """Fill the envelope and send to everybody, or to process `to`; never blocks.

        The message belongs to the endpoint until this returns.
        """
        if self._closed:
            raise BusClosed(f"bus endpoint {self.name!r}: {self._closed}")
        try:
            line = self._lines[type(message), to]
        except KeyError:
            line = self._line(type(message), to)
        message.sender = self.name
        message.time_ns = time.time_ns()
        message.msg_seq = seq = line.seq + 1
        if isinstance(message, Heartbeat):
            message.last_seqs = self.last_seqs()
        raw = codec.encode(message)
        if len(raw) > self._max_bytes:
            raise MessageTooLarge(
                f"{line.topic} from {self.name!r} has {len(raw)} bytes, the limit is {self._max_bytes}; put the data "
                "into a slot, or raise bus.max_message_bytes in the topology"
            )
        if self._message_faults is None or self._message_faults.lets_out(line.topic):
            self._send(line.raw, raw)
        line.seq = seq

    def _line(self, kind: type[Message], to: str) -> _Line:
        name = topic(kind, to)
        line = _Line(name, name.encode())
        if to:
            self._addressed.append((kind, to))
            if len(self._addressed) > MAX_ADDRESSED:
                del self._lines[self._addressed.popleft()]
        self._lines[kind, to] = line
        return line

    def last_seqs(self) -> dict[str, int]:
        """The number of the last message to each topic, as the heartbeat carries them."""
        return {line.topic: line.seq for line in self._lines.values() if line.seq}

    def heartbeat(self, role: str, activity: str, control: int = 0) -> None:
        """Publish HEARTBEAT; it carries the last number of every topic, so that listeners see lost tails too."""
        self.send(Heartbeat(role=role, activity=activity[:MAX_ACTIVITY], control=control))

    # receiving

    @property
    def pending(self) -> int:
        """Messages that were decoded and not taken yet."""
        return len(self._pending)

    def take(self) -> Message | None:
        """The next message that is already here, or None."""
        if self._pending:
            return self._pending.popleft()
        return self._take_new()

    def drain(self, limit: int = 4096) -> list[Message]:
        """All messages that are already here (at most `limit`, so that a flood cannot hold the caller)."""
        messages: list[Message] = []
        while len(messages) < limit and (message := self.take()) is not None:
            messages.append(message)
        return messages

    def _take_new(self, flags: int = NOBLOCK) -> Message | None:
        """The next message, with none pending."""
        looked = 0
        while looked < MAX_LOOKS and (came := self._fetch(flags)):
            if self._pending:
                return self._pending.popleft()
            looked += came
        return None

    def _fetch(self, flags: int) -> int:
        """Decode some of what is here into `_pending`, in order. Returns how many there were, 0 if nothing is here."""
        if self._closed:
            raise BusClosed(f"bus endpoint {self.name!r}: {self._closed}")
        came = self._receive(flags)
        for frames in came:
            if self._closed:  # by `on_reject`
                break
            if (message := self._accept(frames)) is not None:
                self._pending.append(message)
        return len(came)

    def _accept(self, frames: Frames) -> Message | None:
        """Turn a multipart into a message for the caller; None for what is dropped or answered here."""
        target, raw = frames[0], frames[-1]
        kind = self._routes.get(target) or self._route(target)
        try:
            if kind is None or len(frames) != 2:
                raise Rejected(Fault.MALFORMED, codec.sender_in(raw), f"{len(frames)} frames on topic {target[:80]!r}")
            message = kind.read(raw)
        except Rejected as rejected:
            self._drop(rejected)
            if self._on_reject is not None:
                self._on_reject(rejected, target.decode("ascii", "replace").partition("/")[0])
            return None
        self.gaps.seen(target, message)
        return self._serve(message) if kind.served else message

    def _route(self, target: bytes) -> _Subscription | None:
        """The kind that travels on a topic; remembered for the first topics that come."""
        kind = self._kinds.get(target.partition(b"/")[0])
        if len(self._routes) < MAX_ROUTES:
            self._routes[target] = kind
        return kind

    def _serve(self, message: Message) -> Message | None:
        """Serve pings here: the echo of our own proves readiness, another's is answered. Other messages are passed on.
        """
        if isinstance(message, Heartbeat):
            self.gaps.tail(message, message.last_seqs)
        if not isinstance(message, Ping):
            return message
        if message.sender != self.name:
            try:
                self.send(Pong(token=message.token), to=message.sender)
            except ValueError:  # a sender whose name cannot stand in a topic gets no answer
                self._drop(Rejected(Fault.MALFORMED, message.sender, "its name cannot be an address"))
        elif message.token == self._token:
            self._echoed = True
        return None

    def _drop(self, rejected: Rejected) -> None:
        self.faults[rejected.fault] += 1
        key = (rejected.sender, rejected.fault)
        if key in self._reported or len(self._reported) >= MAX_REPORTED:
            return
        self._reported.add(key)
        self._report(f"bus endpoint {self.name!r} dropped a message: {rejected}; further ones are only counted")

    # waiting

    def recv(self, timeout_s: float) -> Message | None:
        """The next message, or None when `timeout_s` has passed without one."""
        if self._pending:
            return self._pending.popleft()
        now = time.monotonic()
        deadline = now + timeout_s
        while self._message_faults is None and deadline - now >= RECEIVE_SLICE_S:
            # Waiting inside libzmq: asleep at once after a send, one look less for a message that is here.
            if (message := self._take_new(WAIT)) is not None:
                return message
            now = time.monotonic()
        while (message := self.take()) is None and (left := deadline - time.monotonic()) > 0:
            self.wait(left)
        return message

    def wait(self, timeout_s: float, fd: int = -1) -> None:
        """Return when a message may be here, when the descriptor `fd` is readable, or when the time is over.

        The socket's descriptor is edge-triggered: call this only after a `take` of None.
        """
        # A message that is held back makes no socket readable.
        wait_s = timeout_s if self._message_faults is None else min(timeout_s, self._message_faults.due_s())
        if fd < 0:
            self._readable.poll(math.ceil(wait_s * 1000))
            return
        self._readable.register(fd, select.POLLIN)
        try:
            self._readable.poll(math.ceil(wait_s * 1000))
        finally:
            self._readable.unregister(fd)

    def fileno(self) -> int:
        """The descriptor by which another endpoint's `wait` waits for this one too. Take all that is in both before."""
        return self._fd

    def ready(self, timeout_s: float) -> None:
        """Return when a ping of our own came back through the broker; what else arrives stays `pending`.

        BusNotReady after `timeout_s`.
        """
        self._token, self._echoed = os.urandom(8).hex(), False  # an echo of an earlier ping does not count
        now = ping_at = time.monotonic()
        deadline, pause_s = now + timeout_s, PING_FIRST_S
        while not self._echoed:
            if now >= ping_at:
                self.send(Ping(token=self._token), to=self.name)
                ping_at, pause_s = now + pause_s, min(PING_EVERY_S, 2 * pause_s)
            looked = 0
            while not self._echoed and looked < MAX_LOOKS and (came := self._fetch(NOBLOCK)):
                looked += came
            if not self._echoed:
                if now >= deadline:
                    raise BusNotReady(
                        f"bus endpoint {self.name!r}: no round trip through the broker within {timeout_s:g} s "
                        f"(publishes to {self._frontend}, subscribes at {self._backend}); is the process `bus` "
                        "running? its log says why not"
                    )
                self.wait(max(0.0, ping_at - time.monotonic()))
                now = time.monotonic()

    def close(self) -> None:
        """Close both sockets; what is still queued gets `LINGER_MS` to leave. Idempotent."""
        if self._closed:
            return
        self._end("it was closed")
        self._pub.close()
        self._sub.close()
        self._context.term()

    def _end(self, why: str) -> None:
        self._closed = why
        self._wire.close()
        self._pending.clear()

    def __enter__(self) -> Endpoint:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _after_fork() -> None:
    for endpoint in _alive:
        endpoint._end("it was opened before a fork; open a new one in the child")


os.register_at_fork(after_in_child=_after_fork)


# -- at the tap -----

TAP_QUEUE: Final = 4096  # messages on this side of the wire


class Envelope(msgspec.Struct):
    """The fields that every message carries; `last_seqs` is filled in heartbeats alone."""

    type: str = ""
    v: int = 0
    sender: str = ""
    msg_seq: int = 0
    time_ns: int = 0
    last_seqs: dict[str, int] = {}


class TapMessage(NamedTuple):
    """A message as it came; `envelope` is None if its bytes hold none."""

    topic: bytes
    body: bytes
    envelope: Envelope | None

    @property
    def name(self) -> str:
        """The message's name, from its topic: `NEW_TASK` of `NEW_TASK/rollout-0/`."""
        return self.topic.partition(b"/")[0].decode(errors="replace")


_decode: Final = msgspec.msgpack.Decoder(Envelope).decode


class Tap:
    """Every message of the bus, read at the tap of a broker or at a replay: `take` what has come, `wait` for more.

    - It decodes no more than the envelope, so messages of newer programs and damaged ones are seen as well. `gaps` and
      `malformed` count what was lost and what was none.
    - It subscribes to everything, but at the tap, not on the bus: no publisher notices it. It never sends.
    - Its queue is short, so what it does not read in time is dropped for it alone.
    """

    def __init__(self, endpoint: str, *, max_bytes: int = DEFAULT_MAX_BYTES) -> None:
        check_endpoint(endpoint)
        self.endpoint, self._max_bytes = endpoint, max_bytes
        self.malformed = 0
        self.gaps = Gaps()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._open()

    def take(self, limit: int = 4096) -> list[TapMessage]:
        """Take what is here already, `limit` messages and at most as many more as the wire gives at once."""
        came: list[TapMessage] = []
        while len(came) < limit and (messages := self._wire.receive(NOBLOCK)):
            # One frame: a subscription on its way to the publishers.
            came += [self._seen(frames[0], frames[1]) for frames in messages if len(frames) == 2]
        return came

    def wait(self, timeout_s: float, *others: int) -> bool:
        """Wait for a message; false if none came in time. One of the descriptors `others` ends the wait as well."""
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        for other in others:
            poller.register(other, zmq.POLLIN)
        return any(ready is self._socket for ready, _ in poller.poll(max(0, int(timeout_s * 1000))))

    def reopen(self) -> None:
        """Give up what is queued here and at the other end, and listen on from now."""
        self._shut()
        self._open()

    def close(self) -> None:
        self._shut()
        self._context.term()

    def _shut(self) -> None:
        self._wire.close()
        self._socket.close(0)

    def _open(self) -> None:
        self._socket = socket = self._context.socket(zmq.SUB)
        configure(socket, TAP_QUEUE, self._max_bytes)
        socket.setsockopt(zmq.SUBSCRIBE, b"")
        socket.connect(self.endpoint)
        self._wire = open_wire(socket, socket)

    def _seen(self, topic: bytes, body: bytes) -> TapMessage:
        try:
            envelope = _decode(body)
        except (ValueError, RecursionError, MemoryError):
            self.malformed += 1
            return TapMessage(topic, body, None)
        self.gaps.seen(topic, envelope)
        if envelope.last_seqs:
            self.gaps.tail(envelope, envelope.last_seqs)
        return TapMessage(topic, body, envelope)
