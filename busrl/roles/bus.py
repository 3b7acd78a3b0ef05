"""The broker process: everything published reaches everything subscribed, without Python per message.

Runs libzmq's own proxy in a thread. Its liveness is a ping of its own that went through the proxy and came back, so a
broker whose proxy is stuck makes no progress and is replaced. Knows nothing of the messages. Whoever knocks on its TCP
side without a listed key is named in errors.jsonl.
"""

from __future__ import annotations

import contextlib
import signal
import threading

from busrl.bus import Door, allow_many_connections, run_broker
from busrl.ring import LockTimeout, OfdLock, Ring
from busrl.roles.actor import Run, configure_process, record_error
from busrl.roles.refusals import Refusals


def main(run_dir: str, name: str) -> int:
    configure_process(name)
    run = Run.open(run_dir)
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda _got, _frame: stop.set())
    ring = Ring.attach(run.paths.ring_name)
    ring.register("bus", name)
    lock = OfdLock(str(run.paths.lock("bus")))
    if not wait_for_lock(lock, stop):
        return 0
    allow_many_connections()
    refusals = Refusals(lambda text: record_error(run.paths, name, "warning", "bus", text))

    def progress() -> None:
        ring.progress()
        refusals.tell()

    run_broker(
        run.paths.frontend,
        run.paths.backend,
        lock,
        stop,
        on_ready=ring.set_ready,
        on_progress=progress,
        door=Door.of(run.topology.bus.endpoint, run.topology.bus.keys),
        on_refused=refusals.add,
        max_bytes=run.topology.bus.max_message_bytes,
        hwm=run.topology.bus.hwm,
    )
    ring.close()
    return 0


def wait_for_lock(lock: OfdLock, stop: threading.Event) -> bool:
    """A predecessor may take a moment to be buried: wait for it rather than die of it. False if asked to stop."""
    while not stop.is_set():
        with contextlib.suppress(LockTimeout):
            lock.acquire(0.5)
            return True
    return False
