"""The learner's decisions in one place: what to set aside, what to claim, whether to fire, or what it waits for.

Joins groups, window, trigger and staleness. Given a view of the groups, what is already claimed for the coming step,
the step number and a clock value, it returns actions; the learner role carries them out and asks again. Knows nothing
of slots' contents, files or tensors.

- A group is claimed at most once: claimed draws come in with every call, and are never among the actions again.
- A step holds at most n_min groups (set-aside ones counted in where the trigger counts every ended group), plus those
  that would be too old after it.
- Under `wait`, and for steps by time, no step leaves an unfinished group above the bound: age <= S at firing.
- Streaming claims groups as they become ready; otherwise everything is claimed at firing, sorted by draw.
- A claim that fails in the ring (a lost CAS) cancels the Fire of the same answer: look again.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from busrl.scheduling.groups import UNKNOWN, Bools, GroupView, Ints
from busrl.scheduling.limits import Limits
from busrl.scheduling.staleness import Staleness
from busrl.scheduling.trigger import Cause, Moment, Trigger
from busrl.scheduling.window import Window, look

RULES = "foiel"  # fates that set a group aside by rule


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

    `group` is the draw that is waited for, `admission` its index; `ready` counts the groups that are held up by it.
    Without a `group` nothing is on its way: a learner that has unpublished groups must publish now, as they may be what
    stops admission.
    """

    reason: str
    group: int | None = None
    admission: int | None = None
    ready: int = 0


Action = SetAside | Claim | Fire | Wait


