"""Answers that were finished since the last look: from the ring's lines, each once.

Talks to nothing: it is given lines. A slot that came free still shows its last sample until it is used again, so an
answer that was judged and trained between two looks is seen too. Knows nothing of groups' fates or predictors.

- Each finished training answer is given once, unless its slot was used twice between two looks.
- A new scheduler is given those that the ring shows at its start once more.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from busrl.scheduling.groups import CLS_TRAIN, FREE, GENERATED, TRAINING, VALIDATE_BIT, Ints, Lines

NOBODY = (1 << 64) - 1


class Answers(NamedTuple):
    """Uids and lengths in tokens of finished answers."""

    uids: Ints
    tokens: Ints


class FinishedAnswers:
    """Remembers per slot which sample it has given."""

    def __init__(self) -> None:
        self._given = np.empty(0, np.uint64)

    def look(self, lines: Lines) -> Answers:
        """What is new in a copy of the ring's lines."""
        uids, state = lines["uid"], lines["state"]
        if len(self._given) != len(lines):
            self._given = np.full(len(lines), NOBODY, np.uint64)
        ended = ((state >= GENERATED) & (state <= TRAINING)) | (state == FREE)
        fresh = np.flatnonzero(ended & (uids != self._given) & (uids < VALIDATE_BIT))
        # Field by field, and only of what is new: most slots are not.
        fresh = fresh[(lines["finish"][fresh] > 0) & (lines["cls"][fresh] == CLS_TRAIN)]
        self._given[fresh] = uids[fresh]
        return Answers(uids[fresh].astype(np.int64), lines["response_tokens"][fresh].astype(np.int64))
