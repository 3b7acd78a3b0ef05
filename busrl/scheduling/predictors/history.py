"""`history`: what answers were really like: finished siblings, the same prompt before, prompts with a near text.

Talks to `evidence` and `neighbours`. Near prompts say what to expect of one that has no answers yet; its own answers
then correct that, siblings most. Knows nothing of models of text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from busrl.scheduling.predictors.base import Candidate, Floats
from busrl.scheduling.predictors.evidence import Evidence
from busrl.scheduling.predictors.features import features
from busrl.scheduling.predictors.learning import Fresh, Learning
from busrl.scheduling.predictors.neighbours import Neighbours
from busrl.scheduling.predictors.ridge import BITS
from busrl.scheduling.predictors.table import PromptTable, key_of

PROMPTS = 1 << 16  # prompts remembered, about 200 bytes each
VECTORS = 4096  # texts compared with


class HistoryPredictor(Learning):
    """Length from the lengths of other answers."""

    name = "history"

    def __init__(self, prompts: int = PROMPTS, vectors: int = VECTORS) -> None:
        super().__init__()
        self.bounds = prompts, min(prompts, vectors)
        self.table = PromptTable(prompts)
        self.evidence = Evidence(self.table)
        self.neighbours = Neighbours(self.table, self.bounds[1])

    def _empty(self) -> HistoryPredictor:
        return HistoryPredictor(*self.bounds)

    def _expect(self, candidates: Sequence[Candidate]) -> Floats:
        keys = [key_of(candidate) for candidate in candidates]
        near = self.neighbours.predict(features(candidates, BITS), keys, self.level.typical)
        return self.evidence.combine(candidates, keys, near)

    def _answer(self, candidate: Candidate, value: float) -> bool:
        return not self.evidence.add(candidate, value)

    def _learn(self, fresh: Sequence[Fresh]) -> None:
        candidates = [one.candidate for one in fresh]
        keys, f = [key_of(candidate) for candidate in candidates], features(candidates, BITS)
        near = self.neighbours.predict(f, keys, self.level.typical)
        self.evidence.surprised(np.array([one.first for one in fresh]) - near)
        self.neighbours.add(keys, self.table.rows(keys), f)

    def _state(self) -> dict[str, Any]:
        return {"evidence": self.evidence.state(), "neighbours": self.neighbours.state()}

    def _load(self, state: Mapping[str, Any]) -> None:
        self.evidence.load(state["evidence"])
        self.neighbours.load(state["neighbours"])
