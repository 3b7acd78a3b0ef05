"""The figures of simulated runs for people: a page for one run, a table for a sweep.

Loads and checks every topology of a sweep before the first run, so that a wrong key costs no run. Otherwise pure:
figures in, text out.
"""

from __future__ import annotations

import csv
import dataclasses
import io
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from busrl.errors import TopologyError, UserError
from busrl.pages import opened
from busrl.preflight.load import load_for_simulation
from busrl.simulate.actors import STATED, reward_workers
from busrl.simulate.figures import Figures
from busrl.simulate.fit import Seen
from busrl.simulate.settings import Setting
from busrl.simulate.world import FATES
from busrl.states import Fate
from busrl.topology import Topology

# -- the points of a sweep -----------------------------------------------------------------------------------

MAX_POINTS = 1000

Axis = tuple[str, tuple[str, ...]]  # a key and its values, as text


@dataclass(frozen=True)
class Point:
    values: tuple[str, ...]
    topology: Topology
    written: frozenset[str]  # the keys that topology file, --set and --sweep give


def axis(text: str) -> Axis:
    key, equals, values = text.partition("=")
    listed = tuple(value.strip() for value in values.split(","))
    if not equals or not key.strip() or not all(listed):
        raise UserError(f"--sweep {text}: must be key=a,b,c, for example --sweep learner.trigger.n_min=16,32,64")
    return key.strip(), listed


def points(file: Path, overrides: Sequence[str], axes: Sequence[Axis]) -> list[Point]:
    """Every combination, loaded and checked; the first that is wrong is reported with its values."""
    keys = [key for key, _ in axes]
    if twice := [key for key in keys if keys.count(key) > 1]:
        raise UserError(f"--sweep {twice[0]}: given twice; give all its values at once, separated by commas")
    combinations = list(itertools.product(*(values for _, values in axes)))
    if len(combinations) > MAX_POINTS:
        raise UserError(f"--sweep: {len(combinations)} combinations, at most {MAX_POINTS}; give fewer values")
    return [_load(file, overrides, keys, values) for values in combinations]


def _load(file: Path, overrides: Sequence[str], keys: Sequence[str], values: tuple[str, ...]) -> Point:
    try:
        chosen = [f"{key}={value}" for key, value in zip(keys, values)]
        return Point(values, *load_for_simulation(file, [*overrides, *chosen]))
    except TopologyError as error:
        raise TopologyError(
            dataclasses.replace(problem, place=problem.place.replace("--set", "--sweep", 1))
            if any(key in problem.place for key in keys) else problem
            for problem in error.problems
        ) from None


# -- pages and tables ----------------------------------------------------------------------------------------

BUSY, IDLE = 0.9, 0.8  # busy shares above which something is the bottleneck, and below which it is not
DECISIVE = ("step_s", "row_s", "reward_call_s", "learner_step_s", "learner_token_s")
STALLED = 0.05
SKEWED = 0.9
STARVED = 0.5  # share of the time without a prompt to open, from which on that is what limits a run
FLAT = 0.5
COLUMNS = {  # of a sweep's table: how each figure is written
    "samples/s": "{.samples_per_s:.4g}", "tokens/s": "{.tokens_per_s:.4g}", "s/step": "{.step_s:.4g}",
    "learner busy": "{.learner_busy:.3f}", "rollout busy": "{.actors_busy:.3f}", "stalled": "{.actors_stalled:.3f}",
    "age mean": "{.age_mean:.2f}", "age max": "{.age_max}", "taken p99 s": "{.queued_p99_s:.3g}",
    "answered s": "{.completion_mean_s:.3g}", "group p99 s": "{.group_p99_s:.3g}", "skew": "{.skew:.3f}",
}


def page(topology: Topology, setting: Setting, figures: Figures, took_s: float, cores: int) -> str:
    """The page of one run. `cores`: the number of this machine's."""
    lines = [*warning(setting), *_head(topology, setting, figures, took_s), ""]
    lines += [*_body(topology, setting, figures), ""]
    if not assumed(setting):
        lines += [*(f"  {line}" for line in advice(topology, setting, figures, cores)), ""]
    lines += _origin(setting)
    return "\n".join(lines) + "\n"


def assumed(setting: Setting) -> list[str]:
    """Names of the decisive times that were neither measured nor stated; with any of them, there is no advice."""
    return [name for name, _, source in setting.times.notes() if source == STATED and name in DECISIVE]


def warning(setting: Setting) -> list[str]:
    text = (
        f"ASSUMED, not measured: {', '.join(assumed(setting))}. They are those of a tiny model on two cores, so what "
        "follows shows how a schedule works and no figure of yours, and nothing is advised. `--fit RUN_DIR` of a short "
        "run, or simulate.*, gives times that are."
    )
    return [text, ""] if assumed(setting) else []


