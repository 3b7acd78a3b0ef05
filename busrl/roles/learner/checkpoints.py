"""Decides when a learner's checkpoints are begun, and when they count: by the schedule, as people ask, and before
history ends.

Talks to the history, which writes them, to the models and the observers, whose state goes into them, and to the process
(deadlines, warnings). Knows nothing of the files of a checkpoint.

- A checkpoint that cannot be written costs nothing but time: the log is kept.
- A checkpoint is refused if the weights were lost while they were written.
"""

from __future__ import annotations

import time
from pathlib import Path

from busrl.errors import DiskFull, WriteFailed
from busrl.ledger.controls import Controls
from busrl.ledger.trained import newest_checkpoint, step_of
from busrl.roles.actor import Actor, WorkDeadline
from busrl.roles.learner.history import History
from busrl.roles.learner.metrics import StepMetrics
from busrl.roles.learner.observers import Observers
from busrl.roles.learner.publish import Publisher
from busrl.roles.learner.step import TrainingStep


class Checkpoints:
    """The checkpoints of a learner."""

    def __init__(
        self, actor: Actor, history: History, training: TrainingStep, publisher: Publisher, observers: Observers,
        metrics: StepMetrics, deadline: WorkDeadline,
    ) -> None:
        self._actor, self._history, self._training, self._publisher = actor, history, training, publisher
        self._observers, self._metrics, self._deadline = observers, metrics, deadline

    def as_asked(self) -> None:
        """Write the checkpoint that was asked for last, unless there is one of that step or of a later one."""
        self.hold(Controls.read(self._actor.paths).checkpoint)

    def hold(self, step: int) -> None:
        """Write a checkpoint now, unless there is one of `step` or of a later one."""
        newest = newest_checkpoint(self._actor.paths)
        if step and (newest is None or step_of(newest) < step) and not self._actor.stopping:
            self.write(wait=True)

    def write(self, wait: bool = False) -> None:
        """Begin one, or write it whole (`wait`); a warning where that cannot be done."""
        try:
            self._write(wait)
        except (DiskFull, WriteFailed) as problem:
            self._warn(f"no checkpoint at step {self._history.step}, the log is kept: {problem}")

    def write_or_wait(self, what: str) -> bool:
        """Write one whole, and wait while the disk is full; False if stopped meanwhile. `what` waits."""
        return self._actor.write_or_wait(what, lambda: self._write(wait=True))

    def _write(self, wait: bool) -> None:
        topology, begun = self._actor.topology, time.monotonic()
        self._deadline.begin()  # whatever was waited for before
        with self._actor.activity("checkpoint", topology.limits.work_s):
            self._history.checkpoint(
                self._training, self._publisher.version, self._observers.meta(), self._save_observers)
            if wait or not topology.learner.saves_meanwhile(topology.ranks):
                self._history.commit()
            self._metrics.checkpoint_took(time.monotonic() - begun)

    def _save_observers(self, directory: Path) -> None:
        """The last files of a checkpoint, which is refused if the weights were lost while they were written."""
        self._observers.save(directory)
        self._publisher.sender.check()

    def commit(self) -> None:
        """Count one that was begun, if all of it is on disk by now."""
        try:
            self._history.commit(wait=False)
        except (DiskFull, WriteFailed) as problem:
            self._warn(f"a checkpoint was lost while it was written, the log is kept: {problem}")

    def history_stands(self) -> bool:
        """Look whether log and checkpoint are still on the disk; else write one before a restart would need them. False
        if stopped meanwhile."""
        self._history.report(self._actor.warn)
        if not (fault := self._history.fault()):
            return True
        self._actor.warn(
            "learner", f"{fault}; a checkpoint is written at once, so nothing is lost", "error", kind="history")
        return self.write_or_wait("training")

    def _warn(self, text: str) -> None:
        self._actor.warn("learner", text, "error")
