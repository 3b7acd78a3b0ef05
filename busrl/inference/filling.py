"""Who gets keys and values next: sequences wait here for their cache row, a bounded number of tokens per step.

Used by the torch engine between two decoding steps. Talks to the seats (what is known of a sequence) and to a decoder
(which computes keys and values). Knows nothing of sampling, versions or time.

- First come, first served. All that fit into the budget join at the next step; equal prompts are computed once.
- A prompt over the budget is computed in pieces, one per step, outside of the rows: who runs goes on meanwhile.
- Sequences whose cache is stale stand up and wait again, in front, with all of their tokens.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence

import numpy as np
import torch

from busrl.inference.cache import Staging
from busrl.inference.decoder import Decoder
from busrl.inference.seats import Ids, Seats

PADDING = 256  # tokens of padding that are not worth a forward of their own


class _Piecewise:
    """A prompt that is computed in pieces, and the seats that it is for."""

    def __init__(self, ids: Ids, seats: list[int]) -> None:
        self.ids, self.seats = ids, seats
        self.staging = Staging(len(ids))

    @property
    def left(self) -> int:
        return len(self.ids) - self.staging.done


class Filling:
    """`budget`: tokens of one step, padding left out."""

    def __init__(self, seats: Seats, decoder: Decoder, budget: int, device: torch.device) -> None:
        self._seats, self._decoder, self._budget, self._device = seats, decoder, budget, device
        self._queue: deque[int] = deque()
        self._long: _Piecewise | None = None
        self.computed = 0  # tokens

    def __len__(self) -> int:
        return len(self._queue) + (len(self._long.seats) if self._long else 0)

    @property
    def joining(self) -> int:
        """How many sequences have their cache after the next `fill`."""
        if not self._queue and self._long is None:
            return 0
        return len(self._next()[0])

    def wait(self, seat: int) -> None:
        self._queue.append(seat)

    def wait_again(self, seats: Iterable[int]) -> None:
        """Sequences that lost their cache, shortest first, in front of all others; a long prompt begins again."""
        if self._long is not None:
            self._queue.extendleft(reversed(self._long.seats))
            self._long = None
        self._queue.extendleft(sorted(seats, key=lambda seat: -int(self._seats.position[seat])))

    def seats(self) -> list[int]:
        """Everybody who waits."""
        return [*(self._long.seats if self._long else ()), *self._queue]

    def forget(self, seat: int) -> None:
        if seat in self._queue:
            self._queue.remove(seat)
        elif self._long is not None and seat in self._long.seats:
            self._long.seats.remove(seat)
            if not self._long.seats:
                self._long = None

    def fill(self, take_row: Callable[[int], int]) -> int:
        """Compute what the budget allows; `take_row(seat)` gives a row to each that is complete. How many those are."""
        if self._long is None and not self._queue:
            return 0
        joined, rows_of = self._next()
        if self._long is not None:
            self._piece(self._long, take_row)
            return len(joined)
        for _ in joined:
            self._queue.popleft()
        if not joined:
            self._begin_long()
            return 0
        rows = [take_row(seat) for seat in joined]
        if b"" in rows_of:
            self._decoder.cache.begin(self._tensor([rows[k] for k in rows_of[b""]]))
        self._batches({ids: [rows[k] for k in members] for ids, members in rows_of.items() if ids})
        return len(joined)

    # -- one step's share -------------------------------------------------------------------------------------------

    def _next(self) -> tuple[list[int], dict[bytes, list[int]]]:
        """The seats that join, and the places in that list which each different prompt (as bytes) is for."""
        if self._long is not None:
            return (self._long.seats if self._long.left <= self._budget else []), {}
        joined: list[int] = []
        rows_of: dict[bytes, list[int]] = {}
        left = self._budget
        for seat in self._queue:
            ids = self._seats.cached(seat).tobytes()
            if ids not in rows_of:
                left -= len(ids) // 4
                if left < 0:
                    break
            rows_of.setdefault(ids, []).append(len(joined))
            joined.append(seat)
        return joined, rows_of

    def _begin_long(self) -> None:
        """The first in the queue alone is over the budget: take it, and all with the same prompt."""
        ids = self._seats.cached(self._queue[0])
        same = [seat for seat in self._queue if np.array_equal(self._seats.cached(seat), ids)]
        self._queue = deque(seat for seat in self._queue if seat not in set(same))
        self._long = _Piecewise(ids, same)
        self._piece(self._long, None)

    def _piece(self, long: _Piecewise, take_row: Callable[[int], int] | None) -> None:
        begin, count = long.staging.done, min(self._budget, long.left)
        ids = torch.from_numpy(long.ids[begin : begin + count].astype(np.int64))[None].to(self._device)
        self._decoder.prefill_piece(ids, long.staging)
        self.computed += count
        if not long.left and take_row is not None:
            self._decoder.cache.adopt(long.staging, self._tensor([take_row(seat) for seat in long.seats]))
            self._long = None

    # -- whole prompts ----------------------------------------------------------------------------------------------

    def _batches(self, rows_of: dict[bytes, list[int]]) -> None:
        """Shortest first; a batch ends where its padding would be more than its tokens."""
        batch: list[bytes] = []
        real = 0
        for ids in sorted(rows_of, key=len):
            length = len(ids) // 4
            padded = (len(batch) + 1) * length - (real + length)
            if batch and padded > (0 if self._decoder.equal_lengths else max(real, PADDING)):
                self._batch(batch, rows_of)
                batch, real = [], 0
            batch.append(ids)
            real += length
        if batch:
            self._batch(batch, rows_of)

    def _batch(self, batch: list[bytes], rows_of: dict[bytes, list[int]]) -> None:
        ids = np.zeros((len(batch), len(batch[-1]) // 4), np.int64)
        rows: list[int] = []
        source: list[int] = []
        for k, known in enumerate(batch):
            ids[k, : len(known) // 4] = np.frombuffer(known, np.int32)
            rows.extend(rows_of[known])
            source.extend([k] * len(rows_of[known]))
            self.computed += len(known) // 4
        copied = self._tensor(source) if len(rows) > len(batch) else None
        self._decoder.prefill(torch.from_numpy(ids).to(self._device), self._tensor(rows), copied)

    def _tensor(self, values: Sequence[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self._device)
