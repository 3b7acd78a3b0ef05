"""A timeline of a run as Chrome trace events, which Perfetto and chrome://tracing show: every process is a track.

Pure: a `RunRecord` in, events out; and the share of generation that falls into training. Knows nothing of files.

- Known to the millisecond: ends of steps, the learner's waits (`waits`), rounds of validation, errors and starts, ends
  of pace intervals. An event whose place follows from sums alone has `"derived": true` in its args: decoding, new
  weights and idling within a pace interval (a quarter second) stand one after the other; a publication ends with its
  step, and a checkpoint begins the step after.
- Training is what a step's time has besides waits, publication and checkpoint.
- Events are sorted by time, in whole microseconds since the first; slices of one track do not overlap.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from busrl.errors import first_line
from busrl.observe.report.record import RunRecord
from busrl.status.runfiles import number
from busrl.status.view import to_json

LEARNER, VALIDATOR = "learner", "validator"
TRAINING, LEAST_S = "training", 1e-6
TEXT = 200
Span = tuple[float, float]


class Slice(NamedTuple):
    """Something that a process did, in seconds of the wall clock."""

    process: str
    name: str
    begin: float
    end: float
    args: dict[str, Any]
    row: str = ""  # of the process, where it has several


def slices(record: RunRecord) -> list[Slice]:
    """All that lasted, by process and time. Lines without `time` are from before busrl wrote it, and are left out."""
    found = [*_steps(record), *_rounds(record)]
    for name, rows in record.pace.items():
        found += _pace(name, rows)
    return sorted(_apart(found), key=lambda one: (one.process, one.row, one.begin, -one.end))


def _times(row: dict[str, Any], *names: str) -> list[float]:
    """Numbers of a line, 0 for what is not known; none below 0."""
    return [max(0.0, number(row.get(name)) or 0.0) for name in names]


def _steps(record: RunRecord) -> Iterator[Slice]:
    for row in record.steps:
        time, seconds, publish, checkpoint = _times(row, "time", "seconds", "publish_s", "checkpoint_s")
        if not time or not seconds:  # trained again from the log: nobody knows for how long
            continue
        begin, step = time - seconds, row["step"]
        args = {str(name): row.get(name) for name in ("step", "version", "cause", "reward", "tokens", "samples")}
        yield Slice(LEARNER, f"step {step}", begin, time, args, "steps")
        free = [(begin + a, begin + b) for a, b in _spans(row.get("waits"))]
        yield from (Slice(LEARNER, "waits", a, b, {"step": step, "wait_s": row.get("wait_s")}) for a, b in free)
        saved, published = (begin, min(time, begin + checkpoint)), (max(begin, time - publish), time)
        for name, (a, b) in (("checkpoint", saved), ("publish", published)):
            yield from (Slice(LEARNER, name, c, d, {"step": step, "derived": True}) for c, d in without([(a, b)], free))
        rest = without([(begin, time)], [*free, saved, published])
        sums = {name: row.get(name) for name in ("forward_s", "backward_s", "update_s")}
        yield from (Slice(LEARNER, TRAINING, a, b, {"step": step, **sums}) for a, b in rest)


def _spans(found: Any) -> list[Span]:
    pairs = [one for one in found if isinstance(one, list) and len(one) == 2] if isinstance(found, list) else []
    known = [(number(a), number(b)) for a, b in pairs]
    return [(a, b) for a, b in known if a is not None and b is not None and 0 <= a < b]


def _rounds(record: RunRecord) -> Iterator[Slice]:
    for row in record.rounds:
        time, seconds = _times(row, "time", "seconds")
        if time and seconds:
            args = {name: row.get(name) for name in ("round", "set", "version", "val/reward", "samples")}
            args["val/reward"] = args["val/reward"] if args["samples"] else None
            yield Slice(VALIDATOR, f"round {row.get('round')}", time - seconds, time, args, str(row.get("set") or ""))


def _pace(name: str, rows: Iterable[dict[str, Any]]) -> Iterator[Slice]:
    for row in rows:
        time, wall, *parts = _times(row, "time", "wall_s", "step_s", "weights_s", "idle_s")
        if not time or not wall:
            continue
        begin, whole = time - wall, sum(parts)
        scale = min(1.0, wall / whole) if whole else 0.0
        for what, seconds in zip(("decoding", "new weights", "idle"), parts):
            if seconds:
                more = {key: row.get(key) for key in ("tokens", "steps")} if what == "decoding" else {}
                end = begin + seconds * scale
                yield Slice(name, what, begin, end, {"derived": True, **more})
                begin = end


def _apart(found: Sequence[Slice]) -> Iterator[Slice]:
    """Cut overlaps on a track: clocks are set, and files are anybody's. What is under another slice goes."""
    reached: dict[tuple[str, str], float] = {}
    for one in sorted(found, key=lambda one: one.begin):
        track = one.process, one.row
        begin = max(one.begin, reached.get(track, one.begin))
        if one.end - begin >= LEAST_S:
            reached[track] = one.end
            yield one._replace(begin=begin)


