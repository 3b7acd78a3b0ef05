"""Which leading tokens of a sample are older than max_staleness: they are context in this step, not trained.

Used by the training step. Pure bookkeeping over versions and steps; knows nothing of slots or of losses.

- A group that is over age is trained under `over_age = "wait"`; no token of it that is more than max_staleness steps
  old is. It counts in no denominator; the reward, and so the advantage, is of the whole answer.
- Everything up to the last token that is too old is left out, so what remains is one piece at the end.
- The step of a version is known from the records of the log alone, so a replay leaves out the same tokens.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

import numpy as np

from busrl.ledger.wal import SampleRecord

KEPT = 256  # versions whose step is remembered; older ones count as at most as old as the oldest of these


class OldTokens:
    """`bound` None: nothing is ever too old. `at` before the samples of a step, then `leading` for each."""

    def __init__(self, bound: int | None) -> None:
        self.bound = bound
        self.now = 0  # finished steps
        self.masked = 0  # tokens left out since `taken`
        self._versions: list[int] = []
        self._steps: list[int] = []

    def at(self, version: int, step: int) -> None:
        """`version` is the newest one published, `step` steps are finished."""
        self.now = step
        if not self._versions or version > self._versions[-1]:
            self._versions, self._steps = [*self._versions, version][-KEPT:], [*self._steps, step][-KEPT:]

    def step_of(self, version: int) -> int:
        """The step that made a version. Versions without a record of their own were published in a row at one step."""
        i = bisect_left(self._versions, version)
        return self._steps[i] if i < len(self._steps) else self.now

    def leading(self, record: SampleRecord) -> int:
        """How many tokens at the start of the answer are not to be trained."""
        if self.bound is None or self.now - record.step <= self.bound:
            return 0
        versions = np.frombuffer(record.versions, "<u4")
        old = [v for v in np.unique(versions).tolist() if self.now - self.step_of(v) > self.bound]
        late = np.flatnonzero(np.isin(versions, old))
        count = int(late[-1]) + 1 if len(late) else 0
        self.masked += count
        return count

    def taken(self) -> int:
        """Tokens that were left out since the last call."""
        masked, self.masked = self.masked, 0
        return masked

    def state(self) -> list[list[int]]:
        return [list(pair) for pair in zip(self._versions, self._steps, strict=True)]

    def load(self, state: Sequence[Sequence[int]]) -> None:
        self._versions, self._steps = [int(v) for v, _ in state], [int(s) for _, s in state]
