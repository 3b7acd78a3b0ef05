"""Claims of the sides of episodes: which samples go together, which come alone, and what the deaths of holders cost."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from side_scene import LAYOUTS, SEATS, SIZE, Scene, ledger_of

from busrl.agents.sides import ClaimedSample, past
from busrl.ring import Ring, State
from busrl.roles.ledgers import Ledger
from busrl.states import (
    ACCIDENTS,
    RULES,
    TERMINAL,
    Fate,
    HeaderWord,
    RunPhase,
    episode_of,
    side_of,
)

PATIENCE_S = 60.0
PROGRAM = Path(__file__).with_name("side_holder.py")


# -- decisions -----


def is_past(lead: int, states: list[State], fates: list[int], size: int) -> bool:
    """The rule, word for word."""
    fate, state = fates[lead], states[lead]
    begin = lead // (2 * size) * 2 * size
    closing = {Fate.TRAINED, *RULES} - {Fate.UNUSED}
    closed = any(one in closing for one in fates[begin : begin + 2 * size])
    second = lead // size % 2 == 1
    if fate in TERMINAL or state >= State.GENERATED:
        return True
    if fate != Fate.NONE or not second or state != State.FREE or closed:
        return fate == Fate.NONE and closed
    return fates[lead - size] in {*TERMINAL} - ACCIDENTS or State.GENERATED <= states[lead - size] <= State.TRAINING


some_fates = st.sampled_from([0, 0, 0, Fate.DISPATCHED, Fate.TRAINED, Fate.UNUSED, Fate.FLAT, Fate.REWARD_RAISED])


@given(fates=st.lists(some_fates, min_size=24, max_size=24), size=st.integers(1, 3),
       states=st.lists(st.sampled_from([*State]), min_size=24, max_size=24), known=st.integers(0, 24))
def test_a_lead_sample_is_past_as_the_rule_says(
    fates: list[int], size: int, states: list[State], known: int
) -> None:
    table = np.array(fates[:known], np.uint8)
    leads = np.arange(24 // (2 * size) * 2 * size)
    firsts = leads - leads // size % 2 * size
    decided = past(leads, np.array(states, np.uint8)[leads], np.array(states, np.uint8)[firsts], table, size)
    all_fates = [*fates[:known], *[0] * (24 - known)]
    assert decided.tolist() == [is_past(lead, states, all_fates, size) for lead in leads.tolist()]


# -- claims in a ring -----


@pytest.fixture(params=LAYOUTS)
def scene(tmp_path: Path, request: Any) -> Iterator[Scene]:
    made = Scene(tmp_path, *LAYOUTS[request.param])
    yield made
    made.close()


def dropped(sample: ClaimedSample, fate: Fate) -> None:
    assert sample.ring is not None
    sample.ring.drop(sample.slot, sample.word, fate)


def given_back(sample: ClaimedSample) -> None:
    assert sample.ring is not None
    sample.ring.release(sample.slot, sample.word, State.QUEUED)


def test_an_episode_is_claimed_with_all_its_sides_the_oldest_first(scene: Scene) -> None:
    for draw in (2, 0, 1):
        scene.open(draw, members=2)
    samples = scene.sides.take(5)
    assert [sample.number for sample in samples] == [0, 1, 4, 5, 8] and not scene.alone
    for sample in samples:
        assert [sample.seat, *sample.siblings] == [*SEATS]
        assert {side.number for side in sample.ending()} == {sample.number}
        for name, side in [(sample.seat, sample), *sample.siblings.items()]:
            seats = scene.book(name).seats
            assert side.uid == side_of(sample.number, seats.index(name), SIZE, len(seats)) and side.seat == name
        assert sample.ending()[-1] is sample, "the lead ends last"


def test_a_sibling_is_no_orphan_while_its_lead_may_come(scene: Scene) -> None:
    scene.open(0, "second", "third")
    assert scene.taken() == [], "the lead is yet to come"
    scene.open(0, "first")
    (sample,) = scene.sides.take(1)
    for side in sample.siblings.values():
        given_back(side)
    assert scene.taken() == [], "somebody plays the lead"
    scene.ring.commit_segment(sample.slot, sample.word, True)
    assert scene.taken() == [["second"], ["third"]] and len(scene.alone) == 2


class LateRing:
    """A ring whose first copy of the lines was made before all of them were queued: in it slot by slot."""

    def __init__(self, ring: Ring, first: Any) -> None:
        self.ring, self.first = ring, [first]

    def lines(self) -> Any:
        return self.first.pop() if self.first else self.ring.lines()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.ring, name)


def late(scene: Scene, first: list[Any]) -> list[Ledger]:
    rings: list[Any] = [LateRing(book.ring, lines) for book, lines in zip(scene.books, first)]
    return [ledger_of(ring, book.fates, book.seats) for ring, book in zip(rings, scene.books)]


def test_a_sibling_queued_after_the_copy_of_the_lines_is_found(scene: Scene) -> None:
    """The lead was queued last, so whoever sees it finds the others, however the lines were copied."""
    before = [book.ring.lines().copy() for book in scene.books]
    scene.open(0)
    after = scene.ring.lines()
    (lead,) = np.flatnonzero(after["uid"] == scene.uid(0, "first")).tolist()
    before[0][lead] = after[lead]
    (sample,) = scene.claiming(late(scene, before)).take(4)
    assert [*sample.siblings] == ["second", "third"] and not scene.alone


@pytest.mark.parametrize("fate", sorted(RULES | ACCIDENTS))
def test_a_sibling_is_played_alone_once_its_lead_has_a_fate(scene: Scene, fate: Fate) -> None:
    scene.open(0, "first", "third")
    (sample,) = scene.sides.take(1)
    given_back(sample.siblings["third"])
    assert scene.taken() == []
    dropped(sample, fate)
    scene.alone.clear()
    assert scene.taken() == [["third"]] and len(scene.alone) == 1


def test_a_second_try_waits_for_that_of_its_lead(scene: Scene) -> None:
    """An accident of the whole episode: the lead side ends last, and comes last again."""
    scene.open(0)
    (sample,) = scene.sides.take(1)
    for side in sample.siblings.values():
        dropped(side, Fate.REWARD_RAISED)
    scene.open(0, "second", "third", attempt=1)
    assert scene.taken() == [], "the lead's first try has not ended"
    dropped(sample, Fate.REWARD_RAISED)
    assert scene.taken() == [], "its second try is yet to come"
    scene.open(0, "first", attempt=1)
    assert scene.taken() == [[*SEATS]] and not scene.alone


def test_a_second_try_is_played_alone_where_its_lead_has_none(scene: Scene) -> None:
    scene.open(0)
    (sample,) = scene.sides.take(1)
    dropped(sample.siblings["second"], Fate.MALFORMED)
    scene.open(0, "second", attempt=1)
    assert scene.taken() == []
    sample.ring.commit_segment(sample.slot, sample.word, True)
    assert scene.taken() == [["second"]]


def test_siblings_of_a_closed_group_come_alone(scene: Scene) -> None:
    """The lead's group was set aside in halves: members without a fate are dispatched no more."""
    scene.fates.reserve(64)
    scene.fates.store(scene.uid(0, "first", member=1), Fate.DISPATCHED)
    scene.open(0, "second")
    assert scene.taken() == []
    scene.fates.store(scene.uid(0, "first", member=1), Fate.FLAT)
    assert scene.taken() == [["second"]]


