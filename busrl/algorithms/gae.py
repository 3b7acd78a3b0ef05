"""Values of tokens: generalised advantages, the returns that a value head is trained towards, and its loss (PPO).

The learner estimates the samples of a step once, before its first update; the trainer adds the value loss to that of
the policy.

- V_t is the value before token t was drawn, from all tokens before it. After the last token it is 0, also for a cut
  answer: the reward is the worth of the whole answer.
- Values, returns and advantages are constants: the gradient of a value flows through its loss alone.
- All is computed in float64, and once per step: the parts of a streamed step add up to the step at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

EPS = 1e-8  # under the root of a whitening
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class ValueSettings:
    """The keys of [learner.value] that the trainer reads."""

    coef: float = 0.1
    clip: float = 0.5
    rate: float = 10.0


@dataclass(frozen=True)
class Valued:
    """Values of a sample, one per generated token."""

    advantages: Floats
    returns: Floats
    values: Floats  # under the weights before the step


def generalised(rewards: Sequence[Floats], values: Sequence[Floats], gamma: float, decay: float) -> list[Floats]:
    """GAE (1506.02438): A_t = sum_l (gamma decay)^l d_{t+l}, d_t = r_t + gamma V_{t+1} - V_t; a row per sample."""
    counts = [len(row) for row in rewards]
    size = max(counts, default=0)
    padded = [np.zeros((len(rewards), size + 1)) for _ in range(2)]
    for table, rows in zip(padded, (rewards, values), strict=True):
        for i, row in enumerate(rows):
            table[i, : len(row)] = row
    reward, value = padded
    advantages, following = np.zeros((len(rewards), size)), np.zeros(len(rewards))
    for t in range(size - 1, -1, -1):  # behind the end of a row all is 0
        following = reward[:, t] + gamma * value[:, t + 1] - value[:, t] + gamma * decay * following
        advantages[:, t] = following
    return [row[:count] for row, count in zip(advantages, counts, strict=True)]


def estimated(
    rewards: Sequence[Floats], values: Sequence[Floats], gamma: float, decay: float, decay_of_values: float
) -> list[Valued]:
    """Advantages of the policy with `decay`; returns V_t + A_t with `decay_of_values`, which is 1 for the plain sum of
    rewards (decoupled GAE, 2503.01491)."""
    advantages = generalised(rewards, values, gamma, decay)
    towards = advantages if decay == decay_of_values else generalised(rewards, values, gamma, decay_of_values)
    return [Valued(a, v + b, v) for a, v, b in zip(advantages, values, towards, strict=True)]


def whitened(rows: Sequence[Floats], masks: Sequence[NDArray[np.bool_]]) -> list[Floats]:
    """(A - mean) / sqrt(variance + 1e-8) over all trained tokens of the rows, n - 1 of them under the root. Tokens
    that are not trained are shifted and scaled alike, and count in neither number."""
    trained = np.concatenate([row[mask] for row, mask in zip(rows, masks, strict=True)]) if rows else np.zeros(0)
    if not len(trained):
        return list(rows)
    spread = np.sqrt(trained.var(ddof=1) + EPS) if len(trained) > 1 else 1.0
    return [(row - trained.mean()) / spread for row in rows]


def value_loss(values: Tensor, old: Tensor, returns: Tensor, clip: float) -> Tensor:
    """max((V - R)^2, (clip(V, V_old - c, V_old + c) - R)^2) / 2 per token; c = 0: (V - R)^2 / 2."""
    plain = (values - returns).square()
    if clip:
        plain = torch.maximum(plain, (values.clamp(old - clip, old + clip) - returns).square())
    return plain / 2
