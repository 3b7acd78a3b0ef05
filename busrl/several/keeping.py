"""The keeper's work in the rings of the models beside the lead: what dead processes held there is taken back.

Runs in the keeper's process, after each of its own looks. Does nothing in a run of one model. Knows nothing of samples.
"""

from __future__ import annotations

from typing import ClassVar

from busrl.protocol import messages as m
from busrl.protocol.codec import Rejected
from busrl.ring import Fates, Ring
from busrl.roles.keeper import Keeper, look_after
from busrl.scheduling.admission import Lines


class OtherRings:
    """The rings of the models beside the lead, each with its ring of calls."""

    subscribe: ClassVar[tuple[type[m.Message], ...]] = ()

    def __init__(self, keeper: Keeper) -> None:
        self._keeper, self._rings = keeper, list[tuple[Ring, Ring]]()
        for topology in map(keeper.topology.of, keeper.topology.tags):
            if not topology.beside:
                continue
            paths = keeper.topology.paths_of(topology.tag, keeper.paths)
            ring, calls = Ring.attach(paths.ring_name), Ring.attach(paths.calls_name, calls=True)
            if not topology.frozen:
                ring.bind_fates(Fates(str(paths.fates)), Fates(str(paths.validate_fates)))
            for each in (ring, calls):
                each.register(keeper.role, keeper.name)
            self._rings.append((ring, calls))
            keeper.other_rings.append(ring)  # shows there that this process lives

    def handle(self, message: m.Message, now: float) -> None:
        """Take no message."""

    def unreadable(self, rejected: Rejected, name: str) -> None:
        """Take no message."""

    def tend(self, now: float) -> None:
        """Do nothing between two looks."""

    def look(self, lines: Lines) -> None:
        for ring, calls in self._rings:
            look_after(ring, calls, self._keeper.warn)

    def follow(self) -> None:
        """The models of a run are what they were at its start."""

    def teardown(self) -> None:
        for ring, calls in self._rings:
            ring.close()
            calls.close()
