"""What a simulated run came to: counted while it runs, put together at the end.

Times are in seconds of the virtual clock, lengths in tokens, ages in learner steps. Knows nothing of why anything
happened.
"""

from __future__ import annotations

from array import array
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]


@dataclass
class StepRow:
    """One optimiser step; `time_s` is its end."""

    step: int
    time_s: float
    cause: str
    groups: int
    samples: int
    tokens: int
    ended: int
    age_mean: float
    age_max: int


@dataclass
class Counts:
    """Grows during a run."""

    rows: list[StepRow] = field(default_factory=list)
    ages: Counter[int] = field(default_factory=Counter)
    aside: Counter[str] = field(default_factory=Counter)
    # Seconds of the learner by what it waited for.
    waited: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    learner_busy_s: float = 0.0
    reward_busy_s: float = 0.0  # of a worker of the reward, on average
    starved_s: float = 0.0  # of the scheduler: it could open groups, and no prompt had arrived
    generated: int = 0
    ended: int = 0  # samples with a reward
    queued: array[float] = field(default_factory=lambda: array("f"))  # dispatch (or arrival) until taken
    completed: array[float] = field(default_factory=lambda: array("f"))  # dispatch (or arrival) until rewarded
    grouped: array[float] = field(default_factory=lambda: array("f"))  # a group's opening until its last reward
    drawn: array[int] = field(default_factory=lambda: array("l"))  # lengths of all members of groups opened
    consumed: array[int] = field(default_factory=lambda: array("l"))  # of those trained


@dataclass(frozen=True)
class Figures:
    """The answer to "how would this run go"; `to_json` is what --json prints."""

    seconds: float
    steps: int
    samples_trained: int
    tokens_trained: int
    samples_per_s: float
    tokens_per_s: float
    generated_tokens_per_s: float
    step_s: float
    learner_busy: float
    learner_waited: dict[str, float]  # shares of the time
    actors_busy: float
    actors_busy_least: float
    actors_busy_most: float
    actors_stalled: float
    rows_running: float  # sequences that an actor runs while it is busy
    reward_busy: float  # share of the time that a worker of the reward was at a call
    starved: float  # share of the time in which more prompts could be taken than had arrived
    ages: dict[int, float]  # shares of the trained groups
    age_mean: float
    age_max: int
    queued_p50_s: float
    queued_p99_s: float
    completion_mean_s: float
    completion_p99_s: float
    group_p50_s: float
    group_p99_s: float
    set_aside: dict[str, int]
    causes: dict[str, int]
    length_drawn: float
    length_consumed: float
    length_drawn_p95: float
    length_consumed_p95: float
    tasks: int  # samples that got a reward
    told: dict[str, float] = field(default_factory=dict)  # metrics of policy and predictor
    rows: tuple[StepRow, ...] = ()

    @property
    def skew(self) -> float:
        """Mean length consumed over mean length drawn: below 1, short answers are favoured."""
        return self.length_consumed / self.length_drawn if self.length_drawn else 1.0

    def to_json(self) -> dict[str, Any]:
        """Plain data without the rows."""
        found = {name: value for name, value in asdict(self).items() if name != "rows"}
        return {**found, "ages": {str(age): share for age, share in self.ages.items()}, "skew": self.skew}


def figures(
    counts: Counts, seconds: float, busy: Sequence[float], stalled: Sequence[float], decoded: int,
    told: Mapping[str, float],
) -> Figures:
    """Put together after `seconds`; `busy` and `stalled`: seconds of each actor, `decoded`: decoding steps of all."""
    rows, span = counts.rows, max(seconds, 1e-12)
    samples, tokens = sum(row.samples for row in rows), sum(row.tokens for row in rows)
    shares = np.asarray(busy) / span
    ages = np.repeat(list(counts.ages), list(counts.ages.values())) if counts.ages else np.zeros(1)
    drawn, consumed = np.asarray(counts.drawn), np.asarray(counts.consumed)
    return Figures(
        seconds=seconds,
        steps=len(rows),
        samples_trained=samples,
        tokens_trained=tokens,
        samples_per_s=samples / span,
        tokens_per_s=tokens / span,
        generated_tokens_per_s=counts.generated / span,
        step_s=(rows[-1].time_s - rows[0].time_s) / (len(rows) - 1) if len(rows) > 1 else span,
        learner_busy=counts.learner_busy_s / span,
        learner_waited={reason: s / span for reason, s in counts.waited.items()},
        actors_busy=float(shares.mean()),
        actors_busy_least=float(shares.min()),
        actors_busy_most=float(shares.max()),
        actors_stalled=float(np.mean(stalled)) / span,
        rows_running=counts.generated / max(1, decoded),
        reward_busy=counts.reward_busy_s / span,
        starved=counts.starved_s / span,
        ages={int(age): counts.ages[age] / len(ages) for age in sorted(counts.ages)},
        age_mean=float(ages.mean()),
        age_max=int(ages.max()),
        queued_p50_s=_at(counts.queued, 50),
        queued_p99_s=_at(counts.queued, 99),
        completion_mean_s=float(np.mean(counts.completed)) if counts.completed else 0.0,
        completion_p99_s=_at(counts.completed, 99),
        group_p50_s=_at(counts.grouped, 50),
        group_p99_s=_at(counts.grouped, 99),
        set_aside=dict(counts.aside),
        causes=dict(Counter(row.cause for row in rows)),
        length_drawn=_mean(drawn),
        length_consumed=_mean(consumed),
        length_drawn_p95=_at(drawn, 95),
        length_consumed_p95=_at(consumed, 95),
        tasks=counts.ended,
        told=dict(told),
        rows=tuple(rows),
    )


def _at(values: Sequence[float] | npt.NDArray[Any], percent: float) -> float:
    return float(np.percentile(values, percent)) if len(values) else 0.0


def _mean(values: npt.NDArray[Any]) -> float:
    return float(values.mean()) if len(values) else 0.0
