"""Directories that appear whole or not at all, and the removal of old ones.

Used by `checkpoint`. Talks to the file system; knows nothing of models.

- A directory is written under a temporary name, every file and folder in it is synced, then it is renamed and its
  parent synced. Whoever dies on the way leaves a temporary directory that the next writer removes, never half of a
  real one.
- A directory is renamed before it is deleted: half of a deleted one has no real name either.
- One writer per parent at a time; the caller holds the lock that makes it so.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from busrl.errors import DiskFull

TEMPORARY = ".tmp-"


@contextlib.contextmanager
def whole_directory(final: Path) -> Iterator[Path]:
    """A temporary directory to fill; it becomes `final`, in place of one that is there, when the block ends well."""
    parent = final.parent
    parent.mkdir(parents=True, exist_ok=True)
    remove_leftovers(parent)
    temporary = parent / f"{TEMPORARY}{final.name}"
    temporary.mkdir()
    try:
        yield temporary
        sync_tree(temporary)
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
    if final.exists():
        remove(final)
    os.rename(temporary, final)
    sync(final.parent)


def remove(path: Path) -> None:
    """Deletes a directory so that no half of it is ever seen under its name."""
    aside = path.parent / f"{TEMPORARY}old-{path.name}"
    shutil.rmtree(aside, ignore_errors=True)
    os.rename(path, aside)
    shutil.rmtree(aside, ignore_errors=True)


def remove_leftovers(parent: Path) -> None:
    """What earlier writers left behind when they died."""
    for path in parent.glob(f"{TEMPORARY}*"):
        shutil.rmtree(path, ignore_errors=True)


def sync_tree(root: Path) -> None:
    """Every file below, then every directory, so that names are not on disk before what they name."""
    for folder, _, files in os.walk(root, topdown=False):
        for name in files:
            sync(Path(folder) / name)
        sync(Path(folder))


def sync(path: Path) -> None:
    """fsync of one file or directory."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