def _head(topology: Topology, setting: Setting, figures: Figures, took_s: float) -> list[str]:
    rows, limits = topology.generation.max_batch, topology.derived.limits
    of = f"of {topology.run.max_steps} " if figures.steps < topology.run.max_steps else ""
    return [
        f"{topology.run.name}, simulated: {setting.actors} rollout x {rows} rows, {limits.mode}, "
        f"B = {limits.B} groups of {limits.group_size}, n_min = {limits.n_min}, policy {topology.scheduler.policy}",
        f"{figures.steps} {of}steps and {figures.tasks} samples in {_seconds(figures.seconds)} of virtual time "
        f"({took_s:.1f} s here, seed {setting.seed})",
    ]


def _body(topology: Topology, setting: Setting, figures: Figures) -> list[str]:
    waits = sorted(figures.learner_waited.items(), key=lambda item: -item[1])
    waited = ", ".join(f"{reason} {share:.0%}" for reason, share in waits if share >= 0.005) or "nothing"
    ages = ", ".join(f"{age}: {share:.0%}" for age, share in figures.ages.items())
    aside = ", ".join(f"{count} {FATES.get(fate, fate)}" for fate, count in figures.set_aside.items()) or "none"
    causes = ", ".join(f"{cause} {count}" for cause, count in figures.causes.items())
    judged = (
        f"reward      {figures.reward_busy:.0%} busy: calls of {_seconds(setting.times.reward_call_s)}, "
        f"{reward_workers(topology)} at a time"
    )
    return [
        f"throughput  {_short(figures.samples_per_s)} samples/s and {_short(figures.tokens_per_s)} tokens/s trained, "
        f"{_short(figures.generated_tokens_per_s)} tokens/s generated, {_seconds(figures.step_s)} per step",
        f"learner     {figures.learner_busy:.0%} busy; waits for: {waited}; steps by {causes}",
        f"rollout     {figures.actors_busy:.0%} busy (least {figures.actors_busy_least:.0%}, most "
        f"{figures.actors_busy_most:.0%}); stopped by new weights {figures.actors_stalled:.1%}",
        *([judged] if setting.times.reward_call_s else []),
        f"age         {figures.age_mean:.2f} steps (most {figures.age_max}); groups by age: {ages}",
        f"waiting     an answer is begun after {_seconds(figures.queued_p50_s)} "
        f"(p99 {_seconds(figures.queued_p99_s)}), "
        f"has its reward after {_seconds(figures.completion_mean_s)} (p99 {_seconds(figures.completion_p99_s)}); "
        f"a group after {_seconds(figures.group_p50_s)} (p99 {_seconds(figures.group_p99_s)})",
        f"lengths     drawn {figures.length_drawn:.1f} (p95 {figures.length_drawn_p95:.0f}), trained "
        f"{figures.length_consumed:.1f} (p95 {figures.length_consumed_p95:.0f}); skew {figures.skew:.2f}",
        f"set aside   groups: {aside}",
        *_metrics(figures),
    ]


def _metrics(figures: Figures) -> list[str]:
    parts: dict[str, list[str]] = {"policy": [], "predictor": []}
    for name, value in figures.told.items():
        head, _, rest = name.partition("_")
        head, rest = (head, rest) if head in parts and rest else ("policy", name)
        parts[head].append(f"{rest} {_short(value)}")
    return [f"{head:<12}{', '.join(texts)}" for head, texts in parts.items() if texts]


def advice(topology: Topology, setting: Setting, figures: Figures, cores: int) -> list[str]:
    """Sentences that name the bottleneck of a run, and the keys that move it."""
    sentences = _bottleneck(topology, setting, figures, cores)
    flat = figures.set_aside.get(Fate.FLAT.letter, 0)
    ended = sum(figures.set_aside.values()) + sum(row.groups for row in figures.rows)
    if flat > FLAT * ended:
        sentences.append(
            f"Most groups are flat ({flat / ended:.0%}): all their rewards are equal, so they cost generation and "
            "train nothing; prompts that succeed sometimes, not always or never, train more per token."
        )
    if figures.actors_stalled > STALLED:
        sentences.append(
            "New weights stop rollout processes often: raise learner.publish_every or learner.trigger.n_min."
        )
    if figures.skew < SKEWED:
        sentences.append("Short answers are favoured: what is trained is shorter than what was drawn.")
    if sentences:
        return sentences
    if max(figures.learner_busy, figures.actors_busy) >= IDLE:
        return ["Nothing stands out: learner and rollout are balanced."]
    waits = max(figures.learner_waited, key=lambda reason: figures.learner_waited[reason], default="groups")
    return [f"Neither learner nor rollout is busy, and no single key stands out; the learner waits most for: {waits}."]


