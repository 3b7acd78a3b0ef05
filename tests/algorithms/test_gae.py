"""Generalised advantages, returns and the value loss: against numbers by hand, and their definitions in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from busrl.algorithms import gae

GAMMA, DECAY = 0.9, 0.8


def rows(*parts: list[float]) -> list[gae.Floats]:
    return [np.array(part, np.float64) for part in parts]


def test_generalised_advantages_are_those_by_hand_sample_by_sample() -> None:
    """d = (0.9 x 0.6 - 0.5, 0.9 x 0.7 - 0.6, 1 - 0.7) = (0.04, 0.03, 0.3); each A is d + 0.72 times the next."""
    credit = gae.generalised(rows([0, 0, 1], [2]), rows([0.5, 0.6, 0.7], [0.5]), GAMMA, DECAY)
    assert credit[0] == pytest.approx([0.21712, 0.246, 0.3], abs=1e-12) and credit[1] == pytest.approx([1.5], abs=1e-12)


def test_returns_have_a_decay_of_their_own() -> None:
    [actual] = gae.estimated(rows([0, 0, 1]), rows([0.5, 0.6, 0.7]), 1.0, 0.8, 1.0)
    assert actual.returns == pytest.approx([1.0, 1.0, 1.0], abs=1e-12)  # the sum of rewards, whatever the values say
    assert actual.advantages == pytest.approx([0.1 + 0.8 * (0.1 + 0.8 * 0.3), 0.1 + 0.8 * 0.3, 0.3], abs=1e-12)
    [same] = gae.estimated(rows([0, 0, 1]), rows([0.5, 0.6, 0.7]), 1.0, 0.8, 0.8)
    assert same.returns == pytest.approx(same.advantages + same.values, abs=1e-12)


numbers = st.floats(-3, 3, allow_nan=False)


@given(st.lists(st.lists(st.tuples(numbers, numbers), min_size=1, max_size=9), min_size=1, max_size=4),
       st.floats(0.1, 1), st.floats(0, 1))
def test_generalised_advantages_are_the_sum_of_their_definition(
    samples: list[list[tuple[float, float]]], gamma: float, decay: float
) -> None:
    credit = gae.generalised(
        [np.array([r for r, _ in sample]) for sample in samples],
        [np.array([v for _, v in sample]) for sample in samples],
        gamma, decay,
    )
    for row, sample in zip(credit, samples, strict=True):
        value = [v for _, v in sample] + [0.0]
        errors = [r + gamma * value[t + 1] - value[t] for t, (r, _) in enumerate(sample)]
        expected = [sum((gamma * decay) ** k * e for k, e in enumerate(errors[t:])) for t in range(len(sample))]
        assert row == pytest.approx(expected, abs=1e-9)


def test_whitened_advantages_have_mean_zero_and_variance_one_over_trained_tokens_alone() -> None:
    masks = [np.array([False, True, True]), np.array([True])]
    credit = gae.whitened(rows([9.0, 1.0, 2.0], [6.0]), masks)
    trained = np.array([*credit[0][1:], *credit[1]])
    assert trained.mean() == pytest.approx(0, abs=1e-12) and trained.var(ddof=1) == pytest.approx(1, abs=1e-7)
    assert credit[0][1] == pytest.approx((1 - 3) / 7**0.5, abs=1e-8)  # of 1, 2, 6: mean 3, variance 7


def test_the_value_loss_and_its_gradient_are_of_the_worse_term() -> None:
    """Per token: inside of the clip; outside, where the plain term is larger; outside, where the clipped one is, which
    has no gradient; and at the value before the step."""
    value = torch.tensor([0.3, 1.5, 1.5, 0.0], dtype=torch.float64, requires_grad=True)
    old, returns = torch.tensor([0.0, 0.0, 0.0, 0.0]).double(), torch.tensor([1.0, 0.25, 2.0, -1.0]).double()
    actual = gae.value_loss(value, old, returns, 0.5)
    expected = [0.7**2 / 2, 1.25**2 / 2, 1.5**2 / 2, 0.5]
    assert actual.tolist() == pytest.approx(expected, abs=1e-12)
    (gradient,) = torch.autograd.grad(actual.sum(), value)
    assert gradient.tolist() == pytest.approx([-0.7, 1.25, 0.0, 1.0], abs=1e-12)
    plain = gae.value_loss(value, old, returns, 0.0)
    assert plain.tolist() == pytest.approx([0.7**2 / 2, 1.25**2 / 2, 0.5**2 / 2, 0.5], abs=1e-12)
