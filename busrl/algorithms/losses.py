"""Losses per token: log-probabilities, advantages and settings in, a tensor of the same shape out, to be minimised.

Called by the trainer for every micro-batch, through `per_token`. A loss never averages: the trainer divides the sum
once, at the step. Knows nothing of models, samples or padding.

- Behaviour and proximal log-probabilities, advantages and correction weights are constants: no gradient flows into
  them.
- What stands at a masked position (0, NaN, 1e9) changes neither the value nor the gradient of the others: `per_token`
  hides it from every loss.
- A log-ratio is clamped to [-20, 20] before it is exponentiated: a wild token cannot make the sum infinite.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

LOG_RATIO_BOUND = 20.0


@dataclass(frozen=True)
class LossSettings:
    """The numbers that a loss may use; the names are those of the topology's [learner] keys."""

    clip_low: float = 0.2
    clip_high: float = 0.28
    dual_clip: float = 3.0
    tis_cap: float = 2.0


@dataclass(frozen=True)
class LossInputs:
    """What a loss gets: one entry per generated token of a micro-batch, sample after sample.

    All tensors have one shape, [tokens] in training, and one device; index t is about the same token in each. Floats
    are float32 (float64 with a float64 model). A token of a prompt is never among them.
    """

    trainer_logprobs: Tensor  # log-probabilities under the weights of this step, with gradient
    behaviour_logprobs: Tensor  # recorded when the token was sampled
    proximal_logprobs: Tensor  # under the weights before the step's first update; without gradient
    advantages: Tensor  # of the token's sample
    mask: Tensor | None = None  # bool, true where trained; None: everywhere
    samples: Tensor | None = None  # int64, the row of the token's sample in this micro-batch, from 0
    policy_versions: Tensor | None = None  # int64, the version of the weights that sampled the token
    ages: Tensor | None = None  # int64, finished steps since that version was made; 0 = the weights of this step


LossFunction = Callable[[LossInputs, LossSettings], Tensor]


def ppo_clip(inputs: LossInputs, settings: LossSettings) -> Tensor:
    """Clipped surrogate on the ratio to the recorded log-probabilities, with the dual clip; no second correction."""
    ratio = log_ratio(inputs.trainer_logprobs, inputs.behaviour_logprobs).exp()
    return dual_clipped(surrogate(ratio, inputs.advantages, settings), inputs.advantages, settings)


def decoupled(inputs: LossInputs, settings: LossSettings) -> Tensor:
    """Clipped surrogate on the ratio to the proximal policy, times the capped weight proximal / behaviour."""
    ratio = log_ratio(inputs.trainer_logprobs, inputs.proximal_logprobs.detach()).exp()
    clipped = dual_clipped(surrogate(ratio, inputs.advantages, settings), inputs.advantages, settings)
    return clipped * importance_weight(inputs, settings)


LOSSES: dict[str, LossFunction] = {"ppo_clip": ppo_clip, "decoupled": decoupled}
WITHOUT_PROXIMAL = frozenset({"ppo_clip"})  # losses for which nothing is scored before the first of several updates


def per_token(loss: LossFunction, inputs: LossInputs, settings: LossSettings) -> Tensor:
    """What `loss` gives, 0 where masked. The loss sees zeros there: a NaN behind a mask would reach the gradient."""
    if inputs.mask is None:
        return loss(inputs, settings)
    trained = inputs.mask.bool()
    names = ("trainer_logprobs", "behaviour_logprobs", "proximal_logprobs", "advantages")
    hidden = replace(inputs, **{name: getattr(inputs, name).where(trained, 0) for name in names})
    return loss(hidden, settings).where(trained, 0)


def log_ratio(logprobs: Tensor, reference: Tensor) -> Tensor:
    """log(pi / reference), clamped."""
    return (logprobs - reference).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)


def clip_bounds(settings: LossSettings) -> tuple[float, float]:
    """The interval the ratio is clipped to."""
    return 1.0 - settings.clip_low, 1.0 + settings.clip_high


def surrogate(ratio: Tensor, advantages: Tensor, settings: LossSettings) -> Tensor:
    """-min(r A, clip(r) A): the worse of both, so leaving the interval is never rewarded."""
    low, high = clip_bounds(settings)
    return torch.maximum(-ratio * advantages, -ratio.clamp(low, high) * advantages)


def dual_clipped(loss: Tensor, advantages: Tensor, settings: LossSettings) -> Tensor:
    """Bounds the loss of tokens with a negative advantage by -c A, where an exploding ratio has no other bound."""
    return torch.where(advantages < 0, torch.minimum(loss, -settings.dual_clip * advantages), loss)


def importance_weight(inputs: LossInputs, settings: LossSettings) -> Tensor:
    """min(proximal / behaviour, cap), a constant."""
    ratio = log_ratio(inputs.proximal_logprobs.detach(), inputs.behaviour_logprobs).exp()
    return ratio.clamp(max=settings.tis_cap)


def mastered(
    logprobs: Tensor, entropy: Tensor, advantages: Tensor, rows: Tensor, lengths: Tensor, tau: float, sigma: float,
    mask: Tensor | None = None,
) -> Tensor:
    """Tokens that the policy writes almost surely: of probability >= tau, in a sample of advantage > 0 and of a mean
    entropy < sigma nats. The choice is a constant; these tokens stay in the denominator.

    UloRL (2507.19766) calls leaving them out DMMPT, eq. 10, whose entropy lacks the minus sign: H = -sum p log p here.
    `logprobs` and `entropy` are under the current policy, `rows` names each token's sample, `lengths` counts the
    trained tokens (those of `mask`) of each sample.
    """
    counted = entropy.detach() if mask is None else entropy.detach().where(mask.bool(), 0)
    total = torch.zeros(len(lengths), dtype=counted.dtype, device=counted.device).index_add_(0, rows, counted)
    low = (total / lengths.clamp(min=1) < sigma)[rows]
    found: Tensor = low & (advantages > 0) & (logprobs.detach().exp() >= tau)
    return found if mask is None else found & mask.bool()
