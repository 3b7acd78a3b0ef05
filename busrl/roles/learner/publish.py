"""Publication: the learner's weights become the next policy version, in the weight plane, the ring and on the bus.

Talks to a weight sender, the ring's header and the bus; with `weights.transport = "cuda_ipc"` also to the engine, whose
own weights are trained then (`join_engine`). Knows nothing of groups or rewards.

- Each publication has a new version, also after a restart: the highest seen + 1.
- Nothing is published while a living validator holds the version; the wait names it.
- One copy of the weights: a replay of the log trains a copy of the learner's. Then, inside one fence, the learner's
  weights are written into the engine's, and the learner's parameters become views of these. From there on each
  optimiser step has a fence; forward and backward only read, and pause no engine.
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
from busrl.weights.base import GroupCallbacks, GroupChange, SharedSender, Write
from busrl.weights.factory import TransportSettings, make_sender
from busrl.weights.tensors import described

if TYPE_CHECKING:
    from torch import Tensor

    from busrl.roles.learner.models import Models

log = logging.getLogger("busrl")
Views = dict[str, torch.Tensor]
GROUPS_KEPT = 256
HOLD_LOOK_S = 0.01


class Hold:
    """The hold of a validation round on the version: it lasts while results come. A holder that had none for
    `limits.work_s` is named, and waited for no longer. Rollouts that only validate keep their version by themselves."""

    def __init__(self, actor: Actor) -> None:
        self._actor, self._work_s = actor, actor.topology.limits.work_s
        self.claimed, self._seen, self._limit = 0, (0, 0), 0.0

    def lasts(self) -> bool:
        """Tell whether the version is held; asked again and again while it is."""
        ring, now = self._actor.ring, time.monotonic()
        holder = 0 if self._actor.topology.dedicated else version_pin.pinned_by(ring)
        if not holder:
            self._seen = (0, 0)  # the next hold is another, also one of the same holder
            return False
        self.claimed = ring.transitions(State.TRAINING)  # only the holder claims meanwhile
        collected = self.claimed + version_pin.results_of(ring, holder)
        if (holder, collected) != self._seen:
            self._seen, self._limit = (holder, collected), now + self._work_s
            self._actor.shown.progress()
        elif self._limit and now > self._limit:
            self._limit, name = 0.0, version_pin.name_of(ring, holder)
            waited = f"had no result for {self._work_s:g} s; publishing without it"
            self._actor.warn("learner", f"{name} holds the version and {waited}")
        return self._limit > 0.0


class Publisher:
    """Owns the sender. `version` and `step` are those of the newest publication."""

    def __init__(self, actor: Actor, highest: int, write: Write | None = None) -> None:
        """`write` makes the files of a version, where the transport publishes folders."""
        self.actor, self.ring = actor, actor.ring
        # Filled by the thread of the sender.
        self._groups: deque[GroupChange] = deque(maxlen=GROUPS_KEPT)
        self._missing: deque[tuple[str, str]] = deque(maxlen=GROUPS_KEPT)
        callbacks = GroupCallbacks(self._groups.append, lambda name, text: self._missing.append((name, text)))
        self.sender = make_sender(TransportSettings.of(actor.topology, actor.paths), callbacks, write)
        self.sender.hook = lambda _: actor.shown.progress()
        self._work_s, self._hold = actor.topology.limits.work_s, Hold(actor)
        self.version = max(highest, self.ring.header(HeaderWord.VERSION))
        # `experiments.forced_age` = k: the weights of k steps ago are published.
        late = actor.topology.experiments.forced_age
        self._late: deque[tuple[int, dict[str, Tensor]]] | None = deque(maxlen=late + 1) if late else None

    def publish(self, step: int, weights: Mapping[str, Tensor], wait: bool = True) -> float:
        """Make `weights` of `step` the next version. Returns the seconds it took, without the wait for a validator;
        `wait` False: the caller has looked (`still_held`), and a round that began since is not waited for."""
        if wait and not self.sender.engines_paused:  # `fence` has waited already, and keeps the engine paused
            self._wait_while_held()
        begun = time.monotonic()
        if self._late is not None:
            self._late.append((step, _copies(weights)))
            step, weights = self._late[0]
        version, tensors = self.next_version(), weights if described(weights) is not weights else dict(weights)
        with self.actor.activity("publish", self._work_s):
            if not self.actor.write_or_wait("publication", lambda: self.sender.publish(version, step, tensors)):
                return time.monotonic() - begun
        self.version, self._hold = version, Hold(self.actor)
        # The step first: a reader of the new version finds a step that is at least as new. (A reader that counts ages
        # also reads the step first: in between it takes a version for older than it is, never for newer.)
        self.ring.set_header(HeaderWord.VERSION_STEP, step)
        self.ring.set_header(HeaderWord.VERSION, self.version)
        self.ring.set_header(HeaderWord.UNPUBLISHED_GROUPS, 0)
        self.actor.bus.send(
            m.WeightsPublished(
                version=self.version, step=step, transport=self.actor.topology.weights.transport,
                model=m.of_model(self.actor.topology.beside),
            )
        )
        return time.monotonic() - begun

    def present(self, step: int) -> int | None:
        """The version with the weights of `step`, the newest; None while they are not published, or published late."""
        return self.version if self.ring.header(HeaderWord.VERSION_STEP) == step else None

    def next_version(self) -> int:
        """The version of the next publication: above all versions so far."""
        return max(self.version, self.ring.header(HeaderWord.VERSION)) + 1

    def fence(self, step: int) -> None:
        """Pause the engine before its weights are changed to those of `step`, until they are published."""
        self._wait_while_held()
        self.sender.pause_engines(self.next_version(), step)

    def still_held(self) -> bool:
        """Look whether a round of validation holds the version; never once `fence` has paused the engine. Names the
        holder of a hold that is over although it was not released."""
        return not self.sender.engines_paused and self._hold.lasts()

    def announce(self) -> None:
        """Report on the bus which engines were left out and which groups were formed since the last call."""
        while self._missing:
            name, text = self._missing.popleft()
            self.actor.warn("weights", f"{text}; the run continues without it", kind=f"{name} is left out")
        while self._groups:
            change = self._groups.popleft()
            self.actor.bus.send(
                m.WeightsGroup(
                    epoch=change.epoch, members=list(change.members), why=change.why[: m.MAX_ACTIVITY],
                    model=m.of_model(self.actor.topology.beside),
                )
            )

    def start_fresh(self, weights: Callable[[], Mapping[str, Tensor]]) -> None:
        """A fresh run: engines have these weights without a publication."""
        if self._late is not None:
            self._late.append((0, _copies(weights())))

    def _wait_while_held(self) -> None:
        """Wait for a validation round to finish on its version."""
        if not self._hold.lasts():
            return
        with self.actor.activity(version_pin.HELD, self._work_s + 30):
            while self._hold.lasts() and not self.actor.stopping:
                self.ring.wait(State.TRAINING, self._hold.claimed, HOLD_LOOK_S)


def _copies(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in weights.items()}


# -- one copy of the weights ----------------------------------------------------


class UpdateFence:
    """Called before each update of the weights; pauses the engine, once the weights are the engine's too."""

    def __init__(self) -> None:
        self._pause: Callable[[], None] | None = None

    def raise_by(self, pause: Callable[[], None]) -> None:
        """Call this from now on."""
        self._pause = pause

    def __call__(self) -> None:
        if self._pause is not None:
            self._pause()


