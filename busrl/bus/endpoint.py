"""A process's connection to the bus: one PUB and one SUB socket, numbered messages, and counters of what was dropped.

Talks to the broker through pyzmq's sockets, driven by `busrl._wire` where it can be. Knows nothing of the ring or of
what a message means. Use one endpoint in one thread. `busrl.bus.aio` has the same for asyncio.

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
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Final, Protocol

import zmq
from zmq.backend import Socket as CompiledSocket

from busrl import _wire
from busrl.bus.security import check_endpoint
from busrl.errors import BusClosed, BusNotReady, MessageTooLarge
from busrl.keys import ClientKeys
from busrl.protocol import MAX_ACTIVITY, Fault, Heartbeat, Message, Ping, Pong, Rejected, codec, kind_of, name_of, topic

# -- counting missed messages -----


class Numbered(Protocol):
    """What is looked at of a message; a decoded one has it, and so has its bare envelope."""

    @property
    def sender(self) -> str: ...
    @property
    def msg_seq(self) -> int: ...
    @property
    def time_ns(self) -> int: ...


class Tail(Numbered, Protocol):
    """A heartbeat, which names the last number of every topic of its sender."""

    @property
    def last_seqs(self) -> dict[str, int]: ...


class Gaps:
    """Counts, per sender and topic, the messages that a subscriber did not get. Pure: fed with envelopes.

    - The first message of a (sender, topic) is the base line: what came before it was not for this subscriber.
    - A number not above the last one is a repetition, or a new life of the sender if it was sent later.
    - Beyond `capacity` pairs, further ones are not followed.
    """

    def __init__(self, capacity: int = 4096) -> None:
        self.missed = 0
        self.repeated = 0
        self.missed_by: dict[tuple[str, str], int] = {}
        self._capacity = capacity
        self._last: dict[bytes, dict[str, list[int]]] = {}  # by topic and sender: msg_seq and time_ns
        self._followed = 0

    def seen(self, topic: bytes, message: Numbered) -> None:
        """One message arrived."""
        seq, time_ns = message.msg_seq, message.time_ns
        try:
            last = self._last[topic][message.sender]
        except KeyError:
            self._follow(topic, message)
            return
        ahead = seq - last[0]
        if ahead > 1:
            self._miss(message.sender, topic, ahead - 1)
        elif ahead < 1 and time_ns <= last[1]:
            self.repeated += 1
            return
        last[0], last[1] = seq, time_ns

    def tail(self, heartbeat: Tail) -> None:
        """A heartbeat names the last number of each topic: whatever lies between was lost at the end."""
        for name, seq in heartbeat.last_seqs.items():
            topic = name.encode(errors="replace")
            last = self._last.get(topic, {}).get(heartbeat.sender)
            if last is not None and seq > last[0]:
                self._miss(heartbeat.sender, topic, seq - last[0])
                last[:] = seq, heartbeat.time_ns

    def _follow(self, topic: bytes, message: Numbered) -> None:
        if self._followed < self._capacity:
            self._followed += 1
            self._last.setdefault(topic, {})[message.sender] = [message.msg_seq, message.time_ns]

    def _miss(self, sender: str, topic: bytes, count: int) -> None:
        self.missed += count
        named = (sender, topic.decode(errors="replace"))
        self.missed_by[named] = self.missed_by.get(named, 0) + count


@dataclass(frozen=True)
class EndpointStats:
    """One endpoint's counters so far. `sent_by` is per topic that is remembered, `received_by` per message name; `wire`
    is `KIND`. Only `missed` is an estimate: it comes from gaps in the senders' numbers."""

    name: str
    wire: str
    sent: int
    received: int
    missed: int
    repeated: int
    malformed: int
    unknown_types: int
    wrong_version: int
    oversize: int
    sent_by: dict[str, int]
    received_by: dict[str, int]
    missed_by: dict[tuple[str, str], int]

    @property
    def dropped(self) -> int:
        """Messages that arrived and were thrown away."""
        return self.malformed + self.unknown_types + self.wrong_version + self.oversize


# -- the two sockets -----


WAIT: Final = 0
NOBLOCK: Final = int(zmq.NOBLOCK)
SNDMORE: Final = int(zmq.SNDMORE | zmq.NOBLOCK)
RCVMORE: Final = int(zmq.RCVMORE)
EVENTS: Final = int(zmq.EVENTS)
POLLIN: Final = int(zmq.POLLIN)
BURST: Final = 4
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
        """At most one message; see `Wire`."""
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
        """Nothing to do: a closed socket of pyzmq raises by itself."""

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


