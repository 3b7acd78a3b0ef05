"""What the host knows of every running sequence: plain arrays, one line ("seat") per sequence.

Used by the torch engine. A seat stays with its sequence until it ends, while the cache row of the sequence may change
when rows are closed up; `rows` maps one to the other. Knows nothing of models; imports no torch.

- Random numbers are drawn when a sequence sits down, one per token that it may produce, from its own stream.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from busrl.inference.base import EOS, LENGTH, Finished, Request
from busrl.inference.randomness import Streams

Index = npt.NDArray[np.intp]


class Seats:
    """State of up to `capacity` sequences of up to `max_length` tokens."""

    def __init__(self, capacity: int, max_length: int, eos: npt.NDArray[np.bool_]) -> None:
        self.max_length = max_length
        self.rows: Index = np.arange(capacity)  # the seat of each cache row; the first `active` are in use
        self.active = 0
        self.key = np.zeros(capacity, np.int64)
        self.last = np.zeros(capacity, np.int64)  # the token that enters the next step
        self.position = np.zeros(capacity, np.int64)  # where it goes
        self.produced = np.zeros(capacity, np.int64)
        self.limit = np.zeros(capacity, np.int64)
        self.temperature = np.zeros(capacity, np.float32)
        self.top_p = np.zeros(capacity, np.float64)
        self._eos = eos
        self._streams = Streams()
        # Untouched pages cost nothing, so the longest case may be allowed for.
        self._uniforms = np.empty((capacity, max_length), np.float64)
        self._tokens = np.empty((capacity, max_length), np.int32)
        self._logprobs = np.empty((capacity, max_length), np.float32)
        self._versions = np.empty((capacity, max_length), np.uint32)

    def room_for(self, request: Request) -> int:
        """How many tokens the request may produce before a limit cuts it."""
        return min(request.max_new_tokens, self.max_length - len(request.prompt_ids) - len(request.prefix_ids))

    def sit(self, row: int, request: Request) -> None:
        """Place a request whose cache row is `row`; the cache holds, or soon will, all of its tokens but the last."""
        seat = self.rows[row]
        known = len(request.prompt_ids) + len(request.prefix_ids)
        limit = self.room_for(request)
        self.key[seat] = request.key
        self.last[seat] = (request.prefix_ids if len(request.prefix_ids) else request.prompt_ids)[-1]
        self.position[seat] = known - 1
        self.produced[seat] = 0
        self.limit[seat] = limit
        self.temperature[seat] = request.temperature
        self.top_p[seat] = request.top_p
        if request.temperature > 0:
            self._uniforms[seat, :limit] = self._streams.uniforms(request.seed, request.uid, request.segment, limit)
        else:
            self._uniforms[seat, :limit] = 0.5

    def close_up(self, holes: list[int]) -> tuple[list[int], list[int]]:
        """Make the rows in use the first ones again: which rows move where. `holes` are free rows, sorted."""
        sources: list[int] = []
        targets: list[int] = []
        free = set(holes)
        remaining = self.active - len(holes)
        tail = iter(row for row in range(remaining, self.active) if row not in free)
        for hole in holes:
            if hole >= remaining:
                break
            source = next(tail)
            sources.append(source)
            targets.append(hole)
            self.rows[hole], self.rows[source] = self.rows[source], self.rows[hole]
        self.active = remaining
        return sources, targets

    def uniforms(self, seats: Index) -> npt.NDArray[np.float64]:
        """The next random number of each, [seats, 1]."""
        return self._uniforms[seats, self.produced[seats]][:, None]

    def record(
        self, seats: Index, tokens: npt.NDArray[np.int64], logprobs: npt.NDArray[np.float32], version: int
    ) -> npt.NDArray[np.bool_]:
        """Write down one token for each; True where the sequence has ended."""
        produced = self.produced[seats]
        self._tokens[seats, produced] = tokens
        self._logprobs[seats, produced] = logprobs
        self._versions[seats, produced] = version
        self.produced[seats] = produced + 1
        self.position[seats] += 1
        self.last[seats] = tokens
        ended: npt.NDArray[np.bool_] = self._eos[tokens] | (produced + 1 >= self.limit[seats]) | np.isnan(logprobs)
        return ended

    def result(self, seat: int) -> Finished:
        """The finished sequence of a seat, as copies."""
        count = int(self.produced[seat])
        tokens = self._tokens[seat, :count].copy()
        return Finished(
            key=int(self.key[seat]),
            token_ids=tokens,
            logprobs=self._logprobs[seat, :count].copy(),
            versions=self._versions[seat, :count].copy(),
            finish=EOS if count and self._eos[tokens[-1]] else LENGTH,
        )
