"""Observers of the steps of a learner: lengths, thresholds, parity, idling, alarms, and what optional parts of busrl
add (`step_observers` in the table of capabilities).

Made in one place (`Observers`) and called by the learner in that order. An observer gives numbers for the step's line
of metrics.jsonl and warnings; it may end the run, but never changes a step.

- `before` is called when the step's record is made, and nothing of it is committed yet.
- `after` is called when it is trained, published and written; `replayed` for a step of the log that is trained again.
- What an observer keeps over a restart goes into the checkpoints (`meta`, `save`) and comes back from them (`load`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy.typing as npt

from busrl import capabilities
from busrl.errors import CannotTrain
from busrl.ledger.wal import Record
from busrl.paths import RunPaths
from busrl.protocol import messages as m
from busrl.roles.learner.alarms import FLAT, QUARTERS, Alarms, Idling, LengthSkew
from busrl.roles.learner.metrics import StepMetrics
from busrl.roles.learner.parity import Parity, Verdict
from busrl.roles.learner.step import TrainingStep
from busrl.scheduling.groups import GroupView
from busrl.scheduling.trigger import LearnerPlan
from busrl.states import Fate
from busrl.topology import Topology
from busrl.training.custom import Metrics
from busrl.training.step_stats import StepStats

Warn = Callable[..., None]  # `Actor.warn`

# -- events and observers ------------------------------------------------------------


@dataclass(frozen=True)
class ComingStep:
    """A step that is about to be committed. `version`: that of the weights that are trained; None while they are not
    published, or published late."""

    record: Record
    view: GroupView
    version: int | None

    @property
    def number(self) -> int:
        return self.record.step


@dataclass(frozen=True)
class FinishedStep:
    """A step that is trained."""

    record: Record
    stats: StepStats
    version: int | None  # that of the weights that were trained, as in `ComingStep`

    @property
    def number(self) -> int:
        return self.record.step


@dataclass(frozen=True)
class RestingGroup:
    """A group that is about to be set aside. `lines`: those of its slots; `sample` gives an answer of it to show."""

    draw: int
    fate: str
    lines: npt.NDArray[Any]
    sample: Callable[[], dict[str, object]]


class StepObserver:
    """Methods that do nothing; an observer overrides those of its events."""

    def load(self, meta: Mapping[str, Any], folder: Path) -> None:
        """Continue from a checkpoint."""

    def replayed(self, record: Record, stats: StepStats) -> None:
        """A step of the log was trained again."""

    def start(self) -> None:
        """The whole log was trained again."""

    def follow(self, plan: LearnerPlan) -> None:
        """The topology was changed in flight, and `plan` is the new one."""

    def set_aside(self, group: RestingGroup) -> None:
        """A group ends without being trained."""

    def before(self, step: ComingStep) -> None:
        """A step is about to be made. CannotTrain if it must not be."""

    def numbers(self) -> Mapping[str, Any]:
        """Fields of the step's line of metrics.jsonl. Called once for each step, after `before`."""
        return {}

    def after(self, step: FinishedStep, row: Mapping[str, Any]) -> None:
        """The step is made, and `row` is its line of metrics.jsonl."""

    def state(self) -> Mapping[str, float]:
        """Numbers of LEARNER_STATE_UPDATE that hold from now on."""
        return {}

    def published(self, version: int) -> None:
        """The present weights are `version` from now on."""

    def meta(self) -> Mapping[str, Any]:
        """Fields of a checkpoint's meta."""
        return {}

    def save(self, folder: Path) -> None:
        """Write files into a checkpoint."""

    def close(self) -> None:
        """The learner ends."""


# -- observers of the core -----------------------------------------------------------


