"""Directories and files that only this user can enter or read: made without a race, checked before use.

Talks to the file system only. Nothing but these rights protects sockets and keys, so the rights are always checked.

- A directory of another user, or one that others may write into, is refused: its files may be theirs.
- A directory that others may only read is closed to them. Check and change work on an open descriptor, not on the name.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from busrl.errors import InsecureDirectory


def private_directory(path: str | os.PathLike[str], what: str = "socket directory", remedy: str = "") -> Path:
    """Make (or check and close) a directory of mode 0700; InsecureDirectory if it cannot be trusted."""
    directory = Path(path)
    remedy = remedy or "set XDG_RUNTIME_DIR to a directory of your own"
    _check_parent(directory.parent, what, remedy)
    try:
        directory.mkdir(mode=0o700)
    except FileExistsError:
        pass
    except OSError as error:
        raise InsecureDirectory(f"{what} {directory}: it cannot be made: {error.strerror}; {remedy}") from None
    _close(directory, what, remedy)
    return directory


def _check_parent(path: Path, what: str, remedy: str) -> None:
    """Refuse a parent whose entries another user may rename: that user could put another directory in this place."""
    try:
        info = path.stat()
    except FileNotFoundError:
        raise InsecureDirectory(f"{what}: {path} does not exist; create it, or {remedy}") from None
    if info.st_uid not in (0, os.getuid()):
        raise InsecureDirectory(
            f"{what}: {path} belongs to user {info.st_uid}, who could replace what is in it; {remedy}"
        )
    if info.st_mode & 0o022 and not info.st_mode & stat.S_ISVTX:
        raise InsecureDirectory(
            f"{what}: {path} has mode {stat.S_IMODE(info.st_mode):04o}: others could replace what is in it; "
            f"`chmod go-w {path}`, or {remedy}"
        )


def _close(path: Path, what: str, remedy: str) -> None:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        raise InsecureDirectory(
            f"{what} {path} is no directory that can be opened ({error.strerror}; links are not followed): remove it, "
            f"or {remedy}"
        ) from None
    try:
        info = os.fstat(descriptor)
        if info.st_uid != os.getuid():
            raise InsecureDirectory(
                f"{what} {path} belongs to user {info.st_uid}, not to user {os.getuid()}: remove it, or {remedy}"
            )
        if info.st_mode & 0o022:
            raise InsecureDirectory(
                f"{what} {path} has mode {stat.S_IMODE(info.st_mode):04o}: others may have put files into it; look "
                f"what is there, then `chmod 700 {path}`, or {remedy}"
            )
        if info.st_mode & 0o077:
            os.fchmod(descriptor, 0o700)
    finally:
        os.close(descriptor)


def exposed(path: Path) -> str:
    """The reason why a file or directory is not private, in words; empty if it is."""
    info = path.stat()
    if info.st_uid != os.getuid():
        return f"it belongs to user {info.st_uid}, not to user {os.getuid()}"
    if info.st_mode & 0o077:
        return f"its mode is {stat.S_IMODE(info.st_mode):04o}, so others can read it"
    return ""
