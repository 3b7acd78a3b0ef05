"""Versions that are folders: an adapter between two steps, or a whole checkpoint for an engine that restarts.

FolderSender publishes them in the learner, FolderReceiver takes them in every process with an engine. Both talk to one
directory and know nothing of adapters, models, engines or the bus; the learner passes in the function that writes a
folder. Imports no torch.

    ROOT/lock                      held by the learner that publishes; its pid
    ROOT/v000000000017-s9/         version 17 of step 9, with busrl.json: every file with its size and CRC-32
    ROOT/held/rollout-0.4711/      versions that pid 4711 has taken: the same files under another name (hard links)
    ROOT/.draft-*, ROOT/.old-*     being written, being removed

- A version gets its name, by a rename, when it is complete; its files never change afterwards. A writer that dies
  earlier leaves a draft, which the next publication removes.
- The directory belongs to this user with mode 0700: another user could change the trained weights in it.
- A process links the files of a version before it checks them, so no learner can remove or change what it uses.
- A folder that is torn, changed or for another base model is refused by name; the version taken before stays in use.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from busrl.errors import (
    DiskFull,
    InsecureDirectory,
    RunInUse,
    SharedMemoryFull,
    UserError,
    WeightsRefused,
    WeightsTimeout,
)
from busrl.ring import OfdLock
from busrl.system.files import FULL, fault_in, listing
from busrl.system.private import exposed
from busrl.topology.kinds import RESTARTS
from busrl.weights.base import NOTHING, FileReceiver, GroupCallbacks, Sender, Write, alive
from busrl.weights.tensors import fingerprint

if TYPE_CHECKING:
    import torch

    from busrl.weights.factory import TransportSettings

STAMP, LOCK, TAKEN = "busrl.json", "lock", "held"
DRAFT, OLD = ".draft-", ".old-"
NAME = re.compile(r"v(\d{12})-s(\d+)")
LAYOUT = 1


# -- the directory: its names, and the check of a version's files ----------------------------------------------


class VersionFolder(NamedTuple):
    """A version in a directory."""

    version: int
    step: int
    path: Path


def name_of(version: int, step: int) -> str:
    return f"v{version:012d}-s{step}"


def versions(root: Path) -> list[VersionFolder]:
    """Complete versions, oldest first; none if the directory does not exist."""
    try:
        names = os.listdir(root)
    except FileNotFoundError:
        return []
    return sorted(VersionFolder(int(m[1]), int(m[2]), root / name) for name in names if (m := NAME.fullmatch(name)))


def newest_in(root: Path) -> tuple[int, int]:
    folders = versions(root)
    return (folders[-1].version, folders[-1].step) if folders else NOTHING


def private(root: Path) -> None:
    """Make the directory, or accept the one that exists; InsecureDirectory unless it is this user's alone."""
    with contextlib.suppress(FileExistsError):
        root.mkdir(mode=0o700)
    if why := "it is no directory" if root.is_symlink() or not root.is_dir() else exposed(root):
        raise InsecureDirectory(
            f"{root}: {why}; published weights need a directory of user {os.geteuid()} with mode 700: have this one "
            "removed"
        )


def stamp(folder: Path, kind: str, version: int, step: int, base: str) -> None:
    """Write the last file of a version: its numbers, kind and base, and the sizes and checksums of all other files."""
    listed = listing(folder, files(folder))
    text = {"layout": LAYOUT, "kind": kind, "version": version, "step": step, "base": base, "files": listed}
    (folder / STAMP).write_text(json.dumps(text, indent=1))


def verify(folder: VersionFolder, at: Path, kind: str, base: str) -> None:
    """WeightsRefused, with the reason, if the files `at` are torn, changed, of another kind or for another model."""
    try:
        fault = _fault(folder, at, json.loads((at / STAMP).read_bytes()), kind, base)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as problem:
        fault = f"{STAMP} cannot be read ({problem})"
    if fault is not None:
        raise WeightsRefused(f"{folder.path}: version {folder.version} is not used: {fault}")


