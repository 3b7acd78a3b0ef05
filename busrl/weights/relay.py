"""Versions of weights on their way to other hosts: taken out of one segment, put into another, in pieces of bytes.

`Snapshot` reads the segment of the run's host, `SegmentCopy` writes that of another, which engines there read as they
would at home (`weights.shm`). Talks to these two files only; knows nothing of sockets, models or torch.

- A snapshot is copied once, under the reader's lock: the learner is held no longer than by an engine.
- A version counts on the other host when its last piece is written, never before; a version at or below the one that is
  there is not begun, so engines never step back.
- A copy that ends in the middle leaves the buffer that engines read as it was.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

import numpy as np

from busrl.errors import WeightsRefused, WeightsTimeout
from busrl.weights.base import is_named
from busrl.weights.shm import (
    CHECKSUM,
    LOGGED,
    PATIENCE_S,
    SEQ,
    STEP,
    VERSION,
    W_PID,
    Bytes,
    Segment,
    VersionReceiver,
    attach_segment,
    create_segment,
)
from busrl.weights.tensors import Manifest


class Taken(NamedTuple):
    """One version: its number, the step that made it, the digest of its values (0: none), its layout, its bytes."""

    version: int
    step: int
    checksum: int
    manifest: bytes
    data: Bytes


class Snapshot(VersionReceiver):
    """The newest whole version of the segment at `path`, in memory of this process."""

    taken: Taken | None = None

    def take(self, refresh: bool = True) -> Taken | None:
        """The newest version, or without `refresh` the one that was taken last; None if there is none, or it was
        written over while it was copied (ask again)."""
        version, _ = self.newest()
        if version < 0:
            return None
        if self.taken is None or (refresh and self.taken.version != version):
            self.taken = None  # its memory goes first: a model is large
            self.taken = self._copied()
        return self.taken

    def piece(self, version: int, at: int, size: int) -> memoryview | None:
        """Bytes of the version that was taken last; None if that is another one, or they lie beyond its end."""
        if self.taken is None or self.taken.version != version or not 0 <= at < at + size <= len(self.taken.data):
            return None
        return memoryview(self.taken.data.data)[at : at + size]

    def _copied(self) -> Taken | None:
        segment = self._current()
        k = segment.newest() if segment is not None else None
        if segment is None or k is None or not segment.lock(k, alone=False):
            return None
        try:
            words = segment.buffer[k]
            seq = int(words[SEQ])
            if seq & 1 or int(words[LOGGED]):
                return None
            head = int(words[VERSION]), int(words[STEP]), int(words[CHECKSUM])
            made = Taken(*head, segment.manifest.to_json(), segment.data[k].copy())
            return made if int(words[SEQ]) == seq else None
        finally:
            segment.unlock(k)


class SegmentCopy:
    """Writes the segment at `path`: `begin` a version, `write` its bytes in any order, then it is `done`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._segment = attach_segment(path, writable=True)
        self._k = -1
        self._head = (0, 0, 0)

    def newest(self) -> int:
        """The version that engines find; -1 if there is none."""
        k = None if self._segment is None else self._segment.newest()
        return -1 if self._segment is None or k is None else self._segment.stamp(k)[0]

    def begin(self, version: int, step: int, checksum: int, manifest: bytes) -> None:
        """WeightsRefused: it is not above what is there. WeightsTimeout: an engine keeps reading the buffer."""
        if version <= self.newest():
            raise WeightsRefused(f"{self.path}: version {version} is not above {self.newest()}, which is there")
        segment = self._for(Manifest.from_json(manifest))
        k = 1 - (segment.newest() or 0)
        if not segment.lock(k, alone=True, patience_s=PATIENCE_S):
            held = segment.stamp(k)[0]
            raise WeightsTimeout(f"{self.path}: an engine reads version {held} for over {PATIENCE_S:g} s")
        segment.begin(k, version)
        self._k, self._head = k, (version, step, checksum)

    def write(self, at: int, data: memoryview) -> None:
        assert self._segment is not None
        self._segment.data[self._k][at : at + len(data)] = np.frombuffer(data, np.uint8)

    def done(self) -> None:
        """All bytes are written: from here on it is the newest version."""
        assert self._segment is not None
        self._segment.complete(self._k, *self._head)
        self.abandon()

    def abandon(self) -> None:
        """Let go of the buffer. One that is not done stays marked as half written, and is written over."""
        if self._segment is not None and self._k >= 0:
            self._segment.unlock(self._k)
        self._k = -1

    def close(self) -> None:
        self.abandon()
        if self._segment is not None:
            self._segment.close()
            self._segment = None

    def _for(self, manifest: Manifest) -> Segment:
        """The segment for this layout: the present one, or a new one under its name."""
        mine = self._segment
        if mine is not None and is_named(self.path, mine.inode) and mine.manifest == manifest:
            mine.words[W_PID] = os.getpid()
            return mine
        self.close()
        self._segment = create_segment(self.path, manifest)
        self._segment.prefault()
        return self._segment
