"""`learned`: a ranking of prompts by their text, from a linear model of hashed features that is fitted as answers come.

Talks to `ridge` and `features`. Knows nothing of siblings. Chosen by measurement against scikit-learn's online linear
models and LightGBM (docs/predictors.md): it ranks better, learns sooner, and needs no dependency.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from busrl.scheduling.predictors.base import Candidate, Floats
from busrl.scheduling.predictors.features import Features, features
from busrl.scheduling.predictors.learning import Fresh, Learning
from busrl.scheduling.predictors.ridge import BITS, Ridge


class LearnedPredictor(Learning):
    """Length from the text alone."""

    name = "learned"

    def __init__(self) -> None:
        super().__init__()
        self.ridge = Ridge()

    def _expect(self, candidates: Sequence[Candidate]) -> Floats:
        if not len(self.ridge):
            return np.full(len(candidates), self.level.typical)
        return self.ridge.predict(features(candidates, BITS))

    def _answer(self, candidate: Candidate, value: float) -> bool:
        return self.ridge.update(candidate.draw, value)

    def _learn(self, fresh: Sequence[Fresh]) -> None:
        add_to(self.ridge, fresh, features([one.candidate for one in fresh], BITS))

    def _state(self) -> dict[str, Any]:
        return {"ridge": self.ridge.state()}

    def _load(self, state: Mapping[str, Any]) -> None:
        self.ridge.load(state["ridge"])


def add_to(ridge: Ridge, fresh: Sequence[Fresh], f: Features) -> None:
    """Rows of new prompts, `f` their features."""
    ridge.add(
        [one.candidate.draw for one in fresh],
        f,
        np.array([one.mean for one in fresh]),
        np.array([one.answers for one in fresh], np.float64),
    )
