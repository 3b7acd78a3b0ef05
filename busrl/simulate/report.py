"""The figures of a simulated run as text for people: a page for one run, a table for a sweep.

Pure: figures in, text out. Knows nothing of how they came about.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence

from busrl.scheduling.limits import Limits
from busrl.simulate.actors import judges_of
from busrl.simulate.figures import Figures
from busrl.simulate.fit import Seen
from busrl.simulate.settings import Setting
from busrl.simulate.standstill import FATES
from busrl.simulate.times import STATED
from busrl.topology import Topology

BUSY, IDLE = 0.9, 0.8  # busy shares above which something is the bottleneck, and below which it is not
DECISIVE = ("step_s", "row_s", "reward_call_s", "learner_step_s", "learner_token_s")
STALLED = 0.05
SKEWED = 0.9
STARVED = 0.5  # share of the time without a prompt to open, from which on that is what limits a run
FLAT = 0.5
COLUMNS = (
    "samples/s", "tokens/s", "s/step", "learner busy", "rollout busy", "stalled", "age mean", "age max",
    "taken p99 s", "answered s", "group p99 s", "skew",
)  # fmt: skip


def page(topology: Topology, limits: Limits, setting: Setting, found: Figures, took_s: float, cores: int) -> str:
    """Everything about one run. `cores`: those of this machine."""
    lines = [*warning(setting), *_head(topology, limits, setting, found, took_s), ""]
    lines += [*_body(topology, setting, found), ""]
    if not assumed(setting):
        lines += [*(f"  {line}" for line in advice(topology, limits, setting, found, cores)), ""]
    lines += _origin(topology, setting)
    return "\n".join(lines) + "\n"


def assumed(setting: Setting) -> list[str]:
    """Names of the decisive times that nobody measured or stated; with any of them there is nothing to advise."""
    return [name for name, _, source in setting.times.notes() if source == STATED and name in DECISIVE]


def warning(setting: Setting) -> list[str]:
    """First of all, whose times these are."""
    names = assumed(setting)
    if not names:
        return []
    return [
        f"ASSUMED, not measured: {', '.join(names)}. They are those of a tiny model on two cores, so what follows "
        "shows how a schedule works and no figure of yours, and nothing is advised. `--fit RUN_DIR` of a short run, or "
        "simulate.*, gives times that are.",
        "",
    ]


def _head(topology: Topology, limits: Limits, setting: Setting, found: Figures, took_s: float) -> list[str]:
    rows = topology.generation.max_batch
    of = f"of {topology.run.max_steps} " if found.steps < topology.run.max_steps else ""
    return [
        f"{topology.run.name}, simulated: {setting.actors} rollout x {rows} rows, {limits.mode}, "
        f"B = {limits.B} groups of {limits.group_size}, n_min = {limits.n_min}, policy {topology.scheduler.policy}",
        f"{found.steps} {of}steps and {found.tasks} samples in {_seconds(found.seconds)} of virtual time "
        f"({took_s:.1f} s here, seed {setting.seed})",
    ]


def _body(topology: Topology, setting: Setting, found: Figures) -> list[str]:
    waits = sorted(found.learner_waited.items(), key=lambda item: -item[1])
    waited = ", ".join(f"{reason} {share:.0%}" for reason, share in waits if share >= 0.005) or "nothing"
    ages = ", ".join(f"{age}: {share:.0%}" for age, share in found.ages.items())
    aside = ", ".join(f"{count} {FATES.get(fate, fate)}" for fate, count in found.set_aside.items()) or "none"
    causes = ", ".join(f"{cause} {count}" for cause, count in found.causes.items())
    judged = (
        [
            f"reward      {found.reward_busy:.0%} busy: calls of {_seconds(setting.times.reward_call_s)}, "
            f"{judges_of(topology)} at a time"
        ]
        if setting.times.reward_call_s
        else []
    )
    return [
        f"throughput  {_short(found.samples_per_s)} samples/s and {_short(found.tokens_per_s)} tokens/s trained, "
        f"{_short(found.generated_tokens_per_s)} tokens/s generated, {_seconds(found.step_s)} per step",
        f"learner     {found.learner_busy:.0%} busy; waits for: {waited}; steps by {causes}",
        f"rollout     {found.actors_busy:.0%} busy (least {found.actors_busy_least:.0%}, most "
        f"{found.actors_busy_most:.0%}); stopped by new weights {found.actors_stalled:.1%}",
        *judged,
        f"age         {found.age_mean:.2f} steps (most {found.age_max}); groups by age: {ages}",
        f"waiting     an answer is begun after {_seconds(found.queued_p50_s)} (p99 {_seconds(found.queued_p99_s)}), "
        f"has its reward after {_seconds(found.completion_mean_s)} (p99 {_seconds(found.completion_p99_s)}); "
        f"a group after {_seconds(found.group_p50_s)} (p99 {_seconds(found.group_p99_s)})",
        f"lengths     drawn {found.length_drawn:.1f} (p95 {found.length_drawn_p95:.0f}), trained "
        f"{found.length_consumed:.1f} (p95 {found.length_consumed_p95:.0f}); skew {found.skew:.2f}",
        f"set aside   groups: {aside}",
        *_told(found),
    ]


def _told(found: Figures) -> list[str]:
    """Policy, predictor and controller, where there are any."""
    parts = {"policy": [], "predictor": [], "control": []}  # type: dict[str, list[str]]
    for name, value in found.told.items():
        head, _, rest = name.partition("_")
        head, rest = (head, rest) if head in parts and rest else ("policy", name)
        parts[head].append(f"{rest} {_short(value)}")
    return [f"{head:<12}{', '.join(said)}" for head, said in parts.items() if said]


def advice(topology: Topology, limits: Limits, setting: Setting, found: Figures, cores: int) -> list[str]:
    """What limits the run, and which keys move it."""
    said = _bottleneck(topology, limits, setting, found, cores)
    flat, ended = found.set_aside.get("f", 0), sum(found.set_aside.values()) + sum(row.groups for row in found.rows)
    if flat > FLAT * ended:
        said.append(
            f"Most groups are flat ({flat / ended:.0%}): all their rewards are equal, so they cost generation and "
            "train nothing; prompts that succeed sometimes, not always or never, train more per token."
        )
    if found.actors_stalled > STALLED:
        said.append("New weights stop rollout processes often: raise learner.publish_every or learner.trigger.n_min.")
    if found.skew < SKEWED:
        said.append("Short answers are favoured: what is trained is shorter than what was drawn.")
    if said:
        return said
    if max(found.learner_busy, found.actors_busy) >= IDLE:
        return ["Nothing stands out: learner and rollout are balanced."]
    waits = max(found.learner_waited, key=lambda reason: found.learner_waited[reason], default="groups")
    return [f"Neither learner nor rollout is busy, and no single key stands out; the learner waits most for: {waits}."]


def _bottleneck(topology: Topology, limits: Limits, setting: Setting, found: Figures, cores: int) -> list[str]:
    rows, slots = setting.actors * topology.generation.max_batch, limits.B * limits.group_size
    if found.learner_busy >= BUSY:
        return ["The learner is the bottleneck: more rollout processes would only wait."]
    if found.reward_busy >= BUSY:
        return [
            f"The reward is the bottleneck: {judges_of(topology)} at a time, {_seconds(setting.times.reward_call_s)} "
            "a call, and always busy; raise reward.workers or the count of reward processes, or make it faster."
        ]
    if found.actors_busy >= BUSY:
        return [_more_actors(topology, setting, found, cores)]
    if found.starved >= STARVED:
        return [
            f"Too few prompts arrive: {found.starved:.0%} of the time there was room for more than had come; fewer "
            "rollout processes would do, or a denser stream (arrival_s)."
        ]
    if limits.sync:
        return ["Rounds: learner and rollout wait for each other; weights.mode = batch-async lets them overlap."]
    if found.actors_busy < IDLE and rows > slots:
        return [
            f"{rows} rows share {slots} slots, so some stay empty: raise learner.trigger.n_min or "
            "weights.max_staleness, or use fewer rollout processes."
        ]
    if found.learner_waited.get("window", 0.0) + found.learner_waited.get("staleness", 0.0) > 1 - BUSY:
        return [
            "Late groups hold up the window: a higher weights.max_staleness widens it; segments, or a policy that "
            "begins long answers first, shorten the wait."
        ]
    return []


def _more_actors(topology: Topology, setting: Setting, found: Figures, cores: int) -> str:
    """So many actors that the learner would be busy; scripted ones hardly need a core."""
    more = max(setting.actors + 1, round(setting.actors * 0.95 / max(found.learner_busy, 0.05)))
    text = f"Generation is the bottleneck; try --actors {more}."
    if topology.scripted or more < cores:
        return text
    return f"{text} This machine has {cores} cores, and the learner needs one: so that takes a larger one, or more."


def _origin(topology: Topology, setting: Setting) -> list[str]:
    """Where the numbers come from, and how to have better ones."""
    lines = [f"answers     {setting.answers_note}"]
    by: dict[str, list[str]] = {}
    for name, value, source in setting.times.notes():
        if not name.endswith("busy_share"):
            by.setdefault(source, []).append(f"{name} {value:.3g}")
    for source, numbers in by.items():
        lines.append(f"{source}: {', '.join(numbers)}")
    if STATED in by:
        lines.append(
            "Assumed times: make a short run and give it with --fit RUN_DIR, or set simulate.* "
            "(configs/reference-simulate.toml)."
        )
    return lines


def outside(seen: Seen, found: Figures) -> str:
    """In what a simulated run leaves what the fitted one showed; empty where it stays within."""
    tokens = found.tokens_trained / max(1, found.steps)
    said = []
    for what, value, (least, most) in (
        ("tokens per step", tokens, seen.tokens), ("running sequences", found.rows_running, seen.rows)
    ):  # fmt: skip
        if found.steps and not least <= value <= most:
            said.append(f"{_short(value)} {what} (the fitted run: {_short(least)} to {_short(most)})")
    return ", ".join(said)


# ----------------------------------------------------------------------------------------------------------- sweeps


def cells(found: Figures) -> list[str]:
    """The values of COLUMNS."""
    return [
        f"{found.samples_per_s:.4g}", f"{found.tokens_per_s:.4g}", f"{found.step_s:.4g}", f"{found.learner_busy:.3f}",
        f"{found.actors_busy:.3f}", f"{found.actors_stalled:.3f}", f"{found.age_mean:.2f}", f"{found.age_max}",
        f"{found.queued_p99_s:.3g}", f"{found.completion_mean_s:.3g}", f"{found.group_p99_s:.3g}", f"{found.skew:.3f}",
    ]  # fmt: skip


def markdown(keys: Sequence[str], points: Sequence[tuple[Sequence[str], Figures]]) -> str:
    """A table with a row per point."""
    rows = [[*values, *cells(found)] for values, found in points]
    table = [[*keys, *COLUMNS], *rows]
    widths = [max(len(row[i]) for row in table) for i in range(len(table[0]))]
    text = ["| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths)) + " |" for row in table]
    text.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return "\n".join(text) + "\n"


def comma_separated(keys: Sequence[str], points: Sequence[tuple[Sequence[str], Figures]]) -> str:
    """The same as CSV."""
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow([*keys, *COLUMNS])
    writer.writerows([*values, *cells(found)] for values, found in points)
    return file.getvalue()


def _seconds(value: float) -> str:
    if value < 1:
        return f"{1e3 * value:.3g} ms"
    return f"{value:.3g} s" if value < 600 else f"{value / 60:.0f} min"


def _short(value: float) -> str:
    return f"{value:.3g}" if value < 1000 else f"{value / 1000:.3g}k" if value < 1e6 else f"{value / 1e6:.3g}M"
