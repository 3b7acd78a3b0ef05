"""The optimiser step of a learner, from sample records to new weights.

Talks to the models (`models`), which it trains with the advantages of the records (`advantages`). Knows nothing of the
ring and the bus, and of the log only its records.

- Groups come whole: most advantages compare a sample with its own group only, some with the whole step.
- The same records in the same batch give the same step, live or replayed from the log, up to the order of summation.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from torch import Tensor

from busrl.algorithms import advantages as formulas
from busrl.algorithms import catalog
from busrl.ledger.wal import Record, SampleRecord, Terms
from busrl.roles.learner.advantages import StepAdvantages
from busrl.roles.learner.models import Models, Read
from busrl.roles.learner.samples import TrainedTokens, terms_of, to_sample
from busrl.scheduling.learning_rate import Schedule
from busrl.system import device
from busrl.topology import Topology
from busrl.training.batch import first_fault
from busrl.training.checkpoint import Checkpoint
from busrl.training.model import load
from busrl.training.scorer import Advantages
from busrl.training.step_stats import StepStats, combined
from busrl.training.trainer import Hooks, Team, Trainer


def _nothing(*_: object) -> None:
    pass


class TrainingStep:
    """The models of a learner, its learning-rate schedule, and how many groups it has trained."""

    def __init__(
        self, topology: Topology, team: Team | None = None, on_progress: Callable[[], None] = _nothing,
        before_update: Callable[[], None] = _nothing, pace: Callable[[float, int], None] = _nothing,
        root: Path = Path(), read: Read = load,
    ) -> None:
        """`team`: the other ranks, where the model is spread over several. `on_progress` is called after each
        micro-batch and part of a checkpoint; `before_update` when the weights are about to change; `pace` with the
        begin and the tokens of an accumulation. `root`: the run directory; `read` gives the model of a folder."""
        device.keep_freed_memory()
        self._on_progress, self._before_update, self._pace = on_progress, before_update, pace
        self.late = topology.experiments.forced_age > 0  # a version has older weights than those of its step
        self.seed = topology.run.seed
        self.groups = 0
        self._denominator = 0.0  # of the update under way
        self._centred: list[float] = []  # advantages that are still to be divided by the number of the step
        # Of the step under way: tokens of answers that were not trained since they were cut, or all too old.
        self._cut_tokens = self._gone_tokens = 0
        self.tokens = TrainedTokens(terms_of(topology))
        self.stale = self.tokens.stale
        self.models = Models(topology, team, Hooks(on_progress, self.stale.ages), root, read)
        self.advantages = StepAdvantages(topology, self.models, self.tokens)
        self.config, self.schedule = topology.learner, schedule_of(topology)

    @property
    def trainer(self) -> Trainer:
        return self.models.trainer

    def follow(self, topology: Topology) -> None:
        """Train by these values from the next step on."""
        self.config, self.schedule = topology.learner, schedule_of(topology)
        self.models.follow(topology)
        self.advantages.follow(topology)

    def fault(self, records: Sequence[SampleRecord]) -> tuple[int, str] | None:
        """The position of a sample that must not be trained, and why; None if all are sound."""
        return first_fault(self.tokens.samples(records), self.models.token_rows)

    # -- training -----------------------------------------------------------------------------------------------

    def train(self, records: Sequence[SampleRecord], groups: int, version: int | None) -> StepStats:
        """A whole step at once. With several updates per batch each takes a share of the groups, all at the rate of the
        step and, for a loss that reads them, against the log-probabilities that the weights gave before the first; with
        several passes all of them again, in another order. Advantages and values are those before the first update."""
        updates, passes = min(self.config.updates_per_batch, groups), self.config.passes_per_batch
        advantages = self.advantages.of_groups(records)
        if updates == passes == 1:
            self._add(records, advantages, version)
            return self.finish(groups)
        rate = self.schedule(self.groups, groups)
        if catalog.needs_proximal(self.config) and self.models.loss_may_read("prox"):
            advantages = replace(advantages, proximal=self.trainer.score(self.tokens.samples(records)))
        stats = []
        for number, part in enumerate(self._shares(records, updates, passes)):
            self._add([records[i] for i in part], advantages.of(part), None if number else version, number)
            stats.append(self._update(rate))
        return self._ended(stats, groups)

    def _shares(self, records: Sequence[SampleRecord], updates: int, passes: int) -> Iterator[list[int]]:
        """Positions of the records of each update. The order of a pass depends on the seed and the step alone."""
        for number in range(passes):
            order = f"{self.seed} {self.stale.now} pass {number}"
            yield from split(records, updates, zlib.crc32(order.encode()) if number else None)

    def accumulate(self, records: Sequence[SampleRecord], version: int | None) -> None:
        """Forward and backward of whole groups, added to the step under way.

        `version` is that of the present weights; None where no version has them.
        """
        if not self.advantages.scaled_once:
            self._add(records, self.advantages.of_groups(records), version)
            return
        centred = self.advantages.group_advantages(records)  # to be divided by a number of the whole step
        self._centred += centred
        self._add(records, Advantages(centred), version)

    def _add(
        self, records: Sequence[SampleRecord], advantages: Advantages, version: int | None, number: int = 0
    ) -> None:
        """Train the samples of these records. Leading tokens that are too old are context; a sample of such tokens
        alone is not trained, nor is one that the limit cut under reward.truncated = "mask". Their rewards count in the
        advantages of their groups. `version` is None after the first update of several; `number` counts these."""
        if not records:
            return
        begun = time.monotonic()
        uncut = [i for i, record in enumerate(records) if not self.tokens.is_cut(record)]
        self._cut_tokens += sum(record.tokens for record in records if self.tokens.is_cut(record))
        every = [self.tokens.trained(records[i]) for i in uncut]
        self._gone_tokens += sum(sample.generated for sample in every if not sample.trained)
        samples = [sample for sample in every if sample.trained]
        advantages = advantages.of([i for i, sample in zip(uncut, every, strict=True) if sample.trained])
        weights, denominator = self.advantages.weights(samples)
        self._denominator += denominator
        advantages = replace(advantages, weights=weights, chosen=self.advantages.chosen(samples, advantages, number))
        self.trainer.accumulate(samples, advantages, version)
        self._pace(begun, sum(record.tokens for record in records))

    def finish(self, groups: int) -> StepStats:
        """The one update of a step of `groups` groups, for all that was accumulated."""
        return self._ended([self._update(self.schedule(self.groups, groups))], groups)

    def _update(self, rate: float) -> StepStats:
        self._before_update()
        scale = formulas.batch_scale(self._centred) if self._centred else 1.0
        stats = self.trainer.step(rate, self._denominator, scale)
        self._denominator, self._centred = 0.0, []
        self._on_progress()
        return stats

    def _ended(self, updates: Sequence[StepStats], groups: int) -> StepStats:
        """The figures of a step: all its updates together, its tokens counted once however many passes there were."""
        stats, passes = combined(updates), self.config.passes_per_batch
        stats = replace(
            stats, old_tokens=self.stale.taken() // passes, cut_tokens=self._cut_tokens // passes,
            context_tokens=(stats.context_tokens + self._gone_tokens) // passes, tokens=stats.tokens // passes,
            sequences=stats.sequences // passes, routes=stats.routes_of_one_pass(passes),
        )
        self._cut_tokens = self._gone_tokens = 0
        self.groups += groups
        self.advantages.earlier.keep()
        return stats

    def replay(self, record: Record) -> StepStats:
        """Train a step of the log again: the tokens that were trained then, by the present loss and rate."""
        # A version that existed a step earlier has other weights than those of this step.
        of_this_step = self.stale.step_of(record.version) == record.step - 1 and not self.late
        present = self.terms
        self.train_by(record.terms or present)
        try:
            return self.train(record.samples, len(record.groups), record.version if of_this_step else None)
        finally:
            self.train_by(present)

    @property
    def terms(self) -> Terms:
        """Terms by which the next samples are trained."""
        return self.tokens.terms

    def train_by(self, terms: Terms) -> None:
        self.tokens.train_by(terms)

    def entropy(self, records: Sequence[SampleRecord]) -> float:
        """Mean entropy in nats over the generated tokens of these samples under the present weights."""
        return self.trainer.entropy([to_sample(record) for record in records])

    # -- weights and checkpoints --------------------------------------------------------------------------------

    def weights(self) -> Mapping[str, Tensor]:
        """Tensors to publish (`Models.weights`)."""
        return self.models.weights()

    def load_checkpoint(self, root: Path, torn: dict[Path, str] | None = None) -> Checkpoint | None:
        """Continue from the newest whole one under `root`; None if there is none. `torn` gets the damaged ones."""
        newest = self.models.load_checkpoint(root, torn)
        if newest is not None:
            self.groups = int(newest.meta["groups"])
            self.advantages.earlier.load(newest.meta.get("reward_means", []))
        return newest


def schedule_of(topology: Topology) -> Schedule:
    """The learning rate over the run: a decay without a given length ends with the run."""
    config, run = topology.learner, topology.run
    total = run.max_groups or run.max_steps * config.trigger.n_min
    falls = config.decay_groups or max(1, total - config.warmup_groups)
    return Schedule(config.lr, config.trigger.n_min, config.warmup_groups, config.decay, falls, config.decay_to)


def split(records: Sequence[SampleRecord], parts: int, seed: int | None = None) -> list[list[int]]:
    """Positions of the records in `parts` shares of whole groups, in order or shuffled, as even as can be."""
    groups = list(dict.fromkeys(record.group for record in records))
    if seed is not None:
        np.random.default_rng(seed).shuffle(groups)
    share_of = {group: index * parts // len(groups) for index, group in enumerate(groups)}
    shares: list[list[int]] = [[] for _ in range(parts)]
    for position, record in enumerate(records):
        shares[share_of[record.group]].append(position)
    return [share for share in shares if share]
