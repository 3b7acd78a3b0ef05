"""Priority numbers of slots: in which order workers take what is QUEUED, larger first.

Talks to nothing. The ring serves unfinished segments first, then the larger priority, then the older admission index.
Knows nothing of how a length was estimated.

- Blocks of `window` admission indices are served one after the other; only inside a block does length decide. So a
  group is overtaken only by groups that lie in the learner's window while it holds that window: overtaking never makes
  a finished group wait for the anchor. In `sync` a block is a round.
- Probes go before everything else of training: few rows, and they tell the order of the rest.
- All numbers are <= 0, so that a class with positive priorities (validation) goes before training.
"""

from __future__ import annotations

import math

from busrl.scheduling.groups import slot_priority

LEVELS_PER_OCTAVE = 16
TOP = 255  # levels of a length: 1 to 65,536 tokens
BLOCKS = 1 << 22  # block numbers wrap here; far apart ones are never in the ring together


class SlotOrder:
    """`window`: the learner's W. `direction`: 1 shortest first, -1 longest first, 0 as admitted."""

    def __init__(self, window: int, direction: int) -> None:
        if window < 1 or direction not in (-1, 0, 1):
            raise ValueError(f"window = {window}, direction = {direction}: must be >= 1 and one of -1, 0, 1")
        self.window, self.direction = window, direction

    def probe(self) -> int:
        """Of a probe sample."""
        return 0

    def sample(self, admission: int, estimate: float) -> int:
        """Of a member of the group with this admission index and this estimated length in tokens."""
        if self.direction == 0 or self.window == 1:
            return slot_priority(admission)
        rank = level(estimate) if self.direction > 0 else TOP - level(estimate)
        return -1 - (admission // self.window % BLOCKS * (TOP + 1) + rank)


def level(tokens: float) -> int:
    """A length on a scale of 256 steps, 16 to each doubling."""
    return min(TOP, int(LEVELS_PER_OCTAVE * math.log2(max(1.0, tokens))))
