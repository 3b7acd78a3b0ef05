"""The keeper: takes back the slots of dead processes, completes their half-done drops, and runs other parts' tenders.

Talks to the ring. Any process may reap at any time; the keeper only makes it prompt. It also clears the version pin of
a dead validator. Knows nothing of what its tenders do: the gateway for workers that do not map the ring is one.

- Nothing that arrives ends the keeper: bytes that are no message go to the tenders, which may answer their sender.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import ClassVar, Protocol

from busrl import capabilities
from busrl.errors import FateRefused
from busrl.protocol import messages as m
from busrl.protocol.codec import Rejected, topic
from busrl.ring import Ring, State
from busrl.ring.locks import taken_back
from busrl.roles import version_pin
from busrl.roles.actor import Actor
from busrl.scheduling.admission import Lines
from busrl.states import POISON_DEATHS, Fate, shown_uid

LOOK_EVERY_S = 0.02  # requests may come by the thousand; the dead are looked for at most so often


class Tender(Protocol):
    """A part's work in the keeper's process, on its ring and bus (the plug "tenders" of the table of parts).

    The keeper makes it at its start, before it counts as ready, and calls it from one thread.
    """

    subscribe: ClassVar[tuple[type[m.Message], ...]]  # messages that it handles

    def __init__(self, keeper: Keeper) -> None: ...
    def handle(self, message: m.Message, now: float) -> None: ...
    def unreadable(self, rejected: Rejected, name: str) -> None: ...  # bytes that came as the message of this name
    def tend(self, now: float) -> None: ...  # in every pass of the keeper
    def look(self, lines: Lines) -> None: ...  # at the slots, whenever the keeper has looked for the dead
    def follow(self) -> None: ...  # the topology of the keeper is another one
    def teardown(self) -> None: ...


class Keeper(Actor):
    role = "keeper"
    singleton = True
    tick_s = 0.1
    calls: Ring | None = None  # the ring of model calls
    tenders: tuple[Tender, ...] = ()

    def setup(self) -> None:
        self._next_look = 0.0
        if self.topology.derived.call_slots:
            self.calls = Ring.attach(self.paths.calls_name, calls=True)
            self.calls.register(self.role, self.name)
        self.tenders = tuple(make(self) for make in capabilities.plugs("tenders"))

    def subscriptions(self) -> list[str]:
        kinds = [kind for tender in capabilities.plugs("tenders") for kind in tender.subscribe]
        return [*super().subscriptions(), *map(topic, kinds)]

    def work(self) -> bool:
        now = time.monotonic()
        for tender in self.tenders:
            tender.tend(now)
        if now < self._next_look:
            return False
        self._next_look = now + LOOK_EVERY_S
        return self._look()

    def handle(self, message: m.Message) -> None:
        now = time.monotonic()
        for tender in self.tenders:
            if isinstance(message, tender.subscribe):
                tender.handle(message, now)

    def unreadable(self, rejected: Rejected, name: str) -> None:
        for tender in self.tenders:
            tender.unreadable(rejected, name)

    def follow(self) -> None:
        for tender in self.tenders:
            tender.follow()

    def teardown(self) -> None:
        for tender in self.tenders:
            tender.teardown()

    # -- the ring -------------------------------------------------------------------------------------------------

    def _look(self) -> bool:
        lines, found = look_after(self.ring, self.calls, self.warn)
        for tender in self.tenders:
            tender.look(lines)
        return found


def look_after(ring: Ring, calls: Ring | None, warn: Callable[..., None]) -> tuple[Lines, bool]:
    """Take back what dead processes had in a ring, and in its ring of calls; the slots, and whether there was any."""
    reaped = ring.reap()
    if calls is not None:  # the calls of dead engines wait again, those of dead callers end
        for text, _ in taken_back(calls, calls.reap(), "calls"):
            warn("keeper", text)
    try:
        ring.finish_drops()
    except FateRefused as problem:  # a uid that names no sample costs the slot, not the keeper
        warn("keeper", f"a dropped sample cannot be recorded, its slot is out of use: {problem}", "error")
    if version_pin.clear_stale(ring):
        warn("keeper", "cleared the version pin of a dead process: publication continues")
    lines = ring.lines()
    _drop_poison(ring, lines, warn)
    for text, uids in taken_back(ring, reaped):
        warn("keeper", text, uids=uids)
    return lines, bool(reaped)


def _drop_poison(ring: Ring, lines: Lines, warn: Callable[..., None]) -> None:
    """Give up a sample that killed two workers which held nothing else; it is re-rolled as any accident."""
    for slot in ((lines["state"] == State.QUEUED) & (lines["alone_deaths"] >= POISON_DEATHS)).nonzero()[0].tolist():
        if ring.drop(slot, int(lines["word"][slot]), Fate.POISON):
            uid = int(lines["uid"][slot])
            text = f"sample {shown_uid(uid)} is poison: two workers died on it alone"
            warn("keeper", text, "error", uids=[uid])
