"""The optimiser step: streams samples through forward and backward as groups become ready, then divides, clips and
updates.

Driven by the learner: `accumulate` any number of times, then `step`. Talks to the model, the loss and AdamW; knows
nothing of rings, groups that are still missing, checkpoints or the clock of the run.

- The gradient is the sum over all trained tokens of weight x loss; it is divided once, by the denominator of the
  whole step. So neither the cut into micro-batches nor the order of `accumulate` calls changes the step.
- Weights change in `step` alone: every micro-batch of a step is computed with the same weights.
- A step without tokens, or with a gradient that is not finite, leaves weights and optimiser as they were and names
  the culprit.
- Nothing is read back from the device between micro-batches.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from busrl import device
from busrl.algorithms import aggregation, diagnostics, dmmpt, losses

from . import batch, logprobs
from .batch import Flat, Padded, Sample
from .forward import Forward, choose
from .model import named_weights
from .settings import StepStats, TrainerSettings

Floats = NDArray[np.float32]


class Trainer:
    """One model, one optimiser, one accumulator (the parameters' `.grad`)."""

    def __init__(
        self,
        model: Any,
        settings: TrainerSettings,
        forward: Forward | None = None,
        named: Callable[[Any], dict[str, Tensor]] = named_weights,
    ) -> None:
        """`named` gives the weights to publish; others than the model's own where it has an adapter."""
        self.model, self.settings, self._named = model, settings, named
        self.loss = losses.get(settings.loss)
        self.forward = forward or choose(model, lean=settings.compute_dtype == "float32")
        self._loss_settings = settings.for_loss()
        self._parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._device = self._parameters[0].device
        self._watch = device.Stopwatch(self._device)
        self._dtype = torch.promote_types(self._parameters[0].dtype, torch.float32)
        self.optimizer = _adamw(self._parameters, settings)
        self.moved: Callable[[], None] = _nothing  # called after each micro-batch, a scored one too
        self._published: dict[str, Tensor] = {}
        self.skip_mastered = settings.dmmpt == "on"  # changed between steps only
        self._clear()

    def _clear(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        self._sums = torch.zeros(len(diagnostics.FIELDS), dtype=torch.float64, device=self._device)
        self._tokens = self._sequences = self._computed = self._real = self._context = 0
        self._mastered = torch.zeros((), dtype=torch.int64, device=self._device)
        self._blame: list[tuple[list[int], Tensor]] = []
        self._marks: list[tuple[Any, Any, Any]] = []  # before and after a forward, after its backward

    # ------------------------------------------------------------------------------------------------- streaming

    def accumulate(self, samples: Sequence[Sample], advantages: Sequence[float],
                   prox: Sequence[Floats] | None = None, version: int | None = None) -> None:  # fmt: skip
        """Forward and backward of these samples, added to the step under way.

        `prox` are the log-probabilities of `score` at the start of the step (left out: those of this forward);
        `version` is the version of the weights being trained, for the mismatch between engine and trainer.
        """
        if len(samples) != len(advantages) or (prox is not None and len(prox) != len(samples)):
            raise ValueError(f"{len(samples)} samples need as many advantages and prox rows, got {len(advantages)}"
                             + (f" and {len(prox)}" if prox is not None else ""))  # fmt: skip
        for part in batch.cut(samples, self.settings.micro_batch_tokens, self.forward.together):
            self._micro_batch([samples[i] for i in part], [advantages[i] for i in part],
                              None if prox is None else [prox[i] for i in part], version)  # fmt: skip

    def _micro_batch(self, samples: Sequence[Sample], advantages: Sequence[float], prox: Sequence[Floats] | None,
                     version: int | None) -> None:  # fmt: skip
        started = self._watch.mark()
        padded, flat = self._tensors(samples)
        logp, entropy = self._logp(samples, padded, flat)
        tokens = losses.Tokens(
            logp=logp, behaviour=flat.behaviour, prox=logp.detach() if prox is None else self._flat_prox(prox, logp),
            advantage=flat.per_token(advantages, self._dtype), mask=flat.mask)  # fmt: skip
        weights = token_weights(self.settings.aggregation, flat, self._dtype)
        if self.skip_mastered:
            weights = weights.masked_fill(self._find_mastered(tokens, flat, entropy), 0)
        # Under pois the ratio is 1 everywhere; what is counted below stays the true one.
        trained = replace(tokens, behaviour=logp.detach()) if self.settings.ratio_one else tokens
        weighted = self.loss.per_token(trained, self._loss_settings) * weights
        total = weighted.sum()
        forwarded = self._watch.mark()
        total.backward()  # type: ignore[no-untyped-call]
        self._marks.append((started, forwarded, self._watch.mark()))
        self._count(samples, padded, flat, tokens, weighted.detach(), entropy, version)
        self.moved()

    def _find_mastered(self, tokens: losses.Tokens, flat: Flat, entropy: Tensor) -> Tensor:
        settings = self.settings
        found = dmmpt.mastered(tokens.logp, entropy, tokens.advantage, flat.rows, flat.lengths, settings.dmmpt_tau,
                               settings.dmmpt_sigma, flat.mask)  # fmt: skip
        self._mastered += found.sum()
        return found

    def _tensors(self, samples: Sequence[Sample]) -> tuple[Padded, Flat]:
        padded = batch.pad(samples)
        return padded.to(self._device), batch.flatten(samples, padded, self._dtype).to(self._device)

    def _logp(self, samples: Sequence[Sample], padded: Padded, flat: Flat) -> tuple[Tensor, Tensor]:
        with self._autocast():
            logits = self.forward.logits(samples, padded)
        return logprobs.selected(logprobs.at_temperature(logits.to(self._dtype), flat.temperature), flat.targets)

    def _autocast(self) -> contextlib.AbstractContextManager[Any]:
        if self.settings.compute_dtype == "float32":
            return contextlib.nullcontext()
        return torch.autocast(self._device.type, dtype=getattr(torch, self.settings.compute_dtype))

    def _flat_prox(self, prox: Sequence[Floats], logp: Tensor) -> Tensor:
        return torch.from_numpy(np.concatenate(list(prox))).to(logp)

    def _count(self, samples: Sequence[Sample], padded: Padded, flat: Flat, tokens: losses.Tokens, weighted: Tensor,
               entropy: Tensor, version: int | None) -> None:  # fmt: skip
        current, begun = self._of_these_weights(samples, flat, version)
        self._sums += diagnostics.sums(tokens, weighted, entropy, current, self._loss_settings, begun)
        per_sample = torch.zeros(len(samples), dtype=weighted.dtype, device=self._device)
        self._blame.append((flat.uids, per_sample.index_add_(0, flat.rows, weighted)))
        context = sum(sample.context for sample in samples)
        self._tokens += len(flat.targets) - context
        self._context += context
        self._sequences += len(samples)
        real = sum(sample.length for sample in samples)
        self._computed += real if self.forward.together else padded.ids.numel()
        self._real += real

    def _of_these_weights(
        self, samples: Sequence[Sample], flat: Flat, version: int | None
    ) -> tuple[Tensor | None, Tensor | None]:
        """Which tokens the weights of `version` drew, and which of them in answers that began with these weights."""
        if version is None:
            return None, None
        began = np.fromiter((sample.versions[0] == version for sample in samples), np.bool_, len(samples))
        drawn = torch.from_numpy(flat.versions == version).to(self._device)
        return drawn, torch.from_numpy(began).to(self._device)[flat.rows]

    @torch.no_grad()
    def score(self, samples: Sequence[Sample]) -> list[Floats]:
        """Log-probabilities of the generated tokens under the present weights, in the order of `samples`."""
        found: list[Floats] = [np.zeros(0, np.float32)] * len(samples)
        for part in batch.cut(samples, self.settings.micro_batch_tokens, self.forward.together):
            chosen = [samples[i] for i in part]
            padded, flat = self._tensors(chosen)
            logp, _ = self._logp(chosen, padded, flat)
            ends = np.cumsum([len(sample.token_ids) for sample in chosen])[:-1]
            for index, row in zip(part, np.split(logp.float().cpu().numpy(), ends), strict=True):
                found[index] = row
            self.moved()
        return found

    @torch.no_grad()
    def entropy(self, samples: Sequence[Sample]) -> float:
        """Mean entropy in nats, full softmax at the sampling temperature, over the generated tokens of `samples`."""
        total, tokens = torch.zeros((), dtype=torch.float64, device=self._device), 0
        for part in batch.cut(samples, self.settings.micro_batch_tokens, self.forward.together):
            chosen = [samples[i] for i in part]
            padded, flat = self._tensors(chosen)
            _, entropy = self._logp(chosen, padded, flat)
            total, tokens = total + entropy.sum(dtype=torch.float64), tokens + len(flat.targets)
            self.moved()
        return float(total) / max(tokens, 1)

    # ------------------------------------------------------------------------------------------------ the update

    def step(self, lr: float) -> StepStats:
        """Divides, clips and updates with that learning rate; or skips, and says why."""
        device.synchronize(self._device)  # what is still to be computed is no part of the update
        started = time.perf_counter()
        count = aggregation.denominator(self.settings.aggregation, self._tokens, self._sequences)
        norm, reason, culprits = 0.0, "", ()  # type: float, str, tuple[str, ...]
        if count == 0:
            reason = "no trained token"
        else:
            norm = normalised_norm(self._parameters, count)
            if np.isfinite(norm):
                self._update(lr, norm)
            else:
                reason, culprits = f"the gradient norm is {norm}", self._culprits()
        stats = self._stats(lr, norm, count, reason, culprits, started)
        self._clear()
        return stats

    def _update(self, lr: float, norm: float) -> None:
        clip(self._parameters, norm, self.settings.max_grad_norm)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()

    def _culprits(self) -> tuple[str, ...]:
        bad = [f"sample {uid}" for uids, sums in self._blame
               for uid, finite in zip(uids, sums.isfinite().tolist(), strict=True) if not finite]  # fmt: skip
        if bad:
            return tuple(bad)
        named = self.model.named_parameters()
        return tuple(f"parameter {n}" for n, p in named if p.grad is not None and not bool(p.grad.isfinite().all()))

    def _stats(self, lr: float, norm: float, count: int, reason: str, culprits: tuple[str, ...],
               started: float) -> StepStats:  # fmt: skip
        sums = tuple(self._sums.tolist())  # the one time that the device is read
        told = diagnostics.finish(sums)
        return StepStats(
            lr=lr, loss=told.loss / max(count, 1), grad_norm=norm, tokens=self._tokens, sequences=self._sequences,
            micro_batches=len(self._blame), padding=1.0 - self._real / self._computed if self._computed else 0.0,
            diagnostics=told, skipped=reason, culprits=culprits, context_tokens=self._context,
            mastered_tokens=int(self._mastered),
            forward_s=sum(self._watch.seconds(begun, between) for begun, between, _ in self._marks),
            backward_s=sum(self._watch.seconds(between, ended) for _, between, ended in self._marks),
            step_s=time.perf_counter() - started, sums=sums)  # fmt: skip

    @property
    def tokens(self) -> int:
        """Trained tokens of the step under way."""
        return self._tokens

    @property
    def parameters(self) -> list[Tensor]:
        """What is trained."""
        return self._parameters

    # ------------------------------------------------------------------------------------------------- in and out

    def named_weights(self) -> dict[str, Tensor]:
        """The weights to publish, by name, in the compute type; valid until the next step."""
        named = self._named(self.model)
        dtype = getattr(torch, self.settings.compute_dtype)
        if self.settings.compute_dtype == "float32":
            return named
        for name, value in named.items():
            if name not in self._published:
                self._published[name] = torch.empty_like(value, dtype=dtype)
            self._published[name].copy_(value)
        return self._published

    def optimizer_state(self) -> dict[str, Any]:
        """For `checkpoint`; tensors, numbers and lists only. `master`: the trained parameters as they are, where the
        model's folder has them rounded."""
        return {**self.optimizer.state_dict(), **({MASTER: self._masters()} if self.rounded else {})}

    @property
    def rounded(self) -> bool:
        """Whether weights are given away in fewer bits than they are trained in."""
        return str(self._dtype) != f"torch.{self.settings.compute_dtype}" and self._dtype != torch.float64

    def _masters(self) -> dict[str, Tensor]:
        return {name: one.detach() for name, one in self.model.named_parameters() if one.requires_grad}

    @torch.no_grad()
    def load_optimizer_state(self, state: dict[str, Any]) -> list[str]:
        """The counterpart; the model's weights are loaded from the checkpoint's model folder.

        The settings stay those of this trainer: returns in words which of them are others than those of `state`.
        """
        own = [{name: group[name] for name in OPTIMISER_KEYS} for group in self.optimizer.param_groups]
        self.optimizer.load_state_dict({name: value for name, value in state.items() if name != MASTER})
        for name, parameter in self._masters().items():
            if MASTER in state:
                parameter.copy_(state[MASTER][name])
        changed = []
        for mine, group in zip(own, self.optimizer.param_groups, strict=True):
            for name, value in mine.items():
                if _plain(group[name]) != _plain(value):
                    changed.append(f"learner.{name} = {_plain(value)} (before: {_plain(group[name])})")
                group[name] = value
        self._clear()
        return list(dict.fromkeys(changed))


def _nothing() -> None:
    """Nobody wants to know how far it is."""


MASTER = "master"
OPTIMISER_KEYS = ("betas", "eps", "weight_decay")  # names of the topology and of AdamW; the rate comes with each step


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, (list, tuple)) else value


def _adamw(parameters: Sequence[Tensor], settings: TrainerSettings) -> torch.optim.AdamW:
    # Norms and biases are not decayed: they set a scale, they do not overfit.
    groups = [{"params": [p for p in parameters if p.ndim >= 2], "weight_decay": settings.weight_decay},
              {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0}]  # fmt: skip
    used = [group for group in groups if group["params"]]
    return torch.optim.AdamW(used, lr=0.0, betas=settings.betas, eps=settings.eps, fused=True)


def token_weights(kind: str, flat: Flat, dtype: torch.dtype) -> Tensor:
    """The aggregation's weight of every trained token; depends on its own sequence alone."""
    return aggregation.sequence_weights(kind, flat.lengths, dtype)[flat.rows]


def normalised_norm(parameters: Sequence[Tensor], count: int) -> float:
    """Divides the accumulated gradient by the denominator of the step, in place, and returns its norm."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    torch._foreach_div_(gradients, float(count))
    return float(torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients))))


def clip(parameters: Sequence[Tensor], norm: float, limit: float) -> None:
    """Scales the gradient down to the limit if its norm is above."""
    if norm > limit:
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        torch._foreach_mul_(gradients, limit / (norm + 1e-6))
