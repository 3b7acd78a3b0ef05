"""`busrl status`: what a run is doing now, or how it ended. Attaches to the ring read-only and changes nothing.

Talks to the run directory and the ring; knows nothing of the bus, so it works with the broker down. Every line is made
safe to print, whoever wrote what stands in it. A ring that can not be used is a state to show, with its remedy.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from busrl.errors import NoSuchRun, RingNotFound
from busrl.gateway.tally import BAD
from busrl.launch.printable import printable
from busrl.launch.problems import problems, tail
from busrl.launch.progress import duration, short
from busrl.paths import RunPaths
from busrl.protocol.messages import SEVERITIES
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
        return _text(_ended(paths, info))
    except RingError as problem:
        return _text(_damaged(paths, info, problem))
    try:
        return _text(_going_on(paths, info, ring))
    finally:
        ring.close()


def _text(lines: Iterable[str]) -> str:
    return "\n".join(map(printable, lines))


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
    restarts = restarts_of(paths)
    yield from (_process(one, restarts.pop(one.label, 0)) for one in processes)
    yield from (f"  {name:<14} not in the ring now{_again(count)}" for name, count in restarts.items() if count)
    yield from _complaints(paths)


def _complaints(paths: RunPaths) -> Iterable[str]:
    """What went wrong, as the files tell it, and where they are."""
    yield from problems(paths.errors)
    yield from _from_outside(paths)
    yield from _refusals(paths)
    yield f"  {paths.root}"


def restarts_of(paths: RunPaths) -> dict[str, int]:
    """How often launch started each of its children again, by name."""
    told = _map(read_map(paths.supervisor).get("processes"))
    return {name: int(_number(_map(one).get("restarts"), 0)) for name, one in told.items()}


def _again(count: int) -> str:
    return f" · restarted {count}×" if count else ""


def _process(process: Process, restarts: int) -> str:
    quiet = max(0.0, (time.monotonic_ns() - process.progress_ns) / 1e9)
    doing = process.activity or process.state
    tokens = f" · {short(process.tokens)} tokens" if process.tokens else ""
    samples = f" · {short(process.samples)} samples" if process.samples else ""
    where = "elsewhere   " if process.remote else f"pid {process.pid:<8}"
    return (
        f"  {process.label:<14} {where} {doing:<22} last progress {quiet:.1f} s ago{tokens}{samples}"
        f"{_again(restarts)}"
    )


def _from_outside(paths: RunPaths) -> Iterable[str]:
    """ERRORs of senders that do not file their own, counted by launch."""
    for name, found in _map(read_map(paths.supervisor).get("errors_from_outside")).items():
        counts = _map(found)
        told = [f"{counts[severity]} {severity}" for severity in reversed(SEVERITIES) if counts.get(severity)]
        yield f"  ERROR from {name}: {', '.join(told)}; the latest {counts.get('latest', '')}"


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
    again = [f"{name} {count}×" for name, count in restarts_of(paths).items() if count]
    if again:
        yield f"  restarted: {', '.join(again)}"
    yield from _complaints(paths)


def _damaged(paths: RunPaths, info: dict[str, Any], problem: RingError) -> Iterable[str]:
    """The ring is there and can not be used; the files still tell how far the run is."""
    holder = _holder(paths)
    yield f"{info.get('run_id')}: damaged, its ring can not be used: {problem}"
    if holder is None:
        yield (
            f"  nobody runs, and the next start refuses: `busrl ring clean {paths.root} --force`, then start it again "
            "(what was in its slots is generated again)"
        )
    else:
        yield (
            f"  launch (pid {holder}) goes on with what its processes have mapped; none can be started again: "
            f"`busrl stop {paths.root}` ends it in order, and a start continues from checkpoint and log"
        )
    newest = _newest_step(paths)
    goal = _map(read_map(paths.topology).get("run")).get("max_steps", "?")
    yield f"  step {newest.get('step', 0)}/{goal} · version {newest.get('version', 0)} (from {paths.metrics.name})"
    yield from _complaints(paths)


def _newest_step(paths: RunPaths) -> dict[str, Any]:
    """The newest whole line of metrics.jsonl; empty if there is none."""
    for line in reversed(tail(paths.metrics)):
        with contextlib.suppress(ValueError, RecursionError):
            if found := _map(json.loads(line)):
                return found
    return {}


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
