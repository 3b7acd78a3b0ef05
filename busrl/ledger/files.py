"""Writing files that must not be lost: whole files by rename, and files of lines that only grow.

Talks to the file system; turns a full disk into `DiskFull` and any other failed write into `WriteFailed`. Knows
nothing of what the files hold.

- A file written whole is either the old one or the new one, also after a power cut.
- A file of lines never holds half a line before a whole one: what a killed writer left is cut before the next line.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from busrl.errors import DiskFull, MachineError, WriteFailed

FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
REPLACED = ".replaced-"  # a directory whose successor is about to have its name


def write_error(path: Path, needed: int, exc: OSError) -> MachineError:
    """The typed error for a failed write of `needed` bytes to `path`."""
    if exc.errno not in FULL:
        return WriteFailed(f"{path}: writing {needed} bytes failed: {exc.strerror}; check the disk and its mount")
    free = shutil.disk_usage(path.parent).free
    return DiskFull(
        f"{path}: no space for {needed} bytes: {exc.strerror} ({free} bytes free on its file system); make space, "
        "nothing written before is lost"
    )


def write_all(fd: int, parts: Sequence[bytes], offset: int) -> int:
    """Write all parts at `offset`, also when the kernel takes them piecemeal; the new end."""
    written = os.pwritev(fd, parts, offset)
    total = sum(len(part) for part in parts)
    if written < total:  # the disk filled up in the middle; the next write says so
        rest = b"".join(parts)
        while written < total:
            written += os.pwrite(fd, rest[written:], offset + written)
    return offset + total


def sync_dir(directory: Path) -> None:
    """Make names created, renamed or removed in `directory` durable."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def finish_replacements(parent: Path) -> None:
    """A directory whose writer died between two names has its old name again; one that was replaced goes."""
    for path in parent.glob(f"{REPLACED}*"):
        final = parent / path.name.removeprefix(REPLACED)
        if final.exists():
            shutil.rmtree(path, ignore_errors=True)
        else:
            os.rename(path, final)
            sync_dir(parent)


def write_whole(path: Path, data: bytes) -> None:
    """Replace `path` by `data` so that a reader, or a restart after a power cut, sees the old or the new bytes."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.new")
    try:
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            write_all(fd, [data], 0)
            os.fsync(fd)
        finally:
            os.close(fd)
        os.replace(temporary, path)
        sync_dir(path.parent)
    except OSError as exc:
        temporary.unlink(missing_ok=True)
        raise write_error(path, len(data), exc) from exc


def show_whole(path: Path, value: Mapping[str, Any]) -> None:
    """Replace `path` by `value` as JSON for people to read: a full disk costs it its freshness, and nobody is told."""
    temporary = path.with_name(f".{path.name}.new")
    with contextlib.suppress(OSError):
        temporary.write_text(json.dumps(value, indent=1) + "\n")
        os.replace(temporary, path)


class LineFile:
    """A file of lines that one process appends to; `sync=True` makes each line durable before `append` returns."""

    def __init__(self, path: str | os.PathLike[str], *, sync: bool = False) -> None:
        self.path = Path(path)
        self.sync = sync
        self._fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._end = self._cut_half_line()

    def append(self, line: bytes) -> None:
        """Add one line (without its newline); on failure the file is as before."""
        data = line + b"\n"
        try:
            end = write_all(self._fd, [data], self._end)
            if self.sync:
                os.fdatasync(self._fd)
        except OSError as exc:
            os.ftruncate(self._fd, self._end)
            raise write_error(self.path, len(data), exc) from exc
        self._end = end

    def flush(self) -> None:
        """Make all lines so far durable."""
        os.fdatasync(self._fd)

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _cut_half_line(self) -> int:
        size = os.fstat(self._fd).st_size
        end, block = size, 1 << 16
        while end > 0:
            start = max(0, end - block)
            newline = os.pread(self._fd, end - start, start).rfind(b"\n")
            if newline >= 0:
                end = start + newline + 1
                break
            end = start
        if end < size:
            os.ftruncate(self._fd, end)
        return end
