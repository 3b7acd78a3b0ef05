"""The slots of a ring, read from its raw bytes by the documented offsets, with no code of the ring itself.

Maps the file read-only; talks to no process. Knows nothing of fates.

- The head is believed only as an adoption believes it: finished, with its own checksum, size and boot.
- A slot's line is believed only if its control word was the same before, in and after the copy (`stable`).
- `seen` holds every uid that stood in a slot that was not FREE at any of the looks: a sample that stayed in its slot
  for the whole reading is in it, however often the slot's state changed meanwhile.
- A RESERVED slot holds the uid of an earlier sample until the seq of its own claim stands in last_commit_seq.
"""

from __future__ import annotations

import mmap
import os
import struct
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

MAGIC = b"BUSRLRG1"
MAJOR = 2
FIXED_BYTES = 0x78  # of the header, written once, which the checksum covers
CASTAGNOLI = 0x82F63B78
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
HEADER_BYTES = 0x2000
LINE_BYTES = 128
LOOKS = 64
FREE, RESERVED, REWARDED, TRAINING, DROPPED = 0, 1, 6, 7, 8
STATE_NAMES = ["FREE", "RESERVED", "QUEUED", "GENERATING", "GENERATED", "REWARDING", "REWARDED", "TRAINING", "DROPPED"]
UID_NONE = (1 << 64) - 1
SEQ_MASK = np.uint64((1 << 36) - 1)
LINE = np.dtype(
    {
        "names": ["word", "uid", "group", "claim_seq", "cls", "member", "group_size", "prompt_crc"],
        "formats": ["<u8", "<u8", "<u8", "<u8", "<u4", "<u2", "<u2", "<u4"],
        "offsets": [0x00, 0x08, 0x10, 0x28, 0x48, 0x50, 0x52, 0x70],
        "itemsize": LINE_BYTES,
    }
)


class NotARing(Exception):
    """The file is not a ring that this layout describes; the message says what is wrong."""


@dataclass(frozen=True)
class Slots:
    """All slots of one reading; the arrays have one entry per slot."""

    uuid: bytes
    lines: npt.NDArray[np.void]
    stable: npt.NDArray[np.bool_]
    seen: npt.NDArray[np.uint64]  # sorted
    still: npt.NDArray[np.bool_]  # the word was the same again after all slots had been read

    @property
    def state(self) -> npt.NDArray[np.uint64]:
        return state_of(self.words)

    @property
    def words(self) -> npt.NDArray[np.uint64]:
        return np.asarray(self.lines["word"], np.uint64)

    @property
    def reason(self) -> npt.NDArray[np.uint64]:
        """What stands in the owner field: a reason's byte in DROPPED."""
        return np.asarray((self.words >> np.uint64(44)) & np.uint64(0x3FFF), np.uint64)


def state_of(words: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    return np.asarray(words >> np.uint64(58), np.uint64)


def _unwritten(lines: npt.NDArray[np.void]) -> npt.NDArray[np.bool_]:
    """RESERVED slots whose uid was not written under the claim that they are in."""
    words = lines["word"]
    return np.asarray((state_of(words) == RESERVED) & ((words & SEQ_MASK) != lines["claim_seq"]))


def read_ring(path: Path) -> Slots | None:
    """The slots of the ring file; None if there is no such file."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        size = os.fstat(fd).st_size
        head = _header(os.pread(fd, HEADER_BYTES, 0), size, path)
        with mmap.mmap(fd, size, access=mmap.ACCESS_READ) as segment:
            return _read_slots(segment, *head)
    finally:
        os.close(fd)


def _header(data: bytes, size: int, path: Path) -> tuple[bytes, int, int]:
    """uuid, slots, offset of the control lines."""
    if len(data) < HEADER_BYTES or data[:8] != MAGIC:
        raise NotARing(f"{path}: {size} bytes that do not begin with {MAGIC!r}")
    (major,) = struct.unpack_from("<I", data, 0x08)
    (n_slots,) = struct.unpack_from("<I", data, 0x40)
    (line_off,) = struct.unpack_from("<Q", data, 0x50)
    if major != MAJOR:
        raise NotARing(f"{path}: layout {major}, this audit reads {MAJOR}")
    if (damage := _damage(data, size)) or line_off + n_slots * LINE_BYTES > size or line_off % 8:
        raise NotARing(f"{path}: {damage or f'{n_slots} slots at {line_off} in {size} bytes'}")
    return data[0x18:0x28], n_slots, line_off


def _damage(data: bytes, size: int) -> str:
    """Why no start would adopt a ring with this head; empty if its head is whole."""
    crc, ready = struct.unpack_from("<II", data, FIXED_BYTES)
    own, (total,) = crc32c(data[:FIXED_BYTES]), struct.unpack_from("<Q", data, 0x10)
    if crc != own:
        return f"its header checksum is wrong: it says {crc:08x}, its bytes give {own:08x}"
    if ready != 1:
        return f"it was never finished: ready is {ready}"
    if total != size:
        return f"its header says {total} bytes, the file has {size}"
    if data[0x28:0x38] != bytes.fromhex(BOOT_ID.read_text().replace("-", "")):
        return "it was made before the last boot of this machine"
    return ""


def crc32c(data: bytes) -> int:
    """The Castagnoli checksum, bit by bit: it is taken of 120 bytes once."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (CASTAGNOLI if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


def _read_slots(segment: mmap.mmap, uuid: bytes, n_slots: int, line_off: int) -> Slots:
    view = np.frombuffer(segment, LINE, n_slots, line_off)
    try:
        lines, seen, stable = np.zeros(n_slots, LINE), [np.zeros(0, np.uint64)], np.zeros(n_slots, np.bool_)
        todo = np.arange(n_slots)
        for _ in range(LOOKS):
            before, copy, after = view["word"][todo], view[todo], view["word"][todo]
            busy = (state_of(before) != FREE) | (state_of(copy["word"]) != FREE) | (state_of(after) != FREE)
            same = (before == copy["word"]) & (copy["word"] == after)
            seen.append(copy["uid"][busy & ~(same & _unwritten(copy))])
            lines[todo] = copy
            stable[todo] = same
            todo = np.flatnonzero(~stable)
            if not todo.size:
                break
        still = view["word"] == lines["word"]
    finally:
        del view  # the mapping can only be closed when no array looks into it
    uids = np.unique(np.concatenate(seen))
    return Slots(uuid, lines, stable, uids[uids != np.uint64(UID_NONE)], still)
