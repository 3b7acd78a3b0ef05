"""A worker that takes slots to generate and holds them, so that its death has something to leave behind."""

from __future__ import annotations

import signal
import sys
import threading
from os import environ

from busrl.paths import RunPaths
from busrl.ring import Ring, State

SLOTS = 64


def main() -> int:
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    ring = Ring.attach(RunPaths.of(environ["BUSRL_RUN_DIR"]).ring_name)
    ring.register("rollout", environ["BUSRL_NAME"])
    ring.set_ready()
    held = 0
    while not stop.wait(0.02):
        held += len(ring.take(State.QUEUED, State.GENERATING, cls=None, limit=SLOTS - held, max_attempt=255))
        ring.progress()
    ring.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
