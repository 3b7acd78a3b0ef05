"""The process `bus`: libzmq's own proxy between all publishers and all subscribers.

Talks to every endpoint of a run; knows nothing of messages: no Python runs per message. The main thread sends itself a
ping through the proxy and reports progress only when it came back, so a supervisor sees a proxy that is stuck.

- A tap, where one is asked for, is a copy of everything on a socket of its own (the proxy's capture). Who listens there
  subscribes to nothing on the bus itself, so publishers and subscribers can not tell whether anybody does; a listener
  that does not keep up loses what is beyond `TAP_HWM`, and nobody else waits for it or loses anything.
- One broker per address: the lock is taken before bind, since an ipc bind silently takes an address over.
- Sockets whose files somebody removed (a cleaner of temporary files) would be found by nobody new: the broker ends by
  name as soon as they can be made again, and its successor makes them.
- A broker has no state. Killed and started again, subscriptions come back from the subscribers by themselves; what was
  sent meanwhile is lost, which is safe (see `core.py`).
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Final, Protocol

import zmq

from busrl.bus.core import DEFAULT_HWM, DEFAULT_MAX_BYTES, configure
from busrl.bus.door import Door, Refusal
from busrl.bus.endpoint import Endpoint
from busrl.bus.security import bind, prepare
from busrl.errors import BadEndpoint, BrokerRunning, BrokerStuck, BusNotReady, InsecureDirectory

TAP_HWM: Final = 4096  # messages kept for a listener at the tap that does not read; the rest is dropped for it
EVERYTHING: Final = b"\x01"  # what a subscriber to every topic sends upstream
KNOCKS = 4
IPC: Final = "ipc://"


class Lock(Protocol):
    """What the broker needs of a lock (the ring's OfdLock is one)."""

    def try_acquire(self) -> bool: ...
    def holder(self) -> int | None: ...
    def release(self) -> None: ...


def run_broker(
    frontend: str,
    backend: str,
    lock: Lock,
    stop: threading.Event,
    *,
    tap: str = "",
    on_ready: Callable[[], None] = lambda: None,
    on_progress: Callable[[], None] = lambda: None,
    door: Door | None = None,
    on_refused: Callable[[Refusal], None] = lambda refusal: None,
    hwm: int = DEFAULT_HWM,
    max_bytes: int = DEFAULT_MAX_BYTES,
    ping_s: float = 1.0,
    stuck_s: float = 10.0,
) -> None:
    """Serve until `stop` is set. `on_ready` is called after the first round trip, `on_progress` after each.

    `door` opens the same sockets on tcp, for listed keys; `on_refused` hears who else knocked, from this thread.
    `tap`: the endpoint at which monitors and recorders may listen; empty for none.
    """
    if not lock.try_acquire():
        raise BrokerRunning(
            f"a broker for {frontend} is already running (pid {lock.holder() or 'unknown'} holds the lock); stop that "
            "run first, or start this one in another run directory"
        )
    try:
        with Proxy(frontend, backend, hwm, max_bytes, tap, door) as proxy, Endpoint("bus", frontend, backend) as probe:
            _knock(proxy, probe, stuck_s)
            on_ready()
            while not stop.wait(ping_s):
                proxy.check_files()
                _knock(proxy, probe, stuck_s)
                for refusal in door.refusals() if door else ():
                    on_refused(refusal)
                on_progress()
    finally:
        lock.release()


def _knock(proxy: Proxy, probe: Endpoint, stuck_s: float) -> None:
    if proxy.failure is not None:
        raise BrokerStuck(f"the proxy of the bus ended: {proxy.failure!r}")
    for turn in range(KNOCKS):  # in turns: if the whole machine was suspended, that is the fault of one of them only
        try:
            probe.ready(stuck_s / KNOCKS)
            return
        except BusNotReady as error:
            if turn == KNOCKS - 1:
                raise BrokerStuck(f"the proxy of the bus does not pass messages on: {error}") from None


class Proxy:
    """XSUB and XPUB, bound, and libzmq's loop between them in a thread of its own. Use with `with`.

    With a tap, a PUB socket bound there gets a copy of every message (and of subscriptions, which have one frame).
    """

    def __init__(
        self, frontend: str, backend: str, hwm: int, max_bytes: int, tap: str = "", door: Door | None = None
    ) -> None:
        self._door = door
        self.failure: BaseException | None = None
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._sockets: list[zmq.Socket[bytes]] = []
        self._files: dict[str, os.stat_result] = {}  # endpoint -> its socket's file as it was bound
        try:
            self._bind(zmq.XSUB, frontend, hwm, max_bytes)
            self._bind(zmq.XPUB, backend, hwm, max_bytes)
            if door is not None:
                door.open(self._context, self._sockets)
            if tap:
                self._bind(zmq.PUB, tap, min(hwm, TAP_HWM), max_bytes)
                # Publishers send what somebody has subscribed to. The tap shows the whole bus, whoever listens.
                self._sockets[0].send(EVERYTHING)
        except BaseException:
            self._close()  # not context.destroy: the door's thread must close its socket itself
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
        """BrokerStuck if a socket's file was removed or replaced and could be made again. Who is connected stays so."""
        for endpoint, bound in self._files.items():
            path = Path(endpoint.removeprefix(IPC))
            try:
                if os.path.samestat(path.stat(), bound):
                    continue
            except OSError:
                pass
            with contextlib.suppress(OSError, BadEndpoint, InsecureDirectory):
                prepare(endpoint)
                raise BrokerStuck(f"{path} was removed or replaced by somebody else; the next broker makes it again")

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

    def _close(self) -> None:
        for socket in self._sockets:
            socket.close(0)
        self._context.term()
        if self._door is not None:
            self._door.close()

    def __enter__(self) -> Proxy:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._context.term()  # ends zmq.proxy with ContextTerminated; returns when the thread has closed the sockets
        self._thread.join()
        if self._door is not None:
            self._door.close()
