"""The learner's side of the controller: measures its inputs, keeps its log and its probe set, and sets the trigger.

Talks to `busrl.predict.controller` (which decides), to the training step (which scores the probe) and to
`decisions.jsonl`. Knows nothing of how a decision comes about.

- One line per step: the inputs, and the decision if one was due. A line with step s replaces all earlier lines with a
  step >= s, as in the train log.
- A restart loads the state of the checkpoint, then observes the inputs of the lines after it, so it decides as before.
  A step that is in the train log but has no line (its learner was killed in between) is measured again in the replay,
  and its line is written then.
- Nothing here stops training: a full disk costs lines, and with them the history of a controller that is restarted.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

import msgspec

from busrl.errors import MachineError
from busrl.ledger.wal import Record, SampleRecord
from busrl.predict.controller import Controller, ControllerSettings, Inputs
from busrl.roles.learner.observers import FinishedStep, LearnerParts, StepObserver
from busrl.scheduling.trigger import LearnerPlan
from busrl.system.files import LineFile, json_lines
from busrl.topology import Topology

if TYPE_CHECKING:
    from busrl.roles.learner.step import TrainingStep
    from busrl.training.step_stats import StepStats

PROBE_FILE = "probe.bin"


def controller_settings(topology: Topology) -> ControllerSettings | None:
    """The settings of the controller; None where there is none (mode `off`)."""
    controller, trigger = topology.learner.controller, topology.learner.trigger
    if controller.mode == "off":
        return None
    low, high = topology.learner.n_range
    return ControllerSettings.of(
        controller, topology.experiments.controller, n_min=trigger.n_min, n_lo=low, n_hi=high,
        t_max_ms=1000 * trigger.t_max_s,
    )


class ControllerObserver(StepObserver):
    """The controller as an observer of steps. In mode `off` it has no controller, and every call does nothing."""

    def __init__(self, path: Path, topology: Topology, training: TrainingStep, plan: LearnerPlan) -> None:
        settings = controller_settings(topology)
        self.training, self.plan = training, plan
        self.controller = Controller(settings) if settings else None
        self.probe: list[SampleRecord] = []
        self.probe_s = 0.0
        self._probe_entropy: float | None = None
        self._logged = read_lines(path) if settings else {}
        self._lines = LineFile(path, keep=topology.log.keep) if settings else None

    # -- checkpoints and replay ---------------------------------------------------------------------------------

    def load(self, meta: Mapping[str, Any], folder: Path) -> None:
        """Continue from a checkpoint; start from the beginning if its state is of other rules."""
        if self.controller is None:
            return
        with contextlib.suppress(OSError, msgspec.DecodeError):
            self.probe = msgspec.msgpack.decode((folder / PROBE_FILE).read_bytes(), type=list[SampleRecord])
        state = meta.get("control")
        if isinstance(state, dict):
            self.controller.load(state)

    def meta(self) -> dict[str, Any]:
        return {} if self.controller is None else {"control": self.controller.state()}

    def save(self, folder: Path) -> None:
        if self.controller is not None:
            (folder / PROBE_FILE).write_bytes(msgspec.msgpack.encode(self.probe))

    def start(self) -> None:
        """Apply the decisions so far, after the replay."""
        self._logged = {}
        self._apply()

    def follow(self, plan: LearnerPlan) -> None:
        self.plan = plan

    # -- a step -------------------------------------------------------------------------------------------------

    def after(self, step: FinishedStep, row: Mapping[str, Any]) -> None:
        self._observe(step.record, step.stats, row)

    def replayed(self, record: Record, stats: StepStats) -> None:
        """Observe a step of the log that is trained again: without a row, but its logged inputs give the same decision.
        """
        self._observe(record, stats, {})

    def _observe(self, record: Record, stats: StepStats, row: Mapping[str, Any]) -> None:
        """Give the numbers of a step to the controller, and apply its decision before the next step."""
        if self.controller is None:
            return
        self._choose_probe(record)
        line = self._logged.get(record.step)
        inputs = Inputs.from_dict(line) if line else self._inputs(record, stats, row)
        decision = self.controller.observe(inputs)
        if line is None and self._lines is not None:
            text = {**inputs.to_dict(), "decision": decision.to_dict() if decision else None}
            with contextlib.suppress(MachineError, OSError):
                self._lines.append(msgspec.json.encode(text))
        if decision is not None and decision.applied:
            self._apply()

    def _apply(self) -> None:
        if self.controller is not None and self.controller.acts:
            knobs = self.controller.knobs
            self.plan.trigger.set(knobs.n_min, knobs.t_max_ms / 1000)

    # -- inputs -------------------------------------------------------------------------------------------------

    def _inputs(self, record: Record, stats: StepStats, row: Mapping[str, Any]) -> Inputs:
        """The inputs from the line of metrics.jsonl; in a replay, without a line, from the record and the training."""
        diagnostics = stats.diagnostics
        return Inputs.measured(
            record.step, len(record.groups),
            reward=row.get("reward", fmean(sample.reward for sample in record.samples)),
            probe=self._score(record.step), clip=diagnostics.clip_low + diagnostics.clip_high, ess=diagnostics.ess,
        )

    def _choose_probe(self, record: Record) -> None:
        """Take the first groups of the first step, each whole, until there are enough samples: the same set after any
        restart."""
        if self.probe or self.controller is None:
            return
        for sample in record.samples:
            new_group = not self.probe or sample.group != self.probe[-1].group
            if new_group and len(self.probe) >= self.controller.settings.probe_samples:
                return
            self.probe.append(sample)

    def _score(self, step: int) -> float | None:
        begun, due = time.perf_counter(), self.controller is not None and self.controller.probe_is_due(step)
        if due:
            self._probe_entropy = self.training.entropy(self.probe)
        self.probe_s = time.perf_counter() - begun if due else 0.0
        return self._probe_entropy if due else None

    def numbers(self) -> dict[str, float]:
        """The controller's state, and its cost: for metrics.jsonl and LEARNER_STATE_UPDATE."""
        if self.controller is None:
            return {}
        knobs, signals = self.controller.knobs, self.controller.signals
        numbers: dict[str, float] = {"control_n_min": knobs.n_min, "control_moves": self.controller.moves}
        numbers["probe_s"] = round(self.probe_s, 5)
        for name, value in (("entropy_ratio", signals.ratio), ("probe_entropy", self._probe_entropy)):
            if value is not None:
                numbers[name] = value
        return numbers

    def state(self) -> dict[str, float]:
        return self.numbers()

    def close(self) -> None:
        if self._lines is not None:
            self._lines.close()


def observers(parts: LearnerParts) -> list[StepObserver]:
    """The observers that this capability adds to a learner's."""
    return [ControllerObserver(parts.paths.decisions, parts.topology, parts.training, parts.plan)]


def read_lines(path: Path) -> dict[int, dict[str, Any]]:
    """The valid line of every step; damaged lines are skipped, as these lines are no ledger."""
    rows: list[tuple[int, dict[str, Any]]] = []
    for line in json_lines(path):
        step = line.get("step")
        if not isinstance(step, int):
            continue
        while rows and rows[-1][0] >= step:
            rows.pop()
        rows.append((step, line))
    return dict(rows)
