"""Record of what was trained: the train log, the set of uids that every checkpoint keeps, and the mending of either.

Talks to `train.jsonl`, `trained.bin` in the checkpoints and `wal/`. The learner writes a line of the log after a step,
for people and for the audit. `launch` mends before any role runs, and so does a learner that starts. Knows nothing of
groups, models or the ring: what else a checkpoint holds is looked at where it is loaded.

- A line with step s takes the place of all earlier lines with a step >= s: so a replay after a restart, or a return to
  a checkpoint with `wal = "off"`, needs no change of the file. Only mending changes it.
- `crc` is the crc32 of the prompt line, so the file proves which prompt each uid was trained on.
- `trained.bin`, little endian: "BUSRLTRD", u32 layout 1, u32 crc32 of the packed bytes, u64 uids in the set, u64 bytes
  of the bitmap; then the bitmap, zlib-packed. Bit uid % 8 (from the lowest) of byte uid // 8.
- A file is the old one or the new one, and a damaged one is refused, never half used.
- The train log is made durable before each checkpoint, so its lines up to the checkpoint's step name the very same
  samples. So do the trained set of the checkpoint before and the log's records from there on. Either is used only if
  its number of samples is that of meta.json.
- A line of the train log with an impossible uid counts as damaged; the file is read a line at a time.
- A checkpoint whose writer died while it took another's place has its name again before anybody looks for it.
- A set that cannot be made again is refused with what to do; else what was trained would be forgotten.
"""

from __future__ import annotations

import heapq
import itertools
import json
import os
import re
import struct
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, BinaryIO

import msgspec
import numpy as np
import numpy.typing as npt

from busrl.errors import FileCorrupt, LedgerError
from busrl.ledger.wal import Record, Wal
from busrl.paths import CHECKPOINT, RunPaths
from busrl.system import files

# -- the train log -----

TRAIN_TAIL_BYTES = 1 << 20  # of lines of thousands of samples
UID_LIMIT = 1 << 34  # 2 GiB of bitmap: far above any fate table, below what a wild uid would ask for
RESTORED = "restored"  # the cause of a line that stands for steps whose own lines are gone
_Natural = Annotated[int, msgspec.Meta(ge=0)]
_Uid = Annotated[int, msgspec.Meta(ge=0, lt=UID_LIMIT)]


class TrainLine(msgspec.Struct, kw_only=True):
    """A step; each sample is [uid, attempt, crc]."""

    step: _Natural
    version: int = 0
    cause: str = RESTORED
    samples: list[tuple[_Uid, int, int]]

    @classmethod
    def of(cls, record: Record) -> TrainLine:
        """The line of a record that was trained, also when it was replayed."""
        samples = [(sample.uid, sample.attempt, sample.prompt_crc) for sample in record.samples]
        return cls(step=record.step, version=record.version, cause=record.cause, samples=samples)


def of_step(row: Mapping[str, Any]) -> bool:
    """Check whether a line of train.jsonl or metrics.jsonl is a step's. A line with a `kind` reports groups that ended
    without a step, under the number of the step before them."""
    return "kind" not in row


def step_lines(path: Path, tail: int = 0) -> list[dict[str, Any]]:
    """The lines of steps, in order; none where there is no file. `tail`: only of its last bytes."""
    return [row for row in files.json_lines(path, tail) if of_step(row)]


def last_step(path: Path) -> int:
    """The newest step that has a line, by the end of the file; 0 if none has."""
    for tail in (TRAIN_TAIL_BYTES, 0):  # the whole file only where its end is damaged
        steps = [int(row["step"]) for row in step_lines(path, tail) if isinstance(row.get("step"), int)]
        if steps:
            return steps[-1]
    return 0


# -- the trained set -----

MAGIC = b"BUSRLTRD"
LAYOUT = 1
REMEDY = "; the next start in the run directory makes it again from train.jsonl"
BLOCK = 1 << 17  # bytes of the bitmap
_HEAD = struct.Struct("<8sIIQQ")


