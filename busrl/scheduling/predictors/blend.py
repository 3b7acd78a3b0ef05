"""`blend`: rules, text and history together, each trusted as far as it was right lately.

Talks to the parts. What to expect of a prompt is a fitted mixture of the rules, the linear model and the neighbours
(rules alone while there is nothing else); the prompt's own answers then correct that as in `history`. Knows nothing of
how the parts work.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from busrl.scheduling.predictors.base import Candidate, Floats
from busrl.scheduling.predictors.evidence import Evidence
from busrl.scheduling.predictors.features import Features, features
from busrl.scheduling.predictors.history import PROMPTS, VECTORS
from busrl.scheduling.predictors.learned import add_to
from busrl.scheduling.predictors.learning import Fresh, Learning
from busrl.scheduling.predictors.neighbours import Neighbours
from busrl.scheduling.predictors.ridge import BITS, Ridge
from busrl.scheduling.predictors.rules import RulesPredictor
from busrl.scheduling.predictors.stack import Stack
from busrl.scheduling.predictors.table import PromptTable, key_of

SOURCES = 3


class BlendPredictor(Learning):
    """Length from everything that is known."""

    name = "blend"

    def __init__(self, rules: RulesPredictor | None = None, prompts: int = PROMPTS, vectors: int = VECTORS) -> None:
        super().__init__()
        self.rules = rules or RulesPredictor()
        self.bounds = prompts, min(prompts, vectors)
        self.table = PromptTable(prompts)
        self.evidence = Evidence(self.table)
        self.neighbours = Neighbours(self.table, self.bounds[1])
        self.ridge = Ridge()
        self.stack = Stack(SOURCES)

    def _empty(self) -> BlendPredictor:
        return BlendPredictor(self.rules, *self.bounds)

    def _expect(self, candidates: Sequence[Candidate]) -> Floats:
        keys = [key_of(candidate) for candidate in candidates]
        typical = self.level.typical
        mixed = self.stack.mix(self._sources(candidates, keys, features(candidates, BITS), typical)) + typical
        return self.evidence.combine(candidates, keys, mixed)

    def _sources(self, candidates: Sequence[Candidate], keys: Sequence[int], f: Features, typical: float) -> Floats:
        """[n, SOURCES]: what each part expects, as logs around the typical length."""
        rules = np.log(self.rules.predict(candidates)) - typical
        text = self.ridge.predict(f) - typical if len(self.ridge) else np.zeros(f.rows)
        near = self.neighbours.predict(f, keys, typical) - typical
        return np.column_stack((rules, text, near))

    def _answer(self, candidate: Candidate, value: float) -> bool:
        self.ridge.update(candidate.draw, value)
        return not self.evidence.add(candidate, value)

    def _learn(self, fresh: Sequence[Fresh]) -> None:
        candidates = [one.candidate for one in fresh]
        keys, f = [key_of(candidate) for candidate in candidates], features(candidates, BITS)
        typical, first = self.level.typical, np.array([one.first for one in fresh])
        sources = self._sources(candidates, keys, f, typical)  # before they learn: what they would have said
        said = self.stack.mix(sources)
        self.stack.remember(keys, sources + typical)
        self._fit(typical)
        # At the very first the rules' scale is not known yet, which says nothing about how well they rank.
        self.evidence.surprised(first - typical - (said if self.prompts > len(fresh) else self.stack.mix(sources)))
        add_to(self.ridge, fresh, f)
        self.neighbours.add(keys, self.table.rows(keys), f)

    def _fit(self, typical: float) -> None:
        """Fit the mixture to what the prompts that it remembers came to; one that the table forgot counts nothing."""
        rows = self.table.rows(self.stack.keys.tolist())
        count, mean = self.table.overall(np.maximum(rows, 0))
        self.stack.fit(mean, np.where(rows >= 0, count / (count + 1), 0.0), typical)

    def _state(self) -> dict[str, Any]:
        return {
            "evidence": self.evidence.state(),
            "neighbours": self.neighbours.state(),
            "ridge": self.ridge.state(),
            "stack": self.stack.state(),
        }

    def _load(self, state: Mapping[str, Any]) -> None:
        self.evidence.load(state["evidence"])
        self.neighbours.load(state["neighbours"])
        self.ridge.load(state["ridge"])
        self.stack.load(state["stack"])
