"""A process that works for several models: the base of a learner and of a rollout that have adapters of several.

It has an actor for each model, with the ring, the weights and the topology of that model, and passes on to them what
comes. Talks to the rings of its models. Knows nothing of what the actors do, or of their turns.

- A model's actor is the one of a process of its own: what it does there, it does here.
- The process belongs to its first model, by whose ring launch judges it. At work for one model it is late for none:
  long work, and that it goes on, is shown in the rings of all.
- Its death is that of the actors of all: each does what it does after a death of its own.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from busrl.bus import Endpoint
from busrl.protocol import messages as m
from busrl.ring import Fates, Ring
from busrl.roles.actor import Actor, InForce, Parts, Shown
from busrl.roles.ledgers import Ledger
from busrl.topology import Topology


class ShownToAll(Shown):
    """Shows the work of the part for one model: what it usually does in that model's table, `own`; long work, and that
    it goes on, in the `tables` of all models of the process, which wait for it meanwhile."""

    def __init__(self, ring: Ring, own: Shown, tables: Sequence[Shown]) -> None:
        super().__init__(ring)
        self._own, self._tables = own, tables

    @contextlib.contextmanager
    def activity(self, name: str, deadline_s: float) -> Iterator[None]:
        with contextlib.ExitStack() as declared:
            for table in self._tables:
                declared.enter_context(table.activity(name, deadline_s))
            yield

    def progress(self) -> None:
        for table in self._tables:
            table.progress()

    def usually(self, text: str, again: bool = False) -> None:
        self._own.usually(text, again)


class Together(Actor):
    """A process of several models. `members`: the actors of those that it still works for."""

    members: Sequence[Part] = ()

    def __init__(
        self, run_dir: str | Path, name: str, parts: Parts | None = None, in_force: InForce | None = None
    ) -> None:
        super().__init__(run_dir, name, parts, in_force)
        self._tables: list[Shown] = []  # where it shows its work, by model

    def parts_of(self, topology: Topology) -> tuple[Parts, Shown]:
        """Parts that the actor of a model works with, and the table in which it shows its work."""
        if topology.tag == self.topology.tag:
            fates, checked = (None, None) if topology.frozen else (self.fates, self.validate_fates)
            self._tables.append(self.shown)
            own = Parts(topology, self.ring, self.bus, fates, checked, topology.beside)
            return own, ShownToAll(self.ring, self.shown, self._tables)
        ring, fates, checked = self._attached(topology)
        self.other_rings.append(ring)
        parts = Parts(topology, ring, self.bus_of(topology), fates, checked, topology.beside)
        self._tables.append(Shown(ring))
        return parts, ShownToAll(ring, self._tables[-1], self._tables)

    def _attached(self, topology: Topology) -> tuple[Ring, Fates | None, Fates | None]:
        """The ring of another model, with an entry for this process, and its fates."""
        paths = self._run.of_tag(topology.beside)
        if not topology.frozen:
            ledger = Ledger.attach(topology, paths, self.role, self.name)
            return ledger.ring, ledger.fates, ledger.validate_fates
        ring = Ring.attach(paths.ring_name)
        ring.register(self.role, self.name)
        return ring, None, None

    def bus_of(self, topology: Topology) -> Endpoint:
        """The endpoint by which the actor of another model sends."""
        return self.bus

    def set_up(self, members: Sequence[Part]) -> None:
        """Set the actors up, one after the other; each is ready in the ring of its model then."""
        self.members = members
        for member in members:
            member.setup()
        for ring in self.other_rings:
            ring.set_ready()

    def receive(self, message: m.Message) -> None:
        """Give a message about another model to that model's actor."""
        others = (member for member in self.members if member.beside == m.model_of(message) != self.beside)
        receive = next((member.receive for member in others), super().receive)
        receive(message)

    def handle(self, message: m.Message) -> None:
        for member in self.members:
            if member.beside == self.beside:
                member.handle(message)

    def stop(self, reason: str) -> None:
        super().stop(reason)
        for member in self.members:
            member.stop(reason)

    def look_around(self) -> None:
        super().look_around()
        for member in self.members:
            member.reports.publish_repeats(time.monotonic())

    def beat(self) -> None:
        """Show presence, also while a part waits."""
        self._heartbeat()

    def follow(self) -> None:
        for member in self.members:
            member.topology, member.whole = self.whole.of(member.topology.tag), self.whole
            member.follow()

    def close_rings(self) -> None:
        for ring in self.other_rings:
            ring.close()


class Part(Actor):
    """The actor of one of the models of a process. Its lines for people name the model."""

    def __init__(self, process: Together, topology: Topology) -> None:
        parts, shown = process.parts_of(topology)
        super().__init__(process.paths.home, process.name, parts)
        self.process, self.shown, self.whole = process, shown, process.whole

    def warn(
        self, where: str, text: str, severity: str = "warning", kind: str = "", uids: Sequence[int] = (),
        traceback: str = "",
    ) -> None:
        super().warn(where, f"{self.topology.tag}: {text}", severity, kind, uids, traceback)

    def keep_lock(self) -> None:
        self.process.keep_lock()

    def _heartbeat(self) -> None:
        self.process.beat()
