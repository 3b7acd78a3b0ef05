"""Rules between keys: combinations that cannot be run, and ones that deserve a warning.

A `Clash` is a row of a table: the values that do not go together, why, and what to do. What needs more than that is a
small function that yields findings. Looks at a topology's settings only, never at files or the machine.

- A finding names every key it depends on, so that none is reported for a key whose own value is wrong already.
- Refused is what trains something else than was asked for, or can never make progress; the rest warns.
- Only in mode `act` do the controller's n_lo and n_hi enter the sums for B and W.
"""

from __future__ import annotations

import difflib
import operator
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from busrl import faults
from busrl.algorithms import catalog, selection
from busrl.keys import NAME
from busrl.states import CALLER_ROLES, CRASH_POINTS, ENVIRONMENT, FOREIGN_ROLES, SINGLE_ROLES, TINY
from busrl.topology.declare import FUNCTION, items
from busrl.topology.learner import Learner, Value
from busrl.topology.plugins import ONE_COPY, RESTARTS, SCRIPTED
from busrl.topology.reader import show
from busrl.topology.schema import AGENT, ATROPOS, SINKS, BusFault, Process, Topology
from busrl.topology.sizes import RESERVE_PROCESSES, count, only_validate


@dataclass(frozen=True)
class Finding:
    """What is wrong with some keys together; the message stands at the first of them."""

    keys: tuple[str, ...]
    rule: str
    remedy: str
    warning: bool = False
    value: str = ""
    depends: tuple[str, ...] = ()  # further keys that the finding was computed from
    place: str = ""  # where in the file that the key names, if it is not the key itself that is to blame

    def shown(self, topology: Topology) -> str:
        """The keys with their values, unless the finding brings its own text."""
        return self.value or ", ".join(f"{key} = {show(lookup(topology, key))}" for key in self.keys)


Check = Callable[[Topology], Iterator[Finding]]
EntryCheck = Callable[[Topology, str, Process], Iterator[Finding]]  # with the key of the entry of [[process]]


def lookup(table: object, key: str) -> object:
    """The value of a dotted key; `process.0.count` counts entries."""
    value = table
    for part in key.split("."):
        value = value[int(part)] if isinstance(value, tuple) else getattr(value, part)
    return value


COMPARE: dict[str, Callable[[Any, Any], bool]] = {
    "<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge,
}


@dataclass(frozen=True)
class Clash:
    """Values that do not go together. `text` has rule and remedy, over the topology `t`.

    `when` has terms with commas between, which must all hold: `KEY` (on, or not empty), `KEY == a|b`, `KEY != a|b`, or
    `KEY > X` (also <, <=, >=) with a number or another key for X. The finding shows `process` and the dotted keys of
    the terms in their order; it depends on those behind a semicolon without showing them. IT is an entry of a table,
    `it` in the text.
    """

    when: str
    text: str
    warning: bool = False

    def finding(self, t: Topology, at: str = "") -> Finding | None:
        """What is to be reported, None where the values go together."""
        shown, _, hidden = self.when.replace("IT.", f"{at}.").partition("; ")
        terms = [term.split() for term in f"{shown}, {hidden}".split(", ") if term]
        if not all(_holds(t, *term) for term in terms):
            return None
        rule, _, remedy = self.text.format(t=t, it=lookup(t, at) if at else None).rpartition("; ")
        return Finding(_keys(shown), rule, remedy, self.warning, depends=_keys(hidden))


def _holds(t: Topology, key: str, sign: str = "", other: str = "") -> bool:
    value = lookup(t, key)
    if sign in COMPARE:
        return COMPARE[sign](value, float(other) if other[0].isdigit() else lookup(t, other))
    return (_word(value) in other.split("|")) == (sign == "==") if sign else bool(value)


def _word(value: object) -> str:
    return str(value).removesuffix(".0") if isinstance(value, float) else str(value)


def unlike(table: str, cls: type) -> Iterator[str]:
    """Terms of a rule, each of which holds where one key of a table is not at its default."""
    return (f"{table}.{name} != {_word(item.default)}" for name, item in items(cls).items())


def _keys(terms: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(re.findall(r"(?<![\w.])(?:[a-z]\w*(?:\.\w+)+|process(?![\w.]))", terms)))


def clashes(t: Topology, table: Iterable[Clash], at: str = "") -> Iterator[Finding]:
    """The findings of a table of rules, for the entry `at` where they are about one."""
    return (found for row in table if (found := row.finding(t, at)))


def of_entries(t: Topology, table: Iterable[Clash], *checks: EntryCheck) -> Iterator[Finding]:
    """The findings of a table of rules and of functions about each entry of [[process]]."""
    for index, entry in enumerate(t.process):
        yield from clashes(t, table, f"process.{index}")
        for check in checks:
            yield from check(t, f"process.{index}", entry)


TO_OLD = "|".join(name for name, facts in catalog.LOSSES.items() if facts.ratio)  # losses with a ratio that has a key
UNTAUGHT = "|".join(name for name, facts in catalog.LOSSES.items() if not facts.teacher)
ONE_PASS = "learner.passes_per_batch == 1"
HERE, RULES = "learner.controller", "experiments.controller"
OTHER_PROMPTS = 'set data to a file of prompts (those of training will do), or "tiny:sort"'
PLAYS = 'add a [[process]] with role = "agent", "serve" or "atropos"'
OPEN = "every prompt of an open stream is answered when it arrives"
RESTARTED = f"weights.transport == {'|'.join(RESTARTS)}"