class SkewWatch(StepObserver):
    """Compares the lengths that are trained with those that were drawn; a warning when they begin to differ."""

    def __init__(self, skew: LengthSkew, warn: Warn) -> None:
        self.skew, self._warn = skew, warn
        self._figures: dict[str, Any] = {}

    def set_aside(self, group: RestingGroup) -> None:
        self.skew.ended(group.draw, group.lines["response_tokens"].tolist(), group.fate)

    def before(self, step: ComingStep) -> None:
        lengths: dict[int, list[int]] = {draw: [] for draw in step.record.groups}
        for sample in step.record.samples:
            lengths[sample.group].append(sample.tokens)
        for draw, trained in lengths.items():
            self.skew.ended(draw, trained, Fate.TRAINED.letter)
        self._figures = self.skew.step([*step.view.draws.tolist(), *step.view.unopened(1).tolist()])

    def numbers(self) -> Mapping[str, Any]:
        return self._figures

    def after(self, step: FinishedStep, row: Mapping[str, Any]) -> None:
        if text := self.skew.warning(self._figures):
            self._warn("learner", text, kind="length skew")


class Thresholds(StepObserver):
    """Gives the thresholds of the trigger, which a controller may move."""

    def __init__(self, plan: LearnerPlan) -> None:
        self._plan = plan

    def follow(self, plan: LearnerPlan) -> None:
        self._plan = plan

    def numbers(self) -> Mapping[str, Any]:
        return self.state()

    def state(self) -> Mapping[str, float]:
        trigger = self._plan.trigger
        timed = {"t_max_ms": 1000 * trigger.t_max_s} if math.isfinite(trigger.t_max_s) else {}
        return {"n_min": trigger.n_min, **timed}


class ParityWatch(StepObserver):
    """Calls the parity gate for each step and each version."""

    def __init__(self, gate: Parity, warn: Warn) -> None:
        self.gate, self._warn = gate, warn

    def warn_of(self, verdicts: Iterable[Verdict]) -> None:
        """Warn of what differs."""
        for verdict in verdicts:
            self._warn("learner", verdict.text, kind=f"parity {verdict.cause}")

    def before(self, step: ComingStep) -> None:
        if step.version is None:
            return
        if verdict := self.gate.first(step.record.samples, step.version, step.number - 1):
            self.warn_of([verdict])
        self.gate.before_update(step.version)

    def numbers(self) -> Mapping[str, Any]:
        return self.gate.numbers()

    def after(self, step: FinishedStep, row: Mapping[str, Any]) -> None:
        diagnostics = step.stats.diagnostics
        if step.version is not None and (
            text := self.gate.trained(step.number - 1, step.version, diagnostics.mismatch, diagnostics.mismatch_begun)
        ):
            self._warn("learner", text, kind="mismatch")

    def published(self, version: int) -> None:
        self.gate.published(version)


class IdleWatch(StepObserver):
    """Ends a run that trains nothing: as finished where the task is solved (`solved`), else by CannotTrain."""

    def __init__(self, idling: Idling, metrics: StepMetrics, topology: Topology, warn: Warn) -> None:
        self.idling, self._metrics, self._last_step, self._warn = idling, metrics, topology.run.max_steps, warn
        self.solved = self._noted = False
        # Of several models that which has nothing left to learn ends alone.
        self._what = f"the training of {topology.tag}" if topology.tag else "the run"

    def set_aside(self, group: RestingGroup) -> None:
        self.idling.set_aside(group.lines, group.fate, group.sample, group.draw)

    def after(self, step: FinishedStep, row: Mapping[str, Any]) -> None:
        self.idling.add_rewards([sample.reward for sample in step.record.samples])
        self.idling.end_streak()

    def look(self, view: GroupView, asides: Sequence[int], step: int, version: int) -> None:
        """Count the groups of a view, after `step` steps; `asides` are just being dropped.

        While groups end but none can be trained: write a line of metrics.jsonl at each quarter of the patience, warn
        at the first (at the third if the task looks solved), and end the run at the last.
        """
        self.idling.look(view, asides)
        if not (quarters := self.idling.quarters()):
            return
        idling, text = self.idling, self.idling.text(step)
        self._metrics.idle(step, version, idling)
        solved, ends = idling.solved and step > 0, QUARTERS in quarters
        if solved and ends:
            self._warn("learner", f"{self._what} ends here: {text}", kind="solved")
            self.solved = True
        elif idling.learnt and not ends:  # a nearly solved task has short streaks all the time
            if 3 in quarters:
                self.note_learnt(step)
        elif (3 if solved else 1) in quarters:
            self._warn("learner", f"{text}. The run ends after {idling.patience} (limits.idle_groups)", kind="idle")
        if ends and not solved:
            raise CannotTrain(f"nothing to train (limits.idle_groups = {idling.limit}): {text}")

    def note_learnt(self, step: int) -> None:
        """Report once that the task is learnt, with advice for the rest of the run."""
        if not self._noted:
            self._noted = True
            self._warn("learner", self.idling.learnt_text(step, self._last_step), m.NOTE, kind="learnt")


