"""Rules between keys: combinations that cannot be run, and ones that deserve a warning.

One small function per subject, each yielding findings; `load` turns them into messages with places. What engines,
devices and weight transports need stands in `engine_rules`. Pure: looks at a topology's settings only, never at files
or the machine.

- A finding names every key it depends on, so that none is reported for a key whose own value is wrong already.
- Refused is what trains something else than was asked for, or can never make progress; the rest warns.
- Only in mode `act` do the controller's n_lo and n_hi enter the sums for B and W.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from busrl.config.reader import show
from busrl.config.schema import (
    FOREIGN_ROLES,
    IMPLIED_ROLES,
    SINGLE_ROLES,
    TINY,
    BusFault,
    Controller,
    ControllerRules,
    Process,
    Topology,
)
from busrl.config.values import FUNCTION
from busrl.faults import plan
from busrl.states import CRASH_POINTS

RESERVE_PROCESSES = 5  # table entries for entry 0, launch, a monitor, `busrl ring`, and one being replaced
MOST_SAMPLES = 1 << 32  # that a table of fates has room for: uids beyond it cannot be dispatched


@dataclass(frozen=True)
class Finding:
    """What is wrong with some keys together; the message stands at the first of them."""

    keys: tuple[str, ...]
    rule: str
    remedy: str
    warning: bool = False
    value: str = ""
    depends: tuple[str, ...] = ()  # further keys that the finding was computed from

    def shown(self, topology: Topology) -> str:
        """The keys with their values, unless the finding brings its own text."""
        return self.value or ", ".join(f"{key} = {show(lookup(topology, key))}" for key in self.keys)


Check = Callable[[Topology], Iterator[Finding]]


def lookup(topology: Topology, key: str) -> object:
    """The value of a dotted key; `process.0.count` counts entries."""
    value: object = topology
    for part in key.split("."):
        value = value[int(part)] if isinstance(value, tuple) else getattr(value, part)
    return value


def _loss(t: Topology) -> Iterator[Finding]:
    learner = t.learner
    stale = t.weights.mode != "sync"
    if learner.loss == "decoupled" and learner.updates_per_batch == 1 and (stale or t.experiments.forced_age):
        keys = ("learner.loss", "weights.mode", "learner.updates_per_batch")
        rule = "with one update per batch the proximal policy is the current one: the clip cannot act on stale samples"
        remedy = 'use loss = "ppo_clip", mode = "sync", or updates_per_batch > 1'
        yield Finding(keys, rule, remedy, warning=bool(t.experiments.forced_age))
    for path in learner.metrics:
        if not FUNCTION.fullmatch(path):
            rule = f"{path!r} names no function"
            yield Finding(("learner.metrics",), rule, 'for example metrics = ["metrics.py:measure"]')
    if t.generation.top_p < 1:
        rule = "the learner does not know which tokens top_p cut, so it cannot train on what was sampled"
        yield Finding(("generation.top_p",), rule, "set it to 1.0")
    if learner.updates_per_batch > learner.trigger.n_min:
        rule = "mini-batches are whole groups, so a step of n_min groups has at most n_min updates"
        yield Finding(("learner.updates_per_batch", "learner.trigger.n_min"), rule, "lower updates_per_batch")
    longest = t.max_prompt_tokens + t.generation.max_new_tokens
    if learner.micro_batch_tokens < longest:
        rule = f"the longest sample has {longest} tokens; each that exceeds the budget is a micro-batch of its own"
        yield Finding(("learner.micro_batch_tokens",), rule, f"set it to {longest} or more", warning=True)


def _trigger(t: Topology) -> Iterator[Finding]:
    trigger = t.learner.trigger
    timed = math.isfinite(trigger.t_max_s)
    if timed and t.weights.mode == "sync":
        rule = "a synchronous round ends when all its groups have ended, not by time"
        yield Finding(("learner.trigger.t_max_s", "weights.mode"), rule, 't_max_s = inf, or mode = "batch-async"')
    if timed and t.learner.deterministic:
        rule = "a step that fires by time depends on the load of the machine"
        keys = ("learner.trigger.t_max_s", "learner.deterministic")
        yield Finding(keys, rule, "t_max_s = inf, or deterministic = false")
    if trigger.n_floor > trigger.n_min:
        rule = "n_floor <= n_min: the floor is what a step by time may make do with"
        yield Finding(("learner.trigger.n_floor", "learner.trigger.n_min"), rule, "lower n_floor, or 0 for automatic")
    if trigger.n_floor and not timed:
        rule = "it is used by t_max_s only, which is inf"
        yield Finding(("learner.trigger.n_floor",), rule, "remove it, or set t_max_s", warning=True)


def _weights(t: Topology) -> Iterator[Finding]:
    weights, learner = t.weights, t.learner
    if learner.deterministic and weights.mode != "sync":
        rule = "when weights reach an engine depends on the machine, so two runs agree only in their order of training"
        yield Finding(("learner.deterministic", "weights.mode"), rule, 'mode = "sync" for equal runs', warning=True)
    if t.experiments.forced_age:
        yield from _forced_age(t)
    if weights.window and weights.mode == "sync":
        rule = "a round is trained whole, so its window is the round"
        yield Finding(("weights.window", "weights.mode"), rule, 'remove it, or mode = "batch-async"', warning=True)
    if weights.over_age == "drop" and weights.mode != "batch-async":
        rule = "there is no staleness bound in this mode, so nothing is ever over age"
        yield Finding(("weights.over_age", "weights.mode"), rule, "remove it", warning=True)
    if learner.wal == "off":
        rule = f"a crash rolls back up to checkpoint_every = {learner.checkpoint_every} steps (0 = all)"
        yield Finding(("learner.wal",), rule, 'wal = "async" costs almost nothing', warning=True)


def _forced_age(t: Topology) -> Iterator[Finding]:
    if t.weights.mode != "sync":
        rule = "weights can be published an exact number of steps late only in synchronous rounds"
        yield Finding(("experiments.forced_age", "weights.mode"), rule, 'mode = "sync", or forced_age = 0')
    else:
        rule = f"an experiment: every batch is made by weights {t.experiments.forced_age} steps old"
        yield Finding(("experiments.forced_age",), rule, "0 for real training", warning=True)


def _scheduler(t: Topology) -> Iterator[Finding]:
    scheduler, n_min = t.scheduler, t.learner.trigger.n_min
    ordered = scheduler.policy != "fifo"
    if scheduler.probe and not ordered:
        rule = "a probe shows how long its siblings will be, and fifo does not use that: they would only come later"
        yield Finding(("scheduler.probe", "scheduler.policy"), rule, 'probe = false, or policy = "adaptive"')
    if ordered and scheduler.horizon == 1:
        rule = f"{scheduler.policy} has nothing to choose from within a horizon of one draw"
        yield Finding(("scheduler.horizon", "scheduler.policy"), rule, f"0 for 2 x n_min = {2 * n_min}, or more")
    elif scheduler.policy == "adaptive" and t.weights.mode == "sync" and 0 < scheduler.horizon < n_min:
        rule = f"adaptive sorts a whole round, which has n_min = {n_min} draws"
        keys = ("scheduler.horizon", "scheduler.policy", "weights.mode", "learner.trigger.n_min")
        yield Finding(keys, rule, f"set it to {n_min} or more, or 0 for 2 x n_min")


def _predictor(t: Topology) -> Iterator[Finding]:
    engines = {entry.engine for entry in t.process if entry.role == "rollout"}
    if t.scheduler.predictor == "oracle" and engines != {"mock"}:
        rule = "the lengths of a real model's answers are not known beforehand: it is for the scripted engine"
        yield Finding(("scheduler.predictor",), rule, 'predictor = "blend"', depends=("process",))
    if t.scheduler.policy == "fifo" and (t.scheduler.predictor != "rules" or t.scheduler.keywords):
        rule = "fifo keeps the order drawn and uses no predictor"
        keys = ("scheduler.predictor" if t.scheduler.predictor != "rules" else "scheduler.keywords", "scheduler.policy")
        yield Finding(keys, rule, 'policy = "sjf", or remove it', warning=True)


def _segments(t: Topology) -> Iterator[Finding]:
    own = t.segments
    yield from _segment_sums(t) if own.on else _segments_off(t)
    if own.loss == "pois":
        yield from _pois(t)
    if own.rounds == "segments":
        yield from _waves(t)


def _segments_off(t: Topology) -> Iterator[Finding]:
    remedy = 'set segments.length to a number of tokens or "auto"'
    if t.segments.global_max_length:
        rule = "segments are off, so the limit of an answer is generation.max_new_tokens"
        yield Finding(("segments.global_max_length", "segments.length"), rule, f"{remedy}, or remove it")
    if t.segments.loss == "last_segment":
        rule = "segments are off: the last segment is the whole answer"
        yield Finding(("segments.loss", "segments.length"), rule, remedy, warning=True)


def _segment_sums(t: Topology) -> Iterator[Finding]:
    own, limit = t.segments, t.generation.max_new_tokens
    if own.global_max_length not in (0, limit):
        rule = "an answer has one limit, and both are given"
        yield Finding(("segments.global_max_length", "generation.max_new_tokens"), rule, "remove one of them")
        return
    named = "segments.global_max_length" if own.global_max_length else "generation.max_new_tokens"
    keys = ("segments.length", "segments.max_segments", named)
    if isinstance(own.length, int) and own.length * own.max_segments < limit:
        rule = f"{own.max_segments} segments of {own.length} tokens cannot reach the limit of {limit}"
        yield Finding(keys, rule, f"length >= {-(-limit // own.max_segments)}, or more segments")
    if isinstance(own.length, int) and own.length >= limit:
        rule = f"every answer ends within its first segment: the limit is {limit}"
        yield Finding(("segments.length", named), rule, "a shorter length, or 0 = off", warning=True)
    if own.length == "auto" and t.learner.deterministic:
        rule = "a length that follows the answers depends on who finished first"
        yield Finding(("segments.length", "learner.deterministic"), rule, "give a number, or deterministic = false")


def _waves(t: Topology) -> Iterator[Finding]:
    if not t.segments.on:
        rule = "segments are off: there is nothing that a round could be made of"
        yield Finding(("segments.rounds", "segments.length"), rule, 'set segments.length, or rounds = "answers"')
    if t.weights.mode != "sync":
        rule = "only synchronous steps have rounds; elsewhere nothing waits for a segment"
        yield Finding(("segments.rounds", "weights.mode"), rule, 'mode = "sync", or rounds = "answers"')
    if t.experiments.forced_age:
        rule = "an answer in several waves has tokens of several ages"
        yield Finding(("segments.rounds", "experiments.forced_age"), rule, 'forced_age = 0, or rounds = "answers"')
    if t.publish_every > 1:
        rule = "the next wave begins when what this one completed is published"
        rare = "learner.publish_every" if t.learner.publish_every > 1 else "weights.restart_every"
        yield Finding(("segments.rounds", rare), rule, f"{rare.partition('.')[2]} = 1", depends=("weights.transport",))
    if t.scheduler.probe:
        rule = "siblings would wait for a probe that gets its next segment in the next wave, which waits for them"
        yield Finding(("segments.rounds", "scheduler.probe"), rule, 'probe = false, or rounds = "answers"')
    if t.scheduler.ahead:
        rule = "a wave begins when all of its round is dispatched, so nothing is held back"
        yield Finding(("scheduler.ahead", "segments.rounds"), rule, "ahead = 0", warning=True)


def _pois(t: Topology) -> Iterator[Finding]:
    if t.weights.mode != "sync":
        rule = "with ratio 1 nothing corrects for old samples; measured: it does not learn at age 2"
        yield Finding(("segments.loss", "weights.mode"), rule, 'loss = "behaviour", or mode = "sync"')
    if t.learner.loss == "decoupled":
        rule = "the decoupled loss is made of the ratios that pois sets to 1"
        yield Finding(("segments.loss", "learner.loss"), rule, 'learner.loss = "ppo_clip"')
    if t.learner.updates_per_batch > 1:
        rule = "after the first update the ratio to the newest weights is not 1 any more"
        yield Finding(("segments.loss", "learner.updates_per_batch"), rule, "updates_per_batch = 1")


PLACEHOLDER = re.compile(r"\{[a-z_]+\}")
FILLED_AT_START = ("{run_dir}", "{name}")


def _reward(t: Topology) -> Iterator[Finding]:
    reward = t.reward
    if reward.kind == "python" and not FUNCTION.fullmatch(reward.function):
        rule = 'kind = "python" needs a function as package.module:name or file.py:name'
        yield Finding(("reward.function", "reward.kind"), rule, 'for example function = "rewards.py:score"')
    if reward.kind == "exact_match" and reward.function:
        rule = "exact_match calls no function"
        yield Finding(("reward.function", "reward.kind"), rule, 'set kind = "python", or remove function')
    if reward.extract:
        try:
            re.compile(reward.extract)
        except re.error as error:
            yield Finding(("reward.extract",), f"not a regular expression: {error}", "quote it as '...' in TOML")
        if reward.kind == "python":
            rule = "only exact_match extracts an answer"
            yield Finding(("reward.extract", "reward.kind"), rule, "remove it", warning=True)
    if reward.truncated != "reward" and reward.truncated_penalty:
        rule = "a cut answer is worth either a fixed number or its reward less a penalty"
        yield Finding(("reward.truncated", "reward.truncated_penalty"), rule, "remove one of them")


def _run(t: Topology) -> Iterator[Finding]:
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", t.run.name):
        rule = "a run's name is 1 to 64 letters, digits, dots, dashes or underscores: it names a directory"
        yield Finding(("run.name",), rule, 'for example "sort-lr3e-4"')


def _validation(t: Topology) -> Iterator[Finding]:
    on, asked = bool(t.validation.data), count(t, "validator") > 0
    other = 'set data to a file of prompts (those of training will do), or "tiny:sort"'
    if not on and t.validation.every:
        yield Finding(("validation.every",), "validation rounds are asked for, and no prompts are named", other)
    elif not on and asked:
        index = next(i for i, entry in enumerate(t.process) if entry.role == "validator")
        rule = "a validator is asked for, and validation.data names no prompts"
        yield Finding((f"process.{index}.role", "validation.data"), rule, other)
    elif on and not count(t, "validator"):
        rule = "no validator is started: its entry has count = 0"
        yield Finding(("validation.data",), rule, "remove that entry, or the file", warning=True)
    if on and t.validation.data == t.data.train and not t.data.train.startswith(TINY):
        yield Finding(("validation.data",), "these are the training prompts", "give it its own", warning=True)
    if on and count(t, "validator") and not wants_rounds(t):
        rule = "the validator has nothing to do: no round before, during or after the run"
        keys = ("validation.at_end", "validation.every", "validation.at_start")
        yield Finding(keys, rule, "set one, or remove data", warning=True)


TCP = re.compile(r"tcp://(\*|[0-9.]+|\[[0-9A-Fa-f:.]+\]|localhost):(\d{1,5})")


def _bus(t: Topology) -> Iterator[Finding]:
    if t.bus.endpoint == "ipc":
        if t.bus.keys:
            rule = "sockets in a 0700 directory need no keys, so they are not used"
            yield Finding(("bus.keys", "bus.endpoint"), rule, "remove it, or set endpoint", warning=True)
        return
    found = TCP.fullmatch(t.bus.endpoint)
    if found is None:
        rule = 'expected "ipc", or tcp://ADDRESS:PORT with a number of this machine, * for all of them, or localhost'
        yield Finding(("bus.endpoint",), rule, 'for example "tcp://0.0.0.0:5600"')
    elif not 1 <= int(found[2]) <= 65534:
        rule = "two ports are used, this one to publish and the next to subscribe"
        yield Finding(("bus.endpoint",), rule, "choose a port from 1 to 65534")


def _processes(t: Topology) -> Iterator[Finding]:
    for index, entry in enumerate(t.process):
        yield from _entry(t, index, entry)
    total = sum(entry.count for entry in t.process) + len(IMPLIED_ROLES) + RESERVE_PROCESSES
    if total > t.ring.processes:
        rule = f"{total} entries are needed: the processes, {len(IMPLIED_ROLES)} implied, {RESERVE_PROCESSES} spare"
        yield Finding(("ring.processes",), rule, f"set it to {total} or more")


def _entry(t: Topology, index: int, entry: Process) -> Iterator[Finding]:
    if entry.role in SINGLE_ROLES and sum(e.count for e in t.process[: index + 1] if e.role == entry.role) > 1:
        rule = f"one {entry.role} per run: it works alone under a lock"
        yield Finding((f"process.{index}.count", f"process.{index}.role"), rule, "set count = 1 and remove the others")
    if entry.command and entry.role not in FOREIGN_ROLES:
        rule = f"a {entry.role} is busrl's own; only rollout and reward may be another program"
        yield Finding((f"process.{index}.command", f"process.{index}.role"), rule, "remove command")
    unknown = [name for part in entry.command for name in PLACEHOLDER.findall(part) if name not in FILLED_AT_START]
    if unknown:
        rule = f"{unknown[0]} is not one of the words that are filled in: {', '.join(FILLED_AT_START)}, {{here}}"
        yield Finding((f"process.{index}.command",), rule, "correct it")


def _mock(t: Topology) -> Iterator[Finding]:
    if t.data.arrivals and t.data.shuffle:
        rule = "prompts arrive in the order of their lines"
        yield Finding(("data.arrivals", "data.shuffle"), rule, "set shuffle = false")
    if t.mock.learner_s_per_token and not t.scripted:
        rule = "an experiment: the learner is slowed down on purpose"
        yield Finding(("mock.learner_s_per_token",), rule, "0 for real training", warning=True)
    if not t.scripted:
        return
    at = next(f"process.{i}.engine" for i, entry in enumerate(t.process) if entry.engine == "mock")
    if count(t, "validator"):
        rule = "scripted answers are made up, so there is nothing to validate"
        yield Finding((at, "validation.data"), rule, "remove [validation]", value=f'{at} = "mock"')
    if t.weights.transport != "shm":
        rule = "a scripted engine follows the versions in shared memory"
        yield Finding((at, "weights.transport"), rule, 'set weights.transport = "shm"')
    if t.reward.kind == "exact_match" and t.reward.extract:
        rule = "the text of a scripted answer is the bare answer, or a wrong one: the pattern would find neither"
        yield Finding(("reward.extract", at), rule, "remove extract")
    rule = "nothing is learnt: token ids are drawn at random, lengths and rewards are those of data.train"
    yield Finding((at,), rule, 'engine = "torch" for training', warning=True)


def count(t: Topology, role: str) -> int:
    """How many processes of a role are started."""
    return sum(entry.count for entry in t.process if entry.role == role)


def wants_rounds(t: Topology) -> bool:
    """Whether any validation round is due in the run."""
    return t.validation.at_start or t.validation.every > 0 or t.validation.at_end


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
    for line in plan.describe(t.faults):
        yield Finding(("faults",), f"FAULTS ARE ON: {line}", "remove [faults] for real training", True, "[faults]")


def _passes(key: str, role: str, point: str) -> Iterator[Finding]:
    """A program of busrl must pass the point; what another program passes is not known."""
    passed_by = plan.PASSED_BY.get(point, ())
    if role and passed_by and role not in passed_by:
        near = [one for one, roles in plan.PASSED_BY.items() if role in roles]
        rule = f"a {role} never passes {point!r}, so it would never die there: {', '.join(passed_by)} do"
        yield Finding((key, key.replace(".point", ".process")), rule, f"for a {role} choose of {', '.join(near)}")


def _bus_fault(at: str, entry: BusFault) -> Iterator[Finding]:
    yield from _named(f"{at}.types", entry.types, plan.MESSAGES, "message")
    yield from _named(f"{at}.roles", entry.roles, plan.ENDS, "role with an end on the bus")
    if entry.at == plan.SENDER and (entry.duplicate or entry.delay_s or entry.reorder):
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


HERE, RULES = "learner.controller", "experiments.controller"
CONTROL_KEYS = (f"{HERE}.mode", f"{HERE}.n_lo", f"{HERE}.n_hi")  # what the sums for B and W look at


def thresholds(t: Topology) -> tuple[int, int]:
    """(n_lo, n_hi) for the sums: what the controller may choose in mode `act`, else n_min."""
    n_min = t.learner.trigger.n_min
    low, high = range_of(t) if t.learner.controller.mode == "act" else (n_min, n_min)
    return min(low, n_min), max(high, n_min)  # a contradiction is reported once, by `_range`


def range_of(t: Topology) -> tuple[int, int]:
    """(n_lo, n_hi) that the rules choose from, in every mode."""
    n_min, controller = t.learner.trigger.n_min, t.learner.controller
    return controller.n_lo or max(1, n_min // 2), controller.n_hi or 2 * n_min


def batch_varies(t: Topology) -> bool:
    """Whether steps can have other sizes than n_min: intervals then count groups."""
    return t.learner.controller.mode == "act" or math.isfinite(t.learner.trigger.t_max_s)


def due(interval: int, before: int, after: int) -> bool:
    """Whether a counter that went from `before` to `after` passed a multiple of `interval`; 0 = never."""
    return interval > 0 and after // interval > before // interval


def explain_control(t: Topology) -> Iterator[str]:
    """What the controller may do, for `busrl check`."""
    c, (low, high) = t.learner.controller, range_of(t)
    if c.mode == "act":
        yield f"controller: moves n_min between {low} and {high}; n_lo and n_hi are in the sums above"
    elif c.mode == "advise":
        yield f"controller: advises (decisions.jsonl); n_min stays {t.learner.trigger.n_min}"
    if batch_varies(t):
        yield f"intervals of checkpoints and validation count {t.learner.trigger.n_min} groups as a step"


def _control(t: Topology) -> Iterator[Finding]:
    """What contradicts itself, or the rest of the topology."""
    c = t.learner.controller
    if c.mode == "off":
        return
    yield from _range(t, c)
    yield from _entropy(t.experiments.controller)
    if c.mode == "act":
        yield from _act(t, c)


def _range(t: Topology, c: Controller) -> Iterator[Finding]:
    n_min, (low, high) = t.learner.trigger.n_min, range_of(t)
    if low > n_min:
        rule = f"n_lo <= n_min: the run starts with n_min = {n_min}"
        yield Finding((f"{HERE}.n_lo", "learner.trigger.n_min"), rule, f"set n_lo <= {n_min}, or 0 for n_min / 2")
    if high < n_min:
        rule = f"n_min <= n_hi: the run starts with n_min = {n_min}"
        yield Finding((f"{HERE}.n_hi", "learner.trigger.n_min"), rule, f"set n_hi >= {n_min}, or 0 for 2 x n_min")


def _entropy(c: ControllerRules) -> Iterator[Finding]:
    if c.low >= c.high:
        rule = "low < high: entropy cannot be below the one and above the other"
        yield Finding((f"{RULES}.low", f"{RULES}.high"), rule, "the defaults are 0.6 and 1.3")
    elif not c.low < 1 < c.high:
        rule = "low < 1 < high: a run begins at H / H_ref = 1"
        yield Finding((f"{RULES}.low", f"{RULES}.high"), rule, "the defaults are 0.6 and 1.3")
    elif c.low + c.hysteresis >= c.high - c.hysteresis:
        rule = f"low + hysteresis < high - hysteresis: the gap of {c.high - c.low:g} has no middle left"
        remedy = f"set hysteresis below {(c.high - c.low) / 2:g}"
        yield Finding((f"{RULES}.hysteresis", f"{RULES}.low", f"{RULES}.high"), rule, remedy)
    if c.high_t_max_s > c.low_t_max_s:
        rule = "high_t_max_s <= low_t_max_s: high entropy asks for steps more often"
        yield Finding((f"{RULES}.high_t_max_s", f"{RULES}.low_t_max_s"), rule, "the defaults are 0.25 and 1")


def _act(t: Topology, c: Controller) -> Iterator[Finding]:
    low, _ = range_of(t)
    if t.weights.mode == "sync":
        rule = "a synchronous round is n_min groups, all admitted together: there is nothing to move"
        yield Finding((f"{HERE}.mode", "weights.mode"), rule, 'mode = "advise", or weights.mode = "batch-async"')
    if t.learner.trigger.count == "ended":
        rule = "the controller moves the number of groups that are trained, not of those that ended"
        yield Finding((f"{HERE}.mode", "learner.trigger.count"), rule, 'count = "usable", or mode = "advise"')
    if t.learner.trigger.n_floor > low:
        rule = f"n_floor <= n_lo = {low}: the floor is what a step by time may make do with"
        yield Finding(("learner.trigger.n_floor", f"{HERE}.n_lo"), rule, "lower n_floor, or 0 for automatic")
    if t.learner.updates_per_batch > low:
        rule = f"mini-batches are whole groups, so a step of n_lo = {low} groups has at most {low} updates"
        yield Finding(("learner.updates_per_batch", f"{HERE}.n_lo"), rule, "lower updates_per_batch, or raise n_lo")


CHECKS: tuple[Check, ...] = (
    _run, _loss, _trigger, _weights, _scheduler, _predictor, _segments, _reward, _validation, _bus, _processes, _mock,
    _faults, _control,
)
