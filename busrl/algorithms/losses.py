"""Losses per token: log-probabilities, advantages and settings in, a tensor of the same shape out, to be minimised.

A loss never averages: the trainer divides the sum once, at the step. Knows nothing of models, samples or padding.

- Behaviour and proximal log-probabilities, advantages and correction weights are constants: no gradient flows into
  them.
- A number at a masked position (0, NaN, 1e9) changes neither the value nor the gradient of the others: `per_token`
  hides it from every loss.
- A log-ratio is clamped to [-20, 20] before it is exponentiated: a wild token cannot make the sum infinite.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from busrl.algorithms import distill
from busrl.algorithms.catalog import LossSettings as LossSettings

LOG_RATIO_BOUND = 20.0


@dataclass(frozen=True)
class LossInputs:
    """Inputs of a loss: one entry per generated token of a micro-batch, sample after sample.

    All tensors but `lengths` have one shape, [tokens] in training, and one device; index t is about the same token in
    each. Floats are float32 (float64 with a float64 model). A token of a prompt is never among them.
    """

    trainer_logprobs: Tensor  # log-probabilities under the weights of this step, with gradient
    behaviour_logprobs: Tensor  # recorded when the token was sampled
    proximal_logprobs: Tensor  # under the weights before the step's first update; without gradient
    advantages: Tensor  # of the token's sample
    mask: Tensor | None = None  # bool, true where trained; None: everywhere
    samples: Tensor | None = None  # int64, the row of the token's sample in this micro-batch, from 0
    policy_versions: Tensor | None = None  # int64, the version of the weights that sampled the token
    ages: Tensor | None = None  # int64, finished steps since that version was made; 0 = the weights of this step
    lengths: Tensor | None = None  # int64 [samples]: trained tokens of each
    entropy: Tensor | None = None  # nats, full softmax at the sampling temperature, with gradient
    reference_logprobs: Tensor | None = None  # under the reference model; None where there is none
    chosen: Tensor | None = None  # bool, what `CHOICES` of the loss gave for the whole update
    teacher_logprobs: Tensor | None = None  # [tokens, k]: of a teacher's most probable tokens in the place of each
    student_logprobs: Tensor | None = None  # [tokens, k]: of the same under the weights of this step, with gradient


LossFunction = Callable[[LossInputs, LossSettings], Tensor]
FLOATS = ("trainer_logprobs", "behaviour_logprobs", "proximal_logprobs", "advantages", "entropy", "reference_logprobs",
          "teacher_logprobs", "student_logprobs")


# -- clipped ratios, per token -------------------------------------------------


def ppo_clip(inputs: LossInputs, settings: LossSettings) -> Tensor:
    """max(-r A, -clip(r) A), for A < 0 at most -c A (dual clip)."""
    return dual_clipped(surrogate(ratio_of(inputs, settings), inputs.advantages, settings), inputs.advantages, settings)


def decoupled(inputs: LossInputs, settings: LossSettings) -> Tensor:
    """Clipped surrogate on the ratio to the proximal policy, times the capped weight proximal / behaviour."""
    ratio = log_ratio(inputs.trainer_logprobs, inputs.proximal_logprobs.detach()).exp()
    clipped = dual_clipped(surrogate(ratio, inputs.advantages, settings), inputs.advantages, settings)
    return clipped * importance_weight(inputs, settings)


def two_sided(inputs: LossInputs, settings: LossSettings) -> Tensor:
    """max(-min(r, delta) A, -clip(r) A): bounded for A < 0 as well, without a gradient beyond delta (INTELLECT-2)."""
    ratio, (low, high) = ratio_of(inputs, settings), clip_bounds(settings)
    bounded = -ratio.clamp(max=settings.two_sided_delta) * inputs.advantages
    return torch.maximum(bounded, -ratio.clamp(low, high) * inputs.advantages)


def cispo(inputs: LossInputs, settings: LossSettings) -> Tensor:
    """-min(r, cap) A log p with the weight a constant, so that no token loses its gradient. The cap is on the ratio
    itself (TRL's convention; others write 1 + eps)."""
    weight = ratio_of(inputs, settings).detach().clamp(max=settings.cispo_cap)
    return -weight * inputs.advantages * inputs.trainer_logprobs


def sapo(inputs: LossInputs, settings: LossSettings) -> Tensor:
    """-(4 / tau) sigmoid(tau (r - 1)) A: a gate in the place of the clip, tighter for A <= 0."""
    rising, falling = settings.sapo_taus
    tau = torch.full_like(inputs.advantages, falling).masked_fill(inputs.advantages > 0, rising)
    return -4 / tau * torch.sigmoid(tau * (ratio_of(inputs, settings) - 1)) * inputs.advantages


def dppo(inputs: LossInputs, settings: LossSettings) -> Tensor:
    """-keep r A + c (log r)^2 on the ratio to the behaviour policy. A token that moved by more than `dppo_mask` of
    probability in the direction of its advantage is dropped; the square stays for all tokens."""
    difference = log_ratio(inputs.trainer_logprobs, inputs.behaviour_logprobs)
    moved = inputs.trainer_logprobs.detach().exp() - inputs.behaviour_logprobs.exp()
    dropped = torch.where(inputs.advantages > 0, moved > settings.dppo_mask, moved < -settings.dppo_mask)
    policy = (-difference.exp() * inputs.advantages).masked_fill(dropped, 0)
    return policy + settings.dppo_square * difference.square()


def reinforce(inputs: LossInputs, settings: LossSettings) -> Tensor:
    """-A log p: no ratio; learner.correction weights it."""
    return -inputs.advantages * inputs.trainer_logprobs


def topk_kl(inputs: LossInputs, settings: LossSettings) -> Tensor:
    """KL(teacher || student) over the teacher's most probable tokens and the rest as one more; no advantage is read."""
    if inputs.student_logprobs is None or inputs.teacher_logprobs is None:
        raise ValueError("this loss needs the most probable tokens of a teacher: model.teacher")
    return distill.topk_kl(inputs.student_logprobs, inputs.teacher_logprobs)


# -- of whole samples ----------------------------------------------------------


def gspo(inputs: LossInputs, settings: LossSettings) -> Tensor:
    """max(-s A, -clip(s) A) with s the geometric mean of the sample's ratios, for each of its tokens."""
    ratio = sample_mean(log_ratio(inputs.trainer_logprobs, old(inputs, settings)), inputs).exp()
    return surrogate(ratio, inputs.advantages, settings)


def gmpo(inputs: LossInputs, settings: LossSettings) -> Tensor:
    """-A times the geometric mean of ratios that are clipped in log space, at -clip_low and clip_high, on the side
    where leaving pays."""
    difference, sign = log_ratio(inputs.trainer_logprobs, old(inputs, settings)), inputs.advantages.sign()
    inside = difference.clamp(-settings.clip_low, settings.clip_high)
    worse = torch.minimum(sign * difference, sign * inside)
    return -inputs.advantages * (sign * sample_mean(worse, inputs)).exp()


def opsm(inputs: LossInputs, settings: LossSettings) -> Tensor:
    """`ppo_clip` without the samples of A < 0 whose mean log(old / p) is above `opsm_delta` (DeepSeek-V3.2)."""
    distance = sample_mean(log_ratio(old(inputs, settings), inputs.trainer_logprobs.detach()), inputs)
    dropped = (inputs.advantages < 0) & (distance > settings.opsm_delta)
    return ppo_clip(inputs, settings).masked_fill(dropped, 0)


# -- with a choice among all tokens of the update ------------------------------


def m2po(inputs: LossInputs, settings: LossSettings) -> Tensor:
    """-r A of the tokens that `kept_by_second_moment` left; nothing is clipped."""
    return -ratio_of(inputs, settings) * inputs.advantages * chosen_of(inputs)


def clip_cov(inputs: LossInputs, settings: LossSettings) -> Tensor:
    """The clipped surrogate, 0 for the tokens that `covariant` chose."""
    return surrogate(ratio_of(inputs, settings), inputs.advantages, settings) * ~chosen_of(inputs)


def kl_cov(inputs: LossInputs, settings: LossSettings) -> Tensor:
    """-r A, plus coef |log r| for the tokens of the largest covariance."""
    difference = log_ratio(inputs.trainer_logprobs, old(inputs, settings))
    return settings.kl_cov_coef * difference.abs() * chosen_of(inputs) - difference.exp() * inputs.advantages


def kept_by_second_moment(inputs: LossInputs, settings: LossSettings, random: torch.Generator) -> Tensor:
    """Tokens that M2PO keeps: all but those with the largest log(behaviour / proximal)^2, until the mean of the rest is
    at most `m2po_tau`."""
    squares = log_ratio(inputs.behaviour_logprobs, inputs.proximal_logprobs).square()[trained_of(inputs)]
    ordered, order = squares.sort(stable=True)
    means = ordered.cumsum(0) / torch.arange(1, len(ordered) + 1, device=ordered.device)
    kept = torch.zeros_like(squares, dtype=torch.bool)
    kept[order[means <= settings.m2po_tau]] = True  # means of an ascending sequence ascend
    return _placed(kept, inputs)


def covariant(inputs: LossInputs, settings: LossSettings, random: torch.Generator) -> Tensor:
    """Tokens that Clip-Cov leaves out: a random `cov_share` of all (at least one), among those of a covariance within
    `clip_cov_range` that the ratio does not clip."""
    low, high = settings.clip_cov_range
    cov, (least, most) = covariances(inputs), clip_bounds(settings)
    trained = trained_of(inputs)
    ratio, advantages = ratio_of(inputs, settings)[trained], inputs.advantages[trained]
    clipped = torch.where(advantages > 0, ratio > most, (ratio < least) & (advantages < 0))
    candidates = ((cov > low) & (cov < high) & ~clipped).nonzero()[:, 0]
    order = torch.randperm(len(candidates), generator=random).to(candidates.device)
    chosen = torch.zeros_like(cov, dtype=torch.bool)
    chosen[candidates[order[: max(1, int(settings.cov_share * len(cov)))]]] = True
    return _placed(chosen, inputs)


def most_covariant(inputs: LossInputs, settings: LossSettings, random: torch.Generator) -> Tensor:
    """Tokens that KL-Cov holds: the `cov_share` (at least one) of the largest covariance."""
    cov = covariances(inputs)
    chosen = torch.zeros_like(cov, dtype=torch.bool)
    chosen[cov.topk(min(len(cov), max(1, int(settings.cov_share * len(cov))))).indices] = True
    return _placed(chosen, inputs)


def covariances(inputs: LossInputs) -> Tensor:
    """(A - mean A) (log p - mean log p) of the trained tokens, [trained]."""
    trained = trained_of(inputs)
    advantages, logprobs = inputs.advantages[trained], inputs.trainer_logprobs.detach()[trained]
    return (advantages - advantages.mean()) * (logprobs - logprobs.mean())


def trained_of(inputs: LossInputs) -> Tensor:
    """The mask, all true where there is none."""
    if inputs.mask is None:
        return torch.ones_like(inputs.advantages, dtype=torch.bool)
    return inputs.mask.bool()


def _placed(chosen: Tensor, inputs: LossInputs) -> Tensor:
    trained = trained_of(inputs)
    return torch.zeros_like(trained).masked_scatter(trained, chosen)


LOSSES: dict[str, LossFunction] = {
    "ppo_clip": ppo_clip, "decoupled": decoupled, "gspo": gspo, "cispo": cispo, "sapo": sapo, "gmpo": gmpo,
    "two_sided": two_sided, "dppo": dppo, "opsm": opsm, "reinforce": reinforce, "m2po": m2po, "clip_cov": clip_cov,
    "kl_cov": kl_cov, "topk_kl": topk_kl,
}
# All tokens of an update, with the log-probabilities before it as those of the trainer -> `chosen`.
Choice = Callable[[LossInputs, LossSettings, torch.Generator], Tensor]
CHOICES: dict[str, Choice] = {"m2po": kept_by_second_moment, "clip_cov": covariant, "kl_cov": most_covariant}


# -- parts of losses -----------------------------------------------------------


def per_token(loss: LossFunction, inputs: LossInputs, settings: LossSettings) -> Tensor:
    """The values of `loss`, 0 where masked. The loss gets zeros there: a NaN behind a mask would reach the gradient."""
    return masked(loss(hidden(inputs), settings), inputs)


def masked(values: Tensor, inputs: LossInputs) -> Tensor:
    """The values, 0 where masked."""
    return values if inputs.mask is None else values.where(inputs.mask.bool(), 0)


def hidden(inputs: LossInputs) -> LossInputs:
    """Inputs with zeros at masked positions."""
    if inputs.mask is None:
        return inputs
    trained = inputs.mask.bool()
    return replace(inputs, **{
        name: value.where(trained.unsqueeze(-1) if value.ndim > trained.ndim else trained, 0)
        for name in FLOATS if (value := getattr(inputs, name)) is not None
    })


def old(inputs: LossInputs, settings: LossSettings) -> Tensor:
    """The log-probabilities that the ratio is to; a constant."""
    proximal = settings.ratio == "proximal"
    return (inputs.proximal_logprobs if proximal else inputs.behaviour_logprobs).detach()


def ratio_of(inputs: LossInputs, settings: LossSettings) -> Tensor:
    """exp(log p - log old), with gradient."""
    return log_ratio(inputs.trainer_logprobs, old(inputs, settings)).exp()


def chosen_of(inputs: LossInputs) -> Tensor:
    if inputs.chosen is None:
        raise ValueError("this loss chooses among all tokens of an update: compute its CHOICES first")
    return inputs.chosen


def sample_sum(values: Tensor, inputs: LossInputs) -> Tensor:
    """For each token the sum over the trained tokens of its sample."""
    if inputs.samples is None or inputs.lengths is None:
        raise ValueError("a loss of whole samples needs the sample of each token, and how many each has")
    trained = values if inputs.mask is None else values.where(inputs.mask.bool(), 0)
    total = torch.zeros(len(inputs.lengths), dtype=values.dtype, device=values.device)
    return total.index_add(0, inputs.samples, trained)[inputs.samples]


def sample_mean(values: Tensor, inputs: LossInputs) -> Tensor:
    """For each token the mean over the trained tokens of its sample."""
    total = sample_sum(values, inputs)
    assert inputs.samples is not None and inputs.lengths is not None
    return total / inputs.lengths.clamp(min=1)[inputs.samples]


def log_ratio(logprobs: Tensor, reference: Tensor) -> Tensor:
    return (logprobs - reference).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)


def clip_bounds(settings: LossSettings) -> tuple[float, float]:
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
