"""The trainer: streams samples through forward and backward as groups become ready, then divides, clips and updates.

Driven by the learner: `accumulate` any number of times, then `step`. Talks to the model (`scorer`), the loss and the
optimiser (`state`); knows nothing of rings, groups that are still missing or the clock of the run.

- The gradient is the weighted sum of the losses of all trained tokens; it is divided once, by a number of the whole
  step. So neither the cut into micro-batches nor the order of `accumulate` calls changes the step.
- Weights change in `step` alone: every micro-batch of a step is computed with the same weights.
- A step without tokens, or with a gradient that is not finite, leaves weights and optimiser as they were and names
  the culprit.
- Nothing is read back from the device between micro-batches.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from busrl.algorithms import diagnostics, terms
from busrl.algorithms.losses import LossFunction
from busrl.system import device
from busrl.training import batch, sharded
from busrl.training.batch import Sample, Worth
from busrl.training.checkpoint import Checkpoint
from busrl.training.custom import load_loss
from busrl.training.forward import (
    FLASH,
    Forward,
    checkpoint_layers,
    choose_forward,
    compile_layers,
    prove_replay,
    replay_routes,
)
from busrl.training.head import Head
from busrl.training.model import Adapter, Masters, Merged, named_weights, train_only
from busrl.training.scorer import EVERY, NOTHING, Advantages, Floats, Reference, Scorer, Teacher, Versions
from busrl.training.settings import TrainerSettings
from busrl.training.shard_files import Saving
from busrl.training.state import TrainerState
from busrl.training.step_stats import RankStats, StepStats, Tally, stats_of
from busrl.training.value_head import ValueHead

# -- hooks and ranks ---------------------------------------------------------------


def _of_now(versions: Versions) -> NDArray[np.int64]:
    return np.zeros(len(versions), np.int64)


@dataclass(frozen=True)
class Hooks:
    """Functions that a trainer calls: those of its driver."""

    on_progress: Callable[[], None] = lambda: None  # after each micro-batch, a scored one too
    ages_of: Callable[[Versions], NDArray[np.int64]] = _of_now  # steps since the version of each token


QUIET = Hooks()
Refer = Callable[[Forward, LossFunction], "Reference | None"]  # of the way and the loss of the trainer that is made
Teach = Callable[[Forward, LossFunction], "Teacher | None"]


class Team(Protocol):
    """Several ranks that train one model together, as their leader's process sees them."""

    def trainer(self, folder: Path, settings: TrainerSettings, hooks: Hooks) -> Trainer:
        """A trainer of that folder's model, spread over the ranks: its calls run on all of them."""

    def look(self) -> None:
        """RankLost if a rank has ended while nobody waited for it."""

    def close(self) -> None:
        """Dismiss the other ranks."""


# -- the optimiser step ----------------------------------------------------------


