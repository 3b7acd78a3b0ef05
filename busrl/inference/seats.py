"""What the host knows of every sequence: plain arrays, one line ("seat") per sequence.

Used by the torch engine. A sequence has its seat from the moment it is submitted until it ends; a cache row only while
its keys and values are there. `rows` maps one to the other. Knows nothing of models; imports no torch.

- Random numbers are drawn when a sequence sits down, one per token that it may produce, from its own stream.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from busrl.inference.base import ABORTED, EOS, LENGTH, Event, Finished, Request
from busrl.inference.randomness import Streams

Index = npt.NDArray[np.intp]
Ids = npt.NDArray[np.int32]
NO_IDS: Ids = np.empty(0, np.int32)


class Seats:
    """State of up to `capacity` sequences of up to `max_length` tokens."""

    def __init__(self, capacity: int, max_length: int, eos: npt.NDArray[np.bool_]) -> None:
        self.max_length = max_length
        self.rows: Index = np.zeros(capacity, np.intp)  # the seat of each cache row; the first `active` are in use
        self.active = 0
        self.free = list(range(capacity - 1, -1, -1))
        self.key = np.zeros(capacity, np.int64)
        self.last = np.zeros(capacity, np.int64)  # the token that enters the next step
        self.position = np.zeros(capacity, np.int64)  # where it goes: so many tokens are in the cache before it
        self.produced = np.zeros(capacity, np.int64)
        self.limit = np.zeros(capacity, np.int64)
        self.temperature = np.zeros(capacity, np.float32)
        self.top_p = np.zeros(capacity, np.float64)
        self._given: list[Ids] = [NO_IDS] * capacity  # prompt and prefix
        self._told: dict[int, int] = {}  # tokens that events have told of, by the seat of a streaming request
        self._events: list[Event] = []
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

    def sit(self, request: Request) -> int:
        """Give a request a seat; it has no cache row yet."""
        seat = self.free.pop()
        given = request.prompt_ids
        if len(request.prefix_ids):
            given = np.concatenate((request.prompt_ids, request.prefix_ids))
        limit = self.room_for(request)
        self._given[seat] = given
        self.key[seat] = request.key
        self.last[seat] = given[-1]
        self.position[seat] = len(given) - 1
        self.produced[seat] = 0
        self.limit[seat] = limit
        self.temperature[seat] = request.temperature
        self.top_p[seat] = request.top_p
        if request.temperature > 0:
            self._uniforms[seat, :limit] = self._streams.uniforms(request.seed, request.uid, request.segment, limit)
        else:
            self._uniforms[seat, :limit] = 0.5
        if request.stream:
            self._told[seat] = 0
        return seat

    def cached(self, seat: int) -> Ids:
        """The tokens whose keys and values its cache row has to hold: all that are known but the last."""
        given, produced = self._given[seat], int(self.produced[seat])
        if not produced:
            return given[:-1]
        return np.concatenate((given, self._tokens[seat, : produced - 1])).astype(np.int32, copy=False)

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
            self.rows[hole] = self.rows[source]
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

    def leave(self, seat: int, aborted: bool = False) -> Finished:
        """Free the seat; what its sequence produced, as copies."""
        count = int(self.produced[seat])
        tokens = self._tokens[seat, :count].copy()
        finish = ABORTED if aborted else EOS if self._eos[tokens[-1]] else LENGTH
        if seat in self._told:
            self._events.append(self._event(seat, finish))
            del self._told[seat]
        self.free.append(seat)
        return Finished(
            key=int(self.key[seat]),
            token_ids=tokens,
            logprobs=self._logprobs[seat, :count].copy(),
            versions=self._versions[seat, :count].copy(),
            finish=finish,
        )

    def events(self) -> list[Event]:
        """What streaming requests produced since the last call."""
        told, self._events = self._events, []
        return told + [self._event(seat) for seat, count in self._told.items() if count < self.produced[seat]]

    def _event(self, seat: int, finish: int | None = None) -> Event:
        begin, end = self._told[seat], int(self.produced[seat])
        self._told[seat] = end
        tokens, logprobs, versions = (
            array[seat, begin:end].copy() for array in (self._tokens, self._logprobs, self._versions)
        )
        return Event(int(self.key[seat]), tokens, logprobs, versions, finish)
