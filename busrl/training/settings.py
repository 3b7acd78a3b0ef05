"""The numbers of a trainer, and what it reports per step.

Plain data; the names are those of the topology's [learner] keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from busrl.algorithms import diagnostics as told
from busrl.algorithms.diagnostics import Diagnostics
from busrl.algorithms.losses import LossSettings


@dataclass(frozen=True)
class TrainerSettings:
    """Everything but the learning rate, which comes with each step."""

    loss: str = "ppo_clip"
    aggregation: str = "token-mean"  # of a run always
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    clip_low: float = 0.2
    clip_high: float = 0.28
    dual_clip: float = 3.0
    tis_cap: float = 2.0
    max_grad_norm: float = 1.0
    micro_batch_tokens: int = 4096
    dmmpt: str = "off"
    dmmpt_tau: float = 0.99
    dmmpt_sigma: float = 0.2
    ratio_one: bool = False  # segments.loss = "pois"
    compute_dtype: str = "float32"  # "bfloat16": forward under autocast, parameters and gradients stay float32

    @classmethod
    def of(cls, topology: Any) -> TrainerSettings:
        """From a topology's [learner], [experiments], model.dtype and segments.loss."""
        mastered = {name: getattr(topology.experiments, name) for name in ("dmmpt", "dmmpt_tau", "dmmpt_sigma")}
        names = {field.name for field in fields(cls)} - {"compute_dtype", "ratio_one", "aggregation"} - set(mastered)
        values = {name: getattr(topology.learner, name) for name in names}
        ratio_one = topology.segments.loss == "pois"
        return cls(compute_dtype=topology.model.dtype, ratio_one=ratio_one, **values, **mastered)

    def for_loss(self) -> LossSettings:
        return LossSettings(self.clip_low, self.clip_high, self.dual_clip, self.tis_cap)


@dataclass(frozen=True)
class StepStats:
    """What one optimiser step was; `skipped` says why there was none, `culprits` which samples or parameters did it."""

    lr: float
    loss: float  # the aggregated loss of the step, before the update
    grad_norm: float  # before clipping
    tokens: int
    sequences: int
    micro_batches: int
    padding: float  # share of the computed positions that were padding
    diagnostics: Diagnostics
    skipped: str = ""
    culprits: tuple[str, ...] = ()
    partly: bool = False  # several updates, of which some were skipped and others made
    old_tokens: int = 0  # of `context_tokens`, those that were too old
    context_tokens: int = 0  # generated, and read as context only: earlier segments, too old; not among `tokens`
    mastered_tokens: int = 0  # among `tokens`, left out of the loss by DMMPT
    forward_s: float = 0.0
    backward_s: float = 0.0
    step_s: float = 0.0
    sums: tuple[float, ...] = ()  # what the diagnostics were made of, in the order of their FIELDS


def combined(updates: Sequence[StepStats]) -> StepStats:
    """One step of several updates, at least one: counts and times added up, means over all of its trained tokens, each
    under the weights of its own update. The gradient norm is that of the last update."""
    last = updates[-1]
    if len(updates) == 1:
        return last
    sums = tuple(map(sum, zip(*(one.sums for one in updates), strict=True)))
    added = {name: sum(getattr(one, name) for one in updates) for name in ADDED}
    weights = [one.tokens + one.context_tokens for one in updates]
    return replace(
        last, **added, sums=sums, diagnostics=told.finish(sums),
        loss=sum(one.loss * one.tokens for one in updates) / max(1, sum(one.tokens for one in updates)),
        padding=sum(one.padding * weight for one, weight in zip(updates, weights, strict=True)) / max(1, sum(weights)),
        partly=len({bool(one.skipped) for one in updates}) > 1,
        skipped="; ".join(dict.fromkeys(one.skipped for one in updates if one.skipped)),
        culprits=tuple(name for one in updates for name in one.culprits),
    )  # fmt: skip


ADDED = (
    "tokens", "sequences", "micro_batches", "context_tokens", "mastered_tokens", "forward_s", "backward_s", "step_s",
)  # fmt: skip
