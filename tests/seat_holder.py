"""A holder of episodes of several seats in this process, for tests: real rings, and trees whose turns are made here."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

from agent_worlds import Table
from side_scene import LAYOUTS, SEATS, Scene, ledger_of

from busrl.agents.llm import CompleteRequest
from busrl.agents.renderer import Renderer
from busrl.agents.samples import EpisodeSamples
from busrl.agents.seats import Seat
from busrl.agents.sides import ClaimedSample
from busrl.errors import SlotTooSmall
from busrl.ring import Ring, State
from busrl.states import Fate
from busrl.topology.schema import Agents

PLACES = [*(Seat(name) for name in SEATS), Seat("old", "old", trained=False)]


class WatchedRing:
    """A ring that notes what is done to its slots, and has no room in some of them."""

    def __init__(self, ring: Ring, done: list[tuple[str, int]], full: set[int]) -> None:
        self.ring, self.done, self.full = ring, done, full

    def put(self, slot: int, *values: Any) -> None:
        uid = int(self.ring.line(slot)["uid"])
        if uid in self.full:
            raise SlotTooSmall(f"slot {slot} is full")
        self.ring.put(slot, *values)

    def __getattr__(self, name: str) -> Any:
        method = getattr(self.ring, name)
        if name not in ("commit_segment", "drop", "release"):
            return method

        def noted(slot: int, *values: Any) -> Any:
            self.done.append((name, int(self.ring.line(slot)["uid"])))
            return method(slot, *values)

        return noted


class Holder(Scene):
    """A holder of episodes that were queued whole, and of the trees of their seats."""

    def __init__(self, folder: Path, layout: str, chat: Renderer) -> None:
        super().__init__(folder, *LAYOUTS[layout], slot_bytes=8192)
        self.chat, self.done, self.full = chat, list[tuple[str, int]](), set[int]()
        self.warned, self.stops = list[str](), False
        rings: list[Any] = [WatchedRing(book.ring, self.done, self.full) for book in self.books]
        ledgers = [ledger_of(ring, book.fates, book.seats) for ring, book in zip(rings, self.books)]
        self.settings = Agents(failure_reward=-1.0)
        self.samples = EpisodeSamples(rings[0], lambda: self.settings, self.warn, self.write,
                                      self.claiming(ledgers))

    def warn(self, text: str, *_: Any, **__: Any) -> None:
        self.warned.append(text)

    def write(self, what: str, work: Callable[[], None]) -> bool:
        if not self.stops:
            work()
        return not self.stops

    def claimed(self, *seats: str) -> ClaimedSample:
        self.open(0, *seats)
        (sample,) = self.samples.take(1)
        return sample

    def played(self, *spoke: str) -> Table:
        """Calls of these seats, one of each."""
        table = Table(self.chat, PLACES)

        async def play() -> None:
            for name in spoke:
                delivery, _ = await table.episode.seats[name].answer(CompleteRequest(f"{name}?"))
                delivery.delivered()

        asyncio.run(play())
        return table

    def state_of(self, seat: str) -> tuple[str, str]:
        """The state of a seat's slot and the letter of its fate."""
        book = self.book(seat)
        uid = book.uid(0, seat)
        states = [State(int(line["state"])).name for line in book.ring.lines() if int(line["uid"]) == uid]
        fate = Fate(int(book.fates.view()[uid]))
        return next((state for state in states if state != "FREE"), "FREE"), fate.letter

    def slot_of(self, seat: str) -> tuple[Ring, int]:
        book = self.book(seat)
        lines = book.ring.lines()
        return book.ring, next(slot for slot in range(len(lines)) if int(lines["uid"][slot]) == book.uid(0, seat))

    def order(self) -> list[tuple[str, str]]:
        uids = {(book.uid(0, seat), name): seat for book in self.books for seat in book.seats
                for name in ("commit_segment", "drop", "release")}
        return [(name, uids[uid, name]) for name, uid in self.done]
