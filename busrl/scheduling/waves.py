"""Synchronous rounds in segments: in each wave every unfinished answer gets one segment, all under one version (UloRL).

Pure: is given a copy of the ring's lines and the header word `next_admission`. Round r is made of the admission indices
[r x n_min, (r + 1) x n_min), and wave w runs when w rounds are admitted whole. So a slot of round r may have w - r
segments: what is claimable, and when a wave is over, follows from ring and header alone, and needs no memory.

- A wave is over when nothing is being made or judged and nothing may be claimed any more.
- A sample of round r has all of its segments after wave r + max_segments, so at most max_segments rounds are in flight.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from busrl.scheduling.groups import CLS_TRAIN, QUEUED, REWARDED, Bools

Lines = npt.NDArray[Any]
RESERVED = 1


class Waves:
    """The rules for rounds of `n_min` groups."""

    def __init__(self, n_min: int) -> None:
        self.n_min = n_min

    def claimable(self, lines: Lines, next_admission: int) -> Bools:
        """QUEUED slots that may have a segment in this wave; those of other classes always."""
        allowed = next_admission // self.n_min - lines["admission"].astype(np.int64) // self.n_min
        found: Bools = (lines["state"] == QUEUED) & (
            (lines["cls"] != CLS_TRAIN) | (lines["segs"].astype(np.int64) < allowed)
        )
        return found

    def over(self, lines: Lines, next_admission: int) -> bool:
        """Whether every training slot has what this wave gives it, and is judged if it is whole."""
        if next_admission % self.n_min:
            return False
        state = lines["state"]
        train = (lines["cls"] == CLS_TRAIN) | (state == RESERVED)  # one that is being filled may show its last tenant
        busy = (state >= RESERVED) & (state < REWARDED) & (state != QUEUED)
        busy |= (state == QUEUED) & (lines["admission"] >= next_admission)  # dispatched, its group not yet counted
        return not bool((train & (busy | self.claimable(lines, next_admission))).any())

    def best(self, lines: Lines, next_admission: int, limit: int, most_attempts: int) -> list[int]:
        """Slots to claim, as the ring itself orders them: unfinished first, then priority, then the older."""
        at = np.flatnonzero(self.claimable(lines, next_admission) & (lines["attempt"] <= most_attempts))
        own = {name: lines[name][at] for name in ("segs", "priority", "admission", "uid")}
        order = np.lexsort((own["uid"], own["admission"], -own["priority"].astype(np.int64), own["segs"] == 0))
        return [int(slot) for slot in at[order[:limit]]]
