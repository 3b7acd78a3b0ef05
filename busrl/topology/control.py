"""What the controller's keys mean together: its thresholds, whether the batch can vary, and what contradicts itself.

Used by `resolve` and `rules`, and by the roles that count intervals. Pure: looks at a topology's settings only.

- Only in mode `act` do n_lo and n_hi enter the sums for B and W: a controller that does not act changes nothing.
- Settings of the other rule set are not looked at.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from busrl.scheduling.limits import derive
from busrl.topology.rules import Finding
from busrl.topology.schema import Controller, ControllerRules, Topology

HERE, RULES = "learner.controller", "experiments.controller"
KEYS = (f"{HERE}.mode", f"{HERE}.n_lo", f"{HERE}.n_hi")  # what the sums for B and W look at


def thresholds(t: Topology) -> tuple[int, int]:
    """(n_lo, n_hi) for the sums: what the controller may choose in mode `act`, else n_min."""
    n_min = t.learner.trigger.n_min
    low, high = range_of(t) if t.learner.controller.mode == "act" else (n_min, n_min)
    return min(low, n_min), max(high, n_min)  # a contradiction is told once, by `findings`


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


def explain(t: Topology) -> Iterator[str]:
    """What the controller may do, for `busrl check`."""
    c, rules, (low, high) = t.learner.controller, t.experiments.controller.rules, range_of(t)
    if c.mode == "act":
        yield f"controller: {rules} rules move n_min between {low} and {high}; n_lo and n_hi are in the sums above"
    elif c.mode == "advise":
        yield f"controller: {rules} rules advise (decisions.jsonl); n_min stays {t.learner.trigger.n_min}"
    if batch_varies(t):
        yield f"intervals of checkpoints and validation count {t.learner.trigger.n_min} groups as a step"


def findings(t: Topology) -> Iterator[Finding]:
    """What contradicts itself, or the rest of the topology."""
    c = t.learner.controller
    if c.mode == "off":
        return
    yield from _range(t, c)
    rules = t.experiments.controller
    yield from (_entropy if rules.rules == "entropy" else _full)(rules)
    if rules.rules == "full":
        yield from _noise(t, c)
        yield from _eta(t)
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
        rule = "low < high: entropy can not be below the one and above the other"
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


def _full(c: ControllerRules) -> Iterator[Finding]:
    pairs = (("gate_on", "gate_off"), ("collapse", "gate_on"), ("ess_low", "ess_safe"), ("k3_safe", "k3_high"))
    for low, high in pairs:
        if getattr(c, low) >= getattr(c, high):
            rule = f"{low} < {high}"
            yield Finding((f"{RULES}.{low}", f"{RULES}.{high}"), rule, f"raise {high}, or lower {low}")
    if c.shrink_at * c.grow >= 1 or c.grow_at * c.shrink <= 1:
        rule = "a move must not call for its opposite: shrink_at x grow < 1 < grow_at x shrink"
        yield Finding((f"{RULES}.grow", f"{RULES}.shrink", f"{RULES}.grow_at", f"{RULES}.shrink_at"), rule,
                      "the defaults are 1.25, 0.8, 1.5 and 0.67")  # fmt: skip


def _act(t: Topology, c: Controller) -> Iterator[Finding]:
    low, _ = range_of(t)
    if t.weights.mode == "sync":
        rule = "a synchronous round is n_min groups, all admitted together: there is nothing to move"
        yield Finding((f"{HERE}.mode", "weights.mode"), rule, 'mode = "advise", or weights.mode = "batch-async"')
    if t.learner.deterministic and t.experiments.controller.rules == "full":
        rule = "the full rules look at idle times, which depend on the machine"
        yield Finding((f"{RULES}.rules", "learner.deterministic"), rule, 'rules = "entropy", or deterministic = false')
    if t.learner.trigger.count == "ended":
        rule = "the controller moves the number of groups that are trained, not of those that ended"
        yield Finding((f"{HERE}.mode", "learner.trigger.count"), rule, 'count = "usable", or mode = "advise"')
    if t.learner.trigger.n_floor > low:
        rule = f"n_floor <= n_lo = {low}: the floor is what a step by time may make do with"
        yield Finding(("learner.trigger.n_floor", f"{HERE}.n_lo"), rule, "lower n_floor, or 0 for automatic")
    if t.learner.updates_per_batch > low:
        rule = f"mini-batches are whole groups, so a step of n_lo = {low} groups has at most {low} updates"
        yield Finding(("learner.updates_per_batch", f"{HERE}.n_lo"), rule, "lower updates_per_batch, or raise n_lo")


def _noise(t: Topology, c: Controller) -> Iterator[Finding]:
    """What keeps the noise scale from being measured, and so n_min from following it."""
    low = range_of(t)[0] if c.mode == "act" else t.learner.trigger.n_min
    if t.learner.updates_per_batch > 1:
        rule = "several updates per batch have no one gradient, so there is no noise scale for n_min to follow"
        keys = (f"{RULES}.rules", "learner.updates_per_batch")
        yield Finding(keys, rule, 'updates_per_batch = 1, or rules = "entropy"', warning=True)
    elif t.experiments.controller.noise_groups >= low:
        rule = f"two parts of a step are compared: one of {low} groups that arrive together is a single part"
        remedy = f"set it to {low // 2} or less" if low > 1 else "steps of 2 groups or more"
        yield Finding((f"{RULES}.noise_groups", f"{HERE}.n_lo", "learner.trigger.n_min"), rule, remedy, warning=True)


def _eta(t: Topology) -> Iterator[Finding]:
    """The range of the admission bound. Without `act` n_hi is not in the sums, and only max_staleness limits it."""
    (low, high), least = thresholds(t), t.experiments.controller.eta_min
    if t.weights.mode != "batch-async":
        if t.weights.mode == "fully-async" or least:
            rule = "without a staleness bound there is none to move: only n_min and the gate are"
            yield Finding((f"{RULES}.rules", "weights.mode"), rule, 'weights.mode = "batch-async"', warning=True)
        return
    bounds = derive(t.weights.mode, t.learner.trigger.n_min, t.weights.max_staleness, t.groups.size, low, high)
    if least > t.weights.max_staleness:
        rule = "eta_min <= max_staleness: the bound moves between the two"
        yield Finding((f"{RULES}.eta_min", "weights.max_staleness"), rule, "lower eta_min, or raise max_staleness")
    elif 0 < least < bounds.least_eta:
        rule = f"a step of n_hi = {high} groups needs an admission bound of {bounds.least_eta} steps of {low}"
        yield Finding((f"{RULES}.eta_min", f"{HERE}.n_hi"), rule, f"set it to {bounds.least_eta} or more, or 0")
