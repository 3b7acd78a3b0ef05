"""Advantages of the samples of one group from their rewards, and the question whether a group teaches anything.

The learner calls it once per group. Knows nothing of tokens: a sample has one advantage for all of them.

- An advantage depends on its own group alone, so groups can be trained as they become ready.
- A flat group (all rewards equal, or every advantage 0) is found here and never reaches a denominator.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

EPS = 1e-6  # added to the standard deviation: a published convention, not only a guard against division by 0

# Rewards of the G samples of one group, at least 2 of them different, and how many tokens each sample has -> G
# advantages. Called once per group.
AdvantageEstimator = Callable[[Sequence[float], Sequence[int]], Tensor | Sequence[float]]


def group_std(rewards: Sequence[float], lengths: Sequence[int] = ()) -> Tensor:
    """(R - mean) / (std + 1e-6), with n - 1 under the root; in float64, one value per sample."""
    centred = group_mean(rewards)
    return centred / (centred.std(correction=1) + EPS)


def group_mean(rewards: Sequence[float], lengths: Sequence[int] = ()) -> Tensor:
    """R - mean, in float64: leaves the scale of the rewards in the gradient."""
    if len(rewards) < 2:
        raise ValueError(f"a group of {len(rewards)} has no advantage: rewards are compared with each other; needs 2")
    values = torch.tensor(list(rewards), dtype=torch.float64)
    return values - values.mean()


ADVANTAGES: dict[str, AdvantageEstimator] = {"group_std": group_std, "group_mean": group_mean}


def is_flat(rewards: Sequence[float]) -> bool:
    """True if the group carries no signal. Compared exactly: a rounded mean must not turn equal rewards into one."""
    return len(rewards) < 2 or all(reward == rewards[0] for reward in rewards)


def advantages(estimator: AdvantageEstimator, rewards: Sequence[float], lengths: Sequence[int] = ()) -> list[float]:
    """The advantages of one group; all exactly 0.0 for a flat group, which the estimator never sees."""
    if is_flat(rewards):
        return [0.0] * len(rewards)
    found = estimator(rewards, lengths)
    return [float(value) for value in (found.tolist() if isinstance(found, Tensor) else found)]
