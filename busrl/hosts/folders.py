"""Folders of adapters or checkpoints on their way to other hosts, as `hosts.versions` carries segments.

`FolderSnapshot` reads the directory where the learner publishes; `FolderCopy` writes that of another host, where
engines find versions as they would at home (`weights.folders`). Talks to these files only; knows nothing of sockets or
adapters.

- The bytes of a folder are those of all its files one behind the other, `busrl.json` with its checksums too; its
  manifest has names and sizes.
- A folder gets its name by a rename when its last piece is written.
- No name in a manifest leads out of the folder.
"""

from __future__ import annotations

import json
import os
import shutil
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

import numpy as np

from busrl.errors import WeightsRefused
from busrl.hosts.versions import CopiedVersion, Pieces, Snapshot
from busrl.weights.folders import DRAFT, files, name_of, newest_in, private, remove, versions


class FolderSnapshot(Snapshot):
    """A copy of the newest folder of the directory `path`, in memory of this process, in pieces of `size`."""

    def newest(self) -> tuple[int, int]:
        return newest_in(self.path)

    def _read(self) -> CopiedVersion | None:
        if not (there := versions(self.path)):
            return None
        version, step, folder = there[-1]
        try:
            parts = [(str(file.relative_to(folder)), file.read_bytes()) for file in files(folder)]
        except FileNotFoundError:  # newer ones have replaced it: look again
            return None
        if not parts:
            return None
        manifest = json.dumps([[name, len(data)] for name, data in parts]).encode()
        return CopiedVersion(version, step, 0, manifest, np.frombuffer(b"".join(data for _, data in parts), np.uint8))


@dataclass
class _Files:
    """The open files of a version, whatever their names are by now."""

    pieces: Pieces
    places: list[tuple[int, int, int]] = field(default_factory=list)  # begin, end, descriptor

    def write(self, at: int, data: memoryview) -> None:
        for begin, end, descriptor in self._within(at, len(data)):
            first, last = max(at, begin), min(at + len(data), end)
            os.pwrite(descriptor, data[first - at : last - at], first - begin)

    def read(self, at: int, size: int) -> bytes:
        return b"".join(
            os.pread(descriptor, min(at + size, end) - max(at, begin), max(at, begin) - begin)
            for begin, end, descriptor in self._within(at, size)
        )

    def _within(self, at: int, size: int) -> list[tuple[int, int, int]]:
        return [place for place in self.places if place[0] < at + size and at < place[1]]

    def close(self) -> None:
        for _, _, descriptor in self.places:
            os.close(descriptor)


class FolderCopy:
    """Writes versions into the directory `root`, as `SegmentCopy` does into a segment, and keeps the newest `count`."""

    def __init__(self, root: Path, count: int) -> None:
        self.root, self._count = root, count
        self._open: dict[int, _Files] = {}  # by digest: the version that is written, and the one before it
        self._writing = 0  # the digest of the version that is written, 0: none
        self._draft, self._name = Path(), ""

    def newest(self) -> int:
        return newest_in(self.root)[0]

    def begin(
        self, version: int, step: int, checksum: int, manifest: bytes, version_digest: int, pieces: Pieces
    ) -> None:
        """Begin to write a version. WeightsRefused: it is not above the newest here, its manifest names no files of a
        folder, or there is no room for it."""
        if version <= self.newest():
            raise WeightsRefused(f"{self.root}: version {version} is not above {self.newest()}, which is there")
        listed = _listed(manifest)
        private(self.root)
        for path in self.root.glob(f"{DRAFT}*"):  # left by relays that died
            shutil.rmtree(path, ignore_errors=True)
        self._name = name_of(version, step)
        self._draft = self.root / f"{DRAFT}{self._name}"
        self._writing, written = version_digest, _Files(pieces)
        self._open[version_digest] = written
        try:
            self._draft.mkdir(mode=0o700)
            at = 0
            for name, size in listed:
                written.places.append((at, at + size, _created(self._draft / name, size)))
                at += size
        except OSError as problem:
            self.abandon()
            raise WeightsRefused(f"{self.root}: {problem.strerror}; free some space there") from problem

    def write(self, at: int, data: memoryview) -> None:
        self._open[self._writing].write(at, data)

    def holds(self, version_digest: int) -> bool:
        """Check whether some or all of the version with this digest lies here."""
        return version_digest in self._open

    def piece(self, version_digest: int, at: int, size: int) -> bytes | None:
        """A piece; None if it is not here."""
        copy = self._open.get(version_digest)
        return copy.read(at, size) if copy is not None and copy.pieces.has(at, size) else None

    def done(self) -> None:
        """Make the version, all of whose bytes are written, the newest."""
        os.rename(self._draft, self.root / self._name)
        for old in versions(self.root)[: -self._count]:
            remove(old.path)
        for before in [digest for digest in self._open if digest != self._writing]:
            self._open.pop(before).close()
        self._writing = 0

    def abandon(self) -> None:
        """Remove the version that is written, which is not whole."""
        if self._writing:
            self._open.pop(self._writing).close()
            shutil.rmtree(self._draft, ignore_errors=True)
        self._writing = 0

    def close(self) -> None:
        self.abandon()
        for copy in self._open.values():
            copy.close()
        self._open.clear()


def _listed(manifest: bytes) -> list[tuple[str, int]]:
    """Names and sizes in a manifest. WeightsRefused: it is something else, or a name leads out of the folder."""
    with suppress(ValueError, TypeError):
        listed = [(str(name), int(size)) for name, size in json.loads(manifest)]
        paths = [PurePosixPath(name) for name, _ in listed]
        inside = all(path.parts and not path.is_absolute() and ".." not in path.parts for path in paths)
        if listed and inside and all(size >= 0 for _, size in listed):
            return listed
    raise WeightsRefused("the manifest names no files of a folder: are both ends of the same busrl and topology?")


def _created(path: Path, size: int) -> int:
    """The descriptor of a new file of `size` bytes, all of them reserved."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        if size:
            os.posix_fallocate(descriptor, 0, size)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor
