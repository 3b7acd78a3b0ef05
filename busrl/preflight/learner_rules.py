"""Rules about what is trained and when: loss, advantage, correction, optimiser, trigger and the entropy controller.

Looks at a topology's settings only, never at files or the machine.

- Only in mode `act` do the controller's n_lo and n_hi enter the sums for B and W.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

from busrl.algorithms import catalog, trained_parameters
from busrl.curve import NAME
from busrl.preflight.findings import Check, Clash, Finding, by_path, clashes, unlike
from busrl.topology.declare import items
from busrl.topology.kinds import ONE_COPY
from busrl.topology.learner import Learner, Value
from busrl.topology.schema import Topology

RATIO_LOSSES = tuple(name for name, facts in catalog.LOSS_FACTS.items() if facts.ratio)  # with a ratio that has a key
UNTAUGHT = tuple(name for name, facts in catalog.LOSS_FACTS.items() if not facts.teacher)
CONTROLLER, THRESHOLDS = "learner.controller", "experiments.controller"


def _has_teacher(t: Topology) -> bool:
    return bool(t.model.teacher or t.learner.teacher)


def _read_by_value_head(key: str, changed: Callable[[Topology], bool]) -> Clash:
    return Clash((key, "learner.advantage"), lambda t: changed(t) and t.learner.advantage != catalog.GAE,
                 'only a value head reads it; advantage = "gae" (recipe = "ppo" sets it), or remove it', warning=True)


def _never_with_ratio_one(key: str, changed: Callable[[Topology], object], text: str) -> Clash:
    return Clash(("learner.newest_ratio", key), lambda t: t.learner.newest_ratio == "one" and changed(t), text)


TABLE = (
    Clash(("learner.loss", "weights.mode", "learner.updates_per_batch"),
          lambda t: (
              t.learner.loss == "decoupled" and t.weights.mode != "sync" and t.learner.updates_per_batch == 1
              and t.learner.passes_per_batch == 1
          ),
          'with one update per batch the clip never acts; loss = "ppo_clip", mode = "sync", or updates_per_batch > 1',
          hidden=("learner.passes_per_batch",)),
    Clash(("learner.loss", "weights.mode", "learner.updates_per_batch"),
          lambda t: (
              t.learner.loss == "decoupled" and t.weights.mode == "sync" and t.learner.updates_per_batch == 1
              and t.learner.passes_per_batch == 1 and t.experiments.forced_age
          ),
          'with one update per batch the clip never acts; loss = "ppo_clip", or updates_per_batch > 1',
          hidden=("learner.passes_per_batch", "experiments.forced_age"), warning=True),
    Clash(
        ("learner.correction", "learner.loss", "learner.ratio"),
        lambda t: t.learner.correction != "none" and t.learner.loss in RATIO_LOSSES and t.learner.ratio == "behaviour",
        "the ratio to the recorded log-probabilities corrects for the engine already: a weight would count it twice; "
        'ratio = "proximal", or correction = "none"',
    ),
    Clash(("learner.correction", "learner.loss"),
          lambda t: t.learner.correction != "none" and t.learner.loss in ("dppo", "decoupled"),
          "this loss weighs the engine's log-probabilities by itself: the correction would count them twice; "
          'correction = "none", or another loss'),
    Clash(("learner.correction", "segments.loss"),
          lambda t: t.learner.correction != "none" and t.segments.loss == "pois",
          'pois hides what a correction is made of; correction = "none", or segments.loss = "behaviour"'),
    Clash(("learner.ratio", "learner.loss", "learner.updates_per_batch", "weights.mode", "learner.correction"),
          lambda t: (
              t.learner.ratio == "proximal" and t.learner.loss in RATIO_LOSSES and t.learner.updates_per_batch == 1
              and t.weights.mode != "sync" and t.learner.correction == "none" and t.learner.passes_per_batch == 1
          ),
          "with one update per batch every ratio to the proximal policy is 1, so nothing corrects for old samples; "
          'set a correction, ratio = "behaviour", or updates_per_batch > 1', hidden=("learner.passes_per_batch",)),
    Clash(("learner.ratio", "learner.updates_per_batch"),
          lambda t: (
              t.learner.ratio == "proximal" and t.learner.updates_per_batch == 1 and t.learner.loss in RATIO_LOSSES
              and t.learner.passes_per_batch == 1
          ),
          "with one update per batch every ratio is 1, so no clip can act; "
          'ratio = "behaviour", or updates_per_batch > 1',
          hidden=("learner.loss", "learner.passes_per_batch"), warning=True),
    _never_with_ratio_one("learner.ratio", lambda t: t.learner.ratio == "proximal",
                          'it is about the ratio to recorded log-probabilities; newest_ratio = "recorded"'),
    _never_with_ratio_one(
        "learner.updates_per_batch", lambda t: t.learner.updates_per_batch > 1,
        'after the first update the ratio to the newest weights is not 1 any more; newest_ratio = "recorded"',
    ),
    _never_with_ratio_one(
        "learner.passes_per_batch", lambda t: t.learner.passes_per_batch > 1,
        'after the first pass the ratio to the newest weights is not 1 any more; newest_ratio = "recorded"',
    ),
    _never_with_ratio_one("learner.correction", lambda t: t.learner.correction != "none",
                          "it hides from the correction what separates engine and trainer; "
                          'newest_ratio = "recorded", or correction = "none"'),
    _never_with_ratio_one("experiments.forced_age", lambda t: t.experiments.forced_age,
                          "published late, no version has the weights that are trained; forced_age = 0"),
    Clash(("learner.loss", "learner.aggregation"),
          lambda t: t.learner.loss == "gspo" and t.learner.aggregation == "token-mean",
          "a mean over tokens weighs samples by their length, and GSPO's ratio is of whole samples; "
          'aggregation = "seq-mean-token-mean"'),
    Clash(("learner.credit", "learner.advantage"),
          lambda t: (
              t.learner.credit == "turn" and t.learner.advantage not in ("group_std", "group_mean", "leave_one_out")
          ),
          "a turn is compared with those of the other episodes of its group; "
          'advantage = "group_std", "group_mean" or "leave_one_out", or credit = "episode"'),
    Clash(("learner.gamma", "learner.credit"), lambda t: t.learner.gamma < 1 and t.learner.credit == "episode",
          'an episode\'s turns share one reward; credit = "turn", or remove it', warning=True),
    Clash(("groups.size", "learner.advantage"),
          lambda t: t.groups.size == 1 and t.learner.advantage not in ("reward", "gae", "ema"),
          'a single answer has none to be compared with; size >= 2, or advantage = "ema", "gae" or "reward"'),
    Clash(("learner.kl", "learner.kl_coef"), lambda t: t.learner.kl != "none" and t.learner.kl_coef == 0,
          'the reference is computed and has no effect; kl_coef > 0, or kl = "none"', warning=True),
    Clash(("learner.kl_coef", "learner.kl"), lambda t: t.learner.kl_coef and t.learner.kl == "none",
          'no KL is computed; kl = "k3", or remove kl_coef'),
    Clash(("model.reference", "learner.kl"), lambda t: t.model.reference and t.learner.kl == "none",
          'nothing reads the reference; kl = "k3", or remove it', warning=True),
    Clash(("learner.loss", "model.teacher"), lambda t: t.learner.loss == "topk_kl" and not _has_teacher(t),
          'there is no teacher to learn from; set model.teacher to its folder'),
    Clash(("learner.teacher_coef", "model.teacher"), lambda t: t.learner.teacher_coef and not _has_teacher(t),
          'there is no teacher to learn from; set model.teacher to its folder, or teacher_coef = 0'),
    Clash(("learner.loss", "learner.teacher_coef"), lambda t: t.learner.loss == "topk_kl" and t.learner.teacher_coef,
          "this loss is the KL to the teacher already, and would count it twice; teacher_coef = 0"),
    Clash(("learner.loss", "learner.advantage"),
          lambda t: t.learner.loss == "topk_kl" and t.learner.advantage not in ("reward", "gae", "ema"),
          'it reads no advantage, and flat groups are set aside for want of one; advantage = "reward"', warning=True),
    Clash(("learner.loss", "learner.advantage"), lambda t: t.learner.loss == "topk_kl" and t.learner.advantage == "gae",
          'it reads no advantage, so a value head is trained for nothing; advantage = "reward"', warning=True),
    Clash(("model.teacher", "learner.teacher_coef"),
          lambda t: t.model.teacher and t.learner.teacher_coef == 0 and t.learner.loss in UNTAUGHT,
          'nothing reads the teacher; loss = "topk_kl", teacher_coef > 0, or remove it',
          hidden=("learner.loss",), warning=True),
    Clash(("learner.kl", "learner.kl_in"), lambda t: t.learner.kl == "k3_is" and t.learner.kl_in == "reward",
          'a reward has no gradient that k3_is could correct; kl = "k1", or kl_in = "loss"'),
    *(_read_by_value_head(key, changed) for key, changed in unlike("learner.value", Value)),
    Clash(("learner.length_norm", "learner.aggregation"),
          lambda t: t.learner.length_norm and t.learner.aggregation != "seq-mean-token-sum-norm",
          'only aggregation = "seq-mean-token-sum-norm" divides by it; remove it', warning=True),
    Clash(("generation.top_p",), lambda t: t.generation.top_p < 1,
          "the learner does not know which tokens top_p cut, so it cannot train on what was sampled; set it to 1.0"),
    Clash(("learner.updates_per_batch", "learner.trigger.n_min"),
          lambda t: t.learner.updates_per_batch > t.learner.trigger.n_min,
          "mini-batches are whole groups, so n_min groups have at most n_min updates; lower updates_per_batch"),
    Clash(("learner.micro_batch_tokens",), lambda t: t.learner.micro_batch_tokens < t.longest,
          lambda t: f"the longest sample ({t.longest} tokens) exceeds the budget; set it to {t.longest} or more",
          warning=True),
    Clash(("learner.trigger.t_max_s", "weights.mode"),
          lambda t: t.learner.trigger.t_max_s != math.inf and t.weights.mode == "sync",
          'a synchronous round ends with its groups, not by time; t_max_s = inf, or mode = "batch-async"'),
    Clash(("learner.trigger.t_max_s", "learner.deterministic"),
          lambda t: t.learner.trigger.t_max_s != math.inf and t.learner.deterministic,
          "a step that fires by time depends on the load of the machine; t_max_s = inf, or deterministic = false"),
    Clash(("learner.trigger.n_floor", "learner.trigger.n_min"),
          lambda t: t.learner.trigger.n_floor > t.learner.trigger.n_min,
          "n_floor <= n_min: the floor is what a step by time may make do with; lower n_floor, or 0 for automatic"),
    Clash(("learner.trigger.n_floor",), lambda t: t.learner.trigger.n_floor and t.learner.trigger.t_max_s == math.inf,
          "it is used by t_max_s only, which is inf; remove it, or set t_max_s",
          hidden=("learner.trigger.t_max_s",), warning=True),
    Clash(("learner.deterministic", "weights.mode"), lambda t: t.learner.deterministic and t.weights.mode != "sync",
          'weights arrive when the machine lets them, so runs differ; mode = "sync" for equal runs', warning=True),
    Clash(("experiments.forced_age", "weights.mode"), lambda t: t.experiments.forced_age and t.weights.mode != "sync",
          'an exact number of steps late is possible in rounds only; mode = "sync", or forced_age = 0'),
    Clash(("experiments.forced_age",), lambda t: t.experiments.forced_age and t.weights.mode == "sync",
          lambda t: f"an experiment: batches of age {t.experiments.forced_age}, in steps; 0 for real training",
          hidden=("weights.mode",), warning=True),
    Clash(("weights.window", "weights.mode"), lambda t: t.weights.window and t.weights.mode == "sync",
          'a round is trained whole, so its window is the round; remove it, or mode = "batch-async"', warning=True),
    Clash(("learner.checkpoint_mode", "lora.rank"), lambda t: t.learner.checkpoint_mode == "async" and t.lora.rank,
          'a checkpoint with an adapter is a folder that peft loads, written at once; checkpoint_mode = "auto"'),
    Clash(("learner.checkpoint_mode", "weights.transport"),
          lambda t: t.learner.checkpoint_mode == "async" and t.weights.transport == ONE_COPY,
          'the weights are the engine\'s, and could be gone before they are written; checkpoint_mode = "auto"'),
    Clash(("learner.start_optimizer", "learner.start_from"),
          lambda t: not t.learner.start_optimizer and not t.learner.start_from,
          "the run begins with model.path, which has no optimiser; set start_from, or remove it", warning=True),
    Clash(("weights.over_age", "weights.mode"),
          lambda t: t.weights.over_age == "drop" and t.weights.mode != "batch-async",
          "there is no staleness bound in this mode, so nothing is ever over age; remove it", warning=True),
    Clash(("learner.wal",), lambda t: t.learner.wal == "off",
          lambda t: (
              f"a crash rolls back up to checkpoint_every = {t.learner.checkpoint_every} steps (0 = all); "
              'wal = "async" costs almost nothing'
          ), warning=True),
    # -- experiments
    Clash(("mock.learner_s_per_token",), lambda t: t.mock.learner_s_per_token and not t.scripted,
          "an experiment: the learner is slowed down on purpose; 0 for real training", warning=True),
    # -- the controller
    Clash(("experiments.controller.high_t_max_s", "experiments.controller.low_t_max_s"),
          lambda t: (
              t.experiments.controller.high_t_max_s > t.experiments.controller.low_t_max_s
              and t.learner.controller.mode != "off"
          ),
          "high_t_max_s <= low_t_max_s: high entropy asks for steps more often; the defaults are 0.25 and 1",
          hidden=("learner.controller.mode",)),
    Clash(("learner.controller.mode", "weights.mode"),
          lambda t: t.learner.controller.mode == "act" and t.weights.mode == "sync",
          'a round is n_min groups: there is nothing to move; mode = "advise", or weights.mode = "batch-async"'),
    Clash(("learner.controller.mode", "learner.trigger.count"),
          lambda t: t.learner.controller.mode == "act" and t.learner.trigger.count == "ended",
          'it moves the number of groups trained, not ended; count = "usable", or mode = "advise"'),
)


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
    yield from _optimizer(t)


def _optimizer(t: Topology) -> Iterator[Finding]:
    learner, name = t.learner, "learner.optimizer"
    try:
        trained_parameters.parsed(learner.train_layers)
    except ValueError as wrong:
        yield Finding(("learner.train_layers",), str(wrong), 'for example "20-27, lm_head", or "" for all')
    if learner.optimizer.startswith("adamw"):
        if learner.options:
            rule = f"{learner.optimizer} takes none: its settings are learner.betas, eps and weight_decay"
            yield Finding(("learner.options", name), rule, "remove [learner.options]")
        return
    read = ("weight_decay",) if learner.optimizer == "adafactor" else ()
    for key, item in items(Learner).items():
        if key in ("betas", "eps", "weight_decay") and key not in read and getattr(learner, key) != item.default:
            rule = f"it is AdamW's, and {learner.optimizer} does not read it"
            yield Finding((f"learner.{key}", name), rule, "arguments stand in [learner.options]", warning=True)


# -- the controller -----

CONTROLLER_KEYS = tuple(f"{CONTROLLER}.{name}" for name in ("mode", "n_lo", "n_hi"))  # that sums for B and W look at


def thresholds(t: Topology) -> tuple[int, int]:
    """(n_lo, n_hi) for the sums: what the controller may choose in mode `act`, else n_min."""
    n_min = t.learner.trigger.n_min
    low, high = t.learner.n_range if t.learner.controller.mode == "act" else (n_min, n_min)
    return min(low, n_min), max(high, n_min)  # a contradiction is reported once, by `_controller`


def explain_controller(t: Topology) -> Iterator[str]:
    c, (low, high) = t.learner.controller, t.learner.n_range
    if c.mode == "act":
        yield f"controller: moves n_min between {low} and {high}; n_lo and n_hi are in the sums above"
    elif c.mode == "advise":
        yield f"controller: advises (decisions.jsonl); n_min stays {t.learner.trigger.n_min}"
    if t.learner.batch_varies:
        yield f"intervals of checkpoints and validation count {t.learner.trigger.n_min} groups as a step"


def _controller(t: Topology) -> Iterator[Finding]:
    n_min, (low, high), mode = t.learner.trigger.n_min, t.learner.n_range, t.learner.controller.mode
    if low > n_min and mode != "off":
        rule = f"n_lo <= n_min: the run starts with n_min = {n_min}"
        yield Finding((f"{CONTROLLER}.n_lo", "learner.trigger.n_min"), rule, f"set n_lo <= {n_min}, or 0 for n_min / 2")
    if high < n_min and mode != "off":
        rule = f"n_min <= n_hi: the run starts with n_min = {n_min}"
        yield Finding((f"{CONTROLLER}.n_hi", "learner.trigger.n_min"), rule, f"set n_hi >= {n_min}, or 0 for 2 x n_min")
    if t.learner.trigger.n_floor > low and mode == "act":
        rule = f"n_floor <= n_lo = {low}: the floor is what a step by time may make do with"
        yield Finding(("learner.trigger.n_floor", f"{CONTROLLER}.n_lo"), rule, "lower n_floor, or 0 for automatic")
    if t.learner.updates_per_batch > low and mode == "act":
        rule = f"mini-batches are whole groups, so a step of n_lo = {low} groups has at most {low} updates"
        keys = ("learner.updates_per_batch", f"{CONTROLLER}.n_lo")
        yield Finding(keys, rule, "lower updates_per_batch, or raise n_lo")


def _entropy(t: Topology) -> Iterator[Finding]:
    c, remedy = t.experiments.controller, "the defaults are 0.6 and 1.3"
    if t.learner.controller.mode == "off":
        return
    if not c.low < 1 < c.high:
        keys = (f"{THRESHOLDS}.low", f"{THRESHOLDS}.high")
        yield Finding(keys, "low < 1 < high: a run begins at H / H_ref = 1", remedy)
    elif c.low + c.hysteresis >= c.high - c.hysteresis:
        rule = f"low + hysteresis < high - hysteresis: the gap of {c.high - c.low:g} has no middle left"
        remedy = f"set hysteresis below {(c.high - c.low) / 2:g}"
        yield Finding((f"{THRESHOLDS}.hysteresis", f"{THRESHOLDS}.low", f"{THRESHOLDS}.high"), rule, remedy)


CHECKS: tuple[Check, ...] = (lambda t: clashes(t, TABLE), _training, _controller, _entropy)
