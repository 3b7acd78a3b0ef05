"""Files that must not be lost: whole files, replaced by rename, and files of lines that only grow.

Talks to the file system. Turns a full disk into `DiskFull` and any other failed write into `WriteFailed`. Knows
nothing of the contents.

- A file that is written whole is either the old one or the new one, also after a power cut.
- A file of lines never holds half a line before a whole one: half a line of a killed writer is cut before the next.
- A bounded file of lines has earlier parts, `NAME.<where it ends>`. Each is made by one rename. The readers here take
  file and parts as one, so that no line is read twice, and none that is still there is missed.
"""

from __future__ import annotations

import contextlib
import ctypes
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
TAIL_BYTES = 1 << 16  # the end of a file of lines, for readers of the newest
FOLLOWED_BYTES = 4 << 20  # the end of a long file of lines that is read at first
PART_BYTES = 1 << 20
COLLAPSE = 0x08  # FALLOC_FL_COLLAPSE_RANGE: cuts off the beginning of a file
REPLACED = ".replaced-"  # a directory whose successor is about to have its name
_libc = ctypes.CDLL(None, use_errno=True)


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
    """Write all parts at `offset`, also when the kernel takes them piecemeal; returns the new end."""
    written = os.pwritev(fd, parts, offset)
    total = sum(len(part) for part in parts)
    if written < total:  # the disk filled up in the middle; the next write says so
        rest = b"".join(parts)
        while written < total:
            written += os.pwrite(fd, rest[written:], offset + written)
    return offset + total


def user_folder(variable: str, below: str) -> Path:
    """The folder of this user that an environment variable names, else `below` home; UserError if there is no home."""
    if folder := os.environ.get(variable):
        return Path(folder)
    try:
        return Path.home() / below
    except RuntimeError:  # a container's user without an entry, and no HOME
        raise UserError(f"this user has no home directory; set {variable} to a folder that can be written") from None


def make_folder(folder: Path, remedy: str, mode: int = 0o777) -> None:
    """Make a folder and those above it, unless it is there; UserError if it cannot be made."""
    try:
        folder.mkdir(mode, parents=True, exist_ok=True)
    except OSError as problem:
        raise UserError(f"{folder}: the folder cannot be made: {problem.strerror}; {remedy}") from None


def sync(path: Path) -> None:
    """Make durable: a file, or the names that were created, renamed or removed in a directory."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def finish_replacements(parent: Path) -> None:
    """Finish replacements of directories whose writer died: restore the old one, or remove it if the new one is
    there."""
    for path in parent.glob(f"{REPLACED}*"):
        final = parent / path.name.removeprefix(REPLACED)
        if final.exists():
            shutil.rmtree(path, ignore_errors=True)
        else:
            os.rename(path, final)
            sync(parent)


@contextlib.contextmanager
def replacing(path: Path, *, durable: bool = True) -> Iterator[int]:
    """The descriptor of a new file of mode 0600, which gets the name `path` when the block ends well, and is removed
    when it raises. A process that has the old file open keeps it whole. Removes the drafts of killed writers.
    OSError."""
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
    the new ones. DiskFull or WriteFailed if it cannot be written; then the old file stays."""
    end = 0
    try:
        with replacing(path) as fd:
            for part in [data] if isinstance(data, bytes) else data:
                end = write_all(fd, [part], end)
    except OSError as exc:
        raise write_error(path, len(data) if isinstance(data, bytes) else end, exc) from exc


def show(path: Path, value: Mapping[str, Any]) -> None:
    """Replace `path` by `value` as JSON, for people. A write that fails leaves the old file and is not reported."""
    with contextlib.suppress(OSError), replacing(path, durable=False) as fd:
        write_all(fd, [json.dumps(value, indent=1).encode() + b"\n"], 0)


def read_map(path: Path) -> dict[str, Any]:
    """The map in a JSON file; empty if there is none that can be read."""
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return as_map(value)


def as_map(value: Any) -> dict[str, Any]:
    """The value if it is a map; else an empty map."""
    return value if isinstance(value, dict) else {}


# -- files of lines, and the parts that a bounded one has -----

PARTS = 4  # at most in a bounded file of lines, with the one that is written
DIGITS = 15  # of the number in the name of an earlier part
CUT = ".cut"  # ends the name of the draft of an earlier part, of a file to which other processes append
TRIES = 20


def parts(path: Path) -> list[tuple[int, Path]]:
    """The earlier parts of a file of lines, the oldest first, each with the place where it ends.

    Places count from the file's very first byte, dropped or not, so that a reader finds its place whatever was renamed.
    """
    mark = f"{path.name}."
    with contextlib.suppress(OSError):
        names = (name.removeprefix(mark) for name in os.listdir(path.parent) if name.startswith(mark))
        return sorted((int(n), path.with_name(mark + n)) for n in names if len(n) == DIGITS and n.isdecimal())
    return []


