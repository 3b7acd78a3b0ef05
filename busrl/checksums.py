"""Sizes and checksums of files, which show whether a directory is truncated or was changed.

Used for checkpoints and for published versions of weights; their modules decide what a difference means.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path


def listing(directory: Path, files: Iterable[Path]) -> dict[str, list[int]]:
    """Size in bytes and CRC-32 of each file, by its name below the directory."""
    return {str(path.relative_to(directory)): [path.stat().st_size, crc(path)] for path in files}


def fault_in(directory: Path, listed: Mapping[str, Sequence[int]]) -> str | None:
    """The first file that differs from the listing, in words; None if there is none."""
    for name, (size, expected) in listed.items():
        path = directory / name
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != size or crc(path) != expected:
            return f"{name} is not what was written: its size or checksum differs"
    return None


def crc(path: Path) -> int:
    """CRC-32 of a file's bytes."""
    value = 0
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            value = zlib.crc32(chunk, value)
    return value
