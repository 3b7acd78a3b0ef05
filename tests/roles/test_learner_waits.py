"""How long the learner sleeps when there is nothing to do, and what it writes of that."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from busrl.roles.learner.groups import LOOK_LEAST_S, LOOK_MOST_S, Looks
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


class Rewards:
    """A ring to which rewards come at even times, and the clock that a wait at it moves."""

    def __init__(self, every_s: float) -> None:
        self.every_s, self.now, self.waits = every_s, 0.0, 0

    def transitions(self, state: int) -> int:
        return int(self.now / self.every_s + 1e-9)

    def wait(self, state: int, seen: int, timeout_s: float) -> int:
        self.waits += 1
        self.now = min(self.now + timeout_s, max(self.now, (seen + 1) * self.every_s))
        return self.transitions(state)

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.mark.parametrize("every_s, most", [(0.01, 300), (0.001, 170), (0.0001, 95)])
def test_a_step_of_2700_rewards_takes_few_looks_at_any_rate(every_s: float, most: int) -> None:
    ring: Any = Rewards(every_s)
    looks, taken = Looks(ring, lambda: ring.now, ring.sleep), 0
    while (rewards := ring.transitions(0)) < 2700:
        looks.wait(0.02)
        if looks.due():
            taken += 1
            looks.within(LOOK_MOST_S, min(16, 2700 - rewards))
    assert taken <= most


@pytest.mark.parametrize("worth, cost_s, after_s", [
    (1, 0.0, 0.005), (3, 0.0, 0.015), (99, 0.0, LOOK_MOST_S), (1, 0.002, 0.04), (1, 9.0, LOOK_MOST_S),
])
def test_the_next_look_comes_with_the_reward_that_may_end_a_step(worth: int, cost_s: float, after_s: float) -> None:
    ring: Any = Rewards(0.005)
    looks = Looks(ring, lambda: ring.now, ring.sleep)
    assert looks.due()
    looks.within(LOOK_MOST_S, worth, cost_s)
    assert not looks.due()
    looks.wait(1.0)
    assert looks.due() and ring.now == pytest.approx(after_s)
    assert ring.waits <= 1 + round(after_s / 0.005)


def test_two_looks_lie_apart_however_many_rewards_come() -> None:
    ring: Any = Rewards(0.0001)
    looks = Looks(ring, lambda: ring.now, ring.sleep)
    looks.within(LOOK_MOST_S, 1)
    looks.wait(1.0)
    assert ring.now == pytest.approx(LOOK_LEAST_S, abs=1e-4)
    assert ring.waits <= 1, "a reward that makes no look due woke the learner"
    looks.again()
    assert looks.due()


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
