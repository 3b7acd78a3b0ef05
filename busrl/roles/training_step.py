"""One optimiser step, from sample records to new weights: the learner's only door to torch.

Talks to `busrl.training` and `busrl.algorithms`. Knows nothing of the ring, the bus or the log.

Invariants:
- Groups come whole: an advantage compares a sample with its own group only.
- The same records in the same batch give the same step, live or replayed from the log, up to the order of summation.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from busrl.algorithms.advantages import advantages
from busrl.algorithms.losses import get
from busrl.ledger.wal import SampleRecord
from busrl.roles.oldtokens import OldTokens
from busrl.topology import Topology
from busrl.topology.schema import Learner
from busrl.training import checkpoint
from busrl.training.batch import Sample, all_sound
from busrl.training.checkpoint import Checkpoint
from busrl.training.memory import keep_freed_memory
from busrl.training.model import load, vocabulary
from busrl.training.noise import NoiseMeter, Norms
from busrl.training.schedule import Schedule
from busrl.training.settings import StepStats, TrainerSettings
from busrl.training.trainer import Trainer

Prox = list[npt.NDArray[np.float32]]


class TrainingStep:
    """A trainer, its learning-rate schedule, and how many groups it has trained."""

    def __init__(self, topology: Topology) -> None:
        keep_freed_memory()
        self.config = topology.learner
        self.source = Path(topology.model.path)
        self.settings = TrainerSettings.from_learner(self.config, compute_dtype=topology.model.dtype)
        self.schedule = _schedule(topology)
        self.part_groups = self.config.controller.noise_groups if _measures_noise(self.config) else 0
        self.groups = 0
        weights = topology.weights
        bounded = weights.mode == "batch-async" and weights.over_age == "wait" and not self.config.forced_age
        self.old = OldTokens(weights.max_staleness if bounded else None)
        self._use(Trainer(load(self.source), self.settings))
        self.vocabulary = vocabulary(self.trainer.model)

    def _use(self, trainer: Trainer) -> None:
        self.trainer = trainer
        self.noise = NoiseMeter(trainer.parameters) if self.part_groups else None
        self.norms: Norms | None = None  # of the last step, where the noise scale is measured

    @staticmethod
    def streamable(config: Learner) -> bool:
        """Whether micro-batches may run before the whole step is known."""
        return get(config.loss).streamable and config.updates_per_batch == 1

    def fault(self, records: Sequence[SampleRecord]) -> tuple[int, str] | None:
        """The position of a sample that must not be trained, and why; None if all are sound."""
        samples = [to_sample(record) for record in records]
        if all_sound(samples, self.vocabulary):
            return None
        texts = ((i, sample.fault(self.vocabulary)) for i, sample in enumerate(samples))
        return next(((i, text) for i, text in texts if text is not None), None)

    # -- training -----------------------------------------------------------------------------------------------

    def accumulate(self, records: Sequence[SampleRecord], version: int, prox: Prox | None = None) -> None:
        """Forward and backward of whole groups, added to the step under way."""
        advantages = self._advantages(records)
        for part in _parts(records, self.part_groups):
            before = self.trainer.tokens
            self._accumulate(records[part], advantages[part], None if prox is None else prox[part], version)
            if self.noise is not None:
                self.noise.part(len({record.group for record in records[part]}), self.trainer.tokens - before)

    def _accumulate(
        self, records: Sequence[SampleRecord], advantages: Sequence[float], prox: Prox | None, version: int
    ) -> None:
        """Without the leading tokens that are too old, and without samples of which nothing is left."""
        skipped = [self.old.leading(record) for record in records]
        kept = [i for i, record in enumerate(records) if skipped[i] < len(record.versions) // 4]
        samples = [to_sample(records[i], skipped[i]) for i in kept]
        rows = None if prox is None else [prox[i][skipped[i] :] for i in kept]
        self.trainer.accumulate(samples, [advantages[i] for i in kept], rows, version)

    def finish(self, groups: int) -> StepStats:
        """The update for all that was accumulated."""
        if self.noise is not None:
            self.norms = self.noise.whole()
        stats = self.trainer.step(self.schedule(self.groups, groups))
        self.groups += groups
        return stats

    def train(self, records: Sequence[SampleRecord], groups: int, version: int) -> StepStats:
        """A whole step at once. With several updates per batch each takes a share of the groups, all against the
        log-probabilities that the weights gave before the first (the proximal policy)."""
        updates = min(self.config.updates_per_batch, groups)
        if updates == 1:
            self.accumulate(records, version)
            return self.finish(groups)
        prox = self.trainer.score([to_sample(record) for record in records])
        parts = _split(records, updates)
        stats = None
        for part in parts:
            self.accumulate([records[i] for i in part], version, [prox[i] for i in part])
            stats = self.finish(len({records[i].group for i in part}))
        assert stats is not None
        return stats

    def _advantages(self, records: Sequence[SampleRecord]) -> list[float]:
        found: list[float] = []
        for _, members in groupby(records, key=lambda record: record.group):
            found += advantages(self.config.advantage, [record.reward for record in members])
        return found

    def entropy(self, records: Sequence[SampleRecord]) -> float:
        """Mean entropy in nats over the generated tokens of these samples under the present weights."""
        return self.trainer.entropy([to_sample(record) for record in records])

    def weights(self) -> dict[str, Tensor]:
        """The weights to publish; valid until the next step."""
        return self.trainer.named_weights()

    # -- checkpoints --------------------------------------------------------------------------------------------

    def load_checkpoint(self, root: Path) -> Checkpoint | None:
        """Continue from the newest whole checkpoint under `root`; None if there is none."""
        found = checkpoint.latest(root)
        if found is not None:
            self._use(Trainer(load(found.model), self.settings))
            self.trainer.load_optimizer_state(found.optimizer_state())
            found.restore_random()
            self.groups = int(found.meta["groups"])
        return found

    def save_checkpoint(
        self, root: Path, step: int, meta: Mapping[str, Any], extras: Callable[[Path], None]
    ) -> Checkpoint:
        return checkpoint.save(
            root,
            step,
            model=self.trainer.model,
            optimizer_state=self.trainer.optimizer_state(),
            meta=dict(meta),
            source=self.source,
            extras=extras,
            keep_last=self.config.keep_last,
        )


def _schedule(topology: Topology) -> Schedule:
    """The rate over the run: a fall without a length of its own ends with the run."""
    config, run = topology.learner, topology.run
    total = run.max_groups or run.max_steps * config.trigger.n_min
    falls = config.decay_groups or max(1, total - config.warmup_groups)
    return Schedule(config.lr, config.trigger.n_min, config.warmup_groups, config.decay, falls, config.decay_to)


def _measures_noise(config: Learner) -> bool:
    """Only the full rules look at the noise scale; several updates per batch have no one gradient to measure."""
    controller = config.controller
    return controller.mode != "off" and controller.rules == "full" and config.updates_per_batch == 1


def _parts(records: Sequence[SampleRecord], groups: int) -> list[slice]:
    """The records in one piece, or in pieces of at most so many whole groups."""
    if not records:
        return []
    first = [i for i, record in enumerate(records) if i == 0 or record.group != records[i - 1].group]
    edges = [*(first[::groups] if groups else first[:1]), len(records)]
    return [slice(low, high) for low, high in itertools.pairwise(edges)]


def to_sample(record: SampleRecord, skipped: int = 0) -> Sample:
    """A record of the log as the trainer takes it; the arrays share the record's bytes.

    The first `skipped` tokens of the answer become context: seen by the model, in no loss and no denominator.
    """
    prompt, tokens = record.prompt_array(), record.token_array()
    return Sample(
        uid=record.uid,
        group=record.group,
        member=record.member,
        prompt_ids=np.concatenate([prompt, tokens[:skipped]]) if skipped else prompt,
        token_ids=tokens[skipped:],
        logprobs=record.logprob_array()[skipped:],
        versions=record.version_array()[skipped:],
        reward=record.reward,
        temperature=record.temperature,
        finish=record.finish,
    )


def _split(records: Sequence[SampleRecord], parts: int) -> list[list[int]]:
    """Positions of the records in `parts` shares of whole groups, in order, as even as can be."""
    groups = list(dict.fromkeys(record.group for record in records))
    share_of = {group: index * parts // len(groups) for index, group in enumerate(groups)}
    shares: list[list[int]] = [[] for _ in range(parts)]
    for position, record in enumerate(records):
        shares[share_of[record.group]].append(position)
    return [share for share in shares if share]
