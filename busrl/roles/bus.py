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
import time

from busrl.bus import allow_many_connections
from busrl.bus.broker import CurveListener, Refusal, StopRequest, run_broker
from busrl.errors import PeerLost
from busrl.ledger.errors import Throttle, record_error
from busrl.paths import RunPaths
from busrl.ring import Ring
from busrl.roles.process import RoleLock, configure_process

REPORT_EVERY_S = 60.0
MOST_QUEUED_MIB = 512
SILENT_NS = 2_000_000_000
log = logging.getLogger("busrl")


class Bus:
    """The process of the broker: `main` is the broker until a signal ends it, and shows its progress in the ring."""

    def __init__(self, run_dir: str, name: str) -> None:
        self.name, self.paths, self.stop = name, RunPaths.of(run_dir), StopRequest()
        self.settings = json.loads(self.paths.topology.read_text())["bus"]  # the frozen tables would take too long
        self._throttle, self._refused = Throttle(REPORT_EVERY_S), 0

    def main(self) -> int:
        configure_process(self.name)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda _got, _frame: self.stop.set())
        self.ring = Ring.attach(self.paths.ring_name)
        self.ring.register("bus", self.name)
        self.lock = RoleLock(self.paths, "bus")
        if self.lock.acquire(self.ring, self.stop.is_set):
            self._serve()
            self.ring.close()
        return 0

    def _serve(self) -> None:
        allow_many_connections()
        self._least_mib = resident_mib()
        settings, paths = self.settings, self.paths
        run_broker(
            paths.frontend, paths.backend, self.lock.lock, self.stop, tap=paths.tap, on_ready=self._ready,
            on_progress=self._progress, listener=CurveListener.of(settings["endpoint"], settings["keys"]),
            on_refused=self.refused, max_bytes=settings["max_message_bytes"], hwm=settings["hwm"],
        )

    def _ready(self) -> None:
        self.ring.activity("")
        self.ring.set_ready()

    def _progress(self) -> None:
        self.ring.progress()
        check_queues(self.ring, resident_mib() - self._least_mib)
        self.report_refusals()
        self.lock.keep()

    def refused(self, refusal: Refusal) -> None:
        self._refused += refusal.count
        text = f"{refusal} ({self._refused} refused in all)"
        if self._throttle.admit(refusal.address, (text,), time.monotonic()):
            self._report(text)

    def report_refusals(self) -> None:
        for count, (text,), _ in self._throttle.due(time.monotonic()):
            self._report(f"{count} more like this, the latest: {text}")

    def _report(self, text: str) -> None:
        log.warning(text)
        record_error(self.paths, "bus", "warning", "bus", text)


def resident_mib() -> float:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / (1 << 20)


def check_queues(ring: Ring, queued_mib: float) -> None:
    """Raise PeerLost for memory that only messages can have taken; it names the processes that made no progress."""
    if queued_mib <= MOST_QUEUED_MIB:
        return
    now = time.monotonic_ns()
    here = [process for process in ring.processes() if not process.remote and process.role != "bus"]
    ages = ((process.label, now - process.progress_ns) for process in here)
    silent = [f"{label} has not moved for {age / 1e9:.0f} s" for label, age in ages if age > SILENT_NS]
    raise PeerLost(
        f"messages for processes that do not read them take {queued_mib:.0f} MiB (at most {MOST_QUEUED_MIB}; "
        f"{', '.join(silent) or 'all of them move'}): the bus starts again without them, which costs time and no "
        "sample. `busrl monitor` shows who sends so much"
    )
