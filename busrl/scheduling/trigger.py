"""The learner's decisions: what to set aside, what to claim, whether to fire, or what it waits for. Pure.

From a view of the groups, what is claimed for the coming step, the step number and a clock value, `LearnerPlan` makes
actions; the learner role carries them out and asks again. Knows nothing of slots' contents, files or tensors.

- A group is claimed at most once: claimed draws come in with every call, and are never among the actions again.
- A step holds at most n_min groups (set-aside ones counted in where the trigger counts every ended group), plus those
  that would be too old after it.
- Under `wait`, and for steps by time, no step leaves an unfinished group above the bound: age <= S at firing.
- Streaming claims groups as they become ready; otherwise everything is claimed at firing, sorted by draw.
- A claim that fails in the ring (a lost CAS) cancels the Fire of the same answer: look again.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import Enum

import numpy as np

from busrl.scheduling.admission import AdmissionLimits, Staleness
from busrl.scheduling.groups import UNKNOWN, Bools, GroupView, Ints
from busrl.states import RULES, Fate

# -- the anchored window -------------------------------------------------------------------------------------

@dataclass(frozen=True)
class Window:
    """Positions in the given arrays: `chosen` in admission order, `inside` all ready ones that could be chosen.

    `anchor` is the group that holds the window (None if all are ready); `waiting` counts ready groups beyond it.
    """

    chosen: Ints
    inside: Ints
    anchor: int | None
    waiting: int


def window_of_ready(admission: Ints, ready: Bools, width: int, limit: int) -> Window:
    """Choose up to `limit` ready groups among those neither claimed nor set aside, oldest first.

    The window is the `width` admission indices from the oldest group that is not ready (the anchor), so that answers
    that finish early are not favoured. A ready group outside waits for the anchor.

    `admission` need not be sorted. Choosing the ready groups before the first one that is not ready moves the window
    past them, so the anchor that counts is that first one.
    """
    order = np.argsort(admission, kind="stable")
    ready_in_order = ready[order]
    if ready_in_order.all():
        return Window(order[: max(0, limit)], order, None, 0)
    first = int(np.argmin(ready_in_order))
    anchor = int(order[first])
    within = admission[order] < admission[anchor] + width
    inside = order[ready_in_order & within]
    return Window(inside[: max(0, limit)], inside, anchor, int(ready.sum()) - len(inside))


# -- the trigger ---------------------------------------------------------------------------------------------

class Cause(str, Enum):
    """The reason why a step fired; the value is the word in the train log."""

    COUNT = "count"
    TIME = "time"
    ROUND = "round"
    DRAIN = "drain"


class Trigger:
    """The trigger of a step: enough groups, enough time, or the end of a round or of the run. `sync` knows rounds only.

    Every cause needs at least one group, `time` at least n_floor; `time` never leaves another group above the staleness
    bound. Only `n_min` and `t_max_s` may change, between two steps.

    With `count_ended` the groups set aside since the last step count against n_min too: a step is then made of n_min
    *drawn* groups, as in a loop that does not refill its batch, and not of n_min groups that carry a signal.
    """

    def __init__(
        self, n_min: int, n_floor: int = 1, t_max_s: float = math.inf, *, sync: bool = False, count_ended: bool = False
    ) -> None:
        self.n_min, self.n_floor, self.t_max_s, self.sync = n_min, n_floor, t_max_s, sync
        self.count_ended = count_ended
        self._since: float | None = None

    def set(self, n_min: int, t_max_s: float) -> None:
        """New thresholds, between two steps."""
        self.n_min, self.t_max_s = n_min, t_max_s

    def follow(self, before: Trigger) -> None:
        """Go on where another one, with other thresholds, was."""
        self._since = before._since

    def step_ended(self, now: float) -> None:
        """Restart the time threshold: at the start of the run and after every step."""
        self._since = now

    def deadline_s(self, now: float) -> float:
        """Seconds until `time` can fire, inf if it never does: no need to look earlier than that."""
        since = now if self._since is None else self._since
        return max(0.0, since + self.t_max_s - now)

    def sleep_s(self, most_s: float, now: float) -> float:
        """Seconds to sleep without a new reward, at most `most_s`: past the deadline nothing else changes what may be
        trained."""
        left_s = self.deadline_s(now)
        return min(most_s, left_s) if left_s > 0 else most_s

    def cause(
        self, groups: int, now: float, *, counted: int = 0, at_rest: bool = True, round_full: bool = False,
        draining: bool = False, leaves_too_old: bool = False,
    ) -> Cause | None:
        """The reason to fire now, or None.

        `groups`: claimed and ready inside the window; `counted` goes against n_min; `at_rest`: every open group is
        resolved; `round_full`: sync, all groups of the round are admitted; `draining`: nothing will be admitted any
        more; `leaves_too_old`: a step now would leave a group above the staleness bound.
        """
        if self._since is None:
            self._since = now
        if groups < 1:
            return None
        if self.sync:
            if at_rest and round_full:
                return Cause.ROUND
        elif max(groups, counted) >= self.n_min:
            return Cause.COUNT
        elif self.deadline_s(now) <= 0 < self.t_max_s and groups >= self.n_floor and not leaves_too_old:
            return Cause.TIME
        return Cause.DRAIN if at_rest and draining else None


# -- the plan ------------------------------------------------------------------------------------------------

@dataclass(frozen=True)
class SetAside:
    """Drop the survivors of a resolved group with this fate: f flat, o too old, i incomplete."""

    draw: int
    fate: str


@dataclass(frozen=True)
class Claim:
    """Take these whole groups for the coming step, in this order."""

    draws: tuple[int, ...]


@dataclass(frozen=True)
class Fire:
    """Make the step with these groups: all that were claimed for it, in the order of training."""

    cause: Cause
    draws: tuple[int, ...]


@dataclass(frozen=True)
class Wait:
    """Nothing fires. `reason`: admission (nothing in flight) | groups | window | round | staleness.

    `group` is the draw that is waited for. Without one nothing is on its way: a learner must publish now, as its
    unpublished groups may stop admission.
    """

    reason: str
    group: int | None = None


Action = SetAside | Claim | Fire | Wait


class LearnerPlan:
    """Pure: its state is the trigger's clock. Call `decide` whenever something changed."""

    def __init__(
        self, limits: AdmissionLimits, trigger: Trigger, staleness: Staleness, *, streaming: bool,
        trains_flat: bool = False,
    ) -> None:
        """`trains_flat`: groups whose rewards are all equal are trained like any other."""
        self.limits, self.trigger, self.staleness, self.streaming = limits, trigger, staleness, streaming
        self.trains_flat = trains_flat

    def _flat(self, view: GroupView) -> Bools:
        return np.zeros(len(view), np.bool_) if self.trains_flat else view.flat

    def decide(
        self, view: GroupView, claimed: Sequence[int], *, step: int, now: float, next_admission: int = 0,
        draining: bool = False, aside: int = 0, wave_over: bool | None = None,
    ) -> list[Action]:
        """Actions to carry out in this order; the last one is a Fire or a Wait.

        `claimed`: draws taken for the coming step, in the order taken; `step`: finished steps; `next_admission`: the
        header word (closes rounds in sync); `draining`: nothing will be admitted any more; `aside`: groups set aside
        since the last step, which matter where the trigger counts every ended group; `wave_over`: in rounds of
        segments, whether the wave is over (`admission.Waves`), which ends a step whatever is still unfinished.
        """
        asides, active = self._set_aside(view, claimed, step)
        counted = len(claimed) + (aside + len(asides) if self.trigger.count_ended else 0)
        seen = _Seen(view, active, self._flat(view))
        fresh, blocker = self._choose(seen, len(claimed), counted, step)
        cause = self.trigger.cause(
            len(claimed) + len(fresh), now, counted=counted + len(fresh),
            at_rest=not (active & ~view.resolved).any() if wave_over is None else wave_over,
            round_full=self.limits.sync and next_admission % self.limits.n_min == 0,
            leaves_too_old=blocker is not None,
            # Under `wait` nothing is admitted while a group is too old: too few for a step would wait for ever.
            draining=draining or bool(self.staleness.holds(view.oldest_step, step).any()),
        )
        if cause and blocker is not None and self.staleness.over_age == "wait":
            cause = None
        return [*asides, *self._claims(cause, claimed, fresh, seen, blocker)]

    def missing(self, view: GroupView, claimed: int, now: float, aside: int = 0) -> int:
        """Rewards that must still come before a step may fire, at least 1: a lower bound after `decide` chose a Wait.
        Groups that are ready outside the window count as there: the end of one other group may let them in."""
        under_way = ~view.resolved & (view.admission != UNKNOWN)
        lacking = np.sort((view.running + view.due)[under_way])  # members of each group without a reward
        ready = int(np.count_nonzero(view.usable & ~self._flat(view) & (view.training == 0)))
        least = self.trigger.n_min if self.trigger.deadline_s(now) > 0 else self.trigger.n_floor
        counted = claimed + (aside if self.trigger.count_ended else 0)
        # In rounds, and at the end of a run, a step may fire once all groups under way have ended.
        groups = len(lacking) if self.limits.sync else max(1, least - counted - ready)
        return max(1, int(lacking[:groups].sum()))

    def _set_aside(self, view: GroupView, claimed: Collection[int], step: int) -> tuple[list[SetAside], Bools]:
        """The groups that are dropped now, and the mask of groups that stay in play: open, not claimed, with an index.
        """
        active = (view.admission != UNKNOWN) & ~np.isin(view.draws, np.fromiter(claimed, np.int64, len(claimed)))
        active &= ~view.resolved | (view.survivors > 0)
        old = self.staleness.too_old(view.oldest_step, step) & (self.staleness.over_age == "drop")
        flat = self._flat(view)
        gone = active & view.resolved & (view.training == 0) & (~view.usable | flat | old)
        return [SetAside(int(view.draws[i]), _fate(view, int(i), flat)) for i in np.flatnonzero(gone)], active & ~gone

    def _choose(self, seen: _Seen, claimed: int, counted: int, step: int) -> tuple[list[int], int | None]:
        """Groups to add to the step, and the one that the step would leave too old, if any (both as draws)."""
        limit = self.limits.B if self.limits.sync else max(0 if claimed else 1, self.trigger.n_min - counted)
        window = window_of_ready(seen.admission, seen.ready, self.limits.W, limit)
        late = self.staleness.would_outlive(seen.oldest_step, step)
        urgent = window.inside[late[window.inside]]
        chosen = list(dict.fromkeys([*window.chosen.tolist(), *urgent.tolist()]))
        late[chosen] = False
        rest = np.flatnonzero(late)
        blocker = int(seen.draws[rest[np.argmin(seen.admission[rest])]]) if len(rest) else None
        return [int(seen.draws[i]) for i in chosen], blocker

    def _claims(
        self, cause: Cause | None, claimed: Sequence[int], fresh: list[int], seen: _Seen, blocker: int | None
    ) -> list[Action]:
        if cause is None:
            wait = self._wait(seen, len(claimed) + len(fresh), blocker)
            return [Claim(tuple(fresh)), wait] if self.streaming and fresh else [wait]
        draws = (*claimed, *fresh) if self.streaming else tuple(sorted((*claimed, *fresh)))
        claimed_now = tuple(fresh) if self.streaming else tuple(sorted(fresh))
        return [Claim(claimed_now), Fire(cause, draws)] if claimed_now else [Fire(cause, draws)]

    def _wait(self, seen: _Seen, groups: int, blocker: int | None) -> Wait:
        if blocker is not None and groups >= self.trigger.n_min:
            return Wait("staleness", blocker)
        window = window_of_ready(seen.admission, seen.ready, self.limits.W, self.limits.B)
        if window.anchor is None:
            return Wait("round" if self.limits.sync and groups else "groups" if groups else "admission")
        reason = "window" if window.waiting else "round" if self.limits.sync else "groups"
        return Wait(reason, int(seen.draws[window.anchor]))