class TrainedSet:
    """A growing set of training uids (`uid < UID_LIMIT`), made for batches of hundreds and sets of millions."""

    def __init__(self, uids: Iterable[int] = ()) -> None:
        self._bits: npt.NDArray[np.uint8] = np.zeros(0, np.uint8)
        self._count = 0
        self.add(uids)

    def add(self, uids: Iterable[int]) -> list[int]:
        """Add the uids. Returns those that were there already, or that come twice here, in order."""
        again: list[int] = []
        for uid in uids:
            byte, bit = self._place(uid), 1 << (uid & 7)
            if self._bits[byte] & bit:
                again.append(uid)
            else:
                self._bits[byte] |= bit
                self._count += 1
        return again

    def contains_all(self, uids: npt.NDArray[np.uint64]) -> npt.NDArray[np.bool_]:
        result = np.zeros(uids.shape, np.bool_)
        inside = uids < np.uint64(self._bits.size * 8)
        small = uids[inside].astype(np.int64)
        result[inside] = (self._bits[small >> 3] >> (small & 7).astype(np.uint8)) & 1
        return result

    def blocks(self) -> Iterator[npt.NDArray[np.int64]]:
        """All uids, ascending, some at a time: a set of tens of millions is not to be spelled out at once."""
        for start in range(0, self._bits.size, BLOCK):
            block = np.flatnonzero(np.unpackbits(self._bits[start : start + BLOCK], bitorder="little"))
            yield block.astype(np.int64) + start * 8

    def __contains__(self, uid: int) -> bool:
        byte = uid >> 3
        return 0 <= byte < self._bits.size and bool(self._bits[byte] >> (uid & 7) & 1)

    def __iter__(self) -> Iterator[int]:
        return (uid for block in self.blocks() for uid in block.tolist())

    def __len__(self) -> int:
        return self._count

    def save(self, path: str | os.PathLike[str]) -> None:
        used = np.flatnonzero(self._bits)
        raw = self._bits[: int(used[-1]) + 1 if used.size else 0].tobytes()
        body = zlib.compress(raw, 1)
        files.replace(Path(path), _HEAD.pack(MAGIC, LAYOUT, zlib.crc32(body), self._count, len(raw)) + body)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> TrainedSet:
        """Read a saved set; `FileCorrupt` if a byte of it is not what was written."""
        data = Path(path).read_bytes()
        if len(data) < _HEAD.size or _HEAD.unpack_from(data)[:2] != (MAGIC, LAYOUT):
            raise FileCorrupt(f"{path}: does not begin with {MAGIC!r}, layout {LAYOUT}{REMEDY}")
        _, _, crc, count, size = _HEAD.unpack_from(data)
        body = data[_HEAD.size :]
        if zlib.crc32(body) != crc:
            raise FileCorrupt(f"{path}: checksum does not match its {len(body)} bytes{REMEDY}")
        result, raw = cls(), zlib.decompress(body)
        result._bits = np.frombuffer(raw, np.uint8).copy()
        result._count = int.from_bytes(raw, "little").bit_count()
        if (result._count, len(raw)) != (count, size):
            raise FileCorrupt(f"{path}: holds {result._count} uids, its head says {count}{REMEDY}")
        return result

    def _place(self, uid: int) -> int:
        """The byte of a uid, growing the bitmap when needed."""
        if not 0 <= uid < UID_LIMIT:
            raise LedgerError(f"uid {uid} cannot be in a trained set: training uids are below {UID_LIMIT}")
        byte = uid >> 3
        if byte >= self._bits.size:
            grown = np.zeros(max(byte + 1, 2 * self._bits.size, 1024), np.uint8)
            grown[: self._bits.size] = self._bits
            self._bits = grown
        return byte


# -- mending -----


NAME = "trained.bin"
LISTING = "files.json"
TAIL = 1 << 16  # bytes of the train log whose lines are looked at
MOST_LINE_BYTES = 1 << 28  # what is longer is no line


def newest_checkpoint(paths: RunPaths) -> Path | None:
    """The whole checkpoint with the highest step."""
    return next(iter(_checkpoints(paths)), None)


def _checkpoints(paths: RunPaths) -> list[Path]:
    """All that have a meta.json, newest first."""
    return [folder for folder in checkpoints_of(paths.checkpoints) if (folder / "meta.json").is_file()]


def checkpoints_of(root: Path) -> list[Path]:
    """The directories with a checkpoint's name, newest first."""
    folders = [path for path in root.glob(f"{CHECKPOINT}*") if is_checkpoint(path) and path.is_dir()]
    return sorted(folders, key=step_of, reverse=True)


def is_checkpoint(path: Path) -> bool:
    return re.fullmatch(CHECKPOINT + "[0-9]+", path.name) is not None


