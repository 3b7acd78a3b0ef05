"""The broker of a run: libzmq's own proxy between all publishers and all subscribers, and its encrypted TCP side.

Talks to every endpoint of a run and to the key directory. Knows nothing of messages: no Python runs per message. The
main thread sends itself a ping through the proxy and reports progress only when it came back, so a supervisor sees a
proxy that is stuck.

- One broker per address: the lock is taken before bind, since an ipc bind silently takes an address over.
- If somebody removes the files of the sockets (a cleaner of temporary files), no new process can connect: the broker
  ends by name as soon as they can be made again, and its successor makes them.
- A broker has no state. After a kill and a new start, subscriptions come back from the subscribers by themselves; what
  was sent meanwhile is lost, which is safe (see `endpoint.py`).
- A tap, where one is asked for, is a copy of everything on a socket of its own (the proxy's capture). Its listeners
  subscribe to nothing on the bus itself, so publishers and subscribers cannot tell whether there are any; a listener
  that does not keep up loses what is beyond `TAP_HWM`, and nobody else waits for it or loses anything.
"""

from __future__ import annotations

import contextlib
import os
import select
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import zmq
from zmq.utils import z85

from busrl import curve
from busrl.bus.addresses import bind, prepare, tcp_pair
from busrl.bus.endpoint import DEFAULT_HWM, DEFAULT_MAX_BYTES, Endpoint, configure
from busrl.errors import BadEndpoint, BusNotReady, InsecureDirectory, PeerLost, RunInUse

if TYPE_CHECKING:
    from busrl.ring import OfdLock

# -- tcp with keys -----


ZAP_ADDRESS: Final = "inproc://zeromq.zap.01"
DOMAIN: Final = b"busrl"
MAX_REFUSED: Final = 1024


@dataclass(frozen=True)
class Refusal:
    """A connection that was refused: its address, its public key, and how often since the last report."""

    address: str
    key: str
    count: int

    def __str__(self) -> str:
        times = "" if self.count == 1 else f" {self.count} times"
        return (
            f"refused {self.address or 'an unknown address'}{times}: key {self.key} is not in the allow-list; if it "
            "should be, `busrl keys add NAME --public KEY`"
        )


class Admission(NamedTuple):
    """The listener's keys, and the public keys that may connect there, by name."""

    pair: curve.Pair
    listed: Callable[[], Mapping[str, str]]


