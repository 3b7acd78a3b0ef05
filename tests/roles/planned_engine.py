"""An engine whose answers a test plans token by token; the interface is that of a real one.

- What a request produces depends on its prompt, uid and segment alone; versions are those taken between the steps.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from busrl.engines.base import Finished, Request
from busrl.states import Finish

if TYPE_CHECKING:
    from busrl.weights.base import Receiver

EOS_ID = 0
Script = Callable[[Request], Sequence[int]]


class PlannedEngine:
    """Produces `script(request)` token by token; by default the prompt's own letters, 1 to 2 times its length."""

    def __init__(self, capacity: int = 8, max_length: int = 256, script: Script | None = None) -> None:
        self._capacity = capacity
        self._max_length = max_length
        self._script = script or echo
        self._running: dict[int, _Running] = {}
        self._version = 0
        self.steps = 0

    @property
    def capacity(self) -> int:
        return self._capacity

    @property
    def active(self) -> int:
        return len(self._running)

    @property
    def decoding(self) -> int:
        return self.active

    @property
    def max_length(self) -> int:
        return self._max_length

    def submit(self, requests: Sequence[Request]) -> None:
        if self.active + len(requests) > self._capacity:
            raise ValueError(f"{len(requests)} requests, but {self._capacity - self.active} rows are free")
        for request in requests:
            room = self._max_length - len(request.prompt_ids) - len(request.prefix_ids)
            self._running[request.key] = _Running(request, self._script(request), min(request.max_new_tokens, room))

    def step(self) -> list[Finished]:
        self.steps += 1
        finished = [done for running in self._running.values() if (done := running.advance(self._version)) is not None]
        for done in finished:
            del self._running[done.key]
        return finished

    def update_weights(self, receiver: Receiver) -> tuple[int, int]:
        self._version, step = receiver.fetch({})
        return self._version, step

    def encode(self, text: str) -> list[int]:
        return [ord(letter) for letter in text]

    def decode(self, ids: Sequence[int] | npt.NDArray[np.int32], ended: bool = True) -> str:
        listed = [int(i) for i in ids]
        if ended and listed and listed[-1] == EOS_ID:
            listed.pop()
        return "".join(chr(i) for i in listed)


class _Running:
    """One request and how far it is."""

    def __init__(self, request: Request, planned: Sequence[int], limit: int) -> None:
        self.request = request
        self.planned = list(planned)
        self.limit = limit
        self.versions: list[int] = []

    def advance(self, version: int) -> Finished | None:
        """One more token; the finished sequence if it was the last."""
        if len(self.versions) < self.limit:
            self.versions.append(version)
        count = len(self.versions)
        ended = count == len(self.planned)
        if not ended and count < self.limit:
            return None
        tokens = np.asarray(self.planned[:count], np.int32)
        finish = Finish.EOS if ended and tokens[-1] == EOS_ID else Finish.LENGTH
        return Finished(self.request.key, tokens, logprobs_of(tokens), np.asarray(self.versions, np.uint32), finish)


def echo(request: Request) -> list[int]:
    """The prompt's letters over and over; the length hangs on uid and segment, the end-of-sequence token is last."""
    letters = [int(i) for i in request.prompt_ids]
    draw = zlib.crc32(f"{request.uid} {request.segment}".encode())
    length = len(letters) + draw % (len(letters) + 1)
    return [letters[i % len(letters)] for i in range(length)] + [EOS_ID]


def logprobs_of(tokens: npt.NDArray[np.int32]) -> npt.NDArray[np.float32]:
    """Made-up log-probabilities that a test can compute again from the ids."""
    return (-0.5 - (tokens % 7) / 8.0).astype(np.float32)
