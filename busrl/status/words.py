"""A run in words: text made safe to print, small drawings, the phrases that all views share, and the plain views.

Pure. Knows nothing of colours, terminals or the source of a state.

- `printable` and `safe` remove all characters of foreign text that could move a cursor or change a terminal.
- Every drawing has the requested size.
"""

from __future__ import annotations

import itertools
import math
import re
import time
from collections.abc import Mapping, Sequence
from typing import Any, Final

from busrl.states import fate_name
from busrl.status.state import OVER, ProcessRow, RunState, Speed
from busrl.status.waits import chain, sentence_of

LIMIT: Final = 400
HOST_SILENT_S: Final = 5.0
HOST_PROCESS: Final = ("name", "pid", "state", "activity", "version", "samples")


def printable(text: str) -> str:
    """The text with a space for every control character, escape, line end and mark that turns the reading order."""
    return text if text.isprintable() else "".join(c if c.isprintable() else " " for c in text)


def safe(text: str, limit: int = LIMIT) -> str:
    """The first `limit` characters of a text as a line, without spaces around."""
    return printable(text[:limit]).strip()


def alike(text: str) -> str:
    """The text with its digits replaced, so that texts which differ in digits alone are alike."""
    return re.sub(r"[0-9]+", "#", text)


def duration(seconds: float) -> str:
    """`1h 02m`, `3m 07s` or `12s`."""
    rounded = int(seconds)
    if rounded >= 3600:
        return f"{rounded // 3600}h {rounded % 3600 // 60:02d}m"
    return f"{rounded // 60}m {rounded % 60:02d}s" if rounded >= 60 else f"{rounded}s"


def short(number: float) -> str:
    """`3.1k`, `12M`: three digits are enough to watch."""
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            scaled = number / size
            return f"{scaled:.1f}{unit}" if scaled < 100 else f"{scaled:.0f}{unit}"
    return f"{number:.0f}"


# -- drawings ---------------------------------------------------------------------------------------------------------

EIGHTHS: Final = " ▁▂▃▄▅▆▇█"


def buckets(values: Sequence[float], width: int) -> list[float]:
    """At most `width` means of neighbouring values, in order; the newest bucket ends with the newest value.

    Values that are no numbers are left out of a mean; a bucket of nothing else is nan.
    """
    if len(values) <= width:
        return list(values)
    cuts = [round(i * len(values) / width) for i in range(width + 1)]
    finite = ([value for value in values[a:b] if math.isfinite(value)] for a, b in itertools.pairwise(cuts))
    return [sum(some) / len(some) if some else math.nan for some in finite]


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
    """The number of `top` eighths that a value between low and high fills, at least one."""
    span = high - low
    return 1 + round((value - low) / span * (top - 1)) if 0 < span < math.inf else top // 2


# -- phrases, each "" where there is nothing to say --------------------------------------------------------------------

POLICY: Final = (  # key, name, format
    ("flat_share", "flat groups", ".0%"), ("cut_share", "cut answers", ".0%"), ("entropy", "entropy", ".2f"),
    ("ess", "ess", ".2f"), ("k3", "k3", ".2g"),
)
MOST_SOURCES = 6
ORDER = ("queued", "generating", "generated", "rewarding", "rewarded", "training", "reserved", "dropped", "free")


def progress(run: RunState, now: float) -> str:
    return joined(step(run), f"version {run.version}" if run.facts.learns else "", judged(run), left(run, now))


def step(run: RunState) -> str:
    if not run.facts.learns:
        return ""
    return f"step {run.at_step}{f'/{run.facts.max_steps}' if run.facts.max_steps else ''}"


def judged(run: RunState) -> str:
    return rises(**run.judged())


