"""The state of a run as plain data, for `busrl monitor --once --json`; its keys are documented in docs/monitor.md.

Pure. Knows nothing of where it came from. A number that is not known is null; nothing is estimated.

- Keys are only ever added. What would change or take one away raises `SCHEMA`.
"""

from __future__ import annotations

import math
from typing import Any, Final

from msgspec.structs import asdict

from busrl.monitor.state import ProcessRow, RunState

SCHEMA: Final = 1
CHART_STEPS: Final = 512
ERRORS: Final = 20
RING: Final = ("slots", "occupancy", "words", "dispatched", "finished", "dropped", "drops", "reaps", "tokens", "calls",
               "episodes")


def snapshot(run: RunState, now: float, wall: float) -> dict[str, Any]:
    """One JSON object; `now` on the clock of `run`, `wall` seconds since the epoch."""
    facts, speed = run.facts, run.speed(now)
    data: dict[str, Any] = finite({
        "schema": SCHEMA,
        "time": wall,
        "run": {
            "name": facts.name, "run_id": facts.run_id, "uuid": facts.uuid, "run_dir": facts.run_dir,
            "launch_pid": facts.launch_pid or None, "started": facts.started or None, "state": run.state,
            "ended": run.ended, "replay": run.replay, "problem": run.damage,
        },
        "progress": {
            "step": run.at_step, "max_steps": facts.max_steps or None, "version": run.version,
            "since_step_s": run.since_step_s(now), "left_s": run.left_s(now),
        },
        "processes": [_process(row) for row in run.rows(now)],
        "ring": {key: getattr(run.ring, key) for key in RING} if run.ring else None,
        "trigger": _trigger(run),
        "control": _control(run),
        "staleness": _staleness(run),
        "charts": _charts(run),
        "policy": run.steps.policy(run.idle),
        "by": run.steps.newest.by if run.steps.newest is not None else {},
        "left_out": run.left_out or None,
        "sample": run.sample or None,
        "validations": [
            {"round": one.round, "version": one.version, "mean": one.mean, **({"set": one.set} if one.set else {})}
            for one in run.validations.values()
        ],
        "messages": _messages(run),
        "errors": {"count": run.errors.count, "newest": [asdict(error) for error in run.errors.newest(ERRORS)]},
        "throughput": vars(speed),
    })
    return data


def finite(value: Any) -> Any:
    """The same with null for what is no number: files of a run may hold anything, and NaN is not JSON."""
    if isinstance(value, dict):
        return {str(key): finite(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _process(row: ProcessRow) -> dict[str, Any]:
    unknown = {key: None for key in ("pid", "deadline_s", "version") if not getattr(row, key)}
    return asdict(row) | unknown


def _trigger(run: RunState) -> dict[str, Any]:
    facts, ring = run.facts, run.ring
    known = ring is not None and ring.groups_ready >= 0
    return {
        "n_min": facts.n_min or None,
        "t_max_s": facts.t_max_s,
        "groups_ready": ring.groups_ready if ring is not None and known else None,
        "groups_open": ring.groups_open if ring is not None and known else None,
        "waiting": run.waiting,
        "credit": run.credit if run.credit >= 0 else None,
    }


def _control(run: RunState) -> dict[str, Any] | None:
    """None without a controller, or before it is known."""
    newest = run.steps.newest
    if newest is None or not newest.control_n_min:
        return None
    return {
        "n_min": int(newest.n_min), "wants_n_min": int(newest.control_n_min), "moves": int(newest.control_moves),
        "entropy_ratio": newest.entropy_ratio or None,
    }


def _staleness(run: RunState) -> dict[str, Any]:
    facts, newest = run.facts, run.steps.newest
    return {
        "mode": facts.mode,
        "bound": facts.max_staleness if facts.mode == "batch-async" else None,
        **{key: getattr(newest, f"age_{key}", None) for key in ("mean", "p95", "max")},
    }


def _charts(run: RunState) -> dict[str, Any]:
    courses: dict[str, list[Any]] = {
        "steps": [*run.steps.numbers()],
        "reward": run.steps.course(lambda one: one.reward),
        "length": run.steps.course(lambda one: one.length),
        "age": run.steps.course(lambda one: one.age_mean),
    }
    return {name: course[-CHART_STEPS:] for name, course in courses.items()}


def _messages(run: RunState) -> dict[str, Any]:
    traffic = run.traffic
    flows = {"": traffic.total, **dict(sorted(traffic.by_name.items()))}
    each = {
        name: {"count": flow.count, "bytes": flow.bytes, "per_s": flow.rate.per_s()} for name, flow in flows.items()
    }
    counts = {name: getattr(traffic, name) for name in ("missed", "malformed", "lag_s", "resyncs")}
    return {**each.pop(""), **counts, "by_name": each}