def _fault(folder: VersionFolder, at: Path, stamped: dict[str, Any], kind: str, base: str) -> str | None:
    if stamped["layout"] != LAYOUT or stamped["kind"] != kind:
        return f"it is a {stamped['kind']} of layout {stamped['layout']}; expected {kind} of layout {LAYOUT}"
    if (stamped["version"], stamped["step"]) != (folder.version, folder.step):
        return f"{STAMP} names version {stamped['version']} of step {stamped['step']}"
    if base and stamped["base"] != base:
        return (
            f"it was made for another base model (fingerprint {stamped['base'][:12]}, here {base[:12]}); learner and "
            "engines need the same model.path"
        )
    return fault_in(at, stamped["files"])


def link(source: Path, target: Path) -> None:
    """Give the files of a folder second names by hard links; copy them if the file system has none."""
    for path in files(source):
        there = target / path.relative_to(source)
        there.parent.mkdir(parents=True, exist_ok=True)
        try:
            os.link(path, there)
        except FileNotFoundError:
            raise
        except OSError:  # no hard links
            shutil.copyfile(path, there)


def remove(path: Path) -> None:
    """Remove a version, its name first, so that nobody sees half of a version under it."""
    aside = path.parent / f"{OLD}{path.name}"
    shutil.rmtree(aside, ignore_errors=True)
    try:
        os.rename(path, aside)
    except FileNotFoundError:
        return
    shutil.rmtree(aside, ignore_errors=True)


def files(folder: Path) -> Iterator[Path]:
    return (path for path in sorted(folder.rglob("*")) if path.is_file())


# -- the learner's side ----------------------------------------------------------------------------------------


class FolderSender(Sender):
    """Writes versions with `write(folder, tensors)` and keeps the newest `kept`. `base` is the fingerprint of their
    base model. RunInUse if another learner, which holds the directory's lock, publishes there."""

    def __init__(self, root: Path, write: Write, *, kind: str, kept: int, base: str = "") -> None:
        self.root = root
        self._write, self._kind, self._kept, self._base = write, kind, kept, base
        private(root)
        self._lock = OfdLock(str(root / LOCK))
        self._open()
        self._inherited = bool(versions(root))  # of an earlier learner, perhaps of another run

    def newest(self) -> tuple[int, int]:
        return newest_in(self.root)

    def publish(self, version: int, step: int, tensors: Mapping[str, torch.Tensor]) -> None:
        self._open()
        newest, _ = self.newest()
        if version <= newest:
            if not self._inherited:
                raise UserError(f"{self.root}: version {version} is not above {newest}, which is published")
            for folder in versions(self.root):
                remove(folder.path)
        self._inherited = False
        for path in (*self.root.glob(f"{DRAFT}*"), *self.root.glob(f"{OLD}*")):  # of writers that died
            shutil.rmtree(path, ignore_errors=True)
        draft = self.root / f"{DRAFT}{name_of(version, step)}"
        try:
            draft.mkdir(mode=0o700)
            self._write(draft, tensors)
            self._reached("written")
            stamp(draft, self._kind, version, step, self._base)
            self._reached("stamped")
            os.rename(draft, self.root / name_of(version, step))
        except OSError as problem:
            shutil.rmtree(draft, ignore_errors=True)
            if problem.errno in FULL:
                raise self._full(version, problem) from problem
            raise
        self._reached("renamed")
        for folder in versions(self.root)[: -self._kept]:
            remove(folder.path)

    def close(self) -> None:
        self._lock.release()

    def _open(self) -> None:
        """Make the directory and take its lock, again if somebody removed them."""
        private(self.root)
        if not self._lock.try_acquire():
            holder = self._lock.holder() or "unknown"
            raise RunInUse(f"{self.root}: another learner (pid {holder}) publishes there; end it first")

    def _full(self, version: int, problem: OSError) -> DiskFull | SharedMemoryFull:
        free = shutil.disk_usage(self.root).free
        text = f"{self.root}: {problem.strerror} while version {version} was written ({free} bytes free)"
        if str(self.root).startswith("/dev/shm/"):
            return SharedMemoryFull(f"{text}; free some, or mount /dev/shm larger")
        return DiskFull(f"{text}; free space on that file system")


# -- an engine's side ------------------------------------------------------------------------------------------


