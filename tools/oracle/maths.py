"""The formulas of a step, each written out plainly: advantages, loss and its terms, schedule, AdamW, ages, drawing a
token.

In float64, one sample after the other, with no thought of speed. Knows nothing of files or model folders.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor


def advantages(kind: str, rewards: Sequence[float]) -> list[float]:
    """R - mean, for group_std divided by (std + 1e-6) with n - 1 under the root; all 0 for equal rewards. For ema,
    whose rewards are less the mean of earlier groups already, these."""
    mean = math.fsum(rewards) / len(rewards)
    if kind == "ema":
        return list(rewards)
    if min(rewards) == max(rewards):
        return [0.0] * len(rewards)
    if kind == "group_mean":
        return [reward - mean for reward in rewards]
    variance = math.fsum((reward - mean) ** 2 for reward in rewards) / (len(rewards) - 1)
    return [(reward - mean) / (math.sqrt(variance) + 1e-6) for reward in rewards]


def with_group(total: float, weight: float, rewards: Sequence[float], decay: float = 0.95
               ) -> tuple[float, tuple[float, float]]:
    """The weighted mean of the groups before this one, 0 without any; and sum and weight with this one's mean."""
    mean = math.fsum(rewards) / len(rewards)
    after = decay * total + (1 - decay) * mean, decay * weight + (1 - decay)
    return (total / weight if weight else 0.0), after


def turn_advantages(
    kind: str, rewards: Sequence[Sequence[float]], gamma: float, keys: Sequence[Sequence[str]]
) -> list[list[float]]:
    """What came of each turn less the mean of what came of the other episodes' turns of that number (0 where one had
    ended), or, of a turn with a key, of their turns with that key, where any has some; for group_std divided by (std
    of the sums + 1e-6)."""
    returns = [[math.fsum(r * gamma**k for k, r in enumerate(own[t:])) for t in range(len(own))] for own in rewards]
    sums, scale = [math.fsum(own) for own in rewards], 1.0
    if kind == "group_std":
        mean = math.fsum(sums) / len(sums)
        scale = math.sqrt(math.fsum((one - mean) ** 2 for one in sums) / (len(sums) - 1)) + 1e-6
    found = []
    for i, own in enumerate(returns):
        others = [row for j, row in enumerate(returns) if j != i]
        bases = [math.fsum(row[t] for row in others if t < len(row)) / len(others) for t in range(len(own))]
        for t, key in enumerate(keys[i]):
            each = [[value for value, its in zip(row, keys[j]) if key and its == key] for j, row in enumerate(returns)]
            if there := [math.fsum(found) / len(found) for j, found in enumerate(each) if j != i and found]:
                bases[t] = math.fsum(there) / len(there)
        found.append([(value - base) / scale for value, base in zip(own, bases)])
    return found


