"""The set of trained uids that every checkpoint keeps, as a bitmap: one bit per uid up to the highest.

Talks to `trained.bin` in a checkpoint directory. Knows nothing of groups, steps or the log.

- The file is the old one or the new one, and a damaged one is refused, never half used.
- `add` tells which uids were there already; what that means is for the caller to say.

Layout, little endian: "BUSRLTRD", u32 layout 1, u32 crc32 of the packed bytes, u64 uids in the set, u64 bytes of the
bitmap; then the bitmap, zlib-packed. Bit uid % 8 (from the lowest) of byte uid // 8.
"""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt

from busrl.errors import FileCorrupt, LedgerError
from busrl.ledger.files import write_whole

MAGIC = b"BUSRLTRD"
LAYOUT = 1
UID_LIMIT = 1 << 34  # 2 GiB of bitmap: far above any fate table, below what a wild uid would ask for
REMEDY = "; the next start in the run directory makes it again from train.jsonl"
BLOCK = 1 << 17  # bytes of the bitmap
_HEAD = struct.Struct("<8sIIQQ")
_ONES = np.array([bin(byte).count("1") for byte in range(256)], np.int64)


class TrainedSet:
    """A growing set of training uids (`uid < UID_LIMIT`), made for batches of hundreds and sets of millions."""

    def __init__(self, uids: Iterable[int] = ()) -> None:
        self._bits: npt.NDArray[np.uint8] = np.zeros(0, np.uint8)
        self._count = 0
        self.add(uids)

    def add(self, uids: Iterable[int]) -> list[int]:
        """Put the uids in; returns those that were there already (or come twice here), in order."""
        again: list[int] = []
        for uid in uids:
            byte, bit = self._place(uid), 1 << (uid & 7)
            if self._bits[byte] & bit:
                again.append(uid)
            else:
                self._bits[byte] |= bit
                self._count += 1
        return again

    def contains(self, uid: int) -> bool:
        byte = uid >> 3
        return 0 <= byte < self._bits.size and bool(self._bits[byte] >> (uid & 7) & 1)

    def contains_all(self, uids: npt.NDArray[np.uint64]) -> npt.NDArray[np.bool_]:
        """For each uid whether it is in the set."""
        result = np.zeros(uids.shape, np.bool_)
        inside = uids < np.uint64(self._bits.size * 8)
        small = uids[inside].astype(np.int64)
        result[inside] = (self._bits[small >> 3] >> (small & 7).astype(np.uint8)) & 1
        return result

    def uids(self) -> npt.NDArray[np.uint64]:
        """All uids, ascending."""
        return np.flatnonzero(np.unpackbits(self._bits, bitorder="little")).astype(np.uint64)

    def blocks(self) -> Iterator[npt.NDArray[np.int64]]:
        """All uids, ascending, some at a time: a set of tens of millions is not to be spelled out at once."""
        for start in range(0, self._bits.size, BLOCK):
            block = np.flatnonzero(np.unpackbits(self._bits[start : start + BLOCK], bitorder="little"))
            yield block.astype(np.int64) + start * 8

    def __contains__(self, uid: int) -> bool:
        return self.contains(uid)

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[int]:
        return iter(self.uids().tolist())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TrainedSet) and bool(np.array_equal(self.uids(), other.uids()))

    __hash__ = None  # type: ignore[assignment]  # mutable

    def __repr__(self) -> str:
        return f"TrainedSet({self._count} uids)"

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the file whole and durably."""
        used = np.flatnonzero(self._bits)
        raw = self._bits[: int(used[-1]) + 1 if used.size else 0].tobytes()
        body = zlib.compress(raw, 1)
        write_whole(Path(path), _HEAD.pack(MAGIC, LAYOUT, zlib.crc32(body), self._count, len(raw)) + body)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> TrainedSet:
        """Read a saved set; `FileCorrupt` if a byte of it is not what was written."""
        data = Path(path).read_bytes()
        if len(data) < _HEAD.size or _HEAD.unpack_from(data)[:2] != (MAGIC, LAYOUT):
            raise FileCorrupt(f"{path}: does not begin with {MAGIC!r}, layout {LAYOUT}{REMEDY}")
        _, _, crc, count, size = _HEAD.unpack_from(data)
        body = data[_HEAD.size :]
        if zlib.crc32(body) != crc:
            raise FileCorrupt(f"{path}: checksum does not match its {len(body)} bytes{REMEDY}")
        result = cls()
        result._bits = np.frombuffer(zlib.decompress(body), np.uint8).copy()
        result._count = result._recount()
        if (result._count, result._bits.size) != (count, size):
            raise FileCorrupt(f"{path}: holds {result._count} uids, its head says {count}{REMEDY}")
        return result

    def _place(self, uid: int) -> int:
        """The byte of a uid, growing the bitmap when needed."""
        if not 0 <= uid < UID_LIMIT:
            raise LedgerError(f"uid {uid} can not be in a trained set: training uids are below {UID_LIMIT}")
        byte = uid >> 3
        if byte >= self._bits.size:
            grown = np.zeros(max(byte + 1, 2 * self._bits.size, 1024), np.uint8)
            grown[: self._bits.size] = self._bits
            self._bits = grown
        return byte

    def _recount(self) -> int:
        blocks = (self._bits[start : start + BLOCK] for start in range(0, self._bits.size, BLOCK))
        return sum(int(np.bincount(block, minlength=256) @ _ONES) for block in blocks)
