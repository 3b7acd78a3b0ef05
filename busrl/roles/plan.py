"""The learner's decisions as a topology asks for them, for the live learner and for the simulated one. Pure."""

from __future__ import annotations

from busrl.scheduling.limits import Limits
from busrl.scheduling.plan import LearnerPlan
from busrl.scheduling.staleness import Staleness
from busrl.scheduling.trigger import Trigger
from busrl.topology import Topology


def make_plan(topology: Topology, limits: Limits, *, streaming: bool) -> LearnerPlan:
    """The decisions of this topology; with `forced_age` the age of a batch is the experiment, and no rule bounds it.

    `streaming`: micro-batches may run before the whole step is known.
    """
    trigger = topology.learner.trigger
    return LearnerPlan(
        limits,
        Trigger(
            trigger.n_min,
            limits.n_floor,
            trigger.t_max_s,
            sync=limits.sync,
            count_ended=trigger.count == "ended",
        ),
        Staleness(None if topology.experiments.forced_age else limits.max_staleness, topology.weights.over_age),
        streaming=streaming,
    )
