"""Sparse updates: a frame holds the values of one version that differ from the version before it (docs/weights.md).

Used by the senders and receivers of `weights.shm` and `weights.broadcast`. A frame is self-contained bytes, in shared
memory or from a network. Knows nothing of either, of epochs or of the versions of a process.

Frame, little-endian: head (magic, base, version, step, parts, digest of all values or 0) · one row per changed tensor
(its place in the manifest, bytes of a value, number of values, offset of the indices, offset of the values, sum) ·
indices (uint32) and new bits of each, at multiples of 8 · foot (version, step, bytes of the frame, digest of it).

- A frame has the bits of new values, not differences: applying it is exact, also for NaN and -0.0, and applying it
  again changes nothing.
- The digest of a frame is checked before anything is written, the sum of each tensor afterwards. The sum covers all
  changes since the last full version, so it differs if a frame is applied to another base.
"""

from __future__ import annotations

import math
import os
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt

from busrl._blocks import changed, digest, put
from busrl.weights.tensors import Entry, Manifest, described, is_plain

if TYPE_CHECKING:
    import torch

MAGIC = b"busrlsp1"
HEAD, ROW, FOOT = struct.Struct("<8sQQQQQ"), struct.Struct("<IIQQQQ"), struct.Struct("<QQQQ")
MASK = (1 << 64) - 1
ODD, FIRST, SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
MOST_VALUES = 1 << 32  # of one tensor: an index has 32 bits
THREADS, WORTH_A_THREAD = 4, 16 << 20  # comparing is bound by memory: more threads gain nothing
Bytes = npt.NDArray[np.uint8]
T = TypeVar("T")


class FrameError(Exception):
    """A frame is damaged, or does not follow the version that it is applied to. Nothing of it may be used."""


@dataclass(frozen=True)
class TensorChange:
    """The changed values of one tensor."""

    entry: int
    width: int
    indices: Bytes
    values: Bytes
    sum: int


@dataclass(frozen=True)
class Frame:
    """The changes from version `base` to `version`. `digest`: of all values afterwards, or 0."""

    base: int
    version: int
    step: int
    digest: int
    parts: tuple[TensorChange, ...]

    @property
    def nbytes(self) -> int:
        return sum(len(part.indices) + len(part.values) for part in self.parts)


class Frames(Generic[T]):
    """The frames that lead to the newest version without a gap, each with the version before it."""

    def __init__(self) -> None:
        self._frames: list[tuple[int, int, T]] = []

    def add(self, base: int, frame: T, nbytes: int, most: int) -> None:
        """Keep a frame of `nbytes`; the oldest frames go while all together have more than `most` bytes."""
        self._frames.append((base, nbytes, frame))
        size = sum(nbytes for _, nbytes, _ in self._frames)
        while size > most:
            size -= self._frames.pop(0)[1]

    def clear(self) -> None:
        self._frames = []

    def since(self, version: int) -> list[T] | None:
        """The frames from that version to the newest, None if they do not reach back so far."""
        first = next((k for k, (base, _, _) in enumerate(self._frames) if base == version), None)
        return None if first is None else [frame for _, _, frame in self._frames[first:]]


