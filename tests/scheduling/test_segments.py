"""Every answer can reach its limit, however it is cut; a length that follows the answers stays within its bounds."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from busrl.scheduling.admission import ENOUGH, AutoLength, Cut, SegmentPlan


def test_every_segment_has_the_given_length_and_the_last_the_rest() -> None:
    plan = SegmentPlan(16, 4, 40)
    assert [plan.next(0, 40), plan.next(1, 24), plan.next(2, 8)] == [Cut(16, False), Cut(16, False), Cut(8, True)]


def test_without_segments_an_answer_is_made_in_one_go() -> None:
    plan = SegmentPlan(0, 8, 40)
    assert (plan.on, plan.most, plan.next(0, 40)) == (False, 1, Cut(40, True))


def test_an_answer_whose_segments_ended_early_still_reaches_its_limit() -> None:
    # Somebody else's worker made two segments of one token each: the last two must hold the other 38.
    assert SegmentPlan(10, 4, 40).next(2, 38) == Cut(19, False)
    assert SegmentPlan(10, 4, 40).next(3, 19) == Cut(19, True)


@given(
    length=st.one_of(st.just("auto"), st.integers(1, 300)), most=st.integers(1, 14), limit=st.integers(1, 500),
    seen=st.lists(st.integers(1, 500), max_size=200),
)
def test_the_limit_is_reached_within_the_segments_there_are(
    length: int | str, most: int, limit: int, seen: list[int]
) -> None:
    plan, left, segment = SegmentPlan(length, most, limit), limit, 0
    while left:
        if plan.auto:
            plan.auto.finished(seen)
            plan.auto.choose()
        cut = plan.next(segment, left)
        assert 1 <= cut.tokens <= left and cut.last == (cut.tokens == left)
        left, segment = left - cut.tokens, segment + 1
    assert segment <= most


def test_auto_cuts_nothing_before_it_has_seen_enough_answers() -> None:
    auto = AutoLength(10, 1000)
    auto.finished([50] * (ENOUGH - 1))
    assert auto.choose() is None and auto.length == 1000


def test_auto_lets_four_of_five_answers_end_in_their_first_segment() -> None:
    auto = AutoLength(10, 1000)
    auto.finished([*range(1, 101)])
    assert auto.choose() == auto.length == 81
    auto.finished([*range(1, 101)])
    assert auto.choose() is None  # nothing new: nothing to say


def test_auto_makes_segments_long_enough_for_what_a_weight_update_costs() -> None:
    auto = AutoLength(10, 1000)
    auto.finished([20] * ENOUGH)
    auto.costs(sync_s=0.1, token_s=0.01)  # 200 tokens take 2 s, of which the update is 5 %
    assert auto.choose() == 200
    auto.costs(sync_s=math.nan, token_s=0.0)
    assert auto.choose() is None


@given(st.lists(st.lists(st.integers(1, 2000), min_size=1, max_size=100), max_size=8))
def test_auto_stays_within_its_bounds_and_moves_only_by_a_clear_factor(rounds: list[list[int]]) -> None:
    auto = AutoLength(16, 1000)
    for lengths in rounds:
        before = auto.length
        auto.finished(lengths)
        chosen = auto.choose()
        assert 16 <= auto.length <= 1000
        assert chosen in (None, auto.length) and (chosen is None) == (auto.length == before)
        if chosen and chosen not in (16, 1000):
            assert max(chosen, before) >= 1.25 * min(chosen, before)
