"""Numbers of an optimiser step: a trainer's counts, the numbers of each rank, their sum over ranks, and several updates
as one step.

Filled by the trainer, read by the learner. Knows nothing of models, losses or optimisers.

- A mean is over the trained tokens of all ranks and updates; times of ranks are those of the slowest.
- Nothing is read back from the device before the update: a read for each micro-batch would stall it.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from busrl.algorithms import diagnostics
from busrl.algorithms.diagnostics import Diagnostics
from busrl.algorithms.losses import LossInputs, log_ratio
from busrl.system import device
from busrl.training.batch import Flat, Sample, pieces_of

# Counts of a run with routes: tokens with routes and those without, rows of prompts that several samples share and
# those of them with other routes, tokens with another set of experts in any layer; then of each layer those with one.
ROUTES = ("rows", "own", "shared", "differ", "any")
# Tokens drawn by the trained weights; their distances from the engine, with its routes and with the model's own.
COMPARED = ("tokens", "mismatch", "mismatch_own")


@dataclass(frozen=True)
class StepStats:
    """An optimiser step. `skipped`: why there was none; `culprits`: the samples or parameters behind it."""

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
    sums: tuple[float, ...] = ()  # from which the diagnostics follow, in the order of their FIELDS
    routes: tuple[float, ...] = ()  # counts, in the order of ROUTES, and then by layer
    compared: tuple[float, ...] = ()  # of micro-batches that were computed by own routes too, in the order of COMPARED

    def routes_of_one_pass(self, passes: int) -> tuple[float, ...]:
        """The counts of routes, with each token without them counted once; all others are read as shares."""
        return tuple(count / passes if name == "own" else count
                     for name, count in itertools.zip_longest(ROUTES[: len(self.routes)], self.routes))

    def route_figures(self) -> dict[str, float]:
        """Shares by the names that they have in metrics.jsonl; none in a run without routes."""
        if not self.routes:
            return {}
        count, changed = dict(zip(ROUTES, self.routes)), self.routes[len(ROUTES) :]
        rows, compared = max(1.0, count["rows"]), dict(zip(COMPARED, self.compared))
        tokens = compared.pop("tokens", 0.0)
        return {
            "changed": sum(changed) / (rows * len(changed)), "rows": count["any"] / rows,
            "by_layer_max": max(changed) / rows, "prompt_differs": count["differ"] / max(1.0, count["shared"]),
            "own_tokens": count["own"], **({name: sum_ / tokens for name, sum_ in compared.items()} if tokens else {}),
        }


def added_up(counts: Iterable[tuple[float, ...]]) -> tuple[float, ...]:
    """The sum of rows of counts, of which some are empty."""
    return tuple(map(sum, zip(*filter(None, counts), strict=True)))


def combined(updates: Sequence[StepStats]) -> StepStats:
    """Join at least one update to a step: counts and times are added up, means are over all trained tokens, each under
    the weights of its update. The gradient norm is that of the last update."""
    last = updates[-1]
    if len(updates) == 1:
        return last
    sums = tuple(map(sum, zip(*(update.sums for update in updates), strict=True)))
    added = {name: sum(getattr(update, name) for update in updates) for name in (
        "tokens", "sequences", "micro_batches", "context_tokens", "forward_s", "backward_s", "step_s")}
    weights = [update.tokens + update.context_tokens for update in updates]
    return replace(
        last, **added, sums=sums, diagnostics=diagnostics.finish(sums),
        routes=added_up(update.routes for update in updates),
        compared=added_up(update.compared for update in updates),
        loss=sum(update.loss * update.tokens for update in updates) / max(1, sum(update.tokens for update in updates)),
        padding=sum(u.padding * weight for u, weight in zip(updates, weights, strict=True)) / max(1, sum(weights)),
        partly=len({bool(update.skipped) for update in updates}) > 1,
        skipped="; ".join(dict.fromkeys(update.skipped for update in updates if update.skipped)),
        culprits=tuple(name for update in updates for name in update.culprits),
    )


@dataclass(frozen=True)
class RankStats:
    """Numbers of a rank for a step; norm and reason are the same on all ranks."""

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
    routes: tuple[float, ...] = ()
    compared: tuple[float, ...] = ()


def stats_of(shares: Sequence[RankStats], lr: float, denominator: float = 0.0, scale: float = 1.0) -> StepStats:
    """The step of these ranks, at least one: counts are added up, times are those of the slowest."""
    added = {name: sum(getattr(share, name) for share in shares)
             for name in ("tokens", "sequences", "micro_batches", "context", "computed", "real")}
    slowest = {name: max(getattr(share, name) for share in shares) for name in ("forward_s", "backward_s", "step_s")}
    computed, real, context = (added.pop(name) for name in ("computed", "real", "context"))
    sums = tuple(map(sum, zip(*(share.sums for share in shares), strict=True)))
    figures = diagnostics.finish(sums)
    return StepStats(
        lr=lr, loss=figures.loss / ((denominator or max(added["tokens"], 1)) * scale), grad_norm=shares[0].norm,
        padding=1.0 - real / computed if computed else 0.0, diagnostics=figures, skipped=shares[0].skipped, sums=sums,
        context_tokens=context, routes=added_up(share.routes for share in shares),
        compared=added_up(share.compared for share in shares),
        culprits=tuple(dict.fromkeys(name for share in shares for name in share.culprits)), **added, **slowest,
    )


def _read(counts: Tensor | None) -> tuple[float, ...]:
    return () if counts is None else tuple(counts.tolist())


# -- counts until the update ----------------------------------------------------------


class Tally:
    """Counts the work of a trainer for the step under way."""

    def __init__(self, where: torch.device) -> None:
        self._device, self.stopwatch = where, device.Stopwatch(where)
        self._watched: Collection[int] = ()
        self._gaps: dict[int, Tensor] = {}
        self.clear()

    def clear(self) -> None:
        """Begin a step. The gaps of watched samples stay until `gaps` returns them."""
        self._sums = torch.zeros(len(diagnostics.FIELDS), dtype=torch.float64, device=self._device)
        self.tokens = self._sequences = self._computed = self._real = self._context = 0
        self._routes: Tensor | None = None
        self._compared: Tensor | None = None
        self._losses: list[tuple[list[int], Tensor]] = []  # uids of a micro-batch, and the loss of each
        self._marks: list[tuple[Any, Any, Any]] = []  # before and after a forward, after its backward

    def mark(self) -> Any:
        """A point in time of the device, for `timed`."""
        return self.stopwatch.mark()

    def timed(self, started: Any, forwarded: Any) -> None:
        """Count the times of a micro-batch: its begin, the end of its forward, and, now, of its backward."""
        self._marks.append((started, forwarded, self.stopwatch.mark()))

    def add(self, samples: Sequence[Sample], flat: Flat, row: Tensor, loss: Tensor, positions: int) -> None:
        """Count a micro-batch: its row of diagnostics, the loss of each token, and the number of computed positions."""
        self._sums += row
        per_sample = torch.zeros(len(samples), dtype=loss.dtype, device=self._device)
        self._losses.append((flat.uids, per_sample.index_add_(0, flat.rows, loss)))
        context = sum(sample.generated - sample.trained for sample in samples)
        self.tokens += len(flat.targets) - context
        self._context += context
        self._sequences += len(samples)
        self._computed += positions
        self._real += sum(len(piece.ids) for piece in pieces_of(samples))

    def add_routes(self, counts: Tensor | None) -> None:
        """Count the routes of a micro-batch, where it has any. Counts of samples without are made on the host."""
        if counts is not None:
            counts = counts.to(self._device)
            self._routes = counts if self._routes is None else self._routes + counts

    def add_compared(self, inputs: LossInputs, own: Tensor, current: Tensor) -> None:
        """Count a micro-batch whose log-probabilities with the model's own routes are these; `current`: the tokens that
        the trained weights drew."""
        counted = current if inputs.mask is None else current & inputs.mask
        gaps = [log_ratio(there.detach(), inputs.behaviour_logprobs).abs() for there in (inputs.trainer_logprobs, own)]
        row = torch.stack([torch.ones_like(gaps[0]), *gaps]).where(counted, 0).sum(1, dtype=torch.float64)
        self._compared = row if self._compared is None else self._compared + row

    @property
    def uids(self) -> list[int]:
        """The samples of the step."""
        return [uid for uids, _ in self._losses for uid in uids]

    def culprits(self) -> list[int]:
        """The samples whose loss is not finite."""
        return [uid for uids, sums in self._losses
                for uid, finite in zip(uids, sums.isfinite().tolist(), strict=True) if not finite]

    def stats(self, norm: float, reason: str, culprits: tuple[str, ...], started: float) -> RankStats:
        """The numbers of the step, whose update began at `started`."""
        return RankStats(
            norm=norm, skipped=reason, culprits=culprits,
            sums=tuple(self._sums.tolist()),  # the one time that the device is read
            tokens=self.tokens, sequences=self._sequences, context=self._context,
            computed=self._computed, real=self._real, micro_batches=len(self._losses),
            forward_s=sum(self.stopwatch.seconds(begun, between) for begun, between, _ in self._marks),
            backward_s=sum(self.stopwatch.seconds(between, ended) for _, between, ended in self._marks),
            step_s=time.perf_counter() - started, routes=_read(self._routes),
            compared=_read(self._compared),
        )

    # -- differences from the engine, of watched samples ------------------------------

    def watch(self, uids: Collection[int]) -> None:
        """Keep the gaps of these samples from now on, and of no others."""
        self._watched = uids

    def keep_gaps(self, samples: Sequence[Sample], inputs: LossInputs) -> None:
        """Keep gaps on the device, so that nothing waits for them; of several updates with a sample the first one's."""
        ends = np.cumsum([sample.generated for sample in samples])
        for sample, end in zip(samples, ends.tolist(), strict=True):
            if sample.uid in self._watched and sample.uid not in self._gaps:
                tokens = slice(end - sample.generated, end)
                gap = inputs.trainer_logprobs[tokens] - inputs.behaviour_logprobs[tokens]
                self._gaps[sample.uid] = gap.detach()

    def gaps(self) -> dict[int, NDArray[np.float32]]:
        """Gaps of the watched samples that this process has trained since the last call: of each generated token its
        log-probability here, before the update, minus that of the engine."""
        gaps, self._gaps = self._gaps, {}
        return {uid: gap.float().cpu().numpy() for uid, gap in gaps.items()}
