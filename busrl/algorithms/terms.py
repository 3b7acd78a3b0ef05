"""The whole objective of a token: the policy's loss with its correction, plus KL to a reference, less entropy, plus
KL from a teacher.

Called by the trainer for every micro-batch. Talks to `losses` alone; knows nothing of models or of the origin of
the reference log-probabilities.

- rho = proximal / behaviour, what separates trainer and engine; a correction is a constant that multiplies the loss of
  the policy. It never changes a denominator: a token that it drops still counts.
- KL and entropy are in nats per token and share the aggregation of the policy's loss: there is one denominator.
- The estimators of KL(p || reference) are of tokens drawn by p. As losses only k2 and k3_is have the gradient of the KL
  (Schulman 2020; DeepSeek-V3.2); k1's has mean 0.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from busrl.algorithms import losses
from busrl.algorithms.catalog import CORRECTIONS
from busrl.algorithms.losses import LOG_RATIO_BOUND, LossFunction, LossInputs, LossSettings, log_ratio

# -- corrections -----------------------------------------------------------------


def rho(logs: Tensor, inputs: LossInputs) -> Tensor:
    return logs.exp()


def product(logs: Tensor, inputs: LossInputs) -> Tensor:
    """Product of all rho of the sample."""
    return losses.sample_sum(logs, inputs).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()


def geometric_mean(logs: Tensor, inputs: LossInputs) -> Tensor:
    return losses.sample_mean(logs, inputs).exp()


def mean_k3(logs: Tensor, inputs: LossInputs) -> Tensor:
    """Mean of rho - log rho - 1 over the sample."""
    return losses.sample_mean(logs.exp() - logs - 1, inputs)


TRUNCATE, MASK, REJECT = "min(x, high)", "x within [low, high], else 0", "1 within [low, high], else 0"
# name -> x of log rho per token, and the weight that is made of it. icepop: 2510.18855.
WEIGHTS: dict[str, tuple[Callable[[Tensor, LossInputs], Tensor], str]] = {
    "token_tis": (rho, TRUNCATE), "seq_tis": (product, TRUNCATE), "icepop": (rho, MASK), "seq_mis": (product, MASK),
    "geo_rs": (geometric_mean, REJECT), "k3_rs": (mean_k3, REJECT),
}


def correction(inputs: LossInputs, settings: LossSettings) -> Tensor:
    """The weight of each token's loss, without gradient. Bounds of 0 are those of the correction's own default."""
    low, high = CORRECTIONS[settings.correction]
    low, high = settings.correction_low or low, settings.correction_high or high
    measure, rule = WEIGHTS[settings.correction]
    measured = measure(log_ratio(inputs.proximal_logprobs, inputs.behaviour_logprobs).detach(), inputs)
    if rule == TRUNCATE:
        return measured.clamp(max=high)
    within = (measured >= low) & (measured <= high)
    return torch.where(within, measured if rule == MASK else torch.ones_like(measured), 0)


# -- KL to a reference -----------------------------------------------------------


def k1(logprobs: Tensor, reference: Tensor) -> Tensor:
    return log_ratio(logprobs, reference)


def k2(logprobs: Tensor, reference: Tensor) -> Tensor:
    return log_ratio(logprobs, reference).square() / 2


def k3(logprobs: Tensor, reference: Tensor) -> Tensor:
    """reference / p - 1 - log(reference / p)."""
    difference = log_ratio(logprobs, reference)
    return (-difference).exp() + difference - 1


ESTIMATORS = {"k1": k1, "k2": k2, "k3": k3}


def divergence(inputs: LossInputs, settings: LossSettings) -> Tensor:
    """KL per token to the reference; k3_is is k3 times the ratio to the old policy, with the gradient of both."""
    assert inputs.reference_logprobs is not None
    if settings.kl == "k3_is":
        return losses.ratio_of(inputs, settings) * k3(inputs.trainer_logprobs, inputs.reference_logprobs)
    return ESTIMATORS[settings.kl](inputs.trainer_logprobs, inputs.reference_logprobs)


# -- together --------------------------------------------------------------------


@dataclass(frozen=True)
class Objective:
    """The minimised value of each token, 0 where masked, and those of its terms that the diagnostics show."""

    loss: Tensor
    weights: Tensor | None = None  # of the correction; None without a correction
    teacher_kl: Tensor | None = None  # with gradient; None where no loss reads it
    reference_k3: Tensor | None = None  # with gradient; None where the loss has another estimate of the KL, or none


def objective(loss: LossFunction, inputs: LossInputs, settings: LossSettings, kl: bool) -> Objective:
    """The policy's loss with all terms. `kl`: the KL to the reference is a term of the loss, not of the reward."""
    seen = losses.hidden(inputs)
    values, weights, reference_k3 = loss(seen, settings), None, None
    teacher_kl = values if loss is losses.topk_kl else None
    if settings.correction != "none":
        weights = correction(seen, settings)
        values = values * weights
    if kl:
        distance = divergence(seen, settings)
        values = values + settings.kl_coef * distance
        reference_k3 = distance if settings.kl == "k3" else None
    if settings.entropy_coef:
        assert seen.entropy is not None
        values = values - settings.entropy_coef * seen.entropy
    if settings.teacher_coef:
        teacher_kl = losses.topk_kl(seen, settings) if teacher_kl is None else teacher_kl
        values = values + settings.teacher_coef * teacher_kl
    return Objective(losses.masked(values, inputs), weights, teacher_kl, reference_k3)
