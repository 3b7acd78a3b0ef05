"""Rules about prompts: the order of dispatch, segments, rounds of validation, and prompts that are left out.

Looks at a topology's settings only, never at files or the machine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from busrl.algorithms.catalog import LOSS_FACTS
from busrl.curve import NAME
from busrl.preflight.findings import Check, Clash, Finding, clashes
from busrl.states import TINY
from busrl.topology.kinds import FIFO, RESTARTS, SCRIPTED, SERVED, TOGETHER
from busrl.topology.schema import Topology
from busrl.topology.sizes import count, only_validate

OTHER_PROMPTS = 'set data to a file of prompts (those of training will do), or "tiny:sort"'
OPEN = "every prompt of an open stream is answered when it arrives"
# Losses without a ratio that pois could set to 1, or that choose tokens by it; the decoupled one has a row of its own.
WITHOUT_A_RATIO = tuple(
    name for name, facts in LOSS_FACTS.items() if (facts.chooses or not facts.ratio) and name != "decoupled"
)


def _unread(t: Topology) -> str:
    return f'{t.scheduler.policy} uses no predictor; policy = "sjf", or remove it'


def _never_with_pois(key: str, changed: Callable[[Topology], object], text: str) -> Clash:
    return Clash(("segments.loss", key), lambda t: t.segments.loss == "pois" and changed(t), text)


def _never_with_waves(
    key: str, changed: Callable[[Topology], object], text: str, hidden: tuple[str, ...] = ()
) -> Clash:
    return Clash(("segments.rounds", key), lambda t: t.segments.rounds == "segments" and changed(t), text, hidden)


TABLE = (
    # -- the order of dispatch
    Clash(("scheduler.predictor", "scheduler.policy"),
          lambda t: t.scheduler.predictor != "rules" and not t.scheduler.predicts,
          _unread, warning=True),
    Clash(("scheduler.keywords", "scheduler.policy"),
          lambda t: t.scheduler.keywords and not t.scheduler.predicts and t.scheduler.predictor == "rules",
          _unread, hidden=("scheduler.predictor",), warning=True),
    Clash(("scheduler.horizon", "scheduler.policy", "weights.mode", "learner.trigger.n_min"),
          lambda t: (
              t.scheduler.horizon > 1 and t.scheduler.policy == "adaptive" and t.weights.mode == "sync"
              and t.scheduler.horizon < t.learner.trigger.n_min
          ),
          lambda t: (
              f"adaptive sorts a whole round, which has n_min = {t.learner.trigger.n_min} draws; "
              f"set it to {t.learner.trigger.n_min} or more, or 0 for 2 x n_min"
          )),
    # -- segments
    Clash(("segments.global_max_length", "segments.length"),
          lambda t: t.segments.global_max_length and t.segments.length == 0,
          "segments are off, so generation.max_new_tokens is the limit; set segments.length, or remove it"),
    Clash(("segments.loss", "segments.length"), lambda t: t.segments.loss == "last_segment" and t.segments.length == 0,
          'segments are off: the last one is the whole answer; set segments.length, for example "auto"', warning=True),
    Clash(("segments.length", "learner.deterministic"),
          lambda t: t.segments.length == "auto" and t.learner.deterministic,
          "a length that follows the answers depends on who finished first; give a number, or deterministic = false"),
    _never_with_pois("weights.mode", lambda t: t.weights.mode != "sync",
                     'ratio 1 corrects nothing: at age 2 it does not learn; loss = "behaviour", or mode = "sync"'),
    _never_with_pois("learner.loss", lambda t: t.learner.loss == "decoupled",
                     'the decoupled loss is made of the ratios that pois sets to 1; learner.loss = "ppo_clip"'),
    _never_with_pois(
        "learner.loss", lambda t: t.learner.loss in WITHOUT_A_RATIO,
        'this loss has no ratio that pois could set to 1, or chooses tokens by it; learner.loss = "ppo_clip"',
    ),
    _never_with_pois("learner.updates_per_batch", lambda t: t.learner.updates_per_batch > 1,
                     "after the first update the ratio to the newest weights is not 1 any more; updates_per_batch = 1"),
    _never_with_pois("learner.passes_per_batch", lambda t: t.learner.passes_per_batch > 1,
                     "after the first pass the ratio to the newest weights is not 1 any more; passes_per_batch = 1"),
    _never_with_waves("segments.length", lambda t: t.segments.length == 0,
                      'segments are off, so a round has none; set segments.length, or rounds = "answers"'),
    _never_with_waves("weights.mode", lambda t: t.weights.mode != "sync",
                      'only synchronous steps have rounds; mode = "sync", or rounds = "answers"'),
    _never_with_waves("experiments.forced_age", lambda t: t.experiments.forced_age,
                      'an answer in several waves has tokens of several ages; forced_age = 0, or rounds = "answers"'),
    _never_with_waves("learner.publish_every", lambda t: t.learner.publish_every > 1,
                      "the next wave begins when what this one completed is published; publish_every = 1"),
    _never_with_waves(
        "weights.restart_every",
        lambda t: (
            t.weights.restart_every > 1 and t.learner.publish_every == 1 and t.weights.transport in RESTARTS
        ),
        "the next wave begins when what this one completed is published; restart_every = 1",
        hidden=("learner.publish_every", "weights.transport"),
    ),
    Clash(("scheduler.ahead", "segments.rounds"), lambda t: t.scheduler.ahead and t.segments.rounds == "segments",
          "a wave begins when all of its round is dispatched, so nothing is held back; ahead = 0", warning=True),
    # -- validation
    Clash(("validation.every",), lambda t: t.validation.every and not t.validation.data and not t.validation.set,
          f"validation rounds are asked for, and no prompts are named; {OTHER_PROMPTS}",
          hidden=("validation.data", "validation.set")),
    # -- prompts
    Clash(("data.arrivals", "data.shuffle"), lambda t: t.data.arrivals and t.data.shuffle,
          "prompts arrive in the order of their lines; set shuffle = false"),
    Clash(("data.arrivals", "data.skip.max_pass_rate"), lambda t: t.data.arrivals and t.data.skip.max_pass_rate > 0,
          f"{OPEN}; set max_pass_rate = 0"),
    Clash(("data.arrivals", "data.skip.min_pass_rate"), lambda t: t.data.arrivals and t.data.skip.min_pass_rate > 0,
          f"{OPEN}; set min_pass_rate = 0"),
    Clash(("data.skip.max_pass_rate", "data.skip.min_pass_rate"),
          lambda t: t.data.skip.max_pass_rate > 0 and t.data.skip.min_pass_rate >= t.data.skip.max_pass_rate,
          "no prompt is at least the one and below the other; lower min_pass_rate"),
)


def _scheduler(t: Topology) -> Iterator[Finding]:
    scheduler, n_min = t.scheduler, t.learner.trigger.n_min
    if scheduler.policy != FIFO and scheduler.horizon == 1:
        rule = f"{scheduler.policy} has nothing to choose from within a horizon of one draw"
        yield Finding(("scheduler.horizon", "scheduler.policy"), rule, f"0 for 2 x n_min = {2 * n_min}, or more")
    engines = {entry.engine for entry in t.process if entry.role == "rollout"}
    if scheduler.predictor == "oracle" and engines != {SCRIPTED}:
        rule = "the lengths of a real model's answers are not known beforehand: it is for the scripted engine"
        yield Finding(("scheduler.predictor",), rule, 'predictor = "blend"', depends=("process",))


def _segments(t: Topology) -> Iterator[Finding]:
    segments, limit = t.segments, t.generation.max_new_tokens
    if segments.on and segments.global_max_length not in (0, limit):
        rule = "an answer has one limit, and both are given"
        yield Finding(("segments.global_max_length", "generation.max_new_tokens"), rule, "remove one of them")
    elif segments.on and isinstance(segments.length, int):
        key = "segments.global_max_length" if segments.global_max_length else "generation.max_new_tokens"
        if segments.length * segments.max_segments < limit:
            rule = f"{segments.max_segments} segments of {segments.length} tokens cannot reach the limit of {limit}"
            remedy = f"length >= {-(-limit // segments.max_segments)}, or more segments"
            yield Finding(("segments.length", "segments.max_segments", key), rule, remedy)
        if segments.length >= limit:
            rule = f"every answer ends within its first segment: the limit is {limit}"
            yield Finding(("segments.length", key), rule, "a shorter length, or 0 = off", warning=True)


def _validation(t: Topology) -> Iterator[Finding]:
    prompts, has_validator = named_prompts(t), count(t, "validator") > 0
    if not t.validation.names_prompts and has_validator and not t.validation.every:
        index = next(i for i, entry in enumerate(t.process) if entry.role == "validator")
        rule = "a validator is asked for, and validation.data names no prompts"
        yield Finding((f"process.{index}.role", "validation.data"), rule, OTHER_PROMPTS)
    elif prompts and not has_validator:
        rule = "no validator is started: its entry has count = 0"
        yield Finding((next(iter(prompts)),), rule, "remove that entry, or the file", warning=True)
    elif prompts and not wants_rounds(t):
        rule = "the validator has nothing to do: no round before, during or after the run"
        keys = ("validation.at_end", "validation.every", "validation.at_start")
        yield Finding(keys, rule, "set one, or remove data", warning=True)
    for key, data in prompts.items():
        if data == t.data.train and not data.startswith(TINY):
            yield Finding((key,), "these are the training prompts", "give it its own", warning=True)
    for index in range(-bool(t.validation.data), len(t.validation.set)):
        yield from _set(t, index)
    yield from _dedicated(t)


def named_prompts(t: Topology) -> dict[str, str]:
    """The prompts of validation by the key that names them."""
    sets = {f"validation.set.{index}.data": named_set.data for index, named_set in enumerate(t.validation.set)}
    return {key: path for key, path in {"validation.data": t.validation.data, **sets}.items() if path}


def _set(t: Topology, index: int) -> Iterator[Finding]:
    at = f"validation.set.{index}" if index >= 0 else "validation"
    table = t.validation.set[index] if index >= 0 else t.validation

    def settled(name: str) -> tuple[str, Any]:
        """The key in force and its value: those of [validation] where the set leaves the key out."""
        value = getattr(table, name)
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
    if name in ["validation", *(earlier.name for earlier in t.validation.set[:index])]:
        rule = "another set has this name: validation is what [validation] itself measures, and no two may be alike"
        yield Finding((f"{at}.name",), rule, "give it its own")


def _dedicated(t: Topology) -> Iterator[Finding]:
    alone = [i for i, entry in enumerate(t.process) if entry.serves == "validation"]
    for index in alone:
        at = f"process.{index}.serves"
        if t.process[index].role != "rollout":
            yield Finding((at, f"process.{index}.role"), "only a rollout answers validation", "remove it")
        elif t.validation.mode != "dedicated" or not named_prompts(t):
            rule = "it would never get a task: nothing is kept for rollouts that only validate"
            yield Finding((at, "validation.mode"), rule, 'set validation.mode = "dedicated", with prompts')
        elif t.process[index].command:
            rule = "another program takes whatever is queued, and it does not keep to a version"
            yield Finding((at, f"process.{index}.command"), rule, "remove command, or serves")
    if t.validation.mode != "dedicated" or not named_prompts(t):
        return
    if not only_validate(t):
        rule = "no rollout is kept for validation"
        yield Finding(("validation.mode",), rule, 'add a [[process]] with role = "rollout", serves = "validation"',
                      depends=("process",))
    elif count(t, "rollout") == only_validate(t) and all(entry.count for entry in t.process if entry.role == "rollout"):
        rule = "every rollout only validates, so nothing is generated to train on"
        yield Finding(("validation.mode",), rule, 'add a [[process]] with role = "rollout"', depends=("process",))
    if t.weights.transport in TOGETHER:
        rule = "every engine takes part in each publication, so none can keep its version while training goes on"
        yield Finding(("validation.mode", "weights.transport"), rule, 'transport = "shm", or mode = "hold"')
    for index, entry in enumerate(t.process):
        if entry.role == "rollout" and entry.engine in SERVED:
            rule = "the server's weights change for all that ask it"
            yield Finding(("validation.mode", f"process.{index}.engine"), rule, 'mode = "hold" or "free"')
        if entry.role == "rollout" and entry.command:
            rule = "another program takes whatever is queued, also what is kept for rollouts that only validate"
            yield Finding((f"process.{index}.command", "validation.mode"), rule, 'mode = "hold" or "free"')


def wants_rounds(t: Topology) -> bool:
    validation = t.validation
    intervals = (validation.every, *(named_set.every_steps for named_set in validation.set))
    during = any(isinstance(steps, int) and steps > 0 for steps in intervals)
    return validation.at_start or during or validation.at_end


CHECKS: tuple[Check, ...] = (lambda t: clashes(t, TABLE), _scheduler, _segments, _validation)
