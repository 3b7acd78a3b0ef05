"""`open.bin`: which samples were still in slots when a run ended in good order, so that they are not lost.

Written by `launch` with all roles stopped, before it unlinks the ring; read by the next start, which generates them
again. Talks to one file; knows nothing of the ring.

Layout, little endian: "BUSRLOPN", u32 layout 1, u32 entries, u32 crc32 of the entries, u32 0; then per entry u64 uid,
u32 state, u32 slot.
"""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from busrl.errors import FileCorrupt
from busrl.ledger.log import sync_dir, write_whole

MAGIC = b"BUSRLOPN"
LAYOUT = 1
_HEAD = struct.Struct("<8sIIII")
_ENTRY = struct.Struct("<QII")


class OpenSlot(NamedTuple):
    """A slot that was not FREE at the end: its uid, its state's number, its index."""

    uid: int
    state: int
    slot: int


def write_open(path: str | os.PathLike[str], slots: Iterable[OpenSlot]) -> None:
    """Write the file whole and durably; also when there is nothing open, since its presence says "ended in order"."""
    body = b"".join(_ENTRY.pack(*slot) for slot in slots)
    head = _HEAD.pack(MAGIC, LAYOUT, len(body) // _ENTRY.size, zlib.crc32(body), 0)
    write_whole(Path(path), head + body)


def read_open(path: str | os.PathLike[str]) -> list[OpenSlot] | None:
    """The open slots; None if there is no file (the run did not end in order)."""
    try:
        data = Path(path).read_bytes()
    except FileNotFoundError:
        return None
    body = data[_HEAD.size :]
    if len(data) < _HEAD.size or _HEAD.unpack_from(data)[:2] != (MAGIC, LAYOUT):
        raise FileCorrupt(f"{path}: does not begin with {MAGIC!r}, layout {LAYOUT}; it was not written by this busrl")
    _, _, count, crc, _ = _HEAD.unpack_from(data)
    if len(body) != count * _ENTRY.size or zlib.crc32(body) != crc:
        raise FileCorrupt(
            f"{path}: its checksum does not match its {len(body)} bytes; remove it only if you accept that the "
            "samples in it are generated again"
        )
    return [OpenSlot(*fields) for fields in _ENTRY.iter_unpack(body)]


def remove_open(path: str | os.PathLike[str]) -> None:
    """Forget the file, once a new start has a ring and has put the samples back."""
    Path(path).unlink(missing_ok=True)
    sync_dir(Path(path).parent)
