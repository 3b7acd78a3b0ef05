"""A start without a ring: samples that were dispatched, and are in no slot any more, go back to be generated again.

Talks to the files of one run directory (fates, log, newest checkpoint, draws.log), under the run's lock and before any
role runs. Knows nothing of the ring; an adopted ring still holds its samples, so nothing is put back then.

- A uid that is in the newest checkpoint or in the log was trained: its fate becomes T, never 0.
- `draws.log` names a put-back durably before its fate changes, so a kill in between repeats it and loses nothing.
- Doing it twice changes nothing.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from busrl.errors import UserError
from busrl.ledger.drawslog import DrawsLog
from busrl.ledger.fates import NAMES, Fate
from busrl.ledger.mend import newest_checkpoint
from busrl.ledger.trained import TrainedSet
from busrl.ledger.wal import Wal
from busrl.paths import RunPaths

BLOCK = 1 << 20


@dataclass(frozen=True)
class PutBack:
    """How many samples became T, how many go back, how many validation samples go back, and how many of the table's T
    are in no checkpoint and no log."""

    trained: int = 0
    again: int = 0
    validation: int = 0
    unlogged: int = 0

    def __str__(self) -> str:
        text = (
            f"{self.again} training and {self.validation} validation samples that were in no slot are generated again; "
            f"{self.trained} were trained already"
        )
        return text + (
            f"; fates.bin calls {self.unlogged} others trained that neither checkpoint nor log holds: it is that of "
            "another run, or the end of the log is lost. They are not trained again, and `busrl audit` names them. If "
            "fates.bin is not this run's, stop, and restore or remove it"
            if self.unlogged
            else ""
        )


def put_back(paths: RunPaths) -> PutBack:
    """Settle every D of a run that has no ring."""
    dispatched = _dispatched(paths.fates, Fate.VALIDATED)
    validation = _dispatched(paths.validate_fates, Fate.TRAINED)
    if dispatched.size:
        history = trained_uids(paths)
        known = history.contains_all(dispatched.astype(np.uint64))
        trained, again = dispatched[known], dispatched[~known]
        log = DrawsLog(paths.draws)
        log.put_back([int(uid) for uid in again], "the run was started without a ring")
        log.close()
        _store(paths.fates, trained, Fate.TRAINED)
        _store(paths.fates, again, Fate.NONE)
        unlogged = _unlogged(paths.fates, history)
    else:
        trained = again = dispatched
        unlogged = 0
    _store(paths.validate_fates, validation, Fate.NONE)
    return PutBack(int(trained.size), int(again.size), int(validation.size), unlogged)


def trained_uids(paths: RunPaths) -> TrainedSet:
    """Everything trained in the history that survives: the newest checkpoint and the log."""
    newest = newest_checkpoint(paths)
    history = TrainedSet.load(newest / "trained.bin") if newest else TrainedSet()
    if paths.wal.is_dir():
        with Wal(paths.wal) as wal:
            for record in wal.records():
                history.add(sample.uid for sample in record.samples)
    return history


def _dispatched(path: Path, never: Fate) -> npt.NDArray[np.int64]:
    """Indices with fate D. The table is a sparse file: only what was ever written is read.

    A byte that is no fate, or the fate that this table `never` holds, is damage: nobody could tell which of the other
    bytes are true, so the start is refused and nothing changed.
    """
    known = np.zeros(256, np.bool_)
    known[[code for code in NAMES if code != never]] = True
    found: list[npt.NDArray[np.int64]] = [np.empty(0, np.int64)]
    if not path.exists():
        return found[0]
    with open(path, "rb", buffering=0) as file:
        for start, end in _written(file.fileno()):
            for at in range(start, end, BLOCK):
                codes = np.frombuffer(os.pread(file.fileno(), min(BLOCK, end - at), at), np.uint8)
                if not known[codes].all():
                    raise _damaged(path, at + int(np.argmin(known[codes])))
                found.append(np.flatnonzero(codes == Fate.DISPATCHED) + at)
    return np.concatenate(found)


def _unlogged(path: Path, history: TrainedSet) -> int:
    """How many samples the table calls trained that the history does not hold."""
    count = 0
    with open(path, "rb", buffering=0) as file:
        for start, end in _written(file.fileno()):
            for at in range(start, end, BLOCK):
                codes = np.frombuffer(os.pread(file.fileno(), min(BLOCK, end - at), at), np.uint8)
                uids = (np.flatnonzero(codes == Fate.TRAINED) + at).astype(np.uint64)
                count += int((~history.contains_all(uids)).sum())
    return count


def _damaged(path: Path, index: int) -> UserError:
    with open(path, "rb") as file:
        [code] = os.pread(file.fileno(), 1, index)
    return UserError(
        f"{path}: byte {index} is {code}, which is no fate there: the file is damaged. Restore it, or remove it: what "
        "checkpoint and log hold counts as trained again, and all other samples are generated again"
    )


def _written(fd: int) -> list[tuple[int, int]]:
    extents, end, size = [], 0, os.fstat(fd).st_size
    while end < size:
        try:
            start = os.lseek(fd, end, os.SEEK_DATA)
        except OSError:  # nothing but a hole up to the end
            break
        end = os.lseek(fd, start, os.SEEK_HOLE)
        extents.append((start, end))
    return extents


def _store(path: Path, indices: npt.NDArray[np.int64], fate: Fate) -> None:
    if not indices.size:
        return
    with open(path, "r+b", buffering=0) as file:
        for index in indices:
            os.pwrite(file.fileno(), bytes([fate]), int(index))
        os.fsync(file.fileno())
