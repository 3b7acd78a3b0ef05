"""Takes versions that are folders, for an engine that loads files: an adapter between two steps, or a checkpoint.

Used by every process with an engine, behind `weights.base`; talks to the directory of `weights.folders`. Knows nothing
of adapters, models or the bus, and imports no torch.

- `take` gives a directory of this process's own: links to the published files, which no learner can take away. It stays
  until `held` newer ones were taken.
- A folder that is torn, changed or for another base model is refused by name; what was taken before stays in use.
- A version never goes back: one that is not above the last one taken is not taken again.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from busrl.errors import BugError, WeightsRefused, WeightsTimeout
from busrl.weights import folders
from busrl.weights.base import NOTHING, Kind, StepTable
from busrl.weights.fingerprint import fingerprint

if TYPE_CHECKING:
    import torch

LOOK_EVERY_S = 0.005


class FolderReceiver:
    """`kind`: "adapter", or "folder" for an engine that restarts. `base`: the model folder that adapters belong to."""

    def __init__(
        self, root: Path, name: str, *, kind: Kind, held: int = 1, base: Path | None = None, timeout_s: float = 10.0
    ) -> None:
        self.root = root
        self.kind: Kind = kind
        self.hook: Callable[[str], None] | None = None  # called with the name of each step; for fault tests
        self._mine = root / folders.HELD / f"{name.replace('/', '-')}.{os.getpid()}"
        self._prefix = f"{name.replace('/', '-')}."
        self._held, self._base, self._timeout_s = held, base, timeout_s
        self._fingerprint = ""
        self._steps = StepTable()
        self._last = folders.Found(*NOTHING, Path())

    def newest(self) -> tuple[int, int]:
        found = folders.versions(self.root)
        return (found[-1].version, found[-1].step) if found else NOTHING

    def wait_for(self, version: int, timeout_s: float) -> tuple[int, int]:
        deadline, pause = time.monotonic() + timeout_s, threading.Event()
        while (found := self.newest())[0] < version:
            if time.monotonic() > deadline:
                where = folders.writer_of(self.root)
                raise WeightsTimeout(f"{where}: no version {version} after {timeout_s:g} s, newest {found[0]}")
            pause.wait(LOOK_EVERY_S)
        return found

    def take(self) -> tuple[int, int, Path]:
        """The newest complete version: which it is, the learner's step, and a directory of its files.

        WeightsRefused for one that can not be used here; WeightsTimeout if none is there.
        """
        deadline = time.monotonic() + self._timeout_s
        while True:
            found = folders.versions(self.root)
            if found and found[-1].version <= self._last.version:
                return self._last
            if found:
                with contextlib.suppress(FileNotFoundError):  # newer ones took its place meanwhile: look again
                    return self._adopt(found[-1])
            if not found or time.monotonic() > deadline:
                where = folders.writer_of(self.root)
                raise WeightsTimeout(f"{where}: no complete version within {self._timeout_s:g} s")

    def fetch(self, params: dict[str, torch.Tensor]) -> tuple[int, int]:
        raise BugError(f"a version of {self.root} is a folder: it is taken, not fetched")

    def step_of(self, version: int) -> int:
        return self._steps.step_of(version)

    def close(self) -> None:
        shutil.rmtree(self._mine, ignore_errors=True)

    def _adopt(self, found: folders.Found) -> folders.Found:
        """Own links to the files first, then a look at them: what was looked at can not change any more."""
        self._make_room()
        draft = self._mine / f"{folders.DRAFT}{found.path.name}"
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir(mode=0o700)
        try:
            folders.link(found.path, draft)
            self._at("linked")
            self._look_at(found, draft)
            taken = found._replace(path=self._mine / found.path.name)
            os.rename(draft, taken.path)
        except BaseException:
            shutil.rmtree(draft, ignore_errors=True)
            raise
        self._at("taken")
        self._last = taken
        self._steps.add(taken.version, taken.step)
        for old in folders.versions(self._mine)[: -self._held]:
            folders.remove(old.path)
        return taken

    def _look_at(self, found: folders.Found, draft: Path) -> None:
        try:
            folders.verify(found, draft, self._kind, self._own_base())
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
        folders.private(parent)
        for path in parent.glob(f"{self._prefix}*"):
            if not os.path.exists(f"/proc/{path.name.rpartition('.')[2]}"):
                shutil.rmtree(path, ignore_errors=True)
        self._mine.mkdir(mode=0o700)

    def _at(self, step: str) -> None:
        if self.hook is not None:
            self.hook(step)
