"""The mean of earlier groups as a baseline: exponential, of each seat by itself, kept with steps that were made."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from busrl.algorithms.advantages import RunningMeans

rewards = st.lists(st.floats(-5, 5), min_size=1, max_size=4)
groups = st.lists(st.tuples(st.integers(0, 50), rewards), max_size=12)


def weighted(means: list[float], decay: float) -> float:
    """By the definition: the newest counts most."""
    weights = [decay**age for age in range(len(means) - 1, -1, -1)]
    return sum(mean * weight for mean, weight in zip(means, weights)) / sum(weights) if means else 0.0


@given(groups=groups, seats=st.integers(1, 3), decay=st.sampled_from([0.0, 0.5, 0.95]))
def test_a_group_is_compared_with_the_groups_of_its_seat_before_it(
    groups: list[tuple[int, list[float]]], seats: int, decay: float
) -> None:
    means, seen = RunningMeans(seats, decay), {seat: list[float]() for seat in range(seats)}
    for group, own in groups:
        assert means.before(group, own) == pytest.approx(weighted(seen[group % seats], decay), abs=1e-9)
        seen[group % seats].append(sum(own) / len(own))


@given(groups=groups, lost=groups, seats=st.integers(1, 3))
def test_groups_of_a_step_that_was_not_made_are_forgotten(
    groups: list[tuple[int, list[float]]], lost: list[tuple[int, list[float]]], seats: int
) -> None:
    means = RunningMeans(seats)
    for group, own in groups:
        means.before(group, own)
    means.keep()
    kept = means.state()
    for group, own in lost:
        means.before(group, own)
    again = RunningMeans(seats)
    again.load(means.state())
    assert means.state() == again.state() == kept
    assert [again.before(seat, [0.0]) for seat in range(seats)] == [
        total / weight if weight else 0.0
        for seat in range(seats) for total, weight in [next(((t, w) for s, t, w in kept if s == seat), (0.0, 0.0))]
    ]


def test_groups_of_one_have_no_bias_and_less_variance() -> None:
    """By enumeration: an act of chance p, and its rewards; three groups of one before the one that is trained."""
    chance, worth = 0.3, (4.0, 5.0)
    wanted = chance * (1 - chance) * (worth[1] - worth[0])  # by the logit of the chance
    totals, squares = torch.zeros(2, dtype=torch.float64), torch.zeros(2, dtype=torch.float64)
    for acts in itertools.product((0, 1), repeat=4):
        probability, means = math.prod(chance if act else 1 - chance for act in acts), RunningMeans(1)
        baseline = [means.before(group, [worth[act]]) for group, act in enumerate(acts)][-1]
        for which, base in enumerate((baseline, 0.0)):
            term = (worth[acts[-1]] - base) * (acts[-1] - chance)
            totals[which] += probability * term
            squares[which] += probability * term**2
    assert totals.tolist() == pytest.approx([wanted, wanted], abs=1e-9)
    assert squares[0] < squares[1] / 10
