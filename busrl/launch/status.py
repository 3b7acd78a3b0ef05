"""`busrl status`: what a run is doing now, or how it ended. Attaches to the ring read-only and changes nothing.

Talks to the run directory and the ring; knows nothing of the bus, so it works with the broker down.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from busrl.errors import NoSuchRun, RingNotFound
from busrl.gateway.tally import BAD
from busrl.launch.problems import problems
from busrl.launch.progress import duration, short
from busrl.paths import RunPaths
from busrl.ring import OfdLock, Process, Ring, RingError


def status(run_dir: str | os.PathLike[str] | None = None) -> str:
    """The state of a run in a few lines; without a directory that of the newest run under `runs/`."""
    paths = RunPaths.of(run_dir if run_dir is not None else newest_run(Path("runs")))
    info = read_map(paths.run_json)
    if not info:
        raise NoSuchRun(f"{paths.root}: no run.json there; name the directory that `busrl launch` printed")
    try:
        ring = Ring.attach(paths.ring_name, read_only=True)
    except RingNotFound:
        return "\n".join(_ended(paths, info))
    try:
        return "\n".join(_going_on(paths, info, ring))
    finally:
        ring.close()


def newest_run(parent: Path) -> Path:
    """The run directory under `parent` that was started last."""
    found = [one.parent for one in parent.glob("*/run.json")]
    if not found:
        raise NoSuchRun(f"no run under {parent.resolve()}; name a run directory")
    return max(found, key=lambda one: (one / "run.json").stat().st_mtime)


def _going_on(paths: RunPaths, info: dict[str, Any], ring: Ring) -> Iterable[str]:
    stats = ring.stats()
    processes = [one for one in ring.processes() if not ring.is_dead(one.index)]
    goal = _map(read_map(paths.topology).get("run")).get("max_steps", "?")
    since = duration(max(0.0, time.time() - _number(info.get("started"), time.time())))
    if any(not one.remote for one in processes):
        state = {0: "running", 1: "finishing", 2: "stopping"}.get(ring.header("run_state"), "running")
        yield f"{info.get('run_id')}: {state}, {since} since launch (pid {info.get('launch_pid')})"
    else:
        yield f"{info.get('run_id')}: nobody runs; the next `busrl launch` in this directory adopts its ring"
    yield f"  step {ring.header('step')}/{goal} · version {ring.header('version')}"
    counts = {name.lower(): count for name, count in stats.occupancy.items() if count}
    yield "  slots  " + " · ".join(f"{name} {count}" for name, count in counts.items())
    yield (
        f"  samples  {short(stats.dispatched)} dispatched · {short(stats.finished)} finished · {short(stats.dropped)} "
        f"dropped · {short(stats.reaps)} slots taken back from dead processes"
    )
    yield from (_process(one) for one in processes)
    yield from problems(paths.errors)
    yield from _refusals(paths)
    yield f"  {paths.root}"


def _process(process: Process) -> str:
    quiet = max(0.0, (time.monotonic_ns() - process.progress_ns) / 1e9)
    doing = process.activity or process.state
    tokens = f" · {short(process.tokens)} tokens" if process.tokens else ""
    samples = f" · {short(process.samples)} samples" if process.samples else ""
    where = "elsewhere   " if process.remote else f"pid {process.pid:<8}"
    return f"  {process.label:<14} {where} {doing:<22} last progress {quiet:.1f} s ago{tokens}{samples}"


def _refusals(paths: RunPaths) -> Iterable[str]:
    """What the keeper's gateway had to refuse, by worker."""
    for name, found in _map(read_map(paths.gateway).get("workers")).items():
        counts = _map(found)
        bad = [f"{counts[code]} {code.replace('_', ' ')}" for code in BAD if counts.get(code)]
        if bad:
            yield f"  gateway refused {name}: {', '.join(bad)}; the latest {counts.get('latest', '')}"


def _ended(paths: RunPaths, info: dict[str, Any]) -> Iterable[str]:
    summary, holder = read_map(paths.summary), _holder(paths)
    if holder is not None:
        yield (
            f"{info.get('run_id')}: launch (pid {holder}) is there, but no ring: it is starting or ending, or "
            f"{paths.ring_file} was removed; if this stays so, `busrl stop {paths.root}` and start it again"
        )
    elif not summary:
        yield f"{info.get('run_id')}: no ring and no summary; it was never finished. Start it again to go on"
    else:
        yield f"{info.get('run_id')}: {summary.get('outcome')}, {summary.get('why')}"
        took = duration(_number(summary.get("seconds"), 0.0))
        yield f"  step {summary.get('steps')}/{summary.get('max_steps')} in {took} · version {summary.get('version')}"
        if summary.get("open_samples"):
            yield f"  {summary['open_samples']} samples are open: the next start generates them again"
    yield from problems(paths.errors)
    yield f"  {paths.root}"


def _holder(paths: RunPaths) -> int | None:
    """The pid of whoever holds the run's directory; looks, and takes nothing."""
    lock = paths.lock("run")
    try:
        return OfdLock(str(lock)).holder() if lock.is_file() else None
    except (OSError, RingError):  # of another user, say
        return None


def read_map(path: Path) -> dict[str, Any]:
    """The map in a JSON file; empty if there is none that can be read."""
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _map(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _number(value: Any, default: float) -> float:
    return float(value) if isinstance(value, (int, float)) else default
