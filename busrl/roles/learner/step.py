"""One optimiser step, from sample records to new weights.

Talks to `busrl.training` and `busrl.algorithms`. Knows nothing of the ring and the bus; of the log, its records alone.

- Groups come whole: most advantages compare a sample with its own group only, some with the whole step.
- The same records in the same batch give the same step, live or replayed from the log, up to the order of summation.
"""

from __future__ import annotations

import json
import math
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from busrl.algorithms import advantages as formulas
from busrl.algorithms import catalog, gae, losses, terms
from busrl.errors import UserError
from busrl.ledger.wal import Record, SampleRecord, Terms
from busrl.ranks.leader import Team
from busrl.states import Finish
from busrl.system import device
from busrl.topology import Topology
from busrl.topology.plugins import ADAPTERS, ONE_COPY
from busrl.training import checkpoint
from busrl.training.batch import Flat, Sample, Turns, Worth, first_fault, numbered, spread
from busrl.training.checkpoint import Checkpoint, Pending
from busrl.training.custom import OwnLoss, load_estimator
from busrl.training.forward import AUTO, Forward, choose_forward
from busrl.training.model import (
    Adapter,
    LoraSettings,
    copied_weights,
    load,
    named_weights,
    require_vocabulary,
    vocabulary,
)
from busrl.training.step_stats import StepStats, combined
from busrl.training.trainer import Given, Trainer, TrainerSettings
from busrl.training.value_head import FOLDER as VALUE
from busrl.weights.base import VersionSteps
from busrl.weights.tensors import fingerprint

ONCE = [name for name, made in catalog.ADVANTAGES.items() if made == catalog.SCALE]
UNWEIGHTED = ("token-mean", "seq-mean-token-sum")  # all samples have weight 1
KEPT = 256  # versions whose step is remembered; older ones count as at most as old as the oldest of these
COUPLING_LOW, COUPLING_HIGH = 0.5, 2.0


@dataclass(frozen=True)
class Schedule:
    """The learning rate of a step: `lr` for steps of `n_min` groups, times warm-up, decay and coupling.

    All is counted in groups: with a trigger that may fire early a step has no fixed size. The coupling to that size is
    sqrt(groups / n_min) within [0.5, 2], which keeps the noise of Adam's update the same.
    """

    lr: float
    n_min: int
    warmup_groups: int = 0
    decay: str = "none"
    decay_groups: int = 0  # from the end of the warm-up on
    decay_to: float = 0.0  # a share of `lr`

    @classmethod
    def of(cls, topology: Topology) -> Schedule:
        """The rate over the run: a decay without a given length ends with the run."""
        config, run = topology.learner, topology.run
        total = run.max_groups or run.max_steps * config.trigger.n_min
        falls = config.decay_groups or max(1, total - config.warmup_groups)
        return cls(config.lr, config.trigger.n_min, config.warmup_groups, config.decay, falls, config.decay_to)

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