def rises(validation: Sequence[dict[str, Any]], validation_unmeasured: Sequence[dict[str, Any]] = ()) -> str:
    """The first and the newest mean of each set, from its rounds as JSON has them: those that measured anything, in
    their order, and those that did not."""
    of_set: dict[str, list[dict[str, Any]]] = {}
    for record in validation:
        of_set.setdefault(record.get("set", ""), []).append(record)
    empty = {record.get("set", ""): record.get("dropped", 0) for record in validation_unmeasured}
    by_set = {name: _mean(records[-1]) for name, records in of_set.items()}
    by_set |= {name: f"{_mean(records[0], True)} → {by_set[name]}" for name, records in of_set.items() if records[1:]}
    by_set |= {name: nothing(dropped) for name, dropped in empty.items() if name not in by_set}
    return " · ".join(f"{safe(name) or 'validation'} {words}" for name, words in by_set.items())


def reward_line(reward: Mapping[str, float | None]) -> str:
    """Name the first and the newest mean reward of a summary, as far as it has them; empty where it has none."""
    known = [f"{mean:.3f}" for mean in (reward["first"], reward["last_10_steps"]) if mean is not None]
    return "reward " + " → ".join(known) if known else ""


def _mean(record: dict[str, Any], first: bool = False) -> str:
    """The mean of a round; with the share of its answers if some are missing, and for a first round with its step."""
    dropped, step = record.get("dropped", 0), record["round"] if first else 0
    judged_of = f"{record['samples']} of {record['samples'] + dropped}" if dropped else ""
    more = joined(f"step {step}" if step else "", judged_of)
    return f"{record['mean']:.3f}" + (f" ({more})" if more else "")


def nothing(answers: int) -> str:
    """Words for a round of so many answers that measured nothing."""
    return f"nothing measured (none of {answers} answers was judged)" if answers else "nothing measured"


def left(run: RunState, now: float) -> str:
    seconds = run.left_s(now)
    return f"about {duration(seconds)} left" if seconds is not None and 0 < seconds < 1e6 else ""


def joined(*parts: str) -> str:
    return " · ".join(filter(None, parts))


def speed(pace: Speed) -> str:
    """Samples, tokens and steps per time; "-" where that is not known (yet)."""
    samples, steps = ("-" if figure is None else f"{figure:.1f}" for figure in (pace.samples_per_s, pace.steps_per_min))
    tokens = "-" if pace.tokens_per_s is None else short(pace.tokens_per_s)
    return f"{samples} samples/s · {tokens} tokens/s · {steps} steps/min"


def occupancy(run: RunState) -> list[tuple[str, int]]:
    """Slots by state, in the order in which a sample goes through them; empty states left out."""
    if run.ring is None:
        return []
    return [(name, run.ring.occupancy[name]) for name in ORDER if run.ring.occupancy.get(name)]


def episodes(run: RunState) -> str:
    if run.ring is None or not run.ring.calls:
        return ""
    kinds = [f"{count:,} {name} (oldest {age:.1f} s)" for name, (count, age) in run.ring.episodes.items()]
    slots, free = sum(run.ring.calls.values()), run.ring.calls.get("free", 0)
    return " · ".join([*(kinds or ["none open"]), f"{slots - free} of {slots} slots of calls in use"])


def trigger(run: RunState, now: float) -> str:
    """The progress to the next step."""
    facts, ring = run.facts, run.ring
    ready = str(ring.groups_ready) if ring is not None and ring.groups_ready >= 0 else "?"
    since = run.since_step_s(now)
    limit = "t_max inf" if math.isinf(facts.t_max_s) else f"t_max {facts.t_max_s:g} s"
    return joined(
        f"{ready}/{run.n_min or '?'} groups ready",
        f"{ring.groups_open} open" if ring is not None and ring.groups_open >= 0 else "",
        f"{limit}, last step {since:.0f} s ago" if since is not None else limit,
        f"scheduler waits: {safe(run.waiting, 60)}" if run.waiting else "",
    )