def mini_batches(groups: Sequence[int], count: int) -> list[list[int]]:
    """The groups of a step in `count` shares, in order: group number i is in share i * count // groups."""
    count = min(count, len(groups))
    shares: list[list[int]] = [[] for _ in range(count)]
    for i, group in enumerate(groups):
        shares[i * count // len(groups)].append(group)
    return shares


def ratio(logp: Tensor, reference: Tensor) -> Tensor:
    return torch.exp(torch.clamp(logp - reference, -20.0, 20.0))


def loss(name: str, logp: Tensor, behaviour: Tensor, prox: Tensor, worth: Tensor, numbers: dict[str, Any]) -> Tensor:
    """Per token, to be minimised; `worth`: the advantage of each. ppo_clip: against the recorded log-probabilities, or
    with learner.ratio = "proximal" the weights at the start of the step. decoupled: against these, times
    min(prox / behaviour, tis_cap). reinforce: no ratio."""
    if name == "reinforce":
        return -worth * logp
    r = ratio(logp, prox if name == "decoupled" else old(behaviour, prox, numbers))
    clipped = torch.clamp(r, 1 - numbers["clip_low"], 1 + numbers["clip_high"])
    objective = torch.minimum(r * worth, clipped * worth)
    objective = torch.where(worth < 0, torch.maximum(objective, numbers["dual_clip"] * worth), objective)
    if name == "decoupled":
        objective = objective * torch.clamp(ratio(prox, behaviour), max=numbers["tis_cap"])
    return -objective


def old(behaviour: Tensor, prox: Tensor, numbers: dict[str, Any]) -> Tensor:
    """What the ratio of a loss is to."""
    return prox if numbers.get("ratio", "behaviour") == "proximal" else behaviour


# Low and high of a correction where the run names none.
BOUNDS = {"token_tis": (0.0, 2.0), "seq_tis": (0.0, 2.0), "icepop": (0.5, 5.0), "seq_mis": (0.5, 2.0),
          "geo_rs": (0.999, 1.001), "k3_rs": (0.0, 0.01)}


def correction(kind: str, behaviour: Tensor, prox: Tensor, numbers: dict[str, Any]) -> Tensor:
    """What the loss of each trained token of one sample is multiplied by, from rho = prox / behaviour of these."""
    logs = torch.clamp(prox - behaviour, -20.0, 20.0)
    low, high = (numbers[f"correction_{side}"] or bound for side, bound in zip(("low", "high"), BOUNDS[kind]))
    found = {
        "token_tis": torch.exp(logs), "icepop": torch.exp(logs), "geo_rs": torch.exp(logs.mean()),
        "seq_tis": torch.exp(torch.clamp(logs.sum(), -20.0, 20.0)),
        "seq_mis": torch.exp(torch.clamp(logs.sum(), -20.0, 20.0)), "k3_rs": (torch.exp(logs) - logs - 1).mean(),
    }[kind].expand_as(logs)
    if kind.endswith("_tis"):
        return torch.clamp(found, max=high)
    within = (found >= low) & (found <= high)
    return torch.where(within, torch.ones_like(found) if kind.endswith("_rs") else found, torch.zeros_like(found))


def kl(kind: str, logp: Tensor, reference: Tensor) -> Tensor:
    """An estimate of KL(p || reference) by a token that p drew: k1, k2 or k3."""
    d = torch.clamp(logp - reference, -20.0, 20.0)
    return {"k1": d, "k2": d * d / 2, "k3": torch.exp(-d) - 1 + d}[kind]


def gae(rewards: Sequence[float], values: Sequence[float], gamma: float, decay: float) -> list[float]:
    """A_t = d_t + gamma decay A_{t+1} with d_t = r_t + gamma V_{t+1} - V_t; behind the last token all is 0."""
    found, after, value_after = [0.0] * len(rewards), 0.0, 0.0
    for t in range(len(rewards) - 1, -1, -1):
        after = rewards[t] + gamma * value_after - values[t] + gamma * decay * after
        found[t], value_after = after, values[t]
    return found


def whitening(values: Sequence[float]) -> tuple[float, float]:
    """Mean, and the root of (variance + 1e-8) with n - 1 under it."""
    mean = math.fsum(values) / len(values)
    if len(values) == 1:
        return mean, 1.0
    return mean, math.sqrt(math.fsum((one - mean) ** 2 for one in values) / (len(values) - 1) + 1e-8)


def value_loss(values: Tensor, before: Tensor, returns: Tensor, clip: float) -> Tensor:
    """max((V - G)^2, (V within clip of V before - G)^2) / 2; without a clip the first alone."""
    plain = (values - returns) ** 2
    if not clip:
        return plain / 2
    near = torch.minimum(torch.maximum(values, before - clip), before + clip)
    return torch.maximum(plain, (near - returns) ** 2) / 2


def learning_rate(learner: dict[str, Any], run: dict[str, Any], trained: int, groups: int) -> float:
    """For a step of `groups` groups after `trained` others: warm-up x decay x sqrt(groups / n_min) in [0.5, 2]."""
    n_min, warm = learner["trigger"]["n_min"], learner["warmup_groups"]
    rate = learner["lr"] * min(2.0, max(0.5, math.sqrt(groups / n_min)))
    if warm:
        rate *= min(1.0, (trained + groups) / warm)
    if learner["decay"] != "none":
        total = run["max_groups"] or run["max_steps"] * n_min
        share = min(1.0, max(0, trained - warm) / (learner["decay_groups"] or max(1, total - warm)))
        shape = 1 - share if learner["decay"] == "linear" else (1 + math.cos(math.pi * share)) / 2
        rate *= learner["decay_to"] + (1 - learner["decay_to"]) * shape
    return float(rate)


class AdamW:
    """Decay of matrices only (not of norms and biases), bias-corrected moments, eps outside of the root."""

    def __init__(self, learner: dict[str, Any]) -> None:
        self.betas, self.eps, self.decay = learner["betas"], learner["eps"], learner["weight_decay"]
        self.count = 0
        self.first: dict[str, Tensor] = {}
        self.second: dict[str, Tensor] = {}

    def take(self, name: str, state: dict[str, Any], dtype: torch.dtype) -> None:
        """The moments of one tensor as torch's optimiser has them."""
        self.count = int(state["step"])
        self.first[name], self.second[name] = state["exp_avg"].to(dtype), state["exp_avg_sq"].to(dtype)

    def step(self, weights: dict[str, Tensor], gradients: dict[str, Tensor], rate: float) -> None:
        """Changes `weights` in place."""
        self.count += 1
        b1, b2 = self.betas
        for name, g in gradients.items():
            m = self.first.get(name, torch.zeros_like(g)) * b1 + (1 - b1) * g
            v = self.second.get(name, torch.zeros_like(g)) * b2 + (1 - b2) * g * g
            self.first[name], self.second[name] = m, v
            with torch.no_grad():
                w = weights[name]
                if w.ndim >= 2:
                    w *= 1 - rate * self.decay
                root = torch.sqrt(v / (1 - b2**self.count)) + self.eps
                w -= rate * (m / (1 - b1**self.count)) / root


def clipped(gradients: dict[str, Tensor], limit: float) -> tuple[dict[str, Tensor], float]:
    """The gradient with a norm of at most `limit`, and the norm that it had."""
    norm = math.sqrt(math.fsum(float((g * g).sum()) for g in gradients.values()))
    if norm <= limit:
        return gradients, norm
    return {name: g * (limit / (norm + 1e-6)) for name, g in gradients.items()}, norm


class VersionSteps:
    """Which step made a version, from the log alone: record n names the newest version before step n."""

    def __init__(self, steps: Sequence[tuple[int, int]]) -> None:
        """`steps`: (step, version) of every record, in order."""
        self._versions = [version for _, version in steps]
        self._steps = [step - 1 for step, _ in steps]
        self._last = steps[-1][0] if steps else 0

    def __call__(self, version: int) -> int:
        i = bisect_left(self._versions, version)
        return self._steps[i] if i < len(self._steps) else self._last


def uniforms(seed: int, uid: int, segment: int, count: int) -> np.ndarray:
    """The random numbers of a segment's tokens: Philox 4x64, key (uid, seed), counter (0, 0, segment, 0), 32 bits."""
    key = (uid & (2**64 - 1)) | (seed << 64)
    raw = np.random.Philox(key=key, counter=segment << 128).random_raw(count)
    return ((raw >> np.uint64(32)).astype(np.float64) + 0.5) / 2**32


def drawn(logits: np.ndarray, temperature: float, uniform: float) -> tuple[int, float]:
    """The token that a uniform number picks, and how far the number is from picking another one."""
    if temperature <= 0:
        ordered = np.sort(logits)
        return int(np.argmax(logits)), float(ordered[-1] - ordered[-2])
    scores = logits / temperature
    weights = np.exp(scores - scores.max())
    sums = np.cumsum(weights) / weights.sum()
    token = min(int(np.searchsorted(sums, uniform, side="right")), len(sums) - 1)
    edges = [sums[token] - uniform, uniform - (sums[token - 1] if token else 0.0)]
    return token, float(min(abs(edge) for edge in edges))


def mismatched(found: float, expected: float, tolerance: float) -> bool:
    """Whether two numbers differ by more than the tolerance: relative, and absolute below 1."""
    if not (math.isfinite(found) and math.isfinite(expected)):
        return not (found == expected or (math.isnan(found) and math.isnan(expected)))
    return abs(found - expected) > tolerance * max(1.0, abs(expected))