# -- what both kinds of endpoint share -----


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
_alive: weakref.WeakSet[Core] = weakref.WeakSet()


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
    """Only the broker that has the secret of `keys.server` is talked to, and only encrypted: there is no fall-back."""
    socket.setsockopt(zmq.CURVE_SERVERKEY, keys.server.encode())
    socket.setsockopt(zmq.CURVE_PUBLICKEY, keys.pair.public.encode())
    socket.setsockopt(zmq.CURVE_SECRETKEY, keys.pair.secret.encode())


class Trouble(Protocol):
    """Faults on purpose, between the endpoint and its sockets (`busrl.faults` has them)."""

    def lets_out(self, topic: str) -> bool: ...
    def around(self, receive: Callable[[int], list[Frames]]) -> Callable[[int], list[Frames]]: ...
    def due_s(self) -> float: ...


class _Line:
    """One topic that this endpoint sends to, and the number of its last message there."""

    __slots__ = ("beats", "raw", "seq", "topic")

    def __init__(self, kind: type[Message], to: str) -> None:
        self.topic, self.beats, self.seq = topic(kind, to), kind is Heartbeat, 0
        self.raw = self.topic.encode()


class _Subscription:
    """One kind of message that this endpoint subscribes to: how its bytes are decoded, and how many came."""

    __slots__ = ("count", "kind", "name", "read", "served")

    def __init__(self, kind: type[Message], max_bytes: int) -> None:
        self.kind, self.name, self.read = kind, name_of(kind), codec.reader(kind, max_bytes)
        self.served, self.count = kind is Heartbeat or kind is Ping, 0


