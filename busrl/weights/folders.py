"""Versions as folders: where they lie, what they are called, and how a whole one is told from a torn one.

Used by the sender and the receiver of folders (`folder_sender`, `folder_receiver`) and by nobody else. Talks to the
file system only; knows nothing of adapters, models or engines, and imports no torch.

    ROOT/lock                      held by the learner that publishes; its pid
    ROOT/v000000000017-s9/         version 17 of step 9, with busrl.json: every file with its size and CRC-32
    ROOT/held/rollout-0.4711/      versions that pid 4711 has taken: the same files under another name (hard links)
    ROOT/.draft-*, ROOT/.old-*     being written, being removed

- A version has its name complete, by a rename; its files never change afterwards.
- The directory is 0700 and its owner's: who could write here could change what is trained.

Publishes versions as folders: an adapter, or a whole checkpoint.

Used by the learner behind `weights.base`; what goes into a folder is written by a function that it brings. Talks to
one directory (`weights.folders`). Knows nothing of adapters, models or the bus.

- One learner per directory: it holds a lock there, and a second one is refused by name.
- A version is written beside its name, stamped with the checksums of its files, then renamed. Who dies on the way
  leaves a draft, which the next publication removes.
- The newest `kept` versions stay; an engine that took one keeps its own links (`weights.folder_receiver`).

Takes versions that are folders, for an engine that loads files: an adapter between two steps, or a checkpoint.

Used by every process with an engine, behind `weights.base`; talks to the directory of `weights.folders`. Knows nothing
of adapters, models or the bus, and imports no torch.

- `take` gives a directory of this process's own: links to the published files, which no learner can take away. It stays
  until `held` newer ones were taken.
- A folder that is torn, changed or for another base model is refused by name; what was taken before stays in use.
- A version never goes back: one that is not above the last one taken is not taken again.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import re
import shutil
import stat
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from busrl import checksums
from busrl.errors import (
    BugError,
    DiskFull,
    InsecureDirectory,
    RunInUse,
    SharedMemoryFull,
    UserError,
    WeightsRefused,
    WeightsTimeout,
)
from busrl.weights.base import NOTHING, Copies, Hook, Kind
from busrl.weights.tensors import fingerprint

if TYPE_CHECKING:
    import torch



# -- Versions as folders: where they lie, what they are called, and how a whole one is told from a torn one -----------


STAMP, LOCK, HELD = "busrl.json", "lock", "held"
DRAFT, OLD = ".draft-", ".old-"
NAME = re.compile(r"v(\d{12})-s(\d+)")
LAYOUT = 1


class Found(NamedTuple):
    """A version that lies in a directory."""

    version: int
    step: int
    path: Path


def name_of(version: int, step: int) -> str:
    return f"v{version:012d}-s{step}"


def versions(root: Path) -> list[Found]:
    """Complete versions, oldest first; empty where there is no such directory."""
    try:
        names = os.listdir(root)
    except FileNotFoundError:
        return []
    return sorted(Found(int(m[1]), int(m[2]), root / name) for name in names if (m := NAME.fullmatch(name)))


def private(root: Path) -> None:
    """Make the directory, or accept the one that is there: InsecureDirectory unless it is ours alone."""
    try:
        root.mkdir(mode=0o700)
        return
    except FileExistsError:
        found = root.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
        raise InsecureDirectory(
            f"{root}: owner {found.st_uid}, mode {stat.S_IMODE(found.st_mode):o}; published weights lie in a directory "
            f"of user {os.geteuid()} with mode 700: have it removed"
        )


def stamp(folder: Path, kind: str, version: int, step: int, base: str) -> None:
    """Write down what is in the folder. The last file of a version."""
    listed = checksums.listing(folder, files(folder))
    told = {"layout": LAYOUT, "kind": kind, "version": version, "step": step, "base": base, "files": listed}
    (folder / STAMP).write_text(json.dumps(told, indent=1))


def verify(found: Found, at: Path, kind: str, base: str) -> None:
    """WeightsRefused, with the reason, if the files `at` are torn, changed, of another kind or for another model."""
    try:
        told: dict[str, Any] = json.loads((at / STAMP).read_bytes())
        fault = _fault(found, at, told, kind, base)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as problem:
        fault = f"{STAMP} can not be read ({problem})"
    if fault is not None:
        raise WeightsRefused(f"{found.path}: version {found.version} is not used: {fault}")


def _fault(found: Found, at: Path, told: dict[str, Any], kind: str, base: str) -> str | None:
    if told["layout"] != LAYOUT or told["kind"] != kind:
        return f"it is a {told['kind']} of layout {told['layout']}, wanted is {kind} of layout {LAYOUT}"
    if (told["version"], told["step"]) != (found.version, found.step):
        return f"it says that it is version {told['version']} of step {told['step']}"
    if base and told["base"] != base:
        return (
            f"it was made for another base model (fingerprint {told['base'][:12]}, here {base[:12]}); learner and "
            "engines need the same model.path"
        )
    return checksums.fault_in(at, told["files"])


def link(source: Path, target: Path) -> None:
    """The files of a folder under a second name, without a copy where the file system can do that."""
    for path in files(source, STAMP):
        there = target / path.relative_to(source)
        there.parent.mkdir(parents=True, exist_ok=True)
        try:
            os.link(path, there)
        except FileNotFoundError:
            raise
        except OSError:  # no hard links here
            shutil.copyfile(path, there)


def remove(path: Path) -> None:
    """Take away the name first, so that no half of it is ever seen under it."""
    aside = path.parent / f"{OLD}{path.name}"
    shutil.rmtree(aside, ignore_errors=True)
    try:
        os.rename(path, aside)
    except FileNotFoundError:
        return
    shutil.rmtree(aside, ignore_errors=True)


def files(folder: Path, *more: str) -> Iterator[Path]:
    """Every file below, the stamp left out unless it is named."""
    return (path for path in sorted(folder.rglob("*")) if path.is_file() and (path.name != STAMP or STAMP in more))


def writer_of(root: Path) -> str:
    """Who publishes there, in words, for an error."""
    try:
        pid = int((root / LOCK).read_text() or 0)
    except (OSError, ValueError):
        return f"{root} is not there: the learner has published nothing yet"
    return f"{root}: the learner (pid {pid}) is {'alive' if os.path.exists(f'/proc/{pid}') else 'dead'}"


# -- Publishes versions as folders: an adapter, or a whole checkpoint -------------------------------------------------


Write = Callable[[Path, "Mapping[str, torch.Tensor]"], None]
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class FolderSender(Copies):
    """Writes versions with `write(folder, named)`. `base` is the fingerprint of the model that they belong to."""

    def __init__(self, root: Path, write: Write, *, kind: str, kept: int, base: str = "") -> None:
        self.root = root
        self.hook: Hook | None = None  # called with the name of each step
        self._write, self._kind, self._kept, self._base = write, kind, kept, base
        self._lock = -1
        self._open()
        self._inherited = bool(versions(root))  # of a learner before this one, perhaps of another run

    def newest(self) -> tuple[int, int]:
        found = versions(self.root)
        return (found[-1].version, found[-1].step) if found else NOTHING

    def publish(self, version: int, step: int, named: dict[str, torch.Tensor]) -> None:
        self._open()
        newest, _ = self.newest()
        if version <= newest:
            if not self._inherited:
                raise UserError(f"{self.root}: version {version} is not above {newest}, which is published")
            for found in versions(self.root):
                remove(found.path)
        self._inherited = False
        self._clear()
        draft = self.root / f"{DRAFT}{name_of(version, step)}"
        try:
            draft.mkdir(mode=0o700)
            self._write(draft, named)
            self._at("written")
            stamp(draft, self._kind, version, step, self._base)
            self._at("stamped")
            os.rename(draft, self.root / name_of(version, step))
        except OSError as problem:
            shutil.rmtree(draft, ignore_errors=True)
            if problem.errno in FULL:
                raise self._full(version, problem) from problem
            raise
        self._at("renamed")
        for found in versions(self.root)[: -self._kept]:
            remove(found.path)

    def close(self) -> None:
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def _open(self) -> None:
        """The directory and its lock; anew if somebody removed it."""
        private(self.root)
        path = self.root / LOCK
        if self._lock >= 0:
            if path.exists() and os.fstat(self._lock).st_ino == path.stat().st_ino:
                return
            self.close()
        lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(lock, 32, 0).decode(errors="replace") or "unknown"
            os.close(lock)
            raise RunInUse(f"{self.root}: another learner (pid {holder}) publishes there; end it first") from None
        os.ftruncate(lock, 0)
        os.pwrite(lock, str(os.getpid()).encode(), 0)
        self._lock = lock

    def _clear(self) -> None:
        """What writers left that died."""
        for path in (*self.root.glob(f"{DRAFT}*"), *self.root.glob(f"{OLD}*")):
            shutil.rmtree(path, ignore_errors=True)

    def _full(self, version: int, problem: OSError) -> DiskFull | SharedMemoryFull:
        free = shutil.disk_usage(self.root).free
        text = f"{self.root}: {problem.strerror} while version {version} was written ({free} bytes free)"
        if str(self.root).startswith("/dev/shm/"):
            return SharedMemoryFull(f"{text}; free some, or mount /dev/shm larger")
        return DiskFull(f"{text}; free space on that file system")

    def _at(self, step: str) -> None:
        if self.hook is not None:
            self.hook(step)


# -- Takes versions that are folders, for an engine that loads files: an adapter between two steps, or a checkpoint ---


LOOK_EVERY_S = 0.005


class FolderReceiver:
    """`kind`: "adapter", or "folder" for an engine that restarts. `base`: the model folder that adapters belong to."""

    def __init__(
        self, root: Path, name: str, *, kind: Kind, held: int = 1, base: Path | None = None, timeout_s: float = 10.0
    ) -> None:
        self.root = root
        self.kind: Kind = kind
        self.hook: Callable[[str], None] | None = None  # called with the name of each step; for fault tests
        self._mine = root / HELD / f"{name.replace('/', '-')}.{os.getpid()}"
        self._prefix = f"{name.replace('/', '-')}."
        self._held, self._base, self._timeout_s = held, base, timeout_s
        self._fingerprint = ""
        self._last = Found(*NOTHING, Path())

    def newest(self) -> tuple[int, int]:
        found = versions(self.root)
        return (found[-1].version, found[-1].step) if found else NOTHING

    def wait_for(self, version: int, timeout_s: float) -> tuple[int, int]:
        deadline, pause = time.monotonic() + timeout_s, threading.Event()
        while (found := self.newest())[0] < version:
            if time.monotonic() > deadline:
                where = writer_of(self.root)
                raise WeightsTimeout(f"{where}: no version {version} after {timeout_s:g} s, newest {found[0]}")
            pause.wait(LOOK_EVERY_S)
        return found

    def take(self) -> tuple[int, int, Path]:
        """The newest complete version: which it is, the learner's step, and a directory of its files.

        WeightsRefused for one that can not be used here; WeightsTimeout if none is there.
        """
        deadline = time.monotonic() + self._timeout_s
        while True:
            found = versions(self.root)
            if found and found[-1].version <= self._last.version:
                return self._last
            if found:
                with contextlib.suppress(FileNotFoundError):  # newer ones took its place meanwhile: look again
                    return self._adopt(found[-1])
            if not found or time.monotonic() > deadline:
                where = writer_of(self.root)
                raise WeightsTimeout(f"{where}: no complete version within {self._timeout_s:g} s")

    def fetch(self, params: dict[str, torch.Tensor]) -> tuple[int, int]:
        raise BugError(f"a version of {self.root} is a folder: it is taken, not fetched")

    def close(self) -> None:
        shutil.rmtree(self._mine, ignore_errors=True)

    def _adopt(self, found: Found) -> Found:
        """Own links to the files first, then a look at them: what was looked at can not change any more."""
        self._make_room()
        draft = self._mine / f"{DRAFT}{found.path.name}"
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir(mode=0o700)
        try:
            link(found.path, draft)
            self._at("linked")
            self._look_at(found, draft)
            taken = found._replace(path=self._mine / found.path.name)
            os.rename(draft, taken.path)
        except BaseException:
            shutil.rmtree(draft, ignore_errors=True)
            raise
        self._at("taken")
        self._last = taken
        for old in versions(self._mine)[: -self._held]:
            remove(old.path)
        return taken

    def _look_at(self, found: Found, draft: Path) -> None:
        try:
            verify(found, draft, self._kind, self._own_base())
        except WeightsRefused:
            if not found.path.exists():  # it went while it was linked: then a missing file is no fault of it
                raise FileNotFoundError(found.path) from None
            raise

    @property
    def _kind(self) -> str:
        """The kind of folder that is published; an engine that restarts takes either."""
        return "adapter" if self._base is not None else "checkpoint"

    def _own_base(self) -> str:
        if self._base is not None and not self._fingerprint:
            self._fingerprint = fingerprint(self._base)
        return self._fingerprint

    def _make_room(self) -> None:
        """A directory of one's own, without those of predecessors that died."""
        if self._mine.is_dir():
            return
        parent = self._mine.parent
        private(parent)
        for path in parent.glob(f"{self._prefix}*"):
            if not os.path.exists(f"/proc/{path.name.rpartition('.')[2]}"):
                shutil.rmtree(path, ignore_errors=True)
        self._mine.mkdir(mode=0o700)

    def _at(self, step: str) -> None:
        if self.hook is not None:
            self.hook(step)
