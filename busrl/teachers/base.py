"""A teacher as the others of this folder see it: asked for samples at once, read when its answer is needed.

Talks to the batch of the trainer alone. Knows nothing of endpoints, tags or files.

- Rows stand in the flat order of `training.batch`: sample by sample, a row for each generated token.
- All teachers of a run give the same number of tokens per row; what a teacher left out is
  `catalog.FEWER`, and counts nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor

from busrl.training.batch import Flat, Sample, flatten

Taught = tuple[Tensor, Tensor]  # ids and log-probabilities, [tokens, k] each
Pending = Callable[[], Taught]  # waits for an answer
Score = Callable[[Sequence[Sample], Flat], Tensor]  # log-probabilities of the targets of a Flat
Best = Callable[[Sequence[Sample], Flat], Taught]


class Teacher(Protocol):
    """Gives log-probabilities of k tokens in the place of each generated one: of its own most probable ones, or of
    `ids` where these are given."""

    def ask(self, samples: Sequence[Sample], ids: Tensor | None) -> Pending: ...


class InLearner:
    """A teacher whose model lies in this process."""

    def __init__(self, best: Best, score: Score, device: torch.device) -> None:
        self._best, self._score, self._device = best, score, device

    def ask(self, samples: Sequence[Sample], ids: Tensor | None) -> Pending:
        def compute() -> Taught:
            flat = flatten(samples, torch.float32, self._device)
            if ids is None:
                return self._best(samples, flat)
            return ids, self._score(samples, replace(flat, targets=ids))

        return compute
