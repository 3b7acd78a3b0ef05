"""What came of each request to a server so far: tokens, log-probabilities, versions.

Used by the served engine, which writes down what it hears. Knows nothing of HTTP, servers or gates.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from busrl.inference.base import LENGTH, Event, Finished, Request


@dataclass
class Book:
    """What came of one request."""

    request: Request
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    told: int = 0  # tokens that events have told of

    def arrays(self, begin: int = 0) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float32], npt.NDArray[np.uint32]]:
        logprobs = np.asarray(self.logprobs[begin:], np.float32)
        if self.request.temperature <= 0:
            logprobs[:] = 0.0  # a distribution with one point, as in the other engines
        return np.asarray(self.ids[begin:], np.int32), logprobs, np.asarray(self.versions[begin:], np.uint32)

    def event(self, finish: int | None = None) -> Event:
        """What came since the last event."""
        ids, logprobs, versions = self.arrays(self.told)
        self.told = len(self.ids)
        return Event(self.request.key, ids, logprobs, versions, finish)

    def ended(self, finish: int, refused: str = "") -> Finished:
        """All of it, as the sequence that it is in the end."""
        ids, logprobs, versions = self.arrays()
        return Finished(self.request.key, ids, logprobs, versions, finish, refused=refused)


def seed_of(request: Request) -> int:
    """The server's seed: a function of (seed, uid, segment)."""
    text = f"{request.seed} {request.uid} {request.segment}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1


def nothing(request: Request) -> Finished:
    """The end of a request that has no room for a token."""
    empty = np.empty(0, np.int32)
    return Finished(request.key, empty, empty.astype(np.float32), empty.astype(np.uint32), LENGTH)