# -- spans of time -----

def union(spans: Iterable[Span]) -> list[Span]:
    """Join spans that touch: the same time, in order."""
    found: list[Span] = []
    for begin, end in sorted(spans):
        if found and begin <= found[-1][1]:
            found[-1] = found[-1][0], max(end, found[-1][1])
        elif begin < end:
            found.append((begin, end))
    return found


def without(spans: Iterable[Span], others: Iterable[Span]) -> list[Span]:
    """Subtract the other spans from the first ones."""
    found, gaps = union(spans), union(others)
    for a, b in gaps:
        found = [(c, d) for begin, end in found for c, d in ((begin, min(end, a)), (max(begin, b), end)) if c < d]
    return found


def common(spans: Sequence[Slice], others: Sequence[Span]) -> float:
    """Seconds of the slices that lie in the others; those are in order and apart."""
    edges = np.array([*others] or [(0.0, 0.0)], np.float64)
    lengths = [length for begin, end in edges for length in (0.0, end - begin)]
    passed = np.cumsum(lengths)  # seconds of the others up to each of their edges
    ends, begins = [one.end for one in spans], [one.begin for one in spans]
    return float(np.sum(np.interp(ends, edges.ravel(), passed) - np.interp(begins, edges.ravel(), passed)))


def overlap(found: Sequence[Slice]) -> float | None:
    """The share of the rollouts' decoding that falls into training; None where one of them is not known."""
    training = union((one.begin, one.end) for one in found if one.process == LEARNER and one.name == TRAINING)
    decoding = [one for one in found if one.name == "decoding"]
    total = sum(one.end - one.begin for one in decoding)
    return common(decoding, training) / total if total and training else None


# -- as events -----

def events(record: RunRecord, found: Sequence[Slice]) -> list[dict[str, Any]]:
    """Names of processes and rows first, then everything by time."""
    told = [*_told(record)]
    zero = min([*(one.begin for one in found), *(at for at, *_ in told)], default=0.0)
    tracks: dict[str, dict[str, int]] = {}
    for process, row in [*((one.process, one.row) for one in found), *((name, "") for _, name, *_ in told)]:
        rows = tracks.setdefault(process, {"": 1})
        rows.setdefault(row, len(rows) + 1)
    pids = {name: n for n, name in enumerate(sorted(tracks), 1)}
    made = [_slice(one, pids[one.process], tracks[one.process][one.row], zero) for one in found]
    for at, process, text, args in told:
        where = {"ts": _us(at - zero), "pid": pids[process], "tid": 1}
        made.append({"ph": "i", "s": "p", **where, "name": text, "args": args})
    made += _counters(record, pids, zero)
    names = [_name("process", process, pids[process], 0) for process in pids]
    for process, rows in tracks.items():
        names += [_name("thread", row or process, pids[process], n) for row, n in rows.items()]
    return names + sorted(made, key=lambda one: (one["ts"], -one.get("dur", 0)))


def _slice(one: Slice, pid: int, tid: int, zero: float) -> dict[str, Any]:
    begin, end = _us(one.begin - zero), _us(one.end - zero)
    where = {"pid": pid, "tid": tid, "cat": one.row or one.process.partition("-")[0]}
    return {"ph": "X", "ts": begin, "dur": end - begin, **where, "name": one.name, "args": one.args}


def _us(seconds: float) -> int:
    return round(1e6 * max(0.0, seconds))


def _name(kind: str, name: str, pid: int, tid: int) -> dict[str, Any]:
    return {"ph": "M", "ts": 0, "pid": pid, "tid": tid, "name": f"{kind}_name", "args": {"name": name}}


def _told(record: RunRecord) -> Iterator[tuple[float, str, str, dict[str, Any]]]:
    """Moments: starts, warnings and errors."""
    for row in record.starts:
        if at := number(row.get("time")):
            yield at, "launch", f"start at step {row.get('step')}", {"busrl": row.get("busrl")}
    for row in record.errors():
        if at := number(row.get("time")):
            text = first_line(str(row.get("text")), TEXT)
            process = str(row.get("process") or "?").replace("/", "-")
            yield at, process, f"{row.get('severity')}: {text}", {"where": row.get("where")}


def _counters(record: RunRecord, pids: dict[str, int], zero: float) -> Iterator[dict[str, Any]]:
    """Sequences that each rollout runs at the same time, where that changes."""
    for name, rows in record.pace.items():
        before = None
        for row in rows:
            time, wall, steps, tokens = _times(row, "time", "wall_s", "steps", "tokens")
            running = round(tokens / steps, 1) if steps else 0.0
            if time and running != before and name in pids:
                before = running
                at = {"ts": _us(time - wall - zero), "pid": pids[name], "tid": 0}
                yield {"ph": "C", **at, "name": "sequences", "args": {"running": running}}


def trace(record: RunRecord, found: Sequence[Slice]) -> str:
    return to_json(
        {"traceEvents": events(record, found), "displayTimeUnit": "ms", "otherData": {"run": str(record.paths.root)}}
    )