class CurveListener:
    """The TCP side of the broker: encrypted with CURVE, and open to the keys in the key directory only.

    The local sockets are bound before, without encryption: libzmq takes the options that a socket has when it is bound,
    so one socket serves both sides.

    - The list is read at every handshake: a key that was added or removed counts at once, without a restart. A refused
      client does not try again by itself (libzmq), so it costs one handshake and has to be started again.
    - It fails closed: without the thread that answers, libzmq refuses every connection (ZAP_ENFORCE_DOMAIN).
    - Refusals are counted by address and key; memory is bounded however many there are.
    """

    def __init__(self, endpoint: str, admits: Path | Admission, others: tuple[str, ...] = ()) -> None:
        """Listen where publishers and subscribers of the bus connect, or at `others` instead; `admits`: the key
        directory, or a list in its place."""
        self.endpoints = others or tcp_pair(endpoint)
        if isinstance(admits, Path):
            admits = Admission(curve.server_pair(admits), partial(curve.allowed, admits))
        self._admission = admits
        self._lock = threading.Lock()
        self._refused: dict[tuple[str, str], int] = {}
        self._thread: threading.Thread | None = None

    @classmethod
    def of(cls, endpoint: str, key_directory: str) -> CurveListener | None:
        """The listener that `bus.endpoint` and `bus.keys` of a topology ask for; None for ipc, which needs none."""
        return None if endpoint == "ipc" else cls(endpoint, curve.directory_of(key_directory))

    def open(self, context: zmq.Context[Any], sockets: list[zmq.Socket[bytes]]) -> None:
        """Start to answer handshakes, then bind: no connection is accepted before its key can be checked."""
        answers = context.socket(zmq.REP)
        answers.bind(ZAP_ADDRESS)
        self._thread = threading.Thread(target=self._serve, args=(answers,), name="curve", daemon=True)
        self._thread.start()
        for socket, endpoint in zip(sockets, self.endpoints):
            socket.setsockopt(zmq.CURVE_SERVER, 1)
            socket.setsockopt(zmq.CURVE_SECRETKEY, self._admission.pair.secret.encode())
            socket.setsockopt(zmq.ZAP_DOMAIN, DOMAIN)
            socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
            bind(socket, endpoint)

    def refusals(self) -> list[Refusal]:
        """The connections refused since the last call."""
        with self._lock:
            seen, self._refused = self._refused, {}
        return [Refusal(address, key, count) for (address, key), count in seen.items()]

    def close(self) -> None:
        """Wait for the thread, which ends with the context."""
        if self._thread is not None:
            self._thread.join()

    def verdict(self, frames: list[bytes]) -> list[bytes]:
        """The reply to one handshake of these frames: version, request id, domain, address, identity, mechanism, key.
        """
        number = frames[1] if len(frames) > 1 else b""
        if len(frames) == 7 and frames[5] == b"CURVE" and len(frames[6]) == 32:
            key = z85.encode(frames[6]).decode()
            try:
                listed = self._admission.listed()
            except OSError:  # no descriptor left, say: the peer may try again, while after a 400 it gives up for good
                return [b"1.0", number, b"300", b"try again", b"", b""]
            name = next((name for name, public in listed.items() if public == key), "")
            if name:
                return [b"1.0", number, b"200", b"OK", name.encode(), b""]
            self._count(frames[3].decode(errors="replace"), key)
        return [b"1.0", number, b"400", b"not in the allow-list", b"", b""]

    def _serve(self, answers: zmq.Socket[bytes]) -> None:
        try:
            while True:
                answers.send_multipart(self.verdict(answers.recv_multipart()))
        except zmq.ContextTerminated:
            pass
        finally:
            answers.close(0)

    def _count(self, address: str, key: str) -> None:
        with self._lock:
            if (address, key) not in self._refused and len(self._refused) >= MAX_REFUSED:
                address, key = "many addresses", "of many"
            self._refused[address, key] = self._refused.get((address, key), 0) + 1


# -- the proxy -----


TAP_HWM: Final = 4096  # messages kept for a listener at the tap that does not read; the rest is dropped for it
EVERYTHING: Final = b"\x01"  # the subscription to every topic, as it is sent upstream
ROUND_TRIPS = 4
IPC: Final = "ipc://"


class StopRequest:
    """A wait that a signal handler may end.

    `threading.Event.set` must not be called in one: it takes a lock that the wait which it interrupts may hold, and
    then waits for ever.
    """

    def __init__(self) -> None:
        self._is_set = False
        self._read, self._write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)

    def set(self) -> None:
        self._is_set = True
        with contextlib.suppress(BlockingIOError):  # the pipe is full: enough to wake anybody
            os.write(self._write, b"\0")

    def is_set(self) -> bool:
        return self._is_set

    def wait(self, timeout_s: float) -> bool:
        """Wait until it is set; false if it is not within the time."""
        if not self._is_set:
            select.select([self._read], [], [], timeout_s)
        return self._is_set


def run_broker(
    frontend: str, backend: str, lock: OfdLock, stop: StopRequest, *, tap: str = "",
    on_ready: Callable[[], None] = lambda: None, on_progress: Callable[[], None] = lambda: None,
    listener: CurveListener | None = None, on_refused: Callable[[Refusal], None] = lambda refusal: None,
    hwm: int = DEFAULT_HWM, max_bytes: int = DEFAULT_MAX_BYTES, ping_s: float = 1.0, stuck_s: float = 10.0,
) -> None:
    """Serve until `stop` is set. `on_ready` is called after the first round trip, `on_progress` after each.

    `listener` opens the same sockets on tcp, for listed keys; `on_refused` is called from this thread for others.
    `tap`: the endpoint at which monitors and recorders may listen; empty for none.
    """
    if not lock.try_acquire():
        raise RunInUse(
            f"a broker for {frontend} is already running (pid {lock.holder() or 'unknown'} holds the lock); stop that "
            "run first, or start this one in another run directory"
        )
    try:
        proxy = Proxy(frontend, backend, hwm, max_bytes, tap, listener)
        with proxy, Endpoint("bus", frontend, backend) as client:
            _round_trip(proxy, client, stuck_s)
            on_ready()
            while not stop.wait(ping_s):
                proxy.check_files()
                _round_trip(proxy, client, stuck_s)
                for refusal in listener.refusals() if listener else ():
                    on_refused(refusal)
                on_progress()
    finally:
        lock.release()


