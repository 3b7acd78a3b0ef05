"""The learner's history on disk: newest checkpoint, write-ahead log after it, train log, and the set of trained uids.

`History` keeps these files, through `busrl.ledger` and `busrl.training.checkpoint`, and the fate table; it knows
nothing of slots, gradients or the trigger. `Checkpoints` decides when a checkpoint is begun and when it counts: by the
schedule, as people ask, and before history ends. It talks to the models and the observers, whose state goes into a
checkpoint, and to the process (deadlines, warnings).

- Surviving history = checkpoint + log records after it; `trained` holds exactly the uids of both.
- A checkpoint in shards is begun after one step and committed after a later one. Until then a restart begins with the
  checkpoint before, and the log has all later steps.
- A record is dropped from the log only after two checkpoints that hold its uids are whole on disk (one with
  `keep_last = 1`): if the newest one is damaged, the one before and the log lead to the same step.
- A start is refused if steps are missing between checkpoint and log: no record is trained on other weights than its
  own.
- A failed checkpoint costs nothing but time: the log is kept. A checkpoint is refused if the weights were lost while
  they were written.
- `highest_version` is at least every version that was published in this history.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import shutil
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from busrl import capabilities
from busrl.data import training_stream
from busrl.errors import CannotTrain, DiskFull, RankFailed, UserError, WriteFailed
from busrl.ledger import trained
from busrl.ledger.controls import Controls
from busrl.ledger.trained import TrainLine, last_step
from busrl.ledger.wal import Record, Wal
from busrl.paths import CHECKPOINT, RunPaths
from busrl.ring import Fates
from busrl.states import Fate, draw_of, place_of
from busrl.system.files import LineFile, as_map, json_lines, replace
from busrl.topology import Topology
from busrl.topology.sizes import logs_routes

if TYPE_CHECKING:
    from busrl.roles.actor import Actor, WorkDeadline
    from busrl.roles.learner.metrics import StepMetrics
    from busrl.roles.learner.observers import Observers
    from busrl.roles.learner.publish import Publisher
    from busrl.roles.learner.step import TrainingStep
    from busrl.training.checkpoint import Pending


log = logging.getLogger("busrl")
LOG_REACHES = 2  # checkpoints that the log leads on from
TORN = "torn-"


class History:
    """The steps that were trained, and the files that prove it. `step` counts optimiser steps, `groups` groups trained.
    """

    def __init__(self, paths: RunPaths, topology: Topology) -> None:
        self.paths, self.topology = paths, topology
        mode = topology.learner.wal
        newest = trained.newest_checkpoint(paths)
        superseded = trained.step_of(newest) if newest is not None else -1
        # The log of an earlier start is trained first, then given up (`leave_log`).
        logs = mode != "off" or any(paths.wal.glob("*.wal"))
        keep = logs_routes(topology)
        self.wal = Wal(paths.wal, sync=mode == "sync", superseded=superseded, routes=keep) if logs else None
        if self.wal is not None and (cut := self.wal.cut_bytes):
            log.info("the log ended in half a record, which was never committed: %d bytes cut off", cut)
        self.train_log = LineFile(paths.train_log)
        self.trained = trained.TrainedSet()
        self.warnings: list[str] = []  # of the start
        self._train_log_bytes = 0  # up to the newest checkpoint
        self._unwritten: list[Record] = []
        self._saved: Path | None = None  # the checkpoint that a restart would begin with
        self._pending: Pending | None = None  # the checkpoint that is being written
        self.step = self.groups = self.highest_version = self._begun_at = 0

    # -- start --------------------------------------------------------------------------------------------------

    def load(self, training: TrainingStep, also: Callable[[Mapping[str, Any], Path], None]) -> None:
        """Continue from the newest whole checkpoint, if there is one; `also` gets its meta and its folder. CannotTrain
        if the ranks of a predecessor failed twice with the same samples."""
        if ends := next(iter(json_lines(self.paths.failed_work)), {}).get("ends"):
            raise CannotTrain(ends)
        if mended := trained.mend_trained_set(self.paths):
            log.warning(mended)
        torn: dict[Path, str] = {}
        newest = training.load_checkpoint(self.paths.checkpoints, torn)
        self._pass_over(torn, newest.step if newest is not None else 0)
        if newest is not None:
            self.trained = trained.TrainedSet.load(newest.path / "trained.bin")
            self._saved = newest.path
            self.step, self.groups = newest.step, int(newest.meta["groups"])
            self.highest_version = int(newest.meta["version"])
            self._train_log_bytes = int(newest.meta.get("train_log_bytes", 0))
            if not trained.train_log_is_whole(self.paths.train_log, self._train_log_bytes):
                self._mend_train_log()
            training.stale.steps.load(newest.meta.get("version_steps", []))
            also(newest.meta, newest.path)
        elif elsewhere := self.topology.learner.start_from:
            training.models.start_from(Path(elsewhere), self.topology.learner.start_optimizer)
        if self.wal is not None:
            # A record holds the newest version at its time; its own step may have been published as the one after.
            self.highest_version = max(self.highest_version, self.wal.last_version + 1)

    def _pass_over(self, torn: Mapping[Path, str], start: int) -> None:
        """Rename damaged checkpoints. UserError if a step between `start` and the newest one is missing."""
        if self.wal is not None:
            newest = max([self.wal.last_step, *(trained.step_of(path) for path in torn)])
            if missing := sorted({*range(start + 1, newest + 1)} - {*self.wal.steps()}):
                raise _history_torn(self.paths, torn, self.wal.damage, start, missing)
            self.warnings += [f"{text}. A checkpoint has made them superfluous" for text in self.wal.damage]
            lined = last_step(self.paths.train_log)
            if lined > max(newest, start) and not _began_the_log(self.paths):
                self.warnings.append(
                    f"{self.paths.train_log.name} names steps up to {lined}, but checkpoint and log end at step "
                    f"{max(newest, start)}: the end of the log was lost; training continues from there, and `busrl "
                    "audit` names the samples of the steps after it as trained_unlogged"
                )
        for path, fault in torn.items():
            target = path.with_name(f"{TORN}{path.name}")
            names = itertools.chain([target], (target.with_name(f"{target.name}-{k}") for k in itertools.count(2)))
            aside = next(name for name in names if not name.exists())
            path.rename(aside)
            gone = (
                f"the steps after {start} are trained again from the log, nothing is lost"
                if self.wal is not None
                else f'the steps after {start} are lost with it (learner.wal = "off")'
            )
            self.warnings.append(
                f"{path.name} is damaged ({fault}) and is kept as {aside.name}; training continues from step {start}: "
                f"{gone}"
            )

    def _mend_train_log(self) -> None:
        """Write missing lines of the train log. Rare, and it reads the whole file: the prompts are opened for it
        alone."""
        size, seats = self.topology.groups.size, len(self.topology.seats)
        records = self.wal.records() if self.wal is not None else ()
        with training_stream(self.topology) as stream:
            self.warnings.append(
                trained.mend_train_log(
                    self.paths.train_log, self.step, self.trained, records,
                    lambda uid: stream.item(draw_of(place_of(uid, size)[0], seats)).crc, self._train_log_bytes,
                )
            )
        self.train_log.close()
        self.train_log = LineFile(self.paths.train_log)

    def to_replay(self) -> Iterator[Record]:
        """Records after the checkpoint, in order; call `finished` for each once it is trained."""
        yield from () if self.wal is None else self.wal.records(after=self.step)

    @property
    def leaves_log(self) -> bool:
        """True if there is a log of an earlier start, and learner.wal = "off" now."""
        return self.wal is not None and self.topology.learner.wal == "off"

    def leave_log(self) -> None:
        """Remove this log once a checkpoint holds all of its steps: later steps would contradict it."""
        if self.wal is not None and self.leaves_log and (not self.step or self._reaches(self.step)):
            self.wal.close()
            self.wal = None
            shutil.rmtree(self.paths.wal, ignore_errors=True)

    def _reaches(self, step: int) -> bool:
        return self._saved is not None and trained.step_of(self._saved) >= step

    def store_fates(self, fates: Fates) -> None:
        """Store fate T for every trained uid: the predecessor may have died before it did."""
        for uids in self.trained.blocks():
            codes = np.zeros(uids.size, np.uint8)
            stored = fates.view()  # for each block again: a store may make it longer
            inside = uids < len(stored)
            codes[inside] = stored[uids[inside]]
            for uid in uids[codes != Fate.TRAINED].tolist():
                fates.store(uid, Fate.TRAINED)

    # -- a step -------------------------------------------------------------------------------------------------

    def append(self, record: Record) -> None:
        """The commit point of a step. Raises DiskFull with nothing committed."""
        self._write_lines()
        if self.wal is not None:
            self.wal.append(record)

    def finished(self, record: Record) -> None:
        """Count a trained record and write its line of the train log, now or once the disk has room."""
        self.trained.add([sample.uid for sample in record.samples])
        self.step = record.step
        self.groups += len(record.groups)
        self._unwritten.append(record)
        with contextlib.suppress(DiskFull):
            self._write_lines()

    def fault(self) -> str:
        """The damage that another program did to log or checkpoint, after which a restart would not come back here;
        mostly ""."""
        if self._saved is not None and not (self._saved / "meta.json").is_file():
            return f"{self._saved} was removed or emptied by another program"
        fault = self.wal.fault() if self.wal is not None else ""
        return fault and f"{fault}: another program changed it"

    def _write_lines(self) -> None:
        """Write lines of the train log that a full disk refused; no later step or checkpoint comes before them."""
        while self._unwritten:
            self.train_log.append(msgspec.json.encode(TrainLine.of(self._unwritten[0])))
            del self._unwritten[0]
        if self.train_log.shortened:
            self._mend_train_log()

    def checkpoint(
        self, training: TrainingStep, version: int, also: Mapping[str, Any], save: Callable[[Path], None]
    ) -> None:
        """Write a checkpoint, or begin to: `commit` then has to be called. One that is being written is waited for.

        `also` is added to its meta, `save` writes further files into its folder.
        """
        if self._pending is not None and not self._pending.ready():
            log.info("the checkpoint of step %d waits for that of step %d", self.step, self._begun_at)
        self.commit()
        meta = {
            "version": version,
            "groups": self.groups,
            "samples": len(self.trained),
            "seed": self.topology.run.seed,
            "uids": "trained.bin",
            "train_log_bytes": 0,
            "version_steps": training.stale.steps.state(),
            **({"reward_means": means} if (means := training.advantages.earlier.state()) else {}),
            **also,
        }

        if not self.paths.root.is_dir():
            raise WriteFailed(f"{self.paths.root} is not there any more: nothing is written in its place")

        def extras(directory: Path) -> None:
            self.trained.save(directory / "trained.bin")
            for copy_into in capabilities.plugs("checkpoint_files"):
                copy_into(directory, self.paths)
            save(directory)

        self._write_lines()
        self.train_log.flush()
        meta["train_log_bytes"] = self._train_log_bytes = self.paths.train_log.stat().st_size
        if self.wal is not None:
            self.wal.end_segment()
        self._pending = training.models.begin_checkpoint(self.paths.checkpoints, self.step, meta, extras)
        self._begun_at = self.step
        if self._pending is None:
            self._committed()

    def commit(self, wait: bool = True) -> bool:
        """Commit the checkpoint that was begun, and drop the records that it makes superfluous; without `wait` only if
        all of it is on disk. False if there is none. DiskFull or WriteFailed: nothing is left of it."""
        pending = self._pending
        if pending is None or not (wait or pending.ready()):
            return False
        self._pending = None
        pending.commit(self.topology.limits.work_s)
        self._committed()
        return True

    def _committed(self) -> None:
        self._saved = self.paths.checkpoints / f"{CHECKPOINT}{self._begun_at}"
        if self.wal is None:
            return
        if not self.wal.fault():
            self.wal.drop_before(self._log_begins() + 1)
        elif self._begun_at == self.step:  # later records exist nowhere else: the next step begins with `fault`
            self.wal.renew()

    def _log_begins(self) -> int:
        """The step of the checkpoint at which the log begins; 0 while there are too few checkpoints."""
        reaches = min(LOG_REACHES, self.topology.learner.keep_last)
        checkpoints = trained.checkpoints_of(self.paths.checkpoints)
        return trained.step_of(checkpoints[reaches - 1]) if len(checkpoints) >= reaches else 0

    def report(self, warn: Callable[..., None]) -> None:
        """Give the warnings of the start, once."""
        for text in self.warnings:
            warn("learner", text, "error", kind=text)
        self.warnings.clear()

    @contextlib.contextmanager
    def blames(self) -> Iterator[None]:
        """Note the samples with which the ranks fail; the second failure with a sample ends the run with its name."""
        try:
            yield
        except RankFailed as problem:
            self.failed(problem)
            raise

    def failed(self, problem: RankFailed) -> None:
        """Write down the samples with which a rank failed, for the next life. CannotTrain if one failed before with
        some of them: it would fail again. That is written too: this process may be ended before it reports."""
        if not problem.uids:  # no sample is suspect, and earlier suspects remain
            return
        before = next(iter(json_lines(self.paths.failed_work)), {})
        ends = ""
        if again := sorted({*problem.uids} & {*before.get("uids", ())}):
            some = ", ".join(map(str, again[:8])) + (", ..." if len(again) > 8 else "")
            ends = (
                f"the ranks of the learner failed twice with samples {some}: {problem} (before: {before.get('text')}). "
                "Look at these samples (busrl ring inspect RUN_DIR --uid N), at learner.micro_batch_tokens and at the "
                f"memory of the rank; to try again, remove {self.paths.failed_work} and start the run again"
            )
        text = msgspec.json.encode({"uids": list(problem.uids), "text": str(problem), "ends": ends})
        with contextlib.suppress(DiskFull, WriteFailed):
            replace(self.paths.failed_work, text + b"\n")
        if ends:
            raise CannotTrain(ends) from problem

    def close(self) -> None:
        if self._pending is not None:
            self._pending.leave()
        if self.wal is not None:
            self.wal.close()
        self.train_log.close()


def _began_the_log(paths: RunPaths) -> bool:
    """True if the newest start keeps a log and those before kept none, so steps that no checkpoint holds are lost."""
    last = next(iter(deque(json_lines(paths.starts), maxlen=1)), {})
    return as_map(as_map(last.get("changes")).get("learner.wal")).get("was") == "off"


def _history_torn(
    paths: RunPaths, torn: Mapping[Path, str], damage: list[str], start: int, missing: list[int]
) -> UserError:
    """The error of a start with missing steps: why training cannot continue, and the two ways out."""
    why = "; ".join([*(f"{path.name} is damaged: {fault}" for path, fault in torn.items()), *damage])
    which = f"step {missing[0]}" if len(missing) == 1 else f"{len(missing)} steps from {missing[0]} to {missing[-1]}"
    names = ", ".join([*(str(path) for path in torn), str(paths.wal)])
    base = f"the checkpoint of step {start}" if start else "the model that the run began with"
    return UserError(
        f"{paths.root}: {which} cannot be restored: no whole checkpoint holds them, and they are not in the log"
        f"{f' ({why})' if why else ''}. Restore what was damaged or removed from a copy and start again; or move "
        f"{names} out of the run directory: the run then continues from {base}, and `busrl audit` names the "
        "samples of all steps after it as trained_unlogged"
    )


# -- when checkpoints are written -----------------------------------------------------


class Checkpoints:
    """Begins the checkpoints of a learner, and commits them."""

    def __init__(
        self, actor: Actor, history: History, training: TrainingStep, publisher: Publisher, observers: Observers,
        metrics: StepMetrics, deadline: WorkDeadline,
    ) -> None:
        self._actor, self._history, self._training, self._publisher = actor, history, training, publisher
        self._observers, self._metrics, self._deadline = observers, metrics, deadline

    def as_asked(self) -> None:
        """Write the checkpoint that people asked for last, unless there is one of that step or of a later one."""
        self.hold(Controls.read(self._actor.paths).checkpoints.get(self._actor.topology.tag, 0))

    def hold(self, step: int) -> None:
        """Write a checkpoint now, unless there is one of `step` or of a later one."""
        newest = trained.newest_checkpoint(self._actor.paths)
        if step and (newest is None or trained.step_of(newest) < step) and not self._actor.stopping:
            self.write(wait=True)

    def write(self, wait: bool = False) -> None:
        """Begin a checkpoint, or write it whole (`wait`); a failure is a warning."""
        try:
            self._write(wait)
        except (DiskFull, WriteFailed) as problem:
            self._warn(f"no checkpoint at step {self._history.step}, the log is kept: {problem}")

    def write_or_wait(self, what: str) -> bool:
        """Write a whole checkpoint, and wait while the disk is full; False if stopped meanwhile. `what` waits."""
        return self._actor.write_or_wait(what, lambda: self._write(wait=True))

    def _write(self, wait: bool) -> None:
        topology, begun = self._actor.topology, time.monotonic()
        self._deadline.begin()  # not from the last piece of work, which may be long ago
        with self._actor.activity("checkpoint", topology.limits.work_s):
            self._history.checkpoint(
                self._training, self._publisher.version, self._observers.meta(), self._save_observers)
            if wait or not topology.learner.saves_meanwhile(topology.ranks):
                self._history.commit()
            self._metrics.checkpoint_took(time.monotonic() - begun)

    def _save_observers(self, directory: Path) -> None:
        """Write the last files of a checkpoint; WeightsOwnerLost if the weights were lost meanwhile."""
        self._observers.save(directory)
        self._publisher.sender.check()

    def commit(self) -> None:
        """Commit the checkpoint that was begun, if all of it is on disk by now."""
        try:
            self._history.commit(wait=False)
        except (DiskFull, WriteFailed) as problem:
            self._warn(f"a checkpoint was lost while it was written, the log is kept: {problem}")

    def history_stands(self) -> bool:
        """Check that log and checkpoint are still on the disk; else write a checkpoint. False if stopped meanwhile."""
        self._history.report(self._actor.warn)
        if not (fault := self._history.fault()):
            return True
        self._actor.warn(
            "learner", f"{fault}; a checkpoint is written at once, so nothing is lost", "error", kind="history")
        return self.write_or_wait("training")

    def _warn(self, text: str) -> None:
        self._actor.warn("learner", text, "error")
