"""Writing files that must not be lost: whole files by rename, and files of lines that only grow.

Talks to the file system. Turns a full disk into `DiskFull` and any other failed write into `WriteFailed`. Knows
nothing of what the files hold.

- A file written whole is either the old one or the new one, also after a power cut.
- A file of lines never holds half a line before a whole one: what a killed writer left is cut before the next line.
"""

from __future__ import annotations

import contextlib
import errno
import glob
import json
import os
import shutil
import stat
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from busrl.errors import DiskFull, MachineError, UserError, WriteFailed

FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
TAIL_BYTES = 1 << 16  # of a file of lines, as `tail` reads it
FOLLOWED_BYTES = 4 << 20  # the end of a long file of lines that is read at first
PART_BYTES = 1 << 20
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


def sync(path: Path) -> None:
    """Make a file durable, or the names that were created, renamed or removed in a directory."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
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
            sync(parent)


@contextlib.contextmanager
def replacing(path: Path, *, durable: bool = True) -> Iterator[int]:
    """The descriptor of a new file of mode 0600, which takes the name `path` when the block ends well and is removed
    when it does not. A process that has the old file open keeps it whole. Drafts of killed writers go. OSError."""
    draft = path.with_name(f"{path.name}.{os.getpid()}.new")
    for left in path.parent.glob(f"{glob.escape(path.name)}.*.new"):
        pid = left.name.removeprefix(f"{path.name}.").removesuffix(".new")
        if left == draft or (pid.isdigit() and not os.path.exists(f"/proc/{pid}")):
            left.unlink(missing_ok=True)
    fd = os.open(draft, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        yield fd
        if durable:
            os.fsync(fd)
        os.replace(draft, path)
        if durable:
            sync(path.parent)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise
    finally:
        os.close(fd)


def replace(path: Path, data: bytes | Iterable[bytes]) -> None:
    """Write a file whole, in one piece or several: a reader, and a restart after a power cut, finds the old bytes or
    the new ones. DiskFull or WriteFailed if it cannot be written; the old file is left then."""
    end = 0
    try:
        with replacing(path) as fd:
            for part in [data] if isinstance(data, bytes) else data:
                end = write_all(fd, [part], end)
    except OSError as exc:
        raise write_error(path, len(data) if isinstance(data, bytes) else end, exc) from exc


def show(path: Path, value: Mapping[str, Any]) -> None:
    """Replace `path` by `value` as JSON for people to read. A write that fails leaves the old file and is not
    reported."""
    with contextlib.suppress(OSError), replacing(path, durable=False) as fd:
        write_all(fd, [json.dumps(value, indent=1).encode() + b"\n"], 0)


def read_map(path: Path) -> dict[str, Any]:
    """The map in a JSON file; empty if there is none that can be read."""
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return as_map(found)


def as_map(value: Any) -> dict[str, Any]:
    """The value if it is a map, else an empty one."""
    return value if isinstance(value, dict) else {}


def json_lines(path: Path, tail: int = 0) -> Iterator[dict[str, Any]]:
    """The maps in a file of JSON lines, in order; other lines are skipped. `tail`: only of its last bytes."""
    try:
        with open(path, "rb") as file:
            if 0 < tail < os.fstat(file.fileno()).st_size:
                file.seek(-tail, os.SEEK_END)
                file.readline()
            for text in file:
                with contextlib.suppress(msgspec.DecodeError, UnicodeDecodeError, RecursionError):
                    value = msgspec.json.decode(text)
                    if isinstance(value, dict):
                        yield value
    except (FileNotFoundError, IsADirectoryError, NotADirectoryError):
        return


class LineFollower:
    """The complete lines of one file that were not given before; `skipped` is how many earlier ones were not read."""

    def __init__(self, path: Path, tail_bytes: int = FOLLOWED_BYTES) -> None:
        self._path, self._tail = path, tail_bytes
        self._file = (0, 0)
        self._at = 0
        self.skipped = 0

    def new(self) -> list[bytes]:
        """Lines that were completed since the last call; all again if the file was replaced."""
        try:
            with open(self._path, "rb") as file:
                info = os.fstat(file.fileno())
                if (info.st_dev, info.st_ino) != self._file or info.st_size < self._at:
                    self._file = (info.st_dev, info.st_ino)
                    self._at = self._start(file, info.st_size)
                if info.st_size == self._at:
                    return []
                file.seek(self._at)
                found = file.read(info.st_size - self._at)
        except OSError:
            return []
        whole = found.rfind(b"\n") + 1
        self._at += whole
        return found[:whole].split(b"\n")[:-1]

    def _start(self, file: Any, size: int) -> int:
        """Where the first line begins that is read; the ones before it are only counted."""
        self.skipped = 0
        left = size - self._tail
        if left <= 0:
            return 0
        at = 0
        while left > 0 and (part := file.read(min(PART_BYTES, left))):
            self.skipped += part.count(b"\n")
            at, left = at + len(part), left - len(part)
        rest = file.readline()  # the line that the cut is in
        self.skipped += rest.endswith(b"\n")
        return at + len(rest)


class LineFile:
    """A file of lines that one process appends to; `sync=True` makes each line durable before `append` returns.

    A line goes to the end of the file that has the name now: other programs may empty, remove or rotate it.
    `UserError` where the name is one of something else than a file.
    """

    def __init__(self, path: str | os.PathLike[str], *, sync: bool = False) -> None:
        self.path = Path(path)
        self.sync = sync
        self.shortened = False  # whether lines of ours were taken away since
        self._torn = False
        self._fd = self._opened()
        self._end = os.fstat(self._fd).st_size

    def append(self, line: bytes) -> None:
        """Add one line (without its newline); on failure the file is as before."""
        data = line + b"\n"
        self._follow()
        before = os.fstat(self._fd).st_size
        self.shortened |= before < self._end
        if before and os.pread(self._fd, 1, before - 1) != b"\n":
            if self._torn:
                before = _cut_half_line(self._fd)
            else:  # half a line from outside: ours must not become a part of it
                data = b"\n" + data
        self._torn = True
        try:
            _append_all(self._fd, data)
            if self.sync:
                os.fdatasync(self._fd)
        except OSError as exc:
            with contextlib.suppress(OSError):
                os.ftruncate(self._fd, before)
            raise write_error(self.path, len(data), exc) from exc
        self._torn, self._end = False, before + len(data)

    def flush(self) -> None:
        """Make all lines so far durable."""
        try:
            os.fdatasync(self._fd)
        except OSError as exc:
            raise write_error(self.path, 0, exc) from exc

    def size(self) -> int:
        """Bytes of the file that the last line went to."""
        return os.fstat(self._fd).st_size

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _opened(self) -> int:
        """A descriptor of the file, made if it is not there, without half a line at its end."""
        try:
            fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NONBLOCK, 0o600)
        except OSError as exc:
            if exc.errno in FULL:
                raise write_error(self.path, 0, exc) from exc
            raise _no_file(self.path, str(exc.strerror)) from None
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            os.close(fd)
            raise _no_file(self.path, "it is no regular file")
        try:
            _cut_half_line(fd)
        except OSError as exc:
            os.close(fd)
            raise write_error(self.path, 0, exc) from exc
        return fd

    def _follow(self) -> None:
        """Go over to the file that has the name now. A directory that was moved took the file along."""
        try:
            if os.path.samestat(os.stat(self.path), os.fstat(self._fd)):
                return
        except OSError:
            if not self.path.parent.is_dir():
                return
        new = self._opened()
        os.close(self._fd)
        self._fd = new


def _no_file(path: Path, why: str) -> UserError:
    return UserError(f"{path}: cannot be opened for lines: {why}; move away what is there, and busrl makes a new file")


def _append_all(fd: int, data: bytes) -> None:
    """Write at the end of a file opened for appending, also when the kernel takes the bytes piecemeal."""
    while data:
        data = data[os.write(fd, data) :]


def _cut_half_line(fd: int) -> int:
    """The end of the last whole line, at which the file now ends."""
    size = os.fstat(fd).st_size
    end, block = size, 1 << 16
    while end > 0:
        start = max(0, end - block)
        newline = os.pread(fd, end - start, start).rfind(b"\n")
        if newline >= 0:
            end = start + newline + 1
            break
        end = start
    if end < size:
        os.ftruncate(fd, end)
    return end


def tail(path: Path) -> list[bytes]:
    """The last lines of a file that may be growing, the first of them perhaps cut; none if it is not there."""
    try:
        with open(path, "rb") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - TAIL_BYTES))
            return file.read(TAIL_BYTES).split(b"\n")
    except OSError:
        return []


# -- sizes and checksums, which show whether a directory is truncated or was changed -----


def listing(directory: Path, paths: Iterable[Path]) -> dict[str, list[int]]:
    """Size in bytes and CRC-32 of each file, by its name below the directory."""
    return {str(path.relative_to(directory)): [path.stat().st_size, crc(path)] for path in paths}


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