TABLE = (
    # -- what is trained, and when
    Clash(f"learner.loss == decoupled, weights.mode != sync, learner.updates_per_batch == 1; {ONE_PASS}",
          'with one update per batch the clip never acts; loss = "ppo_clip", mode = "sync", or updates_per_batch > 1'),
    Clash(f"learner.loss == decoupled, weights.mode == sync, learner.updates_per_batch == 1; {ONE_PASS}, "
          "experiments.forced_age",
          'with one update per batch the clip never acts; loss = "ppo_clip", or updates_per_batch > 1', warning=True),
    Clash(f"learner.correction != none, learner.loss == {TO_OLD}, learner.ratio == behaviour",
          "the ratio to the recorded log-probabilities corrects for the engine already: a weight would count it twice; "
          'ratio = "proximal", or correction = "none"'),
    Clash("learner.correction != none, learner.loss == dppo|decoupled",
          "this loss weighs the engine's log-probabilities by itself: the correction would count them twice; "
          'correction = "none", or another loss'),
    Clash("learner.correction != none, segments.loss == pois",
          'pois hides what a correction is made of; correction = "none", or segments.loss = "behaviour"'),
    Clash(f"learner.ratio == proximal, learner.loss == {TO_OLD}, learner.updates_per_batch == 1, weights.mode != sync, "
          f"learner.correction == none; {ONE_PASS}",
          "with one update per batch every ratio to the proximal policy is 1, so nothing corrects for old samples; "
          'set a correction, ratio = "behaviour", or updates_per_batch > 1'),
    Clash(f"learner.ratio == proximal, learner.updates_per_batch == 1; learner.loss == {TO_OLD}, {ONE_PASS}",
          "with one update per batch every ratio is 1, so no clip can act; "
          'ratio = "behaviour", or updates_per_batch > 1', warning=True),
    Clash("learner.newest_ratio == one, learner.ratio == proximal",
          'it is about the ratio to recorded log-probabilities; newest_ratio = "recorded"'),
    Clash("learner.newest_ratio == one, learner.updates_per_batch > 1",
          'after the first update the ratio to the newest weights is not 1 any more; newest_ratio = "recorded"'),
    Clash("learner.newest_ratio == one, learner.passes_per_batch > 1",
          'after the first pass the ratio to the newest weights is not 1 any more; newest_ratio = "recorded"'),
    Clash("learner.newest_ratio == one, learner.correction != none",
          "it hides from the correction what separates engine and trainer; "
          'newest_ratio = "recorded", or correction = "none"'),
    Clash("learner.newest_ratio == one, experiments.forced_age",
          "published late, no version has the weights that are trained; forced_age = 0"),
    Clash("learner.loss == gspo, learner.aggregation == token-mean",
          "a mean over tokens weighs samples by their length, and GSPO's ratio is of whole samples; "
          'aggregation = "seq-mean-token-mean"'),
    Clash("learner.credit == turn, learner.advantage != group_std|group_mean|leave_one_out",
          "a turn is compared with those of the other episodes of its group; "
          'advantage = "group_std", "group_mean" or "leave_one_out", or credit = "episode"'),
    Clash("learner.gamma < 1, learner.credit == episode",
          'an episode\'s turns share one reward; credit = "turn", or remove it', warning=True),
    Clash("groups.size == 1, learner.advantage != reward|gae",
          'a single answer has none to be compared with; size >= 2, or advantage = "gae" or "reward"'),
    Clash("learner.kl != none, learner.kl_coef == 0",
          'the reference is computed and has no effect; kl_coef > 0, or kl = "none"', warning=True),
    Clash("learner.kl_coef, learner.kl == none", 'no KL is computed; kl = "k3", or remove kl_coef'),
    Clash("model.reference, learner.kl == none", 'nothing reads the reference; kl = "k3", or remove it', warning=True),
    Clash("learner.loss == topk_kl, model.teacher ==",
          'there is no teacher to learn from; set model.teacher to its folder'),
    Clash("learner.teacher_coef, model.teacher ==",
          'there is no teacher to learn from; set model.teacher to its folder, or teacher_coef = 0'),
    Clash("learner.loss == topk_kl, learner.teacher_coef",
          "this loss is the KL to the teacher already, and would count it twice; teacher_coef = 0"),
    Clash("learner.loss == topk_kl, learner.advantage != reward|gae",
          'it reads no advantage, and flat groups are set aside for want of one; advantage = "reward"', warning=True),
    Clash("learner.loss == topk_kl, learner.advantage == gae",
          'it reads no advantage, so a value head is trained for nothing; advantage = "reward"', warning=True),
    Clash(f"model.teacher, learner.teacher_coef == 0; learner.loss == {UNTAUGHT}",
          'nothing reads the teacher; loss = "topk_kl", teacher_coef > 0, or remove it', warning=True),
    Clash("learner.kl == k3_is, learner.kl_in == reward",
          'a reward has no gradient that k3_is could correct; kl = "k1", or kl_in = "loss"'),
    *(Clash(f"{value}, learner.advantage != {catalog.GAE}",
            'only a value head reads it; advantage = "gae" (recipe = "ppo" sets it), or remove it', warning=True)
      for value in unlike("learner.value", Value)),
    Clash("learner.length_norm, learner.aggregation != seq-mean-token-sum-norm",
          'only aggregation = "seq-mean-token-sum-norm" divides by it; remove it', warning=True),
    Clash("generation.top_p < 1",
          "the learner does not know which tokens top_p cut, so it cannot train on what was sampled; set it to 1.0"),
    Clash("learner.updates_per_batch > learner.trigger.n_min",
          "mini-batches are whole groups, so n_min groups have at most n_min updates; lower updates_per_batch"),
    Clash("learner.micro_batch_tokens < longest",
          "the longest sample ({t.longest} tokens) exceeds the budget; set it to {t.longest} or more", warning=True),
    Clash("learner.trigger.t_max_s != inf, weights.mode == sync",
          'a synchronous round ends with its groups, not by time; t_max_s = inf, or mode = "batch-async"'),
    Clash("learner.trigger.t_max_s != inf, learner.deterministic",
          "a step that fires by time depends on the load of the machine; t_max_s = inf, or deterministic = false"),
    Clash("learner.trigger.n_floor > learner.trigger.n_min",
          "n_floor <= n_min: the floor is what a step by time may make do with; lower n_floor, or 0 for automatic"),
    Clash("learner.trigger.n_floor; learner.trigger.t_max_s == inf",
          "it is used by t_max_s only, which is inf; remove it, or set t_max_s", warning=True),
    Clash("learner.deterministic, weights.mode != sync",
          'weights arrive when the machine lets them, so runs differ; mode = "sync" for equal runs', warning=True),
    Clash("experiments.forced_age, weights.mode != sync",
          'an exact number of steps late is possible in rounds only; mode = "sync", or forced_age = 0'),
    Clash("experiments.forced_age; weights.mode == sync",
          "an experiment: batches of age {t.experiments.forced_age}, in steps; 0 for real training", warning=True),
    Clash("weights.window, weights.mode == sync",
          'a round is trained whole, so its window is the round; remove it, or mode = "batch-async"', warning=True),
    Clash("learner.checkpoint_mode == async, lora.rank",
          'a checkpoint with an adapter is a folder that peft loads, written at once; checkpoint_mode = "auto"'),
    Clash(f"learner.checkpoint_mode == async, weights.transport == {ONE_COPY}",
          'the weights are the engine\'s, and could be gone before they are written; checkpoint_mode = "auto"'),
    Clash("learner.start_optimizer == False, learner.start_from == ''",
          "the run begins with model.path, which has no optimiser; set start_from, or remove it", warning=True),
    Clash("weights.over_age == drop, weights.mode != batch-async",
          "there is no staleness bound in this mode, so nothing is ever over age; remove it", warning=True),
    Clash("learner.wal == off",
          "a crash rolls back up to checkpoint_every = {t.learner.checkpoint_every} steps (0 = all); "
          'wal = "async" costs almost nothing', warning=True),
    # -- the order of dispatch
    *(Clash(terms, 'fifo keeps the order drawn and uses no predictor; policy = "sjf", or remove it', warning=True)
      for terms in ("scheduler.predictor != rules, scheduler.policy == fifo",
                    "scheduler.keywords, scheduler.policy == fifo; scheduler.predictor == rules")),
    Clash("scheduler.horizon > 1, scheduler.policy == adaptive, weights.mode == sync, "
          "scheduler.horizon < learner.trigger.n_min",
          "adaptive sorts a whole round, which has n_min = {t.learner.trigger.n_min} draws; "
          "set it to {t.learner.trigger.n_min} or more, or 0 for 2 x n_min"),
    # -- segments
    Clash("segments.global_max_length, segments.length == 0",
          "segments are off, so generation.max_new_tokens is the limit; set segments.length, or remove it"),
    Clash("segments.loss == last_segment, segments.length == 0",
          'segments are off: the last one is the whole answer; set segments.length, for example "auto"', warning=True),
    Clash("segments.length == auto, learner.deterministic",
          "a length that follows the answers depends on who finished first; give a number, or deterministic = false"),
    Clash("segments.loss == pois, weights.mode != sync",
          'ratio 1 corrects nothing: at age 2 it does not learn; loss = "behaviour", or mode = "sync"'),
    Clash("segments.loss == pois, learner.loss == decoupled",
          'the decoupled loss is made of the ratios that pois sets to 1; learner.loss = "ppo_clip"'),
    Clash("segments.loss == pois, learner.loss == dppo|reinforce|m2po|clip_cov|kl_cov|topk_kl",
          'this loss has no ratio that pois could set to 1, or chooses tokens by it; learner.loss = "ppo_clip"'),
    Clash("segments.loss == pois, learner.updates_per_batch > 1",
          "after the first update the ratio to the newest weights is not 1 any more; updates_per_batch = 1"),
    Clash("segments.loss == pois, learner.passes_per_batch > 1",
          "after the first pass the ratio to the newest weights is not 1 any more; passes_per_batch = 1"),
    Clash("segments.rounds == segments, segments.length == 0",
          'segments are off, so a round has none; set segments.length, or rounds = "answers"'),
    Clash("segments.rounds == segments, weights.mode != sync",
          'only synchronous steps have rounds; mode = "sync", or rounds = "answers"'),
    Clash("segments.rounds == segments, experiments.forced_age",
          'an answer in several waves has tokens of several ages; forced_age = 0, or rounds = "answers"'),
    Clash("segments.rounds == segments, learner.publish_every > 1",
          "the next wave begins when what this one completed is published; publish_every = 1"),
    Clash(f"segments.rounds == segments, weights.restart_every > 1; learner.publish_every == 1, {RESTARTED}",
          "the next wave begins when what this one completed is published; restart_every = 1"),
    Clash("scheduler.ahead, segments.rounds == segments",
          "a wave begins when all of its round is dispatched, so nothing is held back; ahead = 0", warning=True),
    # -- validation
    Clash("validation.every; validation.data ==, validation.set == ()",
          f"validation rounds are asked for, and no prompts are named; {OTHER_PROMPTS}"),
    # -- bus and prompts
    Clash("bus.keys, bus.endpoint == ipc",
          "sockets in a 0700 directory need no keys, so they are not used; remove it, or set endpoint", warning=True),
    Clash("data.arrivals, data.shuffle", "prompts arrive in the order of their lines; set shuffle = false"),
    Clash("data.arrivals, data.skip.max_pass_rate > 0", f"{OPEN}; set max_pass_rate = 0"),
    Clash("data.arrivals, data.skip.min_pass_rate > 0", f"{OPEN}; set min_pass_rate = 0"),
    Clash("data.skip.max_pass_rate > 0, data.skip.min_pass_rate >= data.skip.max_pass_rate",
          "no prompt is at least the one and below the other; lower min_pass_rate"),
    # -- episodes
    Clash(f"reward.kind == {AGENT}, process; reward.part == (), has_callers == False",
          f"no episode returns a reward; {PLAYS}"),
    Clash("segments.length, process; has_callers", "an episode is made whole; remove [segments]"),
    Clash("weights.over_age == drop, process; has_callers",
          'an episode is as old as its oldest token, so that long ones are trained less; over_age = "wait"',
          warning=True),
    # -- experiments
    Clash("mock.learner_s_per_token; scripted == False",
          "an experiment: the learner is slowed down on purpose; 0 for real training", warning=True),
    # -- the controller
    Clash(f"{RULES}.high_t_max_s > {RULES}.low_t_max_s; {HERE}.mode != off",
          "high_t_max_s <= low_t_max_s: high entropy asks for steps more often; the defaults are 0.25 and 1"),
    Clash(f"{HERE}.mode == act, weights.mode == sync",
          'a round is n_min groups: there is nothing to move; mode = "advise", or weights.mode = "batch-async"'),
    Clash(f"{HERE}.mode == act, learner.trigger.count == ended",
          'it moves the number of groups trained, not ended; count = "usable", or mode = "advise"'),
)
OF_ENTRY = (
    Clash("IT.python, IT.command", "a command says itself what runs it; remove one of them"),
    Clash(f"IT.command, IT.role != {'|'.join(FOREIGN_ROLES)}",
          "a {it.role} is busrl's own; only rollout and reward may be another program; remove command"),
    *(Clash(f"IT.{name}, IT.role != {AGENT}", "only an agent plays episodes; remove it")
      for name in ("function", "environment", "program", "options")),
    Clash(f"IT.options; IT.environment ==, IT.role == {AGENT}", "options are those of an environment; remove it"),
    Clash("IT.engine == openai, process; IT.role == rollout, has_callers",
          'model calls are token ids, which this engine does not take; engine = "torch", "vllm" or "mock"'),
)
# Of a topology with a scripted engine, in the entry IT.
SCRIPTED_RUNS = (
    Clash("IT.engine, weights.transport != shm",
          'a scripted engine follows the versions in shared memory; set weights.transport = "shm"'),
    Clash("reward.extract, IT.engine; reward.kind == exact_match",
          "a scripted answer is bare, or wrong: the pattern would find neither; remove extract"),
    Clash("IT.engine",
          'nothing is learnt: tokens are random, rewards are given; engine = "torch" for training', warning=True),
)


