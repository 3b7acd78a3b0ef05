"""One optimiser step, from sample records to new weights: the learner's only door to torch.

Talks to `busrl.training` and `busrl.algorithms`. Knows nothing of the ring, the bus or the log.

- Groups come whole: an advantage compares a sample with its own group only.
- The same records in the same batch give the same step, live or replayed from the log, up to the order of summation.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from busrl import device
from busrl.algorithms.advantages import advantages as group_advantages
from busrl.algorithms.losses import WITHOUT_PROXIMAL
from busrl.config import Topology
from busrl.config.schema import ADAPTERS, ONE_COPY
from busrl.errors import UserError
from busrl.ledger.wal import Record, SampleRecord
from busrl.scheduling.controller import EntropyGate
from busrl.training import checkpoint
from busrl.training.batch import Sample, first_fault
from busrl.training.checkpoint import Checkpoint
from busrl.training.custom import load_estimator
from busrl.training.forward import AUTO
from busrl.training.model import Adapter, LoraSettings, copied_weights, load, named_weights, vocabulary
from busrl.training.trainer import Schedule, StepStats, Trainer, TrainerSettings, combined, keep_freed_memory
from busrl.weights.base import VersionSteps
from busrl.weights.tensors import fingerprint

KEPT = 256  # versions whose step is remembered; older ones count as at most as old as the oldest of these


class StaleTokenMask:
    """Which leading tokens of a sample are older than `bound` steps (weights.max_staleness): context, not trained.

    A group that is over age is trained under `over_age = "wait"`, but no token of it that is older than the bound. Such
    tokens count in no denominator; the reward, and so the advantage, is of the whole answer. Everything up to the last
    of them is left out, so what remains is one piece at the end. The step of a version is known from the records of the
    log alone, so a replay leaves out the same tokens. `bound` None: nothing is too old. Call `at` before the samples of
    a step, then `leading` for each.
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
        """The step that made a version."""
        return self.steps.step_of_row(version, self.now)

    def ages(self, versions: npt.NDArray[np.uint32]) -> npt.NDArray[np.int64]:
        """Finished steps since each of these versions was made."""
        which, place = np.unique(versions, return_inverse=True)
        ages = np.array([max(0, self.now - self.step_of(version)) for version in which.tolist()], np.int64)
        return ages[place]

    def leading(self, record: SampleRecord) -> int:
        """How many tokens at the start of the answer are not to be trained."""
        if self.bound is None or self.now - record.step <= self.bound:
            return 0
        late = np.flatnonzero(self.ages(record.version_array()) > self.bound)
        count = int(late[-1]) + 1 if len(late) else 0
        self.masked += count
        return count

    def taken(self) -> int:
        """Tokens that were left out since the last call."""
        masked, self.masked = self.masked, 0
        return masked


ADAPTER = "adapter"  # folder of a checkpoint
Logprobs = list[npt.NDArray[np.float32]]  # a row per sample