def test_a_finished_ledger_gives_samples_of_validation_alone(scene: Scene) -> None:
    scene.open(0)
    scene.validate(7)
    for book in scene.books:
        book.ring.set_header(HeaderWord.RUN_STATE, RunPhase.FINISHING)
    (sample,) = scene.sides.take(9)
    assert sample.validates and sample.number == sample.uid and not sample.siblings and not scene.alone
    for book in scene.books:
        book.ring.set_header(HeaderWord.RUN_STATE, RunPhase.RUNNING)
    assert scene.taken() == [[*SEATS]]


def test_the_next_ledger_leads_once_the_first_is_finished(scene: Scene) -> None:
    scene.open(0, "second", "third")
    scene.ring.set_header(HeaderWord.RUN_STATE, RunPhase.FINISHING)
    rest = [seat for book in scene.books[1:] for seat in book.seats]
    assert scene.taken() == ([rest] if rest else []) and not scene.alone


def test_a_sample_that_another_process_took_meanwhile_is_left_to_it(scene: Scene) -> None:
    scene.open(0, members=2)
    before = [book.ring.lines() for book in scene.books]
    (other,) = scene.sides.take(1)
    (sample,) = scene.claiming(late(scene, before)).take(4)
    assert sample.number != other.number and not scene.alone and scene.taken() == []


# -- holders that die -----


