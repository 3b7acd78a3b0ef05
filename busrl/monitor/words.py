"""Small drawings in text: charts of several rows, gauges, stacked bars; and text made safe to print.

Pure, and knows nothing of colours or of what is drawn. Every result has the size that was asked for.

A picture in words: the phrases that the plain and the live view share. Pure.

A picture as plain lines: for `--once`, for a pipe, and where `rich` is not installed. Pure.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Sequence
from typing import Final

from busrl.errors import first_line
from busrl.launch.story import duration, safe, short
from busrl.monitor.state import ErrorRecord, ProcessRow, RunState

# -- Small drawings in text: charts of several rows, gauges, stacked bars; and text made safe to print ----------------


EIGHTHS: Final = " ▁▂▃▄▅▆▇█"


def buckets(values: Sequence[float], width: int) -> list[float]:
    """At most `width` means of neighbouring values, in order; the newest bucket ends with the newest value.

    Values that are no numbers are left out of a mean; a bucket of nothing else is nan.
    """
    if len(values) <= width:
        return list(values)
    cuts = [round(i * len(values) / width) for i in range(width + 1)]
    return [_mean([value for value in values[a:b] if math.isfinite(value)]) for a, b in itertools.pairwise(cuts)]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else math.nan


def chart(values: Sequence[float], width: int, height: int) -> list[str]:
    """`height` lines of `width` characters: the course of a number from its lowest to its highest, newest at the right.

    A flat course is drawn at half height; its lowest value still shows as one eighth, what is no number not at all.
    """
    means = buckets(values, width)
    finite = [mean for mean in means if math.isfinite(mean)]
    if not finite or width < 1:
        return [" " * max(0, width)] * height
    levels = [_level(mean, min(finite), max(finite), height * 8) if math.isfinite(mean) else 0 for mean in means]
    rows = []
    for row in reversed(range(height)):
        cells = "".join(EIGHTHS[max(0, min(8, level - row * 8))] for level in levels)
        rows.append(cells.ljust(width))
    return rows


def _level(value: float, low: float, high: float, top: int) -> int:
    """How many of `top` eighths a value between low and high fills, at least one."""
    span = high - low
    return 1 + round((value - low) / span * (top - 1)) if 0 < span < math.inf else top // 2


def gauge(share: float, width: int) -> tuple[str, str]:
    """The filled and the empty part of a bar of `width` characters."""
    full = round(max(0.0, min(1.0, share)) * width)
    return "━" * full, "─" * (width - full)


def portions(counts: Sequence[int], width: int) -> list[int]:
    """How many of `width` cells each count gets: in proportion, at least one where it is not 0, `width` in all."""
    total = sum(counts)
    if total <= 0 or width <= 0:
        return [0] * len(counts)
    cells = [max(1, round(count * width / total)) if count else 0 for count in counts]
    while sum(cells) != width:
        over = sum(cells) > width
        at = max(range(len(cells)), key=lambda i: (cells[i], counts[i]))
        if over and cells[at] <= 1:  # more kinds than cells: the last ones are left out
            at = max(i for i, cell in enumerate(cells) if cell)
        cells[at] += -1 if over else 1
    return cells


# -- A picture in words: the phrases that the plain and the live view share. Pure -------------------------------------


ORDER = ("queued", "generating", "generated", "rewarding", "rewarded", "training", "reserved", "dropped", "free")


def headline(picture: RunState, wall: float) -> str:
    """Name, state and age of the run."""
    facts = picture.facts
    name = safe(facts.name or facts.run_id or "run")
    if picture.replay:
        return f"{name} · replay of {safe(picture.replay)}{' · over' if picture.replay_over else ''}"
    age = (
        f" · {duration(min(max(0.0, wall - facts.started), 1e9))}" if facts.started and picture.ring is not None else ""
    )
    said = {
        "left": "nobody runs; the next launch adopts its ring", "unknown": "no ring",
        "damaged": "its ring is damaged and can not be read",
    }
    state = said.get(picture.state)
    return f"{name} · {state or picture.state}{age}"


def progress(picture: RunState, now: float) -> str:
    """Step, version, the first and the newest validation, and what is left."""
    goal = f"/{picture.facts.max_steps}" if picture.facts.max_steps else ""
    left = picture.left_s(now)
    rest = f" · about {duration(left)} left" if left is not None and 0 < left < 1e6 else ""
    means = [one.mean for one in picture.validations.values() if one.mean is not None]
    judged = f" · validation {' → '.join(f'{mean:.3f}' for mean in means[:1] + means[1:][-1:])}" if means else ""
    return f"step {picture.at_step}{goal} · version {picture.version}{judged}{rest}"


def speed(picture: RunState, now: float) -> str:
    """Samples, tokens and steps per time; "-" where that is not known (yet)."""
    known = picture.speed(now)
    samples = "-" if known.samples_per_s is None else f"{known.samples_per_s:.1f}"
    tokens = "-" if known.tokens_per_s is None else short(known.tokens_per_s)
    steps = "-" if known.steps_per_min is None else f"{known.steps_per_min:.1f}"
    return f"{samples} samples/s · {tokens} tokens/s · {steps} steps/min"


def occupancy(picture: RunState) -> list[tuple[str, int]]:
    """Slots by state, in the order in which a sample goes through them; empty states left out."""
    if picture.ring is None:
        return []
    return [(name, picture.ring.occupancy[name]) for name in ORDER if picture.ring.occupancy.get(name)]


def trigger(picture: RunState, now: float) -> str:
    """How far the next step is."""
    facts, ring = picture.facts, picture.ring
    ready = str(ring.groups_ready) if ring is not None and ring.groups_ready >= 0 else "?"
    newest = picture.steps.newest
    needed = int(newest.n_min) if newest is not None and newest.n_min else facts.n_min
    parts = [f"{ready}/{needed or '?'} groups ready"]
    if ring is not None and ring.groups_open >= 0:
        parts.append(f"{ring.groups_open} open")
    since = picture.since_step_s(now)
    limit = "t_max inf" if math.isinf(facts.t_max_s) else f"t_max {facts.t_max_s:g} s"
    parts.append(f"{limit}, last step {since:.0f} s ago" if since is not None else limit)
    if picture.waiting:
        parts.append(f"scheduler waits: {safe(picture.waiting, 60)}")
    return " · ".join(parts)


def controller(picture: RunState) -> str:
    """What the controller sees and does, "" without one."""
    newest = picture.steps.newest
    if newest is None or not newest.control_n_min:
        return ""
    ratio = f"H/H_ref {newest.entropy_ratio:.2f}" if newest.entropy_ratio else "no reference entropy yet"
    acts = newest.control_n_min == newest.n_min
    size = f"n_min {newest.n_min:g}" + ("" if acts else f", advises {newest.control_n_min:g}")
    bound = f" · admission bound {newest.eta:g} steps" if newest.eta >= 0 else ""
    return f"{ratio} · {size}{bound} · {newest.control_moves:g} moves"


def staleness(picture: RunState) -> str:
    """Ages of what was trained last, against the bound."""
    newest = picture.steps.newest
    bound = f" (bound {picture.facts.max_staleness})" if picture.facts.mode == "batch-async" else ""
    mode = f"{picture.facts.mode}{bound}" if picture.facts.mode else "mode not known"
    if newest is None:
        return f"{mode} · no step yet"
    return f"age mean {newest.age_mean:.2f} · p95 {newest.age_p95:.1f} · max {newest.age_max:g} steps · {mode}"


def policy_words(picture: RunState) -> str:
    """What the newest steps say of the policy and of what was thrown away; "" before the first."""
    steps = picture.steps
    told = [
        ("flat groups", steps.recent(lambda one: one.flat_share), ".0%"),
        ("cut answers", steps.recent(lambda one: one.cut_share), ".0%"),
        ("entropy", steps.recent(lambda one: one.entropy), ".2f"),
        ("ess", steps.recent(lambda one: one.ess), ".2f"),
        ("k3", steps.recent(lambda one: one.k3), ".2g"),
    ]
    return " · ".join(f"{name} {value:{form}}" for name, value, form in told if value is not None)


def bus(picture: RunState, now: float) -> str:
    """Messages per second, and whether this picture is complete and of now."""
    traffic = picture.traffic
    parts = [f"{short(traffic.per_s())} messages/s · {short(traffic.count)} heard"]
    if traffic.missed:
        parts.append(f"{short(traffic.missed)} MISSED")
    if traffic.malformed:
        parts.append(f"{short(traffic.malformed)} damaged")
    if traffic.lag_s > 1.0:
        parts.append(f"THIS MONITOR LAGS {traffic.lag_s:.1f} s")
    if traffic.resyncs:
        parts.append(f"caught up {traffic.resyncs}×")
    if traffic.last_at is None:
        parts.append("nothing heard yet")
    elif now - traffic.last_at > 3.0 and picture.state == "running":
        parts.append(f"silent for {now - traffic.last_at:.0f} s")
    return " · ".join(parts)


def doing(row: ProcessRow) -> str:
    """What a process does, in a word or two."""
    if row.state == "dead":
        return "dead"
    if row.state == "starting":
        return f"starting: {safe(row.activity)}" if row.activity not in ("", "starting") else "starting"
    if row.activity:
        return safe(row.activity)
    if row.state != "ready":
        return row.state
    return "working" if row.busy is not None and row.busy > 0.02 else "idle"


def age(seconds: float) -> str:
    """An age in few characters."""
    return f"{seconds:.1f} s" if seconds < 100 else duration(min(seconds, 1e9))


def complaint(error: ErrorRecord, wall: float) -> str:
    """One line of an error."""
    ago = duration(min(max(0.0, wall - error.time), 1e9)) if error.time else "?"
    if wall - error.time > 86_400:
        ago = time.strftime("%Y-%m-%d %H:%M", time.localtime(max(0.0, min(error.time, 4e9))))
    return f"{ago} ago · {safe(error.severity)} · {safe(error.process)}: {safe(first_line(error.text))}"


# -- A picture as plain lines: for `--once`, for a pipe, and where `rich` is not installed. Pure ----------------------


CHART_WIDTH = 40


def lines(picture: RunState, now: float, wall: float) -> list[str]:
    """Everything, in some twenty lines without colours."""
    out = [headline(picture, wall)]
    if picture.damage:
        out.append(f"  damaged   {safe(picture.damage)}")
    elif picture.ended and picture.ring is None:
        out.append(f"  ended     {picture.ended}")
    out += [f"  progress  {progress(picture, now)}", f"  speed     {speed(picture, now)}"]
    steps = picture.steps
    if len(steps):
        out.append(_chart("reward", steps.course(lambda one: one.reward), ".3f"))
        out.append(_chart("length", steps.course(lambda one: one.length), ".1f"))
    states = " · ".join(f"{name} {count:,}" for name, count in occupancy(picture))
    states = states or ("not known" if picture.damage else "no ring")
    out += [f"  slots     {states}", f"  trigger   {trigger(picture, now)}"]
    if control := controller(picture):
        out.append(f"  control   {control}")
    if policy := policy_words(picture):
        out.append(f"  policy    {policy}")
    if picture.sample:
        out.append(f"  sample    {safe(picture.sample)}")
    out += [f"  staleness {staleness(picture)}", f"  bus       {bus(picture, now)}"]
    flows = sorted(picture.traffic.by_name.items(), key=lambda item: -item[1].count)
    out += [f"    {name:<22}{flow.count:>9,}  {flow.rate.per_s():>8.1f}/s" for name, flow in flows]
    out += [_process(row) for row in picture.rows(now)]
    out.append(f"  errors    {picture.complaints.count}")
    out += [f"    {complaint(error, wall)}" for error in picture.complaints.newest(5)]
    return out


def line(picture: RunState, now: float) -> str:
    """The state in one line, for a log that grows."""
    newest = picture.steps.newest
    parts = [picture.state, progress(picture, now)]
    if newest is not None:
        parts.append(f"reward {newest.reward:.3f} · length {newest.length:.1f}")
    parts += [speed(picture, now), f"{short(picture.traffic.per_s())} messages/s"]
    if picture.complaints.count:
        parts.append(f"{picture.complaints.count} errors")
    if picture.traffic.missed:
        parts.append(f"{picture.traffic.missed} messages missed")
    late = [row.name for row in picture.rows(now) if row.late]
    return " · ".join(parts + ([f"LATE: {', '.join(late)}"] if late else []))


def _chart(name: str, course: list[float], form: str) -> str:
    drawn = chart(course, min(CHART_WIDTH, len(course)), 1)[0]
    return f"  {name:<9} {drawn} {course[0]:{form}} → {course[-1]:{form}} over {len(course)} steps"


def _process(row: ProcessRow) -> str:
    busy = f"{row.busy:>4.0%}" if row.busy is not None else "   -"
    late = "  LATE" if row.late else ""
    numbers = f"{short(row.samples)} samples" if row.samples else ""
    pid = f"pid {row.pid}" if row.pid else ""
    return (
        f"    {row.name:<14} {pid:<12} {doing(row):<22} busy {busy}  progress {age(row.progress_age_s)} ago"
        f"  {numbers}{late}"
    ).rstrip()
