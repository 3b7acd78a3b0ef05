"""Versions of weights on their way to other hosts: read from a segment at home, written into one there, in pieces.

`Snapshot` reads the segment of the run's host; `SegmentCopy` writes that of another host, which engines there read as
they would at home (`weights.shm`). `hosts.folders` does the same with folders. `Chain` says which host fetches from
which, `Sources` when a host turns to another, `Pieces` which pieces are missing. Talks to these files only; knows
nothing of sockets, models or torch.

- A snapshot is copied once, under the reader's lock: the learner waits no longer than for an engine. Sparse updates are
  applied to the copy, so that a host needs no earlier version.
- The digest of its bytes identifies a version, and each piece has a digest of its own: whichever host sent them, no
  two versions mix.
- A version counts on the other host when its last piece is written, never before. A version at or below the one that
  is there is not begun, so engines never step back.
- A copy that ends in the middle leaves the buffer that engines read as it was.
"""

from __future__ import annotations

import math
import os
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from busrl._blocks import digest
from busrl.errors import WeightsRefused, WeightsTimeout
from busrl.weights import shm
from busrl.weights.base import is_named
from busrl.weights.shm import PATIENCE_S, Bytes, Segment, VersionReceiver, attach_segment, create_segment
from busrl.weights.sparse import FrameError, apply_to_block, split, unpack
from busrl.weights.tensors import Manifest

HOME = ""  # the name of home among the hosts that a version is fetched from
MOST_COPIES = 2  # versions that home keeps at the same time, where a slow host still fetches the older one
NEAREST = 2  # hosts to fetch from before home
SILENT_S = 2.0  # a host that is silent for this long is left for the next
WATCH_S = 3.0  # over which a host's rate is measured; one that sends much less than usual twice in a row is left


# -- at home -----


class CopiedVersion(NamedTuple):
    """A version: its number, the step that made it, the checksum of its values (0: none), its layout, its bytes; the
    digests of its pieces, 8 bytes each, and the digest of all these."""

    version: int
    step: int
    checksum: int
    manifest: bytes
    data: Bytes
    digests: bytes = b""
    digest: int = 0


class Snapshot(VersionReceiver):
    """A copy of the newest whole version of the segment at `path`, in memory of this process, in pieces of `size`."""

    def __init__(self, path: Path, size: int) -> None:
        super().__init__(path)
        self.size = size
        self._copies: dict[int, CopiedVersion] = {}

    def take(self, fetched: Collection[int] = ()) -> CopiedVersion | None:
        """The newest version, or the newest copy while hosts still fetch two older ones (`fetched`); None if there is
        none, or it was written over while it was copied (ask again)."""
        version, _ = self.newest()
        if version < 0:
            return None
        if version not in self._copies:
            # Memory is freed first: a model is large.
            self._copies = {version: copy for version, copy in self._copies.items() if version in fetched}
            if len(self._copies) < MOST_COPIES and (copy := self._copy_newest()) is not None:
                self._copies[copy.version] = copy
                return copy
        return self._copies.get(version) or self._copies.get(max(self._copies, default=-1))

    def piece(self, version_digest: int, at: int, size: int) -> memoryview | None:
        """Bytes of the version with this digest; None if there is no copy of it, or they lie beyond its end."""
        copy = next((copy for copy in self._copies.values() if copy.digest == version_digest), None)
        if copy is None or not 0 <= at < at + size <= len(copy.data):
            return None
        return memoryview(copy.data.data)[at : at + size]

    def _copy_newest(self) -> CopiedVersion | None:
        copy = self._read()
        if copy is None:
            return None
        pieces = [digest(copy.data[at : at + self.size], at) for at in range(0, len(copy.data), self.size)]
        digests = np.array(pieces, "<u8").tobytes()
        return copy._replace(digests=digests, digest=digest(digests + copy.manifest, copy.version) >> 1)

    def _read(self) -> CopiedVersion | None:
        segment = self._current()
        k = segment.newest() if segment is not None else None
        if segment is None or k is None or not segment.lock(k, alone=False):
            return None
        try:
            words = segment.buffer[k]
            seq, logged = int(words[shm.SEQ]), int(words[shm.LOGGED])
            if seq & 1:
                return None
            head = int(words[shm.VERSION]), int(words[shm.STEP]), int(words[shm.CHECKSUM])
            copy = CopiedVersion(*head, segment.manifest.to_json(), segment.data[k].copy())
            frames = segment.log[k][:logged].copy()
            if int(words[shm.SEQ]) != seq:
                return None
        finally:
            segment.unlock(k)
        return self._updated(copy, segment.manifest, frames)

    def _updated(self, copy: CopiedVersion, manifest: Manifest, log: Bytes) -> CopiedVersion | None:
        """Apply the sparse updates of the log: other hosts get all values. None if an update is damaged."""
        sums = [0] * len(manifest.entries)
        try:
            for frame in map(unpack, split(log)):
                apply_to_block(frame, manifest, copy.data, sums)
                copy = copy._replace(version=frame.version, step=frame.step, checksum=frame.digest)
        except FrameError:
            return None
        return copy


