"""When a checkpoint is due: after which step the learner writes one, and before which step that can be foreseen.

Pure: looks at a topology and at counts. Used by the learner (writes) and by the scheduler (has what it knows on disk in
time). Knows nothing of what a checkpoint holds.
"""

from __future__ import annotations

from busrl.topology import Topology
from busrl.topology.control import batch_varies, due


def checkpoint_is_due(topology: Topology, step: int, total: int, groups: int) -> bool:
    """After step `step` of `groups` groups, `total` in all. Where the batch can vary n_min groups count as a step."""
    every = topology.learner.checkpoint_every
    if batch_varies(topology):
        return due(every * topology.learner.trigger.n_min, total - groups, total)
    return due(every, step - 1, step)


def checkpoint_may_follow(topology: Topology, step: int, total: int) -> bool:
    """Whether the step after `step` may be the run's last or one with a checkpoint; `total`: groups trained so far."""
    run, most = topology.run, topology.derived.n_hi
    if step + 1 >= run.max_steps or 0 < run.max_groups <= total + most:
        return True
    return checkpoint_is_due(topology, step + 1, total + most, most)
