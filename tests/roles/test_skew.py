"""Lengths drawn, dispatched and consumed, and the alarm."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from busrl.roles.learner.alarms import LengthSkew, distribution, ks_distance


def test_groups_finished_first_are_shorter_and_raise_one_alarm() -> None:
    skew = LengthSkew(steps=3, alarm=0.9)
    told = []
    for step in range(6):
        for i in range(4):
            short = i < 2
            skew.ended(4 * step + i, [10, 10] if short else [30, 30], "T" if short else "o")
        row = skew.step([4 * step + 4])
        told.append(skew.warning(row))
    assert row["length_consumed_mean"] == 10 and row["length_dispatched_mean"] == row["length_drawn_mean"] == 20
    assert (row["length_ratio"], row["untrained_share"], row["length_ks_dispatched"]) == (0.5, 0.5, 0.5)
    assert row["old_by_length"] == [0, 0, 3, 3]
    assert [bool(text) for text in told] == [False, False, True, False, False, False]
    assert "trained answers are 0.50 as long as all that ended" in told[2]


def test_a_group_that_takes_long_holds_back_what_was_drawn_after_it() -> None:
    skew = LengthSkew(steps=5, alarm=0.9)
    skew.ended(0, [5], "T")
    skew.ended(2, [7], "T")
    row = skew.step([1, 3])
    assert row["length_drawn_mean"] == 5 and row["length_dispatched_mean"] == 6
    skew.ended(1, [90], "f")
    row = skew.step([3])
    assert row["length_drawn_mean"] == 34 and row["length_drawn_p95"] == 90


def test_nothing_ended_is_no_alarm() -> None:
    skew = LengthSkew(steps=1, alarm=0.9)
    row = skew.step([])
    assert row["length_ratio"] is None and skew.warning(row) == "" and row["untrained_share"] == 0.0


@given(st.lists(st.integers(1, 20), max_size=30), st.lists(st.integers(1, 20), max_size=30))
def test_ks_distance_is_the_largest_gap_between_two_distributions(a: list[int], b: list[int]) -> None:
    actual = ks_distance(distribution(np.array(a, np.int64)), distribution(np.array(b, np.int64)))
    if not a or not b:
        assert actual == 0.0
        return
    gaps = [abs(sum(x <= v for x in a) / len(a) - sum(x <= v for x in b) / len(b)) for v in range(21)]
    assert actual == pytest.approx(max(gaps))
