"""Policy and predictor of a simulated run: made as the scheduler makes them, and told the same things.

The one place that knows how the live scheduler calls policies; what the scheduler role tells them about open groups and
finished answers is told here too. The oracle knows the lengths that the answers will have. Knows nothing of slots.

- A finished answer is told to the policy alone, which hands it on to the predictor.
- `adopt` is not needed: it is for groups that an earlier scheduler opened, and no scheduler dies here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from busrl.data.trace import Task
from busrl.errors import UserError
from busrl.scheduling.groups import GroupView
from busrl.scheduling.policy import Policy, make_policy
from busrl.scheduling.predictors import Candidate, Guard, Keywords, RulesPredictor, make_predictor
from busrl.scheduling.strength import LearnerState
from busrl.simulate.answers import Answers
from busrl.topology import Topology, keywords

CLOCKS = ("predictor_us_per_prompt", "predictor_us_per_answer")  # there is no clock here to measure them


class Feed:
    """Candidates in, candidates out; open groups, finished answers and learner states in between."""

    def __init__(self, topology: Topology, answers: Answers, oracle: bool) -> None:
        scheduler, derived = topology.scheduler, topology.derived
        self.answers, self.tokens, self.step = answers, topology.generation.max_new_tokens, 0
        words = keywords_of(scheduler.keywords)
        predictor = make_predictor(
            "oracle" if oracle else scheduler.predictor, keywords=words, lengths_of=self._lengths_of
        )
        self.guard = Guard(predictor, RulesPredictor(words))
        self.policy: Policy = make_policy(
            scheduler.policy, derived.horizon, self.guard, scheduler.aging,
            tail_share=scheduler.tail_share, window=derived.W, group_size=topology.groups.size,
            round_groups=topology.learner.trigger.n_min if topology.weights.mode == "sync" else 0,
        )  # fmt: skip
        self._draws, self._lengths = list[int](), list[int]()

    def _lengths_of(self, draw: int) -> Sequence[int]:
        return self.answers.answer(draw, self.step).lengths

    def candidate(self, draw: int, task: Task) -> Candidate:
        return Candidate(draw, task.prompt, self.tokens, task.tag)

    def finished(self, draw: int, tokens: int) -> None:
        """An answer is whole."""
        if self.policy.learns:
            self._draws.append(draw)
            self._lengths.append(tokens)

    def look(self, view: GroupView, rows: int) -> None:
        """The scheduler looks: what has finished since the last time, what is open, and how much actors can run."""
        if not self.policy.learns:
            return
        if self._draws:
            self.policy.finished(self._draws, self._lengths)
            self._draws, self._lengths = [], []
        self.policy.look(view.draws.tolist(), (view.running + view.due).tolist(), rows)
        self.policy.take_records()

    def learner(self, step: int, entropy: float) -> None:
        """A learner state."""
        self.step = step
        self.policy.feedback(LearnerState(step, entropy))

    def told(self) -> dict[str, float]:
        """What policy and predictor say of themselves; nothing under fifo."""
        if not self.policy.learns:
            return {}
        found = {**self.policy.told(), **self.guard.measures()}
        return {name: value for name, value in found.items() if math.isfinite(value) and name not in CLOCKS}


def keywords_of(path: str) -> Keywords | None:
    """The user's table of keywords; None for the shipped one. `UserError` for one that has a fault."""
    if not path:
        return None
    found, problems = keywords.read(path)
    if problems:
        raise UserError(f"{path}: {problems[0]}")
    return found