def by_path(keys: tuple[str, ...], path: str, example: str, who: str = "") -> Iterator[Finding]:
    """A finding at these keys if that is no import path of a function; `who` needs it, if that is not plain."""
    if not FUNCTION.fullmatch(path):
        rule = f"{who} needs a function" if who else "expected a function"
        yield Finding(keys, f"{rule} as package.module:name or file.py:name, got {show(path)}", example)


def _training(t: Topology) -> Iterator[Finding]:
    if not NAME.fullmatch(t.run.name):
        rule = "a run's name is 1 to 64 letters, digits, dots, dashes or underscores: it names a directory"
        yield Finding(("run.name",), rule, 'for example "sort-lr3e-4"')
    own_low, own_high = catalog.CORRECTIONS[t.learner.correction]
    low, high = t.learner.correction_low or own_low, t.learner.correction_high or own_high
    if t.learner.correction != "none" and low >= high:
        rule = f"the lower bound {low:g} is not below the upper bound {high:g}: everything would be dropped"
        keys = ("learner.correction_low", "learner.correction_high", "learner.correction")
        yield Finding(keys, rule, "correct one of them; 0 = the correction's own default")
    if t.learner.clip_cov_range[0] >= t.learner.clip_cov_range[1]:
        yield Finding(("learner.clip_cov_range",), "low < high: no covariance is between them", "the default is [1, 5]")
    for path in t.learner.metrics:
        yield from by_path(("learner.metrics",), path, 'for example metrics = ["metrics.py:measure"]')
    for path in (one for one in t.sinks.to if one not in SINKS):
        yield from by_path(("sinks.to",), path, f"one of {', '.join(SINKS)}, or a class of yours")
    if len(set(t.sinks.to)) < len(t.sinks.to):
        yield Finding(("sinks.to",), f"a sink is named twice in {show(list(t.sinks.to))}", "name each once")
    yield from _optimizer(t)


