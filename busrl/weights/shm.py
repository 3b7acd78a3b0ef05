"""Weights through shared memory: the learner writes one of two buffers, engines on the host copy the newest one.

Used by the learner and by everybody with an engine, behind `weights.base`. Talks to one file in /dev/shm
(`weights.segment`); which version is newest is read by `weights.versions`. Knows nothing of the bus or of models.

- Each buffer has a sequence word, odd while it is written. A reader copies, then looks at the word again: a copy that
  was overtaken, or whose writer died in its middle, is never used.
- Where the machine may reorder memory accesses (all but x86-64) a checksum over the bytes decides as well.
- A receiver copies into a block of its own first, so that the model's parameters never hold half a version.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from busrl.errors import UserError
from busrl.weights import segment as layout
from busrl.weights.base import NOTHING
from busrl.weights.manifest import Manifest
from busrl.weights.segment import CHECKSUM, SEQ, STEP, VERSION, WRITING, Segment
from busrl.weights.versions import VersionReceiver, stamp_of

ORDERED_STORES = platform.machine() in ("x86_64", "AMD64")


class ShmSender:
    """Writes versions. One at a time per path: the learner's lock sees to that."""

    def __init__(self, path: str | Path, *, checksums: bool = not ORDERED_STORES) -> None:
        self.path = Path(path)
        self.hook: Callable[[str], None] | None = None  # called with the name of each tensor copied; for fault tests
        self._checksums = checksums
        self._segment = layout.attach(self.path, writable=True)
        self._inherited = self._segment is not None  # from a learner before this one, perhaps of another run

    def newest(self) -> tuple[int, int]:
        k = None if self._segment is None else self._segment.newest()
        return NOTHING if self._segment is None or k is None else stamp_of(self._segment, k)

    def publish(self, version: int, step: int, named: dict[str, torch.Tensor]) -> None:
        newest, _ = self.newest()
        if version <= newest and not self._inherited:
            raise UserError(f"{self.path}: version {version} is not above {newest}, which is published; versions grow")
        segment = self._for(Manifest.of(named), above=newest < version)
        k = 1 - (segment.newest() or 0)  # never the newest complete one; 1 if there is none
        words = segment.buffer[k]
        words[WRITING] = version
        words[SEQ] = (int(words[SEQ]) + 1) | 1  # odd, also over what a dead writer left
        segment.manifest.gather(named, torch.from_numpy(segment.data[k]), self.hook)
        words[VERSION], words[STEP] = version, step
        words[CHECKSUM] = layout.checksum(version, step, segment.data[k]) if self._checksums else 0
        words[SEQ] = int(words[SEQ]) + 1

    def forget(self, member: str) -> None:
        """Nobody is waited for here."""

    def close(self) -> None:
        if self._segment is not None:
            self._segment.close()
            self._segment = None

    def _for(self, manifest: Manifest, above: bool) -> Segment:
        """The segment for this layout: the one there is, or a new one in place of another run's or model's.

        Or of one whose file was removed: whoever maps it still has its old versions, and nobody would get a new one.
        """
        inherited, self._inherited = self._inherited, False
        mine = self._segment
        if mine is not None and mine.manifest_json == manifest.to_json() and above and mine.still_named():
            if inherited:
                mine.words[layout.W_PID] = os.getpid()
            return mine
        self.close()
        self._segment = layout.create(self.path, manifest)
        return self._segment


class ShmReceiver(VersionReceiver):
    """Copies the newest version. `timeout_s` bounds a fetch that keeps being overtaken."""

    def __init__(self, path: str | Path, *, timeout_s: float = 10.0) -> None:
        super().__init__(path, timeout_s=timeout_s)
        self.hook: Callable[[str], None] | None = None  # called between a copy and its check; for fault tests
        self._staging = np.empty(0, np.uint8)

    def _take(self, segment: Segment, params: dict[str, torch.Tensor]) -> tuple[int, int] | None:
        stamp = self._copy(segment)
        if stamp is not None:
            segment.manifest.scatter(torch.from_numpy(self._staging), params)
        return stamp

    def _copy(self, segment: Segment) -> tuple[int, int] | None:
        """Copy the newest complete buffer into `_staging`; None if it was written to meanwhile."""
        k = segment.newest()
        if k is None:
            return None
        words, data = segment.buffer[k], segment.data[k]
        seq, stamp, check = int(words[SEQ]), stamp_of(segment, k), int(words[CHECKSUM])
        if len(self._staging) != len(data):
            self._staging = np.empty(len(data), np.uint8)
        self._staging[:] = data
        if self.hook is not None:
            self.hook("copied")
        if seq & 1 or int(words[SEQ]) != seq:
            return None
        if check and check != layout.checksum(*stamp, self._staging):
            return None
        return stamp
