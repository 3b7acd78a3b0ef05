"""The learner's part where it trains the engine's own weights (`weights.transport = "cuda_ipc"`).

Talks to the sender of `busrl.weights.shared`, the trainer and the publisher. Knows nothing of groups or rewards.

- Steps that are trained again from the log are trained in a copy of the learner's own; the engine goes on meanwhile.
- Then, inside one fence, the engine's weights become those of the learner, and its parameters become views of them.
- From there on the optimiser steps inside a fence each; forward and backward only read, and pause nobody.

Publication: the learner's weights become the next version, in the weight plane, the ring's header and on the bus.

Talks to a weight sender, the ring's header and the bus. Knows nothing of how the weights came about.

Invariants:
- A version is raised at each publication and never used again, also after a restart: highest seen + 1.
- Nothing is published while a living validator holds the version; the wait names it.
- With `forced_age` k (experiments) the weights of k steps ago are published, so batches are trained k steps late.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import torch

from busrl.errors import UserError, WeightsOwnerLost
from busrl.protocol import messages as m
from busrl.ring import State
from busrl.roles import version_pin
from busrl.roles.actor import Actor
from busrl.states import HeaderWord
from busrl.weights.base import GroupCallbacks, GroupChange
from busrl.weights.factory import Settings, make_sender
from busrl.weights.shared import OneCopySender

if TYPE_CHECKING:
    from torch import Tensor

    from busrl.roles.learner.step import TrainingStep
    from busrl.weights.folders import Write



# -- The learner's part where it trains the engine's own weights (`weights.transport = "cuda_ipc"`) -------------------


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


# -- Publication: the learner's weights become the next version, in the weight plane, the ring's header and on ... ----


GROUPS_KEPT = 256


class Publisher:
    """Owns the sender. `version` and `step` are those of the newest publication."""

    def __init__(self, actor: Actor, forced_age: int, highest: int, write: Write | None = None) -> None:
        """`write` makes the files of a version, where the transport publishes folders."""
        self.actor, self.ring = actor, actor.ring
        # Filled by the thread of the sender.
        self._groups: deque[GroupChange] = deque(maxlen=GROUPS_KEPT)
        self._missing: deque[tuple[str, str]] = deque(maxlen=GROUPS_KEPT)
        callbacks = GroupCallbacks(self._groups.append, lambda name, text: self._missing.append((name, text)))
        self.sender = make_sender(Settings.of(actor.topology, actor.paths), callbacks, write)
        self.sender.hook = lambda _: self.ring.progress()
        self._work_s = actor.topology.limits.work_s
        self.version = max(highest, self.ring.header(HeaderWord.VERSION))
        self._late: deque[tuple[int, dict[str, Tensor]]] = deque(maxlen=forced_age + 1)

    def publish(self, step: int, weights: Mapping[str, Tensor]) -> float:
        """Make `weights` of `step` the next version. Returns the seconds it took, the hold left out."""
        if not self.sender.begun:  # behind a fence it was waited for already, and the engine waits
            self._wait_for_hold()
        begun = time.monotonic()
        step, weights = self._delayed(step, weights)
        version, named = self.next_version(), dict(weights)
        with self.actor.activity("publish", self._work_s):
            if not self.actor.write_or_wait("publication", lambda: self.sender.publish(version, step, named)):
                return time.monotonic() - begun
        self.version = version
        # The step first: who reads the new version finds a step that is at least as new. (Who counts an age from them
        # reads the step first too: in between it takes a version for older than it is, never for newer.)
        self.ring.set_header(HeaderWord.VERSION_STEP, step)
        self.ring.set_header(HeaderWord.VERSION, self.version)
        self.ring.set_header(HeaderWord.UNPUBLISHED_GROUPS, 0)
        self.actor.bus.send(
            m.WeightsPublished(version=self.version, step=step, transport=self.actor.topology.weights.transport)
        )
        return time.monotonic() - begun

    def next_version(self) -> int:
        """The version of the next publication: above all that were ever seen."""
        return max(self.version, self.ring.header(HeaderWord.VERSION)) + 1

    def fence(self, step: int) -> None:
        """Before the engine's own weights are changed to those of `step`: it is paused until they are published."""
        self._wait_for_hold()
        self.sender.begin(self.next_version(), step)

    def check(self) -> None:
        """WeightsOwnerLost if the weights lie in the memory of a process that is gone; nothing where they are ours."""
        self.sender.check()

    def announce(self) -> None:
        """Say on the bus which engines were left out and which groups were formed since the last call."""
        while self._missing:
            name, text = self._missing.popleft()
            self.actor.warn("weights", f"{text}; going on without it", kind=f"{name} is left out")
        while self._groups:
            change = self._groups.popleft()
            self.actor.bus.send(
                m.WeightsGroup(epoch=change.epoch, members=list(change.members), why=change.why[: m.MAX_ACTIVITY])
            )

    def remember(self, step: int, weights: Mapping[str, Tensor]) -> None:
        """With `forced_age`: these are the weights that engines have now, without a publication."""
        self._late.append((step, _copy(weights)))

    def _delayed(self, step: int, weights: Mapping[str, Tensor]) -> tuple[int, Mapping[str, Tensor]]:
        if self._late.maxlen == 1:
            return step, weights
        self._late.append((step, _copy(weights)))
        return self._late[0]

    def _wait_for_hold(self) -> None:
        """Let a validation round finish on its version, however long it takes while results come. A dead holder is
        passed over, one without results is named."""
        ring, seen = self.ring, -1
        if not version_pin.pinned_by(ring):
            return
        with self.actor.activity("held by validation", self._work_s + 30):
            while (holder := version_pin.pinned_by(ring)) and not self.actor.stopping:
                if (collected := ring.transitions(State.TRAINING)) != seen:  # only the holder claims meanwhile
                    seen, limit = collected, time.monotonic() + self._work_s
                    ring.progress()
                elif time.monotonic() > limit:
                    who = version_pin.name_of(ring, holder)
                    self.actor.warn(
                        "learner", f"{who} holds the version and had no result for {self._work_s:g} s; going on"
                    )
                    return
                self.actor.idle(0.01)

    def close(self) -> None:
        self.sender.close()


def _copy(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in weights.items()}
