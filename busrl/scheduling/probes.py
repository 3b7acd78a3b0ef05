"""Probes: one sample of a group first, its siblings when it ended, so that they go in the order that it taught.

Talks to nothing: it is given a view of the groups. Knows nothing of lengths, policies or slots.

- Whether a group waits for its probe follows from the view alone, so a new scheduler goes on where the old one died.
- A group waits only while its probe is being generated. The probe itself waits for nothing but a row, and siblings
  count as members due in the group credit, so nothing can dead-lock.
- A probe that ended by accident ends the wait too; so do `bound` groups admitted since, as from then on the learner's
  window may be waiting for this group.
- Rows are never left empty for it: while workers could run more than is QUEUED, waiting groups are released, the one
  admitted first before others.
"""

from __future__ import annotations

import numpy as np

from busrl.scheduling.groups import UNKNOWN, Bools, GroupView


class Probes:
    """`bound`: groups admitted after a group until its siblings wait no longer (the learner's W); 0 = no probes."""

    def __init__(self, bound: int) -> None:
        if bound < 0:
            raise ValueError(f"bound = {bound}: must be >= 0")
        self.bound = bound

    @property
    def on(self) -> bool:
        return self.bound > 0

    def held(self, view: GroupView, next_admission: int) -> Bools:
        """Groups whose siblings wait."""
        if not self.on:
            return np.zeros(len(view), np.bool_)
        found: Bools = view.probing & (view.admission != UNKNOWN) & (next_admission - view.admission < self.bound)
        return found

    def released(self, view: GroupView, held: Bools, idle: int) -> Bools:
        """Those of the `held` groups that go now because `idle` rows have nothing to run."""
        order = np.flatnonzero(held)
        order = order[np.argsort(view.admission[order], kind="stable")]
        before = np.concatenate(([0], np.cumsum(view.due[order])))[:-1]  # members released before each
        found = np.zeros(len(view), np.bool_)
        found[order[before < idle]] = True
        return found
