"""Phrases of the monitor beside those of `status.words`, and its plain view.

Pure: takes a `RunState` and clock values. Knows nothing of colours, of terminals, and of where a state comes from.
"""

from __future__ import annotations

import time

from busrl.errors import first_line
from busrl.status.state import ErrorRecord, RunState
from busrl.status.view import overviews
from busrl.status.words import duration, facts, joined, process_line, safe, short


def headline(run: RunState, wall: float) -> str:
    facts = run.facts
    name = safe(facts.name or facts.run_id or "run")
    if run.replay:
        return f"{name} · replay of {safe(run.replay)}{' · over' if run.replay_over else ''}"
    name += f" · {safe(facts.beside)}" if facts.beside else ""
    age = f" · {duration(min(max(0.0, wall - facts.started), 1e9))}" if facts.started and run.ring is not None else ""
    states = {
        "left": "nobody runs; the next launch adopts its ring", "unknown": "no ring",
        "damaged": "its ring is damaged and cannot be read",
    }
    now = " · validating" if run.validating else ""
    faults = " · FAULTS ARE ON" if run.faults else ""
    return f"{name} · {states.get(run.state, run.state)}{age}{now}{faults}"


def bus(run: RunState, now: float) -> str:
    """Messages per second, and whether the monitor has missed some or lags behind."""
    traffic = run.traffic
    quiet = now - traffic.last_at if traffic.last_at is not None else 0.0
    return joined(
        f"{short(traffic.total.rate.per_s())} messages/s",
        f"{short(traffic.total.count)} received",
        f"{short(traffic.missed)} MISSED" if traffic.missed else "",
        f"{short(traffic.malformed)} damaged" if traffic.malformed else "",
        f"THIS MONITOR LAGS {traffic.lag_s:.1f} s" if traffic.lag_s > 1.0 else "",
        f"caught up {traffic.resyncs}×" if traffic.resyncs else "",
        "nothing received yet" if traffic.last_at is None else "",
        f"silent for {quiet:.0f} s" if quiet > 3.0 and run.state == "running" else "",
    )


def error_line(error: ErrorRecord, wall: float) -> str:
    ago = duration(min(max(0.0, wall - error.time), 1e9)) if error.time else "?"
    if wall - error.time > 86_400:
        ago = time.strftime("%Y-%m-%d %H:%M", time.localtime(max(0.0, min(error.time, 4e9))))
    return f"{ago} ago · {safe(error.severity)} · {safe(error.process)}: {safe(first_line(error.text))}"


def of_parts(run: RunState) -> list[str]:
    """Lines of the optional parts that the run uses; none of a replay, whose files may be another run's by now."""
    return [line for part in overviews("" if run.replay else run.facts.run_dir) for line in part.lines]


def said_of_parts(run: RunState) -> dict[str, str]:
    """Lines of the optional parts by their labels; a label that is there already has a number behind it."""
    said: dict[str, str] = {}
    for line in of_parts(run):
        label, text = line.split(maxsplit=1)
        said[label if label not in said else f"{label} {len(said)}"] = text
    return said


def lines(run: RunState, now: float, wall: float) -> list[str]:
    """The plain view: everything in some twenty lines without colours."""
    out = [headline(run, wall)]
    if run.damage:
        out.append(f"  damaged   {safe(run.damage)}")
    elif run.ended and run.ring is None:
        out.append(f"  ended     {run.ended}")
    out += [*facts(run, now), *of_parts(run), f"  bus       {bus(run, now)}"]
    flows = sorted(run.traffic.by_name.items(), key=lambda item: -item[1].count)
    out += [f"    {name:<22}{flow.count:>9,}  {flow.rate.per_s():>8.1f}/s" for name, flow in flows]
    out += [process_line(row) for row in run.rows(now)]
    out.append(f"  errors    {run.errors.count}")
    out += [f"    {error_line(error, wall)}" for error in run.errors.newest(5)]
    return out