def _optimizer(t: Topology) -> Iterator[Finding]:
    own, name = t.learner, "learner.optimizer"
    try:
        selection.parsed(own.train_layers)
    except ValueError as wrong:
        yield Finding(("learner.train_layers",), str(wrong), 'for example "20-27, lm_head", or "" for all')
    if own.optimizer.startswith("adamw"):
        if own.options:
            rule = f"{own.optimizer} takes none: its settings are learner.betas, eps and weight_decay"
            yield Finding(("learner.options", name), rule, "remove [learner.options]")
        return
    taken = ("weight_decay",) if own.optimizer == "adafactor" else ()
    for key, item in items(Learner).items():
        if key in ("betas", "eps", "weight_decay") and key not in taken and getattr(own, key) != item.default:
            rule = f"it is AdamW's, and {own.optimizer} does not read it"
            yield Finding((f"learner.{key}", name), rule, "arguments stand in [learner.options]", warning=True)


def _scheduler(t: Topology) -> Iterator[Finding]:
    scheduler, n_min = t.scheduler, t.learner.trigger.n_min
    if scheduler.policy != "fifo" and scheduler.horizon == 1:
        rule = f"{scheduler.policy} has nothing to choose from within a horizon of one draw"
        yield Finding(("scheduler.horizon", "scheduler.policy"), rule, f"0 for 2 x n_min = {2 * n_min}, or more")
    if scheduler.predictor == "oracle" and {one.engine for one in t.process if one.role == "rollout"} != {SCRIPTED}:
        rule = "the lengths of a real model's answers are not known beforehand: it is for the scripted engine"
        yield Finding(("scheduler.predictor",), rule, 'predictor = "blend"', depends=("process",))


