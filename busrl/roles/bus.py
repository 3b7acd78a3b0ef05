"""The broker process: everything published reaches everything subscribed, without Python per message.

Runs libzmq's own proxy in a thread. Its liveness is a ping of its own that went through the proxy and came back, so a
broker whose proxy is stuck makes no progress and is replaced. Knows nothing of the messages.

- It imports no NumPy, no asyncio and no topology: whoever rings a doorbell while it is away is not heard.
"""

from __future__ import annotations

import json
import signal
import threading

from busrl.bus import run_broker
from busrl.paths import RunPaths
from busrl.ring import OfdLock, Ring
from busrl.roles.process import configure_process, wait_for_turn


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
    run_broker(
        paths.frontend,
        paths.backend,
        lock,
        stop,
        on_ready=ring.set_ready,
        on_progress=ring.progress,
        max_bytes=settings["max_message_bytes"],
        hwm=settings["hwm"],
    )
    ring.close()
    return 0
