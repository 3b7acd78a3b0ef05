"""Which validation round is due, from what is done and where the learner stands."""

from __future__ import annotations

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from busrl.roles.validator import Rounds, _finished_rounds


def test_the_first_round_comes_before_training() -> None:
    assert Rounds(before=True, every=10, at_end=True, done=set()).due(0, False, 100) == 0


def test_without_validation_before_nothing_is_due_at_the_start() -> None:
    assert Rounds(before=False, every=10, at_end=True, done=set()).due(9, False, 100) is None


def test_a_missed_round_is_not_made_up_for() -> None:
    assert Rounds(before=False, every=10, at_end=True, done={10}).due(47, False, 100) == 40


def test_the_last_round_is_due_once() -> None:
    rounds = Rounds(before=True, every=0, at_end=True, done={0})
    assert rounds.due(100, True, 100) == 100
    rounds.done.add(100)
    assert rounds.due(100, True, 100) is None


@given(st.booleans(), st.integers(0, 7), st.booleans(), st.sets(st.integers(0, 50)), st.integers(0, 50), st.booleans())
def test_a_round_that_is_done_is_never_due_again(
    before: bool, every: int, at_end: bool, done: set[int], step: int, finished: bool
) -> None:
    due = Rounds(before, every, at_end, done).due(step, finished, 50)
    assert due is None or due not in done


def test_a_damaged_line_costs_its_round_another_end_and_not_the_validator(tmp_path: Path) -> None:
    path = tmp_path / "validation.jsonl"
    path.write_bytes(b'{"round":0,"mean":1}\n\xff\x00{"round":3}\n[]\n{"round":5}\n')
    assert _finished_rounds(path) == {0, 5} and _finished_rounds(tmp_path / "none") == set()


def test_where_groups_are_counted_the_newest_round_is_given() -> None:
    rounds = Rounds(before=False, every=10, at_end=True, done={12})
    assert rounds.due(30, False, 100, newest=30) == 30
    assert rounds.due(30, False, 100, newest=0) is None
    assert rounds.due(12, False, 100, newest=12) is None
