"""What the scheduler opens in the rings of several seats and models, in which order, and after it was killed."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from openings import SIZE, Killed, Model, check_order, open_once, opening, queued, scheduler_of

from busrl.roles.actor import Actor
from busrl.states import PAUSE_STARTING, Fate, HeaderWord, RunPhase, State, place_of, uid_of

Make = Callable[..., Model]


@pytest.fixture
def model(tmp_path: Path) -> Iterator[Make]:
    made: list[Model] = []

    def make(tag: str = "one", **settings: Any) -> Model:
        made.append(Model(tmp_path, tag, **settings))
        return made[-1]

    yield make
    for one in made:
        one.close()


def test_both_seats_get_the_prompt_and_an_index_of_their_own(model: Make) -> None:
    one = model(seats=2)
    open_once(one, below=3)
    assert one.groups() == {group: group for group in range(6)}
    assert one.ring.header(HeaderWord.NEXT_ADMISSION) == 6
    assert all(int(line["prompt_crc"]) == int(line["group"]) // 2 for line in one.lines())
    assert len(queued(one)) == 6 * SIZE


class Watched:
    """A ring that notes what is dispatched into it."""

    def __init__(self, ring: Any, tag: str, order: list[tuple[str, int]]) -> None:
        self._ring, self._tag, self._order = ring, tag, order

    def dispatch(self, **fields: Any) -> Any:
        self._order.append((self._tag, fields["group"]))
        return self._ring.dispatch(**fields)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ring, name)


def order_of(*models: Model, below: int) -> list[tuple[str, int]]:
    """Open, and list the groups in the order in which they were dispatched."""
    made, order = opening(*models), list[tuple[str, int]]()
    for book in made.books:
        book.ledger.ring = Watched(book.ledger.ring, book.ledger.tag, order)
    made.open(*models[0].scan(), below)
    return order


def test_the_lead_side_of_a_draw_is_queued_last(model: Make) -> None:
    solver, judge = model("solver", seats=3), model("judge", seats=2)
    order = order_of(solver, judge, below=1)
    assert order == [("judge", 1), ("judge", 0), ("solver", 2), ("solver", 1), ("solver", 0)]


class Dying:
    """A ring whose scheduler is killed at the n-th dispatch, some members of the group in it already."""

    def __init__(self, ring: Any, left: list[int], members: int) -> None:
        self._ring, self._left, self._members = ring, left, members

    def dispatch(self, **fields: Any) -> Any:
        self._left[0] -= 1
        if self._left[0] < 0:
            if self._members:
                self._ring.dispatch(**{**fields, "members": self._members})
            raise Killed
        return self._ring.dispatch(**fields)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ring, name)


def killed_at(models: list[Model], dispatches: int, members: int) -> None:
    """A scheduler is killed at a dispatch, with some members of its group in the ring."""
    made, left = opening(*models), [dispatches]
    for book in made.books:
        book.ledger.ring = Dying(book.ledger.ring, left, members)
    with pytest.raises(Killed):
        made.open(*models[0].scan(), 2)


@pytest.mark.parametrize("members", range(SIZE))
@pytest.mark.parametrize("mode", ["batch-async", "sync"])
def test_a_scheduler_killed_anywhere_is_continued_in_the_same_order(model: Make, mode: str, members: int) -> None:
    for dispatches in range(6):
        models = [model(f"a{dispatches}", seats=2, mode=mode), model(f"b{dispatches}", n_min=2, mode=mode)]
        killed_at(models, dispatches, members)
        check_order(models)
        for _ in range(3):
            open_once(*models, below=2)
            check_order(models)
        assert models[0].groups() == {group: group for group in range(4)}, dispatches
        assert models[1].groups() == {0: 0, 1: 1}
        assert [one.ring.header(HeaderWord.NEXT_ADMISSION) for one in models] == [4, 2]


def test_the_lead_side_waits_for_a_side_that_finds_no_slot(model: Make) -> None:
    models = [model("a"), model("b", slots=SIZE)]
    killed_at(models, 0, members=2)
    models[1].occupy()
    open_once(*models, below=1)
    assert len(queued(models[1])) == 2 and not queued(models[0])


def test_members_of_the_lead_side_wait_for_a_side_that_was_lost(model: Make) -> None:
    models = [model("a"), model("b", slots=SIZE)]
    killed_at(models, 1, members=2)
    models[1].lose()
    models[1].occupy()
    open_once(*models, below=1)
    assert len(queued(models[0])) == 2 and not queued(models[1])


def test_the_lead_side_does_not_wait_for_a_group_that_is_over(model: Make) -> None:
    models = [model("a"), model("b")]
    killed_at(models, 0, members=2)
    models[1].end(uid_of(0, 0, 1, SIZE), Fate.LONG.letter)
    open_once(*models, below=1)
    assert len(queued(models[0])) == SIZE and len(queued(models[1])) == 1


def test_a_ring_without_room_holds_all_others_back_by_name(model: Make) -> None:
    solver, judge = model("solver", n_min=8), model("judge", n_min=2, staleness=1)
    room = judge.topology.derived.limits.B
    open_once(solver, judge)
    told = open_once(solver, judge)
    assert len(solver.groups()) == len(judge.groups()) == room < solver.topology.derived.limits.B
    assert (told.groups, told.reason) == (0, "in_flight (judge)")
    judge.end_group(0)
    open_once(solver, judge)
    assert room in solver.groups() and room in judge.groups()


def test_what_a_lost_ring_held_is_opened_again_there_alone(model: Make) -> None:
    for lost in (0, 1):
        models = [model(f"a{lost}", seats=2), model(f"b{lost}")]
        open_once(*models, below=4)
        before = [one.groups() for one in models]
        models[lost].lose()
        assert not models[lost].groups()
        for _ in range(2):
            open_once(*models, below=4)
        assert [one.groups() for one in models] == before
        check_order(models)


def test_draws_that_all_rings_lost_are_opened_as_pairs(model: Make) -> None:
    models = [model("a", seats=2), model("b")]
    open_once(*models, below=4)
    for one in models:
        one.lose()
    open_once(*models, below=5)
    assert [sorted(one.groups()) for one in models] == [[*range(10)], [*range(5)]]


def test_a_finished_model_is_left_out_and_the_next_one_leads(model: Make) -> None:
    models = [model("a"), model("b"), model("c")]
    models[0].ring.set_header(HeaderWord.RUN_STATE, RunPhase.FINISHING)
    assert order_of(*models, below=1) == [("c", 0), ("b", 0)] and not models[0].groups()
    models[1].ring.set_header(HeaderWord.RUN_STATE, RunPhase.FINISHING)
    models[2].ring.set_header(HeaderWord.RUN_STATE, RunPhase.FINISHING)
    assert open_once(*models).reason == "finished"


def test_nothing_is_opened_before_every_learner_is_there(model: Make) -> None:
    models = [model("solver"), model("judge")]
    models[1].ring.set_header(HeaderWord.GENERATION_PAUSE, PAUSE_STARTING)
    told = open_once(*models)
    assert (told.groups, told.reason) == (0, "starting (judge)") and not models[0].groups()
    models[1].ring.set_header(HeaderWord.GENERATION_PAUSE, 0)
    assert open_once(*models).groups > 0 and models[0].groups() == models[1].groups()


def test_a_damaged_table_of_one_model_holds_all_back(model: Make) -> None:
    models = [model("solver"), model("judge")]
    open_once(*models, below=2)
    models[1].fates.store(uid_of(1, 0, 0, SIZE), 0)
    assert open_once(*models, below=4).reason == "fates (judge)" and len(models[0].groups()) == 2


def test_a_round_is_of_whole_draws_and_the_next_waits_for_it(model: Make) -> None:
    one = model(seats=2, n_min=4, mode="sync")
    open_once(one)
    told = open_once(one)
    assert sorted(one.groups()) == [0, 1, 2, 3] and told.reason == "round"
    for group in range(4):
        one.end_group(group)
    open_once(one)
    assert one.groups() == {4: 4, 5: 5, 6: 6, 7: 7}


@pytest.mark.parametrize("mode", ["batch-async", "sync"])
def test_accidents_put_backs_and_unused_seats_leave_every_draw_with_one_end(model: Make, mode: str) -> None:
    """Samples end in any order by any fate; a scheduler that starts anew each time keeps to the rules of the order."""
    for seed in range(6):
        dice = random.Random(f"{mode}{seed}")
        models = [model(f"a{seed}", seats=2, mode=mode), model(f"b{seed}", mode=mode), model(f"c{seed}", mode=mode)]
        for turn in range(120):
            open_once(*models, below=12)
            check_order(models)
            for one in models:
                uids = [int(line["uid"]) for line in one.lines() if line["state"] == State.QUEUED]
                for uid in dice.sample(uids, min(len(uids), dice.randrange(12))):
                    one.end(uid, dice.choice("uuuufPRM"))
            if turn in (20, 50):
                dice.choice(models).lose()
        for one in models:
            assert not one.groups() and one.ring.header(HeaderWord.NEXT_ADMISSION) % one.seats == 0
            uids = range(12 * one.seats * SIZE * 2)
            assert not [uid for uid in uids if not has_ended(one, uid)], (seed, one.topology.tag)


def has_ended(model: Model, uid: int) -> bool:
    """Tell whether a sample has its one end, or never needs one: its group was closed, or it is no re-roll."""
    group, attempt, member = place_of(uid, SIZE)
    if code := model.fate(uid):
        return chr(code) in "ufePRM"
    if any(chr(model.fate(uid_of(group, again, other, SIZE))) in "fe" for again in (0, 1) for other in range(SIZE)):
        return True
    return bool(attempt) and chr(model.fate(uid_of(group, 0, member, SIZE))) not in "PRM"


def test_a_scheduler_shows_its_progress_in_every_ring(model: Make) -> None:
    lead, judge = model("lead"), model("judge")
    scheduler = scheduler_of(lead)
    opening(lead, judge, scheduler=scheduler)
    before = [one.ring.processes()[0].progress_ns for one in (lead, judge)]
    Actor.look_around(scheduler)
    after = [one.ring.processes()[0].progress_ns for one in (lead, judge)]
    assert all(new > old for new, old in zip(after, before)), "else a look at the judge's ring finds it silent"
