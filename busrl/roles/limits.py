"""The admission limits of a topology, as scheduler and learner both need them, and its controller's bounds. Pure."""

from __future__ import annotations

from busrl.scheduling.control import ControlSettings
from busrl.scheduling.limits import Limits, derive
from busrl.topology import Topology
from busrl.topology.control import range_of, thresholds


def admission_limits(topology: Topology) -> Limits:
    """B, W and the thresholds that follow from mode, n_min, max_staleness, controller and group size."""
    trigger, (low, high) = topology.learner.trigger, thresholds(topology)
    return derive(
        topology.weights.mode, trigger.n_min, topology.weights.max_staleness, topology.groups.size, low, high,
        trigger.n_floor, topology.weights.window, topology.segments.waves,
    )  # fmt: skip


def control_settings(topology: Topology) -> ControlSettings | None:
    """The settings of the controller, None if it is off. Without `act` the bound it may advise has the same range."""
    controller, trigger = topology.learner.controller, topology.learner.trigger
    if controller.mode == "off":
        return None
    low, high = range_of(topology)
    bound = topology.weights.max_staleness if topology.weights.mode == "batch-async" else None
    least = topology.derived.eta_min
    return ControlSettings.of(
        controller, topology.experiments.controller, n_min=trigger.n_min, n_lo=low, n_hi=high,
        t_max_ms=1000 * trigger.t_max_s,
        eta_min=least if bound is None else min(least, bound), eta_max=bound,
    )  # fmt: skip
