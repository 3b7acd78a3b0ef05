"""`busrl replay`: publish a recording again for a monitor or an actor under development, or say what it holds.

Chooses an endpoint where none is named, and says how to listen there. Knows nothing of how it is published.
"""

from __future__ import annotations

import signal
import time
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from busrl.errors import UserError
from busrl.launch.progress import duration
from busrl.monitor.recording import Recording, summary
from busrl.monitor.replayer import Replayer, own_endpoint
from busrl.monitor.stage import stage


@dataclass(frozen=True)
class Where:
    """Endpoints and directory of a replay; empty or None: one of its own, or none."""

    bind: str
    frontend: str
    run_dir: Path | None


def replay(file: Path, speed: str, where: Where, wait_s: float, info: bool) -> int:
    """Publish the recording once."""
    if info:
        print("\n".join(_described(file)))
        return 0
    factor = speed_of(speed)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _leave)
    try:
        with Recording(file) as recording, own_endpoint() as own:
            frontend = where.frontend or (own.replace("bus.sock", "pub.sock") if where.run_dir else "")
            _publish(recording, Where(where.bind or own, frontend, where.run_dir), factor, wait_s)
    except KeyboardInterrupt:
        print("stopped")
    return 0


def _publish(recording: Recording, where: Where, speed: float, wait_s: float) -> None:
    directory = where.run_dir
    with (
        Replayer(recording, where.bind, frontend=where.frontend, speed=speed) as replayer,
        stage(directory, recording, where.frontend, where.bind) if directory else nullcontext(),
    ):
        if directory:
            print(f"an actor finds this replay in {directory}, where run.json names its endpoints")
        if replayer.workers:
            print(f"it holds work for: {', '.join(replayer.workers)} (BUSRL_NAME)")
        print(f"waiting for {'an actor' if where.frontend else 'a listener'}: busrl monitor {where.bind}", flush=True)
        count = replayer.run(wait_s, lambda: say("publishing"), lambda: say("over; ends with its last listener"))
    print(f"published {count:,} messages{f'; {recording.torn}' if recording.torn else ''}")


def say(line: str) -> None:
    """A line at once."""
    print(line, flush=True)


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
