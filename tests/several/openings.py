"""Ledgers of real rings and fates for tests of what is opened in them, and a learner and players that end samples."""

from __future__ import annotations

import uuid
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from busrl.paths import RunPaths
from busrl.ring import Fates, Ring
from busrl.roles.ledgers import Ledger
from busrl.roles.scheduler import repair_next_admission
from busrl.scheduling.admission import derive
from busrl.scheduling.groups import GroupScanner, GroupView
from busrl.several.opening import Opening
from busrl.states import VALIDATE_BIT, Fate, SampleClass, State, place_of, uid_of

SIZE = 4


class Stream:
    """Prompts whose crc is their draw."""

    def item(self, draw: int) -> Any:
        return SimpleNamespace(line=b'{"prompt": "%d"}' % draw, crc=draw)


def topology_of(tag: str, seats: int, n_min: int, mode: str, staleness: int) -> Any:
    limits = derive(mode, n_min, staleness, SIZE, seats=seats)
    assert not limits.problems(), limits.problems()
    return SimpleNamespace(
        tag=tag, seats=tuple(f"{tag}-{seat}" for seat in range(seats)), groups=SimpleNamespace(size=SIZE),
        derived=SimpleNamespace(limits=limits, val_reserve=0, horizon=64), weights=SimpleNamespace(over_age="wait"),
        scheduler=SimpleNamespace(ahead=0),
        generation=SimpleNamespace(max_new_tokens=8, temperature=1.0, top_p=1.0),
    )


class Model:
    """The ring and fates of one model, with all that happens to its samples after they are dispatched."""

    def __init__(
        self, folder: Path, tag: str = "one", seats: int = 1, n_min: int = 4, mode: str = "batch-async",
        staleness: int = 3, slots: int = 0,
    ) -> None:
        self.topology = topology_of(tag, seats, n_min, mode, staleness)
        self.seats, self.paths = seats, RunPaths.of(folder / tag)
        self.paths.root.mkdir()
        self.name = f"busrl.test.{uuid.uuid4().hex[:12]}"
        self.slots = slots or self.topology.derived.limits.train_slots
        self.fates = Fates(str(self.paths.fates), create=True)
        self.validate_fates = Fates(str(self.paths.validate_fates), create=True)
        self._make_ring()

    def _make_ring(self) -> None:
        self.ring = Ring.create(self.name, slots=self.slots, slot_bytes=1024, processes=8, uuid=uuid.uuid4().bytes)
        self.ring.register("scheduler", "test")
        self.ring.bind_fates(self.fates, self.validate_fates)

    @property
    def ledger(self) -> Ledger:
        return Ledger(self.topology, self.paths, self.ring, self.fates, self.validate_fates)

    @property
    def scanner(self) -> GroupScanner:
        return GroupScanner(self.fates.view(), SIZE)

    def fate(self, uid: int) -> int:
        codes = self.fates.view()
        return int(codes[uid]) if uid < len(codes) else 0

    def lines(self) -> Any:
        lines = self.ring.lines()
        return lines[(lines["state"] != State.FREE) & (lines["cls"] == SampleClass.TRAIN)]

    def groups(self) -> dict[int, int]:
        """Groups in the ring, each with its admission index."""
        return {int(line["group"]): int(line["admission"]) for line in self.lines()}

    def end(self, uid: int, fate: str) -> None:
        """End a queued sample without training."""
        lines = self.ring.lines()
        slot = int(np.flatnonzero((lines["uid"] == uid) & (lines["state"] == State.QUEUED))[0])
        assert self.ring.drop(slot, int(lines["word"][slot]), fate)

    def occupy(self) -> None:
        """Samples of validation take all slots that are free."""
        for number in range(self.slots):
            self.validate_fates.reserve(number + 1)
            self.ring.dispatch(
                uid=VALIDATE_BIT | number, group=number, admission=0, member=0, group_size=1, cls=SampleClass.VALIDATE,
                task=b"{}", prompt_crc=0, max_new_tokens=1, temperature=1.0,
            )

    def reward(self, uid: int, reward: float) -> None:
        """End a queued sample with a reward, as its holder does."""
        lines = self.ring.lines()
        slot = int(np.flatnonzero((lines["uid"] == uid) & (lines["state"] == State.QUEUED))[0])
        word = self.ring.claim(slot, int(lines["word"][slot]), State.GENERATING)
        self.ring.set(slot, word, reward=reward)
        assert self.ring.commit_segment(slot, word, True)
        for slot, word in self.ring.take(State.GENERATED, State.REWARDING, cls=None, limit=1):
            self.ring.set(slot, word, reward=reward)
            assert self.ring.release(slot, word, State.REWARDED)

    def end_group(self, group: int, fate: str = Fate.FLAT.letter) -> None:
        for line in self.lines():
            if int(line["group"]) == group:
                self.end(int(line["uid"]), fate)

    def scan(self) -> tuple[GroupView, Any]:
        lines = self.ring.lines()
        return self.scanner.scan(lines), lines

    def lose(self) -> None:
        """The ring is lost, and its samples are put back."""
        self.close()
        for uid in np.flatnonzero(self.fates.view() == Fate.DISPATCHED).tolist():
            self.fates.store(uid, 0)
        self._make_ring()

    def close(self) -> None:
        self.ring.close()
        Ring.unlink(self.name)


class Killed(Exception):
    """The scheduler dies here."""


def scheduler_of(lead: Model) -> Any:
    """What an opening asks of its scheduler."""
    return SimpleNamespace(
        topology=lead.topology, paths=lead.paths, ring=lead.ring, fates=lead.fates, validate_fates=lead.fates,
        scanner=lead.scanner, stream=Stream(), reap_predecessor=lambda ring: ring.reap(),
        is_damaged=lambda view, fates: view.unrecorded > 0, other_rings=[], bus=SimpleNamespace(drain=list),
        _follow=lambda: None, _heartbeat=lambda: None,
    )


def opening(*models: Model, scheduler: Any = None) -> Opening:
    """The opening of a scheduler of these models, the lead first."""
    repair_next_admission(models[0].ring)
    scheduler = scheduler or scheduler_of(models[0])
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("busrl.several.opening.others_of", lambda _: [model.ledger for model in models[1:]])
        return Opening(scheduler)


def open_once(*models: Model, below: int = 1 << 40) -> Any:
    """A pass of a new scheduler."""
    made, (view, lines) = opening(*models), models[0].scan()
    return made.open(view, lines, below)


def queued(model: Model) -> list[int]:
    """Uids of queued samples in the order in which they were dispatched."""
    lines = model.lines()
    return [int(uid) for uid in lines[np.argsort(lines["changed_ns"], kind="stable")]["uid"]]


def side_has_a_fate(models: list[Model], draw: int, member: int) -> bool:
    """The rule of the order: all sides but the lead's have a fate, or belong to a group that is over."""
    for at, model in enumerate(models):
        for seat in range(at == 0, model.seats):
            group = draw * model.seats + seat
            codes = [model.fate(uid_of(group, attempt, m, SIZE)) for attempt in (0, 1) for m in range(SIZE)]
            over = any(code and chr(code) in "Tfoiels" for code in codes)
            if not over and not codes[member]:
                return False
    return True


def check_order(models: list[Model]) -> None:
    """No sample of the lead side's first try is in the ring before all others of its member."""
    lead = models[0]
    for line in lead.lines():
        group, attempt, member = place_of(int(line["uid"]), SIZE)
        if group % lead.seats == 0 and not attempt:
            assert side_has_a_fate(models, group // lead.seats, member), (group, member)
