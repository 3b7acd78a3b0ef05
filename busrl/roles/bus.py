"""The broker process: everything published reaches everything subscribed, without Python per message.

Runs libzmq's own proxy in a thread. Its liveness is a ping of its own that went through the proxy and came back, so a
broker whose proxy is stuck makes no progress and is replaced. Knows nothing of the messages.

- It imports no NumPy, no asyncio and no topology: whoever rings a doorbell while it is away is not heard.
- Whoever knocks on the TCP side without a listed key is named in errors.jsonl, with the count, at most once a minute
  per address.
"""

from __future__ import annotations

import contextlib
import json
import logging
import resource
import signal
import threading
import time
from typing import Any

from busrl.bus import Door, Refusal, run_broker
from busrl.keys import directory_of
from busrl.paths import RunPaths
from busrl.ring import OfdLock, Ring
from busrl.roles.process import configure_process, record_error, wait_for_turn
from busrl.roles.throttle import Throttle

REFUSALS_EVERY_S = 60.0
log = logging.getLogger("busrl")


def main(run_dir: str, name: str) -> int:
    configure_process(name)
    paths, stop = RunPaths.of(run_dir), threading.Event()
    settings = json.loads(paths.topology.read_text())["bus"]  # all of busrl.topology would take longer than the rest
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda _got, _frame: stop.set())
    ring = Ring.attach(paths.ring_name)
    ring.register("bus", name)
    lock = OfdLock(str(paths.lock("bus")))
    if not wait_for_turn(lock, ring, stop.is_set):
        return 0
    serve(paths, settings, ring, lock, stop)
    ring.close()
    return 0


def serve(paths: RunPaths, settings: dict[str, Any], ring: Ring, lock: OfdLock, stop: threading.Event) -> None:
    """Be the broker until `stop`; the ring shows that it is ready, and that it gets on."""
    allow_many_connections()
    refusals = Refusals(paths)

    def ready() -> None:
        ring.activity("")
        ring.set_ready()

    def progress() -> None:
        ring.progress()
        refusals.tell()

    run_broker(
        paths.frontend,
        paths.backend,
        lock,
        stop,
        tap=paths.tap,
        on_ready=ready,
        on_progress=progress,
        door=door_of(settings),
        on_refused=refusals.add,
        max_bytes=settings["max_message_bytes"],
        hwm=settings["hwm"],
    )


def door_of(settings: dict[str, Any]) -> Door | None:
    """The TCP side that the topology asks for."""
    if settings["endpoint"] == "ipc":
        return None
    return Door(settings["endpoint"], directory_of(settings["keys"]))


class Refusals:
    """Who was turned away: told once at once, then once a minute with how often."""

    def __init__(self, paths: RunPaths) -> None:
        self._paths, self._throttle, self._total = paths, Throttle(REFUSALS_EVERY_S), 0

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
        record_error(self._paths, "bus", "warning", "bus", text)


def allow_many_connections() -> None:
    """Each connection is a descriptor; a flood of them must find this limit late."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
