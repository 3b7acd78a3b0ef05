"""The admission limits of a topology, as scheduler and learner both need them. Pure."""

from __future__ import annotations

from busrl.scheduling.limits import Limits, derive
from busrl.topology import Topology


def admission_limits(topology: Topology) -> Limits:
    """B, W and the thresholds that follow from mode, n_min, max_staleness and the group size."""
    trigger = topology.learner.trigger
    return derive(
        topology.weights.mode,
        trigger.n_min,
        topology.weights.max_staleness,
        topology.groups.size,
        n_floor=trigger.n_floor,
        waves=topology.segments.waves,
    )
