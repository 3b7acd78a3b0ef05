"""Makes a damaged `trained.bin` of the newest checkpoint whole again, from the train log or from what came before it,
and a damaged train log from checkpoint and log.

Talks to `checkpoints/`, `train.jsonl` and `wal/`; called by `launch` before any role runs, and by a learner that
starts. Knows nothing of models: what else a checkpoint holds is looked at where it is loaded.

- The train log is made durable before each checkpoint, so its lines up to the checkpoint's step name the very same
  samples. So do the trained set of the checkpoint before and the log's records from there on. Either is believed only
  if it has as many as meta.json says.
- A checkpoint whose writer died while it took another's place has its name again before anybody looks for it.
- What can not be made again is refused with what to do: to pass over it silently would forget who was trained.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import zlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import msgspec

from busrl.errors import FileCorrupt
from busrl.ledger.files import finish_replacements, write_whole
from busrl.ledger.trained import REMEDY, TrainedSet
from busrl.ledger.wal import Record, Wal
from busrl.paths import RunPaths

NAME = "trained.bin"
LISTING = "files.json"
TAIL = 1 << 16  # bytes of the train log whose lines are looked at


RESTORED = "restored"  # the cause of a line that stands for steps whose own lines are gone


class _Line(msgspec.Struct):
    """What is needed of a line of the train log; a sample is [uid, attempt, crc]."""

    step: int
    samples: list[tuple[int, int, int]]
    version: int = 0
    cause: str = RESTORED


def newest_checkpoint(paths: RunPaths) -> Path | None:
    """The whole checkpoint with the highest step."""
    return next(iter(_checkpoints(paths)), None)


def _checkpoints(paths: RunPaths) -> list[Path]:
    """All that have a meta.json, newest first."""
    named = [one for one in paths.checkpoints.glob("global_step_*") if re.fullmatch(r"global_step_\d+", one.name)]
    whole = [one for one in named if (one / "meta.json").is_file()]
    return sorted(whole, key=lambda one: int(one.name.rpartition("_")[2]), reverse=True)


def mend_trained_set(paths: RunPaths) -> str | None:
    """Look at the newest checkpoint's trained set, and write it again if it is damaged; what was done, if anything.

    `FileCorrupt` with the remedy if it can not be made again.
    """
    finish_replacements(paths.checkpoints)
    folder = newest_checkpoint(paths)
    fault = _fault_of(folder / NAME) if folder else None
    if folder is None or fault is None:
        return None
    step, samples = _meta(folder, fault)
    found, source = _trained_until(paths.train_log, step), paths.train_log.name
    if len(found) != samples:
        why = f"{paths.train_log} names {len(found)} samples up to its step, not {samples}"
        found, source = _trained_before(paths, folder, step), "the checkpoint before and the log"
        if len(found) != samples:
            raise _beyond_repair(folder, fault, f"{why}; {source} hold {len(found)}")
    found.save(folder / NAME)
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
    """Step and number of samples of a checkpoint."""
    try:
        meta = json.loads((folder / "meta.json").read_bytes())
        return int(meta["step"]), int(meta["samples"])
    except (OSError, ValueError, KeyError, TypeError) as problem:
        raise _beyond_repair(folder, fault, f"its meta.json can not be read either ({problem!r})") from None


def _trained_until(path: Path, step: int) -> TrainedSet:
    """The uids of the lines that stand, up to a step. A line takes the place of all earlier ones with its step or a
    later one; half a line at the end, or one that is none, is left out and so shows in the number."""
    return TrainedSet(uid for line in _standing(path) if line.step <= step for uid, _, _ in line.samples)


def _standing(path: Path) -> list[_Line]:
    standing: list[_Line] = []
    decoder = msgspec.json.Decoder(_Line)
    for text in (path.read_bytes() if path.is_file() else b"").split(b"\n"):
        try:
            line = decoder.decode(text)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            continue
        while standing and standing[-1].step >= line.step:
            standing.pop()
        standing.append(line)
    return standing


def train_log_is_whole(path: Path, least: int) -> bool:
    """Whether it has as many bytes as a checkpoint says that it had, and nothing but lines at its end."""
    try:
        with open(path, "rb") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - TAIL))
            last = file.read().split(b"\n")[1 if size > TAIL else 0 :]
    except OSError:
        return False
    try:
        for text in last[:-1]:
            msgspec.json.decode(text, type=_Line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return False
    return size >= least and last[-1:] == [b""]


def mend_train_log(
    path: Path, step: int, trained: TrainedSet, records: Iterable[Record], crc_of: Callable[[int], int], least: int
) -> str:
    """Write a line again for every step up to `step`: as it stands, or from its record. Samples of `trained` whose line
    is gone stand together in one, with the crc of their prompts; spaces make it `least` bytes long, so that nobody
    takes it for a shortened one. The damaged file is kept; what was done."""
    lines = {line.step: line for line in _standing(path) if line.step <= step}
    for record in records:
        if record.step <= step:
            samples = [(one.uid, one.attempt, one.prompt_crc) for one in record.samples]
            lines[record.step] = _Line(record.step, samples, record.version, record.cause)
    told = TrainedSet(uid for line in lines.values() for uid, _, _ in line.samples)
    gone = [uid for uids in trained.blocks() for uid in uids.tolist() if uid not in told]
    if gone:
        free = next((one for one in range(step, 0, -1) if one not in lines), step)
        line = lines.setdefault(free, _Line(free, []))
        line.samples += [(uid, 0, crc_of(uid)) for uid in gone]
    kept = next(one for k in itertools.count(1) if not (one := path.with_name(f"{path.name}.damaged-{k}")).exists())
    _keep(path, kept)
    data = b"\n".join(msgspec.json.encode(lines[one]) for one in sorted(lines))
    write_whole(path, data + b" " * (least - 1 - len(data)) + b"\n" if data else b"")
    return (
        f"{path} was damaged or removed; it was written again from checkpoint and log, the steps of {len(gone)} "
        f"samples are not told apart any more{f', and what was there is kept as {kept.name}' if kept.exists() else ''}"
    )


def _keep(path: Path, kept: Path) -> None:
    """Give a file a second name, so that a death before it is replaced leaves it where it was."""
    try:
        os.link(path, kept)
    except FileNotFoundError:
        return
    except OSError:  # a file system without second names, or something else than a file
        path.rename(kept)


def _trained_before(paths: RunPaths, folder: Path, step: int) -> TrainedSet:
    """The trained set of the checkpoint before `folder`, and the uids of the records after it, up to a step."""
    older = [one for one in _checkpoints(paths) if one.name != folder.name]
    found, start = TrainedSet(), 0
    if older:
        try:
            found, start = TrainedSet.load(older[0] / NAME), int(older[0].name.rpartition("_")[2])
        except (FileCorrupt, OSError):
            return TrainedSet()
    if paths.wal.is_dir():
        with Wal(paths.wal) as wal:
            for record in wal.records(after=start):
                found.add(sample.uid for sample in record.samples if record.step <= step)
    return found


def _list(folder: Path) -> None:
    """Put the new file's size and checksum in the checkpoint's list (they differ only with another zlib)."""
    path = folder / LISTING
    if not path.is_file():
        return
    listed: dict[str, Any] = json.loads(path.read_bytes())
    data = (folder / NAME).read_bytes()
    entry = [len(data), zlib.crc32(data)]
    if listed.get(NAME) != entry:
        write_whole(path, json.dumps({**listed, NAME: entry}, indent=1).encode())


def _beyond_repair(folder: Path, fault: str, why: str) -> FileCorrupt:
    return FileCorrupt(
        f"{fault}, and it can not be made again: {why}. Move {folder} out of its directory and start again: the run "
        "goes on from the checkpoint before it. Steps that neither that one nor the log holds are gone from its "
        "history; `busrl audit` names their samples as trained_unlogged"
    )