def controller(run: RunState) -> str:
    newest = run.steps.newest
    if newest is None or not newest.control_n_min:
        return ""
    ratio = f"H/H_ref {newest.entropy_ratio:.2f}" if newest.entropy_ratio else "no reference entropy yet"
    acts = newest.control_n_min == newest.n_min
    size = f"n_min {newest.n_min:g}" + ("" if acts else f", advises {newest.control_n_min:g}")
    return f"{ratio} · {size} · {newest.control_moves:g} moves"


def staleness(run: RunState) -> str:
    """The ages of the samples that were trained last, and the bound."""
    newest = run.steps.newest
    bound = f" (bound {run.facts.max_staleness})" if run.facts.mode == "batch-async" else ""
    mode = f"{run.facts.mode}{bound}" if run.facts.mode else "mode not known"
    if newest is None:
        return f"{mode} · no step yet"
    return f"age mean {newest.age_mean:.2f} · p95 {newest.age_p95:.1f} · max {newest.age_max:g} steps · {mode}"


def policy(run: RunState) -> str:
    figures = run.steps.policy(run.idle)
    parts = [(name, value, form) for key, name, form in POLICY if (value := figures[key]) is not None]
    return " · ".join(f"{name} {value:{form}}" for name, value, form in parts)


def sources(run: RunState) -> str:
    """Reward and pass rate of the newest step by source or tag of the prompts, most groups first; "" with one only."""
    by = run.steps.newest.by if run.steps.newest is not None else {}
    most = sorted(by, key=lambda tag: (-by[tag].get("groups", 0.0), tag))[:MOST_SOURCES] if len(by) > 1 else ()
    return " · ".join(
        f"{safe(tag, 24)} {by[tag].get('reward', 0.0):.2f} ({by[tag].get('pass_rate', 0.0):.0%})" for tag in most
    )


def left_out(run: RunState) -> str:
    counts = run.left_out
    draws, resting = short(counts.get("left_out", 0)), short(counts.get("resting", 0))
    return f"{draws} draws by pass rate · {resting} prompts rest" if any(counts.values()) else ""


def idle(run: RunState) -> str:
    """Groups in a row that ended without a step, "" if there are none."""
    row = run.idle
    if row is None:
        return ""
    words = ((count, fate_name(name) if len(name) == 1 else safe(name)) for name, count in row.idle_causes.items())
    causes = ", ".join(f"{count} {name}" for count, name in words)
    end = f", the run ends after {row.idle_limit}" if row.idle_limit else ""
    return f"{row.idle_groups} groups in a row ended with nothing to train ({causes}){end}"


def doing(row: ProcessRow) -> str:
    if row.state == "dead":
        return "dead"
    if row.state in ("starting", "stopping"):
        return f"{row.state}: {safe(row.activity)}" if row.activity not in ("", row.state) else row.state
    if row.activity:
        return safe(row.activity)
    if row.state != "ready" or row.busy is None:
        return row.state
    return "working" if row.busy > 0.02 else "idle"


