"""Samples that a run left undone: `open.bin`, those in slots when it ended, and `draws.log`, those a start put back.

`launch` writes both: `open.bin` with all roles stopped, before it unlinks the ring, and `draws.log` at the next start,
which generates those samples again. Talks to two files. Knows nothing of the ring; the caller resets the fates.

- `open.bin`, little endian: "BUSRLOPN", u32 layout 1, u32 entries, u32 crc32 of the entries, u32 0; then per entry
  u64 uid, u32 state, u32 slot.
- A line of `draws.log` is durable before `put_back` returns, so a uid is on record before it is dispatched again.
"""

from __future__ import annotations

import contextlib
import os
import struct
import time
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import msgspec

from busrl.errors import FileCorrupt
from busrl.system import files

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
    """Write the file whole and durably; also when nothing is open: its presence means that the run ended in order."""
    body = b"".join(_ENTRY.pack(*slot) for slot in slots)
    head = _HEAD.pack(MAGIC, LAYOUT, len(body) // _ENTRY.size, zlib.crc32(body), 0)
    files.replace(Path(path), head + body)


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
    files.sync(Path(path).parent)


class DrawsLine(msgspec.Struct, kw_only=True):
    """A batch of put-backs and why they were made."""

    time_ns: int
    why: str
    uids: list[int]


def record_put_back(path: str | os.PathLike[str], uids: Iterable[int], why: str) -> None:
    """Record that these uids go back to "none" and may be dispatched again. One process at a time."""
    entry = DrawsLine(time_ns=time.time_ns(), why=why, uids=sorted(uids))
    with contextlib.closing(files.LineFile(path, sync=True)) as lines:
        if entry.uids:
            lines.append(msgspec.json.encode(entry))


def read_draws(path: str | os.PathLike[str]) -> list[DrawsLine]:
    """All put-backs in order; none if there is no file. Half a last line was never acted upon and is left out."""
    try:
        lines, _, _ = Path(path).read_bytes().rpartition(b"\n")
    except FileNotFoundError:
        return []
    return [msgspec.json.decode(line, type=DrawsLine) for line in lines.splitlines() if line]
