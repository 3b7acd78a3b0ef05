"""Losses per token: log-probabilities, advantages and settings in, a tensor of the same shape out, to be minimised.

Called by the trainer for every micro-batch. A loss never averages: sums and denominators are in `aggregation`. Knows
nothing of models, samples or padding. Works on any shape; `mask` (1 = trained) may be left out when every position is
trained.

- Behaviour and proximal log-probabilities, advantages and correction weights are constants: no gradient flows into
  them.
- Whatever stands at a masked position (0, NaN, 1e9) changes neither the value nor the gradient of the others.
- A log-ratio is clamped to [-20, 20] before it is exponentiated: a wild token can not make the sum infinite.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

LOG_RATIO_BOUND = 20.0


@dataclass(frozen=True)
class LossSettings:
    """The numbers a loss may use; the names are those of the topology's [learner] keys."""

    clip_low: float = 0.2
    clip_high: float = 0.28
    dual_clip: float = 3.0
    tis_cap: float = 2.0


@dataclass(frozen=True)
class Tokens:
    """What a loss sees of the trained tokens; all tensors have one shape, index t is about the same token in each."""

    logp: Tensor  # under the weights of this step, with gradient
    behaviour: Tensor  # recorded when the token was sampled
    prox: Tensor  # under the weights at the start of this step; equal to logp.detach() with one update per batch
    advantage: Tensor
    mask: Tensor | None = None


@dataclass(frozen=True)
class Loss:
    """A named per-token loss. `streamable`: needs no statistic of the whole batch, so it may run group by group."""

    name: str
    streamable: bool
    uses_prox: bool
    per_token: Callable[[Tokens, LossSettings], Tensor]


def ppo_clip(tokens: Tokens, settings: LossSettings) -> Tensor:
    """Clipped surrogate on the ratio to the recorded log-probabilities, with the dual clip; no second correction."""
    ratio = log_ratio(tokens.logp, tokens.behaviour, tokens.mask).exp()
    return masked(dual_clipped(surrogate(ratio, tokens.advantage, settings), tokens.advantage, settings), tokens.mask)


def decoupled(tokens: Tokens, settings: LossSettings) -> Tensor:
    """Clipped surrogate on the ratio to the proximal policy, times the capped weight prox / behaviour (a constant)."""
    ratio = log_ratio(tokens.logp, tokens.prox.detach(), tokens.mask).exp()
    clipped = dual_clipped(surrogate(ratio, tokens.advantage, settings), tokens.advantage, settings)
    return masked(clipped * importance_weight(tokens, settings), tokens.mask)


LOSSES: dict[str, Loss] = {
    "ppo_clip": Loss("ppo_clip", streamable=True, uses_prox=False, per_token=ppo_clip),
    "decoupled": Loss("decoupled", streamable=True, uses_prox=True, per_token=decoupled),
}


def get(name: str) -> Loss:
    """The loss of that name, or an error that lists the names there are."""
    if name not in LOSSES:
        raise ValueError(f"loss {name!r} is not known; choose one of {', '.join(sorted(LOSSES))}")
    return LOSSES[name]


def log_ratio(logp: Tensor, reference: Tensor, mask: Tensor | None = None) -> Tensor:
    """log(pi / reference), clamped; 0 and without gradient where masked."""
    if mask is not None:
        logp, reference = logp.where(mask.bool(), 0), reference.where(mask.bool(), 0)
    return (logp - reference).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)


def clip_bounds(settings: LossSettings) -> tuple[float, float]:
    """The interval the ratio is clipped to."""
    return 1.0 - settings.clip_low, 1.0 + settings.clip_high


def surrogate(ratio: Tensor, advantage: Tensor, settings: LossSettings) -> Tensor:
    """-min(r A, clip(r) A): the worse of both, so leaving the interval is never rewarded."""
    low, high = clip_bounds(settings)
    return torch.maximum(-ratio * advantage, -ratio.clamp(low, high) * advantage)


def dual_clipped(loss: Tensor, advantage: Tensor, settings: LossSettings) -> Tensor:
    """Bounds the loss of tokens with a negative advantage by -c A, where an exploding ratio has no other bound."""
    return torch.where(advantage < 0, torch.minimum(loss, -settings.dual_clip * advantage), loss)


def importance_weight(tokens: Tokens, settings: LossSettings) -> Tensor:
    """min(prox / behaviour, cap), a constant."""
    return log_ratio(tokens.prox.detach(), tokens.behaviour, tokens.mask).exp().clamp(max=settings.tis_cap)


def masked(values: Tensor, mask: Tensor | None) -> Tensor:
    """0 where masked, whatever stood there."""
    return values if mask is None else torch.where(mask.bool(), values, 0)
