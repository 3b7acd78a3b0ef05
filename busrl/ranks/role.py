"""The process of a rank of the learner other than 0: holds a part of the model, and executes the messages of rank 0.

Talks to the learner (`busrl.ranks`), to its own entry of the ring, for the supervisor, and on another host to
home's relay, which has the address of the learner. It claims nothing, decides nothing, and writes only its part of a
checkpoint; it knows nothing of groups, logs or versions.

- It ends with the learner: by Leave, or because the connection closed. It ignores a STOP on the bus: the learner still
  needs its ranks for the last checkpoint.
- A failure is sent to the learner first; then the rank ends, and the supervisor ends the others.
- On another host it waits for a learner as long as the host works for the run. If its team ends for a reason elsewhere,
  that is no death of this rank: home counts those.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Iterator

from busrl.bus.addresses import relay_endpoint
from busrl.data.pretrained import import_classes
from busrl.errors import TEAM_ENDED, PeerLost, RankLost
from busrl.ranks import mesh
from busrl.ranks.builder import TeamSettings
from busrl.ranks.follower import Follower
from busrl.ranks.meeting import Away, Place
from busrl.ranks.wire import ControlMessage
from busrl.roles.actor import Actor
from busrl.system import device
from busrl.topology import Topology
from busrl.training.forward import COMPILE_S
from busrl.training.settings import TrainerSettings
from busrl.weights.tensors import fingerprint

log = logging.getLogger("busrl")
ASK_S = 2.0


def import_all(topology: Topology, name: str) -> None:
    """Import what `setup` imports: the model's class."""
    import_classes(topology.model.path)


class Rank(Actor):
    role = "rank"
    warm = staticmethod(import_all)
    tick_s = 0.2

    def main(self) -> int:
        try:
            return super().main()
        except Exception as problem:
            if not self.topology.here or not (isinstance(problem, RankLost) or mesh.of_a_peer(problem)):
                raise
            log.info("ends with its team: %s", problem)
            return TEAM_ENDED

    def setup(self) -> None:
        device.keep_freed_memory()
        self.message: ControlMessage | None = None
        where = device.choose(self.topology.device_of(self.name))
        team = TeamSettings.of(self.topology, self.paths, where, fingerprint)
        rank, waits_s = int(self.name.partition("/")[2]), math.inf if self.topology.here else team.waits_s
        with self.activity("waits for the learner", waits_s), home_of(self) as home:
            settings = TrainerSettings.of(self.topology)
            self.follower = Follower(team, settings, rank, self.awaited, home, self.ring.progress)

    def subscriptions(self) -> list[str]:
        return []

    def work(self) -> bool:
        message, self.message = self.message, None
        if message is None:
            return False
        limit = self.topology.limits.work_s
        if self.topology.learner.memory.compile:
            limit = max(limit, COMPILE_S)
        with self.activity(type(message).__name__.lower(), limit):
            if not self.follower.act(message):
                self.stop("the learner has ended")
        return True

    def idle(self, timeout_s: float) -> None:
        self.message = self.follower.receive(timeout_s)

    def teardown(self) -> None:
        self.follower.close()


@contextlib.contextmanager
def home_of(actor: Actor) -> Iterator[Away | None]:
    """Yields the way in which a rank of another host asks home's relay for the learner; None at home."""
    if not actor.topology.here:
        yield None
        return
    from busrl.hosts import questions as q
    from busrl.hosts.link import Asking
    from busrl.hosts.membership import HostSource

    source = HostSource.read(actor.paths.host_source)
    with contextlib.closing(Asking(relay_endpoint(source.endpoint), source.client, source.name)) as link:

        def place() -> Place | None:
            try:
                answer = link.ask(q.RanksMeet(), ASK_S)
            except PeerLost:  # the host's relay says so
                return None
            return Place(answer.address, answer.port, answer.secret) if isinstance(answer, q.RanksPlace) else None

        yield Away(source.name, place, actor.paths.root / "brought")
