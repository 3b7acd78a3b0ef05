"""The broker process: everything published reaches everything subscribed, without Python per message.

Runs libzmq's own proxy in a thread. Its liveness is a ping of its own that went through the proxy and came back, so a
broker whose proxy is stuck makes no progress and is replaced. Knows nothing of the messages. Whoever knocks on its TCP
side without a listed key is named in errors.jsonl.

- It imports no NumPy, no asyncio and no topology: whoever rings a doorbell while it is away is not heard.
"""

from __future__ import annotations

import json
import signal
import threading
from typing import Any

from busrl.bus import Door, allow_many_connections, run_broker
from busrl.ledger.errorlog import record_error
from busrl.paths import RunPaths
from busrl.ring import OfdLock, Ring
from busrl.roles.process import configure_process, hold_again, wait_for_turn
from busrl.roles.refusals import Refusals


def main(run_dir: str, name: str) -> int:
    configure_process(name)
    paths, stop = RunPaths.of(run_dir), threading.Event()
    settings = json.loads(paths.topology.read_text())["bus"]  # all of busrl.topology would take longer than the rest
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda _got, _frame: stop.set())
    ring = Ring.attach(paths.ring_name)
    ring.register("bus", name)
    lock = OfdLock(str(paths.lock("bus")))
    if not wait_for_turn(lock, ring, stop.is_set, paths, name):
        return 0
    serve(paths, settings, ring, lock, stop)
    ring.close()
    return 0


def serve(paths: RunPaths, settings: dict[str, Any], ring: Ring, lock: OfdLock, stop: threading.Event) -> None:
    """Be the broker until `stop`; the ring shows that it is ready, and that it gets on."""
    allow_many_connections()
    refusals = Refusals(lambda text: record_error(paths, "bus", "warning", "bus", text))

    def ready() -> None:
        ring.activity("")
        ring.set_ready()

    def progress() -> None:
        ring.progress()
        refusals.tell()
        hold_again(lock, "bus")

    run_broker(
        paths.frontend,
        paths.backend,
        lock,
        stop,
        tap=paths.tap,
        on_ready=ready,
        on_progress=progress,
        door=Door.of(settings["endpoint"], settings["keys"]),
        on_refused=refusals.add,
        max_bytes=settings["max_message_bytes"],
        hwm=settings["hwm"],
    )