def step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.rpartition("_")[2])


def mend_trained_set(paths: RunPaths) -> str | None:
    """Check the newest checkpoint's trained set, and write it again if it is damaged. Returns what was done, None for
    nothing; `FileCorrupt` with the remedy if the set cannot be made again."""
    files.finish_replacements(paths.checkpoints)
    folder = newest_checkpoint(paths)
    fault = _fault_of(folder / NAME) if folder else None
    if folder is None or fault is None:
        return None
    step, samples = _meta(folder, fault)
    standing, source = _Standing(paths.train_log), paths.train_log.name
    trained = _uids_of(standing.lines(step))
    if len(trained) != samples:
        why = f"{paths.train_log} names {len(trained)} samples up to its step, not {samples}{standing.damage}"
        trained, source = _trained_before(paths, folder, step), "the checkpoint before and the log"
        if len(trained) != samples:
            raise _beyond_repair(folder, fault, f"{why}; {source} hold {len(trained)}")
    trained.save(folder / NAME)
    _list(folder)
    return f"{fault}; it was written again: {samples} samples, from {source}"


def _fault_of(path: Path) -> str | None:
    try:
        TrainedSet.load(path)
    except FileCorrupt as problem:
        return str(problem).removesuffix(REMEDY)
    except OSError as problem:
        return f"{path}: {problem.strerror}"
    return None


def _meta(folder: Path, fault: str) -> tuple[int, int]:
    try:
        meta = json.loads((folder / "meta.json").read_bytes())
        return int(meta["step"]), int(meta["samples"])
    except (OSError, ValueError, KeyError, TypeError) as problem:
        raise _beyond_repair(folder, fault, f"its meta.json cannot be read either ({problem!r})") from None


def _uids_of(lines: Iterable[TrainLine]) -> TrainedSet:
    trained = TrainedSet()
    for line in lines:
        trained.add(uid for uid, _, _ in line.samples)
    return trained


class _Standing:
    """The lines of a train log that stand, by their places: the file may be long. A line takes the place of all earlier
    ones with its step or a later one; half a line at the end, or a damaged one, is left out and counted."""

    def __init__(self, path: Path) -> None:
        self.path, self.steps = path, list[int]()
        self._places: list[tuple[int, int]] = []  # offset and bytes of each
        self._damaged, self._first = 0, ""
        if path.is_file():
            with open(path, "rb") as file:
                self._find(file)

    def _find(self, file: BinaryIO) -> None:
        number, at = 1, 0
        while text := file.readline(MOST_LINE_BYTES):
            try:
                step = msgspec.json.decode(text, type=TrainLine).step
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as problem:
                self._damaged += bool(text.strip())
                self._first = self._first or f"line {number}: {problem}"
            else:
                while self.steps and self.steps[-1] >= step:
                    del self.steps[-1], self._places[-1]
                self.steps.append(step)
                self._places.append((at, len(text)))
            number, at = number + text.endswith(b"\n"), at + len(text)

    @property
    def damage(self) -> str:
        return f" ({self._damaged} of its lines cannot be read, {self._first})" if self._damaged else ""

    def lines(self, until: int) -> Iterator[TrainLine]:
        """Lines up to a step, one after the other."""
        if self.steps:
            with open(self.path, "rb") as file:
                for step, (at, size) in zip(self.steps, self._places):
                    if step <= until:
                        file.seek(at)
                        yield msgspec.json.decode(file.read(size), type=TrainLine)


def train_log_is_whole(path: Path, least: int) -> bool:
    """Check that the log has at least the bytes that a checkpoint noted, and nothing but lines at its end."""
    try:
        with open(path, "rb") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - TAIL))
            last = file.read().split(b"\n")[1 if size > TAIL else 0 :]
        for text in last[:-1]:
            msgspec.json.decode(text, type=TrainLine)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return False
    return size >= least and last[-1:] == [b""]