def _fate(view: GroupView, i: int, flat: Bools) -> str:
    """The fate with which group i is set aside: the one that a killed learner already gave to some of its members, else
    the one that its state asks for."""
    begun = int(view.closed_by[i])
    if begun in RULES:
        return chr(begun)
    return (Fate.INCOMPLETE if not view.usable[i] else Fate.FLAT if flat[i] else Fate.OLD).letter


class _Seen:
    """The groups in play, without those set aside or claimed. Ready: resolved, usable, not flat, and claimed by no
    learner (a dead one's claims come back by reaping)."""

    def __init__(self, view: GroupView, active: Bools, flat: Bools) -> None:
        at = np.flatnonzero(active)
        self.draws, self.admission, self.oldest_step = view.draws[at], view.admission[at], view.oldest_step[at]
        self.ready: Bools = (view.usable & ~flat & (view.training == 0))[at]


def publication_is_due(unpublished: int, step: int, *, n_min: int, admitted: int, publish_every: int) -> bool:
    """Unpublished groups hold credit: `publish_every` may keep it back only while enough for a step is left.

    `unpublished`: groups trained since the last publication; `n_min`: groups that a step must find room for;
    `admitted`: B.
    """
    short = unpublished + n_min > admitted
    return bool(unpublished) and (short or step % publish_every == 0)


