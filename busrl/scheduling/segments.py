"""How a long answer is cut into segments: the tokens of the next one, and a length that follows the answers seen.

Talks to nothing; rollout roles, the gateway and a simulator ask it. Knows nothing of slots, engines or losses.

- Every answer can reach its limit: the tokens that are left are shared out over the segments that are left, and a
  segment is never shorter than that share.
- `AutoLength` moves within [least, limit], only when it has seen enough answers, and only by a clear factor.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

AUTO = "auto"
SHARE = 0.8  # of the answers shall end within their first segment (UloRL; algorithms B and D4)
SYNC_SHARE = 0.05  # of a segment's time may be spent on taking over weights
SEEN, ENOUGH = 512, 64  # answers remembered, and needed before anything is chosen
FACTOR = 1.25  # a new length must differ by so much


class AutoLength:
    """Chooses a segment's length in tokens from finished answers and measured costs.

    The aim is the SHARE quantile of the lengths, so that most answers end in one segment; raised to what makes a
    weight update cost at most SYNC_SHARE of a segment's time. Starts at the limit: nothing is cut before it is known.
    """

    def __init__(self, least: int, limit: int) -> None:
        self.least, self.limit = max(1, least), max(1, limit)
        self.length = self.limit
        self._seen: deque[int] = deque(maxlen=SEEN)
        self._by_cost = 1

    def finished(self, lengths: Iterable[int]) -> None:
        """Whole answers that ended, in tokens."""
        self._seen.extend(lengths)

    def costs(self, sync_s: float, token_s: float) -> None:
        """Seconds that a weight update takes, and seconds per token of one answer; only numbers above 0 count."""
        if math.isfinite(sync_s) and math.isfinite(token_s) and sync_s > 0 and token_s > 0:
            self._by_cost = math.ceil(sync_s / (SYNC_SHARE * token_s))

    def choose(self) -> int | None:
        """The new length if it changed now, else None."""
        if len(self._seen) < ENOUGH:
            return None
        aim = max(int(np.ceil(np.quantile(self._seen, SHARE))), self._by_cost)
        aim = min(max(aim, self.least), self.limit)
        at_an_end = aim in (self.least, self.limit) and aim != self.length
        if not at_an_end and max(aim, self.length) < FACTOR * min(aim, self.length):
            return None
        self.length = aim
        return aim


@dataclass(frozen=True)
class Cut:
    """What a segment may have: `tokens`, and whether the answer has to end with it."""

    tokens: int
    last: bool


class SegmentPlan:
    """The segments of a run: `length` tokens (0 = off, "auto"), at most `most` of them, answers of `limit` tokens."""

    def __init__(self, length: int | str, most: int, limit: int) -> None:
        self.on = length != 0
        self.most = most if self.on else 1
        self.auto = AutoLength(-(-limit // self.most), limit) if length == AUTO else None
        self._length = limit if not isinstance(length, int) or not length else length

    @property
    def length(self) -> int:
        return self.auto.length if self.auto else self._length

    def next(self, segment: int, left: int) -> Cut:
        """Segment number `segment` (from 0) of an answer that may still have `left` tokens."""
        after = self.most - segment - 1
        if not self.on or after <= 0:
            return Cut(left, True)
        tokens = min(left, max(self.length, -(-left // (after + 1))))
        return Cut(tokens, tokens == left)
