"""Publication: the learner's weights become the next version, in the weight plane, the ring's header and on the bus.

Talks to a weight sender, the ring's header and the bus. Knows nothing of how the weights came about.

Invariants:
- A version is raised at each publication and never used again, also after a restart: highest seen + 1.
- Nothing is published while a living validator holds the version; the wait names it.
- With `forced_age` k (experiments) the weights of k steps ago are published, so batches are trained k steps late.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from typing import TYPE_CHECKING

from busrl.protocol import messages as m
from busrl.ring import State
from busrl.roles import hold
from busrl.roles.actor import Actor
from busrl.weights import GroupChange, News, make_sender

if TYPE_CHECKING:
    from torch import Tensor

    from busrl.weights.folder_sender import Write

GROUPS_KEPT = 256


class Publisher:
    """Owns the sender. `version` and `step` are those of the newest publication."""

    def __init__(self, actor: Actor, forced_age: int, highest: int, write: Write | None = None) -> None:
        """`write` makes the files of a version, where the transport publishes folders."""
        self.actor, self.ring = actor, actor.ring
        # Filled by the thread of the sender.
        self._groups: deque[GroupChange] = deque(maxlen=GROUPS_KEPT)
        self._missing: deque[tuple[str, str]] = deque(maxlen=GROUPS_KEPT)
        news = News(self._groups.append, lambda name, text: self._missing.append((name, text)))
        self.sender = make_sender(actor.topology, actor.paths, news, write)
        self.sender.hook = lambda _: self.ring.progress()
        self._work_s = actor.topology.limits.work_s
        self.version = max(highest, self.ring.header("version"))
        self._late: deque[tuple[int, dict[str, Tensor]]] = deque(maxlen=forced_age + 1)

    def publish(self, step: int, weights: Mapping[str, Tensor]) -> float:
        """Make `weights` of `step` the next version. Returns the seconds it took, the hold left out."""
        if not self.sender.begun:  # behind a fence it was waited for already, and the engine waits
            self._wait_for_hold()
        begun = time.monotonic()
        step, weights = self._delayed(step, weights)
        version, named = self.next_version(), dict(weights)
        with self.actor.activity("publish", self._work_s):
            if not self.actor.until_written("publication", lambda: self.sender.publish(version, step, named)):
                return time.monotonic() - begun
        self.version = version
        # The step first: who reads the new version finds a step that is at least as new. (Who counts an age from them
        # reads the step first too: in between it takes a version for older than it is, never for newer.)
        self.ring.set_header("version_step", step)
        self.ring.set_header("version", self.version)
        self.ring.set_header("unpublished_groups", 0)
        self.actor.bus.send(
            m.WeightsPublished(version=self.version, step=step, transport=self.actor.topology.weights.transport)
        )
        return time.monotonic() - begun

    def next_version(self) -> int:
        """The version of the next publication: above all that were ever seen."""
        return max(self.version, self.ring.header("version")) + 1

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
        if not hold.holder(ring):
            return
        with self.actor.activity("held by validation", self._work_s + 30):
            while (holder := hold.holder(ring)) and not self.actor.stopping:
                if (collected := ring.transitions(State.TRAINING)) != seen:  # only the holder claims meanwhile
                    seen, limit = collected, time.monotonic() + self._work_s
                    ring.progress()
                elif time.monotonic() > limit:
                    who = hold.name_of(ring, holder)
                    self.actor.warn(
                        "learner", f"{who} holds the version and had no result for {self._work_s:g} s; going on"
                    )
                    return
                self.actor.idle(0.01)

    def close(self) -> None:
        self.sender.close()


def _copy(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in weights.items()}
