"""`busrl record`: write what passes the bus of a run into a file, until Ctrl-C, a limit, or the end of the run.

Knows nothing of how that is done; says what was recorded, and what was missed.
"""

from __future__ import annotations

import math
import signal
from pathlib import Path

from busrl.errors import UserError
from busrl.monitor.find import find
from busrl.monitor.live import give_way
from busrl.monitor.recorder import Bounds, Recorder

MIB = 1 << 20
NICE = 15  # less than a run's, more than a monitor's: what it is too late for is gone


def record(named: str | None, out: Path, seconds: float | None, limit_mib: float) -> int:
    """Record until the end; 0 however it came, since the file is whole."""
    target = find(named)
    if target.paths is None:
        raise UserError(f"{named}: a run directory is recorded, not an endpoint")
    recorder = Recorder(target.paths, out, Bounds(math.inf if seconds is None else seconds, limit_mib * MIB))
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda got, _frame: recorder.stop(f"asked to by {signal.Signals(got).name}"))
    print(f"recording {target.paths.root} to {out}; Ctrl-C ends it", flush=True)
    give_way(NICE)
    end = recorder.run()
    missed = f", {end.missed:,} missed" if end.missed else ", none missed"
    print(f"{end.why}: {end.messages:,} messages, {end.bytes:,} bytes{missed}")
    return 0