def _segments(t: Topology) -> Iterator[Finding]:
    own, limit = t.segments, t.generation.max_new_tokens
    if own.on and own.global_max_length not in (0, limit):
        rule = "an answer has one limit, and both are given"
        yield Finding(("segments.global_max_length", "generation.max_new_tokens"), rule, "remove one of them")
    elif own.on and isinstance(own.length, int):
        named = "segments.global_max_length" if own.global_max_length else "generation.max_new_tokens"
        if own.length * own.max_segments < limit:
            rule = f"{own.max_segments} segments of {own.length} tokens cannot reach the limit of {limit}"
            remedy = f"length >= {-(-limit // own.max_segments)}, or more segments"
            yield Finding(("segments.length", "segments.max_segments", named), rule, remedy)
        if own.length >= limit:
            rule = f"every answer ends within its first segment: the limit is {limit}"
            yield Finding(("segments.length", named), rule, "a shorter length, or 0 = off", warning=True)


def _validation(t: Topology) -> Iterator[Finding]:
    named, asked = _named_prompts(t), count(t, "validator") > 0
    if not t.validation.names_prompts and asked and not t.validation.every:
        index = next(i for i, entry in enumerate(t.process) if entry.role == "validator")
        rule = "a validator is asked for, and validation.data names no prompts"
        yield Finding((f"process.{index}.role", "validation.data"), rule, OTHER_PROMPTS)
    elif named and not asked:
        rule = "no validator is started: its entry has count = 0"
        yield Finding((next(iter(named)),), rule, "remove that entry, or the file", warning=True)
    elif named and not wants_rounds(t):
        rule = "the validator has nothing to do: no round before, during or after the run"
        keys = ("validation.at_end", "validation.every", "validation.at_start")
        yield Finding(keys, rule, "set one, or remove data", warning=True)
    for key, data in named.items():
        if data == t.data.train and not data.startswith(TINY):
            yield Finding((key,), "these are the training prompts", "give it its own", warning=True)
    for index in range(-bool(t.validation.data), len(t.validation.set)):
        yield from _one_set(t, index)
    yield from _dedicated(t)


def _named_prompts(t: Topology) -> dict[str, str]:
    """The prompts of validation by the key that names them."""
    sets = {f"validation.set.{index}.data": one.data for index, one in enumerate(t.validation.set)}
    return {key: path for key, path in {"validation.data": t.validation.data, **sets}.items() if path}


