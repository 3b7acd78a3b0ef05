"""How long the learner sleeps when there is nothing to do, and what it writes of that."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from busrl.roles.learner.metrics import joined
from busrl.scheduling.admission import derive
from busrl.scheduling.trigger import Trigger


@pytest.mark.parametrize("t_max_s, now, sleeps_s", [
    (float("inf"), 5.0, 0.02), (5.5, 5.0, 0.02), (5.005, 5.0, 0.005), (5.0, 5.0, 0.02), (3.0, 5.0, 0.02),
])
def test_past_t_max_s_only_a_reward_or_the_timer_wakes_it(t_max_s: float, now: float, sleeps_s: float) -> None:
    trigger = Trigger(8, t_max_s=t_max_s)
    trigger.step_ended(0.0)
    assert trigger.sleep_s(0.02, now) == pytest.approx(sleeps_s)


@pytest.mark.parametrize("n_hi, window, said", [
    (8, 0, "B = 4 x n_min = 32, W = floor(0.3 B) = 9"), (64, 0, "B = n_hi = 64"),
    (8, 2, "B = 4 x n_min = 32, W = weights.window = 2"),
])
def test_the_sums_of_fully_async_are_those_that_it_goes_by(n_hi: int, window: int, said: str) -> None:
    assert any(said in line for line in derive("fully-async", 8, 0, 8, 8, n_hi, window=window).explain())


@given(st.lists(st.tuples(st.floats(0, 0.2), st.floats(0.001, 0.5)), max_size=60), st.integers(1, 8))
def test_step_waits_are_few_ordered_spans_that_cover_every_wait(
    waits: list[tuple[float, float]], most: int
) -> None:
    now, told, spans = 0.0, list[list[float]](), list[list[float]]()
    for gap, seconds in waits:
        spans.append([now + gap, now + gap + seconds])
        now += gap + seconds
        told = joined([*told, spans[-1]], most)
    assert len(told) <= most and all(a[1] <= b[0] for a, b in pairwise(told))
    assert all(any(begin <= a and b <= end for begin, end in told) for a, b in spans)
    if len(spans) <= most:
        assert sum(b - a for a, b in told) <= sum(b - a for a, b in spans) + 0.05 * len(spans) + 1e-6
