"""The broker process: everything published reaches everything subscribed, without Python per message.

Runs libzmq's own proxy in a thread. Its liveness is a ping of its own that went through the proxy and came back, so a
broker whose proxy is stuck makes no progress and is replaced. Knows nothing of the messages.

- Whoever knocks on the TCP side without a listed key is named in errors.jsonl, with the count, at most once a minute
  per address.
"""

from __future__ import annotations

import contextlib
import logging
import resource
import signal
import threading
import time

from busrl.bus import Door, Refusal, run_broker
from busrl.errors import BrokerRunning
from busrl.keys import directory_of
from busrl.ring import LockTimeout, OfdLock, Ring
from busrl.roles.actor import Run, configure_process, record_error
from busrl.roles.throttle import Throttle
from busrl.topology import Topology

REFUSALS_EVERY_S = 60.0
log = logging.getLogger("busrl")


def main(run_dir: str, name: str) -> int:
    configure_process(name)
    run = Run.open(run_dir)
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda _got, _frame: stop.set())
    ring = Ring.attach(run.paths.ring_name)
    ring.register("bus", name)
    lock = OfdLock(str(run.paths.lock("bus")))
    if not wait_for_lock(lock, stop, run.topology.limits.ready_s / 2):
        return 0
    allow_many_connections()
    refusals = Refusals(run)

    def progress() -> None:
        ring.progress()
        refusals.tell()

    run_broker(
        run.paths.frontend,
        run.paths.backend,
        lock,
        stop,
        tap=run.paths.tap,
        on_ready=lambda: _ready(ring),
        on_progress=progress,
        door=door_of(run.topology),
        on_refused=refusals.add,
        max_bytes=run.topology.bus.max_message_bytes,
        hwm=run.topology.bus.hwm,
    )
    ring.close()
    return 0


def _ready(ring: Ring) -> None:
    ring.activity("")
    ring.set_ready()


def door_of(topology: Topology) -> Door | None:
    """The TCP side that the topology asks for."""
    if topology.bus.endpoint == "ipc":
        return None
    return Door(topology.bus.endpoint, directory_of(topology.bus.keys))


class Refusals:
    """Who was turned away: told once at once, then once a minute with how often."""

    def __init__(self, run: Run) -> None:
        self._run, self._throttle, self._total = run, Throttle(REFUSALS_EVERY_S), 0

    def add(self, refusal: Refusal) -> None:
        self._total += refusal.count
        line = (f"{refusal} ({self._total} refused in all)",)
        if self._throttle.admit(refusal.address, line, time.monotonic()):
            self._write(line[0])

    def tell(self) -> None:
        for count, (text,) in self._throttle.due(time.monotonic()):
            self._write(f"{count} more like this, the latest: {text}")

    def _write(self, text: str) -> None:
        log.warning(text)
        record_error(self._run.paths, "bus", "warning", "bus", text)


def allow_many_connections() -> None:
    """Each connection is a descriptor; a flood of them must find this limit late."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def wait_for_lock(lock: OfdLock, stop: threading.Event, limit_s: float) -> bool:
    """A predecessor may take a moment to be buried. False if asked to stop; BrokerRunning names one that lives on."""
    end = time.monotonic() + limit_s
    while not stop.is_set():
        with contextlib.suppress(LockTimeout):
            lock.acquire(0.5)
            return True
        if time.monotonic() > end:
            raise BrokerRunning(
                f"{lock.path}: another broker serves this run (pid {lock.holder() or 'unknown'}) and has not ended "
                f"within {limit_s:g} s; stop it first, there is one per run"
            )
    return False
