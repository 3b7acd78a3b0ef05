"""A timeline of a run as Chrome trace events, which Perfetto and chrome://tracing show: every process is a track.

Pure: takes a `RunRecord`, returns events, and the share of generation that falls into training. Opens no file.

- Times of these are exact to the millisecond: ends of steps, the learner's waits (`waits`), rounds of validation,
  errors and starts, ends of pace intervals.
- An event whose place follows from sums alone has `"derived": true` in its args: decoding, new weights and idling
  within a pace interval (a quarter second) stand one after the other; a publication ends with its step, and a
  checkpoint begins the step after.
- Training is the time of a step without waits, publication and checkpoint.
- Events are sorted by time, in whole microseconds since the first; slices of one track do not overlap.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from busrl.errors import first_line
from busrl.observe.report.files import RunRecord
from busrl.status.runfiles import number
from busrl.status.view import to_json

LEARNER, VALIDATOR = "learner", "validator"
TRAINING, LEAST_S = "training", 1e-6
TEXT = 200
Span = tuple[float, float]


class Slice(NamedTuple):
    """A thing that a process did, from `begin` to `end` in seconds of the wall clock."""

    process: str
    name: str
    begin: float
    end: float
    args: dict[str, Any]
    row: str = ""  # of the process's track, if that has several


def slices_of(record: RunRecord) -> list[Slice]:
    """All slices of a run, by process and time. Lines without `time` are left out."""
    pieces = [*_steps(record), *_rounds(record)]
    for name, rows in record.pace.items():
        pieces += _pace(name, rows)
    return sorted(_apart(pieces), key=lambda piece: (piece.process, piece.row, piece.begin, -piece.end))


def _times(row: dict[str, Any], *names: str) -> list[float]:
    """Numbers of a line; 0 for one that is not there, or is below 0."""
    return [max(0.0, number(row.get(name)) or 0.0) for name in names]


def _steps(record: RunRecord) -> Iterator[Slice]:
    for row in record.steps:
        time, seconds, publish, checkpoint = _times(row, "time", "seconds", "publish_s", "checkpoint_s")
        if not time or not seconds:  # a step that was trained again from the log has no times
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


def _spans(value: Any) -> list[Span]:
    """The spans in a list of pairs; pairs that are none are left out."""
    pairs = [pair for pair in value if isinstance(pair, list) and len(pair) == 2] if isinstance(value, list) else []
    numbers = [(number(a), number(b)) for a, b in pairs]
    return [(a, b) for a, b in numbers if a is not None and b is not None and 0 <= a < b]


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
        begin, total = time - wall, sum(parts)
        scale = min(1.0, wall / total) if total else 0.0
        for what, seconds in zip(("decoding", "new weights", "idle"), parts):
            if seconds:
                more = {key: row.get(key) for key in ("tokens", "steps")} if what == "decoding" else {}
                end = begin + seconds * scale
                yield Slice(name, what, begin, end, {"derived": True, **more})
                begin = end


def _apart(pieces: Sequence[Slice]) -> Iterator[Slice]:
    """Cut overlaps on a track, which clocks that were set and damaged files make: the earlier slice stays."""
    reached: dict[tuple[str, str], float] = {}
    for piece in sorted(pieces, key=lambda piece: piece.begin):
        track = piece.process, piece.row
        begin = max(piece.begin, reached.get(track, piece.begin))
        if piece.end - begin >= LEAST_S:
            reached[track] = piece.end
            yield piece._replace(begin=begin)


# -- spans of time -----

def union(spans: Iterable[Span]) -> list[Span]:
    """Join spans: the time of all of them, as spans that are in order and apart."""
    joined: list[Span] = []
    for begin, end in sorted(spans):
        if joined and begin <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(end, joined[-1][1])
        elif begin < end:
            joined.append((begin, end))
    return joined


def without(spans: Iterable[Span], others: Iterable[Span]) -> list[Span]:
    """The time of the spans without that of the others."""
    left, gaps = union(spans), union(others)
    for a, b in gaps:
        left = [(c, d) for begin, end in left for c, d in ((begin, min(end, a)), (max(begin, b), end)) if c < d]
    return left


def common(spans: Sequence[Slice], others: Sequence[Span]) -> float:
    """Seconds of the slices that lie in the other spans, which are in order and apart."""
    edges = np.array([*others] or [(0.0, 0.0)], np.float64)
    lengths = [length for begin, end in edges for length in (0.0, end - begin)]
    passed = np.cumsum(lengths)  # seconds of the others up to each of their edges
    ends, begins = [piece.end for piece in spans], [piece.begin for piece in spans]
    return float(np.sum(np.interp(ends, edges.ravel(), passed) - np.interp(begins, edges.ravel(), passed)))


def overlap(pieces: Sequence[Slice]) -> float | None:
    """The share of the rollouts' decoding that falls into training; None if one of them is not known."""
    steps = [piece for piece in pieces if piece.process == LEARNER and piece.name == TRAINING]
    training = union((piece.begin, piece.end) for piece in steps)
    decoding = [piece for piece in pieces if piece.name == "decoding"]
    total = sum(piece.end - piece.begin for piece in decoding)
    return common(decoding, training) / total if total and training else None


