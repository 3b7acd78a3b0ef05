"""Sparse updates: a frame holds the values of one version that differ from the version before it (docs/sparse.md).

Used by the senders and receivers of `weights.shm` and `weights.broadcast`. A frame is self-contained bytes: it may lie
in shared memory or come over a network. Knows nothing of either, of epochs or of who is at which version.

Frame, little-endian: head (magic, base, version, step, parts, digest of all values or 0) · one row per changed tensor
(its place in the manifest, bytes of a value, number of values, offset of the indices, offset of the values, sum) ·
indices (uint32) and new bits of each, at multiples of 8 · foot (version, step, bytes of the frame, digest of it).

- Values are bits, not differences: putting a frame in place is exact, also for NaN and -0.0, and doing it twice is
  doing it once.
- A frame's own digest is checked before anything is written; the sum of each tensor after it. The sum is that of all
  changes since the last full version, so a frame on top of another base is found out.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from busrl._blocks import changed, digest, put
from busrl.weights.tensors import Entry, Manifest, is_plain

if TYPE_CHECKING:
    import torch

MAGIC = b"busrlsp1"
HEAD, ROW, FOOT = struct.Struct("<8sQQQQQ"), struct.Struct("<IIQQQQ"), struct.Struct("<QQQQ")
MASK = (1 << 64) - 1
ODD, FIRST, SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
MOST_VALUES = 1 << 32  # of one tensor: an index has 32 bits
THREADS, WORTH_A_THREAD = 4, 16 << 20  # comparing is bound by memory: more threads gain nothing
Bytes = npt.NDArray[np.uint8]


class Refused(Exception):
    """A frame that is damaged, or that does not follow what it is put on. Nothing of it may be used."""


@dataclass(frozen=True)
class Part:
    """The changed values of one tensor."""

    entry: int
    width: int
    indices: Bytes
    values: Bytes
    sum: int


@dataclass(frozen=True)
class Frame:
    """What one frame says: `version` is `base` with the parts put in place. `whole` is 0 or the digest afterwards."""

    base: int
    version: int
    step: int
    whole: int
    parts: tuple[Part, ...]


class _Share:
    """The tensors that one thread compares, and its room for what it finds."""

    def __init__(self, entries: list[int], most_bytes: int) -> None:
        self.entries = entries
        self.indices, self.values = np.empty(most_bytes // 4, np.uint32), np.empty(most_bytes, np.uint8)


class Shadow:
    """The sender's copy of what it last published, in a block of the manifest's layout; finds what has changed.

    `since_key` counts the versions since the last full one, `sums` has one number per tensor since then.
    """

    def __init__(self, manifest: Manifest, block: torch.Tensor, threshold: float, checksum: bool = False) -> None:
        self.manifest, self.block = manifest, block
        self.most_bytes = int(manifest.nbytes * threshold)
        self.checksum = checksum
        self._views = manifest.views(block)
        self._shares = [_Share(entries, self.most_bytes) for entries in _shares(manifest)]
        self.full()

    @classmethod
    def fits(cls, manifest: Manifest) -> bool:
        """Whether every value of the model can be named by an index of a frame."""
        return all(entry.nbytes // width_of(entry) < MOST_VALUES for entry in manifest.entries)

    def full(self) -> None:
        """The block has just been filled as a whole."""
        self.sums = [0] * len(self.manifest.entries)
        self.since_key = 0

    def frame(self, named: Mapping[str, torch.Tensor], base: int, version: int, step: int, room: int) -> bytes | None:
        """The frame that leads from the block to the tensors, which the block then holds; None if it is too long.

        `room` bounds the bytes of the frame beside the threshold. With None the block is as it was.
        """
        found = self._find(named, min(self.most_bytes, room))
        if found is None:
            return None
        rows = []
        for k, indices, values in found:
            self.sums[k] = (self.sums[k] + self._put(k, indices, values)) & MASK
            rows.append(Part(k, width_of(self.manifest.entries[k]), indices, values, self.sums[k]))
        self.since_key += 1
        whole = self.manifest.digest(self._views, version, step) if self.checksum else 0
        return pack(Frame(base, version, step, whole, tuple(rows)))

    def _find(self, named: Mapping[str, torch.Tensor], most: int) -> list[tuple[int, Bytes, Bytes]] | None:
        """Indices and new values of each tensor that changed; None if a frame of them would be too long."""
        self.manifest.check(named)
        most -= HEAD.size + FOOT.size
        with ThreadPoolExecutor(len(self._shares), "changed values") as pool:
            # Each share has as much room as all, so that changes may lie in one half of the model.
            told = pool.map(lambda share: self._find_in(share, named, most), self._shares)
            found: list[tuple[int, Bytes, Bytes]] = []
            for part in told:
                if part is None:
                    return None
                found += part
        if sum(ROW.size + 16 + len(indices) + len(values) for _, indices, values in found) > most:
            return None
        return found

    def _find_in(
        self, share: _Share, named: Mapping[str, torch.Tensor], left: int
    ) -> list[tuple[int, Bytes, Bytes]] | None:
        found = []
        for k in share.entries:
            entry = self.manifest.entries[k]
            width = width_of(entry)
            if left < ROW.size + 16:
                return None
            room = (left - ROW.size - 16) // (4 + width)
            indices, values = share.indices[:room], share.values[: room * width]
            count = self._changed(named[entry.name], entry, width, indices, values)
            if count < 0:
                return None
            if count:
                found.append((k, indices[:count].view(np.uint8).copy(), values[: count * width].copy()))
                left -= ROW.size + 16 + count * (4 + width)
        return found

    def _changed(self, tensor: torch.Tensor, entry: Entry, width: int, indices: Any, values: Any) -> int:
        now = tensor.detach()
        if not is_plain(now):
            now = now.cpu().contiguous()
        before = self._views[entry.name]
        return changed(before.data_ptr(), now.data_ptr(), entry.nbytes // width, width, indices, values)

    def _put(self, k: int, indices: Bytes, values: Bytes) -> int:
        entry = self.manifest.entries[k]
        width = width_of(entry)
        return put(self._views[entry.name].data_ptr(), entry.nbytes // width, width, indices, values)


def _shares(manifest: Manifest) -> list[list[int]]:
    """The places of the tensors, in runs of about the same size: one for each thread that is worth its start."""
    count = max(1, min(THREADS, os.cpu_count() or 1, manifest.nbytes // WORTH_A_THREAD))
    shares: list[list[int]] = [[] for _ in range(count)]
    for k, entry in enumerate(manifest.entries):
        shares[min(count - 1, entry.offset * count // max(1, manifest.nbytes))].append(k)
    return shares


def width_of(entry: Entry) -> int:
    """Bytes of what one index names: a value, or half of a complex one of 16 bytes."""
    count = 1
    for length in entry.shape:
        count *= length
    width = entry.nbytes // count if count else 1
    return 8 if width == 16 else width


def pack(frame: Frame) -> bytes:
    """The bytes of a frame."""
    at = HEAD.size + ROW.size * len(frame.parts)
    rows: list[bytes] = []
    pieces: list[bytes] = []
    for part in frame.parts:
        count = len(part.indices) // 4
        first = _to_eight(at)
        second = _to_eight(first + len(part.indices))
        rows.append(ROW.pack(part.entry, part.width, count, first, second, part.sum))
        pieces += [b"\0" * (first - at), part.indices.tobytes(), b"\0" * (second - first - len(part.indices))]
        pieces.append(part.values.tobytes())
        at = second + len(part.values)
    head = HEAD.pack(MAGIC, frame.base, frame.version, frame.step, len(frame.parts), frame.whole)
    end = b"\0" * (_to_eight(at) - at)
    body = b"".join([head, *rows, *pieces, end])
    size = len(body) + FOOT.size
    return body + FOOT.pack(frame.version, frame.step, size, digest(body, frame.version))


def unpack(data: Bytes) -> Frame:
    """The frame in these bytes, which it goes on using; Refused if they are not what `pack` made."""
    if len(data) < HEAD.size + FOOT.size:
        raise Refused(f"a frame of {len(data)} bytes")
    version, step, size, seal = FOOT.unpack_from(data.data, len(data) - FOOT.size)
    body = data[: len(data) - FOOT.size]
    magic, base, named_version, named_step, count, whole = HEAD.unpack_from(body.data)
    if magic != MAGIC or size != len(data) or (version, step) != (named_version, named_step):
        raise Refused("no frame, or one cut short")
    if seal != digest(body, version):
        raise Refused(f"the frame of version {version} does not match its digest")
    parts = []
    for k in range(count):
        entry, width, values, first, second, total = ROW.unpack_from(body.data, HEAD.size + ROW.size * k)
        parts.append(
            Part(entry, width, body[first : first + 4 * values], body[second : second + width * values], total)
        )
    return Frame(base, version, step, whole, tuple(parts))


def split(data: Bytes) -> list[Bytes]:
    """Frames that lie one after the other, read from the last one's foot; Refused if that does not come out even."""
    frames: list[Bytes] = []
    end = len(data)
    while end:
        size = foot_of(data[:end])[2]
        if not HEAD.size + FOOT.size <= size <= end:
            raise Refused(f"a frame of {size} bytes in {end}")
        frames.append(data[end - size : end])
        end -= size
    return frames[::-1]