class Core:
    """Sockets and counters of one endpoint; see `Endpoint` and `AsyncEndpoint` for how to wait."""

    def __init__(
        self,
        name: str,
        frontend: str,
        backend: str,
        *,
        subscribe: Sequence[str] = (),
        hwm: int = DEFAULT_HWM,
        max_bytes: int = DEFAULT_MAX_BYTES,
        keys: ClientKeys | None = None,
        report: Callable[[str], None] = _log.warning,
        trouble: Trouble | None = None,
    ) -> None:
        self.name, self._frontend, self._backend = name, frontend, backend
        self._max_bytes, self._report, self._trouble = max_bytes, report, trouble
        self.on_reject: Callable[[Rejected, bytes], None] | None = None  # called with what was dropped, and its topic
        self._closed = ""
        self._reported: set[tuple[str, Fault]] = set()
        self._faults: Counter[Fault] = Counter()
        self._lines: dict[tuple[type[Message], str], _Line] = {}
        self._addressed: deque[tuple[type[Message], str]] = deque()  # of these, the ones to one process, oldest first
        self._forgotten = 0  # messages to those that are no longer remembered
        self._gaps = Gaps()
        self._pending: deque[Message] = deque(maxlen=max(hwm, MAX_LOOKS))  # came, not taken; the oldest may go
        self._own_ping = topic(Ping, name)
        self._token, self._echoed, self._ping_due, self._ping_pause_s = "", False, 0.0, PING_FIRST_S
        kinds: list[type[Message]] = [*map(kind_of, subscribe), Ping]
        self._kinds = {name_of(kind).encode(): _Subscription(kind, max_bytes) for kind in kinds}
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
        for one in subscribe:
            self._sub.setsockopt(zmq.SUBSCRIBE, one.encode())
        # Last: subscriptions travel in order, so an echo proves that the others have reached the broker as well.
        self._sub.setsockopt(zmq.SUBSCRIBE, self._own_ping.encode())
        self._wire, trouble = open_wire(self._pub, self._sub), self._trouble
        self._send = self._wire.send
        self._receive = self._wire.receive if trouble is None else trouble.around(self._wire.receive)
        self._sub.setsockopt(zmq.RCVTIMEO, int(RECEIVE_SLICE_S * 1000))
        self._pub.connect(self._frontend)
        self._sub.connect(self._backend)

    # sending

    def post(self, message: Message, to: str = "") -> None:
        """Fill the envelope and send; never blocks. The message belongs to the endpoint until this returns."""
        if self._closed:
            raise BusClosed(f"bus endpoint {self.name!r}: {self._closed}")
        try:
            line = self._lines[type(message), to]
        except KeyError:
            line = self._line(type(message), to)
        message.sender = self.name
        message.time_ns = time.time_ns()
        message.msg_seq = seq = line.seq + 1
        if line.beats and isinstance(message, Heartbeat):
            message.last_seqs = self._seqs()
        raw = codec.encode(message)
        if len(raw) > self._max_bytes:
            raise MessageTooLarge(
                f"{line.topic} from {self.name!r} has {len(raw)} bytes, the limit is {self._max_bytes}; put the data "
                "into a slot, or raise bus.max_message_bytes in the topology"
            )
        if self._trouble is None or self._trouble.lets_out(line.topic):
            self._send(line.raw, raw)
        line.seq = seq

    def _line(self, kind: type[Message], to: str) -> _Line:
        line = _Line(kind, to)
        if to:
            self._addressed.append((kind, to))
            if len(self._addressed) > MAX_ADDRESSED:
                self._forgotten += self._lines.pop(self._addressed.popleft()).seq
        self._lines[kind, to] = line
        return line

    def _seqs(self) -> dict[str, int]:
        """The last number of every topic that something was sent to."""
        return {line.topic: line.seq for line in self._lines.values() if line.seq}

    def heartbeat(self, role: str, activity: str) -> None:
        """Publish HEARTBEAT; it carries the last number of every topic, so that listeners see lost tails too."""
        self.post(Heartbeat(role=role, activity=activity[:MAX_ACTIVITY]))

    # receiving

    def take(self) -> Message | None:
        """The next message that is already here, or None."""
        if self._pending:
            return self._pending.popleft()
        return self._take_new()

    def drain(self, limit: int = 4096) -> list[Message]:
        """All messages that are already here (at most `limit`, so that a flood cannot hold the caller)."""
        taken: list[Message] = []
        while len(taken) < limit and (message := self.take()) is not None:
            taken.append(message)
        return taken

    def _take_new(self, flags: int = NOBLOCK) -> Message | None:
        """The next message, with none pending."""
        looked = 0
        while looked < MAX_LOOKS and (came := self._fetch(flags)):
            if self._pending:
                return self._pending.popleft()
            looked += came
        return None

    def _fetch(self, flags: int) -> int:
        """Decode some of what is here into `_pending`, in order; how many were looked at, 0 if nothing is here."""
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
        """One multipart to a message for the caller; None for what is dropped or answered here."""
        target, raw = frames[0], frames[-1]
        kind = self._routes.get(target) or self._route(target)
        try:
            if kind is None or len(frames) != 2:
                raise Rejected(Fault.MALFORMED, codec.sender_in(raw), f"{len(frames)} frames on topic {target[:80]!r}")
            message = kind.read(raw)
        except Rejected as rejected:
            self._drop(rejected)
            if self.on_reject is not None:
                self.on_reject(rejected, target)
            return None
        kind.count += 1
        self._gaps.seen(target, message)
        return self._serve(message) if kind.served else message

    def _route(self, target: bytes) -> _Subscription | None:
        """The kind that travels on a topic; remembered for the first topics that come."""
        kind = self._kinds.get(target.partition(b"/")[0])
        if len(self._routes) < MAX_ROUTES:
            self._routes[target] = kind
        return kind

    def _serve(self, message: Message) -> Message | None:
        if isinstance(message, Heartbeat):
            self._gaps.tail(message)
        elif isinstance(message, Ping):
            self._answer(message)
            return None
        return message

    def _answer(self, ping: Ping) -> None:
        """PING is served here: one's own echo proves readiness, another's is answered."""
        if ping.sender != self.name:
            try:
                self.post(Pong(token=ping.token), to=ping.sender)
            except ValueError:  # a sender whose name cannot stand in a topic gets no answer
                self._drop(Rejected(Fault.MALFORMED, ping.sender, "its name cannot be an address"))
        elif ping.token == self._token:
            self._echoed = True

    def _drop(self, rejected: Rejected) -> None:
        self._faults[rejected.fault] += 1
        key = (rejected.sender, rejected.fault)
        if key in self._reported or len(self._reported) >= MAX_REPORTED:
            return
        self._reported.add(key)
        self._report(f"bus endpoint {self.name!r} dropped a message: {rejected}; further ones are only counted")

    def patience(self, timeout_s: float) -> float:
        """How long a wait for the socket may take: a message that is held back makes no socket readable."""
        return timeout_s if self._trouble is None else min(timeout_s, self._trouble.due_s())

    # readiness

    def round_trip(self, now: float) -> bool:
        """Whether a round trip through the broker came back; sends a ping where one is due, keeps what else arrives."""
        if now >= self._ping_due and not self._echoed:
            self._ping_due, self._ping_pause_s = now + self._ping_pause_s, min(PING_EVERY_S, 2 * self._ping_pause_s)
            self.post(Ping(token=self._token), to=self.name)
        looked = 0
        while not self._echoed and looked < MAX_LOOKS and (came := self._fetch(NOBLOCK)):
            looked += came
        return self._echoed

    def forget_echo(self) -> None:
        """Begin a new round trip: an echo of an earlier ping does not count for it."""
        self._token, self._echoed = os.urandom(8).hex(), False
        self._ping_due, self._ping_pause_s = 0.0, PING_FIRST_S

    def ping_in_s(self) -> float:
        """Seconds until the next ping of this round trip is due."""
        return max(0.0, self._ping_due - time.monotonic())

    def not_ready(self, timeout_s: float) -> BusNotReady:
        """The error of a round trip that did not come back."""
        return BusNotReady(
            f"bus endpoint {self.name!r}: no round trip through the broker within {timeout_s:g} s (publishes to "
            f"{self._frontend}, subscribes at {self._backend}); is the process `bus` running? its log says why not"
        )

    # the rest

    def fileno(self) -> int:
        """Readable when something may have arrived. Edge-triggered: `drain` until empty before waiting on it."""
        return int(self._sub.getsockopt(zmq.FD))

    def stats(self) -> EndpointStats:
        """A frozen copy of the counters."""
        sent_by = self._seqs()
        received_by = {kind.name: kind.count for kind in self._kinds.values() if kind.count}
        return EndpointStats(
            name=self.name,
            wire=KIND,
            sent=self._forgotten + sum(sent_by.values()),
            received=sum(received_by.values()),
            missed=self._gaps.missed,
            repeated=self._gaps.repeated,
            malformed=self._faults[Fault.MALFORMED],
            unknown_types=self._faults[Fault.UNKNOWN_TYPE],
            wrong_version=self._faults[Fault.WRONG_VERSION],
            oversize=self._faults[Fault.OVERSIZE],
            sent_by=sent_by,
            received_by=received_by,
            missed_by=dict(self._gaps.missed_by),
        )

    def shut(self) -> None:
        """Close both sockets; what is still queued gets `LINGER_MS` to leave. Idempotent."""
        if self._closed:
            return
        self._end("it was closed")
        self._pub.close()
        self._sub.close()
        self._context.term()

    def _orphan(self) -> None:
        self._end("it was opened before a fork; open a new one in the child")

    def _end(self, why: str) -> None:
        self._closed = why
        self._wire.close()
        self._pending.clear()