class StaleTokenMask:
    """Which leading tokens of a turn are older than `bound` steps (weights.max_staleness): context, not trained.

    A group that is over age is trained under `over_age = "wait"`, but no token of it that is older than the bound.
    Such tokens count in no denominator; the reward, and so the advantage, is of the whole answer. Everything up to
    the last of them is left out, so what remains is one piece at the end; an answer is one turn. The step of a
    version is known from the records of the log alone, so a replay leaves out the same tokens. `bound` None:
    nothing is too old. Call `at` before the samples of a step, then `leading` for each.
    """

    def __init__(self, bound: int | None) -> None:
        self.bound = bound
        self.now = 0  # finished steps
        self.masked = 0  # tokens left out since `taken`
        self.steps = VersionSteps(KEPT)

    def at(self, version: int, step: int) -> None:
        """`version` is the newest one published, `step` steps are finished."""
        self.now = step
        self.steps.add(version, step)

    def step_of(self, version: int) -> int:
        return self.steps.step_of_row(version, self.now)

    def ages(self, versions: npt.NDArray[np.uint32]) -> npt.NDArray[np.int64]:
        """Finished steps since each of these versions was made."""
        which, place = np.unique(versions, return_inverse=True)
        ages = np.array([max(0, self.now - self.step_of(version)) for version in which.tolist()], np.int64)
        return ages[place]

    def leading(self, record: SampleRecord) -> list[int]:
        """How many tokens at the start of each turn are not to be trained, counted."""
        counts = self.count(record)
        self.masked += sum(counts)
        return counts

    def count(self, record: SampleRecord) -> list[int]:
        """The same, not counted. Of a turn that is not trained at all: none."""
        lengths = record.turn_lengths()
        if self.bound is None or self.now - record.step <= self.bound:
            return [0] * len(lengths)
        late = self.ages(record.version_array()) > self.bound
        own = zip(np.split(late, np.cumsum(lengths)[:-1]), record.turns_trained(), strict=True)
        return [_leading(np.flatnonzero(part)) if trained else 0 for part, trained in own]

    def taken(self) -> int:
        """Tokens that were left out since the last call."""
        masked, self.masked = self.masked, 0
        return masked


def _leading(late: npt.NDArray[np.int64]) -> int:
    return int(late[-1]) + 1 if len(late) else 0


def terms_of(topology: Topology) -> Terms:
    """What the topology promises of ages, and leaves out of the loss."""
    weights, waves, forced = topology.weights, topology.segments.waves, topology.experiments.forced_age > 0
    by_mode = {"batch-async": weights.max_staleness, "sync": max(0, waves - 1)}
    return Terms(
        None if forced else by_mode.get(weights.mode),
        weights.mode == "batch-async" and weights.over_age == "wait" and not forced,
        topology.segments.loss == "last_segment", topology.reward.truncated == "mask",
    )


ADAPTER = "adapter"  # folder of a checkpoint