def foot_of(data: Bytes) -> tuple[int, int, int]:
    """Version, step and size of the frame that ends with these bytes; zeros if there is none."""
    if len(data) < FOOT.size:
        return 0, 0, 0
    version, step, size, _ = FOOT.unpack_from(data.data, len(data) - FOOT.size)
    return version, step, size


def apply(frame: Frame, manifest: Manifest, named: Mapping[str, torch.Tensor], sums: list[int]) -> None:
    """Put a frame in place and carry the sums on.

    Refused if a tensor then is not what the sender has: the tensors and sums are of no use any more, take a full
    version. The caller has checked the tensors against the manifest.
    """
    for part in frame.parts:
        if not part.entry < len(manifest.entries):
            raise Refused(f"version {frame.version} changes tensor {part.entry} of {len(manifest.entries)}")
        entry = manifest.entries[part.entry]
        if part.width != width_of(entry):
            raise Refused(f"version {frame.version}: {entry.name!r} has values of another size")
        try:
            gained = _put(named[entry.name], entry, part)
        except (IndexError, ValueError) as problem:
            raise Refused(f"version {frame.version}: {entry.name!r}: {problem}") from None
        sums[part.entry] = (sums[part.entry] + gained) & MASK
        if sums[part.entry] != part.sum:
            raise Refused(f"version {frame.version} is not what was sent: {entry.name!r} differs from the learner's")


