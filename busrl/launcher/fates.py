"""Fate tables at a start and during a run: `put_back` settles samples that are in no slot, `FateWatch` notices damage.

`put_back` talks to the files of one run directory (fates, log, newest checkpoint, draws.log), under the run's lock and
before any role runs. `FateWatch` reads `fates.bin` and `fates.validate.bin` through descriptors of its own, and the
ring. Knows nothing of processes or of how a run ends.

- A uid in the newest checkpoint or in the log was trained: putting it back makes its fate T, never 0.
- `draws.log` names a put-back durably before its fate changes. A kill in between repeats the put-back, which changes
  nothing the second time.
- The watch never maps a table: SIGBUS kills a process that reads a mapping beyond the end of a shortened file.
- busrl makes a table only longer, and stores D before a slot is QUEUED. So a shorter file, another file of that name,
  or a sample in a slot without a fate is damage from outside, never a matter of timing.
- A line whose uid contradicts its own group and member was written over. That damages the slot, not the tables.
- A run cannot continue with fates lost: dispatched members would look as if they had never been dispatched, and trained
  samples as if they were new. A start repairs the tables from the checkpoint and the log.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from busrl.errors import UserError
from busrl.ledger import openbin
from busrl.ledger.trained import TrainedSet, add_logged, newest_checkpoint, step_of
from busrl.paths import RunPaths
from busrl.ring import Ring, State
from busrl.states import FATE_NAMES, VALIDATE_BIT, Fate, place_of
from busrl.topology.sizes import MOST_SAMPLES

# -- put back ----------------------------------------------------------------------------------------------------------

BLOCK = 1 << 20


@dataclass(frozen=True)
class PutBack:
    """Counts of samples: those that became T, training and validation samples that go back, and T that are in no
    checkpoint and no log."""

    trained: int = 0
    again: int = 0
    validation: int = 0
    unlogged: int = 0

    def __str__(self) -> str:
        text = (
            f"{self.again} training and {self.validation} validation samples that were in no slot are generated again; "
            f"{self.trained} were trained already"
        )
        if not self.unlogged:
            return text
        return (
            f"{text}; fates.bin calls {self.unlogged} others trained that neither checkpoint nor log holds: it is that "
            "of another run, or the end of the log is lost. They are not trained again, and `busrl audit` names them. "
            "If fates.bin is not this run's, stop, and restore or remove it"
        )


def put_back(paths: RunPaths) -> PutBack:
    """Settle every D of a run that has no ring."""
    dispatched = _dispatched(paths.fates, Fate.VALIDATED)
    validation = _dispatched(paths.validate_fates, Fate.TRAINED)
    settled = PutBack(validation=int(validation.size))
    if dispatched.size:
        newest = newest_checkpoint(paths)
        history = TrainedSet() if newest is None else TrainedSet.load(newest / "trained.bin")
        add_logged(history, paths.wal, superseded=-1 if newest is None else step_of(newest))
        in_history = history.contains_all(dispatched.astype(np.uint64))
        trained, again = dispatched[in_history], dispatched[~in_history]
        openbin.record_put_back(paths.draws, again.tolist(), "the run was started without a ring")
        _store(paths.fates, trained, Fate.TRAINED)
        _store(paths.fates, again, Fate.NONE)
        stored = (np.flatnonzero(codes == Fate.TRAINED) + at for at, codes in _written(paths.fates))
        unlogged = sum(int((~history.contains_all(uids.astype(np.uint64))).sum()) for uids in stored)
        settled = replace(settled, trained=int(trained.size), again=int(again.size), unlogged=unlogged)
    _store(paths.validate_fates, validation, Fate.NONE)
    return settled


def _dispatched(path: Path, never: Fate) -> npt.NDArray[np.int64]:
    """Indices with fate D.

    A byte that is no fate, or the fate that this table `never` holds, is damage: the other bytes cannot be trusted
    either, so the start is refused and nothing changed.
    """
    possible, indices = _codes_but(never), [np.empty(0, np.int64)]
    for at, codes in _written(path):
        if not possible[codes].all():
            wrong = int(np.argmin(possible[codes]))
            raise UserError(
                f"{path}: byte {at + wrong} is {codes[wrong]}, which is no fate there: the file is damaged. Restore "
                "it, or remove it: what checkpoint and log hold counts as trained again, and all other samples are "
                "generated again"
            )
        indices.append(np.flatnonzero(codes == Fate.DISPATCHED) + at)
    return np.concatenate(indices)


def _codes_but(*never: Fate) -> npt.NDArray[np.bool_]:
    """A flag for each of the 256 codes: whether it is a fate, and none of `never`."""
    flags = np.zeros(256, np.bool_)
    flags[[code for code in FATE_NAMES if code not in never]] = True
    return flags


def _written(path: Path) -> Iterator[tuple[int, npt.NDArray[np.uint8]]]:
    """Yield the written pieces of a table, which is a sparse file, each with its offset; nothing if there is no table.
    """
    with suppress(FileNotFoundError), open(path, "rb", buffering=0) as file:
        fd, end, size = file.fileno(), 0, os.fstat(file.fileno()).st_size
        while end < size:
            try:
                start = os.lseek(fd, end, os.SEEK_DATA)
            except OSError:  # nothing but a hole up to the end
                return
            end = os.lseek(fd, start, os.SEEK_HOLE)
            for at in range(start, end, BLOCK):
                yield at, np.frombuffer(os.pread(fd, min(BLOCK, end - at), at), np.uint8)


def _store(path: Path, indices: npt.NDArray[np.int64], fate: Fate) -> None:
    if not indices.size:
        return
    with open(path, "r+b", buffering=0) as file:
        for index in indices:
            os.pwrite(file.fileno(), bytes([fate]), int(index))
        os.fsync(file.fileno())


# -- the watch ---------------------------------------------------------------------------------------------------------

VALIDATE = np.uint64(VALIDATE_BIT)  # this bit of a uid says which table it is in
CAPACITY = np.uint64(MOST_SAMPLES)
LOOK_EVERY_S = 1.0
REMEDY = (
    "what became of some samples is lost from it. Start the run again: what checkpoint and log hold counts as trained, "
    "all other samples are generated again"
)
Lines = npt.NDArray[Any]


class Table:
    """A fate table, read with `pread`. `grown` is its largest size so far."""

    def __init__(self, path: Path, never: Fate) -> None:
        self.path = path
        self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self._file = os.fstat(self._fd)
        self.grown = self._file.st_size
        self._possible = _codes_but(Fate.NONE, never)

    def fault(self) -> str:
        """Name the damage to the file as such; "" if there is none."""
        try:
            now = os.stat(self.path)
        except OSError as error:
            return f"{self.path} cannot be found any more ({error.strerror})"
        if not os.path.samestat(now, self._file):
            return f"{self.path} is another file than at the start"
        if now.st_size < self.grown:
            return f"{self.path} was made shorter by another program, from {self.grown} to {now.st_size} bytes"
        self.grown = now.st_size
        return ""

    def lacks(self, uids: npt.NDArray[np.uint64]) -> npt.NDArray[np.bool_]:
        """For each sample of a slot, whether the table lacks its fate: the byte is none that such a sample can have."""
        if not uids.size:
            return np.zeros(0, np.bool_)
        low, high = int(uids.min()), int(uids.max())
        codes = np.zeros(high - low + 1, np.uint8)
        stored = np.frombuffer(os.pread(self._fd, codes.size, low), np.uint8)
        codes[: stored.size] = stored
        missing: npt.NDArray[np.bool_] = ~self._possible[codes[(uids - np.uint64(low)).astype(np.int64)]]
        return missing

    def close(self) -> None:
        os.close(self._fd)


class FateWatch:
    """Watch over both tables of a run: each sample in a slot of the ring has a fate in one of them."""

    def __init__(self, fates: Path, validate_fates: Path, ring: Ring, group_size: int) -> None:
        self._tables = (Table(fates, Fate.VALIDATED), Table(validate_fates, Fate.TRAINED))
        self._ring, self._group_size = ring, group_size
        self._next_look = 0.0

    def fault(self) -> str:
        """Name the damage to the files as such, by two calls of `stat`; "" if there is none."""
        text = next((fault for table in self._tables if (fault := table.fault())), "")
        return text and f"{text}: {REMEDY}"

    def look(self, now: float) -> str:
        """Name the damage: that of `fault`, and every `LOOK_EVERY_S` that of `unrecorded` too."""
        text = self.fault()
        if not text and now >= self._next_look:
            self._next_look = now + LOOK_EVERY_S
            text = self.unrecorded()
        return text

    def unrecorded(self) -> str:
        """Name the samples in slots that have no fate; "" if all have one.

        The lines are copied before the table is read, as a fate is stored before its slot is filled. A line counts only
        if its slot has not changed since.
        """
        lines, slots = self._believed(self._ring.lines())
        validate = (lines["uid"] & VALIDATE) != 0
        for table, in_table in zip(self._tables, (~validate, validate)):
            missing = np.flatnonzero(in_table)[table.lacks(lines["uid"][in_table] & ~VALIDATE)]
            still = [place for place in missing if self._ring.line(int(slots[place]))["word"] == lines["word"][place]]
            if still:
                uids = sorted((lines["uid"][still] & ~VALIDATE).tolist())
                some = ", ".join(map(str, uids[:5])) + (" ..." if len(uids) > 5 else "")
                lost = f"{len(uids)} samples in slots have no fate ({some})"
                return f"{table.path} was changed by another program: {lost}: {REMEDY}"
        return ""

    def _believed(self, lines: Lines) -> tuple[Lines, npt.NDArray[np.int64]]:
        """Lines that hold a sample and do not contradict themselves, and their slots."""
        uids = lines["uid"]
        training = (uids & VALIDATE) == 0
        draw, _, member = place_of(uids, self._group_size)
        in_group = (lines["group"] == draw) & (lines["member"] == member)
        believed = (lines["state"] >= State.QUEUED) & ((uids & ~VALIDATE) < CAPACITY) & (in_group | ~training)
        slots = np.flatnonzero(believed)
        return lines[slots], slots

    def close(self) -> None:
        for table in self._tables:
            table.close()


class FateWatches:
    """The watches over the tables of all models that are trained."""

    def __init__(self, watches: Sequence[FateWatch]) -> None:
        self._watches = watches

    def fault(self) -> str:
        """The first damage to a file as such; "" if there is none."""
        return next((text for watch in self._watches if (text := watch.fault())), "")

    def look(self, now: float) -> str:
        """The first damage of any kind; "" if there is none."""
        return next((text for watch in self._watches if (text := watch.look(now))), "")

    def close(self) -> None:
        for watch in self._watches:
            watch.close()
