"""The state of a run as plain data, for `busrl monitor --once --json`; its keys are documented in docs/monitor.md.

Pure. Knows nothing of where it came from. A number that is not known is null; nothing is estimated.

- Keys are only ever added. What would change or take one away raises `SCHEMA`.
"""

from __future__ import annotations

import math
from typing import Any, Final

import msgspec

from busrl.monitor.state import ErrorRecord, ProcessRow, RunState, StepRecord

SCHEMA: Final = 1
CHART_STEPS: Final = 512
ERRORS: Final = 20


def snapshot(run: RunState, now: float, wall: float) -> dict[str, Any]:
    """One JSON object; `now` on the clock of `run`, `wall` seconds since the epoch."""
    facts, speed = run.facts, run.speed(now)
    return {
        "schema": SCHEMA,
        "time": wall,
        "run": {
            "name": facts.name, "run_id": facts.run_id, "uuid": facts.uuid, "run_dir": facts.run_dir,
            "launch_pid": facts.launch_pid or None, "started": _round(facts.started) or None, "state": run.state,
            "ended": run.ended, "replay": run.replay, "problem": run.damage,
        },
        "progress": {
            "step": run.at_step, "max_steps": facts.max_steps or None, "version": run.version,
            "since_step_s": _round(run.since_step_s(now)), "left_s": _round(run.left_s(now)),
        },
        "processes": [_process(row) for row in run.rows(now)],
        "ring": _ring(run),
        "trigger": _trigger(run),
        "control": _control(run),
        "staleness": _staleness(run),
        "charts": _charts(run),
        "policy": _policy(run),
        "sample": run.sample or None,
        "validations": [
            {"round": one.round, "version": one.version, "mean": _round(one.mean)}
            for one in run.validations.values()
        ],
        "messages": _messages(run),
        "errors": {
            "count": run.errors.count,
            "newest": [_error(error) for error in run.errors.newest(ERRORS)],
        },
        "throughput": {
            "samples_per_s": _round(speed.samples_per_s), "tokens_per_s": _round(speed.tokens_per_s),
            "steps_per_min": _round(speed.steps_per_min),
        },
    }


def _error(error: ErrorRecord) -> dict[str, Any]:
    return {**msgspec.structs.asdict(error), "time": _round(error.time)}


def _process(row: ProcessRow) -> dict[str, Any]:
    return {
        "name": row.name, "role": row.role, "pid": row.pid or None, "state": row.state, "activity": row.activity,
        "progress_age_s": _round(row.progress_age_s), "deadline_s": row.deadline_s or None, "late": row.late,
        "busy": _round(row.busy), "tokens": row.tokens, "samples": row.samples, "version": row.version or None,
        "behind": row.behind, "restarts": row.restarts,
    }


def _ring(run: RunState) -> dict[str, Any] | None:
    ring = run.ring
    if ring is None:
        return None
    return {
        "slots": ring.slots, "occupancy": ring.occupancy, "words": ring.words, "dispatched": ring.dispatched,
        "finished": ring.finished, "dropped": ring.dropped, "drops": ring.drops, "reaps": ring.reaps,
        "tokens": ring.tokens,
    }


def _trigger(run: RunState) -> dict[str, Any]:
    facts, ring = run.facts, run.ring
    known = ring is not None and ring.groups_ready >= 0
    return {
        "n_min": facts.n_min or None,
        "t_max_s": facts.t_max_s if math.isfinite(facts.t_max_s) else None,
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
    newest = run.steps.newest or StepRecord(0)
    known = len(run.steps) > 0
    return {
        "mode": run.facts.mode,
        "bound": run.facts.max_staleness if run.facts.mode == "batch-async" else None,
        "mean": _round(newest.age_mean) if known else None,
        "p95": _round(newest.age_p95) if known else None,
        "max": _round(newest.age_max) if known else None,
    }


def _policy(run: RunState) -> dict[str, Any]:
    """Means over the newest steps; None where no step has them."""
    steps = run.steps
    return {
        "flat_share": _round(steps.flat_share(run.idle)),
        "cut_share": _round(steps.recent(lambda one: one.cut_share)),
        "entropy": _round(steps.recent(lambda one: one.entropy)),
        "ess": _round(steps.recent(lambda one: one.ess)),
        "k3": steps.recent(lambda one: one.k3),
    }


def _charts(run: RunState) -> dict[str, Any]:
    steps = run.steps
    return {
        "steps": steps.numbers()[-CHART_STEPS:],
        "reward": _finite(steps.course(lambda one: one.reward)),
        "length": _finite(steps.course(lambda one: one.length)),
        "age": _finite(steps.course(lambda one: one.age_mean)),
    }


def _finite(course: list[float]) -> list[float | None]:
    return [value if math.isfinite(value) else None for value in course[-CHART_STEPS:]]


def _messages(run: RunState) -> dict[str, Any]:
    traffic = run.traffic
    return {
        "count": traffic.count, "bytes": traffic.bytes, "per_s": _round(traffic.per_s()), "missed": traffic.missed,
        "malformed": traffic.malformed, "lag_s": _round(traffic.lag_s), "resyncs": traffic.resyncs,
        "by_name": {
            name: {"count": flow.count, "bytes": flow.bytes, "per_s": _round(flow.rate.per_s())}
            for name, flow in sorted(traffic.by_name.items())
        },
    }


def _round(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else round(value, 3)
