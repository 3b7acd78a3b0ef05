"""`busrl replay`: publish a recording again for a monitor or an actor under development, or say what it holds.

Chooses an endpoint where none is named, and says how to listen there. Knows nothing of how it is published.
"""

from __future__ import annotations

import os
import shutil
import signal
import time
from contextlib import suppress
from pathlib import Path
from types import FrameType

from busrl.bus import private_directory
from busrl.errors import UserError
from busrl.launch.progress import duration
from busrl.monitor.recording import Recording, summary
from busrl.monitor.replayer import Replayer
from busrl.paths import RunPaths


def replay(file: Path, speed: str, bind: str, frontend: str, wait_s: float, info: bool) -> int:
    """Publish the recording once."""
    if info:
        print("\n".join(_described(file)))
        return 0
    factor = speed_of(speed)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _leave)
    own = None if bind else _own_directory()
    try:
        endpoint = bind or f"ipc://{own}/bus.sock"
        with Recording(file) as recording, Replayer(recording, endpoint, frontend=frontend, speed=factor) as replayer:
            print(f"waiting for a listener: busrl monitor {endpoint}", flush=True)
            count = replayer.run(wait_s, lambda: print("publishing", flush=True))
            print(f"published {count:,} messages{f'; {recording.torn}' if recording.torn else ''}")
    except KeyboardInterrupt:
        print("stopped")
    finally:
        if own is not None:
            shutil.rmtree(own, ignore_errors=True)
            with suppress(OSError):
                own.parent.rmdir()
    return 0


def speed_of(text: str) -> float:
    """`max` is 0; a positive number is a factor, with or without a final x."""
    if text == "max":
        return 0.0
    try:
        factor = float(text.removesuffix("x"))
    except ValueError:
        factor = 0.0
    if not 0 < factor < 1e9:
        raise UserError(f"--speed {text}: expected a positive number (1 = as it was, 10 = ten times as fast), or max")
    return factor


def _own_directory() -> Path:
    runtime = RunPaths.of("/").runtime_dir.parent
    return private_directory(runtime / f"replay-{os.getpid()}")


def _described(file: Path) -> list[str]:
    held = summary(file)
    header = held["header"]
    at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(header.wall_ns / 1e9))
    lines = [
        f"{file}: {header.facts.run_id or header.facts.name or 'a run'} on {header.host}, from {at} for "
        f"{duration(held['seconds'])}",
        f"  protocol {header.protocol}, busrl {header.busrl}, run uuid {header.uuid}",
        f"  {sum(held['messages'].values()):,} messages, {held['missed']:,} missed; "
        + (f"ended: {held['ended']}" if held["ended"] else "not ended in order"),
    ]
    lines += [f"    {name:<22}{count:>9,}" for name, count in sorted(held["messages"].items(), key=lambda one: -one[1])]
    return [*lines, f"  torn: {held['torn']}"] if held["torn"] else lines


def _leave(_number: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt
