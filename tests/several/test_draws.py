"""What is opened next in which ledger, decided from what each has of the draws."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from busrl.scheduling.groups import Bytes
from busrl.several.draws import Had, Plan, is_closed, last_first, plan_of, stands


def had(seats: int, *groups: int, open_: tuple[int, ...] = (), reach: int = 100) -> Had:
    """A ledger that has these groups."""
    end = max(groups, default=-1) + 1
    missing = [group for group in range(end) if group not in groups]
    return Had(seats, end, np.array(missing, np.int64), np.array(open_, np.int64), reach)


def codes(first: str, second: str = "....") -> Bytes:
    return np.array([0 if letter == "." else ord(letter) for letter in first + second], np.uint8)


LEDGER = st.tuples(st.integers(1, 4), st.sets(st.integers(0, 30)))


@given(st.lists(LEDGER, min_size=1, max_size=4))
def test_a_group_that_is_lacking_is_new_everywhere_or_mended_there(made: list[tuple[int, set[int]]]) -> None:
    plan = plan_of([had(seats, *groups) for seats, groups in made])
    for (seats, groups), mends in zip(made, plan.mends):
        new = {draw * seats + seat for draw in plan.new for seat in range(seats)}
        assert {*groups} | {*mends} | new == {*range(plan.top * seats)}
        assert not {*mends} & (groups | new) and not new & groups
    assert plan.top == 0 or any(group // seats == plan.top - 1 for seats, groups in made for group in groups)


def test_a_draw_that_one_ledger_lost_is_mended_and_not_new() -> None:
    assert plan_of([had(1, 0, 1, 2), had(2, 0, 1, 4, 5)]) == Plan((), 3, ((), (2, 3)))


def test_a_model_that_was_finished_does_not_play_all_that_it_missed() -> None:
    plan = plan_of([had(1, *range(90)), had(2, *range(20), reach=3)])
    assert plan == Plan((), 90, ((), (*range(2 * 87, 2 * 90),)))


def test_what_is_open_anywhere_is_mended_however_old_it_is() -> None:
    judge = had(1, *range(90), open_=(12, 40, 89), reach=3)
    assert plan_of([had(1, *range(10), reach=3), judge]).mends == ((12, 40, 87, 88, 89), ())


def test_a_draw_that_all_have_lost_is_new() -> None:
    plan = plan_of([had(1, 0, 2), had(1, 0, 2)])
    assert plan == Plan((1,), 3, ((), ()))
    assert [*plan.draws(3, below=10)] == [1, 3, 4] and [*plan.draws(3, below=4)] == [1, 3]


def test_a_draw_of_which_one_seat_was_opened_is_mended() -> None:
    assert plan_of([had(2, 0, 1, 3)]) == Plan((), 2, ((2,),))


def test_seats_are_opened_from_the_last_to_the_first_draw_by_draw() -> None:
    assert last_first([0, 1, 2, 4, 5], 3) == [2, 1, 0, 5, 4]


def test_a_member_stands_with_a_fate_or_once_its_group_is_over() -> None:
    assert stands(codes("D.PD"), 4).tolist() == [True, False, True, True]
    assert stands(codes("f..."), 4).all() and stands(codes("P...", "T..."), 4).all()
    assert stands(codes("u.uu"), 4).tolist() == [True, False, True, True]


def test_a_second_try_stands_once_it_came_or_never_will() -> None:
    assert stands(codes("PRuD", ".D.."), 4, 1).tolist() == [False, True, True, True]
    assert stands(codes("PP..", "...."), 4, 1).tolist() == [False, False, True, True]
    assert stands(codes("PPf.", "...."), 4, 1).all()


def test_an_unused_seat_and_an_accident_close_no_group() -> None:
    assert not is_closed(codes("uuDP", "...D"))
    assert is_closed(codes("uuTP", "...D")) and is_closed(codes("DDDP", "...i"))