def _bottleneck(topology: Topology, setting: Setting, figures: Figures, cores: int) -> list[str]:
    limits = topology.derived.limits
    rows, slots = setting.actors * topology.generation.max_batch, limits.B * limits.group_size
    if figures.learner_busy >= BUSY:
        return ["The learner is the bottleneck: more rollout processes would only wait."]
    if figures.reward_busy >= BUSY:
        return [
            f"The reward is the bottleneck: {reward_workers(topology)} at a time, "
            f"{_seconds(setting.times.reward_call_s)} a call, and always busy; "
            "raise reward.workers or the count of reward processes, or make it faster."
        ]
    if figures.actors_busy >= BUSY:
        return [_more_actors(topology, setting, figures, cores)]
    if figures.starved >= STARVED:
        return [
            f"Too few prompts arrive: {figures.starved:.0%} of the time there was room for more than had come; fewer "
            "rollout processes would do, or a denser stream (arrival_s)."
        ]
    if limits.sync:
        return ["Rounds: learner and rollout wait for each other; weights.mode = batch-async lets them overlap."]
    if figures.actors_busy < IDLE and rows > slots:
        return [
            f"{rows} rows share {slots} slots, so some stay empty: raise learner.trigger.n_min or "
            "weights.max_staleness, or use fewer rollout processes."
        ]
    if figures.learner_waited.get("window", 0.0) + figures.learner_waited.get("staleness", 0.0) > 1 - BUSY:
        return [
            "Late groups hold up the window: a higher weights.max_staleness widens it; segments, or a policy that "
            "begins long answers first, shorten the wait."
        ]
    return []


def _more_actors(topology: Topology, setting: Setting, figures: Figures, cores: int) -> str:
    """The number of actors that would keep the learner busy. Scripted ones hardly need a core."""
    more = max(setting.actors + 1, round(setting.actors * 0.95 / max(figures.learner_busy, 0.05)))
    text = f"Generation is the bottleneck; try --actors {more}."
    if topology.scripted or more < cores:
        return text
    return f"{text} This machine has {cores} cores, and the learner needs one: so that takes a larger one, or more."


def _origin(setting: Setting) -> list[str]:
    lines = [f"answers     {setting.answers_note}"]
    by: dict[str, list[str]] = {}
    for name, value, source in setting.times.notes():
        if not name.endswith("busy_share"):
            by.setdefault(source, []).append(f"{name} {value:.3g}")
    lines += [f"{source}: {', '.join(numbers)}" for source, numbers in by.items()]
    if STATED in by:
        lines.append(
            "Assumed times: make a short run and give it with --fit RUN_DIR, or set simulate.* "
            f"({opened('configs/reference-simulate.toml')})."
        )
    return lines


def outside(seen: Seen, figures: Figures) -> str:
    """The figures in which a simulated run exceeds the ranges of the fitted run; empty for none."""
    tokens = figures.tokens_trained / max(1, figures.steps)
    texts = []
    for what, value, (least, most) in (
        ("tokens per step", tokens, seen.tokens), ("running sequences", figures.rows_running, seen.rows)
    ):
        if figures.steps and not least <= value <= most:
            texts.append(f"{_short(value)} {what} (the fitted run: {_short(least)} to {_short(most)})")
    return ", ".join(texts)


def table(keys: Sequence[str], points: Sequence[tuple[Sequence[str], Figures]]) -> list[list[str]]:
    """The cells of a sweep, the head first: the values of each point, and its figures."""
    rows = [[*values, *(text.format(figures) for text in COLUMNS.values())] for values, figures in points]
    return [[*keys, *COLUMNS], *rows]


def markdown(keys: Sequence[str], points: Sequence[tuple[Sequence[str], Figures]]) -> str:
    """A table with a row per point."""
    rows = table(keys, points)
    widths = [max(map(len, column)) for column in zip(*rows)]
    text = ["| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths)) + " |" for row in rows]
    text.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return "\n".join(text) + "\n"


def comma_separated(keys: Sequence[str], points: Sequence[tuple[Sequence[str], Figures]]) -> str:
    file = io.StringIO()
    csv.writer(file, lineterminator="\n").writerows(table(keys, points))
    return file.getvalue()


def _seconds(value: float) -> str:
    if value < 1:
        return f"{1e3 * value:.3g} ms"
    return f"{value:.3g} s" if value < 600 else f"{value / 60:.0f} min"


def _short(value: float) -> str:
    return f"{value:.3g}" if value < 1000 else f"{value / 1000:.3g}k" if value < 1e6 else f"{value / 1e6:.3g}M"
