"""Advantages of samples from their rewards, how samples are weighted in a step, and what the sum is divided by.

A sample has one advantage for all of its tokens.

- Most estimators depend on their own group alone, so groups can be trained as they become ready. `batch_std` is
  (R - mean of the group) over one number of the step, so the division can follow the gradient.
- A flat group (all rewards equal, or every advantage 0) is found here and never reaches a denominator.
- Tokens and samples that a loss or a correction leaves out still count in the denominator.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

EPS = 1e-6  # added to the standard deviation: a published convention, not only a guard against division by 0

# Rewards of the G samples of one group, at least 2 of them different, and how many tokens each sample has -> G
# advantages. Called once per group.
AdvantageEstimator = Callable[[Sequence[float], Sequence[int]], Tensor | Sequence[float]]

# -- of one group ----------------------------------------------------------------


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


def leave_one_out(rewards: Sequence[float], lengths: Sequence[int] = ()) -> Tensor:
    """R - mean of the others (RLOO)."""
    return group_mean(rewards) * (len(rewards) / (len(rewards) - 1))


def mean_normalised(rewards: Sequence[float], lengths: Sequence[int] = ()) -> Tensor:
    """(R - mean) / mean, 0 where the mean is not above 0 (MaxRL)."""
    centred, mean = group_mean(rewards), sum(rewards) / len(rewards)
    return centred / mean if mean > 0 else torch.zeros_like(centred)


def reward_alone(rewards: Sequence[float], lengths: Sequence[int] = ()) -> Tensor:
    """R: no baseline, also for a flat group, to which every other estimator gives 0."""
    return torch.tensor(list(rewards), dtype=torch.float64)


# -- of each turn of an episode --------------------------------------------------


def turn_advantages(
    rewards: Sequence[Sequence[float]], gamma: float = 1.0, scaled: bool = False,
    keys: Sequence[Sequence[str]] | None = None,
) -> list[list[float]]:
    """A_t = G_t - the mean over the *other* episodes of their G_t, with G_t = sum over k >= t of gamma^(k - t) r_k.

    `rewards`: of each episode of a group those of its turns, in order. An episode that has ended by turn t has G_t = 0
    there: the baseline of a turn depends on nothing that its own episode does, and is unbiased. A mean over the
    episodes that reach turn t would be biased where the policy decides when to stop. `scaled`: divide by the standard
    deviation of the episodes' sums, as `group_std` does. `keys`: of each turn, "" for none. Turns with the key of a
    turn replace it in the mean: of each *other* episode that has some, their mean of G. Where none has one the mean is
    that of a turn without a key.
    """
    if len(rewards) < 2:
        raise ValueError(f"a group of {len(rewards)} has no advantage: rewards are compared with each other; needs 2")
    longest = max(map(len, rewards))
    table = torch.zeros(len(rewards), longest, dtype=torch.float64)
    for row, turns in zip(table, rewards, strict=True):
        row[: len(turns)] = torch.tensor(list(turns), dtype=torch.float64)
    totals = table.sum(1)
    for t in range(longest - 2, -1, -1):
        table[:, t] += gamma * table[:, t + 1]
    values = table - (table.sum(0) - table) / (len(rewards) - 1)
    for at, baseline in _by_key(table.tolist(), keys or ()).items():
        values[at] = table[at] - baseline
    if scaled:
        values = values / (totals.std(correction=1) + EPS)
    return [row[: len(turns)].tolist() for row, turns in zip(values, rewards, strict=True)]


def _by_key(table: Sequence[Sequence[float]], keys: Sequence[Sequence[str]]) -> dict[tuple[int, int], float]:
    """Baselines of the turns, by episode and turn, whose key another episode has: its mean over these others."""
    at_key: dict[str, dict[int, list[float]]] = {}  # by key and episode: G of the turns
    for i, row in enumerate(keys):
        for t, key in enumerate(row):
            at_key.setdefault(key, {}).setdefault(i, []).append(table[i][t])
    means = {key: {i: sum(own) / len(own) for i, own in found.items()} for key, found in at_key.items() if key}
    return {
        (i, t): (sum(means[key].values()) - means[key][i]) / (len(means[key]) - 1)
        for i, row in enumerate(keys) for t, key in enumerate(row) if len(means.get(key, ())) > 1
    }


# -- of all groups of a step -----------------------------------------------------


def batch_whiten(rewards: Sequence[float], lengths: Sequence[int]) -> Tensor:
    """(R - mean) / sqrt(variance + 1e-8) over all trained tokens of the step, each with the reward of its sample, so
    that a sample weighs by its length (REINFORCE++); n - 1 tokens under the root. `lengths`: trained tokens of each."""
    values = torch.tensor(list(rewards), dtype=torch.float64)
    counts = torch.tensor(list(lengths), dtype=torch.float64)
    centred = values - (values * counts).sum() / counts.sum().clamp(min=1)
    variance = (centred.square() * counts).sum() / (counts.sum() - 1).clamp(min=1)
    return centred / (variance + 1e-8).sqrt()


def batch_scale(centred: Sequence[float]) -> float:
    """std + 1e-6 of all (R - mean of its group) of the step, with n - 1 under the root."""
    return float(torch.tensor(list(centred), dtype=torch.float64).std(correction=1)) + EPS if len(centred) > 1 else 1.0


# -- of earlier groups -----------------------------------------------------------


class RunningMeans:
    """An exponential mean of the rewards of groups for each seat: the baseline of `ema`. A group enters with its mean,
    by 1 - decay, and counts for later groups alone, so its own advantages have no bias. What groups of a step add is
    kept by `keep`, once the step is made: other groups of an unmade step were never trained."""

    def __init__(self, seats: int, decay: float = 0.95) -> None:
        self._seats, self._decay = seats, decay
        self._kept: dict[int, tuple[float, float]] = {}  # by seat: the sum of weighted means, and that of the weights
        self._now: dict[int, tuple[float, float]] = {}

    def before(self, group: int, rewards: Sequence[float]) -> float:
        """The mean of the groups of this one's seat that came before it, 0 for the first; adds this one."""
        seat = group % self._seats
        total, weight = self._now.get(seat, (0.0, 0.0))
        share = 1 - self._decay
        self._now[seat] = (
            self._decay * total + share * sum(rewards) / len(rewards), self._decay * weight + share
        )
        return total / weight if weight else 0.0

    def keep(self) -> None:
        self._kept = dict(self._now)

    def state(self) -> list[tuple[int, float, float]]:
        """Give what is kept, for a checkpoint."""
        return [(seat, *both) for seat, both in sorted(self._kept.items())]

    def load(self, state: Sequence[Sequence[float]]) -> None:
        self._kept = {int(seat): (total, weight) for seat, total, weight in state}
        self._now = dict(self._kept)