def _one_set(t: Topology, index: int) -> Iterator[Finding]:
    at = f"validation.set.{index}" if index >= 0 else "validation"
    own = t.validation.set[index] if index >= 0 else t.validation

    def settled(name: str) -> tuple[str, Any]:
        """The key that says it, and its value: that of [validation] where the set leaves it out."""
        value = getattr(own, name)
        return (f"validation.{name}", getattr(t.validation, name)) if value == "auto" else (f"{at}.{name}", value)

    (cut, tokens), (how_often, k), (how, temperature) = map(settled, ("max_new_tokens", "k", "temperature"))
    if tokens > t.generation.max_new_tokens:
        rule = "slots and engines have room for answers of generation.max_new_tokens"
        yield Finding((cut, "generation.max_new_tokens"), rule, "lower it, or raise generation.max_new_tokens")
    if k > 1 and not temperature:
        rule = f"greedy answers are all alike: {k} of them say what one does"
        yield Finding((how_often, how), rule, "k = 1, or a temperature above 0", warning=True)
    if index < 0:
        return
    name = t.validation.set[index].name
    if not NAME.fullmatch(name):
        rule = "a set's name is 1 to 64 letters, digits, dots, dashes or underscores"
        yield Finding((f"{at}.name",), rule, 'for example "math-500"')
    if name in ["validation", *(one.name for one in t.validation.set[:index])]:
        rule = "another set has this name: validation is what [validation] itself measures, and no two may be alike"
        yield Finding((f"{at}.name",), rule, "give it its own")


def _dedicated(t: Topology) -> Iterator[Finding]:
    alone = [i for i, entry in enumerate(t.process) if entry.serves == "validation"]
    for index in alone:
        at = f"process.{index}.serves"
        if t.process[index].role != "rollout":
            yield Finding((at, f"process.{index}.role"), "only a rollout answers validation", "remove it")
        elif t.validation.mode != "dedicated" or not _named_prompts(t):
            rule = "it would never get a task: nothing is kept for rollouts that only validate"
            yield Finding((at, "validation.mode"), rule, 'set validation.mode = "dedicated", with prompts')
        elif t.process[index].command:
            rule = "another program takes whatever is queued, and it does not keep to a version"
            yield Finding((at, f"process.{index}.command"), rule, "remove command, or serves")
    if t.validation.mode != "dedicated" or not _named_prompts(t):
        return
    if not only_validate(t):
        rule = "no rollout is kept for validation"
        yield Finding(("validation.mode",), rule, 'add a [[process]] with role = "rollout", serves = "validation"',
                      depends=("process",))
    elif count(t, "rollout") == only_validate(t) and all(one.count for one in t.process if one.role == "rollout"):
        rule = "every rollout only validates, so nothing is generated to train on"
        yield Finding(("validation.mode",), rule, 'add a [[process]] with role = "rollout"', depends=("process",))
    if t.weights.transport in ("broadcast", ONE_COPY):
        rule = "every engine takes part in each publication, so none can keep its version while training goes on"
        yield Finding(("validation.mode", "weights.transport"), rule, 'transport = "shm", or mode = "hold"')
    for index, entry in enumerate(t.process):
        if entry.role == "rollout" and entry.engine == "openai":
            rule = "the server's weights change for all that ask it"
            yield Finding(("validation.mode", f"process.{index}.engine"), rule, 'mode = "hold" or "free"')
        if entry.role == "rollout" and entry.command:
            rule = "another program takes whatever is queued, also what is kept for rollouts that only validate"
            yield Finding((f"process.{index}.command", "validation.mode"), rule, 'mode = "hold" or "free"')


TCP = re.compile(r"tcp://(\*|[0-9.]+|\[[0-9A-Fa-f:.]+\]|localhost):(\d{1,5})")


def _bus(t: Topology) -> Iterator[Finding]:
    found, last = TCP.fullmatch(t.bus.endpoint), 65533 if t.host_names else 65534
    if found is None and t.bus.endpoint != "ipc":
        rule = 'expected "ipc", or tcp://ADDRESS:PORT with a number of this machine, * for all of them, or localhost'
        yield Finding(("bus.endpoint",), rule, 'for example "tcp://0.0.0.0:5600"')
    elif found and not 1 <= int(found[2]) <= last:
        third = ", and one more for other hosts" if t.host_names else ""
        rule = f"two ports are used, this one to publish and the next to subscribe{third}"
        yield Finding(("bus.endpoint",), rule, f"choose a port from 1 to {last}")


PLACEHOLDER = re.compile(r"\{[a-z_]+\}")
FILLED_AT_START = ("{run_dir}", "{name}")


def _processes(t: Topology) -> Iterator[Finding]:
    yield from of_entries(t, OF_ENTRY, _entry, _episode_code)
    yield from _agents(t)
    here = sum(entry.count for entry in t.process if entry.is_at(""))
    total = here + t.ranks - 1 + len(t.implied) + len(t.host_names) + RESERVE_PROCESSES
    if total > t.ring.processes:
        rule = f"{total} entries are needed: the processes, {len(t.implied)} implied, {RESERVE_PROCESSES} spare"
        yield Finding(("ring.processes",), rule, f"set it to {total} or more")


