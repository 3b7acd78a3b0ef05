"""The versions that a broadcasting learner has to send: two blocks, and the frames of changes that lead to the newest.

Used by `weights.broadcast`: the learner's thread puts versions in, the sending thread takes them out. Knows nothing of
members or groups.

- `put` returns when the tensors may change again; a version may be sent while it is still being copied.
- The block that is being sent is not written to; a version that was overtaken before its turn is never sent.
- Frames follow each other without a gap up to the newest version, or there are none.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
import torch

from busrl.device import finish_stream
from busrl.errors import UserError
from busrl.weights.base import NOTHING
from busrl.weights.manifest import Manifest
from busrl.weights.sparse import Shadow


@dataclass(frozen=True)
class Parcel:
    """What is to be sent: all values in `data`, with the sums that the next frames go on from, or frames from version
    `base` on."""

    version: int
    step: int
    data: torch.Tensor
    base: int = -1  # not sparse
    sums: tuple[int, ...] = ()


@dataclass
class _Block:
    data: torch.Tensor
    stamp: tuple[int, int] = NOTHING
    ready: int = 0  # bytes that are there
    shadow: Shadow | None = None


@dataclass(frozen=True)
class Sparse:
    """`weights.sparse`; threshold 0: never."""

    threshold: float = 0.0
    key_every: int = 32


@dataclass
class _Chain:
    """Frames, each (version before it, bytes), that end at the newest version."""

    frames: list[tuple[int, bytes]] = field(default_factory=list)
    nbytes: int = 0

    def add(self, base: int, frame: bytes, most: int) -> None:
        self.frames.append((base, frame))
        self.nbytes += len(frame)
        while self.nbytes > most:
            self.nbytes -= len(self.frames.pop(0)[1])

    def clear(self) -> None:
        self.frames, self.nbytes = [], 0

    def since(self, version: int) -> bytes | None:
        """The frames that lead from that version to the newest."""
        for k, (base, _) in enumerate(self.frames):
            if base == version:
                return b"".join(frame for _, frame in self.frames[k:])
        return None


class Outbox:
    """Between the two threads. `bell` is called when there is something new."""

    def __init__(
        self,
        bell: Callable[[], None],
        *,
        bucket_bytes: int,
        sparse: Sparse | None = None,
        checksum: bool = False,
        device: str = "cpu",
    ) -> None:
        self.manifest: Manifest | None = None
        self.change = threading.Condition()
        self._bell, self._bucket, self._checksum, self._device = bell, bucket_bytes, checksum, device
        self._sparse = sparse or Sparse()
        self._blocks: list[_Block] = []
        self._sending: _Block | None = None
        self._chain = _Chain()

    def newest(self) -> tuple[int, int]:
        with self.change:
            return max((block.stamp for block in self._blocks), default=NOTHING)

    def put(self, version: int, step: int, named: Mapping[str, torch.Tensor]) -> None:
        """Take a version over."""
        newest = self.newest()[0]
        if version <= newest:
            raise UserError(f"version {version} is not above {newest}, which is published; versions grow")
        self._prepare(named)
        if not self._put_changes(version, step, named):
            self._put_all(version, step, named)

    def take(self, common: int | None) -> Parcel:
        """The newest version, as frames if the members all have version `common` and frames lead on from it."""
        with self.change:
            block = max(self._blocks, key=lambda one: one.stamp)
            frames = None if common is None else self._chain.since(common)
            if frames is not None and common is not None:
                return Parcel(*block.stamp, torch.from_numpy(np.frombuffer(bytearray(frames), np.uint8)), common)
            self._sending = block
            sums = () if block.shadow is None or block.ready < len(block.data) else tuple(block.shadow.sums)
            return Parcel(*block.stamp, block.data, sums=sums)

    def wait_for(self, parcel: Parcel, end: int, timeout_s: float) -> None:
        """Until the bytes before `end` are there; RuntimeError if they do not come."""
        block = self._sending
        if parcel.base >= 0 or block is None:
            return
        with self.change:
            there = self.change.wait_for(lambda: block.ready >= end or block.stamp == NOTHING, timeout_s)
            if not there or block.stamp == NOTHING:
                raise RuntimeError(f"the learner did not copy version {parcel.version} within {timeout_s:.1f} s")

    def digest(self, parcel: Parcel) -> int:
        """Of all values of a parcel that is not sparse; 0 if none is wanted."""
        if not self._checksum or self.manifest is None:
            return 0
        return self.manifest.digest(self.manifest.views(parcel.data.cpu()), parcel.version, parcel.step)

    def sent(self) -> None:
        """The parcel taken last is not needed any more."""
        with self.change:
            self._sending = None
            self.change.notify_all()

    def _prepare(self, named: Mapping[str, torch.Tensor]) -> None:
        if self.manifest is None:
            self.manifest = Manifest.of(dict(named))
            size = self.manifest.nbytes
            self._blocks = [_Block(torch.empty(size, dtype=torch.uint8, device=self._device)) for _ in range(2)]
            for block in self._blocks if self._device == "cpu" else []:
                block.data.zero_()  # a page that is touched for the first time in a copy costs more than its bytes
        self.manifest.check(named)

    def _put_changes(self, version: int, step: int, named: Mapping[str, torch.Tensor]) -> bool:
        """Make a frame of what changed and carry the newest block on; False if all values shall be copied."""
        with self.change:
            block = max(self._blocks, key=lambda one: one.stamp)
            if block.shadow is None or block is self._sending or block.stamp == NOTHING:
                return False
            if block.shadow.since_key + 1 >= self._sparse.key_every:
                return False
            base = block.stamp[0]
            frame = block.shadow.frame(named, base, version, step, len(block.data))
            if frame is None:
                return False
            self._chain.add(base, frame, len(block.data) // 2)
            block.stamp = (version, step)
            self.change.notify_all()
        self._bell()
        return True

    def _put_all(self, version: int, step: int, named: Mapping[str, torch.Tensor]) -> None:
        assert self.manifest is not None
        with self.change:
            block = min((one for one in self._blocks if one is not self._sending), key=lambda one: one.stamp)
            block.stamp, block.ready = (version, step), 0
            if block.shadow is not None:
                block.shadow.full()
            self._chain.clear()
        self._bell()
        try:
            for ready in self.manifest.gather_pieces(named, block.data, self._bucket):
                finish_stream(self._device)  # the sending thread has a stream of its own
                with self.change:
                    block.ready = ready
                    self.change.notify_all()
        except BaseException:
            with self.change:
                block.stamp = NOTHING
                self.change.notify_all()
            raise
        self._start_shadow(block)

    def _start_shadow(self, block: _Block) -> None:
        assert self.manifest is not None
        if not self._sparse.threshold or self._device != "cpu" or not Shadow.fits(self.manifest):
            return
        if block.shadow is None:
            block.shadow = Shadow(self.manifest, block.data, self._sparse.threshold, self._checksum)

