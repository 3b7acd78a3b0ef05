"""Weights through shared memory: the learner writes one of two buffers, engines on the host copy the newest one.

Used by the learner and by everybody with an engine, behind `weights.base`. Talks to one file in /dev/shm
(`weights.segment`); which version is newest is read by `weights.versions`, what changed by `weights.sparse`. Knows
nothing of the bus or of models.

- One copy each way: the tensors go straight into a buffer, a buffer straight into the tensors. The writer leaves a
  buffer alone while somebody reads it, and each buffer has a sequence word, odd while it is written: a copy that was
  overtaken all the same (its reader was stopped), or whose writer died in its middle, is made again before `fetch`
  returns. So the engine, which waits in `fetch`, never runs with half a version; a `fetch` that raises after it has
  begun says that the model may not be used.
- Where the machine may reorder memory accesses (all but x86-64) a digest of the values decides as well, elsewhere if
  the learner was asked to write one (weights.checksum).
- With sparse updates a version may be a frame in the log behind the newest full one; who has that full version takes
  the frames since, who has not takes it and all its frames.
"""

from __future__ import annotations

import logging
import os
import platform
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from busrl.errors import UserError
from busrl.weights import segment as layout
from busrl.weights.base import NOTHING, Copies, Hook
from busrl.weights.copies import is_plain
from busrl.weights.held import Held
from busrl.weights.manifest import Manifest
from busrl.weights.segment import CHECKSUM, LOGGED, SEQ, STEP, VERSION, WRITING, Segment
from busrl.weights.sparse import Refused, Shadow, apply, split, unpack
from busrl.weights.versions import VersionReceiver

log = logging.getLogger("busrl")
ORDERED_STORES = platform.machine() in ("x86_64", "AMD64")
PATIENCE_S = 1.0  # a copy takes a fraction of it; a reader that was stopped in one does it again


class ShmSender(Copies):
    """Writes versions. One at a time per path: the learner's lock sees to that. `threshold` 0: no sparse updates."""

    def __init__(
        self,
        path: str | Path,
        *,
        checksums: bool = not ORDERED_STORES,
        threshold: float = 0.0,
        key_every: int = 32,
    ) -> None:
        self.path = Path(path)
        self.hook: Hook | None = None  # called with the name of each tensor copied
        self._checksums = checksums
        self._threshold, self._key_every = threshold, key_every
        self._shadow: Shadow | None = None
        self._segment = layout.attach(self.path, writable=True)
        self._inherited = self._segment is not None  # from a learner before this one, perhaps of another run

    def newest(self) -> tuple[int, int]:
        k = None if self._segment is None else self._segment.newest()
        return NOTHING if self._segment is None or k is None else self._segment.stamp(k)

    def publish(self, version: int, step: int, named: dict[str, torch.Tensor]) -> None:
        newest, _ = self.newest()
        if version <= newest and not self._inherited:
            raise UserError(f"{self.path}: version {version} is not above {newest}, which is published; versions grow")
        segment = self._for(named, above=newest < version)
        if not self._write_changes(segment, newest, version, step, named):
            self._write_all(segment, version, step, named)

    def close(self) -> None:
        self._shadow = None
        if self._segment is not None:
            self._segment.close()
            self._segment = None

    def _write_all(self, segment: Segment, version: int, step: int, named: dict[str, torch.Tensor]) -> None:
        k = 1 - (segment.newest() or 0)  # never the newest complete one; 1 if there is none
        if not segment.lock(k, alone=True, patience_s=PATIENCE_S):
            log.warning("weights: a reader of version %d is stopped in its copy; writing over it", segment.stamp(k)[0])
        words = segment.buffer[k]
        words[WRITING] = version
        words[SEQ] = (int(words[SEQ]) + 1) | 1  # odd, also over what a dead writer left
        words[LOGGED] = 0
        flat = torch.from_numpy(segment.data[k])
        segment.manifest.gather(named, flat, self.hook)
        words[VERSION], words[STEP] = version, step
        digest = segment.manifest.digest(segment.manifest.views(flat), version, step) if self._checksums else 0
        words[CHECKSUM] = digest
        words[SEQ] = int(words[SEQ]) + 1
        segment.unlock(k)
        self._remember(segment, flat)

    def _remember(self, segment: Segment, flat: torch.Tensor) -> None:
        """Keep a copy to compare the next version with."""
        if not len(segment.log[0]):
            return
        if self._shadow is None:
            block = torch.empty(segment.manifest.nbytes, dtype=torch.uint8)
            self._shadow = Shadow(segment.manifest, block, self._threshold, self._checksums)
        self._shadow.block.copy_(flat)
        self._shadow.full()

    def _write_changes(
        self, segment: Segment, newest: int, version: int, step: int, named: dict[str, torch.Tensor]
    ) -> bool:
        """Append what changed to the log of the newest buffer; False if all values shall be written."""
        k, shadow = segment.newest(), self._shadow
        if k is None or shadow is None or shadow.since_key + 1 >= self._key_every:
            return False
        words, area = segment.buffer[k], segment.log[k]
        used = int(words[LOGGED])
        frame = shadow.frame(named, newest, version, step, len(area) - used)
        if frame is None:
            return False
        area[used : used + len(frame)] = np.frombuffer(frame, np.uint8)
        if self.hook is not None:
            self.hook("frame")
        words[LOGGED] = used + len(frame)  # from here on it counts
        return True

    def _for(self, named: dict[str, torch.Tensor], above: bool) -> Segment:
        """The segment for this layout: the one there is, or a new one in place of another run's or model's.

        Or of one whose file was removed: whoever maps it still has its old versions, and nobody would get a new one.
        """
        inherited, self._inherited = self._inherited, False
        mine = self._segment
        if mine is not None and above and mine.still_named() and self._suits(mine, named):
            if inherited:
                mine.words[layout.W_PID] = os.getpid()
                mine.prefault()
            return mine
        self.close()
        manifest = Manifest.of(named)
        log_bytes = manifest.nbytes // 2 if self._threshold and Shadow.fits(manifest) else 0
        self._segment = layout.create(self.path, manifest, log_bytes)
        self._segment.prefault()
        return self._segment

    def _suits(self, segment: Segment, named: dict[str, torch.Tensor]) -> bool:
        return segment.manifest.matches(named) and bool(len(segment.log[0])) == (
            bool(self._threshold) and Shadow.fits(segment.manifest)
        )


