"""The diagnostics of a step: how far the weights are from those that sampled, what was clipped, the entropy.

- Only sums are kept, one row per micro-batch: the numbers of a step are exact over all of its tokens, however cut.
- Nothing is read back from the device before the step ends: a read per micro-batch would stall it.
- What the loss computed (`terms.Objective`) is taken from there, not computed a second time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from busrl.algorithms import distill, losses, terms

FIELDS = ("tokens", "log_ratio", "k3", "weight", "weight_squared", "clip_low", "clip_high", "dual", "entropy", "loss",
          "current", "current_abs", "begun", "begun_abs", "dropped", "referred", "kl",
          "valued", "value_loss", "returns", "returns_squared", "errors", "errors_squared", "taught", "teacher_kl")


@dataclass(frozen=True)
class ValueErrors:
    """Loss, returns and values of a micro-batch, per token."""

    loss: Tensor  # with gradient
    returns: Tensor
    values: Tensor


@dataclass(frozen=True)
class Diagnostics:
    """Means over the trained tokens of a step; the ratio is to the recorded log-probabilities, never truncated."""

    log_ratio_mean: float  # log(trainer / behaviour)
    k3: float  # mean of r - 1 - log r, which estimates KL(behaviour || trainer)
    ess: float  # (sum r)^2 / (N sum r^2), in [1/N, 1]
    clip_low: float  # share with A < 0 and r < 1 - clip_low
    clip_high: float  # share with A > 0 and r > 1 + clip_high
    dual_clip: float  # share with A < 0 and r > dual_clip
    entropy: float  # nats, full softmax at the sampling temperature
    loss: float  # sum of the loss, before the division
    mismatch: float | None  # mean |log ratio| of the tokens sampled with exactly these weights; None without any
    mismatch_begun: float | None = None  # of these, those of answers that began with these weights; None without any
    dropped: float = 0.0  # share that learner.correction gave weight 0
    kl: float | None = None  # k3 of the log-ratio to the reference, nats per token; None without a reference
    teacher_kl: float | None = None  # mean KL(teacher || student) over its best tokens, nats; None without a teacher
    value_loss: float | None = None  # mean over tokens; None without a value head
    explained_variance: float | None = None  # 1 - Var(return - value) / Var(return); None without a spread of returns


def sums(
    inputs: losses.LossInputs, objective: terms.Objective, entropy: Tensor, current: Tensor | None,
    settings: losses.LossSettings, begun: Tensor | None = None, of_values: ValueErrors | None = None,
) -> Tensor:
    """The row of a micro-batch, in the order of FIELDS. `current` marks tokens sampled with the very weights that are
    being trained, `begun` those of them whose answers had no token of other weights before (None: all of them).
    """
    difference = losses.log_ratio(inputs.trainer_logprobs.detach(), inputs.behaviour_logprobs)
    ratio = difference.exp()
    low, high = losses.clip_bounds(settings)
    falling, rising = inputs.advantages < 0, inputs.advantages > 0
    same = torch.zeros_like(difference) if current is None else current.to(difference)
    rows = [torch.ones_like(difference), difference, ratio - 1 - difference, ratio, ratio * ratio]
    rows += [falling & (ratio < low), rising & (ratio > high), falling & (ratio > settings.dual_clip)]
    begun_same = same if begun is None else same * begun.to(difference)
    rows += [entropy.detach(), objective.loss.detach(), same, same * difference.abs()]
    rows += [begun_same, begun_same * difference.abs()]
    nothing = torch.zeros_like(difference)
    rows += _of_terms(inputs, objective, nothing)
    rows += _of_values(of_values, nothing)
    rows += _of_teacher(inputs, objective, nothing)
    every = torch.stack([row.to(difference.dtype) for row in rows])
    # Not a product with the mask: a masked position may hold NaN.
    trained = every if inputs.mask is None else every.where(inputs.mask.bool(), 0)
    return trained.flatten(1).sum(1, dtype=torch.float64)


def _of_terms(inputs: losses.LossInputs, objective: terms.Objective, nothing: Tensor) -> list[Tensor]:
    """Rows: tokens that the correction dropped, tokens with a reference, KL to the reference."""
    dropped, kl = nothing if objective.weights is None else objective.weights == 0, objective.reference_k3
    if inputs.reference_logprobs is None:
        return [dropped, nothing, nothing]
    if kl is None:
        kl = terms.k3(inputs.trainer_logprobs.detach(), inputs.reference_logprobs)
    return [dropped, torch.ones_like(nothing), kl.detach()]


def _of_values(errors: ValueErrors | None, nothing: Tensor) -> list[Tensor]:
    if errors is None:
        return [nothing] * 6
    error = errors.returns - errors.values
    rows = [errors.loss.detach(), errors.returns, errors.returns.square(), error, error.square()]
    return [torch.ones_like(nothing), *(row.to(nothing.dtype) for row in rows)]


def _of_teacher(inputs: losses.LossInputs, objective: terms.Objective, nothing: Tensor) -> list[Tensor]:
    if inputs.teacher_logprobs is None or inputs.student_logprobs is None:
        return [nothing] * 2
    kl = objective.teacher_kl
    if kl is None:
        kl = distill.topk_kl(inputs.student_logprobs.detach(), inputs.teacher_logprobs)
    return [torch.ones_like(nothing), kl.detach()]


def finish(total: Tensor | Sequence[float]) -> Diagnostics:
    """The means from the sum of all rows; reads the device once. Without a token all are 0, and a mismatch is None."""
    value = dict(zip(FIELDS, total.tolist() if isinstance(total, Tensor) else total, strict=True))
    count = max(value["tokens"], 1.0)
    weights = value["weight_squared"] * count

    def mean(name: str, over: str) -> float | None:
        return value[name] / value[over] if value[over] else None

    return Diagnostics(
        log_ratio_mean=value["log_ratio"] / count, ess=value["weight"] ** 2 / weights if weights else 0.0,
        dual_clip=value["dual"] / count, loss=value["loss"], mismatch=mean("current_abs", "current"),
        mismatch_begun=mean("begun_abs", "begun"), kl=mean("kl", "referred"), teacher_kl=mean("teacher_kl", "taught"),
        value_loss=mean("value_loss", "valued"), explained_variance=_explained(value),
        **{name: value[name] / count for name in ("k3", "clip_low", "clip_high", "entropy", "dropped")},
    )


def _explained(value: dict[str, float]) -> float | None:
    count = value["valued"]
    spreads = [value[f"{name}_squared"] - value[name] ** 2 / max(count, 1.0) for name in ("errors", "returns")]
    return 1 - spreads[0] / spreads[1] if spreads[1] > 1e-9 * max(count, 1.0) else None
