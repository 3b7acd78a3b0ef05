"""A picture as plain lines: for `--once`, for a pipe, and where `rich` is not installed. Pure."""

from __future__ import annotations

from busrl.launch.progress import short
from busrl.monitor import words
from busrl.monitor.draw import chart, safe
from busrl.monitor.picture import Picture, Row

CHART_WIDTH = 40


def lines(picture: Picture, now: float, wall: float) -> list[str]:
    """Everything, in some twenty lines without colours."""
    out = [words.headline(picture, wall)]
    if picture.damage:
        out.append(f"  damaged   {safe(picture.damage)}")
    elif picture.ended and picture.ring is None:
        out.append(f"  ended     {picture.ended}")
    out += [f"  progress  {words.progress(picture, now)}", f"  speed     {words.speed(picture, now)}"]
    steps = picture.steps
    if len(steps):
        out.append(_chart("reward", steps.course(lambda one: one.reward), ".3f"))
        out.append(_chart("length", steps.course(lambda one: one.length), ".1f"))
    states = " · ".join(f"{name} {count:,}" for name, count in words.occupancy(picture))
    states = states or ("not known" if picture.damage else "no ring")
    out += [f"  slots     {states}", f"  trigger   {words.trigger(picture, now)}"]
    if control := words.controller(picture):
        out.append(f"  control   {control}")
    if policy := words.policy(picture):
        out.append(f"  policy    {policy}")
    if picture.sample:
        out.append(f"  sample    {safe(picture.sample)}")
    out += [f"  staleness {words.staleness(picture)}", f"  bus       {words.bus(picture, now)}"]
    flows = sorted(picture.traffic.by_name.items(), key=lambda item: -item[1].count)
    out += [f"    {name:<22}{flow.count:>9,}  {flow.rate.per_s():>8.1f}/s" for name, flow in flows]
    out += [_process(row) for row in picture.rows(now)]
    out.append(f"  errors    {picture.complaints.count}")
    out += [f"    {words.complaint(error, wall)}" for error in picture.complaints.newest(5)]
    return out


def line(picture: Picture, now: float) -> str:
    """The state in one line, for a log that grows."""
    newest = picture.steps.newest
    parts = [picture.state, words.progress(picture, now)]
    if newest is not None:
        parts.append(f"reward {newest.reward:.3f} · length {newest.length:.1f}")
    parts += [words.speed(picture, now), f"{short(picture.traffic.per_s())} messages/s"]
    if picture.complaints.count:
        parts.append(f"{picture.complaints.count} errors")
    if picture.traffic.missed:
        parts.append(f"{picture.traffic.missed} messages missed")
    late = [row.name for row in picture.rows(now) if row.late]
    return " · ".join(parts + ([f"LATE: {', '.join(late)}"] if late else []))


def _chart(name: str, course: list[float], form: str) -> str:
    drawn = chart(course, min(CHART_WIDTH, len(course)), 1)[0]
    return f"  {name:<9} {drawn} {course[0]:{form}} → {course[-1]:{form}} over {len(course)} steps"


def _process(row: Row) -> str:
    busy = f"{row.busy:>4.0%}" if row.busy is not None else "   -"
    late = "  LATE" if row.late else ""
    numbers = f"{short(row.samples)} samples" if row.samples else ""
    pid = f"pid {row.pid}" if row.pid else ""
    return (
        f"    {row.name:<14} {pid:<12} {words.doing(row):<22} busy {busy}  progress {words.age(row.progress_age_s)} ago"
        f"  {numbers}{late}"
    ).rstrip()