@dataclass
class _At:
    """Where in a segment the values in the model come from."""

    segment: Segment
    k: int
    seq: int
    logged: int
    sums: list[int]


class ShmReceiver(VersionReceiver):
    """Copies the newest version. `timeout_s` bounds a fetch that keeps being overtaken."""

    def __init__(self, path: str | Path, *, timeout_s: float = 10.0) -> None:
        super().__init__(path, timeout_s=timeout_s)
        self.hook: Callable[[str], None] | None = None  # called between a copy and its check; for fault tests
        self._staging = torch.empty(0, dtype=torch.uint8)
        self._held = Held()  # the tensors that `_at` is true of
        self._at: _At | None = None
        self._problem = ""

    def _take(self, segment: Segment, params: dict[str, torch.Tensor]) -> tuple[int, int] | None:
        k = segment.newest()
        if k is None or not segment.lock(k, alone=False):
            return None
        try:
            at = self._at
            self._at = None  # until it is known to be true again
            segment.manifest.check(params)
            at = self._follow(segment, k, at, params) or self._whole(segment, k, params)
            stamp = segment.stamp(k)
            if at is None:
                return None
            if int(segment.buffer[k][LOGGED]) != at.logged:  # the next turn follows from here
                self._at = at
                self._held.take(params)
                return None
        except Refused as problem:
            self._problem = str(problem)
            return None
        finally:
            segment.unlock(k)
        self._at, self._problem = at, ""
        self._held.take(params)
        return stamp

    def _follow(self, segment: Segment, k: int, at: _At | None, params: dict[str, torch.Tensor]) -> _At | None:
        """Put the frames in place that came since; None if the model holds nothing that they follow."""
        seq = int(segment.buffer[k][SEQ])
        if at is None or (at.segment, at.k, at.seq) != (segment, k, seq) or not self._held.same(params):
            return None
        try:
            return self._frames(at, params)
        except Refused as problem:
            log.warning("weights: %s; all values are taken", problem)
            return None

    def _whole(self, segment: Segment, k: int, params: dict[str, torch.Tensor]) -> _At | None:
        """Copy buffer k, and its frames after it; None if it was written to meanwhile."""
        words = segment.buffer[k]
        seq, stamp, digest = int(words[SEQ]), (int(words[VERSION]), int(words[STEP])), int(words[CHECKSUM])
        if seq & 1:
            return None
        flat = self._flat(segment, k)
        if digest and not all(map(is_plain, params.values())):
            flat = self._stage(flat)
            self._compare(segment, segment.manifest.views(flat), stamp, digest)
        segment.manifest.scatter(flat, params)
        if self.hook is not None:
            self.hook("copied")
        if int(words[SEQ]) != seq:
            self._problem = f"version {stamp[0]} was written over while it was copied"
            return None
        if digest and flat is not self._staging:
            self._compare(segment, params, stamp, digest)
        return self._frames(_At(segment, k, seq, 0, [0] * len(segment.manifest.entries)), params)

    def _frames(self, at: _At, params: dict[str, torch.Tensor]) -> _At:
        """Put the frames of the log in place from where `at` is; Refused if one is damaged or does not fit."""
        end = int(at.segment.buffer[at.k][LOGGED])
        for data in split(at.segment.log[at.k][at.logged : end]):
            frame = unpack(data)
            apply(frame, at.segment.manifest, params, at.sums)
            if frame.whole and all(map(is_plain, params.values())):
                self._compare(at.segment, params, (frame.version, frame.step), frame.whole)
        at.logged = end
        return at

    def _compare(
        self, segment: Segment, named: dict[str, torch.Tensor], stamp: tuple[int, int], digest: int
    ) -> None:
        if segment.manifest.digest(named, *stamp) != digest:
            raise Refused(f"the values of version {stamp[0]} do not match their digest")

    def _flat(self, segment: Segment, k: int) -> torch.Tensor:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it is mapped to be read only, and is only read
            return torch.from_numpy(segment.data[k])

    def _stage(self, flat: torch.Tensor) -> torch.Tensor:
        """A copy of one's own, on the way to an accelerator: what is checked there is what arrives."""
        if len(self._staging) != len(flat):
            self._staging = torch.empty(len(flat), dtype=torch.uint8)
        self._staging.copy_(flat)
        return self._staging

    def _current(self) -> Segment | None:
        before, segment = self._segment, super()._current()
        if segment is not None and segment is not before:
            segment.prefault()
        return segment

    def _why(self) -> str:
        return f"; {self._problem}: the model holds parts of it and must not be used" if self._problem else ""