def age(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < 100 else duration(min(seconds, 1e9))


# -- plain views ------------------------------------------------------------------------------------------------------

CHART_WIDTH: Final = 40


def facts(run: RunState, now: float) -> list[str]:
    """Lines of all plain views: progress, speed, rewards and lengths, and the states of samples."""
    out = [f"  progress  {words}"] if (words := progress(run, now)) else []
    if run.state not in OVER and run.facts.learns:
        out.append(f"  speed     {speed(run.speed(now))}")
    if len(run.steps):
        out.append(_chart("reward", run.steps.course(lambda record: record.reward), ".3f"))
        out.append(_chart("length", run.steps.course(lambda record: record.length), ".1f"))
    if run.state != "ended" and run.facts.learns:
        states = " · ".join(f"{name} {count:,}" for name, count in occupancy(run))
        out.append(f"  slots     {states or ('not known' if run.damage else 'no ring')}")
    out += [f"  {name:<9} {words}" for name, words in labelled(run, now).items()]
    return out + [f"  host      {words}" for words in hosts(run)]


def hosts(run: RunState, only: str = "") -> list[str]:
    processes = run.ring.processes if run.ring else ()
    activities = {process.name: process.activity for process in processes if process.remote}
    shown = sorted(name for name in run.hosts if only in ("", name))
    return [_host(name, run.hosts[name], activities.get(name, "")) for name in shown]


def _host(name: str, report: dict[str, Any], activity: str) -> str:
    since, weights = report.get("time"), report.get("weights")
    if not isinstance(since, int | float) or not isinstance(weights, int):
        return f"{safe(name)} has not come yet"
    ago = max(0.0, time.time() - since)
    state = "silent" if ago > HOST_SILENT_S else "working" if activity else "joining"
    shown = f"weights {weights}" if weights >= 0 else "no weights"
    return joined(safe(name), state, f"heard {age(ago)} ago", safe(activity.removeprefix("remote, ")), shown,
                  f"busrl {safe(str(report.get('busrl')))}")


def host_lines(run: RunState, name: str) -> list[str]:
    processes = run.hosts[name].get("processes")
    rows = [process for process in processes or () if isinstance(process, dict)]
    shown = [tuple(safe(str(row.get(key, "?"))) for key in HOST_PROCESS) for row in rows]
    return [*hosts(run, name), *(
        f"    {label:<14} pid {pid:<8} {state:<9} {activity:<28} weights {version}  {samples} samples"
        for label, pid, state, activity, version, samples in shown
    )]


def labelled(run: RunState, now: float) -> dict[str, str]:
    """Phrases of every full view on the next step, the policy and the samples, by its label."""
    learns = run.facts.learns
    words = {
        "trigger": trigger(run, now) if run.state not in OVER and learns else "",
        "waits": safe(sentence_of(chain(run, now)), 4 * LIMIT),
        "control": controller(run),
        "episodes": episodes(run) if run.state not in OVER else "",
        "asked": safe(run.changed),
        "policy": policy(run), "sources": sources(run), "left out": left_out(run), "idle": idle(run),
        "sample": safe(run.sample), "staleness": staleness(run) if learns else "",
    }
    return {name: text for name, text in words.items() if text}


def line(run: RunState, now: float) -> str:
    """The state in one line of a log, the most important first."""
    reward, flat = run.steps.recent(lambda record: record.reward), run.steps.flat_share(run.idle)
    samples, traffic = run.speed(now).samples_per_s, run.traffic
    late = ", ".join(row.name for row in run.rows(now) if row.late)
    return joined(
        "FAULTS ARE ON" if run.faults else "",
        "" if run.launched else run.state,
        step(run),
        f"reward {reward:.3f}" if reward is not None else "",
        f"{samples:.1f} samples/s" if samples is not None else "",
        f"{flat:.0%} flat" if flat is not None and flat >= 0.005 else "",
        judged(run),
        left(run, now),
        f"{short(traffic.total.rate.per_s())} messages/s" if traffic.total.count else "",
        f"{run.errors.count} errors" if run.errors.count else "",
        f"{traffic.missed} messages missed" if traffic.missed else "",
        f"LATE: {late}" if late else "",
    )


def _chart(name: str, course: list[float], form: str) -> str:
    curve = chart(course, min(CHART_WIDTH, len(course)), 1)[0]
    return f"  {name:<9} {curve} {course[0]:{form}} → {course[-1]:{form}} over {len(course)} steps"


def process_line(row: ProcessRow) -> str:
    busy = f"{row.busy:>4.0%}" if row.busy is not None else "   -"
    late = "  LATE" if row.late else ""
    numbers = f"  {short(row.samples)} samples" if row.samples else ""
    again = f"  restarted {row.restarts}×" if row.restarts else ""
    pid = "elsewhere" if row.remote else f"pid {row.pid}" if row.pid else ""
    return (
        f"    {safe(row.name):<14} {pid:<12} {doing(row):<22} busy {busy}  progress {age(row.progress_age_s)} ago"
        f"{numbers}{again}{late}"
    )