class TrainingStep:
    """A trainer, its learning-rate schedule, and how many groups it has trained."""

    def __init__(self, topology: Topology, team: Team | None = None) -> None:
        """`team`: the other ranks, where the model is spread over several."""
        device.keep_freed_memory()
        self.config, self.team = topology.learner, team
        self.source = Path(topology.model.path)
        self.device = device.choose(topology.device_of("learner"))
        self.settings = TrainerSettings.of(topology)
        self.groups = 0
        self._denominator = 0.0  # of the update under way
        self._centred: list[float] = []  # advantages that were not divided by the number of the step
        self.seed = topology.run.seed
        self.late = topology.experiments.forced_age > 0  # a version has older weights than those of its step
        self.stale = StaleTokenMask(None)
        self.follow(topology)
        self.train_by(terms_of(topology))
        # Of the step under way: tokens of answers that were not trained since they were cut, or all too old.
        self.cut_tokens = self.gone_tokens = 0
        self.changed: list[str] = []  # settings of the optimiser that are others than those of the checkpoint
        # An adapter is small, and its checkpoint a folder that peft loads.
        self.in_shards = not topology.lora.on and not topology.rank_hosts and (
            team is not None or self.config.checkpoint_mode == "async")
        self.from_elsewhere = False  # whether it has begun with weights that are not those of model.path
        self.on_progress: Callable[[], None] = lambda: None  # after each micro-batch and part of a checkpoint
        self.before_update: Callable[[], None] = lambda: None  # called when the weights are about to change
        self.pace: Callable[[float, int], None] | None = None  # called with the begin and the tokens of an accumulation
        self.shared = topology.weights.transport == ONE_COPY
        self.adapter: Adapter | None = None
        self.lora = LoraSettings.of(topology)
        self.gives_adapters = topology.weights.transport in ADAPTERS
        self.referred = Path(topology.model.reference) if topology.model.reference else None
        self.teacher = Path(topology.model.teacher) if topology.model.teacher else None
        self._others: dict[Path, Forward] = {}  # models that are read and not trained
        self.estimator = load_estimator(self.config.advantage, topology.base_dir)
        self._use(self._trainer(self.source))
        self.known = replace(self.settings.known, rows=vocabulary(self.trainer.model))

    def follow(self, topology: Topology) -> None:
        """Train by these values from the next step on."""
        self.config, self.schedule = topology.learner, Schedule.of(topology)

    def train_by(self, terms: Terms) -> None:
        """What of the next samples is trained."""
        self.terms, self.stale.bound = terms, terms.bound if terms.masks_old else None
        self.last_only, self.masks_cut = terms.last_segment, terms.masks_cut

    def _trainer(self, folder: Path) -> Trainer:
        """For the model of that folder; with [lora] for an adapter on it, whose base is in the number type of the
        model: it is not trained."""
        if self.team is not None:
            made = self.team.trainer(folder, self.settings)
            self.adapter = made.adapter
            return made
        dtype = torch.float32 if self.lora is None else getattr(torch, self.settings.compute_dtype)
        model = self._loaded(folder, dtype)
        device.keep_freed_memory(sum(one.numel() for one in model.parameters()))
        if self.lora is None:
            return Trainer(model, self.settings)
        self.adapter = Adapter(model, self.lora)
        return Trainer(model, self.settings, named=self.adapter.merged)

    def _loaded(self, folder: Path, dtype: torch.dtype) -> Any:
        return load(folder, dtype, self.device, "" if self.settings.attention == AUTO else self.settings.attention)

    def _refer(self, trainer: Trainer) -> Callable[[Sequence[Sample], Flat], Tensor] | None:
        """What gives log-probabilities under the reference: the base without its adapter, or a second model."""
        read = self.config.kl != "none" or self._loss_reads("reference", trainer)
        if not read or self.team is not None:  # a team's trainer has it
            return trainer.reference
        if (adapter := self.adapter) is not None and self.referred is None:
            return adapter.base_alone(trainer.forward.score)
        forward = self._other(self.referred or self.source)
        require_vocabulary(self.referred or self.source, forward.model, trainer.model)
        return lambda samples, flat: forward.score(samples, flat)[0]

    def _teach(self, trainer: Trainer) -> Callable[[Sequence[Sample], Flat], tuple[Tensor, Tensor]] | None:
        """What gives a teacher's most probable tokens, of those that the model has."""
        if self.team is not None:  # its trainer has it
            return trainer.teacher
        if not catalog.taught(self.config) and not self._loss_reads("teacher", trainer):
            return None
        if self.teacher is None:
            raise UserError(f'learner.loss = "{self.config.loss}": it needs a teacher; set model.teacher to its folder')
        forward, words = self._other(self.teacher), vocabulary(trainer.model)
        return lambda samples, flat: forward.best(samples, flat, self.config.teacher_k, words)

    def _loss_reads(self, name: str, trainer: Trainer) -> bool:
        """Whether a loss of the user's says that it reads that."""
        return isinstance(trainer.loss, OwnLoss) and trainer.loss.reads(name)

    def _loss_may_read(self, name: str) -> bool:
        """The same, or says nothing of what it reads."""
        own = self.trainer.loss
        return not isinstance(own, OwnLoss) or own.uses is None or own.reads(name)

    @property
    def streamable(self) -> bool:
        """Whether the loss, if it is the user's own, may be computed on parts of a step."""
        own = self.trainer.loss
        return not isinstance(own, OwnLoss) or own.streamable

    def _other(self, folder: Path) -> Forward:
        """A model that is only read, in the compute type."""
        if folder not in self._others:
            model = self._loaded(folder, getattr(torch, self.settings.compute_dtype)).requires_grad_(False)
            self._others[folder] = way = choose_forward(model, attention=self.settings.attention)
            way.leave_out_all_but(self.settings.known)
        return self._others[folder]

    def _use(self, trainer: Trainer) -> None:
        self.trainer = trainer
        trainer.reference, trainer.teacher = self._refer(trainer), self._teach(trainer)
        trainer.on_progress = lambda: self.on_progress()
        trainer.ages_of = self.stale.ages

    def fault(self, records: Sequence[SampleRecord]) -> tuple[int, str] | None:
        """The position of a sample that must not be trained, and why; None if all are sound."""
        return first_fault(self._samples(records), self.known)

    # -- training -----------------------------------------------------------------------------------------------

    def train(self, records: Sequence[SampleRecord], groups: int, version: int | None) -> StepStats:
        """A whole step at once. With several updates per batch each takes a share of the groups, all at the rate of the
        step and, for a loss that reads them, against the log-probabilities that the weights gave before the first; with
        several passes all of them again, in another order. Advantages and values are those before the first update."""
        updates, passes = min(self.config.updates_per_batch, groups), self.config.passes_per_batch
        given = self._given(records)
        if updates == passes == 1:
            self._add(records, given, version)
            return self.finish(groups)
        rate = self.schedule(self.groups, groups)
        if catalog.needs_proximal(self.config) and self._loss_may_read("prox"):
            given = replace(given, proximal=self.trainer.score(self._samples(records)))
        made = []
        for number, part in enumerate(self._shares(records, updates, passes)):
            self._add([records[i] for i in part], given.of(part), None if number else version, number)
            made.append(self._update(rate))
        return self._ended(made, groups)

    def _shares(self, records: Sequence[SampleRecord], updates: int, passes: int) -> Iterator[list[int]]:
        """Positions of the records of each update. The order of a pass depends on the seed and the step alone."""
        for one in range(passes):
            seed = None if not one else zlib.crc32(f"{self.seed} {self.stale.now} pass {one}".encode())
            yield from _split(records, updates, seed)

    def accumulate(self, records: Sequence[SampleRecord], version: int | None) -> None:
        """Forward and backward of whole groups, added to the step under way.

        `version` is that of the present weights; None where no version has them.
        """
        if self.config.advantage not in ONCE:
            self._add(records, self._given(records), version)
            return
        centred = self._group_advantages(records)  # divided by what the whole step gives
        self._centred += centred
        self._add(records, Given(centred), version)

    def _add(self, records: Sequence[SampleRecord], given: Given, version: int | None, number: int = 0) -> None:
        """Leading tokens that are too old are context, and a sample of which nothing else is left is not trained; nor
        is one that the limit cut, under reward.truncated = "mask". Their rewards count in their groups' advantages.
        `version` is None after the first update of several; `number` counts these."""
        if not records:
            return
        begun = time.monotonic()
        whole = [i for i, record in enumerate(records) if not self._is_cut(record)]
        self.cut_tokens += sum(record.tokens for record in records if self._is_cut(record))
        every = [to_sample(records[i], self.last_only, self.stale.leading(records[i])) for i in whole]
        self.gone_tokens += sum(sample.generated for sample in every if not sample.trained)
        samples = [sample for sample in every if sample.trained]
        own = given.of([i for i, sample in zip(whole, every, strict=True) if sample.trained])
        weights, denominator = self._weights(samples)
        self._denominator += denominator
        own = replace(own, weights=weights, chosen=self._chosen(samples, own, number))
        self.trainer.accumulate(samples, own, version)
        if self.pace is not None:
            self.pace(begun, sum(record.tokens for record in records))

    def _weights(self, samples: Sequence[Sample]) -> tuple[list[Worth] | None, float]:
        """What multiplies the loss of each sample's tokens (None: nothing), by turns where these are the unit; and what
        is added to the denominator. A turn without trained tokens is in neither."""
        if self.config.unit == "turn":
            lengths = [sample.trained_of_turns().tolist() for sample in samples]
        else:
            lengths = [[sample.trained] for sample in samples]
        units = [(count, sample.group) for sample, own in zip(samples, lengths, strict=True) for count in own if count]
        found, denominator = formulas.weights(
            self.config.aggregation, [count for count, _ in units], [group for _, group in units],
            self.config.length_norm,
        )
        if self.config.aggregation in UNWEIGHTED:
            return None, denominator
        each = iter(found)
        rows = [[next(each) if count else 0.0 for count in own] for own in lengths]
        return [row[0] if len(row) == 1 else row for row in rows], denominator

    def _is_cut(self, record: SampleRecord) -> bool:
        """Whether an answer is not trained, since the limit cut it (reward.truncated = "mask")."""
        return self.masks_cut and record.finish == Finish.LENGTH

    def _chosen(self, samples: Sequence[Sample], given: Given, number: int) -> list[npt.NDArray[np.bool_]] | None:
        """Of a loss that chooses among all tokens of an update: those that it chose, a row per sample. The draw depends
        on the seed, the step and the update alone."""
        if (choice := losses.CHOICES.get(self.config.loss)) is None or not samples:
            return None
        now = self.trainer.score(samples)
        counts = [sample.generated for sample in samples]
        drawn = [sample.behaviour_logprobs for sample in samples]
        trained = [sample.mask() for sample in samples]
        worth = spread(samples, given.advantages)
        if given.valued is not None:
            worth = np.concatenate([one.advantages for one in given.valued])
        inputs = losses.LossInputs(
            _flat(now), _flat(drawn), _flat(now if given.proximal is None else given.proximal),
            torch.from_numpy(worth), torch.from_numpy(np.concatenate(trained)),
        )
        random = torch.Generator().manual_seed(zlib.crc32(f"{self.seed} {self.stale.now} {number}".encode()))
        return np.split(choice(inputs, self.settings, random).numpy(), np.cumsum(counts)[:-1])

    def _given(self, records: Sequence[SampleRecord]) -> Given:
        """What whole groups are trained with: all that a step has, where that depends on the others."""
        if self.config.advantage != catalog.GAE:
            return Given(self._advantages(records))
        return Given([one.reward for one in records], valued=self._valued(records))

    def _valued(self, records: Sequence[SampleRecord]) -> list[gae.Valued]:
        """Advantages and returns of each token, from the values under the present weights."""
        own, rows = self.config.value, [np.zeros(one.tokens) for one in records]
        for row, record, penalty in zip(rows, records, self._penalties(records), strict=True):
            row -= penalty
            row[-1] += record.reward
        before = [row.astype(np.float64) for row in self.trainer.score(self._samples(records), "value")]
        found = gae.estimated(rows, before, own.gamma, own.decay, own.decay_of_values)
        if not own.whiten:
            return found
        white = gae.whitened([one.advantages for one in found], [self._trained(one) for one in records])
        return [replace(one, advantages=row) for one, row in zip(found, white, strict=True)]

    def _trained(self, record: SampleRecord) -> npt.NDArray[np.bool_]:
        """Which tokens of the answer will be trained."""
        return to_sample(record, self.last_only, self.stale.count(record)).mask() & (not self._is_cut(record))

    def _advantages(self, records: Sequence[SampleRecord]) -> Sequence[Worth]:
        """Of whole groups, all that a step has where its advantages depend on the others."""
        if self.config.credit == "turn":
            return self._turn_advantages(records)
        if catalog.ADVANTAGES.get(self.config.advantage) == catalog.BATCH:
            counts = [int(self._trained(one).sum()) for one in records]
            return formulas.advantages(self.estimator, self._rewards(records), counts)
        found = self._group_advantages(records)
        if self.config.advantage in ONCE:
            scale = formulas.batch_scale(found)
            return [value / scale for value in found]
        return found

    def _group_advantages(self, records: Sequence[SampleRecord]) -> list[float]:
        return [
            value for own, rewards in self._by_group(records)
            for value in formulas.advantages(self.estimator, rewards, _lengths(own))
        ]

    def _turn_advantages(self, records: Sequence[SampleRecord]) -> list[Worth]:
        """Of each turn of whole groups, in the order of the records' turns; credit goes in the order of the calls."""
        found: list[Worth] = []
        for own, rewards in self._by_group(records):
            orders = [np.argsort(record.turn_calls(), kind="stable") for record in own]
            each = zip(own, rewards, orders, strict=True)
            steps = [_turn_rewards(record, reward)[order].tolist() for record, reward, order in each]
            worth = formulas.turn_advantages(steps, self.config.gamma, self.config.advantage == "group_std")
            found += [np.array(values)[np.argsort(order)].tolist() for order, values in zip(orders, worth, strict=True)]
        return found

    def _by_group(self, records: Sequence[SampleRecord]) -> Iterator[tuple[list[SampleRecord], list[float]]]:
        """The members of each group, with what their advantages are made of."""
        begin, rewards = 0, self._rewards(records)
        for _, members in groupby(records, key=lambda record: record.group):
            own = list(members)
            yield own, rewards[begin : begin + len(own)]
            begin += len(own)

    def _rewards(self, records: Sequence[SampleRecord]) -> list[float]:
        """What advantages are made of: the reward, with kl_in = "reward" less the KL of the answer to the reference."""
        both = zip(records, self._penalties(records), strict=True)
        return [record.reward - float(np.sum(penalty)) for record, penalty in both]

    def _penalties(self, records: Sequence[SampleRecord]) -> list[npt.NDArray[np.float64] | float]:
        """What kl_in = "reward" takes from each token's reward, at the log-probability it was drawn with; else 0. A
        turn that is not trained, of an opponent say, pays nothing."""
        if self.config.kl == "none" or self.config.kl_in == "loss":
            return [0.0] * len(records)
        estimator, coefficient = terms.ESTIMATORS[self.config.kl], self.config.kl_coef
        referred = self.trainer.score(self._samples(records), "reference")
        drawn = [torch.from_numpy(record.logprob_array().astype(np.float64)) for record in records]
        return [
            coefficient * estimator(own, torch.from_numpy(row.astype(np.float64))).numpy()
            * np.repeat(record.turns_trained(), record.turn_lengths())
            for record, own, row in zip(records, drawn, referred, strict=True)
        ]

    def finish(self, groups: int) -> StepStats:
        """The one update of a step of `groups` groups, for all that was accumulated."""
        return self._ended([self._update(self.schedule(self.groups, groups))], groups)

    def _update(self, rate: float) -> StepStats:
        self.before_update()
        scale = formulas.batch_scale(self._centred) if self._centred else 1.0
        stats = self.trainer.step(rate, self._denominator, scale)
        self._denominator, self._centred = 0.0, []
        self.on_progress()
        return stats

    def _ended(self, updates: Sequence[StepStats], groups: int) -> StepStats:
        """The end of a step: its updates as one, its tokens counted once however many passes there were."""
        stats, passes = combined(updates), self.config.passes_per_batch
        stats = replace(
            stats, old_tokens=self.stale.taken() // passes, cut_tokens=self.cut_tokens // passes,
            context_tokens=(stats.context_tokens + self.gone_tokens) // passes, tokens=stats.tokens // passes,
            sequences=stats.sequences // passes,
        )
        self.cut_tokens = self.gone_tokens = 0
        self.groups += groups
        return stats

    def replay(self, record: Record) -> StepStats:
        """Train a step of the log again: of its samples what was trained then, by the present loss and rate."""
        # A version that was there a step before has other weights than those of this step.
        of_this_step = self.stale.step_of(record.version) == record.step - 1 and not self.late
        present = self.terms
        self.train_by(record.terms or present)
        try:
            return self.train(record.samples, len(record.groups), record.version if of_this_step else None)
        finally:
            self.train_by(present)

    def _samples(self, records: Sequence[SampleRecord]) -> list[Sample]:
        return [to_sample(record, self.last_only) for record in records]

    def entropy(self, records: Sequence[SampleRecord]) -> float:
        """Mean entropy in nats over the generated tokens of these samples under the present weights."""
        return self.trainer.entropy([to_sample(record) for record in records])

    def weights(self) -> Mapping[str, Tensor]:
        """What is published: the weights, or the adapter alone; valid until the next step. As they are trained, where
        the engine's are the same."""
        if self.shared:
            return named_weights(self.trainer.model)
        if self.adapter is not None and self.gives_adapters:
            return self.trainer.adapter_weights(self.adapter)
        return self.trainer.named_weights()

    def adopt(self, views: Mapping[str, Tensor]) -> None:
        """Train these tensors, which hold the present weights, in the place of the model's own."""
        for name, parameter in self.trainer.model.named_parameters():
            parameter.data = views[name]
        device.empty_cache(self.device)

    def write(self, folder: Path, named: Mapping[str, Tensor]) -> None:
        """What `weights` gave, as the files of a published folder: an adapter, or a model with its tokenizer."""
        if self.adapter is not None and self.gives_adapters:
            self.adapter.write(folder, named)
        else:
            checkpoint.export(self.trainer.model, folder, self.source, named)

    # -- checkpoints --------------------------------------------------------------------------------------------

    def load_checkpoint(self, root: Path, torn: dict[Path, str] | None = None) -> Checkpoint | None:
        """Continue from the newest whole one under `root`; None if there is none. `torn` gets what it passed over."""
        found = checkpoint.latest(root, torn)
        if found is not None:
            self._load_model(found)
            self.changed = self.trainer.restore(found)
            self._load_value_head(found)
            found.restore_random(self.device)
            self.groups = int(found.meta["groups"])
        return found

    def start_from(self, path: Path, optimizer: bool) -> None:
        """Begin with the weights of a checkpoint of another run, and with its optimiser if asked for. UserError if it
        is damaged, or of another model or optimiser."""
        if fault := checkpoint.fault_of(path):
            raise UserError(
                f"learner.start_from = {path}: it is no whole checkpoint ({fault}); name another one, or copy one of a "
                "running run before that run removes it (learner.keep_last)"
            )
        found = Checkpoint(path, 0, json.loads((path / checkpoint.META).read_text()))
        self._load_model(found)
        self.changed = self.trainer.restore(found, optimizer)
        self._load_value_head(found, optimizer)
        self.from_elsewhere = True

    def _load_value_head(self, found: Checkpoint, optimizer: bool = True) -> None:
        if (head := self.trainer.value_head) is None:
            return
        if (found.path / VALUE).is_dir():
            head.load(found.path / VALUE, optimizer)
        else:
            self.changed.append(f'learner.advantage = "{catalog.GAE}" (before: no value head; it begins at 0)')

    def _load_model(self, found: Checkpoint) -> None:
        """The weights of a checkpoint: with [lora] those of the base, and its adapter. Those in shards come with the
        optimiser."""
        before, now = found.meta.get("lora"), self._lora_meta()
        if before != now:
            raise UserError(
                f"{found.path} was trained with lora {before}, the topology and model.path give {now}; continue with "
                f"those settings, or start a new run with model.path = the folder that `busrl export` makes of it"
            )
        if self.adapter is None and not found.sharded:
            self._use(self._trainer(found.model))
        elif self.adapter is not None:
            self.trainer.load_adapter(self.adapter, found.path / ADAPTER)

    def _lora_meta(self) -> dict[str, Any] | None:
        return None if self.lora is None else {**self.lora.described(), "base": fingerprint(self.source)}

    def begin_checkpoint(
        self, root: Path, step: int, meta: Mapping[str, Any], extras: Callable[[Path], None]
    ) -> Pending | None:
        """Begin to write a checkpoint in shards, or, where it is to be a folder of the model, write it: None then."""
        more: dict[str, Any] = {"dtype": self.settings.compute_dtype, "optimizer": self.config.optimizer}
        if self.lora is not None:
            more["lora"] = self._lora_meta()

        def files(directory: Path) -> None:
            if self.adapter is not None:
                self.adapter.write(directory / ADAPTER, dict(self.trainer.adapter_weights(self.adapter)))
            if self.trainer.value_head is not None:
                self.trainer.value_head.write(directory / VALUE)
            extras(directory)

        both: dict[str, Any] = {
            "meta": {**meta, **more}, "source": self.source, "extras": files, "keep_last": self.config.keep_last,
            "on_progress": self.on_progress, "where": self.device,
        }
        if self.in_shards:
            return Pending(root, step, trainer=self.trainer, **both)
        checkpoint.save(
            root, step, model=self.trainer.model, optimizer_state=self.trainer.optimizer_state(), named=self._named(),
            **both,
        )
        return None

    def _named(self) -> Mapping[str, Tensor] | None:
        """What a checkpoint's model holds where it is not the trained tensors as they are: base and adapter as one, a
        copy of what another process shares, in the number type that is published."""
        if self.shared and self.adapter is None:
            return copied_weights(self.trainer.model)
        whole = self.team is None and self.adapter is None
        return None if whole and self.settings.few_bits is None else self.trainer.named_weights()


