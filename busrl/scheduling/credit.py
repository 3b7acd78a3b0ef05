"""How many new groups may be opened now, and which rule says no.

Talks to nothing: it is given a view of the groups, the free slots and a few header words. Knows nothing of prompts,
policies or workers.

- Group credit: a group is opened only when the free slots of its class cover the members still due of all open groups
  and one whole group more; a member of an open group may always be dispatched. Without it the ring fills up with groups
  that can never be completed.
- In flight = unfinished groups + groups trained but not yet published; at most B of them. A learner counts its groups
  as unpublished *before* it frees their slots, so they are never missing from both counts.
- sync: round r is made of the admission indices [r x n_min, (r + 1) x n_min). It begins when nothing is in flight and
  is never refilled.
- sync in segments: a round begins when the wave before it is over and what it completed is trained and published.
  Nobody may claim any of it before all of it is admitted (`scheduling.waves`), so nothing holds a part of it back.
- With max_staleness = 0 nothing is admitted while trained groups wait for their publication: it would be one step old.
- Nothing here is remembered from one call to the next but a tightened bound, which only ever lowers B.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from busrl.scheduling.groups import NOT_STARTED, GroupView
from busrl.scheduling.limits import Limits


@dataclass(frozen=True)
class Room:
    """Groups that may be opened now. With none, `reason` names the rule and `group` the draw that all wait for.

    `whole`: engines can take none of them before all are opened, so to wait for engines would be to wait for ever.
    """

    groups: int
    reason: str = ""  # slots | in_flight | round | staleness | ahead
    group: int | None = None
    whole: bool = False


def kept_back(reserve: int, in_use: int) -> int:
    """Free slots that belong to another class: its reserve less what it already holds."""
    return max(0, reserve - in_use)


def not_ahead(room: Room, ahead: int, waiting: int, group_size: int) -> Room:
    """Fewer groups where `waiting` samples wait for an engine already and `ahead` of them are enough (0: never enough).

    What was dispatched can not be reordered any more. A group that is opened when an engine is nearly free is chosen
    among more, and is younger when it is trained.
    """
    if not ahead or room.groups <= 0 or room.whole:
        return room
    groups = min(room.groups, -(-(ahead - waiting) // group_size))
    return Room(groups) if groups > 0 else Room(0, "ahead")


class Admission:
    """Admits groups under the limits: the same arguments give the same answer after any restart."""

    def __init__(self, limits: Limits, over_age: str = "wait") -> None:
        if over_age not in ("wait", "drop"):
            raise ValueError(f"over_age = {over_age!r}: must be wait or drop")
        self.limits, self.over_age = limits, over_age
        self._admitted = limits.B

    def tighten(self, eta: int | None) -> None:
        """Admit as for a bound of `eta` steps (None: as for max_staleness). What is out of range counts as its end."""
        limits = self.limits
        if eta is None or limits.sync or limits.max_staleness is None:
            self._admitted = limits.B
        else:
            self._admitted = limits.at(min(max(eta, limits.least_eta), limits.max_staleness)).B

    def room(
        self, view: GroupView, *, unpublished: int, next_admission: int, step: int, free: int, reserve: int = 0,
        wave_over: bool = False,
    ) -> Room:  # fmt: skip
        """Groups that may be opened now.

        `free`: FREE slots; `reserve`: those of them kept for other classes (`kept_back`); `next_admission`: the index
        that the next group gets; `step`: the learner's finished steps; `unpublished`: groups trained, not published;
        `wave_over`: see `scheduling.waves`.
        """
        due = int(view.due.sum())
        blocker = view.oldest_unresolved()
        old = self._too_old(view, step)
        if old is not None:
            return Room(0, "staleness", old)
        if self.limits.max_staleness == 0 and unpublished and not self.limits.sync:
            return Room(0, "in_flight", blocker)  # the step under way would make it too old before it is trained
        settled = wave_over and not unpublished and not due and not bool(view.resolved.any())
        groups, reason = self._by_count(len(view) + unpublished, next_admission, settled)
        if groups <= 0:
            return Room(0, reason, blocker)
        by_slots = (free - reserve - due) // self.limits.group_size
        if by_slots <= 0:
            return Room(0, "slots", blocker)
        return Room(min(groups, by_slots), whole=self.limits.waves > 0)

    def _by_count(self, in_flight: int, next_admission: int, settled: bool) -> tuple[int, str]:
        if not self.limits.sync:
            return self._admitted - in_flight, "in_flight"
        position = next_admission % self.limits.n_min
        may_begin = settled and in_flight + self.limits.n_min <= self.limits.B if self.limits.waves else not in_flight
        if position == 0 and not may_begin:
            return 0, "round"
        return self.limits.n_min - position, "round"

    def _too_old(self, view: GroupView, step: int) -> int | None:
        """Under `wait`: a group that is already above max_staleness; nothing is admitted until it is trained."""
        bound = self.limits.max_staleness
        if bound is None or self.over_age != "wait" or not len(view):
            return None
        oldest = int(np.argmin(view.oldest_step))
        began = int(view.oldest_step[oldest])
        return int(view.draws[oldest]) if began != NOT_STARTED and step - began > bound else None
