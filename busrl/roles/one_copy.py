"""The learner's part where it trains the engine's own weights (`weights.transport = "cuda_ipc"`).

Talks to the sender of `busrl.weights.one_copy`, the trainer and the publisher. Knows nothing of groups or rewards.

- Steps that are trained again from the log are trained in a copy of the learner's own; the engine goes on meanwhile.
- Then, inside one fence, the engine's weights become those of the learner, and its parameters become views of them.
- From there on the optimiser steps inside a fence each; forward and backward only read, and pause nobody.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from busrl.errors import UserError, WeightsOwnerLost
from busrl.weights.one_copy import OneCopySender

if TYPE_CHECKING:
    from busrl.roles.publish import Publisher
    from busrl.roles.training_step import TrainingStep

log = logging.getLogger("busrl")
Views = dict[str, torch.Tensor]


def join(publisher: Publisher, training: TrainingStep, step: Callable[[], int]) -> bool:
    """Make the engine's weights the trainer's; `step()` is the learner's step. False if told to stop meanwhile.

    In a fresh run both have loaded the same folder, which is checked; else the engine is given the learner's, and is
    paused until the caller publishes them.
    """
    sender, actor = publisher.sender, publisher.actor
    assert isinstance(sender, OneCopySender)
    limit_s = actor.topology.limits.ready_s
    deadline = time.monotonic() + limit_s
    while True:
        left_s = max(0.0, deadline - time.monotonic())
        try:
            views = sender.connect(training.weights(), training.device, left_s, lambda: actor.stopping)
            if views is None:
                return False
            if step() or publisher.version:
                sender.begin(publisher.next_version(), step())
                sender.write(training.weights())
            else:
                _check_equal(views, training.weights())
            sender.check()
            break
        except WeightsOwnerLost as problem:  # it was restarted while we found it: its successor shares its own
            log.info("looks for the engine's weights again: %s", problem)
    _adopt(publisher, training, views, step)
    return True


def _adopt(publisher: Publisher, training: TrainingStep, views: Views, step: Callable[[], int]) -> None:
    if all(views[name].dtype == tensor.dtype for name, tensor in training.weights().items()):
        training.adopt(views)
        training.before_update = lambda: publisher.fence(step() + 1)
        log.info("trains the engine's own weights: %d tensors, one copy", len(views))
    else:
        log.info("copies its float32 weights into the engine's at each publication: %d tensors", len(views))


def _check_equal(views: Views, own: Views) -> None:
    for name, tensor in own.items():
        if not torch.equal(views[name], tensor.to(views[name].dtype)):
            raise UserError(
                f"weights: {name!r} of the engine is not what this learner has loaded; both must load the same "
                "model.path, and nothing may change the engine's weights"
            )