# -- rounds of validation ------------------------------------------------------------------------------------

class Rounds:
    """The rounds that are due, from the learner's step and the rounds of validation.jsonl: `done` measured something,
    `failed` did not in this life, in their order. `late`: the run has made steps before its first round."""

    def __init__(self, before: bool, every: int, at_end: bool, done: set[int], late: bool = False) -> None:
        self.before, self.every, self.at_end, self.done, self.late = before, every, at_end, done, late
        self.failed: list[int] = []

    def due(self, step: int, finished: bool, newest: int | None = None) -> int | None:
        """The round to run now, numbered by the step it stands for; None if there is none. A run may end before
        `run.max_steps`: `finished` makes `step` the last one.

        A missed step is not made up for: the newest multiple of `every` counts, or `newest` where groups are counted.
        """
        newest_done = max(self.done, default=-1)
        if finished:
            return step if self.at_end and step not in (*self.done, *self.failed[-1:]) else None
        if failed := [number for number in self.failed if number > newest_done]:
            # Steps were made since, so rewards work by now. If they do not, the pauses between such rounds double.
            pause = min(1 << min(len(failed) - 1, 20), self.every or sys.maxsize)
            return step if step >= failed[-1] + pause else None
        if self.before and not self.done:
            return step if self.late else 0
        if newest is None:
            newest = step - step % self.every if self.every else 0
        return newest if newest and newest not in self.done and newest > max(0, newest_done) else None

    def ended(self, number: int, measured: bool) -> None:
        if measured:
            self.done.add(number)
        else:
            self.failed.append(number)
