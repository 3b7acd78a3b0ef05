"""Policy and predictor of a simulated run: made as the scheduler makes them, and told the same things.

The one place that knows how the live scheduler calls policies; what the scheduler role tells them about finished
answers is told here too. The oracle, which knows every length, exists only here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from busrl.data.trace import Task
from busrl.scheduling.groups import GroupView, slot_priority
from busrl.scheduling.policy import make_policy
from busrl.scheduling.predictors import Candidate
from busrl.scheduling.predictors.base import Floats
from busrl.scheduling.strength import LearnerState
from busrl.simulate.answers import Answers
from busrl.topology import Topology


class Oracle:
    """Predicts the mean length that the answers to a prompt will have."""

    name = "oracle"

    def __init__(self, answers: Answers) -> None:
        self.answers, self.step = answers, 0

    def predict(self, candidates: Sequence[Candidate]) -> Floats:
        found = [np.mean(self.answers.answer(c.draw, self.step).lengths) for c in candidates]
        return np.array(found, np.float64)

    def observe(self, finished: Sequence[tuple[Candidate, int]]) -> None:
        """It knows already."""

    def state(self) -> dict[str, Any]:
        return {}

    def load(self, state: dict[str, Any]) -> None:
        """Nothing is kept."""


class Feed:
    """Candidates in, candidates out, finished answers and learner states in between."""

    def __init__(self, topology: Topology, answers: Answers, oracle: bool) -> None:
        scheduler = topology.scheduler
        self.policy = make_policy(
            scheduler.policy, topology.derived.horizon, scheduler.predictor, scheduler.aging
        )
        self.answers, self.tokens = answers, topology.generation.max_new_tokens
        self.oracle = Oracle(answers) if oracle else None
        if self.oracle and hasattr(self.policy, "predictor"):
            self.policy.predictor = self.oracle
        predictor = getattr(self.policy, "predictor", None)
        self._observes = predictor is not None and predictor.name not in ("rules", "oracle")
        self._predictor, self._finished = predictor, list[tuple[Candidate, int]]()
        self._tells = getattr(self.policy, "finished", None)

    def candidate(self, draw: int, task: Task) -> Candidate:
        return Candidate(draw, task.prompt, self.tokens)

    def priority(self, draw: int, admission: int) -> int:
        """Of the slots of a group."""
        return slot_priority(admission)

    def finished(self, candidate: Candidate, member: int, tokens: int) -> None:
        """An answer got its reward."""
        if self._observes:
            self._finished.append((candidate, tokens))
        if self._tells is not None:
            self._tells(candidate.draw, member, tokens)

    def look(self, view: GroupView, rows: int) -> None:
        """The scheduler looks: what has finished since the last time goes to the predictor, in one call.

        `view`: the open groups; `rows`: of all actors. For policies that want to know what is under way.
        """
        if self._finished and self._predictor is not None:
            self._predictor.observe(self._finished)
            self._finished = []

    def learner(self, step: int, entropy: float) -> None:
        if self.oracle:
            self.oracle.step = step
        self.policy.feedback(LearnerState(step, entropy))
