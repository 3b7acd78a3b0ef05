"""Which round of validation is due: tables of cases, and what a round that measured nothing leads to."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from busrl.scheduling.trigger import Rounds


@pytest.mark.parametrize(
    ("rounds", "step", "newest", "due"),
    [
        (Rounds(before=True, every=10, at_end=True, done=set()), 0, None, 0),
        (Rounds(before=True, every=10, at_end=True, done=set(), late=True), 30, None, 30),
        (Rounds(before=False, every=10, at_end=True, done=set()), 9, None, None),
        (Rounds(before=False, every=10, at_end=True, done={10}), 47, None, 40),
        (Rounds(before=False, every=10, at_end=True, done={40}), 47, None, None),
        (Rounds(before=False, every=10, at_end=True, done={12}), 30, 30, 30),
        (Rounds(before=False, every=10, at_end=True, done={12}), 30, 0, None),
        (Rounds(before=False, every=10, at_end=True, done={12}), 12, 12, None),
    ],
)
def test_the_round_that_is_due_follows_step_and_what_is_done(
    rounds: Rounds, step: int, newest: int | None, due: int | None
) -> None:
    assert rounds.due(step, False, newest) == due


def test_the_last_round_is_due_once() -> None:
    rounds = Rounds(before=True, every=0, at_end=True, done={0})
    assert rounds.due(100, True) == 100
    rounds.done.add(100)
    assert rounds.due(100, True) is None


@given(st.booleans(), st.integers(0, 7), st.booleans(), st.sets(st.integers(0, 50)), st.integers(0, 50), st.booleans())
def test_a_round_that_is_done_is_never_due_again(
    before: bool, every: int, at_end: bool, done: set[int], step: int, finished: bool
) -> None:
    due = Rounds(before, every, at_end, done).due(step, finished)
    assert due is None or due not in done


def asked_when_nothing_is_judged(rounds: Rounds, steps: range) -> list[int]:
    """The steps at which a round is asked, if every one of them measures nothing."""
    numbers = []
    for step in steps:
        if (number := rounds.due(step, False)) is not None:
            assert number in (step, 0)
            numbers.append(step)
            rounds.ended(number, measured=False)
    return numbers


@pytest.mark.parametrize(
    ("every", "asked"), [(0, [0, 1, 3, 7, 15, 31]), (4, [0, 1, 3, 7, 11, 15, 19, 23, 27, 31]), (1, [*range(33)])]
)
def test_a_round_that_measured_nothing_is_asked_again_ever_more_rarely(every: int, asked: list[int]) -> None:
    rounds = Rounds(before=True, every=every, at_end=True, done=set())
    assert asked_when_nothing_is_judged(rounds, range(33)) == asked


def test_while_no_step_is_made_a_round_is_not_asked_again() -> None:
    rounds = Rounds(before=True, every=10, at_end=True, done=set())
    rounds.ended(0, measured=False)
    assert rounds.due(0, False) is None and rounds.due(0, True) is None
    assert rounds.due(1, False) == 1
    rounds.ended(1, measured=True)
    assert rounds.due(2, False) is None and rounds.due(10, False) == 10


def test_a_last_round_that_measured_nothing_ends_the_run_all_the_same() -> None:
    rounds = Rounds(before=False, every=0, at_end=True, done=set())
    assert rounds.due(7, True) == 7
    rounds.ended(7, measured=False)
    assert rounds.due(7, True) is None