def _round_trip(proxy: Proxy, client: Endpoint, stuck_s: float) -> None:
    if proxy.failure is not None:
        raise PeerLost(f"the proxy of the bus ended: {proxy.failure!r}")
    for turn in range(ROUND_TRIPS):  # if the whole machine was suspended, only one of them fails
        try:
            client.ready(stuck_s / ROUND_TRIPS)
            return
        except BusNotReady as error:
            if turn == ROUND_TRIPS - 1:
                raise PeerLost(f"the proxy of the bus does not pass messages on: {error}") from None


class Proxy:
    """XSUB and XPUB, bound, and libzmq's loop between them in a thread of its own. Use with `with`.

    With a tap, a PUB socket bound there gets a copy of every message (and of subscriptions, which have one frame).
    """

    def __init__(
        self, frontend: str, backend: str, hwm: int, max_bytes: int, tap: str = "",
        listener: CurveListener | None = None,
    ) -> None:
        self._listener = listener
        self.failure: BaseException | None = None
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._sockets: list[zmq.Socket[bytes]] = []
        self._files: dict[str, os.stat_result] = {}  # endpoint -> its socket's file as it was bound
        try:
            self._bind(zmq.XSUB, frontend, hwm, max_bytes)
            self._bind(zmq.XPUB, backend, hwm, max_bytes)
            if listener is not None:
                listener.open(self._context, self._sockets)
            if tap:
                self._bind(zmq.PUB, tap, min(hwm, TAP_HWM), max_bytes)
                # Publishers send what somebody has subscribed to. The tap shows the whole bus, whoever listens.
                self._sockets[0].send(EVERYTHING)
        except BaseException:
            for socket in self._sockets:
                socket.close(0)
            self._end()  # not context.destroy: the listener's thread must close its socket itself
            raise
        self._thread = threading.Thread(target=self._serve, name="proxy", daemon=True)

    def _bind(self, kind: int, endpoint: str, hwm: int, max_bytes: int) -> None:
        socket = self._context.socket(kind)
        self._sockets.append(socket)
        configure(socket, hwm, max_bytes)
        prepare(endpoint)
        bind(socket, endpoint)
        if endpoint.startswith(IPC):
            self._files[endpoint] = os.stat(endpoint.removeprefix(IPC))

    def check_files(self) -> None:
        """PeerLost if a socket's file was removed or replaced and could be made again. Connections stay open."""
        for endpoint, bound in self._files.items():
            path = Path(endpoint.removeprefix(IPC))
            try:
                if os.path.samestat(path.stat(), bound):
                    continue
            except OSError:
                pass
            with contextlib.suppress(OSError, BadEndpoint, InsecureDirectory):
                prepare(endpoint)
                raise PeerLost(f"{path} was removed or replaced by another program; the next broker makes it again")

    def _serve(self) -> None:
        try:
            zmq.proxy(*self._sockets)
        except zmq.ContextTerminated:
            pass
        except BaseException as error:  # kept for the main thread, which alone can end the process
            self.failure = error
        finally:
            for socket in self._sockets:
                socket.close(0)

    def _end(self) -> None:
        self._context.term()
        if self._listener is not None:
            self._listener.close()

    def __enter__(self) -> Proxy:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end()  # zmq.proxy ends with ContextTerminated, and its thread closes the sockets
        self._thread.join()
