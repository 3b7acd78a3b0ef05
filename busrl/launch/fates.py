"""The fate tables at a start and during a run: samples in no slot are put back, and damage from outside is noticed.

`put_back` talks to the files of one run directory (fates, log, newest checkpoint, draws.log), under the run's lock and
before any role runs. `FateWatch` reads `fates.bin` and `fates.validate.bin` through descriptors of its own, and the
ring. Knows nothing of processes or of how a run ends.

- Put back: a uid in the newest checkpoint or in the log was trained; its fate becomes T, never 0.
- `draws.log` names a put-back durably before its fate changes, so a kill in between repeats it and loses nothing.
  Doing it twice changes nothing.
- The watch never maps a table: SIGBUS kills a process that reads a mapping beyond the end of a shortened file.
- busrl only ever makes a table longer, and stores D before a slot is QUEUED. So a shorter file, another file under the
  name, or a sample in a slot whose fate is none is damage from outside, never a matter of timing.
- A line whose uid contradicts its own group and member was written over: that is that slot's fault, not the tables'.
- With fates lost a run cannot continue: dispatched members would look as if they had never been dispatched, and
  trained samples as if they were new. A start mends it: it has the checkpoint and the log.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
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
    """Samples that became T, that go back, validation's that go back, and T of no checkpoint and no log."""

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
        known = history.contains_all(dispatched.astype(np.uint64))
        trained, again = dispatched[known], dispatched[~known]
        openbin.record_put_back(paths.draws, again.tolist(), "the run was started without a ring")
        _store(paths.fates, trained, Fate.TRAINED)
        _store(paths.fates, again, Fate.NONE)
        called = (np.flatnonzero(codes == Fate.TRAINED) + at for at, codes in _written(paths.fates))
        unlogged = sum(int((~history.contains_all(uids.astype(np.uint64))).sum()) for uids in called)
        settled = replace(settled, trained=int(trained.size), again=int(again.size), unlogged=unlogged)
    _store(paths.validate_fates, validation, Fate.NONE)
    return settled


def _dispatched(path: Path, never: Fate) -> npt.NDArray[np.int64]:
    """Indices with fate D.

    A byte that is no fate, or the fate that this table `never` holds, is damage: nobody could tell which of the other
    bytes are true, so the start is refused and nothing changed.
    """
    known, found = _codes_but(never), [np.empty(0, np.int64)]
    for at, codes in _written(path):
        if not known[codes].all():
            wrong = int(np.argmin(known[codes]))
            raise UserError(
                f"{path}: byte {at + wrong} is {codes[wrong]}, which is no fate there: the file is damaged. Restore "
                "it, or remove it: what checkpoint and log hold counts as trained again, and all other samples are "
                "generated again"
            )
        found.append(np.flatnonzero(codes == Fate.DISPATCHED) + at)
    return np.concatenate(found)


def _codes_but(*never: Fate) -> npt.NDArray[np.bool_]:
    """A flag for each byte: whether it is a fate that a table can hold."""
    known = np.zeros(256, np.bool_)
    known[[code for code in FATE_NAMES if code not in never]] = True
    return known


def _written(path: Path) -> Iterator[tuple[int, npt.NDArray[np.uint8]]]:
    """Yield what was ever written of a table, a sparse file, and where it stands; nothing if there is no table."""
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
    """A fate table, read with `pread`. `grown` is the most bytes it was seen to have."""

    def __init__(self, path: Path, never: Fate) -> None:
        self.path = path
        self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self._file = os.fstat(self._fd)
        self.grown = self._file.st_size
        self._known = _codes_but(Fate.NONE, never)

    def fault(self) -> str:
        """Name what was done to the file as such; "" if nothing."""
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

    def without(self, uids: npt.NDArray[np.uint64]) -> npt.NDArray[np.bool_]:
        """For each sample that stands in a slot whether its byte is none that such a sample can have."""
        if not uids.size:
            return np.zeros(0, np.bool_)
        low, high = int(uids.min()), int(uids.max())
        codes = np.zeros(high - low + 1, np.uint8)
        found = np.frombuffer(os.pread(self._fd, codes.size, low), np.uint8)
        codes[: found.size] = found
        missing: npt.NDArray[np.bool_] = ~self._known[codes[(uids - np.uint64(low)).astype(np.int64)]]
        return missing

    def close(self) -> None:
        os.close(self._fd)


class FateWatch:
    """Both tables of a run, and the ring whose samples they must know."""

    def __init__(self, fates: Path, validate_fates: Path, ring: Ring, group_size: int) -> None:
        self._tables = (Table(fates, Fate.VALIDATED), Table(validate_fates, Fate.TRAINED))
        self._ring, self._group_size = ring, group_size
        self._next_look = 0.0

    def fault(self) -> str:
        """Name what was done to the files as such; two calls of `stat`. "" if nothing."""
        found = next((fault for table in self._tables if (fault := table.fault())), "")
        return found and f"{found}: {REMEDY}"

    def look(self, now: float) -> str:
        """`fault`, and every `LOOK_EVERY_S` whether each sample in a slot has a fate."""
        found = self.fault()
        if not found and now >= self._next_look:
            self._next_look = now + LOOK_EVERY_S
            found = self.unrecorded()
        return found

    def unrecorded(self) -> str:
        """Names the samples in slots that have no fate; "" if all have one.

        The lines are copied first, for a fate is never taken back; and a line counts only if it has not moved since.
        """
        lines, slots = self._believed(self._ring.lines())
        validate = (lines["uid"] & VALIDATE) != 0
        for table, own in zip(self._tables, (~validate, validate)):
            missing = np.flatnonzero(own)[table.without(lines["uid"][own] & ~VALIDATE)]
            still = [one for one in missing if self._ring.line(int(slots[one]))["word"] == lines["word"][one]]
            if still:
                uids = sorted((lines["uid"][still] & ~VALIDATE).tolist())
                some = ", ".join(map(str, uids[:5])) + (" ..." if len(uids) > 5 else "")
                lost = f"{len(uids)} samples in slots have no fate ({some})"
                return f"{table.path} was changed by another program: {lost}: {REMEDY}"
        return ""

    def _believed(self, lines: Lines) -> tuple[Lines, npt.NDArray[np.int64]]:
        """The lines that hold a sample and do not contradict themselves, and their slots."""
        uids = lines["uid"]
        training = (uids & VALIDATE) == 0
        draw, _, member = place_of(uids, self._group_size)
        own = (lines["group"] == draw) & (lines["member"] == member)
        believed = (lines["state"] >= State.QUEUED) & ((uids & ~VALIDATE) < CAPACITY) & (own | ~training)
        slots = np.flatnonzero(believed)
        return lines[slots], slots

    def close(self) -> None:
        for table in self._tables:
            table.close()
