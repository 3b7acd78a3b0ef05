"""Figures of a simulated run: counts while it runs, and the figures at its end.

Times are in seconds of the virtual clock, lengths in tokens, ages in learner steps. Knows nothing of events.
"""

from __future__ import annotations

from array import array
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np


@dataclass(frozen=True)
class StepRow:
    """An optimiser step; `time_s` is its end (its beginning until it ends)."""

    step: int
    time_s: float
    cause: str
    groups: int
    samples: int
    tokens: int


@dataclass
class Counts:
    """The counts of a run under way."""

    rows: list[StepRow] = field(default_factory=list)
    ages: Counter[int] = field(default_factory=Counter)
    aside: Counter[str] = field(default_factory=Counter)
    # Seconds of the learner, by the reason of its wait.
    waited: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    learner_busy_s: float = 0.0
    starved_s: float = 0.0  # of the scheduler: it could open groups, and no prompt had arrived
    generated: int = 0
    ended: int = 0  # samples with a reward
    queued: array[float] = field(default_factory=lambda: array("f"))  # dispatch (or arrival) until taken
    completed: array[float] = field(default_factory=lambda: array("f"))  # dispatch (or arrival) until rewarded
    grouped: array[float] = field(default_factory=lambda: array("f"))  # a group's opening until its last reward
    drawn: array[int] = field(default_factory=lambda: array("l"))  # lengths of all members of groups opened
    consumed: array[int] = field(default_factory=lambda: array("l"))  # of those trained


class Figures:
    """The figures of a run after `seconds`; shares are of that time. Its attributes are the keys of --json.

    `busy`, `stalled`: seconds of each actor; `decoded`: decoding steps of all; `reward_busy_s`: the mean of a worker of
    the reward; `metrics`: those of policy and predictor.
    """

    def __init__(
        self, counts: Counts, seconds: float, busy: Sequence[float], stalled: Sequence[float], decoded: int, *,
        reward_busy_s: float, metrics: Mapping[str, float],
    ) -> None:
        rows, span, shares = counts.rows, max(seconds, 1e-12), np.asarray(busy) / max(seconds, 1e-12)
        self.seconds = seconds
        self.steps = len(rows)
        self.samples_trained = sum(row.samples for row in rows)
        self.tokens_trained = sum(row.tokens for row in rows)
        self.samples_per_s = self.samples_trained / span
        self.tokens_per_s = self.tokens_trained / span
        self.generated_tokens_per_s = counts.generated / span
        self.step_s = (rows[-1].time_s - rows[0].time_s) / (len(rows) - 1) if len(rows) > 1 else span
        self.learner_busy = counts.learner_busy_s / span
        self.learner_waited = {reason: s / span for reason, s in counts.waited.items()}
        self.actors_busy = float(shares.mean())
        self.actors_busy_least = float(shares.min())
        self.actors_busy_most = float(shares.max())
        self.actors_stalled = float(np.mean(stalled)) / span
        self.rows_running = counts.generated / max(1, decoded)  # sequences that an actor runs while it is busy
        self.reward_busy = reward_busy_s / span
        self.starved = counts.starved_s / span  # more groups could be opened than prompts had arrived
        ages = np.repeat(list(counts.ages), list(counts.ages.values())) if counts.ages else np.zeros(1)
        self.ages = {int(age): counts.ages[age] / len(ages) for age in sorted(counts.ages)}  # share of the groups
        self.age_mean = float(ages.mean())
        self.age_max = int(ages.max())
        self.queued_p50_s, self.queued_p99_s = _at(counts.queued, 50), _at(counts.queued, 99)
        self.completion_mean_s, self.completion_p99_s = _mean(counts.completed), _at(counts.completed, 99)
        self.group_p50_s, self.group_p99_s = _at(counts.grouped, 50), _at(counts.grouped, 99)
        self.set_aside = dict(counts.aside)
        self.causes = dict(Counter(row.cause for row in rows))
        self.length_drawn, self.length_consumed = _mean(counts.drawn), _mean(counts.consumed)
        self.length_drawn_p95, self.length_consumed_p95 = _at(counts.drawn, 95), _at(counts.consumed, 95)
        self.tasks = counts.ended  # samples that got a reward
        self.told = dict(metrics)
        self.rows = tuple(rows)

    @property
    def skew(self) -> float:
        """Mean length consumed over mean length drawn: below 1, short answers are favoured."""
        return self.length_consumed / self.length_drawn if self.length_drawn else 1.0

    def to_json(self) -> dict[str, Any]:
        """Plain data without the rows, as --json prints it."""
        data = {name: value for name, value in vars(self).items() if name != "rows"}
        return {**data, "ages": {str(age): share for age, share in self.ages.items()}, "skew": self.skew}


def _at(values: Sequence[float], percent: float) -> float:
    return float(np.percentile(values, percent)) if len(values) else 0.0


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values)) if len(values) else 0.0
