"""The ledger of a trained model, as a process that works with several sees it: its ring, fates and numbers.

`own` is that of the process itself; `attach` opens one more and enters the process there. Used by the scheduler, which
opens draws in them, and by holders of episodes, which claim sides there. Knows nothing of what either does.

- A process has an entry in every ring that it uses, so that what it held there comes back when it dies.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from busrl.paths import RunPaths
from busrl.ring import Fates, Ring
from busrl.roles.actor import Actor, is_running
from busrl.scheduling.groups import Bytes
from busrl.states import uid_of
from busrl.topology import Topology


@dataclass
class Ledger:
    """The ring and the fates of a trained model; `topology` and `paths` are the model's own."""

    topology: Topology
    paths: RunPaths
    ring: Ring
    fates: Fates
    validate_fates: Fates | None = None

    @classmethod
    def own(cls, actor: Actor) -> Ledger:
        """The ledger of the process itself."""
        return cls(actor.topology, actor.paths, actor.ring, actor.fates, actor.validate_fates)

    @classmethod
    def attach(cls, topology: Topology, paths: RunPaths, role: str, name: str) -> Ledger:
        """The ledger of another model, with an entry for this process."""
        ring = Ring.attach(paths.ring_name)
        ring.register(role, name)
        fates, validate_fates = Fates(str(paths.fates)), Fates(str(paths.validate_fates))
        ring.bind_fates(fates, validate_fates)
        return cls(topology, paths, ring, fates, validate_fates)

    def follow(self, topology: Topology) -> None:
        """Go by this topology, which was changed in flight."""
        self.topology = topology

    @property
    def tag(self) -> str:
        return self.topology.tag

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the model's seats."""
        return self.topology.seats

    @property
    def seats(self) -> int:
        return len(self.names)

    @property
    def size(self) -> int:
        """Members of a group."""
        return self.topology.groups.size

    @property
    def running(self) -> bool:
        """False once the model has made its steps, or is asked to stop: nothing is opened or claimed in it then."""
        return is_running(self.ring)

    def codes(self, group: int) -> Bytes:
        """The fates of a group as they are now: of its first tries, by member, then of the second ones."""
        first, width = uid_of(group, 0, 0, self.size), 2 * self.size
        stored: Bytes = self.fates.view()[first : first + width]
        return np.pad(stored, (0, width - len(stored)))  # the table grows with what is dispatched

    def close(self) -> None:
        """Leave a ring that was attached to."""
        self.ring.close()
        self.fates.close()
        if self.validate_fates is not None:
            self.validate_fates.close()


def others_of(actor: Actor) -> list[Ledger]:
    """The ledgers of the trained models beside the one of this process, in the order of the topology."""
    topology = actor.topology
    return [
        Ledger.attach(topology.of(tag), topology.paths_of(tag, actor.paths), actor.role, actor.name)
        for tag in topology.trained_tags if tag != topology.tag
    ]