def join_engine(publisher: Publisher, models: Models, fence: UpdateFence, step: Callable[[], int]) -> bool:
    """Make the engine's weights the trainer's; `step()` is the learner's step. False if stopped meanwhile.

    In a fresh run both have loaded the same folder, which is checked. Else the learner's weights are written into the
    engine's, and the engine is paused until the caller publishes them.
    """
    sender, actor = publisher.sender, publisher.actor
    assert isinstance(sender, SharedSender)
    limit_s = actor.topology.limits.ready_s
    deadline = time.monotonic() + limit_s
    while True:
        left_s = max(0.0, deadline - time.monotonic())
        try:
            views = sender.connect(models.weights(), models.device, left_s, lambda: actor.stopping)
            if views is None:
                return False
            if step() or publisher.version or models.from_elsewhere:
                sender.pause_engines(publisher.next_version(), step())
                sender.write(models.weights())
            else:
                _check_equal(views, models.weights())
            sender.check()
            break
        except WeightsOwnerLost as problem:  # the engine was restarted meanwhile: its successor shares other weights
            log.info("looks for the engine's weights again: %s", problem)
    _adopt(publisher, models, fence, views, step)
    return True


def _adopt(
    publisher: Publisher, models: Models, fence: UpdateFence, views: Views, step: Callable[[], int]
) -> None:
    if all(views[name].dtype == tensor.dtype for name, tensor in models.weights().items()):
        models.adopt(views)
        fence.raise_by(lambda: publisher.fence(step() + 1))
        log.info("trains the engine's own weights: %d tensors, one copy", len(views))
    else:
        log.info("copies its weights into the engine's, of another type, at each publication: %d tensors", len(views))


def _check_equal(views: Views, weights: Mapping[str, Tensor]) -> None:
    for name, tensor in weights.items():
        if not torch.equal(views[name], tensor.to(views[name].dtype)):
            raise UserError(
                f"weights: {name!r} of the engine is not what this learner has loaded; both must load the same "
                "model.path, and nothing may change the engine's weights"
            )
