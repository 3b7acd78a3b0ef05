"""A rank of the learner other than 0: holds a part of the model, and does what rank 0 says.

Talks to the learner (`busrl.training.ranks`) and to its own entry of the ring, for the supervisor. It claims nothing
and decides nothing, and writes nothing but its part of a checkpoint; it knows nothing of groups, logs or versions.

- It ends when the learner has ended: on its word, or because its connection closed. A STOP on the bus is the learner's
  business, which still needs its ranks for the last checkpoint.
- Whatever goes wrong is told to the learner first; then it ends, and the supervisor ends the others.
"""

from __future__ import annotations

from busrl import device
from busrl.roles.actor import Actor
from busrl.training.forward import COMPILE_S
from busrl.training.ranks.builder import TeamSettings
from busrl.training.ranks.follower import Follower
from busrl.training.ranks.wire import ControlMessage
from busrl.training.trainer import TrainerSettings


class Rank(Actor):
    role = "rank"
    tick_s = 0.2

    def setup(self) -> None:
        device.keep_freed_memory()
        self.heard: ControlMessage | None = None
        where = device.choose(self.topology.device_of(self.name))
        team = TeamSettings.of(self.topology, self.paths.ranks, where)
        with self.activity("waits for the learner", self.topology.limits.ready_s):
            rank = int(self.name.partition("/")[2])
            self.follower = Follower(team, TrainerSettings.of(self.topology), rank, lambda: self.stopping)
        self.follower.on_progress = self.ring.progress

    def subscriptions(self) -> list[str]:
        return []

    def work(self) -> bool:
        heard, self.heard = self.heard, None
        if heard is None:
            return False
        limit = self.topology.limits.work_s
        if self.topology.learner.memory.compile:
            limit = max(limit, COMPILE_S)
        with self.activity(type(heard).__name__.lower(), limit):
            if not self.follower.act(heard):
                self.stop("the learner has ended")
        return True

    def idle(self, timeout_s: float) -> None:
        """Listen to the learner."""
        self.heard = self.follower.hear(timeout_s)

    def teardown(self) -> None:
        self.follower.close()