# -- as events -----

def events(record: RunRecord, pieces: Sequence[Slice]) -> list[dict[str, Any]]:
    """The events of a run: names of processes and rows first, then all others by time."""
    moments = [*_moments(record)]
    zero = min([*(piece.begin for piece in pieces), *(at for at, *_ in moments)], default=0.0)
    tracks: dict[str, dict[str, int]] = {}
    for process, row in [*((piece.process, piece.row) for piece in pieces), *((name, "") for _, name, *_ in moments)]:
        rows = tracks.setdefault(process, {"": 1})
        rows.setdefault(row, len(rows) + 1)
    pids = {name: n for n, name in enumerate(sorted(tracks), 1)}
    timed = [_slice(piece, pids[piece.process], tracks[piece.process][piece.row], zero) for piece in pieces]
    for at, process, text, args in moments:
        where = {"ts": _us(at - zero), "pid": pids[process], "tid": 1}
        timed.append({"ph": "i", "s": "p", **where, "name": text, "args": args})
    timed += _counters(record, pids, zero)
    names = [_name("process", process, pids[process], 0) for process in pids]
    for process, rows in tracks.items():
        names += [_name("thread", row or process, pids[process], n) for row, n in rows.items()]
    return names + sorted(timed, key=lambda event: (event["ts"], -event.get("dur", 0)))


def _slice(piece: Slice, pid: int, tid: int, zero: float) -> dict[str, Any]:
    begin, end = _us(piece.begin - zero), _us(piece.end - zero)
    where = {"pid": pid, "tid": tid, "cat": piece.row or piece.process.partition("-")[0]}
    return {"ph": "X", "ts": begin, "dur": end - begin, **where, "name": piece.name, "args": piece.args}


def _us(seconds: float) -> int:
    return round(1e6 * max(0.0, seconds))


def _name(kind: str, name: str, pid: int, tid: int) -> dict[str, Any]:
    return {"ph": "M", "ts": 0, "pid": pid, "tid": tid, "name": f"{kind}_name", "args": {"name": name}}


def _moments(record: RunRecord) -> Iterator[tuple[float, str, str, dict[str, Any]]]:
    """Starts, warnings and errors: time, process, text and args of each."""
    for row in record.starts:
        if at := number(row.get("time")):
            yield at, "launch", f"start at step {row.get('step')}", {"busrl": row.get("busrl")}
    for row in record.errors():
        if at := number(row.get("time")):
            text = first_line(str(row.get("text")), TEXT)
            process = str(row.get("process") or "?").replace("/", "-")
            yield at, process, f"{row.get('severity')}: {text}", {"where": row.get("where")}


def _counters(record: RunRecord, pids: dict[str, int], zero: float) -> Iterator[dict[str, Any]]:
    """Counter events for the sequences that each rollout runs at the same time, when their number changes."""
    for name, rows in record.pace.items():
        before = None
        for row in rows:
            time, wall, steps, tokens = _times(row, "time", "wall_s", "steps", "tokens")
            running = round(tokens / steps, 1) if steps else 0.0
            if time and running != before and name in pids:
                before = running
                at = {"ts": _us(time - wall - zero), "pid": pids[name], "tid": 0}
                yield {"ph": "C", **at, "name": "sequences", "args": {"running": running}}


def timeline(record: RunRecord, pieces: Sequence[Slice]) -> str:
    return to_json(
        {"traceEvents": events(record, pieces), "displayTimeUnit": "ms", "otherData": {"run": str(record.paths.root)}}
    )
