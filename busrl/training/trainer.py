"""The trainer: streams samples through forward and backward as groups become ready, then divides, clips and updates.

Driven by the learner: `accumulate` any number of times, then `step`. Talks to the model, the loss and AdamW; knows
nothing of rings, groups that are still missing, checkpoints or the clock of the run.

- The gradient is the sum of the losses of all trained tokens; it is divided once, by their number in the whole step.
  So neither the cut into micro-batches nor the order of `accumulate` calls changes the step.
- Weights change in `step` alone: every micro-batch of a step is computed with the same weights.
- A step without tokens, or with a gradient that is not finite, leaves weights and optimiser as they were and names
  the culprit.
- Nothing is read back from the device between micro-batches.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from busrl import device
from busrl.algorithms import diagnostics, losses
from busrl.algorithms.diagnostics import Diagnostics
from busrl.algorithms.losses import LossSettings
from busrl.training import batch
from busrl.training.batch import Flat, Sample
from busrl.training.custom import load_loss
from busrl.training.forward import FLASH, Forward, checkpoint_layers, choose_forward
from busrl.training.head import Head
from busrl.training.model import named_weights
from busrl.training.precision import Masters

# -- settings and statistics ---------------------------------------------------


@dataclass(frozen=True)
class TrainerSettings(LossSettings):
    """Numbers by the names of the topology's [learner] keys; the learning rate comes with each step."""

    loss: str = "ppo_clip"
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    micro_batch_tokens: int = 4096
    dmmpt: str = "off"
    dmmpt_tau: float = 0.99
    dmmpt_sigma: float = 0.2
    ratio_one: bool = False  # segments.loss = "pois"
    compute_dtype: str = "float32"  # "bfloat16": of forward and backward; what is trained stays float32
    activation_checkpointing: str = "none"
    head_rows: int = 0
    head_dtype: str = "model"
    attention: str = "auto"

    @classmethod
    def of(cls, topology: Any) -> TrainerSettings:
        """From a topology's [learner], [learner.memory], [experiments], model.dtype and segments.loss."""
        names = {field.name for field in fields(cls)} - {"compute_dtype", "ratio_one"}
        places = (topology.learner.memory, topology.learner, topology.experiments)
        values = {name: next(getattr(one, name) for one in places if hasattr(one, name)) for name in names}
        return cls(compute_dtype=topology.model.dtype, ratio_one=topology.segments.loss == "pois", **values)


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
        last, **added, sums=sums, diagnostics=diagnostics.finish(sums),
        loss=sum(one.loss * one.tokens for one in updates) / max(1, sum(one.tokens for one in updates)),
        padding=sum(one.padding * weight for one, weight in zip(updates, weights, strict=True)) / max(1, sum(weights)),
        partly=len({bool(one.skipped) for one in updates}) > 1,
        skipped="; ".join(dict.fromkeys(one.skipped for one in updates if one.skipped)),
        culprits=tuple(name for one in updates for name in one.culprits),
    )


ADDED = (
    "tokens", "sequences", "micro_batches", "context_tokens", "mastered_tokens", "forward_s", "backward_s", "step_s",
)


# -- learning rate --------------------------------------------------------------

COUPLING_LOW, COUPLING_HIGH = 0.5, 2.0