def _entry(t: Topology, at: str, entry: Process) -> Iterator[Finding]:
    until = t.process[: int(at.rpartition(".")[2]) + 1]
    if entry.role in SINGLE_ROLES and sum(one.count for one in until if one.role == entry.role) > 1:
        rule = f"one {entry.role} per run: it works alone under a lock"
        yield Finding((f"{at}.count", f"{at}.role"), rule, "set count = 1 and remove the others")
    runs = os.path.isfile(entry.python) and os.access(entry.python, os.X_OK)
    if entry.python and not entry.command and not runs:
        remedy = "give the path of a Python, or the folder of a virtual environment"
        yield Finding((f"{at}.python",), "no program that can be started", remedy)
    unknown = [name for part in entry.command for name in PLACEHOLDER.findall(part) if name not in FILLED_AT_START]
    if unknown:
        rule = f"{unknown[0]} is not one of the words that are filled in: {', '.join(FILLED_AT_START)}, {{here}}"
        yield Finding((f"{at}.command",), rule, "correct it")


def _agents(t: Topology) -> Iterator[Finding]:
    if not t.has_callers:
        return
    if t.validation.mode == "dedicated" and _named_prompts(t):
        rule = "episodes of validation and of training are played by the same agents"
        yield Finding(("validation.mode", "process"), rule, 'set it to "hold" or "free"')
    yield from _atropos(t)
    yield from _episode_sizes(t)


def _atropos(t: Topology) -> Iterator[Finding]:
    """Where environments of Atropos make the groups, nobody plays samples one by one."""
    at = next((f"process.{i}.role" for i, one in enumerate(t.process) if one.role == ATROPOS), "")
    if not at:
        return
    for index, one in enumerate(t.process):
        if one.role in CALLER_ROLES and one.role != ATROPOS:
            rule = "the samples are groups that environments post: others would take their slots"
            yield Finding((f"process.{index}.role", at), rule, "remove one of them")
    if _named_prompts(t):
        rule = "environments post groups for training: nobody plays those of validation"
        yield Finding(("validation.data", at), rule, "remove [validation]")


def _episode_code(_: Topology, at: str, entry: Process) -> Iterator[Finding]:
    given = [name for name in ("environment", "function", "program") if getattr(entry, name)]
    if entry.role != AGENT:
        return
    if len(given) > 1:
        keys = tuple(f"{at}.{name}" for name in given)
        yield Finding(keys, "an agent plays a function, an environment or a program", "remove all but one")
    elif entry.environment and not ENVIRONMENT.fullmatch(entry.environment):
        rule = "an environment is its library, a colon and its name"
        yield Finding((f"{at}.environment",), rule, "gymnasium:ID, textarena:ID, openenv:URL or verifiers:NAME")
    elif not (entry.environment or entry.program) and not FUNCTION.fullmatch(entry.function):
        rule = "an agent plays episodes with a function: package.module:function or file.py:function"
        remedy = "name one, an environment or a program: see docs/agents.md"
        yield Finding((f"{at}.function", f"{at}.role"), rule, remedy)


def _episode_sizes(t: Topology) -> Iterator[Finding]:
    own, (context, sampled, tokens) = t.agents, t.episode_limits
    if context > t.longest:
        yield Finding(("agents.context",), f"engines have room for {t.longest} ids", f"lower it to {t.longest}")
    if tokens < context:
        rule = f"a single sequence may have agents.context = {context}"
        yield Finding(("agents.tokens", "agents.context"), rule, f"set it to {context} or more")
    if own.sampled and sampled < t.generation.max_new_tokens:
        rule = "one answer may have generation.max_new_tokens"
        yield Finding(("agents.sampled", "generation.max_new_tokens"), rule, "raise it", warning=True)
    played = own.episodes * sum(count(t, role) for role in CALLER_ROLES)
    rows = t.generation.max_batch * count(t, "rollout")
    if 2 * played < rows and played:
        rule = f"{played} episodes at once, most with one call at a time, leave half of the engines' {rows} rows empty"
        keys = ("agents.episodes", "generation.max_batch")
        yield Finding(keys, rule, "raise agents.episodes, or lower max_batch, which takes memory", warning=True)


def _scripted(t: Topology) -> Iterator[Finding]:
    if t.scripted:
        at = next(f"process.{i}" for i, entry in enumerate(t.process) if entry.engine == SCRIPTED)
        if count(t, "validator"):
            rule, key = "scripted answers are made up, so there is nothing to validate", f"{at}.engine"
            yield Finding((key, "validation.data"), rule, "remove [validation]", value=f'{key} = "mock"')
        yield from clashes(t, SCRIPTED_RUNS, at)


def wants_rounds(t: Topology) -> bool:
    own = t.validation
    during = own.every > 0 or any(isinstance(one.every_steps, int) and one.every_steps > 0 for one in own.set)
    return own.at_start or during or own.at_end


def _faults(t: Topology) -> Iterator[Finding]:
    for index, entry in enumerate(t.faults.bus):
        yield from _bus_fault(f"faults.bus.{index}", entry)
    names = [process.name for process in t.processes()]
    own = {process.name: process.role for process in t.processes() if not process.spec.command}
    for index, crash in enumerate(t.faults.crash):
        at = f"faults.crash.{index}"
        yield from _named(f"{at}.process", (crash.process,), names, "process of this topology")
        yield from _named(f"{at}.point", (crash.point,), CRASH_POINTS, "crash point")
        yield from _passes(f"{at}.point", own.get(crash.process, ""), crash.point)
    for line in faults.describe(t.faults):
        yield Finding(("faults",), f"FAULTS ARE ON: {line}", "remove [faults] for real training", True, "[faults]")