class Lines:
    """The present content of a file of lines and its earlier parts; close it. OSError.

    `begin`, `base`, `end`: the places of the first byte that is there, of the first byte of the file that has the name,
    and of the end.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        for _ in range(TRIES):  # only while a part is made at just this moment
            with contextlib.ExitStack() as opened:
                if self._open(opened):
                    self._opened = opened.pop_all()
                    return
        raise OSError(errno.EAGAIN, f"{path} does not come to rest")

    def _open(self, opened: contextlib.ExitStack) -> bool:
        """Open file and parts; False if they changed meanwhile."""
        path, self._parts = self._path, parts(self._path)
        self._pieces: list[tuple[int, int, int]] = []  # begin, size, descriptor
        self.base = self._parts[-1][0] if self._parts else 0
        current = _descriptor(opened, path)
        size, self.inode = 0, (0, 0)
        if current is not None:
            info = os.fstat(current)
            size, self.inode = info.st_size, (info.st_dev, info.st_ino)
        for end, path_of_part in self._parts:
            if (part := _descriptor(opened, path_of_part)) is None:
                return False
            length = os.fstat(part).st_size
            self._pieces.append((end - length, length, part))
        self._current = current
        draft = self._cut_off(opened)
        self._cut = draft is not None
        if draft is not None:
            length = os.fstat(draft).st_size
            self._pieces.append((self.base, length, draft))
            self.base += length
        if current is not None:
            self._pieces.append((self.base, size, current))
        self.begin, self.end = self._pieces[0][0] if self._pieces else 0, self.base + size
        return not self.changed()

    def _cut_off(self, opened: contextlib.ExitStack) -> int | None:
        """The draft of an earlier part, if the file has lost its bytes already: the draft is about to get its name."""
        if self._current is None:
            return None
        draft = _descriptor(opened, self._path.with_name(self._path.name + CUT))
        return None if draft is None or _begins_with(self._current, draft) else draft

    def changed(self) -> bool:
        """Check whether files were renamed since, or the file was cut.

        A cut shows in the file's length, or in the draft that it left, where as much was appended since.
        """
        try:
            info = os.stat(self._path)
            same = (info.st_dev, info.st_ino) == self.inode and info.st_size >= self.end - self.base
        except OSError:
            same = self.inode == (0, 0)
        if not same or parts(self._path) != self._parts:
            return True
        with contextlib.ExitStack() as opened:
            return (self._cut_off(opened) is not None) != self._cut

    def blocks(self, at: int = 0) -> Iterator[tuple[int, bytes]]:
        """Yield all bytes from the place `at` on, each block with its place."""
        for begin, size, fd in self._pieces:
            place = max(at, begin)
            while place < begin + size:
                block = os.pread(fd, min(PART_BYTES, begin + size - place), place - begin)
                if not block:
                    break
                yield place, block
                place += len(block)

    def close(self) -> None:
        self._opened.close()


def _descriptor(opened: contextlib.ExitStack, path: Path) -> int | None:
    try:
        return opened.enter_context(open(path, "rb", buffering=0)).fileno()
    except (FileNotFoundError, NotADirectoryError):
        return None


def _begins_with(fd: int, part: int) -> bool:
    """Check whether a file begins with the whole content of another."""
    at = 0
    while block := os.pread(part, PART_BYTES, at):
        if os.pread(fd, len(block), at) != block:
            return False
        at += len(block)
    return True


def whole_file(path: Path, tail: int = 0) -> Iterator[bytes]:
    """Yield the lines of a file and its earlier parts, in order, with their ends; none if there is no file. `tail`:
    only those that begin in its last `tail` bytes. OSError."""
    with contextlib.closing(Lines(path)) as now:
        at = max(now.begin, now.end - tail) if tail else now.begin
        cut, rest = at > now.begin, b""
        for _, block in now.blocks(at):
            *lines, rest = (rest + block).split(b"\n")
            if cut and lines:
                del lines[0]
                cut = False
            for line in lines:
                yield line + b"\n"
        if rest and not cut:
            yield rest


def dropped(path: Path) -> int:
    """The number of bytes at the beginning of a file of lines that were dropped."""
    try:
        with contextlib.closing(Lines(path)) as now:
            return now.begin
    except OSError:
        return 0


def size_of(path: Path) -> int:
    """The size of a file in bytes, 0 where there is none. A log with another size than before has more to read."""
    try:
        return path.stat().st_size
    except OSError:
        return 0


def last_change(path: Path) -> float | None:
    """The time at which a file of lines was last written to; None if there is none."""
    for part in (path, *(part for _, part in reversed(parts(path)))):
        with contextlib.suppress(OSError):
            return part.stat().st_mtime
    return None


def json_lines(path: Path, tail: int = 0) -> Iterator[dict[str, Any]]:
    """Yield the maps in a file of JSON lines and its earlier parts, in order; other lines are skipped. `tail`: only
    those in its last `tail` bytes."""
    with contextlib.suppress(IsADirectoryError):
        for text in whole_file(path, tail):
            with contextlib.suppress(msgspec.DecodeError, UnicodeDecodeError, RecursionError):
                value = msgspec.json.decode(text)
                if isinstance(value, dict):
                    yield value


class LineFollower:
    """Reads the lines of a file as they are completed, each once, whatever part of the file it is in by then.
    `skipped`: the number of earlier lines that were not read."""

    def __init__(self, path: Path, tail_bytes: int = FOLLOWED_BYTES) -> None:
        self._path, self._tail = path, tail_bytes
        self._file: tuple[int, int] | None = None
        self._at = self._base = 0
        self.skipped = 0

    def new(self, rest: bool = False, most: int = 1 << 62) -> list[bytes]:
        """The lines that were completed since the last call; all of the file again if another program replaced it. With
        `rest` also a last line without an end. A call reads little more than `most` bytes."""
        try:
            with contextlib.closing(Lines(self._path)) as now:
                at, skipped = self._place(now)
                data, at = _read(now, at, most)
                if now.changed():
                    return []
        except OSError:
            return []
        complete = len(data) if rest and at == now.end else data.rfind(b"\n") + 1
        self._file, self._base, self.skipped = now.inode, now.base, skipped
        self._at = at - (len(data) - complete)
        return data[:complete].removesuffix(b"\n").split(b"\n") if complete else []

    def _place(self, now: Lines) -> tuple[int, int]:
        """The place to read from, and the number of lines before it that were never read."""
        if self._file is None:
            return self._start(now, now.begin)
        at = self._at - max(0, self._base - now.base)  # earlier parts were removed
        if (now.base <= self._base and now.inode != self._file) or at > now.end:
            return self._start(now, now.base)
        return max(at, now.begin), self.skipped

    def _start(self, now: Lines, begin: int) -> tuple[int, int]:
        least, skipped = now.end - self._tail, 0
        if least <= begin:
            return begin, 0
        for place, block in now.blocks(begin):
            end = block.find(b"\n", least - place) + 1 if least - place < len(block) else 0
            skipped += block.count(b"\n", 0, end or len(block))
            if end:
                return place + end, skipped
        return now.end, skipped


def _read(now: Lines, at: int, most: int) -> tuple[bytes, int]:
    """Read whole blocks from a place on, until there is a line and `most` bytes; returns the bytes and where they
    end."""
    blocks, size = [], 0
    for place, block in now.blocks(at):
        blocks.append(block)
        size, at = size + len(block), place + len(block)
        if size >= most and b"\n" in block:
            break
    return b"".join(blocks), at


class LineFile:
    """A file of lines that one process appends to; `sync=True` makes each line durable before `append` returns.

    A line goes to the end of the file that has the name now: other programs may empty, remove or rotate it. `UserError`
    where the name is that of something else than a file. `keep`: the most bytes of file and earlier parts together (a
    longer line stays all the same); 0 = no bound.
    """

    def __init__(self, path: str | os.PathLike[str], *, sync: bool = False, keep: int = 0) -> None:
        self.path = Path(path)
        self.sync, self._keep = sync, keep
        self.shortened = False  # whether another program has removed lines since
        self._torn = False
        self._fd = self._opened()
        self._end = os.fstat(self._fd).st_size

    def append(self, line: bytes) -> None:
        """Add a line (without its newline); on failure the file is as before."""
        data = line + b"\n"
        self._follow()
        before = os.fstat(self._fd).st_size
        self.shortened |= before < self._end
        if before and os.pread(self._fd, 1, before - 1) != b"\n":
            if self._torn:
                before = _cut_half_line(self._fd)
            else:  # half a line of another program: this one must not become a part of it
                data = b"\n" + data
        elif before and 0 < self._keep // PARTS < before + len(data):
            before = self._end = self._part(before)
        self._torn = True
        try:
            rest = data
            while rest:  # the kernel may take the bytes piecemeal
                rest = rest[os.write(self._fd, rest) :]
            if self.sync:
                os.fdatasync(self._fd)
        except OSError as exc:
            with contextlib.suppress(OSError):
                os.ftruncate(self._fd, before)
            raise write_error(self.path, len(data), exc) from exc
        self._torn, self._end = False, before + len(data)

    def extend(self, lines: Sequence[bytes]) -> None:
        """Add lines: all at once, for readers that follow, or one by one where they are too many for an earlier
        part."""
        block = b"\n".join(lines)
        if self._keep and len(block) > self._keep // PARTS // 2:
            for line in lines:
                self.append(line)
        elif lines:
            self.append(block)

    def flush(self) -> None:
        """Make all lines so far durable."""
        try:
            os.fdatasync(self._fd)
        except OSError as exc:
            raise write_error(self.path, 0, exc) from exc

    def size(self) -> int:
        """The number of bytes that were ever written, by the names of earlier parts."""
        return max((end for end, _ in parts(self.path)), default=0) + os.fstat(self._fd).st_size

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _opened(self) -> int:
        """Open the file, which is made if it is not there; half a line at its end is cut."""
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

    def _part(self, size: int) -> int:
        """Make the file an earlier part, by one rename, and begin another; returns its size. A file that cannot be
        renamed grows on."""
        try:
            _name_part(self.path, self.path, size, self._keep)
        except OSError:
            return size
        self._follow()
        return os.fstat(self._fd).st_size

    def _follow(self) -> None:
        """Open the file that has the name now, if it is another. A directory that was moved took the file along."""
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


def _cut_half_line(fd: int) -> int:
    """Cut the file at the end of its last whole line; returns its size."""
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


def _name_part(path: Path, part: Path, size: int, keep: int) -> None:
    """Give the file `part` of `size` bytes the name of the newest earlier part. Remove the oldest: those that with the
    file to come would be more than `keep` bytes, or more than `PARTS` files."""
    earlier = parts(path)
    end = (earlier[-1][0] if earlier else 0) + size
    os.rename(part, path.with_name(f"{path.name}.{end:0{DIGITS}d}"))
    room = keep - keep // PARTS - size
    for newer, (_, old) in enumerate(reversed(earlier), start=1):
        with contextlib.suppress(OSError):
            room -= old.stat().st_size
            if room < 0 or newer > PARTS - 2:
                old.unlink()


def bound(path: Path, keep: int) -> None:
    """Bound a file that other processes append to, such as a log: once it is too long, all but its last block becomes
    an earlier part. A disk that is full or cannot be written leaves it as it is.

    - The file stays the same one, since other programs hold it open.
    - The file system cuts off its beginning. Where it cannot do so (tmpfs, btrfs, NFS) the file is emptied: bytes that
      are written in the microseconds after the last look at it are lost there.
    - `Lines` reads the draft of the part correctly, also after a SIGKILL; the next call finishes it.
    """
    draft = path.with_name(path.name + CUT)
    with contextlib.suppress(OSError), open(path, "r+b", buffering=0) as file:
        if draft.exists():
            _end_cut(path, file.fileno(), draft, keep)
        if keep and os.fstat(file.fileno()).st_size > keep // PARTS:
            try:
                size = _cut_beginning(file.fileno(), draft)
                if size:
                    _name_part(path, draft, size, keep)
            except OSError:
                _end_cut(path, file.fileno(), draft, keep)


def _end_cut(path: Path, fd: int, draft: Path, keep: int) -> None:
    """Finish with the draft of a killed process: a copy of bytes that are still in the file, or their only copy."""
    with open(draft, "rb", buffering=0) as part:
        size, copied = os.fstat(part.fileno()).st_size, _begins_with(fd, part.fileno())
    if copied:
        draft.unlink()
    else:
        _name_part(path, draft, size, keep)


def _cut_beginning(fd: int, draft: Path) -> int:
    """Move whole blocks from the beginning of a file to a draft; returns the number of bytes."""
    block = os.fstatvfs(fd).f_bsize
    size = (os.fstat(fd).st_size - 1) // block * block  # the file system cuts no file down to nothing
    if not size:
        return 0
    out = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        _copy(fd, out, 0, size)
        if _libc.fallocate(fd, COLLAPSE, ctypes.c_int64(0), ctypes.c_int64(size)) != 0:
            size = _copy(fd, out, size)
            os.ftruncate(fd, 0)
    finally:
        os.close(out)
    return size


def _copy(fd: int, out: int, at: int, end: int | None = None) -> int:
    """Copy from the place `at` to `end`, or to the end of the file; returns the place that was reached."""
    while block := os.pread(fd, PART_BYTES if end is None else min(PART_BYTES, end - at), at):
        at = write_all(out, [block], at)
    return at


# -- sizes and checksums, which show that a directory was truncated or changed -----


def listing(directory: Path, paths: Iterable[Path]) -> dict[str, list[int]]:
    """The size in bytes and the CRC-32 of each file, by its name below the directory."""
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
    """The CRC-32 of a file."""
    value = 0
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            value = zlib.crc32(chunk, value)
    return value