@dataclass
class _Host:
    """A host in home's records: where it answers others, when it last asked, the version that it has and the one that
    it fetches, and how fast."""

    place: str = ""
    seen: float = -math.inf
    have: int = -1
    fetching: int = -1
    begun: float = 0.0
    nbytes: int = 0
    rate: float = 0.0  # bytes per second of its last fetch, from its question to the version's end; 0: unknown


class Chain:
    """The order in which hosts fetch from one another: by the rate of their last fetch, the fastest first, else by
    name; the first fetches from home. The order of a version stays while it is the newest, so that no host waits for
    itself."""

    def __init__(self, patience_s: float) -> None:
        self._patience_s = patience_s  # a host that asks nothing for this long counts as gone
        self._hosts: dict[str, _Host] = {}
        self._version, self._order = -1, list[str]()

    def looked(self, name: str, have: int, now: float) -> None:
        """Note that host `name` is there, with version `have`."""
        host = self._hosts.setdefault(name, _Host())
        host.seen, host.have = now, have
        if 0 <= host.fetching <= have:
            host.rate, host.fetching = host.nbytes / max(now - host.begun, 1e-3), -1

    def asks(self, name: str, place: str, version: int, nbytes: int, now: float) -> list[str]:
        """Note that host `name` fetches this version; returns the hosts to fetch it from, the nearest first."""
        host = self._hosts.setdefault(name, _Host())
        if host.fetching != version:
            host.fetching, host.begun, host.nbytes = version, now, nbytes
        host.seen, host.place = now, place
        if version > self._version:
            self._version = version
            self._order = sorted((host for host in self._hosts if self._there(host, now)), key=self._slowness)
        if version < self._version:
            return []
        if name not in self._order:
            self._order.append(name)
        before = reversed(self._order[: self._order.index(name)])
        return [host for host in before if self._there(host, now) and self._gets(host, version)][:NEAREST]

    def place(self, name: str) -> str:
        host = self._hosts.get(name)
        return host.place if host else ""

    def fetched(self, name: str, now: float) -> set[int]:
        """Versions that hosts other than `name` fetch just now."""
        others = (host for other, host in self._hosts.items() if other != name)
        return {host.fetching for host in others if now - host.seen < self._patience_s} - {-1}

    def _there(self, name: str, now: float) -> bool:
        return bool(self._hosts[name].place) and now - self._hosts[name].seen < self._patience_s

    def _gets(self, name: str, version: int) -> bool:
        """Check whether the host has this version, or gets it next."""
        host = self._hosts[name]
        return host.have == version or host.fetching == version or (host.fetching < 0 and host.have < version)

    def _slowness(self, name: str) -> tuple[int, str]:
        """The rate in powers of two below the fastest: small differences change no order, and no connection."""
        rate, best = self._hosts[name].rate, max(host.rate for host in self._hosts.values())
        return int(math.log2(best / rate)) if rate else 1, name


# -- on another host -----