def _after_fork() -> None:
    for core in _alive:
        core._orphan()


os.register_at_fork(after_in_child=_after_fork)


# -- the blocking endpoint -----


class Endpoint(Core):
    """A process's connection to the bus: `send`, `recv`, `drain`, `ready`. One thread, one process."""

    _poll: select.poll | None = None
    send = Core.post  # to everybody, or to process `to`; never blocks

    def recv(self, timeout_s: float) -> Message | None:
        """The next message, or None when `timeout_s` has passed without one."""
        if self._pending:
            return self._pending.popleft()
        now = time.monotonic()
        deadline = now + timeout_s
        while self._trouble is None and deadline - now >= RECEIVE_SLICE_S:
            # Waiting inside libzmq: asleep at once after a send, one look less for a message that is here.
            if (message := self._take_new(WAIT)) is not None:
                return message
            now = time.monotonic()
        if (message := self.take()) is not None:
            return message
        while (left := deadline - time.monotonic()) > 0:
            self._wait(left)
            if (message := self.take()) is not None:
                return message
        return None

    def wait(self, timeout_s: float, fd: int) -> None:
        """Return when a message may be here, when the descriptor `fd` is readable, or when the time is over.

        As `_wait`: call it only after a `take` of None."""
        poller = select.poll()
        poller.register(self.fileno(), select.POLLIN)
        poller.register(fd, select.POLLIN)
        poller.poll(math.ceil(self.patience(timeout_s) * 1000))

    def ready(self, timeout_s: float) -> None:
        """Return when a ping of our own came back through the broker; BusNotReady after `timeout_s`."""
        self.forget_echo()
        deadline = time.monotonic() + timeout_s
        while not self.round_trip(now := time.monotonic()):
            if now >= deadline:
                raise self.not_ready(timeout_s)
            self._wait(self.ping_in_s())

    def _wait(self, timeout_s: float) -> None:
        """Until something may have arrived. The descriptor is edge-triggered: call it only after a `take` of None."""
        if self._poll is None:
            self._poll = select.poll()
            self._poll.register(self.fileno(), select.POLLIN)
        self._poll.poll(max(1, math.ceil(self.patience(timeout_s) * 1000)))

    def close(self) -> None:
        """Close; idempotent. What was sent last gets a moment to leave."""
        self.shut()

    def __enter__(self) -> Endpoint:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
