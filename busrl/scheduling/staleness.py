"""Age of a group in learner steps, and what is done with one that is too old.

Talks to nothing. Age = the learner's finished steps - the step of the oldest version that any trained token of the
group was generated with; a version that is published again after a restart keeps its step, so it ages nothing.

- wait: no step fires that would leave an unfinished group above the bound; the group is waited for and trained.
- drop: a group above the bound is set aside whole, however it looks.
- bound None (fully-async): every age is in order.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import numpy as np

from busrl.scheduling.groups import NOT_STARTED, Bools, Ints


class Verdict(Enum):
    """What follows from an age: OK -> train; WAIT -> train before anything new is admitted; DROP -> set aside."""

    OK = "ok"
    WAIT = "wait"
    DROP = "drop"


@dataclass(frozen=True)
class Staleness:
    """The bound S in steps, and what happens above it."""

    bound: int | None
    over_age: str = "wait"

    def __post_init__(self) -> None:
        if self.over_age not in ("wait", "drop"):
            raise ValueError(f"over_age = {self.over_age!r}: must be wait or drop")

    def verdict(self, group_age: int) -> Verdict:
        """What to do with a resolved group of this age."""
        if self.bound is None or group_age <= self.bound:
            return Verdict.OK
        return Verdict.WAIT if self.over_age == "wait" else Verdict.DROP

    def too_old(self, oldest_step: Ints, step: int) -> Bools:
        """Groups above the bound now."""
        bound = np.inf if self.bound is None else self.bound
        above: Bools = ages(oldest_step, step) > bound
        return above

    def would_outlive(self, oldest_step: Ints, step: int) -> Bools:
        """Groups that would be above the bound if a step were made without them."""
        late: Bools = (oldest_step != NOT_STARTED) & self.too_old(oldest_step, step + 1)
        return late


def age(oldest_step: int, step: int) -> int:
    """Steps between the oldest version of a group and now; 0 for a group that has not begun."""
    return 0 if oldest_step == NOT_STARTED else max(0, step - oldest_step)


def ages(oldest_step: Ints, step: int) -> Ints:
    """`age` of many groups."""
    return np.where(oldest_step == NOT_STARTED, 0, np.maximum(0, step - oldest_step))