@dataclass(frozen=True)
class Schedule:
    """The learning rate of a step: `lr` for steps of `n_min` groups, times warm-up, decay and coupling.

    All is counted in groups: with a trigger that may fire early a step has no fixed size. The coupling to that size is
    sqrt(groups / n_min) within [0.5, 2], which keeps the noise of Adam's update the same. `warmup_groups` = 0 starts at
    full size, `decay_to` is a share of `lr`.
    """

    lr: float
    n_min: int
    warmup_groups: int = 0
    decay: str = "none"
    decay_groups: int = 0  # from the end of the warm-up on
    decay_to: float = 0.0

    def __call__(self, trained: int, groups: int) -> float:
        """The rate of a step of `groups` groups after `trained` groups were trained before it."""
        return self.lr * self.warmup(trained + groups) * self.left(trained) * self.coupling(groups)

    def warmup(self, seen: int) -> float:
        """Rises in a line from 0, this step's groups included, so that the first step is not wasted."""
        return 1.0 if self.warmup_groups <= 0 else min(1.0, seen / self.warmup_groups)

    def left(self, seen: int) -> float:
        """Falls from 1 to decay_to over decay_groups groups and stays there; what this step adds is not counted."""
        if self.decay == "none" or self.decay_groups <= 0:
            return 1.0
        done = min(max(seen - self.warmup_groups, 0) / self.decay_groups, 1.0)
        shape = 1.0 - done if self.decay == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
        return self.decay_to + (1.0 - self.decay_to) * shape

    def coupling(self, groups: int) -> float:
        return min(max(math.sqrt(groups / self.n_min), COUPLING_LOW), COUPLING_HIGH)


# -- memory of the C library ------------------------------------------------------

TRIM_THRESHOLD, TOP_PAD, MMAP_THRESHOLD = -1, -2, -3  # of mallopt(3)
LARGEST = (1 << 31) - 1


def keep_freed_memory(slack: int = 1 << 26) -> bool:
    """Let glibc keep freed memory instead of giving it back to the kernel; True if it does. `slack`: bytes per request.

    A step allocates the same few megabytes again and again. Given back each time, every page has to be mapped and
    zeroed again: thousands of page faults, about a tenth of the time of a small model's step.
    """
    settings = ((MMAP_THRESHOLD, 1 << 30), (TRIM_THRESHOLD, LARGEST), (TOP_PAD, slack))
    with contextlib.suppress(OSError, AttributeError):  # another C library
        mallopt = ctypes.CDLL(None).mallopt
        return sum(int(mallopt(option, value)) for option, value in settings) == len(settings)
    return False


# -- the optimiser step ----------------------------------------------------------

Floats = NDArray[np.float32]
Versions = NDArray[np.uint32]