def _passes(key: str, role: str, point: str) -> Iterator[Finding]:
    """A program of busrl must pass the point; what another program passes is not known."""
    passed_by = faults.PASSED_BY.get(point, ())
    if role and passed_by and role not in passed_by:
        near = [one for one, roles in faults.PASSED_BY.items() if role in roles]
        article = "an" if role == AGENT else "a"
        rule = f"{article} {role} never passes {point!r}, so it would never die there: {', '.join(passed_by)} do"
        remedy = f"for {article} {role} choose of {', '.join(near)}"
        yield Finding((key, key.replace(".point", ".process")), rule, remedy)


def _bus_fault(at: str, entry: BusFault) -> Iterator[Finding]:
    yield from _named(f"{at}.types", entry.types, faults.MESSAGES, "message")
    yield from _named(f"{at}.roles", entry.roles, faults.ENDS, "role with an end on the bus")
    if entry.at == faults.SENDER and (entry.duplicate or entry.delay_s or entry.reorder):
        yield Finding((f"{at}.at",), "a sender can only lose messages", 'use at = "receiver" for anything but drop')
    if not (entry.drop or entry.duplicate or entry.delay_s or entry.reorder):
        yield Finding((f"{at}.drop",), "this entry has no effect", "set drop, duplicate, delay_s or reorder")


def _named(key: str, given: Iterable[str], known: Sequence[str], what: str) -> Iterator[Finding]:
    """Every name must be known; a near one is suggested."""
    for name in given:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            remedy = f"did you mean {near[0]}?" if near else f"there are {', '.join(known)}"
            yield Finding((key,), f"there is no {what} {name!r}", remedy)


# -- the controller -----

CONTROL_KEYS = (f"{HERE}.mode", f"{HERE}.n_lo", f"{HERE}.n_hi")  # what the sums for B and W look at


def thresholds(t: Topology) -> tuple[int, int]:
    """(n_lo, n_hi) for the sums: what the controller may choose in mode `act`, else n_min."""
    n_min = t.learner.trigger.n_min
    low, high = t.learner.n_range if t.learner.controller.mode == "act" else (n_min, n_min)
    return min(low, n_min), max(high, n_min)  # a contradiction is reported once, by `_control`


def explain_control(t: Topology) -> Iterator[str]:
    c, (low, high) = t.learner.controller, t.learner.n_range
    if c.mode == "act":
        yield f"controller: moves n_min between {low} and {high}; n_lo and n_hi are in the sums above"
    elif c.mode == "advise":
        yield f"controller: advises (decisions.jsonl); n_min stays {t.learner.trigger.n_min}"
    if t.learner.batch_varies:
        yield f"intervals of checkpoints and validation count {t.learner.trigger.n_min} groups as a step"


def _control(t: Topology) -> Iterator[Finding]:
    n_min, (low, high), mode = t.learner.trigger.n_min, t.learner.n_range, t.learner.controller.mode
    if low > n_min and mode != "off":
        rule = f"n_lo <= n_min: the run starts with n_min = {n_min}"
        yield Finding((f"{HERE}.n_lo", "learner.trigger.n_min"), rule, f"set n_lo <= {n_min}, or 0 for n_min / 2")
    if high < n_min and mode != "off":
        rule = f"n_min <= n_hi: the run starts with n_min = {n_min}"
        yield Finding((f"{HERE}.n_hi", "learner.trigger.n_min"), rule, f"set n_hi >= {n_min}, or 0 for 2 x n_min")
    if t.learner.trigger.n_floor > low and mode == "act":
        rule = f"n_floor <= n_lo = {low}: the floor is what a step by time may make do with"
        yield Finding(("learner.trigger.n_floor", f"{HERE}.n_lo"), rule, "lower n_floor, or 0 for automatic")
    if t.learner.updates_per_batch > low and mode == "act":
        rule = f"mini-batches are whole groups, so a step of n_lo = {low} groups has at most {low} updates"
        yield Finding(("learner.updates_per_batch", f"{HERE}.n_lo"), rule, "lower updates_per_batch, or raise n_lo")


def _entropy(t: Topology) -> Iterator[Finding]:
    c, remedy = t.experiments.controller, "the defaults are 0.6 and 1.3"
    if t.learner.controller.mode == "off":
        return
    if not c.low < 1 < c.high:
        yield Finding((f"{RULES}.low", f"{RULES}.high"), "low < 1 < high: a run begins at H / H_ref = 1", remedy)
    elif c.low + c.hysteresis >= c.high - c.hysteresis:
        rule = f"low + hysteresis < high - hysteresis: the gap of {c.high - c.low:g} has no middle left"
        remedy = f"set hysteresis below {(c.high - c.low) / 2:g}"
        yield Finding((f"{RULES}.hysteresis", f"{RULES}.low", f"{RULES}.high"), rule, remedy)


CHECKS: tuple[Check, ...] = (
    lambda t: clashes(t, TABLE), _training, _scheduler, _segments, _validation, _bus, _processes, _scripted, _faults,
    _control, _entropy,
)