def _flat(rows: Sequence[npt.NDArray[np.float32]]) -> Tensor:
    """The values of all samples one after the other, in float64."""
    return torch.from_numpy(np.concatenate(rows).astype(np.float64))


def _lengths(records: Sequence[SampleRecord]) -> list[int]:
    return [record.tokens for record in records]


def to_sample(record: SampleRecord, last_only: bool = False, skipped: Sequence[int] = (0,)) -> Sample:
    """A record of the log as the trainer takes it; the arrays share the record's bytes.

    The first `skipped` tokens of each turn are context: seen by the model, in no loss and no denominator; `last_only`:
    all segments but the last are.
    """
    return Sample(
        uid=record.uid, group=record.group, member=record.member, reward=record.reward,
        temperature=record.temperature, finish=record.finish, prompt_ids=record.prompt_array(),
        token_ids=record.token_array(), behaviour_logprobs=record.logprob_array(),
        policy_versions=record.version_array(), turns=_turns(record, skipped),
        context=0 if record.turns else max(skipped[0], record.earlier if last_only else 0),
    )


def _turns(record: SampleRecord, skipped: Sequence[int]) -> Turns | None:
    """Where the turns of an episode stand; None for one answer."""
    if not record.turns:
        return None
    lengths = record.turn_lengths()
    left_out = np.zeros(len(lengths), np.int64)
    left_out[: len(skipped)] = skipped
    hidden = numbered(lengths) < np.repeat(np.where(record.turns_trained(), left_out, lengths), lengths)
    return Turns(np.array(record.seqs, np.int64), record.turn_array()[:, :3], hidden)


def _turn_rewards(record: SampleRecord, reward: float) -> npt.NDArray[np.float64]:
    """The reward of each turn; what the episode has beside them, and all of an answer, is the last call's."""
    calls = record.turn_calls()
    found = np.array(record.turn_rewards, np.float64) if record.turn_rewards else np.zeros(len(calls))
    found[int(np.argmax(calls))] += reward - found.sum()
    return found


def _split(records: Sequence[SampleRecord], parts: int, seed: int | None = None) -> list[list[int]]:
    """Positions of the records in `parts` shares of whole groups, in order or shuffled, as even as can be."""
    groups = list(dict.fromkeys(record.group for record in records))
    if seed is not None:
        np.random.default_rng(seed).shuffle(groups)
    share_of = {group: index * parts // len(groups) for index, group in enumerate(groups)}
    shares: list[list[int]] = [[] for _ in range(parts)]
    for position, record in enumerate(records):
        shares[share_of[record.group]].append(position)
    return [share for share in shares if share]