class LearnerPlan:
    """Pure: state is the trigger's clock, and a bound that was tightened. Call `decide` whenever something changed."""

    def __init__(self, limits: Limits, trigger: Trigger, staleness: Staleness, *, streaming: bool) -> None:
        self.limits, self.trigger, self.staleness, self.streaming = limits, trigger, staleness, streaming
        self.window = limits  # B and W in force, which a controller may have tightened

    def tighten(self, eta: int | None) -> None:
        """Look ahead as for a bound of `eta` steps (None: as for max_staleness), from the next look on."""
        self.window = self.limits if eta is None else self.limits.at(eta)

    def decide(
        self,
        view: GroupView,
        claimed: Sequence[int],
        *,
        step: int,
        now: float,
        next_admission: int = 0,
        draining: bool = False,
        aside: int = 0,
        wave_over: bool | None = None,
    ) -> list[Action]:
        """Actions to carry out in this order; the last one is a Fire or a Wait.

        `claimed`: draws taken for the coming step, in the order taken; `step`: finished steps; `next_admission`: the
        header word (closes rounds in sync); `draining`: nothing will be admitted any more; `aside`: groups set aside
        since the last step, which matter where the trigger counts every ended group; `wave_over`: in rounds of
        segments, whether the wave is over (`scheduling.waves`), which ends a step whatever is still unfinished.
        """
        asides, active = self._set_aside(view, claimed, step)
        counted = len(claimed) + (aside + len(asides) if self.trigger.count_ended else 0)
        seen = _Seen(view, active, self._ready(view, active))
        fresh, blocker = self._choose(seen, len(claimed), counted, step)
        moment = Moment(
            groups=len(claimed) + len(fresh),
            counted=counted + len(fresh),
            now=now,
            unresolved=int(np.count_nonzero(active & ~view.resolved)) if wave_over is None else int(not wave_over),
            round_full=self.limits.sync and next_admission % self.limits.n_min == 0,
            draining=draining or self._admission_is_held(view, step),
            leaves_too_old=blocker is not None,
        )
        cause = self.trigger.cause(moment)
        if cause and blocker is not None and self.staleness.over_age == "wait":
            cause = None
        return [*asides, *self._claims(cause, claimed, fresh, seen, blocker)]

    def _admission_is_held(self, view: GroupView, step: int) -> bool:
        """Under `wait` nothing is admitted while a group is too old: too few for a step would wait for ever."""
        late = self.staleness.too_old(view.oldest_step, step)
        return self.staleness.over_age == "wait" and bool(np.any(late))

    # -- groups -------------------------------------------------------------------------------------------------

    def _set_aside(self, view: GroupView, claimed: Collection[int], step: int) -> tuple[list[SetAside], Bools]:
        """What is dropped now, and the mask of groups that stay in play: open, not claimed, with an index."""
        active = (view.admission != UNKNOWN) & ~np.isin(view.draws, np.fromiter(claimed, np.int64, len(claimed)))
        active &= ~view.resolved | (view.survivors > 0)
        old = self.staleness.too_old(view.oldest_step, step) & (self.staleness.over_age == "drop")
        gone = active & view.resolved & (view.training == 0) & (~view.usable | view.flat | old)
        return [SetAside(int(view.draws[i]), _fate(view, int(i))) for i in np.flatnonzero(gone)], active & ~gone

    @staticmethod
    def _ready(view: GroupView, active: Bools) -> Bools:
        """Resolved, usable, not flat, and in nobody's hands (a dead learner's claims come back by reaping)."""
        ready: Bools = active & view.usable & ~view.flat & (view.training == 0)
        return ready

    def _choose(self, seen: _Seen, claimed: int, counted: int, step: int) -> tuple[list[int], int | None]:
        """Groups to add to the step, and the one that the step would leave too old, if any (both as draws)."""
        limit = self.limits.B if self.limits.sync else max(0 if claimed else 1, self.trigger.n_min - counted)
        window = seen.look(self.window.W, limit)
        late = self.staleness.would_outlive(seen.oldest_step, step)
        urgent = window.inside[late[window.inside]]
        chosen = list(dict.fromkeys([*window.chosen.tolist(), *urgent.tolist()]))
        late[chosen] = False
        rest = np.flatnonzero(late)
        blocker = int(seen.draws[rest[np.argmin(seen.admission[rest])]]) if len(rest) else None
        return [int(seen.draws[i]) for i in chosen], blocker

    # -- actions ------------------------------------------------------------------------------------------------

    def _claims(
        self, cause: Cause | None, claimed: Sequence[int], fresh: list[int], seen: _Seen, blocker: int | None
    ) -> list[Action]:
        if cause is None:
            wait = self._wait(seen, len(claimed) + len(fresh), blocker)
            return [Claim(tuple(fresh)), wait] if self.streaming and fresh else [wait]
        draws = (*claimed, *fresh) if self.streaming else tuple(sorted((*claimed, *fresh)))
        taken = tuple(fresh) if self.streaming else tuple(sorted(fresh))
        return [Claim(taken), Fire(cause, draws)] if taken else [Fire(cause, draws)]

    def _wait(self, seen: _Seen, groups: int, blocker: int | None) -> Wait:
        if blocker is not None and groups >= self.trigger.n_min:
            return seen.wait("staleness", blocker, groups)
        window = seen.look(self.window.W, self.window.B)
        if window.anchor is None:
            return Wait("round" if self.limits.sync and groups else "groups" if groups else "admission", ready=groups)
        anchor = int(seen.draws[window.anchor])
        if window.waiting:
            return seen.wait("window", anchor, window.waiting)
        return seen.wait("round" if self.limits.sync else "groups", anchor, groups)


def _fate(view: GroupView, i: int) -> str:
    """Why group i is set aside: the reason that a killed learner already gave to some of it, else what it is."""
    begun = chr(int(view.closed_by[i]))
    if begun in RULES:
        return begun
    return "i" if not view.usable[i] else "f" if view.flat[i] else "o"


class _Seen:
    """The groups in play, without those set aside or claimed."""

    def __init__(self, view: GroupView, active: Bools, ready: Bools) -> None:
        at = np.flatnonzero(active)
        self.draws: Ints = view.draws[at]
        self.admission: Ints = view.admission[at]
        self.oldest_step: Ints = view.oldest_step[at]
        self.ready: Bools = ready[at]

    def look(self, width: int, limit: int) -> Window:
        return look(self.admission, self.ready, width, limit)

    def wait(self, reason: str, draw: int, ready: int) -> Wait:
        return Wait(reason, draw, int(self.admission[np.flatnonzero(self.draws == draw)[0]]), ready)
