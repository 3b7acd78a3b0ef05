"""The learner's history on disk: newest checkpoint, write-ahead log after it, train log, and the set of trained uids.

Talks to files through `busrl.ledger` and `busrl.training.checkpoint`, and to the fate table. Knows nothing of slots,
gradients or the trigger.

- Surviving history = checkpoint + log records after it; `trained` holds exactly the uids of both.
- A checkpoint in shards is begun after one step and committed after a later one; until then a restart begins with the
  one before, and the log has all that it needs.
- A record is dropped from the log only after two checkpoints that hold its uids are whole on disk (one with
  `keep_last = 1`): if the newest one is damaged, the one before and the log lead to the same step.
- A start from which steps are missing between checkpoint and log is refused: nothing is trained on weights that it
  was not made for.
- `highest_version` is at least every version that was published in this history.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import shutil
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
from busrl.ledger.trained import TrainLine, last_step
from busrl.ledger.wal import Record, Wal
from busrl.paths import CHECKPOINT, RunPaths
from busrl.ring import Fates
from busrl.states import Fate, place_of
from busrl.system.files import LineFile, as_map, json_lines, replace
from busrl.topology import Topology

if TYPE_CHECKING:
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
        # A log that a start of before left is trained first, then given up (`leave_log`).
        logs = mode != "off" or any(paths.wal.glob("*.wal"))
        self.wal = Wal(paths.wal, sync=mode == "sync", superseded=superseded) if logs else None
        if self.wal is not None and (cut := self.wal.cut_bytes):
            log.info("the log ended in half a record, which was never committed: %d bytes cut off", cut)
        self.train_log = LineFile(paths.train_log)
        self.trained = trained.TrainedSet()
        self.warnings: list[str] = []  # of the start
        self._train_log_bytes = 0  # up to the newest checkpoint
        self._unwritten: list[Record] = []
        self._saved: Path | None = None  # the checkpoint that a restart would begin with
        self._pending: Pending | None = None  # that is being written
        self.step = self.groups = self.highest_version = self._begun_at = 0
        # Slots of trained samples may still be REWARDED, or come back so when their dead owner is reaped.
        self.unfinished = True

    # -- start --------------------------------------------------------------------------------------------------

    def load(self, training: TrainingStep, also: Callable[[Mapping[str, Any], Path], None]) -> None:
        """Continue from the newest whole checkpoint, if there is one; `also` gets its meta and its folder. CannotTrain
        if the ranks of a predecessor failed twice with the same samples."""
        if ends := next(iter(json_lines(self.paths.failed_work)), {}).get("ends"):
            raise CannotTrain(ends)
        if mended := trained.mend_trained_set(self.paths):
            log.warning(mended)
        torn: dict[Path, str] = {}
        found = training.load_checkpoint(self.paths.checkpoints, torn)
        self._pass_over(torn, found.step if found is not None else 0)
        if found is not None:
            self.trained = trained.TrainedSet.load(found.path / "trained.bin")
            self._saved = found.path
            self.step, self.groups = found.step, int(found.meta["groups"])
            self.highest_version = int(found.meta["version"])
            self._train_log_bytes = int(found.meta.get("train_log_bytes", 0))
            if not trained.train_log_is_whole(self.paths.train_log, self._train_log_bytes):
                self._mend_train_log()
            training.stale.steps.load(found.meta.get("version_steps", []))
            also(found.meta, found.path)
        elif elsewhere := self.topology.learner.start_from:
            training.models.start_from(Path(elsewhere), self.topology.learner.start_optimizer)
        if self.wal is not None:
            # A record holds the newest version at its time; its own step may have been published as the one after.
            self.highest_version = max(self.highest_version, self.wal.last_version + 1)

    def _pass_over(self, torn: Mapping[Path, str], start: int) -> None:
        """No step between `start` and the newest known one may be missing; damaged checkpoints are renamed."""
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
            kept = path.with_name(f"{TORN}{path.name}")
            names = itertools.chain([kept], (kept.with_name(f"{kept.name}-{k}") for k in itertools.count(2)))
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
        """Rare, and it reads the whole file: the prompts are opened for it alone."""
        size = self.topology.groups.size
        records = self.wal.records() if self.wal is not None else ()
        with training_stream(self.topology) as stream:
            self.warnings.append(
                trained.mend_train_log(
                    self.paths.train_log, self.step, self.trained, records,
                    lambda uid: stream.item(place_of(uid, size)[0]).crc, self._train_log_bytes,
                )
            )
        self.train_log.close()
        self.train_log = LineFile(self.paths.train_log)

    def to_replay(self) -> Iterator[Record]:
        """Records after the checkpoint, in order; call `finished` for each once it is trained."""
        yield from () if self.wal is None else self.wal.records(after=self.step)

    @property
    def leaves_log(self) -> bool:
        """True if there is a log although none is to be kept any more."""
        return self.wal is not None and self.topology.learner.wal == "off"

    def leave_log(self) -> None:
        """Give it up once a checkpoint holds all of it; until then it is kept. Later steps would contradict it."""
        if self.wal is not None and self.leaves_log and (not self.step or self._reaches(self.step)):
            self.wal.close()
            self.wal = None
            shutil.rmtree(self.paths.wal, ignore_errors=True)

    def _reaches(self, step: int) -> bool:
        return self._saved is not None and trained.step_of(self._saved) >= step

    def store_fates(self, fates: Fates) -> None:
        """T for every trained uid: the predecessor may have died before it stored it."""
        for uids in self.trained.blocks():
            codes = np.zeros(uids.size, np.uint8)
            known = fates.view()  # again: a store may make it longer
            inside = uids < len(known)
            codes[inside] = known[uids[inside]]
            for uid in uids[codes != Fate.TRAINED].tolist():
                fates.store(uid, Fate.TRAINED)

    # -- a step -------------------------------------------------------------------------------------------------

    def append(self, record: Record) -> None:
        """The commit point of a step. Raises DiskFull with nothing committed."""
        self._write_lines()
        if self.wal is not None:
            self.wal.append(record)

    def finished(self, record: Record) -> None:
        """The record was trained: count it and write its line of the train log, now or once the disk has room."""
        self.trained.add([sample.uid for sample in record.samples])
        self.step = record.step
        self.groups += len(record.groups)
        self._unwritten.append(record)
        with contextlib.suppress(DiskFull):
            self._write_lines()

    def fault(self) -> str:
        """Describes what another program did to log or checkpoint, so that a restart would not come back here; mostly
        ""."""
        if self._saved is not None and not (self._saved / "meta.json").is_file():
            return f"{self._saved} was removed or emptied by another program"
        fault = self.wal.fault() if self.wal is not None else ""
        return fault and f"{fault}: another program changed it"

    def _write_lines(self) -> None:
        """Lines of the train log that a full disk refused; neither a step nor a checkpoint comes before them."""
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
        """The checkpoint that was begun is one now, and the records that it makes superfluous go; without `wait` only
        if all of it is on disk. False if there is none. DiskFull or WriteFailed with nothing left of it."""
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
        elif self._begun_at == self.step:  # later records are nowhere else: the next step begins with a look at them
            self.wal.renew()

    def _log_begins(self) -> int:
        """The step of the checkpoint from which the log leads on; 0 while there are too few."""
        reaches = min(LOG_REACHES, self.topology.learner.keep_last)
        kept = trained.checkpoints_of(self.paths.checkpoints)
        return trained.step_of(kept[reaches - 1]) if len(kept) >= reaches else 0

    def report(self, warn: Callable[..., None]) -> None:
        """Tell what the start found, once."""
        for text in self.warnings:
            warn("learner", text, "error", kind=text)
        self.warnings.clear()

    @contextlib.contextmanager
    def blames(self) -> Iterator[None]:
        """Samples with which the ranks fail twice end the run with their names."""
        try:
            yield
        except RankFailed as problem:
            self.failed(problem)
            raise

    def failed(self, problem: RankFailed) -> None:
        """A rank failed with these samples, which is kept for the next life; CannotTrain if one did before with some of
        them: it would again. That is kept too: this process may be ended before it could say so."""
        if not problem.uids:  # nothing is suspect, and what was stays so
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
    """True if the newest start keeps a log where those before kept none, and so lost what no checkpoint holds."""
    last = next(iter(deque(json_lines(paths.starts), maxlen=1)), {})
    return as_map(as_map(last.get("changes")).get("learner.wal")).get("was") == "off"


def _history_torn(
    paths: RunPaths, torn: Mapping[Path, str], damage: list[str], start: int, missing: list[int]
) -> UserError:
    """The error that says why training cannot continue, and the two ways out."""
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
