"""The process `bus`: libzmq's own proxy between all publishers and all subscribers.

Talks to every endpoint of a run; knows nothing of messages: no Python runs per message. The main thread sends itself a
ping through the proxy and reports progress only when it came back, so a supervisor sees a proxy that is stuck.

- One broker per address: the lock is taken before bind, since an ipc bind silently takes an address over.
- A broker has no state. Killed and started again, subscriptions come back from the subscribers by themselves; what was
  sent meanwhile is lost, which is safe (see `core.py`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Protocol

import zmq

from busrl.bus.core import DEFAULT_HWM, DEFAULT_MAX_BYTES, configure
from busrl.bus.endpoint import Endpoint
from busrl.bus.security import prepare, private_umask
from busrl.errors import BrokerRunning, BrokerStuck, BusNotReady

KNOCKS = 4


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
    on_ready: Callable[[], None] = lambda: None,
    on_progress: Callable[[], None] = lambda: None,
    hwm: int = DEFAULT_HWM,
    max_bytes: int = DEFAULT_MAX_BYTES,
    ping_s: float = 1.0,
    stuck_s: float = 10.0,
) -> None:
    """Serve until `stop` is set. `on_ready` is called after the first round trip, `on_progress` after each."""
    if not lock.try_acquire():
        raise BrokerRunning(
            f"a broker for {frontend} is already running (pid {lock.holder() or 'unknown'} holds the lock); stop that "
            "run first, or start this one in another run directory"
        )
    try:
        with Proxy(frontend, backend, hwm, max_bytes) as proxy, Endpoint("bus", frontend, backend) as probe:
            _knock(proxy, probe, stuck_s)
            on_ready()
            while not stop.wait(ping_s):
                _knock(proxy, probe, stuck_s)
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
    """XSUB and XPUB, bound, and libzmq's loop between them in a thread of its own. Use with `with`."""

    def __init__(self, frontend: str, backend: str, hwm: int, max_bytes: int) -> None:
        self.failure: BaseException | None = None
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._sockets = [self._context.socket(zmq.XSUB), self._context.socket(zmq.XPUB)]
        try:
            for socket, endpoint in zip(self._sockets, (frontend, backend)):
                configure(socket, hwm, max_bytes)
                prepare(endpoint)
                with private_umask():
                    socket.bind(endpoint)
        except BaseException:
            self._context.destroy(linger=0)
            raise
        self._thread = threading.Thread(target=self._serve, name="proxy", daemon=True)

    def _serve(self) -> None:
        try:
            zmq.proxy(self._sockets[0], self._sockets[1])
        except zmq.ContextTerminated:
            pass
        except BaseException as error:  # kept for the main thread, which alone can end the process
            self.failure = error
        finally:
            for socket in self._sockets:
                socket.close(0)

    def __enter__(self) -> Proxy:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._context.term()  # ends zmq.proxy with ContextTerminated; returns when the thread has closed the sockets
        self._thread.join()