class Storm(Scene):
    """The scene with holders in processes, which may be killed at any moment."""

    def __init__(self, folder: Path, layout: str, draws: int, accidents: float, seed: int) -> None:
        super().__init__(folder, *LAYOUTS[layout])
        self.draws, self.accidents, self.chance = draws, accidents, random.Random(seed)
        self.notes, self.born, self.kills = folder / "notes", 0, 0
        self.holders = [self.holder() for _ in range(3)]
        self.firsts = {book: [book.uid(draw, seat, member) for draw in range(draws) for seat in book.seats
                              for member in range(SIZE)] for book in self.books}
        self.todo = [(book, book.uid(draw, seat, member)) for draw in range(draws) for member in range(SIZE)
                     for seat in reversed(SEATS) for book in [self.book(seat)]]

    def holder(self) -> subprocess.Popen[bytes]:
        self.born += 1
        ledgers = [f"{book.name}={book.fates.path}={','.join(book.seats)}" for book in self.books]
        values = [self.notes, f"agent/{self.born}", SIZE, self.accidents, self.born, *ledgers]
        variables = {**os.environ, "PYTHONPATH": str(PROGRAM.parent.parent)}  # where side_scene is
        return subprocess.Popen([sys.executable, str(PROGRAM), *map(str, values)], env=variables)

    def kill(self) -> None:
        at = self.chance.randrange(len(self.holders))
        self.holders[at].kill()
        self.holders[at].wait()
        self.kills += 1
        self.holders[at] = self.holder()

    def step(self) -> None:
        """Make one pass of a scheduler, then of the others."""
        again = [(book, uid) for book in self.books for uid in book.again(self.firsts[book])]
        again.sort(key=lambda one: (episode_of(one[1], SIZE, len(one[0].seats)), -self.books.index(one[0]), -one[1]))
        if all(book.queue(uid) for book, uid in again):
            while self.todo and self.todo[0][0].queue(self.todo[0][1]):
                del self.todo[0]
        for book in self.books:
            book.work(whole=True)

    def over(self) -> bool:
        return not self.todo and all(book.ended(self.firsts[book]) for book in self.books)

    def until_over(self, kills: int) -> None:
        end, at = time.monotonic() + PATIENCE_S, 0
        while not self.over():
            held = [book.ring.stats().occupancy for book in self.books]
            assert time.monotonic() < end, f"{held}, {len(self.todo)} to do"
            self.step()
            played = len(self.plays())
            if self.kills < kills and played >= at:
                at = played + self.chance.randint(1, 2 * self.draws * SIZE // max(1, kills))
                self.kill()

    def plays(self) -> list[list[str]]:
        return [line.split() for line in self.notes.read_text().splitlines()] if self.notes.exists() else []

    def close(self) -> None:
        self.ring.set_header(HeaderWord.RUN_STATE, RunPhase.STOPPING)
        for holder in self.holders:
            holder.wait(PATIENCE_S)
        super().close()


@pytest.fixture
def storm(tmp_path: Path, request: Any) -> Iterator[Storm]:
    made = Storm(tmp_path, **request.param)
    yield made
    made.close()


@pytest.mark.parametrize("storm", [{"layout": layout, "draws": 60, "accidents": 0.0, "seed": 1} for layout in LAYOUTS],
                         indirect=True)
def test_without_deaths_each_episode_is_played_once_with_all_its_sides(storm: Storm) -> None:
    storm.until_over(kills=0)
    assert sorted(int(number) for number, *_ in storm.plays()) == [
        (draw * 2) * SIZE + member for draw in range(60) for member in range(SIZE)]
    assert {seats for _, seats, _ in storm.plays()} == {"first,second,third"}
    assert {alone for *_, alone in storm.plays()} == {"0"}


@pytest.mark.parametrize("storm", [{"layout": layout, "draws": 60, "accidents": 0.2, "seed": 2} for layout in LAYOUTS],
                         indirect=True)
def test_an_accident_of_an_episode_parts_none_of_its_sides(storm: Storm) -> None:
    storm.until_over(kills=0)
    accidents = Counter(int(code) for book in storm.books for code in book.fates.view())[Fate.REWARD_RAISED]
    assert accidents > 30 and {alone for *_, alone in storm.plays()} == {"0"}


@pytest.mark.parametrize("storm", [{"layout": layout, "draws": 60, "accidents": 0.05, "seed": seed}
                                   for seed, layout in enumerate(LAYOUTS)], indirect=True)
def test_killed_holders_cost_plays_alone_and_no_sample(storm: Storm) -> None:
    storm.until_over(kills=8)
    codes = Counter(int(code) for book in storm.books for code in book.fates.view() if code)
    assert not codes[Fate.DISPATCHED] and set(codes) <= {Fate.TRAINED, Fate.UNUSED, Fate.REWARD_RAISED}
    accidents, plays = codes[Fate.REWARD_RAISED], storm.plays()
    alone = sum(alone == "1" for *_, alone in plays)
    assert alone <= 2 * 4 * storm.kills + 2 * accidents, "a holder has at most four episodes"
    assert len(plays) <= storm.draws * SIZE + 2 * (4 * storm.kills + accidents)