class AlarmWatch(StepObserver):
    """Warns of what the newest steps show, of the user's functions that fail, and of steps that changed nothing."""

    def __init__(self, alarms: Alarms | None, user_metrics: Metrics, idle: IdleWatch, warn: Warn) -> None:
        """`alarms`: None where answers come from a script."""
        self._alarms, self._user_metrics, self._idle, self._warn = alarms, user_metrics, idle, warn

    def after(self, step: FinishedStep, row: Mapping[str, Any]) -> None:
        for text in self._user_metrics.failures:
            self._warn("learner", f"step {step.number}: {text}", kind=text[:60])
        for name, text in {} if self._alarms is None else self._alarms.step(row).items():
            if name == FLAT and self._idle.idling.learnt:
                self._idle.note_learnt(step.number)
            else:
                self._warn("learner", text, kind=f"alarm {name}")
        if (stats := step.stats).skipped:
            what = "left out a part of its updates" if stats.partly else "changed nothing"
            culprits = ", ".join(stats.culprits)
            self._warn("learner", f"step {step.number} {what}: {stats.skipped} ({culprits})", "error")


# -- all observers -------------------------------------------------------------------


@dataclass(frozen=True)
class LearnerParts:
    """Parts of a learner from which optional parts of busrl make their observers."""

    topology: Topology
    paths: RunPaths
    training: TrainingStep
    plan: LearnerPlan
    warn: Warn


class Observers:
    """All observers of a learner, in the order in which they are called."""

    def __init__(self, parts: LearnerParts, metrics: StepMetrics, user_metrics: Metrics) -> None:
        topology, config, warn = parts.topology, parts.topology.learner, parts.warn
        idling = Idling(topology, parts.paths)
        self.idle = IdleWatch(idling, metrics, topology, warn)
        self.parity = ParityWatch(Parity(topology, parts.training.models), warn)
        optional: list[StepObserver] = [
            observer for plug in capabilities.plugs("step_observers") for observer in plug(parts)
        ]
        self.all: list[StepObserver] = [
            SkewWatch(LengthSkew(config.length_alarm_steps, config.length_alarm), warn),
            Thresholds(parts.plan), *optional, self.parity, self.idle,
            AlarmWatch(None if topology.scripted else Alarms(config.ess_alarm), user_metrics, self.idle, warn),
        ]

    def load(self, meta: Mapping[str, Any], folder: Path) -> None:
        for observer in self.all:
            observer.load(meta, folder)

    def replayed(self, record: Record, stats: StepStats) -> None:
        for observer in self.all:
            observer.replayed(record, stats)

    def start(self) -> None:
        for observer in self.all:
            observer.start()

    def follow(self, plan: LearnerPlan) -> None:
        for observer in self.all:
            observer.follow(plan)

    def set_aside(self, group: RestingGroup) -> None:
        for observer in self.all:
            observer.set_aside(group)

    def before(self, step: ComingStep) -> None:
        for observer in self.all:
            observer.before(step)

    def numbers(self) -> dict[str, Any]:
        return {name: value for observer in self.all for name, value in observer.numbers().items()}

    def after(self, step: FinishedStep, row: Mapping[str, Any]) -> None:
        for observer in self.all:
            observer.after(step, row)

    def state(self) -> dict[str, float]:
        return {name: value for observer in self.all for name, value in observer.state().items()}

    def published(self, version: int) -> None:
        for observer in self.all:
            observer.published(version)

    def meta(self) -> dict[str, Any]:
        return {name: value for observer in self.all for name, value in observer.meta().items()}

    def save(self, folder: Path) -> None:
        for observer in self.all:
            observer.save(folder)

    def close(self) -> None:
        for observer in self.all:
            observer.close()
