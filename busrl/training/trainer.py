"""The trainer: streams samples through forward and backward as groups become ready, then divides, clips and updates.

Driven by the learner: `accumulate` any number of times, then `step`. Talks to the model, the loss and the optimiser;
knows nothing of rings, groups that are still missing or the clock of the run.

- The gradient is the weighted sum of the losses of all trained tokens; it is divided once, by a number of the whole
  step. So neither the cut into micro-batches nor the order of `accumulate` calls changes the step.
- Weights change in `step` alone: every micro-batch of a step is computed with the same weights.
- A step without tokens, or with a gradient that is not finite, leaves weights and optimiser as they were and names
  the culprit.
- Nothing is read back from the device between micro-batches.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from busrl.algorithms import catalog, diagnostics, losses, terms
from busrl.algorithms.gae import Valued, ValueSettings, value_loss
from busrl.algorithms.losses import LossSettings
from busrl.data.vocabulary import ALL_ROWS, TokenRows, token_rows
from busrl.system import device
from busrl.training import batch, optimizers, shard_files, sharded
from busrl.training.batch import Flat, Sample, Worth, pieces_of
from busrl.training.checkpoint import WEIGHT_PREFIX, Checkpoint, buffers
from busrl.training.custom import load_loss
from busrl.training.forward import FLASH, Forward, Scores, checkpoint_layers, choose_forward, compile_layers
from busrl.training.head import Head
from busrl.training.model import Adapter, Masters, Merged, named_weights, train_only, vocabulary
from busrl.training.shard_files import Part, Saving, Shards, Writing
from busrl.training.step_stats import RankStats, StepStats, stats_of
from busrl.training.value_head import ValueHead

# -- settings -----------------------------------------------------------------------


@dataclass(frozen=True)
class TrainerSettings(LossSettings):
    """Numbers by the names of the topology's [learner] keys; the learning rate comes with each step."""

    loss: str = "ppo_clip"
    optimizer: str = optimizers.ADAMW
    train_layers: str = ""  # all but these are frozen; empty: none is
    options: Mapping[str, Any] = field(default_factory=dict)  # of Adafactor or an optimiser of the user's
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    micro_batch_tokens: int = 4096
    newest_ratio: str = "recorded"  # "one": tokens drawn by the very weights that are trained have ratio 1
    kl_in: str = "loss"
    ratio_one: bool = False  # segments.loss = "pois"
    unit: str = "episode"  # what losses of whole samples take as one: an episode, or each of its turns
    compute_dtype: str = "float32"  # "bfloat16": of forward and backward; what is trained stays float32
    activation_checkpointing: str = "none"
    head_rows: int = 0
    head_dtype: str = "model"
    attention: str = "auto"
    compile: bool = False
    value: ValueSettings | None = None  # with a value head
    base_dir: str = field(default=".", repr=False)  # of the topology, for code of the user's
    known: TokenRows = ALL_ROWS  # rows of the model's logits that stand for a token

    @classmethod
    def of(cls, topology: Any) -> TrainerSettings:
        """From a topology's [learner], [learner.memory], [experiments], model.dtype and segments.loss."""
        names = {one.name for one in fields(cls)} - {"compute_dtype", "ratio_one", "value", "base_dir", "known"}
        places = (topology.learner.memory, topology.learner, topology.experiments)
        values = {name: next(getattr(one, name) for one in places if hasattr(one, name)) for name in names}
        own = topology.learner.value
        value = ValueSettings(own.coef, own.clip, own.rate) if topology.learner.advantage == catalog.GAE else None
        pois = topology.segments.loss == "pois"
        known = token_rows(Path(topology.model.path))
        more = {"compute_dtype": topology.model.dtype, "ratio_one": pois, "value": value, "known": known}
        return cls(base_dir=topology.base_dir, **more, **values)

    @property
    def few_bits(self) -> torch.dtype | None:
        """What forward and backward compute with, and what is published; None: as it is trained."""
        return None if self.compute_dtype == "float32" else getattr(torch, self.compute_dtype)


# -- the optimiser step ----------------------------------------------------------

Floats = NDArray[np.float32]
Versions = NDArray[np.uint32]


