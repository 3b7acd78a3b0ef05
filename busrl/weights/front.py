"""The newest version that an engine has received by broadcast, and how the engine's tensors come up to it.

Used by `weights.broadcast_receiver`, which holds its lock around every call. Knows nothing of groups.

- `stamp` never goes back. The block holds that version whole, or nothing may be taken from it (`usable` is False).
- Tensors that hold an earlier version get the frames since, all others the whole block.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch

from busrl.weights.base import NOTHING
from busrl.weights.copies import is_plain
from busrl.weights.held import Held
from busrl.weights.manifest import Manifest
from busrl.weights.sparse import Frame, Refused, apply

log = logging.getLogger("busrl")


class Front:
    """One block, its version, and the frames that led to it."""

    def __init__(self) -> None:
        self.manifest: Manifest | None = None
        self.stamp = NOTHING
        self.usable = False
        self._block = torch.empty(0, dtype=torch.uint8)
        self._sums: list[int] = []
        self._frames: list[Frame] = []
        self._held, self._held_version, self._held_sums = Held(), -1, [0]

    @property
    def offered(self) -> tuple[int, int]:
        """What `fetch` would give now."""
        return self.stamp if self.usable else NOTHING

    def outdate(self) -> None:
        """The next version is of another layout: nothing may follow this one."""
        self.usable = False

    def replace(
        self, manifest: Manifest, block: torch.Tensor, stamp: tuple[int, int], sums: Sequence[int]
    ) -> torch.Tensor:
        """A whole version has come, with the sums of the changes that the sender has counted into it; none: zeros.

        Returns the block that is not needed any more.
        """
        if stamp[0] < self.stamp[0] or (stamp[0] == self.stamp[0] and self.usable):
            return block  # it is here already, or a newer one is
        # Before anything changes: the block that is read now must never be handed out as the one to receive into.
        spare = self._block if len(self._block) == len(block) else torch.empty_like(block)
        self._block = block
        if self.manifest != manifest:
            self._held_version = -1
        self.manifest, self.stamp, self.usable = manifest, stamp, True
        self._sums, self._frames = list(sums) or [0] * len(manifest.entries), []
        return spare

    def follow(self, frames: Sequence[Frame]) -> None:
        """Changes have come. Refused: the block is of no use any more, a whole version has to come."""
        assert self.manifest is not None
        views = self.manifest.views(self._block)
        for frame in frames:
            if frame.version <= self.stamp[0]:
                continue
            try:
                if not self.usable or frame.base != self.stamp[0]:
                    raise Refused(f"version {frame.version} follows {frame.base}, here is {self.stamp[0]}")
                apply(frame, self.manifest, views, self._sums)
                if frame.whole and self.manifest.digest(views, frame.version, frame.step) != frame.whole:
                    raise Refused(f"the values of version {frame.version} do not match their digest")
            except Refused:
                self.usable = False
                raise
            self.stamp = (frame.version, frame.step)
            self._remember(frame)

    def fetch(self, params: dict[str, torch.Tensor]) -> None:
        """Bring the tensors to this version; it is usable."""
        assert self.manifest is not None
        self.manifest.check(params)
        if not self._catch_up(params):
            self._held_version = -1
            self.manifest.scatter(self._block, params)
            self._held_sums = list(self._sums)
        self._held.take(params)
        self._held_version = self.stamp[0]

    def _catch_up(self, params: dict[str, torch.Tensor]) -> bool:
        """Put the frames since the tensors' version in place; False if that is not possible."""
        if self._held_version < 0 or not self._held.same(params) or self.manifest is None:
            return False
        if self._held_version == self.stamp[0]:
            return True
        first = next((k for k, frame in enumerate(self._frames) if frame.base == self._held_version), None)
        if first is None:
            return False
        self._held_version = -1  # until all is in place
        try:
            for frame in self._frames[first:]:
                apply(frame, self.manifest, params, self._held_sums)
                if frame.whole and all(map(is_plain, params.values())):
                    self._compare(frame, params)
        except Refused as problem:
            log.warning("weights: %s; all values are taken", problem)
            return False
        return True

    def _compare(self, frame: Frame, params: dict[str, torch.Tensor]) -> None:
        assert self.manifest is not None
        if self.manifest.digest(params, frame.version, frame.step) != frame.whole:
            raise Refused(f"the values of version {frame.version} do not match their digest")

    def _remember(self, frame: Frame) -> None:
        """Keep frames as long as they are less than half of the block."""
        self._frames.append(frame)
        size = sum(len(part.indices) + len(part.values) for one in self._frames for part in one.parts)
        while size > len(self._block) // 2:
            gone = self._frames.pop(0)
            size -= sum(len(part.indices) + len(part.values) for part in gone.parts)
