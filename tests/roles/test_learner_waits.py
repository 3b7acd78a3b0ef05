"""How long the learner sleeps when there is nothing to do."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from busrl.roles.learner.loop import Learner
from busrl.scheduling.limits import derive


@pytest.mark.parametrize("deadline_s, waits_s", [(float("inf"), 0.02), (0.5, 0.02), (0.005, 0.005), (0.0, 0.02)])
def test_past_t_max_s_only_a_reward_or_the_timer_wakes_it(deadline_s: float, waits_s: float) -> None:
    waited: list[float] = []
    ring = SimpleNamespace(wait=lambda state, seen, timeout_s: waited.append(timeout_s), add=lambda **sums: None)
    plan = SimpleNamespace(trigger=SimpleNamespace(deadline_s=lambda now: deadline_s))
    learner: Any = SimpleNamespace(ring=ring, plan=plan, looked=0, metrics=SimpleNamespace(waited=lambda seconds: None))
    Learner.idle(learner, 0.02)
    assert waited == [waits_s]


@pytest.mark.parametrize("n_hi, window, said", [
    (8, 0, "B = 4 x n_min = 32, W = floor(0.3 B) = 9"), (64, 0, "B = n_hi = 64"),
    (8, 2, "B = 4 x n_min = 32, W = weights.window = 2"),
])
def test_the_sums_of_fully_async_are_those_that_it_goes_by(n_hi: int, window: int, said: str) -> None:
    assert any(said in line for line in derive("fully-async", 8, 0, 8, 8, n_hi, window=window).explain())