class Pieces:
    """The pieces of a version: which are here, which are requested, which come next. `digests`: 8 bytes of each."""

    def __init__(self, nbytes: int, size: int, digests: bytes) -> None:
        """WeightsRefused: there are more or fewer digests than pieces."""
        count = -(-nbytes // size) if size else -1
        if len(digests) != 8 * count:
            raise WeightsRefused(f"{nbytes} bytes in pieces of {size}, with {len(digests) // 8} digests")
        self._nbytes, self._size, self._digests = nbytes, size, np.frombuffer(digests, "<u8")
        self._wanted, self._requested, self._here = deque(range(count)), set[int](), bytearray(count)
        self.left = count

    @property
    def open(self) -> int:
        """The number of pieces that are requested and not here."""
        return len(self._requested)

    def want(self) -> tuple[int, int] | None:
        """Place and size of the next piece to request; None: all are here or requested."""
        while self._wanted:
            number = self._wanted.popleft()
            if not self._here[number]:
                self._requested.add(number)
                return number * self._size, self._length(number)
        return None

    def again(self) -> None:
        """Wait no longer for the pieces that are requested; they are the first to request from another host."""
        self._wanted.extendleft(sorted(self._requested, reverse=True))
        self._requested.clear()

    def came(self, at: int, data: memoryview) -> bool:
        """Check and note a piece; True if it was not here before. WeightsRefused: it is not a piece of this version."""
        number, beside = divmod(at, self._size)
        if beside or not 0 <= number < len(self._here) or len(data) != self._length(number):
            raise WeightsRefused(f"bytes {at} to {at + len(data)} are no piece of the version")
        if digest(data, at) != int(self._digests[number]):
            raise WeightsRefused(f"bytes {at} to {at + len(data)} are not those of the version")
        new = not self._here[number]
        self._here[number] = 1
        self._requested.discard(number)
        self.left -= new
        return new

    def has(self, at: int, size: int) -> bool:
        number, beside = divmod(at, self._size)
        here = not beside and 0 <= number < len(self._here) and bool(self._here[number])
        return here and size == self._length(number)

    def _length(self, number: int) -> int:
        return min(self._size, self._nbytes - number * self._size)


class Sources:
    """The host to fetch a version from: the first of `above`, then the others, then home.

    - A host that is silent for SILENT_S, refuses or sends wrong bytes is left for good. Home counts as silent after
      `home_s`, and no host comes after it.
    - A host that sends less than half of the `usual` rate (0: unknown, so that all are tried) over twice WATCH_S is
      left for one that was not tried; when all were, the best stays. Twice, since in the first WATCH_S it may itself
      leave another host.
    - `over`: no host is left.
    """

    over = False

    def __init__(self, above: Sequence[str], usual: float, home_s: float, now: float) -> None:
        self._there = [*above, HOME]
        self._enough = usual / 2 if usual else math.inf
        self._home_s = home_s
        self._rates: dict[str, float] = {}
        self._settled, self._low = False, False
        self.current, self._since, self._received_at, self._bytes = self._there[0], now, now, 0

    def received(self, now: float, nbytes: int = 0) -> None:
        """Note that the current host has sent something, `nbytes` of it new."""
        self._received_at = now
        self._bytes += nbytes

    def lost(self, now: float) -> None:
        """Leave the current host for good."""
        self._there.remove(self.current)
        if self._there:
            self._turn(self._next(), now)
        else:
            self.over = True

    def look(self, now: float) -> str:
        """Decide whether to leave the current host; returns why it was left, empty if it was not."""
        before, silent_s = self.current, self._home_s if self.current == HOME else SILENT_S
        if now - self._received_at >= silent_s:
            self.lost(now)
            return f"nothing heard of {before or 'home'} for {silent_s:g} s"
        if now - self._since < WATCH_S:
            return ""
        rate = self._bytes / (now - self._since)
        self._since, self._bytes, low, self._low = now, 0, self._low, rate < self._enough
        self._rates[before] = max(rate, self._rates.get(before, 0.0)) if low else rate
        if not (low and self._low) or self._settled:
            return ""
        self._settled = all(host in self._rates for host in self._there)
        if (best := self._next()) == before:
            return ""
        self._turn(best, now)
        return f"{before or 'home'} gave {rate / 1e6:.1f} MB/s"

    def usual(self, now: float) -> float:
        """The best rate that this host has measured."""
        seconds = now - self._since
        if self._rates and seconds < WATCH_S / 2:
            return max(self._rates.values())
        return max([*self._rates.values(), self._bytes / max(seconds, 1e-3)])

    def _next(self) -> str:
        """The first host that was not tried, else the best."""
        return max(self._there, key=lambda host: self._rates.get(host, math.inf))

    def _turn(self, to: str, now: float) -> None:
        self.current, self._since, self._received_at, self._bytes, self._low = to, now, now, 0, False


class SegmentCopy:
    """Writes the segment at `path`: `begin` a version, `write` its bytes in any order, call `done`. `piece` gives other
    hosts what is here of this version, and of the one before it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._segment = attach_segment(path, writable=True)
        self._k = -1
        self._buffers: dict[int, tuple[int, Pieces]] = {}  # by number: digest and pieces of the version that lies there
        self._head = (0, 0, 0)

    def newest(self) -> int:
        """The version that engines find; -1 if there is none."""
        k = None if self._segment is None else self._segment.newest()
        return -1 if self._segment is None or k is None else self._segment.stamp(k)[0]

    def begin(
        self, version: int, step: int, checksum: int, manifest: bytes, version_digest: int, pieces: Pieces
    ) -> None:
        """Begin to write a version. WeightsRefused: it is not above the newest here. WeightsTimeout: an engine keeps
        reading the buffer."""
        if version <= self.newest():
            raise WeightsRefused(f"{self.path}: version {version} is not above {self.newest()}, which is there")
        segment = self._for(Manifest.from_json(manifest))
        k = 1 - (segment.newest() or 0)
        if not segment.lock(k, alone=True, patience_s=PATIENCE_S):
            before = segment.stamp(k)[0]
            raise WeightsTimeout(f"{self.path}: an engine reads version {before} for over {PATIENCE_S:g} s")
        segment.begin(k, version)
        self._buffers[k] = version_digest, pieces
        self._k, self._head = k, (version, step, checksum)

    def write(self, at: int, data: memoryview) -> None:
        assert self._segment is not None
        self._segment.data[self._k][at : at + len(data)] = np.frombuffer(data, np.uint8)

    def holds(self, version_digest: int) -> bool:
        """Check whether some or all of the version with this digest lies here."""
        return any(lying == version_digest for lying, _ in self._buffers.values())

    def piece(self, version_digest: int, at: int, size: int) -> bytes | None:
        """A copy of a piece, which may be written over later; None if it is not here."""
        for k, (lying, pieces) in self._buffers.items():
            if lying == version_digest and self._segment is not None and pieces.has(at, size):
                return self._segment.data[k][at : at + size].tobytes()
        return None

    def done(self) -> None:
        """Make the version, all of whose bytes are written, the newest."""
        assert self._segment is not None
        self._segment.complete(self._k, *self._head)
        self._segment.unlock(self._k)
        self._k = -1

    def abandon(self) -> None:
        """Unlock the buffer. A version that is not done stays marked as half written, and is written over."""
        if self._segment is not None and self._k >= 0:
            self._segment.unlock(self._k)
            self._buffers.pop(self._k, None)
        self._k = -1

    def close(self) -> None:
        self.abandon()
        self._buffers.clear()
        if self._segment is not None:
            self._segment.close()
            self._segment = None

    def _for(self, manifest: Manifest) -> Segment:
        """The segment for this layout: the present one, or a new one under its name."""
        present = self._segment
        if present is not None and is_named(self.path, present.inode) and present.manifest == manifest:
            present.words[shm.W_PID] = os.getpid()
            return present
        self.close()
        self._segment = create_segment(self.path, manifest)
        self._segment.prefault()
        return self._segment
