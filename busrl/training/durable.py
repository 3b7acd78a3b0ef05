"""Directories that appear whole or not at all, and the removal of old ones.

Used by `checkpoint`. Talks to the file system; knows nothing of models.

- A directory is written under a temporary name, every file and folder in it is synced, then it is renamed and its
  parent synced. Whoever dies on the way leaves a temporary directory that the next writer removes, never half of a
  real one.
- One that takes the place of another is exchanged with it in one step: at every moment there is a whole one of that
  name. On a file system that can not exchange two names the old one has a name from which `finish_replacements` brings
  it back.
- A directory is renamed before it is deleted: half of a deleted one has no real name either.
- One writer per parent at a time; the caller holds the lock that makes it so.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from busrl.errors import DiskFull
from busrl.ledger.files import REPLACED, finish_replacements

TEMPORARY = ".tmp-"
AT_FDCWD, RENAME_EXCHANGE = -100, 2
NO_EXCHANGE = frozenset({errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EPERM, errno.EXDEV})
_libc = ctypes.CDLL(None, use_errno=True)


@contextlib.contextmanager
def whole_directory(final: Path, moved: Callable[[], None] = lambda: None) -> Iterator[Path]:
    """A temporary directory to fill; it becomes `final`, in place of one that is there, when the block ends well.
    `moved` is called after each file that was synced."""
    parent = final.parent
    parent.mkdir(parents=True, exist_ok=True)
    remove_leftovers(parent)
    temporary = parent / f"{TEMPORARY}{final.name}"
    temporary.mkdir()
    try:
        yield temporary
        sync_tree(temporary, moved)
        _take_the_place(temporary, final)
    except BaseException as error:
        shutil.rmtree(temporary, ignore_errors=True)
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise DiskFull(
                f"{final}: {error.strerror} while it was written; nothing of it is left and older ones are untouched; "
                f"free space on the file system of {parent}"
            ) from error
        raise


def _take_the_place(temporary: Path, final: Path) -> None:
    if not os.path.lexists(final):
        os.rename(temporary, final)
        sync(final.parent)
    elif exchange(temporary, final):
        sync(final.parent)
        _delete(temporary, final.name)
    else:
        os.rename(final, final.parent / f"{REPLACED}{final.name}")
        os.rename(temporary, final)
        sync(final.parent)
        finish_replacements(final.parent)


def exchange(one: Path, other: Path) -> bool:
    """Swap two names in one step; False where the file system (NFS, for one) or the C library has no such step."""
    try:
        swap = _libc.renameat2
    except AttributeError:
        return False
    if swap(AT_FDCWD, os.fsencode(one), AT_FDCWD, os.fsencode(other), RENAME_EXCHANGE) == 0:
        return True
    number = ctypes.get_errno()
    if number in NO_EXCHANGE:
        return False
    raise OSError(number, os.strerror(number), str(other))


def remove(path: Path) -> None:
    """Deletes a directory so that no half of it is ever seen under its name."""
    _delete(path, path.name)


def _delete(path: Path, name: str) -> None:
    aside = path.parent / f"{TEMPORARY}old-{name}"
    shutil.rmtree(aside, ignore_errors=True)
    os.rename(path, aside)
    if aside.is_dir() and not aside.is_symlink():
        shutil.rmtree(aside, ignore_errors=True)
    else:
        aside.unlink(missing_ok=True)


def remove_leftovers(parent: Path) -> None:
    """What earlier writers left behind when they died."""
    finish_replacements(parent)
    for path in parent.glob(f"{TEMPORARY}*"):
        shutil.rmtree(path, ignore_errors=True)


def sync_tree(root: Path, moved: Callable[[], None] = lambda: None) -> None:
    """Every file below, then every directory, so that names are not on disk before what they name."""
    for folder, _, files in os.walk(root, topdown=False):
        for name in files:
            sync(Path(folder) / name)
            moved()
        sync(Path(folder))


def sync(path: Path) -> None:
    """fsync of one file or directory."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