def mend_train_log(
    path: Path, step: int, trained: TrainedSet, records: Iterable[Record], crc_of: Callable[[int], int], least: int
) -> str:
    """Write a line again for every step up to `step`: as it stands, or from its record. Samples of `trained` whose line
    is gone stand together in one, with the crc of their prompts. Spaces make the file `least` bytes long, so that it
    is not taken for a shortened one. The damaged file gets another name. Returns what was done."""
    standing = _Standing(path)
    replayed = {record.step: TrainLine.of(record) for record in records if record.step <= step}
    on_lines = _uids_of(_merged(standing, replayed, step))
    gone = [uid for uid in trained if uid not in on_lines]
    if gone:
        line = _line_for_the_gone(standing, replayed, step)
        line.samples += [(uid, 0, crc_of(uid)) for uid in gone]
        replayed[line.step] = line
    names = (path.with_name(f"{path.name}.damaged-{number}") for number in itertools.count(1))
    aside = next(name for name in names if not name.exists())
    _keep(path, aside)
    standing.path = aside
    files.replace(path, _written(_merged(standing, replayed, step), least))
    return (
        f"{path} was damaged or removed{standing.damage}; it was written again from checkpoint and log, the steps of "
        f"{len(gone)} samples are not known any more"
        f"{f', and what was there is kept as {aside.name}' if aside.exists() else ''}"
    )


def _line_for_the_gone(standing: _Standing, replayed: Mapping[int, TrainLine], step: int) -> TrainLine:
    """The line that takes samples of unknown steps: a new one of the highest step without a line, else the last."""
    steps = {*standing.steps, *replayed}
    free = next((number for number in range(step, 0, -1) if number not in steps), step)
    lines = (line for line in _merged(standing, replayed, step) if line.step == free)
    return next(lines, TrainLine(step=free, samples=[]))


def _merged(standing: _Standing, replayed: Mapping[int, TrainLine], until: int) -> Iterator[TrainLine]:
    """The lines by step; a replayed one takes the place of the one that stands."""
    return heapq.merge(
        (line for line in standing.lines(until) if line.step not in replayed),
        (replayed[step] for step in sorted(replayed)),
        key=lambda line: line.step,
    )


def _written(lines: Iterable[TrainLine], least: int) -> Iterator[bytes]:
    """The bytes of the lines, with spaces in the last one that make them `least` bytes; none for no line."""
    total, end = 0, b""
    for line in lines:
        text = end + msgspec.json.encode(line)
        total, end = total + len(text), b"\n"
        yield text
    while end and total < least - 1:
        spaces = b" " * min(TAIL, least - 1 - total)
        total += len(spaces)
        yield spaces
    yield end


def _keep(path: Path, aside: Path) -> None:
    """Give a file a second name, so that a death before it is replaced leaves it where it was."""
    try:
        os.link(path, aside)
    except FileNotFoundError:
        return
    except OSError:  # a file system without second names, or something else than a file
        path.rename(aside)


def _trained_before(paths: RunPaths, folder: Path, step: int) -> TrainedSet:
    """The trained set of the checkpoint before `folder`, and the samples of the records up to a step."""
    older = next((checkpoint for checkpoint in _checkpoints(paths) if checkpoint.name != folder.name), None)
    try:
        trained = TrainedSet.load(older / NAME) if older else TrainedSet()
    except (FileCorrupt, OSError):
        return TrainedSet()
    return add_logged(trained, paths.wal, step)


def add_logged(trained: TrainedSet, log: Path, until: int = sys.maxsize, superseded: int = -1) -> TrainedSet:
    """Add the samples of the log's records up to a step to the set, and return it. Damage in records up to
    `superseded`, whose samples the set has already, is passed over."""
    if log.is_dir():
        with Wal(log, superseded=superseded) as wal:
            for record in wal.records():
                trained.add(sample.uid for sample in record.samples if record.step <= until)
    return trained


def _list(folder: Path) -> None:
    """Put the new file's size and checksum in the checkpoint's list (they differ only with another zlib)."""
    path = folder / LISTING
    if not path.is_file():
        return
    listed: dict[str, Any] = json.loads(path.read_bytes())
    data = (folder / NAME).read_bytes()
    entry = [len(data), zlib.crc32(data)]
    if listed.get(NAME) != entry:
        files.replace(path, json.dumps({**listed, NAME: entry}, indent=1).encode())


def _beyond_repair(folder: Path, fault: str, why: str) -> FileCorrupt:
    return FileCorrupt(
        f"{fault}, and it cannot be made again: {why}. Move {folder} out of its directory and start again: the run "
        "continues from the checkpoint before it. Steps that neither that one nor the log holds are gone from its "
        "history; `busrl audit` names their samples as trained_unlogged"
    )