class Trainer:
    """One model, one optimiser, one accumulator (the parameters' `.grad`)."""

    def __init__(
        self, model: Any, settings: TrainerSettings, forward: Forward | None = None,
        named: Callable[[Any], Mapping[str, Tensor]] = named_weights,
    ) -> None:
        """`named` gives the weights to publish; others than the model's own where it has an adapter."""
        self.model, self.settings, self._named = model, settings, named
        self.loss = load_loss(settings.loss)
        self.forward, self._masters = _prepared(model, settings, forward)
        self.parameters = list(self.trained_tensors().values())
        self._device = self.parameters[0].device
        self._watch = device.Stopwatch(self._device)
        self._dtype = torch.promote_types(self.parameters[0].dtype, torch.float32)
        self.optimizer = _adamw(self.parameters, settings)
        self.moved: Callable[[], None] = lambda: None  # called after each micro-batch, a scored one too
        self.ages_of: Callable[[Versions], NDArray[np.int64]] = _no_age  # steps since the version of each token
        self.skip_mastered = settings.dmmpt == "on"  # changed between steps only
        self._clear()

    def _clear(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        self._sums = torch.zeros(len(diagnostics.FIELDS), dtype=torch.float64, device=self._device)
        self._tokens = self._sequences = self._computed = self._real = self._context = 0
        self._mastered = torch.zeros((), dtype=torch.int64, device=self._device)
        self._blame: list[tuple[list[int], Tensor]] = []
        self._marks: list[tuple[Any, Any, Any]] = []  # before and after a forward, after its backward

    def accumulate(
        self, samples: Sequence[Sample], advantages: Sequence[float], proximal: Sequence[Floats] | None = None,
        version: int | None = None,
    ) -> None:
        """Forward and backward of these samples, added to the step under way.

        `proximal` are the log-probabilities of `score` at the start of the step (left out: those of this forward);
        `version` is the policy version of the weights being trained, for the mismatch between engine and trainer.
        """
        if len(samples) != len(advantages) or (proximal is not None and len(proximal) != len(samples)):
            got = f"{len(advantages)}" if proximal is None else f"{len(advantages)} and {len(proximal)}"
            raise ValueError(f"{len(samples)} samples need as many advantages and proximal rows, got {got}")
        for part in batch.cut(samples, self.settings.micro_batch_tokens, self.forward.together):
            self._micro_batch(
                [samples[i] for i in part], [advantages[i] for i in part],
                None if proximal is None else [proximal[i] for i in part], version,
            )

    def _micro_batch(
        self, samples: Sequence[Sample], advantages: Sequence[float], proximal: Sequence[Floats] | None,
        version: int | None,
    ) -> None:
        started = self._watch.mark()
        flat = batch.flatten(samples, self._dtype, self._device)
        logprobs, entropy = self._logprobs(samples, flat)
        inputs = self._loss_inputs(flat, logprobs, advantages, proximal)
        # Under pois the ratio is 1 everywhere; the diagnostics below are of the true one.
        trained = replace(inputs, behaviour_logprobs=logprobs.detach()) if self.settings.ratio_one else inputs
        loss = losses.per_token(self.loss, trained, self.settings)
        if self.skip_mastered:
            tau, sigma = self.settings.dmmpt_tau, self.settings.dmmpt_sigma
            rows = inputs.advantages, flat.rows, flat.lengths
            mastered = losses.mastered(logprobs, entropy, *rows, tau, sigma, flat.mask)
            loss = loss.masked_fill(mastered, 0)
            self._mastered += mastered.sum()
        total = loss.sum()
        forwarded = self._watch.mark()
        total.backward()  # type: ignore[no-untyped-call]
        self._marks.append((started, forwarded, self._watch.mark()))
        self._count(samples, flat, inputs, loss.detach(), entropy, version)
        self.moved()

    def _loss_inputs(
        self, flat: Flat, logprobs: Tensor, advantages: Sequence[float], proximal: Sequence[Floats] | None
    ) -> losses.LossInputs:
        """What the loss gets of a micro-batch."""
        before = logprobs.detach() if proximal is None else torch.from_numpy(np.concatenate(proximal)).to(logprobs)
        return losses.LossInputs(
            trainer_logprobs=logprobs, behaviour_logprobs=flat.behaviour_logprobs, proximal_logprobs=before,
            advantages=flat.per_token(advantages, self._dtype), mask=flat.mask, samples=flat.rows,
            policy_versions=torch.from_numpy(flat.policy_versions.astype(np.int64)).to(self._device),
            ages=torch.from_numpy(self.ages_of(flat.policy_versions)).to(self._device),
        )

    def _logprobs(self, samples: Sequence[Sample], flat: Flat) -> tuple[Tensor, Tensor]:
        return self.forward.score(samples, flat)

    def _count(
        self, samples: Sequence[Sample], flat: Flat, inputs: losses.LossInputs, loss: Tensor, entropy: Tensor,
        version: int | None,
    ) -> None:
        current, begun = self._of_these_weights(samples, flat, version)
        self._sums += diagnostics.sums(inputs, loss, entropy, current, self.settings, begun)
        per_sample = torch.zeros(len(samples), dtype=loss.dtype, device=self._device)
        self._blame.append((flat.uids, per_sample.index_add_(0, flat.rows, loss)))
        context = sum(sample.context for sample in samples)
        self._tokens += len(flat.targets) - context
        self._context += context
        self._sequences += len(samples)
        self._computed += self.forward.size(samples)
        self._real += sum(sample.length for sample in samples)

    def _of_these_weights(
        self, samples: Sequence[Sample], flat: Flat, version: int | None
    ) -> tuple[Tensor | None, Tensor | None]:
        """Which tokens the weights of `version` drew, and which of them in answers that began with these weights."""
        if version is None:
            return None, None
        began = np.fromiter((sample.policy_versions[0] == version for sample in samples), np.bool_, len(samples))
        drawn = torch.from_numpy(flat.policy_versions == version).to(self._device)
        return drawn, torch.from_numpy(began).to(self._device)[flat.rows]

    @torch.no_grad()
    def score(self, samples: Sequence[Sample]) -> list[Floats]:
        """Log-probabilities of the generated tokens under the present weights, in the order of `samples`."""
        found: list[Floats] = [np.zeros(0, np.float32)] * len(samples)
        for part, logprobs, _ in self._scored(samples):
            ends = np.cumsum([len(samples[i].token_ids) for i in part])[:-1]
            for index, row in zip(part, np.split(logprobs.float().cpu().numpy(), ends), strict=True):
                found[index] = row
        return found

    @torch.no_grad()
    def entropy(self, samples: Sequence[Sample]) -> float:
        """Mean entropy in nats, full softmax at the sampling temperature, over the generated tokens of `samples`."""
        total, tokens = torch.zeros((), dtype=torch.float64, device=self._device), 0
        for _, _, entropy in self._scored(samples):
            total, tokens = total + entropy.sum(dtype=torch.float64), tokens + len(entropy)
        return float(total) / max(tokens, 1)

    def _scored(self, samples: Sequence[Sample]) -> Iterator[tuple[list[int], Tensor, Tensor]]:
        """Per micro-batch the positions of its samples, log-probabilities and entropies of their tokens."""
        for part in batch.cut(samples, self.settings.micro_batch_tokens, self.forward.together):
            chosen = [samples[i] for i in part]
            flat = batch.flatten(chosen, self._dtype, self._device)
            yield part, *self._logprobs(chosen, flat)
            self.moved()

    # -- the update ------------------------------------------------------------------------------------------------

    def step(self, lr: float) -> StepStats:
        """Divides, clips and updates with that learning rate; or skips, with the reason."""
        device.synchronize(self._device)  # what is still to be computed is no part of the update
        started = time.perf_counter()
        norm, reason, culprits = 0.0, "", ()  # type: float, str, tuple[str, ...]
        if self._tokens == 0:
            reason = "no trained token"
        else:
            norm = normalised_norm(self.parameters, self._tokens)
            if np.isfinite(norm):
                clip(self.parameters, norm, self.settings.max_grad_norm)
                for group in self.optimizer.param_groups:
                    group["lr"] = lr
                self.optimizer.step()
                self._round()
            else:
                reason, culprits = f"the gradient norm is {norm}", self._culprits()
        stats = self._stats(lr, norm, reason, culprits, started)
        self._clear()
        return stats

    def _culprits(self) -> tuple[str, ...]:
        bad = [f"sample {uid}" for uids, sums in self._blame
               for uid, finite in zip(uids, sums.isfinite().tolist(), strict=True) if not finite]
        if bad:
            return tuple(bad)
        named = self.trained_tensors().items()
        return tuple(f"parameter {n}" for n, p in named if p.grad is not None and not bool(p.grad.isfinite().all()))

    def _stats(
        self, lr: float, norm: float, reason: str, culprits: tuple[str, ...], started: float
    ) -> StepStats:
        sums = tuple(self._sums.tolist())  # the one time that the device is read
        found = diagnostics.finish(sums)
        return StepStats(
            lr=lr, loss=found.loss / max(self._tokens, 1), grad_norm=norm, tokens=self._tokens,
            sequences=self._sequences, micro_batches=len(self._blame),
            padding=1.0 - self._real / self._computed if self._computed else 0.0,
            diagnostics=found, skipped=reason, culprits=culprits, context_tokens=self._context,
            mastered_tokens=int(self._mastered),
            forward_s=sum(self._watch.seconds(begun, between) for begun, between, _ in self._marks),
            backward_s=sum(self._watch.seconds(between, ended) for _, between, ended in self._marks),
            step_s=time.perf_counter() - started, sums=sums)

    # -- weights and state -----------------------------------------------------------------------------------------

    def named_weights(self) -> Mapping[str, Tensor]:
        """The weights to publish, by name, in the compute type; valid until the next step."""
        return self._named(self.model)

    def optimizer_state(self) -> dict[str, Any]:
        """For a checkpoint; tensors, numbers and lists only. `master`: the trained parameters, where the model's folder
        has them rounded."""
        return {**self.optimizer.state_dict(), **({MASTER: self.trained_tensors()} if self.rounded else {})}

    @property
    def rounded(self) -> bool:
        """Whether weights are published in fewer bits than they are trained in."""
        return self._masters is not None

    def trained_tensors(self) -> dict[str, Tensor]:
        """What the optimiser changes, by name."""
        if self._masters is not None:
            return self._masters.named
        return {name: parameter for name, parameter in self.model.named_parameters() if parameter.requires_grad}

    def _round(self) -> None:
        if self._masters is not None:
            self._masters.round()

    @torch.no_grad()
    def load_optimizer_state(self, state: dict[str, Any]) -> list[str]:
        """The counterpart; the model's weights are loaded from the checkpoint's model folder.

        The settings stay those of this trainer: returns, as text, which of them differ from those of `state`.
        """
        own = [{name: group[name] for name in OPTIMISER_KEYS} for group in self.optimizer.param_groups]
        self.optimizer.load_state_dict({name: value for name, value in state.items() if name != MASTER})
        for name, parameter in self.trained_tensors().items():
            if MASTER in state:
                parameter.copy_(state[MASTER][name])
        self._round()
        changed = []
        for mine, group in zip(own, self.optimizer.param_groups, strict=True):
            for name, value in mine.items():
                if _plain(group[name]) != _plain(value):
                    changed.append(f"learner.{name} = {_plain(value)} (before: {_plain(group[name])})")
                group[name] = value
        self._clear()
        return list(dict.fromkeys(changed))


LARGE = 10**9  # parameters from which on an accelerator keeps the inputs of layers alone


def _prepared(model: Any, settings: TrainerSettings, forward: Forward | None) -> tuple[Forward, Masters | None]:
    """How the model computes, and the masters of its parameters where it computes in fewer bits."""
    head = Head.of(model.config, settings.head_rows, torch.float32 if settings.head_dtype == "float32" else None)
    found = forward
    if found is None and not settings.attention.startswith(FLASH):  # a probe in float32 tells more
        found = choose_forward(model, head, settings.attention)
    masters = None if settings.compute_dtype == "float32" else Masters(model, getattr(torch, settings.compute_dtype))
    found = found or choose_forward(model, head, settings.attention)
    large = model.device.type != "cpu" and sum(parameter.numel() for parameter in model.parameters()) >= LARGE
    if settings.activation_checkpointing == "full" or (settings.activation_checkpointing == "auto" and large):
        checkpoint_layers(found)
    return found, masters


def _no_age(versions: Versions) -> NDArray[np.int64]:
    return np.zeros(len(versions), np.int64)


MASTER = "master"
OPTIMISER_KEYS = ("betas", "eps", "weight_decay")  # names of the topology and of AdamW; the rate comes with each step


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, (list, tuple)) else value


def _adamw(parameters: Sequence[Tensor], settings: TrainerSettings) -> torch.optim.AdamW:
    # Norms and biases are not decayed: they set a scale, they do not overfit.
    groups = [{"params": [p for p in parameters if p.ndim >= 2], "weight_decay": settings.weight_decay},
              {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0}]
    used = [group for group in groups if group["params"]]
    return torch.optim.AdamW(used, lr=0.0, betas=settings.betas, eps=settings.eps, fused=True)


def normalised_norm(parameters: Sequence[Tensor], count: int) -> float:
    """Divides the accumulated gradient by the trained tokens of the step, in place, and returns its norm."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    torch._foreach_div_(gradients, float(count))
    return float(torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients))))


def clip(parameters: Sequence[Tensor], norm: float, limit: float) -> None:
    """Scales the gradient down to the limit if its norm is above."""
    if norm > limit:
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        torch._foreach_mul_(gradients, limit / (norm + 1e-6))