# The part that is computed per group: of batch_std before the division, of batch_whiten nothing, of gae before any
# value, of ema before the baseline.
ADVANTAGES: dict[str, AdvantageEstimator] = {
    "group_std": group_std, "group_mean": group_mean, "leave_one_out": leave_one_out,
    "mean_normalised": mean_normalised, "batch_std": group_mean, "batch_whiten": batch_whiten, "reward": reward_alone,
    "gae": reward_alone, "ema": reward_alone,
}


def is_flat(rewards: Sequence[float]) -> bool:
    """True if the group carries no signal. Compared exactly: a rounded mean must not make a signal of equal rewards."""
    return len(rewards) < 2 or all(reward == rewards[0] for reward in rewards)


def advantages(estimator: AdvantageEstimator, rewards: Sequence[float], lengths: Sequence[int] = ()) -> list[float]:
    """The advantages of a group; all exactly 0.0 for a flat one, which never reaches an estimator that compares."""
    if estimator is not reward_alone and is_flat(rewards):
        return [0.0] * len(rewards)
    values = estimator(rewards, lengths)
    return [float(value) for value in (values.tolist() if isinstance(values, Tensor) else values)]


# -- from tokens to one number ---------------------------------------------------


def weights(aggregation: str, tokens: Sequence[int], groups: Sequence[int], norm: int) -> tuple[list[float], float]:
    """Factors of the loss of each sample's tokens, and the share of these samples in the denominator. `tokens`: trained
    tokens of each sample, at least 1; `groups`: its group, which is whole; `norm`: learner.length_norm."""
    if aggregation == "token-mean":
        return [1.0] * len(tokens), float(sum(tokens))
    if aggregation == "seq-mean-token-mean":
        return [1 / count for count in tokens], float(len(tokens))
    if aggregation == "seq-mean-token-sum":
        return [1.0] * len(tokens), float(len(tokens))
    if aggregation == "seq-mean-token-sum-norm":
        return [1 / norm] * len(tokens), float(len(tokens))
    of_group: dict[int, int] = {}
    for count, group in zip(tokens, groups, strict=True):
        of_group[group] = of_group.get(group, 0) + count
    return [1 / of_group[group] for group in groups], float(len(of_group))
