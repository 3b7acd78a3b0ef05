"""Steps that are trained again from a log without routes: by the learner's own choice of experts, which is said.

An observer of the learner's steps in a run with routes. Knows nothing of how a step is made, or of the log's files.

- Only a log written with `learner.log_routes = "off"`, or "auto" with large steps, lacks them; a checkpoint bounds how
  many steps that can be.
"""

from __future__ import annotations

from busrl.ledger.wal import Record
from busrl.roles.learner.observers import LearnerParts, StepObserver, Warn
from busrl.training.step_stats import StepStats


class OwnRoutes(StepObserver):
    """Says so in one line after the restart; the steps' own lines count their tokens."""

    def __init__(self, warn: Warn) -> None:
        self._warn, self._tokens, self._steps = warn, 0, list[int]()

    def replayed(self, record: Record, stats: StepStats) -> None:
        left_out = [sample.tokens for sample in record.samples if sample.routes_shape and not sample.routes]
        if left_out:
            self._tokens += sum(left_out)
            self._steps.append(record.step)

    def start(self) -> None:
        if self._steps:
            text = (
                f"{self._tokens} tokens of steps {self._steps[0]} to {self._steps[-1]} were trained again with the "
                'experts that the learner chose: the log keeps no others (learner.log_routes = "on" keeps them)'
            )
            self._warn("learner", text, kind="own routes")


def observers(parts: LearnerParts) -> list[StepObserver]:
    """The observer of a run with routes."""
    return [OwnRoutes(parts.warn)] if parts.topology.derived.routing is not None else []