class FolderReceiver(FileReceiver):
    """Takes versions of `kind` into a directory of this process, and keeps the newest `kept` there. "adapter": for the
    model folder `base`. "folder": for an engine that restarts; it is an adapter if `base` is not None. Only a version
    above the last one is taken."""

    def __init__(
        self, root: Path, name: str, *, kind: Literal["adapter", "folder"], kept: int = 1, base: Path | None = None,
        timeout_s: float = 10.0,
    ) -> None:
        self.root, self.kind = root, kind
        self._mine = root / TAKEN / f"{name.replace('/', '-')}.{os.getpid()}"
        self._kept, self._base, self._timeout_s = kept, base, timeout_s
        self._fingerprint = ""
        self._last = VersionFolder(*NOTHING, Path())

    def newest(self) -> tuple[int, int]:
        return newest_in(self.root)

    def take(self) -> tuple[int, int, Path]:
        """The newest complete version, the learner's step, and a directory of its files. WeightsRefused if it cannot be
        used here; WeightsTimeout if there is none."""
        deadline = time.monotonic() + self._timeout_s
        while True:
            folders = versions(self.root)
            if folders and folders[-1].version <= self._last.version:
                return self._last
            if folders:
                with contextlib.suppress(FileNotFoundError):  # newer versions have replaced it: look again
                    return self._adopt(folders[-1])
            if not folders or time.monotonic() > deadline:
                raise WeightsTimeout(f"{self._writer()}: no complete version within {self._timeout_s:g} s")

    def close(self) -> None:
        shutil.rmtree(self._mine, ignore_errors=True)

    def _adopt(self, folder: VersionFolder) -> VersionFolder:
        """Link the files, then check the links, so that nothing changes after the check."""
        self._make_room()
        draft = self._mine / f"{DRAFT}{folder.path.name}"
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir(mode=0o700)
        try:
            link(folder.path, draft)
            self._reached("linked")
            self._look_at(folder, draft)
            adopted = folder._replace(path=self._mine / folder.path.name)
            os.rename(draft, adopted.path)
        except BaseException:
            shutil.rmtree(draft, ignore_errors=True)
            raise
        self._reached("taken")
        self._last = adopted
        for old in versions(self._mine)[: -self._kept]:
            remove(old.path)
        return adopted

    def _writer(self) -> str:
        try:
            pid = int((self.root / LOCK).read_text() or 0)
        except (OSError, ValueError):
            return f"{self.root} does not exist: the learner has published nothing yet"
        return f"{self.root}: the learner (pid {pid}) is {alive(pid)}"

    def _look_at(self, folder: VersionFolder, draft: Path) -> None:
        if self._base is not None and not self._fingerprint:
            self._fingerprint = fingerprint(self._base)
        try:
            verify(folder, draft, "adapter" if self._base is not None else "checkpoint", self._fingerprint)
        except WeightsRefused:
            if not folder.path.exists():  # it was removed while it was linked, which explains a missing file
                raise FileNotFoundError(folder.path) from None
            raise

    def _make_room(self) -> None:
        """Make this process's directory, and remove those of its predecessors that died."""
        if self._mine.is_dir():
            return
        parent = self._mine.parent
        private(parent)
        for path in parent.glob(f"{self._mine.stem}.*"):
            if alive(path.name.rpartition(".")[2]) == "dead":
                shutil.rmtree(path, ignore_errors=True)
        self._mine.mkdir(mode=0o700)


# -- as a transport --------------------------------------------------------------------------------------------


def make_sender(settings: TransportSettings, callbacks: GroupCallbacks | None, write: Write | None) -> FolderSender:
    assert write is not None
    kind, base = ("adapter", fingerprint(Path(settings.base))) if settings.base else ("checkpoint", "")
    return FolderSender(Path(settings.folders), write, kind=kind, kept=settings.kept, base=base)


def make_receiver(settings: TransportSettings, name: str) -> FolderReceiver:
    return FolderReceiver(
        Path(settings.folders), name, kind="folder" if settings.transport in RESTARTS else "adapter",
        kept=settings.kept_by_engine, base=Path(settings.base) if settings.base else None,
        timeout_s=settings.timeout_s,
    )