def _put(tensor: torch.Tensor, entry: Entry, part: Part) -> int:
    count = entry.nbytes // part.width
    if is_plain(tensor):
        return put(tensor.data_ptr(), count, part.width, part.indices, part.values)
    if tensor.device.type != "cpu":
        return _put_elsewhere(tensor, count, part)
    import torch

    with torch.no_grad():
        copy = tensor.detach().contiguous()
        gained = put(copy.data_ptr(), count, part.width, part.indices, part.values)
        tensor.copy_(copy)
    return gained


def _put_elsewhere(tensor: torch.Tensor, count: int, part: Part) -> int:
    """The same where the CPU can not reach, in the device's own arithmetic."""
    import torch

    kind = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[part.width]
    flat = tensor.detach().view(-1).view(kind)
    named = torch.from_numpy(part.indices.view(np.uint32).astype(np.int64))
    if len(named) and int(named.max()) >= count:
        raise IndexError(f"an index is beyond the tensor's {count} values")
    index = named.to(flat.device)
    value = torch.frombuffer(bytearray(part.values), dtype=kind).to(flat.device)
    before = flat[index]
    flat[index] = value
    bits = (1 << 8 * part.width) - 1 if part.width < 8 else -1
    gained = _mix(index, value.to(torch.int64) & bits) - _mix(index, before.to(torch.int64) & bits)
    return int(gained.sum()) & MASK


def _mix(index: torch.Tensor, bits: torch.Tensor) -> torch.Tensor:
    """As in csrc/python/blocks.cpp, in signed 64-bit arithmetic that wraps around."""
    x = bits + index * _signed(ODD)
    x = (x ^ _shift(x, 30)) * _signed(FIRST)
    x = (x ^ _shift(x, 27)) * _signed(SECOND)
    return x ^ _shift(x, 31)


def _shift(x: torch.Tensor, by: int) -> torch.Tensor:
    return (x >> by) & ((1 << (64 - by)) - 1)


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value


def _to_eight(size: int) -> int:
    return -(-size // 8) * 8