class Trainer:
    """A model with an optimiser and an accumulator (the parameters' `.grad`)."""

    def __init__(
        self, model: Any, settings: TrainerSettings, forward: Forward | None = None, *, adapter: Adapter | None = None,
        refer: Refer | None = None, teach: Teach | None = None, copies: int = 1, hooks: Hooks = QUIET,
    ) -> None:
        """`adapter`: it is trained, and not the model. `refer` and `teach` make the reference and the teacher, where
        there are any. `copies`: ranks that compute the same samples as this one, itself included."""
        self.model, self.settings, self.adapter, self.hooks, self._copies = model, settings, adapter, hooks, copies
        self.loss = load_loss(settings.loss, settings.base_dir)
        self.forward, masters = _prepared(model, settings, forward)
        self.forward.leave_out_all_but(settings.token_rows)
        self.state = TrainerState(model, masters, settings, hooks.on_progress)
        self.parameters, self.optimizer = self.state.parameters, self.state.optimizer
        self._device = self.forward.where or self.parameters[0].device
        dtype, value = torch.promote_types(self.parameters[0].dtype, torch.float32), settings.value
        self.value_head = None if value is None else ValueHead.of(model, value, dtype, self._device)
        self.tally = Tally(self._device)
        self._clear()
        self.scorer = Scorer(
            self.forward, settings, dtype, self._device, hooks.ages_of, self.value_head,
            None if refer is None else refer(self.forward, self.loss),
            None if teach is None else teach(self.forward, self.loss),
        )

    def _clear(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        if self.value_head is not None:
            self.value_head.clear()
        self.tally.clear()
        self._place = 0  # of the next micro-batch in the step
        self._views: Mapping[str, Tensor] | None = None  # of this rank, what is published

    def accumulate(
        self, samples: Sequence[Sample], advantages: Advantages | Sequence[Worth], version: int | None = None
    ) -> None:
        """Forward and backward of these samples, added to the step under way. `advantages` may be a number for each.
        `version`: that of the trained weights, for the mismatch between engine and trainer."""
        advantages = self._checked(samples, advantages)
        parts = list(batch.cut(samples, self.settings.micro_batch_tokens, self.forward.together))
        for at, part in enumerate(parts):
            self.scorer.expect([samples[i] for coming in parts[at : at + 1 + self.scorer.ahead] for i in coming])
            self.micro_batch([samples[i] for i in part], advantages.of(part), version)

    def _checked(self, samples: Sequence[Sample], advantages: Advantages | Sequence[Worth]) -> Advantages:
        advantages = advantages if isinstance(advantages, Advantages) else Advantages(advantages)
        for rows in vars(advantages).values():
            if rows is not None and len(rows) != len(samples):
                raise ValueError(f"{len(samples)} samples need as many advantages and proximal rows, got {len(rows)}")
        return advantages

    def micro_batch(self, samples: Sequence[Sample], advantages: Advantages, version: int | None) -> None:
        started, settings = self.tally.mark(), self.settings
        flat = self.scorer.flatten(samples)
        inputs, values = self.scorer.inputs(samples, flat, advantages)
        # Which tokens the weights of `version` drew, and which of them in samples that began with these weights.
        current = None if version is None else torch.from_numpy(flat.policy_versions == version).to(self._device)
        begun = None if version is None else flat.begun(version)
        in_loss = settings.kl != "none" and settings.kl_in == "loss"
        of_loss = self.scorer.for_loss(inputs, current)
        objective = terms.objective(self.loss, of_loss, settings, in_loss)
        of_values = None if advantages.valued is None else self.scorer.value_errors(values, advantages.valued, flat)
        loss = objective.loss
        trained = loss if of_values is None else loss + of_values.loss
        share = flat.lengths.sum()  # what a loss of 1 of each token adds up to
        if advantages.weights is not None:
            weights = flat.per_token(advantages.weights, self.scorer.dtype)
            loss, trained = loss * weights, trained * weights
            share = (weights if flat.mask is None else weights[flat.mask]).sum()
        total = trained.sum()
        if (balance := self.scorer.balance(share, self.parameters)) is not None:
            total = total + balance
        forwarded = self.tally.mark()
        total.backward()  # type: ignore[no-untyped-call]
        self.tally.timed(started, forwarded)
        assert inputs.entropy is not None
        row = diagnostics.sums(
            inputs, replace(objective, loss=loss), inputs.entropy, current, settings, begun, of_values)
        with_values = loss.detach() if of_values is None else loss.detach() + of_values.loss.detach()
        self.tally.keep_gaps(samples, inputs)
        self.tally.add(samples, flat, row, with_values, self.forward.size(samples))
        self.tally.add_routes(None if self.forward.replay is None else self.forward.replay.figures())
        if (own := self.scorer.by_own_routes(samples, flat, version, self._place)) is not None:
            assert current is not None
            self.tally.add_compared(inputs, own, current)
        self._place += 1
        self.hooks.on_progress()

    def idle(self, version: int | None) -> None:
        """A micro-batch of nothing: the forward and backward of a rank without work, whose gradient is 0. `version`: as
        of the other ranks."""
        nothing = self.scorer.idle()
        self.scorer.balance(None, self.parameters)
        nothing.backward()  # type: ignore[no-untyped-call]
        self.scorer.by_own_routes([NOTHING], self.scorer.flatten([NOTHING]), version, self._place)
        self._place += 1
        self.hooks.on_progress()

    @torch.no_grad()
    def score(self, samples: Sequence[Sample], by: str = "") -> list[Floats]:
        """Log-probabilities of the generated tokens under the present weights or the "reference", or the "value" before
        each: a row per sample."""
        rows: list[Floats] = [np.zeros(0, np.float32)] * len(samples)
        for part, values, _ in self._parts(samples, by):
            if not part:  # of a rank without work
                continue
            ends = np.cumsum([samples[i].generated for i in part])[:-1]
            for index, row in zip(part, np.split(values.float().cpu().numpy(), ends), strict=True):
                rows[index] = row
        return rows

    def every(self, samples: Sequence[Sample]) -> list[Floats]:
        """For samples with one generated token each: a row of the log-probabilities of every token in its place."""
        return [rows[0] for rows in self.score(samples, EVERY)]

    @torch.no_grad()
    def entropy(self, samples: Sequence[Sample]) -> float:
        """Mean entropy in nats, full softmax at the sampling temperature, over the generated tokens of `samples`."""
        total, tokens = torch.zeros((), dtype=torch.float64, device=self._device), 0
        for _, _, entropy in self._parts(samples):
            total, tokens = total + entropy.sum(dtype=torch.float64), tokens + len(entropy)
        return float(total) / max(tokens, 1)

    def _parts(self, samples: Sequence[Sample], by: str = "") -> Iterator[tuple[list[int], Tensor, Tensor]]:
        """Per micro-batch the positions of its samples, and their scores by `Scorer.at_once`."""
        for part in batch.cut(samples, self.settings.micro_batch_tokens, self.forward.together):
            yield part, *self.scorer.at_once([samples[i] for i in part], by)
            self.hooks.on_progress()

    # -- the update ------------------------------------------------------------------------------------------------

    def step(self, lr: float, denominator: float = 0.0, scale: float = 1.0) -> StepStats:
        """Divide, clip and update with that learning rate; or skip, with the reason. The gradient is divided by
        `denominator` (0: by the trained tokens) times `scale`, by which the advantages are still to be divided."""
        return stats_of([self.update(lr, denominator, scale)], lr, denominator, scale)

    def update(self, lr: float, denominator: float = 0.0, scale: float = 1.0) -> RankStats:
        """Make the update of `step` on this rank, and return its numbers: a collective of the ranks that the parameters
        are spread over."""
        device.synchronize(self._device)  # pending work is no part of the update
        started = time.perf_counter()
        norm, reason = 0.0, ""
        (tokens,) = sharded.added([self.tally.tokens / self._copies], self.parameters)
        if not tokens:
            reason = "no trained token"
        else:
            divisor = (denominator or tokens) * scale
            norm = normalised_norm(self.parameters, divisor)
            of_head = self._value_norm(divisor)
            if not np.isfinite(norm):
                reason = f"the gradient norm is {norm}"
            elif not np.isfinite(of_head):
                reason = f"the gradient norm of the value head is {of_head}"
            else:
                clip(self.parameters, norm, self.settings.max_grad_norm)
                self.state.update(lr)
                if self.value_head is not None:
                    self.value_head.step(lr, of_head, self.settings.max_grad_norm)
        stats = self.tally.stats(norm, reason, self._culprits() if reason and tokens else (), started)
        self._clear()
        return stats

    def _value_norm(self, divisor: float) -> float:
        """Norm of the value head's gradient of all ranks, divided."""
        if self.value_head is None:
            return 0.0
        sharded.add_gradients(self.value_head.parameters, self._copies, self.parameters)
        return self.value_head.divide(divisor)

    def _culprits(self) -> tuple[str, ...]:
        if samples := self.tally.culprits():
            return tuple(f"sample {uid}" for uid in samples)
        tensors = self.trained_tensors().items()
        gradients = ((name, sharded.local(tensor.grad)) for name, tensor in tensors if tensor.grad is not None)
        return tuple(f"parameter {name}" for name, gradient in gradients if not bool(gradient.isfinite().all()))

    # -- weights and state -----------------------------------------------------------------------------------------

    def trained_tensors(self) -> dict[str, Tensor]:
        """Tensors that the optimiser changes, by name."""
        return self.state.trained_tensors()

    def named_weights(self) -> Mapping[str, Tensor]:
        """The weights to publish, by name, in the compute type; valid until the next step."""
        return named_weights(self.model) if self.adapter is None else self.adapter.merged(self.model)

    def gather_weight(self, name: str) -> Tensor:
        """Gather one of the weights to publish on every rank: a collective. Cast before: half of the bytes."""
        views = self.published()
        if isinstance(views, Merged):
            return views.merge(name, sharded.gathered)
        return sharded.gathered(views[name], self.settings.few_bits)

    def adapter_weights(self) -> Mapping[str, Tensor]:
        """The adapter by the names of its file, as it is trained; valid until the next step."""
        assert self.adapter is not None
        return self.adapter.tensors()

    def load_adapter(self, folder: Path) -> None:
        assert self.adapter is not None
        self.adapter.load(folder, sharded.spread_like)

    def published(self) -> Mapping[str, Tensor]:
        """Weights to publish as this rank has them, by name; valid until the next step."""
        if self._views is None:
            self._views = Trainer.named_weights(self)
        return self._views

    def optimizer_state(self) -> dict[str, Any]:
        """The optimiser's state for a checkpoint whose weights are in a folder of the model."""
        return self.state.saved()

    def load_optimizer_state(self, state: dict[str, Any]) -> list[str]:
        """Continue from that state. Returns, as text, the settings that differ in it; this run's are used."""
        changed = self.state.load(state)
        self._clear()
        return changed

    def restore(self, checkpoint: Checkpoint, optimizer: bool = True) -> list[str]:
        """Continue with the optimiser of a checkpoint whose model was loaded, and with the weights where they are in
        shards; returns what `load_optimizer_state` does. UserError if it is of another model or optimiser."""
        changed = self.state.restore(checkpoint, optimizer)
        self._clear()
        return changed

    def save(self, folder: Path) -> Saving:
        """Begin to write this rank's share of a checkpoint in shards; training may go on meanwhile."""
        return self.state.save(folder)


def _prepared(model: Any, settings: TrainerSettings, forward: Forward | None) -> tuple[Forward, Masters | None]:
    """Freeze the untrained parameters; return the way in which the model computes, and the masters of its parameters
    where it computes in fewer bits. A spread model has its masters in the shards, and its way was chosen before."""
    if forward is not None and forward.spread:
        return forward, None
    train_only(model, settings.train_layers)
    way = forward
    if way is None and not settings.attention.startswith(FLASH):  # a probe in float32 is more exact
        way = way_of(model, settings)
    masters = None if settings.few_bits is None else Masters(model, settings.few_bits)
    way = way or way_of(model, settings)
    if computes_again(settings, model, model.device.type):
        checkpoint_layers(way)
    replay_routes(way, settings.routing, settings.balance)
    if settings.compile:
        compile_layers(way)
    prove_replay(way)
    return way, masters


def way_of(model: Any, settings: TrainerSettings) -> Forward:
    """The cheapest way of the model with these settings."""
    head = Head.of(model.config, settings.head_rows, torch.float32 if settings.head_dtype == "float32" else None)
    return choose_forward(model, head, settings.attention)


def computes_again(settings: TrainerSettings, model: Any, kind: str) -> bool:
    """True if layers are computed again in backward, for that model on a device of that kind."""
    return device.computes_again(settings.activation_checkpointing, kind, lambda: sum(
        parameter.numel() for parameter in model.parameters()))


def normalised_norm(parameters: Sequence[Tensor], divisor: float) -> float:
    """Divides the accumulated gradient in place, and returns its norm over all ranks: a collective if it is spread."""
    gradients = _gradients(parameters)
    torch._foreach_div_(gradients, divisor)
    shares = torch.tensor([sharded.weight_in_sum(p.grad) for p in parameters if p.grad is not None]).double()
    norms = torch.stack(torch._foreach_norm(gradients)).double() if gradients else torch.zeros(0)
    return math.sqrt(sharded.added([float((norms.square() * shares.to(norms.device)).sum())], parameters)[0])


def clip(parameters: Sequence[Tensor], norm: float, limit: float) -> None:
    """Scales the gradient down to the limit if its norm is above."""
    if norm > limit:
        torch._foreach_mul_(_gradients(parameters), limit / (norm + 1e-6))


def _gradients(parameters: Sequence[Tensor]) -> list[Tensor]:
    return [sharded.local(parameter.grad) for parameter in parameters if parameter.grad is not None]
