"""A picture in words: the phrases that the plain and the live view share. Pure."""

from __future__ import annotations

import math
import time

from busrl.errors import first_line
from busrl.launch.progress import duration, short
from busrl.monitor.draw import safe
from busrl.monitor.picture import Picture, Row
from busrl.monitor.seen import ErrorSeen

ORDER = ("queued", "generating", "generated", "rewarding", "rewarded", "training", "reserved", "dropped", "free")


def headline(picture: Picture, wall: float) -> str:
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
    }  # fmt: skip
    state = said.get(picture.state)
    return f"{name} · {state or picture.state}{age}"


def progress(picture: Picture, now: float) -> str:
    """Step, version, the first and the newest validation, and what is left."""
    goal = f"/{picture.facts.max_steps}" if picture.facts.max_steps else ""
    left = picture.left_s(now)
    rest = f" · about {duration(left)} left" if left is not None and 0 < left < 1e6 else ""
    means = [one.mean for one in picture.validations.values() if one.mean is not None]
    judged = f" · validation {' → '.join(f'{mean:.3f}' for mean in means[:1] + means[1:][-1:])}" if means else ""
    return f"step {picture.at_step}{goal} · version {picture.version}{judged}{rest}"


def speed(picture: Picture, now: float) -> str:
    """Samples, tokens and steps per time; "-" where that is not known (yet)."""
    known = picture.speed(now)
    samples = "-" if known.samples_per_s is None else f"{known.samples_per_s:.1f}"
    tokens = "-" if known.tokens_per_s is None else short(known.tokens_per_s)
    steps = "-" if known.steps_per_min is None else f"{known.steps_per_min:.1f}"
    return f"{samples} samples/s · {tokens} tokens/s · {steps} steps/min"


def occupancy(picture: Picture) -> list[tuple[str, int]]:
    """Slots by state, in the order in which a sample goes through them; empty states left out."""
    if picture.ring is None:
        return []
    return [(name, picture.ring.occupancy[name]) for name in ORDER if picture.ring.occupancy.get(name)]


def trigger(picture: Picture, now: float) -> str:
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


def controller(picture: Picture) -> str:
    """What the controller sees and does, "" without one."""
    newest = picture.steps.newest
    if newest is None or not newest.control_n_min:
        return ""
    ratio = f"H/H_ref {newest.entropy_ratio:.2f}" if newest.entropy_ratio else "no reference entropy yet"
    acts = newest.control_n_min == newest.n_min
    size = f"n_min {newest.n_min:g}" + ("" if acts else f", advises {newest.control_n_min:g}")
    bound = f" · admission bound {newest.eta:g} steps" if newest.eta >= 0 else ""
    return f"{ratio} · {size}{bound} · {newest.control_moves:g} moves"


def staleness(picture: Picture) -> str:
    """Ages of what was trained last, against the bound."""
    newest = picture.steps.newest
    bound = f" (bound {picture.facts.max_staleness})" if picture.facts.mode == "batch-async" else ""
    mode = f"{picture.facts.mode}{bound}" if picture.facts.mode else "mode not known"
    if newest is None:
        return f"{mode} · no step yet"
    return f"age mean {newest.age_mean:.2f} · p95 {newest.age_p95:.1f} · max {newest.age_max:g} steps · {mode}"


def policy(picture: Picture) -> str:
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


def bus(picture: Picture, now: float) -> str:
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


def doing(row: Row) -> str:
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


def complaint(error: ErrorSeen, wall: float) -> str:
    """One line of an error."""
    ago = duration(min(max(0.0, wall - error.time), 1e9)) if error.time else "?"
    if wall - error.time > 86_400:
        ago = time.strftime("%Y-%m-%d %H:%M", time.localtime(max(0.0, min(error.time, 4e9))))
    return f"{ago} ago · {safe(error.severity)} · {safe(error.process)}: {safe(first_line(error.text))}"
