"""Ledgers of several seats for tests: rings with their fates, and what scheduler, learner and keeper do there."""

from __future__ import annotations

import os
from collections.abc import Container
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from busrl.agents.sides import ClaimedSample, Sides
from busrl.paths import RunPaths
from busrl.ring import Fates, Ring, State
from busrl.roles.ledgers import Ledger
from busrl.states import ACCIDENTS, TERMINAL, VALIDATE_BIT, Fate, SampleClass, uid_of

SEATS, SIZE = ("first", "second", "third"), 2


def ledger_of(ring: Any, fates: Fates, seats: tuple[str, ...], size: int = SIZE) -> Ledger:
    """The ledger of a model that plays these seats."""
    topology: Any = SimpleNamespace(tag="", seats=seats, groups=SimpleNamespace(size=size))
    return Ledger(topology, RunPaths.of("nowhere"), ring, fates)


class Book:
    """A ring with its fates, and what scheduler, learner and keeper do there."""

    def __init__(self, folder: Path, number: int, seats: tuple[str, ...], slot_bytes: int) -> None:
        self.seats, self.name = seats, f"busrl.test.{os.getpid()}.sides{number}"
        self.ring = Ring.create(self.name, slots=64, slot_bytes=slot_bytes, processes=64, uuid=b"s" * 16)
        self.ring.register("scheduler", "test")
        self.fates = Fates(str(folder / f"fates{number}.bin"), create=True)
        self.ring.bind_fates(self.fates, Fates(str(folder / f"fates{number}.validate.bin"), create=True))
        self.ledger = ledger_of(self.ring, self.fates, seats)

    def uid(self, draw: int, seat: str, member: int = 0, attempt: int = 0) -> int:
        return uid_of(draw * len(self.seats) + self.seats.index(seat), attempt, member, SIZE)

    def queue(self, uid: int) -> bool:
        group = uid // (2 * SIZE)
        return bool(self.ring.dispatch(
            uid=uid, group=group, admission=group, member=uid % SIZE, group_size=SIZE, cls=SampleClass.TRAIN,
            task=b"{}", prompt_crc=1, priority=-group, max_new_tokens=8, temperature=1.0))

    def work(self, whole: bool = False) -> None:
        """What rewards, learner and keeper do in a pass. `whole`: groups are trained once all members have ended."""
        for slot, word in self.ring.take(State.GENERATED, State.REWARDING, cls=None, limit=64):
            self.ring.release(slot, word, State.REWARDED)
        lines = self.ring.lines()
        ready = {int(lines["uid"][slot]): int(slot) for slot in (lines["state"] == State.REWARDED).nonzero()[0]}
        for uid, slot in ready.items():
            if not whole or self._is_whole(uid, ready):
                self.ring.finish(slot, self.ring.claim(slot, int(lines["word"][slot]), State.TRAINING), Fate.TRAINED)
        self.ring.reap()

    def _is_whole(self, uid: int, ready: Container[int]) -> bool:
        """True if each member of the sample's group has ended."""
        codes, first = self.fates.view(), uid // (2 * SIZE) * 2 * SIZE
        last = [one + SIZE if codes[one] in ACCIDENTS else one for one in range(first, first + SIZE)]
        return all(one in ready or (one < len(codes) and codes[one] in TERMINAL) for one in last)

    def again(self, first_tries: list[int]) -> list[int]:
        """The second tries of samples that ended by accident."""
        codes = self.fates.view()
        return [uid + SIZE for uid in first_tries
                if uid + SIZE < len(codes) and codes[uid] in ACCIDENTS and not codes[uid + SIZE]]

    def ended(self, first_tries: list[int]) -> bool:
        codes = self.fates.view()
        if len(codes) <= max(first_tries) + SIZE:
            return False
        return all(int(codes[uid + SIZE if codes[uid] in ACCIDENTS else uid]) in TERMINAL for uid in first_tries)

    def close(self) -> None:
        self.ring.close()
        Ring.unlink(self.name)


class NotingSides(Sides):
    def __init__(self, ledgers: list[Ledger], alone: list[ClaimedSample]) -> None:
        super().__init__(ledgers)
        self.alone = alone

    def take(self, most: int) -> list[ClaimedSample]:
        samples = super().take(most)
        self.alone += [sample for sample in samples if sample.alone]
        return samples


class Scene:
    """Ledgers by their seats, and a holder in this process."""

    def __init__(self, folder: Path, *seats: tuple[str, ...], slot_bytes: int = 256) -> None:
        self.books = [Book(folder, number, names, slot_bytes) for number, names in enumerate(seats)]
        self.ring, self.fates, self.uid = self.books[0].ring, self.books[0].fates, self.books[0].uid
        self.alone = list[ClaimedSample]()
        self.sides = self.claiming([book.ledger for book in self.books])

    def claiming(self, ledgers: list[Ledger]) -> Sides:
        """Claims that note the episodes that are played without some of their sides."""
        return NotingSides(ledgers, self.alone)

    def book(self, seat: str) -> Book:
        return next(book for book in self.books if seat in book.seats)

    def open(self, draw: int, *seats: str, attempt: int = 0, members: int = 1) -> None:
        """Queue samples of a draw, those of the last seat first."""
        for seat in reversed(seats or SEATS):
            for member in range(members):
                book = self.book(seat)
                assert book.queue(book.uid(draw, seat, member, attempt))

    def validate(self, number: int) -> None:
        """Queue a sample of validation, which has no siblings."""
        self.ring.dispatch(uid=VALIDATE_BIT | number, group=number, admission=0, member=0, group_size=1,
                           cls=SampleClass.VALIDATE, task=b"{}", prompt_crc=1, priority=1 << 20, max_new_tokens=8,
                           temperature=1.0)

    def taken(self, most: int = 64) -> list[list[str]]:
        return [[sample.seat, *sample.siblings] for sample in self.sides.take(most)]

    def close(self) -> None:
        for book in self.books:
            book.close()


LAYOUTS = {"one ledger": (SEATS,), "two": (("first",), ("second", "third")), "three": tuple((seat,) for seat in SEATS)}
