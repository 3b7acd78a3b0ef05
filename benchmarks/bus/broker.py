"""Broker of the bus, exactly as the process `bus` runs it, until it is killed: broker.py DIRECTORY."""

from __future__ import annotations

import sys

from busrl.bus.broker import StopRequest, run_broker
from busrl.ring import OfdLock


def main() -> None:
    folder = sys.argv[1]
    run_broker(
        f"ipc://{folder}/in", f"ipc://{folder}/out", OfdLock(f"{folder}/lock"), StopRequest(),
        on_ready=lambda: print("ready", flush=True), hwm=0,
    )


if __name__ == "__main__":
    main()
