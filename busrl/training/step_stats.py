"""What one optimiser step was: the numbers of each rank, their sum over ranks, and several updates as one step.

A mean is over all trained tokens, whatever rank or update they were in; times of ranks are those of the slowest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from busrl.algorithms import diagnostics
from busrl.algorithms.diagnostics import Diagnostics


@dataclass(frozen=True)
class StepStats:
    """One optimiser step; `skipped` says why there was none, `culprits` names the samples or parameters."""

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
    cut_tokens: int = 0  # of answers that the limit cut, where these are not trained; not among `tokens`
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
    added = {name: sum(getattr(one, name) for one in updates) for name in (
        "tokens", "sequences", "micro_batches", "context_tokens", "forward_s", "backward_s", "step_s")}
    weights = [one.tokens + one.context_tokens for one in updates]
    return replace(
        last, **added, sums=sums, diagnostics=diagnostics.finish(sums),
        loss=sum(one.loss * one.tokens for one in updates) / max(1, sum(one.tokens for one in updates)),
        padding=sum(one.padding * weight for one, weight in zip(updates, weights, strict=True)) / max(1, sum(weights)),
        partly=len({bool(one.skipped) for one in updates}) > 1,
        skipped="; ".join(dict.fromkeys(one.skipped for one in updates if one.skipped)),
        culprits=tuple(name for one in updates for name in one.culprits),
    )


@dataclass(frozen=True)
class RankStats:
    """What one rank did for a step; norm and reason are the same on all ranks."""

    norm: float
    skipped: str
    culprits: tuple[str, ...]
    sums: tuple[float, ...]  # of the diagnostics
    tokens: int
    sequences: int
    context: int
    computed: int  # positions, padding included
    real: int
    micro_batches: int
    forward_s: float
    backward_s: float
    step_s: float


def stats_of(shares: Sequence[RankStats], lr: float, denominator: float = 0.0, scale: float = 1.0) -> StepStats:
    """The step of these ranks, at least one: what they did added up, the times those of the slowest."""
    added = {name: sum(getattr(share, name) for share in shares)
             for name in ("tokens", "sequences", "micro_batches", "context", "computed", "real")}
    slowest = {name: max(getattr(share, name) for share in shares) for name in ("forward_s", "backward_s", "step_s")}
    computed, real, context = (added.pop(name) for name in ("computed", "real", "context"))
    sums = tuple(map(sum, zip(*(share.sums for share in shares), strict=True)))
    found = diagnostics.finish(sums)
    return StepStats(
        lr=lr, loss=found.loss / ((denominator or max(added["tokens"], 1)) * scale), grad_norm=shares[0].norm,
        padding=1.0 - real / computed if computed else 0.0, diagnostics=found, skipped=shares[0].skipped, sums=sums,
        context_tokens=context,
        culprits=tuple(dict.fromkeys(name for share in shares for name in share.culprits)), **added, **slowest,
    )
