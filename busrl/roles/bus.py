"""The broker process: everything published reaches everything subscribed, without Python per message.

Runs libzmq's own proxy in a thread. Its progress is a ping that went through the proxy and came back, so a broker whose
proxy hangs makes no progress and is replaced. Knows nothing of the messages.

- The bytes that it queues for processes that do not read are bounded: beyond `MOST_QUEUED_MIB` it ends by name and is
  started again with empty queues. That loses messages, so it costs time and no sample.
- It imports no NumPy, no asyncio and no topology: messages that are sent while it starts are lost.
- A connection to its TCP side without a listed key is reported in errors.jsonl: each address once a minute, and no
  refusal is missing from the counts.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

from busrl.bus import CurveListener, Refusal, allow_many_connections, run_broker
from busrl.errors import QueuesFull
from busrl.ledger.errors import Throttle, record_error
from busrl.paths import RunPaths
from busrl.ring import OfdLock, Ring
from busrl.roles.process import acquire_lock, configure_process, reacquire_lock

REPORT_EVERY_S = 60.0
MOST_QUEUED_MIB = 512
SILENT_NS = 2_000_000_000
log = logging.getLogger("busrl")


class Refusals:
    """Reports refused connections: `add` each of them, and `report` from time to time those that were held back."""

    def __init__(self, write: Callable[[str], None]) -> None:
        self._write, self._throttle, self._total = write, Throttle(REPORT_EVERY_S), 0

    def add(self, refusal: Refusal) -> None:
        self._total += refusal.count
        text = f"{refusal} ({self._total} refused in all)"
        if self._throttle.admit(refusal.address, (text,), time.monotonic()):
            self._report(text)

    def report(self) -> None:
        for count, (text,), _ in self._throttle.due(time.monotonic()):
            self._report(f"{count} more like this, the latest: {text}")

    def _report(self, text: str) -> None:
        log.warning(text)
        self._write(text)


def main(run_dir: str, name: str) -> int:
    configure_process(name)
    paths, stop = RunPaths.of(run_dir), threading.Event()
    settings = json.loads(paths.topology.read_text())["bus"]  # all of busrl.config would take longer than the rest
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda _got, _frame: stop.set())
    ring = Ring.attach(paths.ring_name)
    ring.register("bus", name)
    lock = OfdLock(str(paths.lock("bus")))
    if not acquire_lock(lock, ring, stop.is_set, paths, name):
        return 0
    serve(paths, settings, ring, lock, stop)
    ring.close()
    return 0


def resident_mib() -> float:
    """Memory of this process."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / (1 << 20)


def check_queues(ring: Ring, queued_mib: float) -> None:
    """Raise QueuesFull for memory that only messages can have taken; it names the processes that made no progress."""
    if queued_mib <= MOST_QUEUED_MIB:
        return
    now = time.monotonic_ns()
    here = [one for one in ring.processes() if not one.remote and one.role != "bus"]
    silent = [(one.label, (now - one.progress_ns) / 1e9) for one in here if now - one.progress_ns > SILENT_NS]
    named = ", ".join(f"{label} has not moved for {seconds:.0f} s" for label, seconds in silent) or "all of them move"
    raise QueuesFull(
        f"messages for processes that do not read them take {queued_mib:.0f} MiB (at most {MOST_QUEUED_MIB}; {named}): "
        "the bus starts again without them, which costs time and no sample. `busrl monitor` shows who sends so much"
    )


def serve(paths: RunPaths, settings: dict[str, Any], ring: Ring, lock: OfdLock, stop: threading.Event) -> None:
    """Be the broker until `stop`; the ring shows that it is ready and makes progress."""
    allow_many_connections()
    refusals = Refusals(lambda text: record_error(paths, "bus", "warning", "bus", text))

    def ready() -> None:
        ring.activity("")
        ring.set_ready()

    least = resident_mib()

    def progress() -> None:
        ring.progress()
        check_queues(ring, resident_mib() - least)
        refusals.report()
        reacquire_lock(lock, "bus")

    run_broker(
        paths.frontend,
        paths.backend,
        lock,
        stop,
        tap=paths.tap,
        on_ready=ready,
        on_progress=progress,
        listener=CurveListener.of(settings["endpoint"], settings["keys"]),
        on_refused=refusals.add,
        max_bytes=settings["max_message_bytes"],
        hwm=settings["hwm"],
    )
