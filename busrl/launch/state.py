"""What a run is doing now, or how it ended, as plain data: `busrl status` shows it, `--json` prints it.

Talks to the run directory and to the ring, read-only; knows nothing of the bus, so it works with the broker down.
A ring that can not be used is a state like others. The keys stand in docs/operating.md: they are only ever added to.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from busrl.errors import NoSuchRun, RingNotFound
from busrl.gateway.tally import BAD
from busrl.launch.problems import kinds
from busrl.launch.story import Story, fates, number
from busrl.paths import RunPaths
from busrl.protocol.messages import SEVERITIES
from busrl.ring import OfdLock, Process, Ring, RingError

SCHEMA = 1
RUN_STATES = {0: "running", 1: "finishing", 2: "stopping"}
LIVING = (*RUN_STATES.values(), "left")  # states with a ring
IDLE = ("groups", "limit", "causes")  # of groups in a row that gave no step, under `idle_` in metrics.jsonl
MODEL = ("entropy", "cut_share", "k3", "ess")  # means over the newest steps, under their names of metrics.jsonl


def state_of(run_dir: str | os.PathLike[str] | None = None) -> dict[str, Any]:
    """Everything known of a run; without a directory of the newest one under `runs/`. NoSuchRun if there is none."""
    paths = RunPaths.of(run_dir if run_dir is not None else newest_run(Path("runs")))
    info = read_map(paths.run_json)
    if not info:
        raise NoSuchRun(f"{paths.root}: no run.json there; name the directory that `busrl launch` printed")
    story = Story.of(paths)
    told = _from_files(paths, info, story)
    try:
        ring = Ring.attach(paths.ring_name, read_only=True)
    except RingNotFound:
        return {**told, **_without_ring(paths)}
    except RingError as problem:
        return {**told, "state": "damaged", "problem": str(problem), "holder": holder_of(paths)}
    try:
        return {**told, **_from_ring(paths, ring, told, story)}
    finally:
        ring.close()


def newest_run(parent: Path) -> Path:
    """The run directory under `parent` that was started last."""
    found = [one.parent for one in parent.glob("*/run.json")]
    if not found:
        raise NoSuchRun(f"no run under {parent.resolve()}; name a run directory")
    return max(found, key=lambda one: (one / "run.json").stat().st_mtime)


def _from_files(paths: RunPaths, info: dict[str, Any], story: Story) -> dict[str, Any]:
    newest = story.rows[-1] if story.rows else {}
    return {
        "schema": SCHEMA,
        "time": time.time(),
        "run_id": info.get("run_id"),
        "run_dir": str(paths.root),
        "launch_pid": info.get("launch_pid"),
        "started": info.get("started"),
        "step": story.step,
        "version": newest.get("version", 0),
        "max_steps": as_map(read_map(paths.topology).get("run")).get("max_steps"),
        "reward": {"first": story.first_reward, "last_10_steps": story.recent("reward")},
        "validation": [{"round": at, "mean": mean, "samples": count} for at, mean, count in story.means()],
        "flat_share": story.flat_share(),
        **{name: story.recent(name) for name in MODEL},
        "sample": story.sample or None,
        "idle": {name: story.idle.get(f"idle_{name}") for name in IDLE} if story.idle else None,
        "samples": fates(paths.fates),
        "restarts": restarts_of(paths),
        "problems": kinds(paths.errors),
        "errors_from_outside": list(_from_outside(paths)),
        "refusals": list(_refusals(paths)),
        **_pace(story),
    }


def _pace(story: Story, quiet_s: float = 0.0) -> dict[str, Any]:
    pace = story.pace(quiet_s)
    return {
        "steps_per_min": round(60 * pace[0], 3) if pace else None,
        "tokens_per_s": round(pace[1], 3) if pace else None,
    }


def _quiet_s(paths: RunPaths) -> float:
    """Seconds since a step was written; a clock that was set back makes none."""
    try:
        return max(0.0, time.time() - paths.metrics.stat().st_mtime)
    except OSError:
        return 0.0


def _from_ring(paths: RunPaths, ring: Ring, told: dict[str, Any], story: Story) -> dict[str, Any]:
    stats = ring.stats()
    processes = [one for one in ring.processes() if not ring.is_dead(one.index)]
    here = any(not one.remote for one in processes)
    step = ring.header("step")
    pace = _pace(story, _quiet_s(paths) if here else 0.0)
    goal, per_min = number(told["max_steps"]), pace["steps_per_min"]
    left = (goal - step) * 60 / per_min if here and goal is not None and per_min else None
    return {
        "state": RUN_STATES.get(ring.header("run_state"), "running") if here else "left",
        "step": step,
        "version": ring.header("version"),
        **pace,
        "left_s": round(max(0.0, left), 1) if left is not None else None,
        "slots": {name.lower(): count for name, count in stats.occupancy.items() if count},
        "reaps": stats.reaps,
        "processes": [_process(one, told["restarts"].get(one.label, 0)) for one in processes],
    }


def _process(process: Process, restarts: int) -> dict[str, Any]:
    return {
        "name": process.label,
        "role": process.role,
        "pid": process.pid,
        "remote": process.remote,
        "state": process.state,
        "activity": process.activity,
        "progress_age_s": round(max(0.0, (time.monotonic_ns() - process.progress_ns) / 1e9), 3),
        "tokens": process.tokens,
        "samples": process.samples,
        "restarts": restarts,
    }


def _without_ring(paths: RunPaths) -> dict[str, Any]:
    summary, holder = read_map(paths.summary), holder_of(paths)
    if holder is not None:
        return {"state": "starting", "holder": holder}
    if not summary:
        return {"state": "unfinished"}
    kept = ("why", "seconds", "open_samples", "exit_code")
    return {
        "state": summary.get("outcome"), "step": summary.get("steps"), "max_steps": summary.get("max_steps"),
        "version": summary.get("version"), **{name: summary.get(name) for name in kept},
    }  # fmt: skip


def restarts_of(paths: RunPaths) -> dict[str, int]:
    """How often launch started each of its children again, by name."""
    told = as_map(read_map(paths.supervisor).get("processes"))
    return {name: int(number(as_map(one).get("restarts")) or 0) for name, one in told.items()}


def _from_outside(paths: RunPaths) -> Iterator[str]:
    """ERRORs of senders that do not file their own, counted by launch."""
    for name, found in as_map(read_map(paths.supervisor).get("errors_from_outside")).items():
        counts = as_map(found)
        told = [f"{counts[severity]} {severity}" for severity in reversed(SEVERITIES) if counts.get(severity)]
        yield f"ERROR from {name}: {', '.join(told)}; the latest {counts.get('latest', '')}"


def _refusals(paths: RunPaths) -> Iterator[str]:
    """What the keeper's gateway had to refuse, by worker."""
    for name, found in as_map(read_map(paths.gateway).get("workers")).items():
        counts = as_map(found)
        bad = [f"{counts[code]} {code.replace('_', ' ')}" for code in BAD if counts.get(code)]
        if bad:
            yield f"gateway refused {name}: {', '.join(bad)}; the latest {counts.get('latest', '')}"


def holder_of(paths: RunPaths) -> int | None:
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
    return as_map(found)


def as_map(value: Any) -> dict[str, Any]:
    """The value if it is a map, else an empty one."""
    return value if isinstance(value, dict) else {}
