"""Versions as folders: where they lie, what they are called, and how a whole one is told from a torn one.

Used by the sender and the receiver of folders (`folder_sender`, `folder_receiver`) and by nobody else. Talks to the
file system only; knows nothing of adapters, models or engines, and imports no torch.

    ROOT/lock                      held by the learner that publishes; its pid
    ROOT/v000000000017-s9/         version 17 of step 9, with busrl.json: every file with its size and CRC-32
    ROOT/held/rollout-0.4711/      versions that pid 4711 has taken: the same files under another name (hard links)
    ROOT/.draft-*, ROOT/.old-*     being written, being removed

- A version has its name complete, by a rename; its files never change afterwards.
- The directory is 0700 and its owner's: who could write here could change what is trained.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from busrl import checksums
from busrl.errors import InsecureDirectory, WeightsRefused

STAMP, LOCK, HELD = "busrl.json", "lock", "held"
DRAFT, OLD = ".draft-", ".old-"
NAME = re.compile(r"v(\d{12})-s(\d+)")
LAYOUT = 1


class Found(NamedTuple):
    """A version that lies in a directory."""

    version: int
    step: int
    path: Path


def name_of(version: int, step: int) -> str:
    return f"v{version:012d}-s{step}"


def versions(root: Path) -> list[Found]:
    """Complete versions, oldest first; empty where there is no such directory."""
    try:
        names = os.listdir(root)
    except FileNotFoundError:
        return []
    return sorted(Found(int(m[1]), int(m[2]), root / name) for name in names if (m := NAME.fullmatch(name)))


def private(root: Path) -> None:
    """Make the directory, or accept the one that is there: InsecureDirectory unless it is ours alone."""
    try:
        root.mkdir(mode=0o700)
        return
    except FileExistsError:
        found = root.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
        raise InsecureDirectory(
            f"{root}: owner {found.st_uid}, mode {stat.S_IMODE(found.st_mode):o}; published weights lie in a directory "
            f"of user {os.geteuid()} with mode 700: have it removed"
        )


def stamp(folder: Path, kind: str, version: int, step: int, base: str) -> None:
    """Write down what is in the folder. The last file of a version."""
    listed = checksums.listing(folder, files(folder))
    told = {"layout": LAYOUT, "kind": kind, "version": version, "step": step, "base": base, "files": listed}
    (folder / STAMP).write_text(json.dumps(told, indent=1))


def verify(found: Found, at: Path, kind: str, base: str) -> None:
    """WeightsRefused, with the reason, if the files `at` are torn, changed, of another kind or for another model."""
    try:
        told: dict[str, Any] = json.loads((at / STAMP).read_bytes())
        fault = _fault(found, at, told, kind, base)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as problem:
        fault = f"{STAMP} can not be read ({problem})"
    if fault is not None:
        raise WeightsRefused(f"{found.path}: version {found.version} is not used: {fault}")


def _fault(found: Found, at: Path, told: dict[str, Any], kind: str, base: str) -> str | None:
    if told["layout"] != LAYOUT or told["kind"] != kind:
        return f"it is a {told['kind']} of layout {told['layout']}, wanted is {kind} of layout {LAYOUT}"
    if (told["version"], told["step"]) != (found.version, found.step):
        return f"it says that it is version {told['version']} of step {told['step']}"
    if base and told["base"] != base:
        return (
            f"it was made for another base model (fingerprint {told['base'][:12]}, here {base[:12]}); learner and "
            "engines need the same model.path"
        )
    return checksums.fault_in(at, told["files"])


def link(source: Path, target: Path) -> None:
    """The files of a folder under a second name, without a copy where the file system can do that."""
    for path in files(source, STAMP):
        there = target / path.relative_to(source)
        there.parent.mkdir(parents=True, exist_ok=True)
        try:
            os.link(path, there)
        except FileNotFoundError:
            raise
        except OSError:  # no hard links here
            shutil.copyfile(path, there)


def remove(path: Path) -> None:
    """Take away the name first, so that no half of it is ever seen under it."""
    aside = path.parent / f"{OLD}{path.name}"
    shutil.rmtree(aside, ignore_errors=True)
    try:
        os.rename(path, aside)
    except FileNotFoundError:
        return
    shutil.rmtree(aside, ignore_errors=True)


def files(folder: Path, *more: str) -> Iterator[Path]:
    """Every file below, the stamp left out unless it is named."""
    return (path for path in sorted(folder.rglob("*")) if path.is_file() and (path.name != STAMP or STAMP in more))


def writer_of(root: Path) -> str:
    """Who publishes there, in words, for an error."""
    try:
        pid = int((root / LOCK).read_text() or 0)
    except (OSError, ValueError):
        return f"{root} is not there: the learner has published nothing yet"
    return f"{root}: the learner (pid {pid}) is {'alive' if os.path.exists(f'/proc/{pid}') else 'dead'}"
