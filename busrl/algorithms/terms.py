"""The whole objective of a token: the policy's loss with its correction, plus KL to a reference, less entropy, plus
what separates it from a teacher.

Called by the trainer for every micro-batch. Talks to `losses` alone; knows nothing of models or of where the reference
log-probabilities come from.

- rho = proximal / behaviour, what separates trainer and engine; a correction is a constant that multiplies the loss of
  the policy. It never changes a denominator: a token that it drops still counts.
- KL and entropy are in nats per token and share the aggregation of the policy's loss: there is one denominator.
- The estimators of KL(p || reference) are of tokens drawn by p. As losses only k2 and k3_is have the gradient of the KL
  (Schulman 2020; DeepSeek-V3.2); k1's has mean 0.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from busrl.algorithms import losses
from busrl.algorithms.catalog import CORRECTIONS
from busrl.algorithms.losses import LOG_RATIO_BOUND, LossFunction, LossInputs, LossSettings, log_ratio

# -- corrections: (log rho per token, inputs, low, high) -> weight per token -----

Correction = Callable[[Tensor, LossInputs, float, float], Tensor]


def token_tis(logs: Tensor, inputs: LossInputs, low: float, high: float) -> Tensor:
    """min(rho, high): truncated importance sampling per token."""
    return logs.exp().clamp(max=high)


def seq_tis(logs: Tensor, inputs: LossInputs, low: float, high: float) -> Tensor:
    """min(product of the sample's rho, high)."""
    return _product(logs, inputs).clamp(max=high)


def icepop(logs: Tensor, inputs: LossInputs, low: float, high: float) -> Tensor:
    """rho where it is within [low, high], else 0 (2510.18855)."""
    return _within(logs.exp(), low, high, logs.exp())


def seq_mis(logs: Tensor, inputs: LossInputs, low: float, high: float) -> Tensor:
    """The product of the sample's rho where that is within [low, high], else 0."""
    product = _product(logs, inputs)
    return _within(product, low, high, product)


def geo_rs(logs: Tensor, inputs: LossInputs, low: float, high: float) -> Tensor:
    """1 for samples whose geometric mean of rho is within [low, high], else 0."""
    mean = losses.sample_mean(logs, inputs).exp()
    return _within(mean, low, high, torch.ones_like(mean))


def k3_rs(logs: Tensor, inputs: LossInputs, low: float, high: float) -> Tensor:
    """1 for samples whose mean of rho - log rho - 1 is within [low, high], else 0."""
    mean = losses.sample_mean(logs.exp() - logs - 1, inputs)
    return _within(mean, low, high, torch.ones_like(mean))


def _product(logs: Tensor, inputs: LossInputs) -> Tensor:
    return losses.sample_sum(logs, inputs).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()


def _within(value: Tensor, low: float, high: float, weight: Tensor) -> Tensor:
    return torch.where((value >= low) & (value <= high), weight, 0)


WEIGHTS: dict[str, Correction] = {
    "token_tis": token_tis, "seq_tis": seq_tis, "icepop": icepop, "seq_mis": seq_mis, "geo_rs": geo_rs, "k3_rs": k3_rs,
}


def correction(inputs: LossInputs, settings: LossSettings) -> Tensor:
    """The weight of each token's loss, without gradient. Bounds of 0 are those of the correction's own default."""
    low, high = CORRECTIONS[settings.correction]
    logs = log_ratio(inputs.proximal_logprobs, inputs.behaviour_logprobs).detach()
    own = WEIGHTS[settings.correction]
    return own(logs, inputs, settings.correction_low or low, settings.correction_high or high)


# -- KL to a reference -----------------------------------------------------------


def k1(logprobs: Tensor, reference: Tensor) -> Tensor:
    """log p - log reference."""
    return log_ratio(logprobs, reference)


def k2(logprobs: Tensor, reference: Tensor) -> Tensor:
    """(log p - log reference)^2 / 2."""
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


def objective(loss: LossFunction, inputs: LossInputs, settings: LossSettings, kl: bool) -> Tensor:
    """What is minimised of each token, 0 where masked; `kl`: with the KL term, which may be in the reward instead."""

    def whole(seen: LossInputs, settings: LossSettings) -> Tensor:
        found = loss(seen, settings)
        if settings.correction != "none":
            found = found * correction(seen, settings)
        if kl:
            found = found + settings.kl_coef * divergence(seen, settings)
        if settings.entropy_coef:
            assert seen.entropy is not None
            found = found - settings.entropy_coef * seen.entropy
        if settings.teacher_coef:
            found = found + settings.teacher_coef * losses.topk_kl(seen, settings)
        return found

    return losses.per_token(whole, inputs, settings)


def as_if_drawn_by(inputs: LossInputs, here: Tensor) -> LossInputs:
    """The inputs in which the tokens of `here` were drawn by the weights of this forward: their ratio is exactly 1."""
    own = inputs.trainer_logprobs.detach()
    return replace(inputs, behaviour_logprobs=torch.where(here, own, inputs.behaviour_logprobs))