class TrainingStep:
    """A trainer, its learning-rate schedule, and how many groups it has trained."""

    def __init__(self, topology: Topology) -> None:
        keep_freed_memory()
        self.config = topology.learner
        self.source = Path(topology.model.path)
        self.device = device.choose(topology.device_of("learner"))
        self.settings = TrainerSettings.of(topology)
        self.last_only = topology.segments.loss == "last_segment"
        experiments = topology.experiments
        self.gate = EntropyGate(experiments.dmmpt_sigma) if experiments.dmmpt == "gate" else None
        self.gate_moved = False  # by the last step
        self.schedule = _schedule(topology)
        self.groups = 0
        weights = topology.weights
        self.late = experiments.forced_age > 0  # a version has older weights than those of its step
        bounded = weights.mode == "batch-async" and weights.over_age == "wait" and not self.late
        self.stale = StaleTokenMask(weights.max_staleness if bounded else None)
        self.changed: list[str] = []  # settings of the optimiser that are others than those of the checkpoint
        self.moved: Callable[[], None] = lambda: None  # called after each micro-batch and each part of a checkpoint
        self.before_update: Callable[[], None] = lambda: None  # called when the weights are about to change
        self.pace: Callable[[float, int], None] | None = None  # called with the begin and the tokens of an accumulation
        self.shared = weights.transport == ONE_COPY
        self.adapter: Adapter | None = None
        own = topology.lora
        self.lora = LoraSettings(own.rank, own.scale, own.targets, own.dropout, topology.run.seed) if own.on else None
        self.gives_adapters = weights.transport in ADAPTERS
        self.estimator = load_estimator(self.config.advantage)
        self._use(self._trainer(self.source))
        self.vocabulary = vocabulary(self.trainer.model)

    def _trainer(self, folder: Path) -> Trainer:
        """For the model of that folder; with [lora] for an adapter on it, whose base is in the number type of the
        model: it is not trained."""
        named = "" if self.settings.attention == AUTO else self.settings.attention
        dtype = torch.float32 if self.lora is None else getattr(torch, self.settings.compute_dtype)
        model = load(folder, dtype, self.device, named)
        if self.lora is None:
            return Trainer(model, self.settings)
        self.adapter = Adapter(model, self.lora)
        return Trainer(model, self.settings, named=self.adapter.merged)

    def _use(self, trainer: Trainer) -> None:
        self.trainer = trainer
        trainer.moved = lambda: self.moved()
        trainer.ages_of = self.stale.ages

    def fault(self, records: Sequence[SampleRecord]) -> tuple[int, str] | None:
        """The position of a sample that must not be trained, and why; None if all are sound."""
        return first_fault(self._samples(records), self.vocabulary)

    # -- training -----------------------------------------------------------------------------------------------

    def train(self, records: Sequence[SampleRecord], groups: int, version: int | None) -> StepStats:
        """A whole step at once. With several updates per batch each takes a share of the groups, all at the rate of the
        step and, for a loss that reads them, against the log-probabilities that the weights gave before the first."""
        updates = min(self.config.updates_per_batch, groups)
        if updates == 1:
            self.accumulate(records, version)
            return self.finish(groups)
        rate = self.schedule(self.groups, groups)
        proximal = None if self.config.loss in WITHOUT_PROXIMAL else self.trainer.score(self._samples(records))
        made = []
        for number, part in enumerate(_split(records, updates)):
            share = [records[i] for i in part]
            before = None if proximal is None else [proximal[i] for i in part]
            self.accumulate(share, None if number else version, before)
            made.append(self._update(rate))
        return self._ended(made, groups)

    def accumulate(
        self, records: Sequence[SampleRecord], version: int | None, proximal: Logprobs | None = None
    ) -> None:
        """Forward and backward of whole groups, added to the step under way.

        Leading tokens that are too old are context, and a sample of which nothing else is left is not trained.
        `version` is that of the present weights; None where no version has them: after the first update of several.
        """
        if not records:
            return
        begun, advantages = time.monotonic(), self._advantages(records)
        skipped = [self.stale.leading(record) for record in records]
        kept = [i for i, record in enumerate(records) if skipped[i] < len(record.versions) // 4]
        samples = [to_sample(records[i], self.last_only, skipped[i]) for i in kept]
        rows = None if proximal is None else [proximal[i] for i in kept]
        self.trainer.accumulate(samples, [advantages[i] for i in kept], rows, version)
        if self.pace is not None:
            self.pace(begun, sum(len(record.versions) // 4 for record in records))

    def _advantages(self, records: Sequence[SampleRecord]) -> list[float]:
        found: list[float] = []
        for _, members in groupby(records, key=lambda record: record.group):
            own = list(members)
            lengths = [len(record.token_ids) // 4 for record in own]
            found += group_advantages(self.estimator, [record.reward for record in own], lengths)
        return found

    def finish(self, groups: int) -> StepStats:
        """The one update of a step of `groups` groups, for all that was accumulated."""
        return self._ended([self._update(self.schedule(self.groups, groups))], groups)

    def _update(self, rate: float) -> StepStats:
        self.before_update()
        stats = self.trainer.step(rate)
        self.moved()
        return stats

    def _ended(self, updates: Sequence[StepStats], groups: int) -> StepStats:
        """The end of a step: its updates as one."""
        stats = replace(combined(updates), old_tokens=self.stale.taken())
        self.groups += groups
        if self.gate is not None:
            self.gate_moved = stats.tokens > 0 and self.gate.observe(stats.diagnostics.entropy)
            self.trainer.skip_mastered = self.gate.on
        return stats

    def replay(self, record: Record) -> StepStats:
        """Train a step of the log again, with the tokens left out that were left out then."""
        live, self.trainer.skip_mastered = self.trainer.skip_mastered, record.dmmpt
        # A version that was there a step before has other weights than those of this step.
        exact = self.stale.step_of(record.version) == record.step - 1 and not self.late
        stats = self.train(record.samples, len(record.groups), record.version if exact else None)
        if self.gate is None:
            self.trainer.skip_mastered = live
        return stats

    def _samples(self, records: Sequence[SampleRecord]) -> list[Sample]:
        return [to_sample(record, self.last_only) for record in records]

    def score(self, records: Sequence[SampleRecord]) -> Logprobs:
        """The log-probability of every generated token of these samples under the present weights."""
        return self.trainer.score([to_sample(record) for record in records])

    def entropy(self, records: Sequence[SampleRecord]) -> float:
        """Mean entropy in nats over the generated tokens of these samples under the present weights."""
        return self.trainer.entropy([to_sample(record) for record in records])

    def weights(self) -> Mapping[str, Tensor]:
        """What is published: the weights, or the adapter alone; valid until the next step. As they are trained, where
        the engine's are the same."""
        if self.shared:
            return named_weights(self.trainer.model)
        if self.adapter is not None and self.gives_adapters:
            return self.adapter.tensors()
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
            self.changed = self.trainer.load_optimizer_state(found.optimizer_state())
            found.restore_random(self.device)
            self.groups = int(found.meta["groups"])
            if self.gate is not None and "dmmpt_gate" in found.meta:
                self.gate.load(found.meta["dmmpt_gate"])
                self.trainer.skip_mastered = self.gate.on
        return found

    def _load_model(self, found: Checkpoint) -> None:
        """The weights of a checkpoint: with [lora] those of the base, and its adapter."""
        before, now = found.meta.get("lora"), self._lora_meta()
        if before != now:
            raise UserError(
                f"{found.path} was trained with lora {before}, the topology and model.path give {now}; continue with "
                f"those settings, or start a new run with model.path = {found.model}"
            )
        if self.adapter is None:
            self._use(self._trainer(found.model))
        else:
            self.adapter.load(found.path / ADAPTER)

    def _lora_meta(self) -> dict[str, Any] | None:
        return None if self.lora is None else {**self.lora.described(), "base": fingerprint(self.source)}

    def save_checkpoint(
        self, root: Path, step: int, meta: Mapping[str, Any], extras: Callable[[Path], None]
    ) -> Checkpoint:
        more: dict[str, Any] = {"dmmpt_gate": self.gate.state()} if self.gate is not None else {}
        if self.lora is not None:
            more["lora"] = self._lora_meta()

        def files(directory: Path) -> None:
            if self.adapter is not None:
                self.adapter.write(directory / ADAPTER, self.adapter.tensors())
            extras(directory)

        return checkpoint.save(
            root, step, model=self.trainer.model, optimizer_state=self.trainer.optimizer_state(),
            meta={**meta, **more}, named=self._named(), source=self.source, extras=files,
            keep_last=self.config.keep_last, moved=self.moved, where=self.device,
        )

    def _named(self) -> Mapping[str, Tensor] | None:
        """What a checkpoint's model holds where it is not the trained tensors as they are: base and adapter as one, a
        copy of what another process shares, in the number type that is published."""
        if self.shared and self.adapter is None:
            return copied_weights(self.trainer.model)
        return None if self.adapter is None and not self.trainer.rounded else self.trainer.named_weights()


def _schedule(topology: Topology) -> Schedule:
    """The rate over the run: a decay without a given length ends with the run."""
    config, run = topology.learner, topology.run
    total = run.max_groups or run.max_steps * config.trigger.n_min
    falls = config.decay_groups or max(1, total - config.warmup_groups)
    return Schedule(config.lr, config.trigger.n_min, config.warmup_groups, config.decay, falls, config.decay_to)


def to_sample(record: SampleRecord, last_only: bool = False, skipped: int = 0) -> Sample:
    """A record of the log as the trainer takes it; the arrays share the record's bytes.

    The first `skipped` tokens of the answer are context: seen by the model, in no loss and no denominator; `last_only`:
    all segments but the last are.
    """
    return Sample(
        uid=record.uid, group=record.group, member=record.member, reward=record.reward,
        temperature=record.temperature, finish=record.finish, prompt_ids=record.prompt_array(),
        token_ids=record.token_array(), behaviour_logprobs=record.logprob_array(),
        policy_versions=record.version_array(),
        context=max(skipped, record.earlier if last_only else 0),
    )


def _split(records: Sequence[SampleRecord], parts: int) -> list[list[int]]:
    """Positions of the records in `parts` shares of whole groups, in order, as even as can be."""
    groups = list(dict.fromkeys(record.group for record in records))
    share_of = {group: index * parts // len(groups) for index, group in enumerate(groups)}
    shares: list[list[int]] = [[] for _ in range(parts)]
    for position, record in enumerate(records):
        shares[share_of[record.group]].append(position)
    return [share for share in shares if share]
