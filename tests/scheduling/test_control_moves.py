"""Thresholds move while a closed loop runs: no deadlock, and no group older than allowed."""

from __future__ import annotations

import random
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from busrl.scheduling.admission import derive

LOOPS = settings(max_examples=15)
SEEDS = st.integers(0, 2**32 - 1)


def moving(closed_loop: Any) -> Any:
    """A closed loop whose thresholds are drawn anew between steps, and which remembers when a group was admitted."""

    class Moving(closed_loop):  # type: ignore[misc]
        def __init__(self, seed: int, **more: Any) -> None:
            self.admitted: dict[int, int] = {}  # draw -> learner step
            self.older: list[int] = []  # ages from admission
            self.chance = random.Random(seed)
            super().__init__(seed, **more)

        def take_admission(self) -> int:
            index = int(super().take_admission())
            self.admitted[self.opening] = self.published
            return index

        def open_groups(self, view: Any) -> bool:
            original = self.policy.next

            def following() -> Any:
                candidate = original()
                self.opening = candidate.draw
                return candidate

            self.policy.next = following
            try:
                return bool(super().open_groups(view))
            finally:
                self.policy.next = original

        def fire(self, view: Any, action: Any) -> None:
            for draw in action.draws:
                self.older.append(self.step - self.admitted[draw])
            super().fire(view, action)
            self.trigger.set(self.chance.randint(self.limits.n_lo, self.limits.n_hi), self.trigger.t_max_s)

    return Moving


@LOOPS
@given(seed=SEEDS, n_lo=st.integers(1, 4), factor=st.integers(1, 3), spare=st.integers(0, 4),
       accidents=st.sampled_from([0.0, 0.1]))
def test_no_group_exceeds_the_age_bound_whatever_thresholds_its_flight_saw(
    closed_loop: Any, seed: int, n_lo: int, factor: int, spare: int, accidents: float
) -> None:
    n_hi = n_lo * factor
    loop = moving(closed_loop)(seed, n_min=n_lo, n_lo=n_lo, n_hi=n_hi, staleness=factor + spare, accidents=accidents,
                               deaths=0.0, checked=False)
    for _ in range(60_000):
        assert loop.tick(), "nothing can happen any more: a deadlock"
        if loop.step >= 12:
            break
    assert loop.step >= 12
    # From admission, so what waited in a queue before it was generated is in it.
    assert all(age <= factor + spare for age in loop.older)
    assert all(n_lo <= groups for _, groups in loop.fired)


def test_an_explicit_window_is_kept_and_one_above_the_buffer_is_refused() -> None:
    limits = derive("batch-async", 32, 2, 8, window=10)
    assert (limits.B, limits.W, limits.problems()) == (87, 10, [])
    (problem,) = derive("batch-async", 32, 2, 8, window=60).problems()
    assert "weights.window = 60 is larger than the buffer" in problem and "set window <= 48" in problem
    assert derive("batch-async", 32, 2, 8, window=48).problems() == []
    (problem,) = derive("fully-async", 32, 2, 8, window=200).problems()
    assert "set window <= 128" in problem


def test_the_trigger_takes_new_thresholds_between_steps() -> None:
    from busrl.scheduling.trigger import Trigger

    trigger = Trigger(4)
    trigger.set(2, 0.5)
    assert trigger.cause(2, 0.0) == "count"
