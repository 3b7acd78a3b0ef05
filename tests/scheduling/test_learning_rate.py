"""The learning rate of a step: coupled to its groups, with warm-up and decay counted in groups."""

from __future__ import annotations

import math

import pytest

from busrl.scheduling.learning_rate import Schedule

LINEAR = Schedule(lr=1.0, n_min=10, warmup_groups=20, decay="linear", decay_groups=100, decay_to=0.1)
COSINE = Schedule(lr=1.0, n_min=10, decay="cosine", decay_groups=100)


@pytest.mark.parametrize(("groups", "rate"), [
    (32, 1e-3), (16, 1e-3 * math.sqrt(0.5)), (4, 0.5e-3), (1, 0.5e-3), (128, 2e-3), (1000, 2e-3),
])
def test_the_rate_follows_the_square_root_of_the_groups_within_bounds(groups: int, rate: float) -> None:
    assert Schedule(lr=1e-3, n_min=32)(0, groups) == pytest.approx(rate)


@pytest.mark.parametrize(("trained", "rate"), [(0, 0.25), (10, 0.5), (20, 0.75), (30, 1.0), (40, 1.0), (1000, 1.0)])
def test_warm_up_counts_groups_and_the_first_step_is_not_wasted(trained: int, rate: float) -> None:
    assert Schedule(lr=1.0, n_min=10, warmup_groups=40)(trained, 10) == rate


@pytest.mark.parametrize(("schedule", "trained", "groups", "rate"), [
    (LINEAR, 0, 10, 0.5), (LINEAR, 10, 10, 1.0), (LINEAR, 20, 10, 1.0), (LINEAR, 70, 10, 0.55),
    (LINEAR, 120, 10, 0.1), (LINEAR, 1000, 10, 0.1),
    (COSINE, 0, 10, 1.0), (COSINE, 50, 10, 0.5), (COSINE, 100, 10, 0.0),
    (COSINE, 50, 5, 0.5 * math.sqrt(0.5)),  # half as many groups, twice as many steps: the same fall over the same data
])
def test_decay_counts_groups_from_the_end_of_warm_up(
    schedule: Schedule, trained: int, groups: int, rate: float
) -> None:
    assert schedule(trained, groups) == pytest.approx(rate)