class Shadow:
    """The sender's copy of the last published version, in a block of the manifest's layout; finds the changed values.
    `since_key` counts the versions since the last full version, `sums` has a number per tensor since then."""

    def __init__(
        self, manifest: Manifest, block: torch.Tensor, threshold: float, key_every: int, checksum: bool = False
    ) -> None:
        self.manifest, self.block = manifest, block
        self.most_bytes = int(manifest.nbytes * threshold)
        self._key_every, self._checksum = key_every, checksum
        self._views = manifest.views(block)
        # The tensors of each thread, with room for all changes, because all may be in the tensors of one thread.
        self._parts = [
            (entries, np.empty(self.most_bytes // 4, np.uint32), np.empty(self.most_bytes, np.uint8))
            for entries in _by_thread(manifest)
        ]
        self.full()

    @classmethod
    def fits(cls, manifest: Manifest) -> bool:
        """Tell whether an index of a frame can name every value of the model."""
        return all(entry.nbytes // width_of(entry) < MOST_VALUES for entry in manifest.entries)

    def full(self) -> None:
        """Start again after the whole block was filled."""
        self.sums = [0] * len(self.manifest.entries)
        self.since_key = 0

    def frame(self, tensors: Mapping[str, torch.Tensor], base: int, version: int, step: int, room: int) -> bytes | None:
        """The frame from the block to the tensors, whose values the block then has. None, with the block unchanged, if
        a full version is due or the frame would be longer than the threshold or `room` allow."""
        if self.since_key + 1 >= self._key_every:
            return None
        changes = self._find(tensors, min(self.most_bytes, room))
        if changes is None:
            return None
        rows = []
        for k, indices, values in changes:
            entry = self.manifest.entries[k]
            width = width_of(entry)
            gained = put(self._views[entry.name].data_ptr(), entry.nbytes // width, width, indices, values)
            self.sums[k] = (self.sums[k] + gained) & MASK
            rows.append(TensorChange(k, width, indices, values, self.sums[k]))
        self.since_key += 1
        values_digest = self.manifest.digest(self._views, version, step) if self._checksum else 0
        return pack(Frame(base, version, step, values_digest, tuple(rows)))

    def _find(self, tensors: Mapping[str, torch.Tensor], most: int) -> list[tuple[int, Bytes, Bytes]] | None:
        """Indices and new values of each tensor that changed; None if a frame of them would be too long."""
        self.manifest.check(tensors)
        most -= HEAD.size + FOOT.size
        with ThreadPoolExecutor(len(self._parts), "changed values") as pool:
            changes: list[tuple[int, Bytes, Bytes]] = []
            compare_all: Any = pool.map if described(tensors) is tensors else map  # a lazy mapping has one reader
            for part in compare_all(lambda part: self._find_in(part, tensors, most), self._parts):
                if part is None:
                    return None
                changes += part
        if sum(ROW.size + 16 + len(indices) + len(values) for _, indices, values in changes) > most:
            return None
        return changes

    def _find_in(
        self, part: tuple[list[int], Any, Bytes], tensors: Mapping[str, torch.Tensor], left: int
    ) -> list[tuple[int, Bytes, Bytes]] | None:
        entries, own_indices, own_values = part
        changes = []
        for k in entries:
            entry = self.manifest.entries[k]
            width = width_of(entry)
            if left < ROW.size + 16:
                return None
            room = (left - ROW.size - 16) // (4 + width)
            indices, values = own_indices[:room], own_values[: room * width]
            count = self._changed(tensors[entry.name], entry, width, indices, values)
            if count < 0:
                return None
            if count:
                changes.append((k, indices[:count].view(np.uint8).copy(), values[: count * width].copy()))
                left -= ROW.size + 16 + count * (4 + width)
        return changes

    def _changed(self, tensor: torch.Tensor, entry: Entry, width: int, indices: Any, values: Any) -> int:
        now = tensor.detach()
        if not is_plain(now):
            now = now.cpu().contiguous()
        before = self._views[entry.name]
        return changed(before.data_ptr(), now.data_ptr(), entry.nbytes // width, width, indices, values)


def _by_thread(manifest: Manifest) -> list[list[int]]:
    """The indices of the tensors in runs of about the same size, one for each thread that is worth starting."""
    count = max(1, min(THREADS, os.cpu_count() or 1, manifest.nbytes // WORTH_A_THREAD))
    runs: list[list[int]] = [[] for _ in range(count)]
    for k, entry in enumerate(manifest.entries):
        runs[min(count - 1, entry.offset * count // max(1, manifest.nbytes))].append(k)
    return runs


def width_of(entry: Entry) -> int:
    """Bytes per index: a value, or half of a complex value of 16 bytes."""
    count = math.prod(entry.shape)
    width = entry.nbytes // count if count else 1
    return 8 if width == 16 else width


def pack(frame: Frame) -> bytes:
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
    head = HEAD.pack(MAGIC, frame.base, frame.version, frame.step, len(frame.parts), frame.digest)
    end = b"\0" * (_to_eight(at) - at)
    body = b"".join([head, *rows, *pieces, end])
    size = len(body) + FOOT.size
    return body + FOOT.pack(frame.version, frame.step, size, digest(body, frame.version))


def unpack(data: Bytes) -> Frame:
    """The frame in these bytes, as views of them; FrameError if `pack` did not make them."""
    if len(data) < HEAD.size + FOOT.size:
        raise FrameError(f"a frame of {len(data)} bytes")
    version, step, size, seal = FOOT.unpack_from(data.data, len(data) - FOOT.size)
    body = data[: len(data) - FOOT.size]
    magic, base, version_of_head, step_of_head, count, values_digest = HEAD.unpack_from(body.data)
    if magic != MAGIC or size != len(data) or (version, step) != (version_of_head, step_of_head):
        raise FrameError("no frame, or a truncated one")
    if seal != digest(body, version):
        raise FrameError(f"the frame of version {version} does not match its digest")
    parts = []
    for k in range(count):
        entry, width, values, first, second, total = ROW.unpack_from(body.data, HEAD.size + ROW.size * k)
        parts.append(
            TensorChange(entry, width, body[first : first + 4 * values], body[second : second + width * values], total)
        )
    return Frame(base, version, step, values_digest, tuple(parts))


def split(data: Bytes) -> list[Bytes]:
    """Split frames that follow one another, beginning at the foot of the last. FrameError if they leave a gap."""
    frames: list[Bytes] = []
    end = len(data)
    while end:
        size = foot_of(data[:end])[2]
        if not HEAD.size + FOOT.size <= size <= end:
            raise FrameError(f"a frame of {size} bytes in {end}")
        frames.append(data[end - size : end])
        end -= size
    return frames[::-1]


def foot_of(data: Bytes) -> tuple[int, int, int]:
    """Version, step and size of the frame that ends with these bytes; zeros if there is none."""
    if len(data) < FOOT.size:
        return 0, 0, 0
    version, step, size, _ = FOOT.unpack_from(data.data, len(data) - FOOT.size)
    return version, step, size


def apply(frame: Frame, manifest: Manifest, tensors: Mapping[str, torch.Tensor], sums: list[int]) -> None:
    """Apply a frame and update the sums. FrameError if a tensor then differs from the sender's: tensors and sums are
    useless until a full version comes. The caller has checked the tensors against the manifest."""
    _apply(frame, manifest, sums, lambda entry, part: _put(tensors[entry.name], entry, part))


def apply_to_block(frame: Frame, manifest: Manifest, block: Bytes, sums: list[int]) -> None:
    """Apply a frame to all values of a version in one block, without torch."""
    start: int = block.ctypes.data

    def put_into(entry: Entry, part: TensorChange) -> int:
        count = entry.nbytes // part.width
        return put(start + entry.offset, count, part.width, part.indices, part.values)

    _apply(frame, manifest, sums, put_into)


def _apply(
    frame: Frame, manifest: Manifest, sums: list[int], put_part: Callable[[Entry, TensorChange], int]
) -> None:
    for part in frame.parts:
        if not part.entry < len(manifest.entries):
            raise FrameError(f"version {frame.version} changes tensor {part.entry} of {len(manifest.entries)}")
        entry = manifest.entries[part.entry]
        if part.width != width_of(entry):
            raise FrameError(f"version {frame.version}: {entry.name!r} has values of another size")
        try:
            gained = put_part(entry, part)
        except (IndexError, ValueError) as problem:
            raise FrameError(f"version {frame.version}: {entry.name!r}: {problem}") from None
        sums[part.entry] = (sums[part.entry] + gained) & MASK
        if sums[part.entry] != part.sum:
            raise FrameError(f"version {frame.version}: {entry.name!r} differs from the learner's")


class Follower:
    """The tensors that hold a version, to which frames may be applied, and the sums that prove it. Keeps the tensors
    alive, so that no other tensor gets their addresses."""

    def __init__(self) -> None:
        self.sums: list[int] = []
        self._manifest: Manifest | None = None
        self._tensors: dict[str, torch.Tensor] = {}
        self._places: list[int] = []

    def start(self, manifest: Manifest, tensors: Mapping[str, torch.Tensor], sums: Sequence[int] = ()) -> None:
        """Begin with tensors that hold a whole version; `sums`: of the changes that the sender has counted into it."""
        self._manifest, self.sums = manifest, list(sums) or [0] * len(manifest.entries)
        self._tensors, self._places = dict(tensors), [tensor.data_ptr() for tensor in tensors.values()]

    def forget(self) -> None:
        """Forget the tensors, because their values are undefined."""
        self._manifest, self._tensors = None, {}

    def holds(self, tensors: Mapping[str, torch.Tensor]) -> bool:
        """Tell whether these are the tensors, at the same addresses."""
        if self._manifest is None or self._tensors.keys() != tensors.keys():
            return False
        ours = zip(self._tensors.items(), self._places)
        return all(tensors[name] is tensor and tensor.data_ptr() == place for (name, tensor), place in ours)

    def follow(self, frames: Iterable[Frame]) -> None:
        """Apply frames. After FrameError the tensors are useless."""
        manifest, tensors = self._manifest, self._tensors
        self._manifest = None  # until all is in place
        if manifest is None:
            raise FrameError("no version to follow")
        plain = all(map(is_plain, tensors.values()))
        for frame in frames:
            apply(frame, manifest, tensors, self.sums)
            if frame.digest and plain:
                compare(manifest, tensors, (frame.version, frame.step), frame.digest)
        self._manifest = manifest


def compare(manifest: Manifest, tensors: Mapping[str, torch.Tensor], stamp: tuple[int, int], digest: int) -> None:
    """FrameError if the values of a version do not match the digest that came with it."""
    if manifest.digest(tensors, *stamp) != digest:
        raise FrameError(f"the values of version {stamp[0]} do not match their digest")


def _put(tensor: torch.Tensor, entry: Entry, part: TensorChange) -> int:
    count = entry.nbytes // part.width
    if is_plain(tensor):
        return put(tensor.data_ptr(), count, part.width, part.indices, part.values)
    if tensor.device.type != "cpu":
        return put_on_device(tensor, count, part)
    import torch

    with torch.no_grad():
        copy = tensor.detach().contiguous()
        gained = put(copy.data_ptr(), count, part.width, part.indices, part.values)
        tensor.copy_(copy)
    return gained


def put_on_device(tensor: torch.Tensor, count: int, part: TensorChange) -> int:
    """Put values into a tensor on a device that the CPU cannot address; only the changed values travel."""
    import torch

    indices, kind = part.indices.view(np.uint32), {1: "u1", 2: "u2", 4: "u4", 8: "u8"}[part.width]
    if len(indices) and int(indices.max()) >= count:
        raise IndexError(f"an index is beyond the tensor's {count} values")
    flat = tensor.detach().view(-1).view(getattr(torch, f"int{8 * part.width}"))
    index = torch.from_numpy(indices.astype(np.int64)).to(flat.device)
    before = flat[index].cpu().numpy().view(kind)
    values = np.frombuffer(part.values.tobytes(), kind)
    flat[index] = torch.from_numpy(values.view(f"i{part.width}").copy()).to(flat.device)
    return int((_mix(indices, values) - _mix(indices, before)).sum()) & MASK


def _mix(indices: npt.NDArray[np.uint32], values: npt.NDArray[Any]) -> npt.NDArray[np.uint64]:
    """Mix an index and a value, as csrc/python/blocks.cpp does."""
    x: npt.NDArray[np.uint64] = values.astype(np.uint64) + indices.astype(np.uint64) * np.uint64(ODD)
    x = (x ^ x >> np.uint64(30)) * np.uint64(FIRST)
    x = (x ^ x >> np.uint64(27)) * np.uint64(SECOND)
    x ^= x >> np.uint64(31)
    return x


def _to_eight(size: int) -> int:
    return -(-size // 8) * 8


