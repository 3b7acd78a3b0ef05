"""The parts that roles decide with, made of a topology: the order of dispatch, the learner's plan, when a checkpoint is
due.

Used by the scheduler, the learner and the validator, and by the simulator in their place. Pure: reads a topology that
was checked.

- Where the sizes of batches vary, intervals count groups: n_min groups are a step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from busrl.scheduling.admission import Staleness
from busrl.scheduling.dispatch import Policy, make_policy
from busrl.scheduling.trigger import LearnerPlan, Trigger

if TYPE_CHECKING:
    from busrl.scheduling.predictor import Predictor
    from busrl.topology import Topology


def policy_of(topology: Topology, predictor: Predictor) -> Policy:
    """The order of dispatch that [scheduler] names."""
    scheduler, derived = topology.scheduler, topology.derived
    return make_policy(
        scheduler.policy, derived.horizon, predictor, scheduler.aging, tail_share=scheduler.tail_share,
        window=derived.limits.W, group_size=topology.groups.size,
        round_groups=topology.learner.trigger.n_min if topology.weights.mode == "sync" else 0,
    )


def make_plan(topology: Topology, *, streamable: bool = True) -> LearnerPlan:
    """The learner's plan. With `forced_age` the age of a batch is the experiment, and no rule bounds it. `streamable`:
    a loss of the user's own, if there is one, may run on parts of a step."""
    config = topology.learner
    trigger, limits = config.trigger, topology.derived.limits
    fires = Trigger(
        trigger.n_min, limits.n_floor, trigger.t_max_s, sync=limits.sync, count_ended=trigger.count == "ended"
    )
    bound = None if topology.experiments.forced_age else limits.max_staleness
    return LearnerPlan(
        limits, fires, Staleness(bound, topology.weights.over_age),
        streaming=streamable and not config.deterministic and not config.held_back,
        trains_flat=config.trains_flat,
    )


def due(interval: int, before: int, after: int) -> bool:
    """True if a counter that went from `before` to `after` passed a multiple of `interval`; 0 = never."""
    return interval > 0 and after // interval > before // interval


def checkpoint_is_due(topology: Topology, step: int, total: int, groups: int) -> bool:
    """True if a checkpoint follows step `step`, which trained `groups` groups of `total` so far."""
    every = topology.learner.checkpoint_every
    if topology.learner.batch_varies:
        return due(every * topology.learner.trigger.n_min, total - groups, total)
    return due(every, step - 1, step)


def checkpoint_may_follow(topology: Topology, step: int, total: int) -> bool:
    """True if the step after `step` may be the run's last or one with a checkpoint; `total`: groups trained."""
    run, most = topology.run, topology.derived.limits.n_hi
    if step + 1 >= run.max_steps or 0 < run.max_groups <= total + most:
        return True
    return checkpoint_is_due(topology, step + 1, total + most, most)
