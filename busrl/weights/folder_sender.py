"""Publishes versions as folders: an adapter, or a whole checkpoint.

Used by the learner behind `weights.base`; what goes into a folder is written by a function that it brings. Talks to
one directory (`weights.folders`). Knows nothing of adapters, models or the bus.

- One learner per directory: it holds a lock there, and a second one is refused by name.
- A version is written beside its name, stamped with the checksums of its files, then renamed. Who dies on the way
  leaves a draft, which the next publication removes.
- The newest `kept` versions stay; an engine that took one keeps its own links (`weights.folder_receiver`).
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from busrl.errors import DiskFull, RunInUse, SharedMemoryFull, UserError
from busrl.weights import folders
from busrl.weights.base import NOTHING, Copies, Hook

if TYPE_CHECKING:
    import torch

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
        self._inherited = bool(folders.versions(root))  # of a learner before this one, perhaps of another run

    def newest(self) -> tuple[int, int]:
        found = folders.versions(self.root)
        return (found[-1].version, found[-1].step) if found else NOTHING

    def publish(self, version: int, step: int, named: dict[str, torch.Tensor]) -> None:
        self._open()
        newest, _ = self.newest()
        if version <= newest:
            if not self._inherited:
                raise UserError(f"{self.root}: version {version} is not above {newest}, which is published")
            for found in folders.versions(self.root):
                folders.remove(found.path)
        self._inherited = False
        self._clear()
        draft = self.root / f"{folders.DRAFT}{folders.name_of(version, step)}"
        try:
            draft.mkdir(mode=0o700)
            self._write(draft, named)
            self._at("written")
            folders.stamp(draft, self._kind, version, step, self._base)
            self._at("stamped")
            os.rename(draft, self.root / folders.name_of(version, step))
        except OSError as problem:
            shutil.rmtree(draft, ignore_errors=True)
            if problem.errno in FULL:
                raise self._full(version, problem) from problem
            raise
        self._at("renamed")
        for found in folders.versions(self.root)[: -self._kept]:
            folders.remove(found.path)

    def close(self) -> None:
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def _open(self) -> None:
        """The directory and its lock; anew if somebody removed it."""
        folders.private(self.root)
        path = self.root / folders.LOCK
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
        for path in (*self.root.glob(f"{folders.DRAFT}*"), *self.root.glob(f"{folders.OLD}*")):
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
