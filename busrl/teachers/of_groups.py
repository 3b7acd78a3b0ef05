"""The teacher of posted groups, as the learner has it: it reads their files, and removes those that it needs no more.

Talks to the files of `posted`. Knows nothing of who wrote them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from busrl.errors import UserError
from busrl.ledger.wal import Record
from busrl.roles.learner.observers import ComingStep, FinishedStep, LearnerParts, RestingGroup, StepObserver
from busrl.teachers.base import Pending, Taught
from busrl.teachers.posted import Store
from busrl.training.batch import Sample
from busrl.training.scorer import NOTHING
from busrl.training.step_stats import StepStats

UNDELETED = "posted_teachers"  # in a checkpoint's meta: draws whose files are still there


class Posted:
    """The teacher: reads the files."""

    def __init__(self, store: Store, count: int) -> None:
        self._store, self._count = store, count

    def ask(self, samples: Sequence[Sample], ids: Tensor | None) -> Pending:
        return lambda: self._rows(samples)

    def _rows(self, samples: Sequence[Sample]) -> Taught:
        both = [self._of(sample) for sample in samples]
        ids, logprobs = (np.concatenate([pair[n] for pair in both]) for n in (0, 1))
        return torch.from_numpy(ids.astype(np.int64)), torch.from_numpy(logprobs.astype(np.float32))

    def _of(self, sample: Sample) -> tuple[Any, Any]:
        if sample is NOTHING:
            return np.zeros((1, self._count), np.int32), np.zeros((1, self._count), np.float32)
        ids, logprobs = self._store.read(sample.group, sample.member).arrays()
        if len(ids) != sample.generated:
            raise UserError(
                f"{self._store.folder}: sample {sample.uid} has {sample.generated} trained tokens, and was taught "
                f"{len(ids)}: files of another run"
            )
        return ids, logprobs


class PostedFiles(StepObserver):
    """Removes the files of groups that ended: of a trained one when two checkpoints have followed its step, of one that
    this learner did not end when it was there at the step before and no open group has a lower draw."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._waiting: list[int] = []  # trained since the last checkpoint,
        self._covered: list[int] = []  # and before it
        self._there: set[int] = set()  # at the step before, so that the view of the next one has their groups

    def load(self, meta: Mapping[str, Any], folder: Path) -> None:
        self._covered = [int(draw) for draw in meta.get(UNDELETED, [])]

    def replayed(self, record: Record, stats: StepStats) -> None:
        self._waiting += record.groups

    def before(self, step: ComingStep) -> None:
        needed, first = {*self._covered, *self._waiting, *step.record.groups}, min(step.view.draws.tolist(), default=0)
        self._store.remove(draw for draw in self._there - needed if draw < first)
        self._there = {*self._store.draws()}

    def after(self, step: FinishedStep, row: Mapping[str, Any]) -> None:
        self._waiting += step.record.groups

    def set_aside(self, group: RestingGroup) -> None:
        self._store.remove([group.draw])

    def meta(self) -> Mapping[str, Any]:
        return {UNDELETED: self._covered + self._waiting}

    def save(self, folder: Path) -> None:
        self._store.remove(self._covered)
        self._covered, self._waiting = self._waiting, []


def observers(parts: LearnerParts) -> list[StepObserver]:
    rows = parts.topology.learner.teacher
    return [PostedFiles(Store(parts.paths.taught))] if any(row.posted for row in rows) else []
