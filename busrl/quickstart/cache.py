"""Cache of quickstart models: where they live, which process may make one, and how a finished one appears.

A folder `${XDG_CACHE_HOME:-~/.cache}/busrl/<name>-<recipe hash>/` holds `model/` (a Hugging Face folder),
`train.jsonl`, `validation.jsonl` and `made.json`. Talks to the file system and starts the maker as a child, so that a
caller such as `busrl launch` never imports torch. Knows nothing of how a model is made.

- A folder under its final name is complete: it is made beside it under a hidden name and renamed once.
- One process makes at a time (the lock `<folder>.lock`, which the kernel drops with its holder); others wait for it,
  up to a deadline, and then use what it made. It removes what a killed one left under the hidden name.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from busrl.errors import LockTimeout, MachineError, PeerTimeout
from busrl.quickstart.task import Recipe, find
from busrl.system import files
from busrl.system.imports import interpreter

WAIT_S = 900.0  # many times what making takes on a loaded machine


@dataclass(frozen=True)
class Paths:
    """Files that a run needs of a quickstart, all of them complete."""

    model: Path
    train: Path
    validation: Path

    @classmethod
    def within(cls, folder: Path) -> Paths:
        return cls(folder / "model", folder / "train.jsonl", folder / "validation.jsonl")


def folder_of(recipe: Recipe) -> Path:
    return files.user_folder("XDG_CACHE_HOME", ".cache") / "busrl" / recipe.folder


def paths(name: str) -> Paths | None:
    """The paths of a made quickstart, or None if it has still to be made. Makes nothing."""
    folder = folder_of(find(name))
    return Paths.within(folder) if (folder / "made.json").is_file() else None


def ensure(name: str) -> Paths:
    """The paths of a quickstart; makes it first, in a child process with a progress bar, if it is not there."""
    ready = paths(name)
    if ready is not None:
        return ready
    files.make_folder(folder_of(find(name)).parent, "set XDG_CACHE_HOME to a folder that can be written")
    command = ["busrl.quickstart", "--name", name]
    read, write = os.pipe()
    with open(read) as report:
        arguments = [*interpreter(), *command, "--why", f"/dev/fd/{write}"]
        try:
            ended = subprocess.run(arguments, stdout=sys.stderr, pass_fds=(write,), check=False)
        finally:
            os.close(write)
        why = report.read() or _end_of(ended.returncode)
    ready = paths(name)
    if ended.returncode != 0 or ready is None:
        again = f"{sys.executable} -m {' '.join(command)}"
        raise MachineError(f"quickstart {name!r} could not be made: {why}; try again with: {again}")
    return ready


def _end_of(code: int) -> str:
    """Describe the end of a maker that reported no cause."""
    if code == -signal.SIGKILL:
        return "it was killed (SIGKILL): by somebody, or by the kernel for want of memory (see `dmesg`)"
    return f"it ended with {f'signal {-code}' if code < 0 else f'status {code}'} and said nothing"


def make_once(recipe: Recipe, fill: Callable[[Path], None], *, force: bool = False, wait_s: float = WAIT_S) -> Paths:
    """Let `fill` write a folder and give it its final name; nothing is made if another process just did it."""
    folder = folder_of(recipe)
    folder.parent.mkdir(parents=True, exist_ok=True)
    before = _identity(folder)
    with _only_maker(folder, wait_s):
        # With `force`, a folder that appeared while we waited for the lock is as fresh as ours would be.
        if paths(recipe.name) is None or (force and _identity(folder) == before):
            _fill_and_rename(folder, fill)
    return Paths.within(folder)


def _identity(folder: Path) -> int | None:
    return folder.stat().st_ino if folder.exists() else None


def _fill_and_rename(folder: Path, fill: Callable[[Path], None]) -> None:
    hidden = folder.with_name(f".{folder.name}.making")
    replaced = folder.with_name(f".{folder.name}.replaced")
    for leftover in (hidden, replaced):
        shutil.rmtree(leftover, ignore_errors=True)
    hidden.mkdir()
    try:
        fill(hidden)
        if folder.exists():
            folder.rename(replaced)
        hidden.rename(folder)
    finally:
        for leftover in (hidden, replaced):
            shutil.rmtree(leftover, ignore_errors=True)


@contextmanager
def _only_maker(folder: Path, wait_s: float) -> Iterator[None]:
    """Hold the folder's lock; a process that holds it is named on stderr, and in the PeerTimeout."""
    from busrl.ring import OfdLock  # with the compiled core, which a made quickstart does not need

    lock = OfdLock(str(folder.with_name(f"{folder.name}.lock")))
    if not lock.try_acquire():
        print(f"waiting for process {lock.holder()}, which is making {folder}", file=sys.stderr, flush=True)
        try:
            lock.acquire(wait_s)
        except LockTimeout as problem:
            raise PeerTimeout(f"{problem}; see what it does, or end it") from None
    try:
        yield
    finally:
        lock.release()