@dataclass(frozen=True)
class Given:
    """What the samples of a call are trained with: a number or a row for each; None where the default holds."""

    advantages: Sequence[Worth]  # not read where `valued` has those of each token
    weights: Sequence[Worth] | None = None  # of the loss of a sample's tokens; 1
    proximal: Sequence[Floats] | None = None  # log-probabilities by `score` as the step began; those of the forward
    chosen: Sequence[NDArray[np.bool_]] | None = None  # tokens, for a loss that chooses
    valued: Sequence[Valued] | None = None  # for a value head: values, returns and advantages of each token

    def of(self, part: Sequence[int]) -> Given:
        """Those of the samples at these positions."""
        own: Any = {name: None if rows is None else [rows[i] for i in part] for name, rows in vars(self).items()}
        return replace(self, **own)


class Trainer:
    """One model, one optimiser, one accumulator (the parameters' `.grad`)."""

    def __init__(
        self, model: Any, settings: TrainerSettings, forward: Forward | None = None,
        named: Callable[[Any], Mapping[str, Tensor]] = named_weights,
    ) -> None:
        """`named` gives the weights to publish; others than the model's own where it has an adapter."""
        self.model, self.settings, self._named = model, settings, named
        self.loss = load_loss(settings.loss, settings.base_dir)
        self.forward, self._masters = _prepared(model, settings, forward)
        self.forward.leave_out_all_but(settings.known)
        self.parameters = list(self.trained_tensors().values())
        self._device = self.forward.where or self.parameters[0].device
        self._watch = device.Stopwatch(self._device)
        self._dtype = torch.promote_types(self.parameters[0].dtype, torch.float32)
        adam = {key: getattr(settings, key) for key in optimizers.ADAM_KEYS}
        self.optimizer = optimizers.make(settings.optimizer, self.parameters, adam, settings.options, settings.base_dir)
        value = settings.value
        self.value_head = None if value is None else ValueHead.of(model, value, self._dtype, self._device)
        self.on_progress: Callable[[], None] = lambda: None  # called after each micro-batch, a scored one too
        # Steps since the version of each token.
        self.ages_of: Callable[[Versions], NDArray[np.int64]] = lambda versions: np.zeros(len(versions), np.int64)
        self.adapter: Adapter | None = None  # of a team; a trainer alone has it as what `named` gives
        self.reference: Callable[[Sequence[Sample], Flat], Tensor] | None = None  # its log-probabilities; no gradient
        # A teacher's most probable tokens in the place of each generated one: ids and log-probabilities; no gradient.
        self.teacher: Callable[[Sequence[Sample], Flat], tuple[Tensor, Tensor]] | None = None
        self.copies = 1  # ranks that compute the same samples as this one, itself included
        self.saving: Writing | None = None  # of these tensors, by a thread
        self.watched: Collection[int] = ()  # uids of samples of which `gaps` tells
        self._gaps: dict[int, Tensor] = {}
        self._clear()

    def _clear(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        if self.value_head is not None:
            self.value_head.clear()
        self._sums = torch.zeros(len(diagnostics.FIELDS), dtype=torch.float64, device=self._device)
        self._tokens = self._sequences = self._computed = self._real = self._context = 0
        self._blame: list[tuple[list[int], Tensor]] = []
        self._views: Mapping[str, Tensor] | None = None  # of this rank, what is published
        self._marks: list[tuple[Any, Any, Any]] = []  # before and after a forward, after its backward

    def accumulate(
        self, samples: Sequence[Sample], given: Given | Sequence[Worth], version: int | None = None
    ) -> None:
        """Forward and backward of these samples, added to the step under way. `given` may be advantages alone;
        `version` is that of the weights being trained, for the mismatch between engine and trainer."""
        given = self._checked(samples, given)
        for part in batch.cut(samples, self.settings.micro_batch_tokens, self.forward.together):
            self.micro_batch([samples[i] for i in part], given.of(part), version)

    def _checked(self, samples: Sequence[Sample], given: Given | Sequence[Worth]) -> Given:
        given = given if isinstance(given, Given) else Given(given)
        for rows in vars(given).values():
            if rows is not None and len(rows) != len(samples):
                raise ValueError(f"{len(samples)} samples need as many advantages and proximal rows, got {len(rows)}")
        return given

    def micro_batch(self, samples: Sequence[Sample], given: Given, version: int | None) -> None:
        started = self._watch.mark()
        flat = batch.flatten(samples, self._dtype, self._device)
        inputs, values = self._computed_inputs(samples, flat, given)
        # Which tokens the weights of `version` drew, and which of them in samples that began with these weights.
        current = None if version is None else torch.from_numpy(flat.policy_versions == version).to(self._device)
        begun = None if version is None else flat.begun(version)
        in_loss = self.settings.kl != "none" and self.settings.kl_in == "loss"
        loss = terms.objective(self.loss, self._trained(inputs, current), self.settings, in_loss)
        of_values = None if given.valued is None else self._of_values(values, given.valued, flat)
        trained = loss if of_values is None else loss + of_values.loss
        if given.weights is not None:
            weights = flat.per_token(given.weights, self._dtype)
            loss, trained = loss * weights, trained * weights
        total = trained.sum()
        forwarded = self._watch.mark()
        total.backward()  # type: ignore[no-untyped-call]
        self._marks.append((started, forwarded, self._watch.mark()))
        self._count(samples, flat, inputs, loss.detach(), current, begun, of_values)
        self.on_progress()

    def _of_values(self, values: Tensor | None, valued: Sequence[Valued], flat: Flat) -> diagnostics.ValueErrors:
        """The value loss per token, 0 where masked, and what it was made of."""
        assert values is not None and self.settings.value is not None, "rows of values for a trainer without a head"
        old, returns = (
            torch.from_numpy(np.concatenate([getattr(one, name) for one in valued])).to(values)
            for name in ("values", "returns")
        )
        loss = value_loss(values, old, returns, self.settings.value.clip)
        trained = loss if flat.mask is None else loss.where(flat.mask, 0)
        return diagnostics.ValueErrors(trained, returns, values.detach())

    def idle(self) -> None:
        """A micro-batch of nothing: the forward and backward of a rank without work, whose gradient is 0."""
        flat = batch.flatten([NOTHING], self._dtype, self._device)
        self._reference_logprobs([NOTHING], flat)
        if self.teacher is not None:
            self.teacher([NOTHING], flat)
        logprobs, _ = self.forward.score([NOTHING], flat)
        (logprobs.nan_to_num().sum() * 0).backward()  # type: ignore[no-untyped-call]
        self.on_progress()

    def _trained(self, inputs: losses.LossInputs, current: Tensor | None) -> losses.LossInputs:
        """With a ratio of exactly 1 for all tokens (pois), or for those of the present weights; for the loss alone."""
        if self.settings.ratio_one:
            return replace(inputs, behaviour_logprobs=inputs.trainer_logprobs.detach())
        if self.settings.newest_ratio == "one" and current is not None:
            drawn = torch.where(current, inputs.trainer_logprobs.detach(), inputs.behaviour_logprobs)
            return replace(inputs, behaviour_logprobs=drawn)
        return inputs

    def _computed_inputs(
        self, samples: Sequence[Sample], flat: Flat, given: Given
    ) -> tuple[losses.LossInputs, Tensor | None]:
        """What the loss gets, and the values of a value head, of one forward of each model."""
        referred = self._reference_logprobs(samples, flat)  # before the graph is there: what it gathers is given up
        wanted, known, student = flat, None, None
        if self.teacher is not None:
            with torch.no_grad():
                ids, known = self.teacher(samples, flat)
            wanted = replace(flat, targets=torch.cat([flat.targets[:, None], ids], -1))
        (logprobs, entropy), values = self._scores_and_values(samples, wanted)
        if known is not None:
            logprobs, student, known = logprobs[:, 0], logprobs[:, 1:], known.to(self._dtype)
        inputs = self._loss_inputs(flat, logprobs, given)
        return replace(inputs, entropy=entropy, reference_logprobs=referred, teacher_logprobs=known,
                       student_logprobs=student), values

    def _loss_inputs(self, flat: Flat, logprobs: Tensor, given: Given) -> losses.LossInputs:
        """What needs no other forward than that of the log-probabilities."""
        before = logprobs.detach()
        if given.proximal is not None:
            before = torch.from_numpy(np.concatenate(given.proximal)).to(logprobs)
        chosen = None if given.chosen is None else torch.from_numpy(np.concatenate(given.chosen)).to(self._device)
        advantages = flat.per_token(given.advantages, self._dtype)
        if given.valued is not None:
            advantages = torch.from_numpy(np.concatenate([one.advantages for one in given.valued])).to(advantages)
        by_turn = self.settings.unit == "turn"
        return losses.LossInputs(
            trainer_logprobs=logprobs, behaviour_logprobs=flat.behaviour_logprobs, proximal_logprobs=before,
            advantages=advantages, mask=flat.mask, samples=flat.turns if by_turn else flat.rows,
            policy_versions=torch.from_numpy(flat.policy_versions.astype(np.int64)).to(self._device),
            ages=torch.from_numpy(self.ages_of(flat.policy_versions)).to(self._device),
            lengths=flat.turn_lengths if by_turn else flat.lengths, chosen=chosen,
        )

    @torch.no_grad()
    def _reference_logprobs(self, samples: Sequence[Sample], flat: Flat) -> Tensor | None:
        return None if self.reference is None else self.reference(samples, flat)

    def _scores_and_values(self, samples: Sequence[Sample], flat: Flat) -> tuple[Scores, Tensor | None]:
        if self.value_head is None:
            return self.forward.score(samples, flat), None
        scores, hidden = self.forward.with_states(samples, flat)
        return scores, self.value_head(hidden)

    def _count(
        self, samples: Sequence[Sample], flat: Flat, inputs: losses.LossInputs, loss: Tensor,
        current: Tensor | None, begun: Tensor | None, of_values: diagnostics.ValueErrors | None,
    ) -> None:
        assert inputs.entropy is not None
        self._sums += diagnostics.sums(inputs, loss, inputs.entropy, current, self.settings, begun, of_values)
        per_sample = torch.zeros(len(samples), dtype=loss.dtype, device=self._device)
        self._keep_gaps(samples, inputs)
        whole = loss if of_values is None else loss + of_values.loss.detach()
        self._blame.append((flat.uids, per_sample.index_add_(0, flat.rows, whole)))
        context = sum(sample.generated - sample.trained for sample in samples)
        self._tokens += len(flat.targets) - context
        self._context += context
        self._sequences += len(samples)
        self._computed += self.forward.size(samples)
        self._real += sum(len(piece.ids) for piece in pieces_of(samples))

    def _keep_gaps(self, samples: Sequence[Sample], inputs: losses.LossInputs) -> None:
        """On the device, so that nothing waits for it; of several updates with a sample the first one's."""
        ends = np.cumsum([sample.generated for sample in samples])
        for sample, end in zip(samples, ends.tolist(), strict=True):
            if sample.uid in self.watched and sample.uid not in self._gaps:
                own = slice(end - sample.generated, end)
                self._gaps[sample.uid] = (inputs.trainer_logprobs[own] - inputs.behaviour_logprobs[own]).detach()

    def gaps(self) -> dict[int, Floats]:
        """Of the watched samples that this process has trained since the last call: of each generated token its
        log-probability here, before the update, minus that of the engine."""
        found, self._gaps = self._gaps, {}
        return {uid: own.float().cpu().numpy() for uid, own in found.items()}

    @torch.no_grad()
    def score(self, samples: Sequence[Sample], by: str = "") -> list[Floats]:
        """Log-probabilities of the generated tokens under the present weights or the "reference", or the "value" before
        each: a row per sample."""
        found: list[Floats] = [np.zeros(0, np.float32)] * len(samples)
        for part, values, _ in self._parts(samples, by):
            if not part:  # of a rank without work
                continue
            ends = np.cumsum([samples[i].generated for i in part])[:-1]
            for index, row in zip(part, np.split(values.float().cpu().numpy(), ends), strict=True):
                found[index] = row
        return found

    def every(self, samples: Sequence[Sample]) -> list[Floats]:
        """Of each sample with one generated token, the log-probabilities of every token in its place."""
        return [rows[0] for rows in self.score(samples, EVERY)]

    @torch.no_grad()
    def entropy(self, samples: Sequence[Sample]) -> float:
        """Mean entropy in nats, full softmax at the sampling temperature, over the generated tokens of `samples`."""
        total, tokens = torch.zeros((), dtype=torch.float64, device=self._device), 0
        for _, _, entropy in self._parts(samples):
            total, tokens = total + entropy.sum(dtype=torch.float64), tokens + len(entropy)
        return float(total) / max(tokens, 1)

    def _parts(self, samples: Sequence[Sample], by: str = "") -> Iterator[tuple[list[int], Tensor, Tensor]]:
        """Per micro-batch the positions of its samples, and what `at_once` gives of them."""
        for part in batch.cut(samples, self.settings.micro_batch_tokens, self.forward.together):
            yield part, *self.at_once([samples[i] for i in part], by)
            self.on_progress()

    @torch.no_grad()
    def at_once(self, samples: Sequence[Sample], by: str = "") -> tuple[Tensor, Tensor]:
        """Log-probabilities and entropies of the generated tokens, computed at once; by "reference", "value" or EVERY
        those numbers alone. Of no sample, where a rank without work has to make a forward like the others."""
        chosen = list(samples) or [NOTHING]
        if by == "value":
            assert self.value_head is not None
            found = self.value_head(self.forward.states(chosen)), torch.zeros(0)
        elif by == EVERY:
            flat = batch.flatten(chosen, self._dtype, self._device)
            words = torch.arange(vocabulary(self.model), device=self._device)
            flat = replace(flat, targets=words.expand(len(flat.targets), -1))
            found = self.forward.score(chosen, flat)[0], torch.zeros(0)
        else:
            flat = batch.flatten(chosen, self._dtype, self._device)
            referred = self._reference_logprobs(chosen, flat) if by else None
            assert referred is not None or not by, "no reference"
            found = self.forward.score(chosen, flat) if referred is None else (referred, torch.zeros(0))
        return found if samples else (found[0][:0], found[1][:0])

    @property
    def counted(self) -> int:
        """Trained tokens of the step under way."""
        return self._tokens

    @property
    def step_uids(self) -> list[int]:
        return [uid for uids, _ in self._blame for uid in uids]

    # -- the update ------------------------------------------------------------------------------------------------

    def step(self, lr: float, denominator: float = 0.0, scale: float = 1.0) -> StepStats:
        """Divides, clips and updates with that learning rate; or skips, with the reason. The gradient is divided by
        `denominator` (0: by the trained tokens) times `scale`, which the advantages were not divided by."""
        return stats_of([self.update(lr, denominator, scale)], lr, denominator, scale)

    def update(self, lr: float, denominator: float = 0.0, scale: float = 1.0) -> RankStats:
        """The same, on each of the ranks that the parameters are spread over; what this one did. A collective."""
        device.synchronize(self._device)  # what is still to be computed is no part of the update
        started = time.perf_counter()
        norm, reason = 0.0, ""
        (tokens,) = sharded.added([self._tokens / self.copies], self.parameters)
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
                for group in self.optimizer.param_groups:
                    group["lr"] = lr
                if self.saving is not None:
                    self.saving.stage()
                self.optimizer.step()
                self._round()
                if self.value_head is not None:
                    self.value_head.step(lr, of_head, self.settings.max_grad_norm)
        stats = self._rank_stats(norm, reason, self._culprits() if reason and tokens else (), started)
        self._clear()
        return stats

    def _value_norm(self, divisor: float) -> float:
        """Norm of the value head's gradient of all ranks, divided."""
        if self.value_head is None:
            return 0.0
        sharded.add_gradients(self.value_head.parameters, self.copies, self.parameters)
        return self.value_head.divide(divisor)

    def _culprits(self) -> tuple[str, ...]:
        bad = [f"sample {uid}" for uids, sums in self._blame
               for uid, finite in zip(uids, sums.isfinite().tolist(), strict=True) if not finite]
        if bad:
            return tuple(bad)
        named = self.trained_tensors().items()
        own = ((name, sharded.local(one.grad)) for name, one in named if one.grad is not None)
        return tuple(f"parameter {name}" for name, gradient in own if not bool(gradient.isfinite().all()))

    def _rank_stats(self, norm: float, reason: str, culprits: tuple[str, ...], started: float) -> RankStats:
        return RankStats(
            norm=norm, skipped=reason, culprits=culprits,
            sums=tuple(self._sums.tolist()),  # the one time that the device is read
            tokens=self._tokens, sequences=self._sequences, context=self._context,
            computed=self._computed, real=self._real, micro_batches=len(self._blame),
            forward_s=sum(self._watch.seconds(begun, between) for begun, between, _ in self._marks),
            backward_s=sum(self._watch.seconds(between, ended) for _, between, ended in self._marks),
            step_s=time.perf_counter() - started,
        )

    # -- weights and state -----------------------------------------------------------------------------------------

    def named_weights(self) -> Mapping[str, Tensor]:
        """The weights to publish, by name, in the compute type; valid until the next step."""
        return self._named(self.model)

    def gather_weight(self, name: str) -> Tensor:
        """One of the weights to publish, whole, on every rank: a collective. Cast before: half of the bytes."""
        views = self.published()
        if isinstance(views, Merged):
            return views.made(name, sharded.gathered)
        return sharded.gathered(views[name], self.settings.few_bits)

    def adapter_weights(self, adapter: Adapter) -> Mapping[str, Tensor]:
        """The adapter by the names of its file, as it is trained; valid until the next step."""
        return adapter.tensors()

    def load_adapter(self, adapter: Adapter, folder: Path) -> None:
        adapter.load(folder, sharded.spread_like)

    def published(self) -> Mapping[str, Tensor]:
        """What is published as this rank has it, by name; valid until the next step."""
        if self._views is None:
            self._views = self._named(self.model)
        return self._views

    def optimizer_state(self) -> dict[str, Any]:
        """Tensors, numbers and lists only. `master`: what is trained, where the model's folder has it rounded."""
        masters = {MASTER: self.trained_tensors()} if self.settings.few_bits is not None else {}
        own = {optimizers.KIND: self.settings.optimizer, optimizers.TRAINED: self.settings.train_layers}
        return {**self.optimizer.state_dict(), **own, **masters}

    def kept_tensors(self) -> dict[str, Tensor]:
        """What a checkpoint in shards holds of the model: what is trained, the rest of it, and its buffers."""
        return {**buffers(self.model), **dict(self.model.named_parameters()), **self.trained_tensors()}

    def numbered(self) -> list[str]:
        """The names of the parameters in the order in which the optimiser counts them."""
        names = {id(tensor): name for name, tensor in self.trained_tensors().items()}
        return [names[id(one)] for group in self.optimizer.param_groups for one in group["params"]]

    def gather_state(self, keep: bool) -> dict[str, Any]:
        """The same whole, on the host, of a trainer whose parameters are spread over ranks: a collective per tensor.
        Without `keep` this rank only takes part, and gets nothing."""
        state = Trainer.optimizer_state(self)
        for name in ("state", MASTER):
            if name in state:
                state[name] = _whole(state[name], keep)
        self.on_progress()
        return state if keep else {}

    def trained_tensors(self) -> dict[str, Tensor]:
        """What the optimiser changes, by name."""
        if self._masters is not None:
            return self._masters.named
        return {name: parameter for name, parameter in self.model.named_parameters() if parameter.requires_grad}

    def reset(self) -> None:
        """After the trained tensors were changed from outside: the model computes with them, nothing is under way."""
        self._round()
        self._clear()

    def _round(self) -> None:
        if self._masters is not None:
            self._masters.round()

    @torch.no_grad()
    def load_optimizer_state(self, state: dict[str, Any]) -> list[str]:
        """The counterpart; weights are loaded from the checkpoint's model folder. The settings stay those of this
        trainer: returns, as text, which of them differ from those of `state`."""
        changed = self.take({"state": self._spread(state["state"]), "param_groups": state["param_groups"]})
        for name, parameter in self.trained_tensors().items():
            if MASTER in state:
                parameter.copy_(sharded.spread_like(state[MASTER][name], parameter))
        self.reset()
        return changed

    def take(self, state: dict[str, Any]) -> list[str]:
        """Load a state whose tensors are spread as the parameters are; the settings stay those of this trainer."""
        names = optimizers.settings_of(self.settings.optimizer, self.settings.options)
        return optimizers.keep_settings(self.optimizer, names, lambda: self.optimizer.load_state_dict(state))

    def _spread(self, states: Mapping[int, Any]) -> dict[int, Any]:
        """This rank's part of the states of an optimiser, by the numbers of its parameters."""
        order = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
        return {
            number: {
                key: sharded.spread_like(one, order[number])
                if isinstance(one, Tensor) and one.shape == order[number].shape else one
                for key, one in self._as_kept(kept).items()
            }
            for number, kept in states.items()
        }

    def _as_kept(self, state: dict[str, Any]) -> dict[str, Any]:
        """A parameter's state as the optimiser takes it: in 8 bits, but for one of parts, which packs by itself."""
        if sharded.any_spread(self.parameters):
            return optimizers.unpacked(state)
        return optimizers.packed(state) if self.settings.optimizer == optimizers.ADAMW8 else state

    def restore(self, found: Checkpoint, optimizer: bool = True) -> list[str]:
        """Continue with the optimiser of a checkpoint whose model was loaded, and with the weights where they are in
        shards; what `load_optimizer_state` returns. UserError if it is of another model or optimiser than this one."""
        if found.sharded:
            return self._restore_shards(found.path, optimizer)
        if not optimizer:
            return []
        saved = found.optimizer_state()
        self.require_same(saved, str(found.path))
        return self.load_optimizer_state(saved)

    def require_same(self, state: Mapping[str, Any], folder: str) -> None:
        """UserError if the state of a checkpoint is of another optimiser, or of other parameters, than this one's."""
        optimizers.require_same(state, self.settings.optimizer, folder)
        names = [name for name, _ in self.model.named_parameters()]
        optimizers.require_same_layers(state, self.settings.train_layers, names, folder)

    # -- in shards, by names: parameters may have another order in the next run ------------------------------------

    def save(self, folder: Path) -> Saving:
        """Begin to write this rank's share of a checkpoint; training may go on meanwhile. Of a tensor that is spread
        the first rank that has a part writes it; all others are whole, written by rank 0."""
        if self.saving is not None:
            self.saving.leave()
        rank, world = sharded.rank_and_world(self.parameters)
        rest, tensors = shard_files.flattened(self._named_state(), OPTIMIZER_PREFIX)
        tensors |= {f"{WEIGHT_PREFIX}{name}": tensor for name, tensor in self.kept_tensors().items()}
        parts = [
            Part(name, sharded.local(tensor.detach()), sharded.begin(tensor), tuple(tensor.shape))
            for name, tensor in tensors.items() if sharded.first_to_have(tensor, rank)
        ]
        (folder / shard_files.FOLDER).mkdir(exist_ok=True)
        if rank == 0:
            (folder / shard_files.FOLDER / shard_files.REST).write_text(json.dumps(rest))
        self.saving = Writing(folder / shard_files.file_of(rank), parts, world)
        return Saving(self.saving, rank)

    def _named_state(self) -> dict[str, Any]:
        state, names = self.optimizer.state_dict(), self.numbered()
        return {  # blocks of 8 bits are of a part
            "state": {names[number]: optimizers.unpacked(own) for number, own in state["state"].items()},
            "param_groups": [
                {**group, "params": [names[i] for i in group["params"]]} for group in state["param_groups"]
            ],
            optimizers.KIND: self.settings.optimizer, optimizers.TRAINED: self.settings.train_layers,
        }

    @torch.no_grad()
    def _restore_shards(self, path: Path, optimizer: bool) -> list[str]:
        """One of another model or another optimiser is refused with both values before anything is changed."""
        found = Shards(path)
        own = {name: one for name, one in self.kept_tensors().items() if one.numel()}  # no file has empty ones
        shapes = {name: found.shapes[f"{WEIGHT_PREFIX}{name}"] for name in found.names(WEIGHT_PREFIX)}
        shard_files.require_same(shapes, own, str(path), "this run's")
        if optimizer:
            self.require_same(found.rest, str(path))
        for name, tensor in own.items():
            sharded.local(tensor).copy_(sharded.local(_read_like(found, f"{WEIGHT_PREFIX}{name}", tensor)))
            self.on_progress()
        changed = self.take(self._state_of(found)) if optimizer else []
        self.reset()
        return changed

    def _state_of(self, found: Shards) -> dict[str, Any]:
        """The optimiser's state as torch has it, this rank's share of each tensor."""
        numbers, trained = {name: number for number, name in enumerate(self.numbered())}, self.trained_tensors()

        def read(tree: Any, parameter: Tensor) -> Any:
            return shard_files.built(tree, lambda name: _read_like(
                found, name, parameter if found.shapes[name] == tuple(parameter.shape) else None))

        return {
            "state": {
                numbers[name]: self._as_kept(read(tree, trained[name])) for name, tree in found.rest["state"].items()
            },
            "param_groups": [
                {**group, "params": [numbers[name] for name in group["params"]]} for group in found.rest["param_groups"]
            ],
        }


def _read_like(found: Shards, name: str, pattern: Any) -> Tensor:
    """This rank's part of a tensor of a checkpoint, spread as `pattern` is; whole where that is not spread."""
    if not hasattr(pattern, "device_mesh"):
        return found.whole(name)
    own = sharded.local(pattern)
    part = found.part(name, sharded.within(pattern)) if own.numel() else torch.empty_like(own)
    return sharded.spread_of(part, pattern)


MASTER = "master"
OPTIMIZER_PREFIX = "optimizer"  # what the names of its tensors in shards begin with
EVERY = "every"  # token, in the place of a generated one
NOTHING = Sample(
    uid=0, group=0, member=0, prompt_ids=np.zeros(1, np.int32), token_ids=np.zeros(1, np.int32),
    behaviour_logprobs=np.zeros(1, np.float32), policy_versions=np.zeros(1, np.uint32),
)


def _whole(tree: Any, keep: bool) -> Any:
    """Dicts of tensors with each tensor whole and on the host, in an order that is the same on all ranks."""
    if isinstance(tree, dict):
        return {name: _whole(tree[name], keep) for name in sorted(tree)}
    if not isinstance(tree, Tensor):
        return tree
    gathered = sharded.whole(tree)
    return gathered.cpu() if keep else None


def _prepared(model: Any, settings: TrainerSettings, forward: Forward | None) -> tuple[Forward, Masters | None]:
    """How the model computes, and the masters of its parameters where it computes in fewer bits; what is not trained is
    frozen. Spread over ranks it has its masters in the shards, and its way was chosen before."""
    if forward is not None and forward.spread:
        return forward, None
    train_only(model, settings.train_layers)
    found = forward
    if found is None and not settings.attention.startswith(FLASH):  # a probe in float32 tells more
        found = way_of(model, settings)
    masters = None if settings.few_bits is None else Masters(model, settings.few_bits)
    found = found or way_of(model, settings)
    if computes_again(settings, model, model.device.type):
        checkpoint_layers(found)
    if settings.compile:
        compile_layers(found)
    return found, masters


def way_of(model: Any, settings: TrainerSettings) -> Forward:
    """The cheapest way of the model with these settings."""
    head = Head.of(model.config, settings.head_rows, torch.float32 if settings.head_dtype == "float32" else None)
    return choose_forward(model, head, settings.attention)


def computes_again(settings: TrainerSettings, model: Any, kind: str) -> bool:
    """Whether these settings ask for it, for that model on a device of that kind."""
    return device.computes_again(settings.activation_checkpointing, kind, lambda: sum(
        parameter.numel() for parameter in model.parameters()))


def normalised_norm(parameters: Sequence[Tensor], divisor: float) -> float:
    """Divides the accumulated gradient in place, and returns its norm over all ranks: a collective if it is spread."""
    gradients = _gradients(parameters)
    torch._foreach_div_(gradients, divisor)
    shares = torch.tensor([sharded.weight_in_sum(one.grad) for one in parameters if one.grad is not None]).double()
    norms = torch.stack(torch._foreach_norm(gradients)).double() if gradients else torch.zeros(0)
    return math.sqrt(sharded.added([float((norms.square() * shares.to(norms.device)).sum())], parameters)[0])


def clip(parameters: Sequence[Tensor], norm: float, limit: float) -> None:
    """Scales the gradient down to the limit if its norm is above."""
    if norm > limit:
        torch._foreach_mul_(_gradients(parameters), limit / (norm + 1e-6))


def _gradients(parameters: Sequence[Tensor]) -> list[Tensor]:
    return [sharded.local(parameter.grad) for parameter in parameters if parameter.grad is not None]
