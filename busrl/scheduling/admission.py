"""Admission: how many groups may be in flight (B), how far the learner looks ahead (W), how many may be opened now, and
what a worker generates of an answer at once.

The limits of a run are arithmetic on a few numbers of its topology; admission takes a view of the groups, the free
slots, header words and clock values. Knows nothing of prompts or policies.

- batch-async: B + W <= (max_staleness + 1) x n_lo + 1. A group is trained after at most B - 1 older and W - 1 younger
  ones, and every step takes at least n_lo of them, so its age is at most (B + W - 2) // n_lo <= max_staleness.
- B and W never change during a run, also when a controller moves the threshold n_min between n_lo and n_hi.
- Group credit: a group is opened only when the free slots of its class cover the members still due of all open groups
  and one whole group more; a member of an open group may always be dispatched. Else the ring fills with partial ones.
- A draw of a model with K seats opens K groups at once, so B leaves room for K - 1 more than the largest step: with
  fewer groups in flight than a step needs, there is room for a whole draw.
- In flight = unfinished groups + groups trained but not yet published (without these one step more would be reachable);
  at most B of them. A learner counts its groups as unpublished *before* it frees their slots, so they are never missing
  from both counts.
- sync: round r has the admission indices [r x n_min, (r + 1) x n_min). It begins when nothing is in flight, and is not
  refilled.
- sync in segments: a round begins when the wave before it is over and what it completed is trained and published.
  No part of it may be claimed before all of it is admitted (`Waves`), so nothing holds a part of it back.
- With max_staleness = 0 nothing is admitted while trained groups wait for their publication: it would be one step old.
- Nothing is remembered from one call to the next, so a restarted scheduler answers the same.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from busrl.scheduling.groups import NOT_STARTED, QUEUED, RESERVED, REWARDED, Bools, GroupView, Ints, least_survivors
from busrl.states import SampleClass

# -- limits --------------------------------------------------------------------------------------------------

MODES = ("sync", "batch-async", "fully-async")
WINDOW_SHARE = 0.3


@dataclass(frozen=True)
class AdmissionLimits:
    """Derived numbers of a run, counted in groups. `max_age` is None where nothing bounds it (fully-async)."""

    mode: str
    n_min: int
    n_lo: int
    n_hi: int
    n_floor: int
    max_staleness: int | None
    group_size: int
    g_min: int
    B: int
    W: int
    waves: int = 0  # sync in rounds of segments: so many rounds are in flight
    window: int = 0  # the W that was asked for, 0 = derived
    seats: int = 1  # K, groups of a draw

    @property
    def step_room(self) -> int:
        """Groups that must find room so that the largest step can always fill up."""
        return self.n_hi + (0 if self.sync else self.seats - 1)

    @property
    def sync(self) -> bool:
        return self.mode == "sync"

    @property
    def max_age(self) -> int | None:
        """Steps that a group may be old when it is trained, by the sums above."""
        if self.sync:
            return max(0, self.waves - 1)
        return None if self.max_staleness is None else oldest_age(self.B, self.W, self.n_lo)

    @property
    def max_publish_every(self) -> int:
        """Steps that may share one publication; with more, unpublished groups alone would stop admission."""
        return 1 if self.sync else max(1, self.B // max(1, self.step_room))

    @property
    def train_slots(self) -> int:
        """Slots that B groups need; a re-roll takes the slot that its parent left."""
        return self.B * self.group_size

    def explain(self) -> list[str]:
        """The sums, one line each, for `busrl check`."""
        lines = [
            _explain_mode(self), f"train slots = B x groups.size = {self.B} x {self.group_size} = {self.train_slots}",
            f"a group of {self.group_size} trains with at least g_min = {self.g_min} survivors",
        ]
        if not self.sync:
            lines.append(f"a step by time (t_max) needs at least n_floor = {self.n_floor} groups")
        return lines

    def problems(self) -> list[str]:
        """Rules that these numbers break; a run must not start with any."""
        problems = []
        if self.n_min < 1 or self.group_size < 1:
            problems.append(f"n_min = {self.n_min}, groups.size = {self.group_size}: must be >= 1")
        if not self.n_lo <= self.n_min <= self.n_hi <= self.B:
            values = f"{self.n_lo}, {self.n_min}, {self.n_hi}, {self.B}"
            problems.append(f"n_lo <= n_min <= n_hi <= B does not hold: {values}")
        if self.window and self.window > min(self.B, self.W):
            room, most = self._room()
            problems.append(
                f"weights.window = {self.window} is larger than the buffer: {room}; set window <= {most}, or 0 to "
                "derive it"
            )
        elif self.W < 1:
            need = least_staleness(self.n_lo, self.step_room)
            problems.append(
                f"no window is left for thresholds {self.n_lo} to {self.n_hi} with max_staleness = "
                f"{self.max_staleness}: W = {self.W} must be >= 1; set weights.max_staleness >= {need}"
            )
        return problems

    def _room(self) -> tuple[str, int]:
        """The bound on W in words, and the largest W that leaves B >= W and a step of n_hi groups."""
        if self.max_staleness is None:
            return f"B = {self.B} groups are admitted at most", self.B
        total = (self.max_staleness + 1) * self.n_lo + 1
        least = self.step_room
        text = f"B + W <= {total} with max_staleness = {self.max_staleness}, B >= W and B >= {least} for one step"
        return text, max(1, min(total // 2, total - least))

    def warnings(self) -> list[str]:
        warnings = []
        if not self.sync and 1 <= self.W < self.B // 8:
            bound = f"weights.max_staleness to {least_staleness(self.n_lo, self.step_room)} or more"
            remedy = "weights.window, or set it to 0, so that it is derived" if self.window else bound
            warnings.append(
                f"W = {self.W} of B = {self.B}: one slow group holds up nearly everything behind it; raise {remedy}"
            )
        if self.mode == "fully-async":
            warnings.append("fully-async: nothing bounds the age of a sample; watch age_max and the clip fraction")
        return warnings


def derive(
    mode: str, n_min: int, max_staleness: int, group_size: int, n_lo: int | None = None, n_hi: int | None = None,
    n_floor: int = 0, window: int = 0, waves: int = 0, seats: int = 1,
) -> AdmissionLimits:
    """The limits of a run. `n_lo`, `n_hi`: thresholds that a controller may choose (default: n_min, it does not act);
    `window`: W, 0 to derive it; `waves`: segments of an answer where rounds of sync are made of segments; `seats`:
    groups of a draw.

    Never raises for numbers that do not fit together: `problems()` lists what is wrong with the result.
    """
    low, high = n_min if n_lo is None else n_lo, n_min if n_hi is None else n_hi
    if mode == "sync":
        low = high = n_min
        admitted = width = n_min * max(1, waves)
    elif mode == "fully-async":
        admitted = max(4 * n_min, high + seats - 1)
        width = window or window_of(admitted)
    else:
        admitted, width = _admitted(low, high + seats - 1, max_staleness, window)
    return AdmissionLimits(
        mode=mode, n_min=n_min, n_lo=low, n_hi=high, n_floor=n_floor or min(low, max(4, n_min // 4)),
        max_staleness={"sync": None if waves else 0, "fully-async": None}.get(mode, max_staleness),
        group_size=group_size, g_min=least_survivors(group_size), B=admitted, W=width,
        waves=waves if mode == "sync" else 0, window=0 if mode == "sync" else window, seats=seats,
    )


def _admitted(n_lo: int, least: int, staleness: int, window: int) -> tuple[int, int]:
    """(B, W) under a bound: the window asked for and what is left for B, or 0.3 B; B has room for `least` groups."""
    total = (staleness + 1) * n_lo + 1
    admitted = max(least, total - window if window else _largest_admitted(total))
    return admitted, total - admitted


def window_of(admitted: int, share: float = WINDOW_SHARE) -> int:
    """Window that goes with `admitted` groups: floor(share x B), at least 1 (which is strict order)."""
    return max(1, math.floor(share * admitted + 1e-9))


def oldest_age(admitted: int, window: int, n_lo: int) -> int:
    """The largest age, in steps, that a group can reach under the window."""
    return (admitted + window - 2) // n_lo


def least_staleness(n_lo: int, n_hi: int) -> int:
    """The smallest max_staleness that leaves thresholds n_lo to n_hi a window of a quarter of B."""
    return math.ceil((n_hi + max(1, n_hi // 4) - 1) / n_lo) - 1


def _largest_admitted(total: int) -> int:
    """The largest B with B + floor(0.3 B) <= total."""
    at_most = int(total / (1 + WINDOW_SHARE)) + 2
    return next((some for some in range(at_most, 1, -1) if some + window_of(some) <= total), 1)


def _explain_mode(limits: AdmissionLimits) -> str:
    n, admitted, window = limits.n_lo, limits.B, limits.W
    if limits.waves:
        return (
            f"sync in segments: every wave admits n_min = {limits.n_min} groups, gives each unfinished answer a "
            f"segment and trains what is whole; at most {limits.waves} rounds in flight, B = W = {admitted}, "
            f"age at most {limits.max_age}"
        )
    if limits.sync:
        return f"sync: B = W = n_min = {admitted}; a round is trained and published before the next is admitted (age 0)"
    if limits.max_staleness is None:
        most = f"4 x n_min = {admitted}" if limits.n_hi <= 4 * limits.n_min else f"n_hi = {admitted}"
        width = "weights.window" if limits.window else "floor(0.3 B)"
        return f"fully-async: B = {most}, W = {width} = {window}; no bound on age"
    bound = (limits.max_staleness + 1) * n + 1
    return (
        f"batch-async: B + W = {admitted} + {window} = {admitted + window} <= (max_staleness + 1) x n_lo + 1 = "
        f"({limits.max_staleness} + 1) x {n} + 1 = {bound}; age at most (B + W - 2) // n_lo = {limits.max_age}"
    )


# -- arrivals ------------------------------------------------------------------------------------------------

class Arrivals:
    """An open stream: which prompts are there by now. `times`: seconds after the start of each line, ascending.

    Draw d is line d mod N of epoch d div N; a later epoch is the first one again, after it and one mean gap. The clock
    starts with the first call; a successor continues where the last admitted group arrived.
    """

    def __init__(self, times: Sequence[float]) -> None:
        self._times = np.asarray(times, np.float64)
        gap = float(self._times[-1] - self._times[0]) / max(1, len(self._times) - 1)
        self._period = float(self._times[-1]) + gap
        self._start: float | None = None

    def time_of(self, draw: int) -> float:
        """Seconds after the start at which a draw is there."""
        epoch, line = divmod(draw, len(self._times))
        return epoch * self._period + float(self._times[line])

    def count(self, now: float, admitted: int = 0) -> int:
        """Draws [0, count) are there at `now`; `admitted` groups were opened before this clock was started."""
        if self._start is None:
            self._start = now - (self.time_of(admitted - 1) if admitted else 0.0)
        passed = now - self._start
        if self._period < 1e-9:  # all at once, for ever
            return np.iinfo(np.int64).max
        epoch = int(passed // self._period)
        line = int(np.searchsorted(self._times, passed - epoch * self._period, side="right"))
        return epoch * len(self._times) + line


# -- room ----------------------------------------------------------------------------------------------------

@dataclass(frozen=True)
class Room:
    """Groups that may be opened now. With none, `reason` names the rule and `group` the draw that all wait for.

    `whole`: engines take none of them before all are opened, so waiting for engines would never end.
    """

    groups: int
    reason: str = ""  # slots | in_flight | round | staleness | ahead
    group: int | None = None
    whole: bool = False


def not_ahead(room: Room, ahead: int, waiting: int, group_size: int, seats: int = 1) -> Room:
    """Fewer groups where `waiting` samples wait for an engine already and `ahead` of them are enough (0: never enough).

    What was dispatched keeps its order. A group opened late is chosen among more, and younger when it is trained.
    """
    if not ahead or room.groups <= 0 or room.whole:
        return room
    groups = min(room.groups, -(-(ahead - waiting) // (group_size * seats)) * seats)
    return Room(groups) if groups > 0 else Room(0, "ahead")


class Admission:
    """Admits groups under the limits: the same arguments give the same answer after any restart."""

    def __init__(self, limits: AdmissionLimits, over_age: str = "wait") -> None:
        self.limits, self.staleness = limits, Staleness(limits.max_staleness, over_age)

    def room(
        self, view: GroupView, *, unpublished: int, next_admission: int, step: int, free: int, reserve: int = 0,
        wave_over: bool = False,
    ) -> Room:
        """Groups that may be opened now, those of whole draws.

        `free`: FREE slots; `reserve`: those of them kept for other classes; `next_admission`: the index that the next
        group gets; `step`: the learner's finished steps; `unpublished`: groups trained, not published;
        `wave_over`: see `Waves`.
        """
        due = int(view.due.sum())
        blocker = view.oldest_unresolved()
        if (too_old := self.staleness.holds(view.oldest_step, step)).any():
            oldest = np.argmin(np.where(too_old, view.oldest_step, NOT_STARTED))
            return Room(0, "staleness", int(view.draws[oldest]))
        if self.limits.max_staleness == 0 and unpublished and not self.limits.sync:
            return Room(0, "in_flight", blocker)  # the step under way would make it too old before it is trained
        settled = wave_over and not unpublished and not due and not bool(view.resolved.any())
        groups, reason = self._by_count(len(view) + unpublished, next_admission, settled)
        seats = self.limits.seats
        if groups < seats:
            return Room(0, reason, blocker)
        by_slots = (free - reserve - due) // self.limits.group_size
        if by_slots < seats:
            return Room(0, "slots", blocker)
        groups = min(groups, by_slots)
        return Room(groups - groups % seats, whole=self.limits.waves > 0)

    def _by_count(self, in_flight: int, next_admission: int, settled: bool) -> tuple[int, str]:
        if not self.limits.sync:
            return self.limits.B - in_flight, "in_flight"
        position = next_admission % self.limits.n_min
        may_begin = settled and in_flight + self.limits.n_min <= self.limits.B if self.limits.waves else not in_flight
        if position == 0 and not may_begin:
            return 0, "round"
        return self.limits.n_min - position, "round"


# -- age -----------------------------------------------------------------------------------------------------

@dataclass(frozen=True)
class Staleness:
    """The bound S in steps (None: no bound), and what happens above it.

    Age = the learner's finished steps - the step of the oldest version that any trained token of the group was
    generated with; a version that is published again after a restart keeps its step. `wait`: no step fires that would
    leave an unfinished group above the bound; the group is waited for and trained. `drop`: it is set aside whole.
    """

    bound: int | None
    over_age: str = "wait"

    def too_old(self, oldest_step: Ints, step: int) -> Bools:
        """Groups above the bound now."""
        bound = np.inf if self.bound is None else self.bound
        above: Bools = ages(oldest_step, step) > bound
        return above

    def holds(self, oldest_step: Ints, step: int) -> Bools:
        """Under `wait`: groups above the bound; nothing is admitted until they are trained."""
        return self.too_old(oldest_step, step) & (self.over_age == "wait")

    def would_outlive(self, oldest_step: Ints, step: int) -> Bools:
        """Groups that would be above the bound if a step were made without them."""
        late: Bools = (oldest_step != NOT_STARTED) & self.too_old(oldest_step, step + 1)
        return late


def ages(oldest_step: Ints, step: int) -> Ints:
    """Steps between the oldest version of each group and now; 0 for a group that has not begun."""
    return np.where(oldest_step == NOT_STARTED, 0, np.maximum(0, step - oldest_step))


# -- waves ---------------------------------------------------------------------------------------------------

Lines = npt.NDArray[Any]


class Waves:
    """Rounds of `n_min` groups in segments: in each wave every unfinished answer gets one, under one version (UloRL).

    Wave w runs when w rounds are admitted whole, so a slot of round r may have w - r segments: what is claimable, and
    when a wave is over, follows from the ring's lines and the header word `next_admission` alone. A wave is over when
    nothing is being made or judged and nothing may be claimed any more. A sample of round r has all of its segments
    after wave r + max_segments, so at most max_segments rounds are in flight.
    """

    def __init__(self, n_min: int) -> None:
        self.n_min = n_min

    @classmethod
    def of(cls, limits: AdmissionLimits) -> Waves | None:
        """The waves of a run whose rounds are made of segments; None for any other."""
        return cls(limits.n_min) if limits.waves else None

    def claimable(self, lines: Lines, next_admission: int) -> Bools:
        """QUEUED slots that may have a segment in this wave; those of other classes always."""
        allowed = next_admission // self.n_min - lines["admission"].astype(np.int64) // self.n_min
        may_begin = (lines["cls"] != SampleClass.TRAIN) | (lines["segs"].astype(np.int64) < allowed)
        mask: Bools = (lines["state"] == QUEUED) & may_begin
        return mask

    def over(self, lines: Lines, next_admission: int) -> bool:
        """True once every training slot has its segment of this wave, and every whole answer is judged."""
        if next_admission % self.n_min:
            return False
        state = lines["state"]
        train = (lines["cls"] == SampleClass.TRAIN) | (state == RESERVED)  # being filled: may show its last tenant
        busy = (state >= RESERVED) & (state < REWARDED) & (state != QUEUED)
        busy |= (state == QUEUED) & (lines["admission"] >= next_admission)  # dispatched, its group not yet counted
        return not bool((train & (busy | self.claimable(lines, next_admission))).any())

    def best(self, lines: Lines, next_admission: int, limit: int, most_attempts: int) -> list[int]:
        return _best(lines, self.claimable(lines, next_admission), limit, most_attempts)


class Unbegun:
    """Samples that have no segment yet, for workers that make whole answers."""

    def best(self, lines: Lines, next_admission: int, limit: int, most_attempts: int) -> list[int]:
        return _best(lines, (lines["state"] == QUEUED) & (lines["segs"] == 0), limit, most_attempts)


def _best(lines: Lines, claimable: Bools, limit: int, most_attempts: int) -> list[int]:
    """Slots to claim, as the ring itself orders slots: unfinished first, then priority, then the older."""
    at = np.flatnonzero(claimable & (lines["attempt"] <= most_attempts))
    fields = {name: lines[name][at] for name in ("segs", "priority", "admission", "uid")}
    order = np.lexsort((fields["uid"], fields["admission"], -fields["priority"].astype(np.int64), fields["segs"] == 0))
    return [int(slot) for slot in at[order[:limit]]]


# -- the segments of an answer -------------------------------------------------------------------------------
# Every answer can reach its limit: the tokens that are left are shared out over the segments that are left, and a
# segment is never shorter than that share. `AutoLength` moves within [least, limit], only when it has seen enough
# answers, and only by a clear factor.

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
    """The bounds of a segment: `tokens`, and whether the answer has to end with it."""

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


# -- workers that new weights do not reach -------------------------------------------------------------------

class LeftBehind:
    """The rule by which a worker that new weights do not reach starts nothing: its samples would be too old before they
    are trained. `patience_s`: a person should know after so long."""

    def __init__(self, patience_s: float) -> None:
        self._patience_s, self._since = patience_s, math.inf

    def look(self, behind: int, bound: int | None, now: float) -> bool:
        """True if the rule holds for weights that are `behind` steps behind; `bound`: `steps_behind`."""
        is_behind = bound is not None and behind >= max(1, bound)
        self._since = min(self._since, now) if is_behind else math.inf
        return is_behind

    def lasts(self, now: float) -> bool:
        return now - self._since > self._patience_s


def steps_behind(limits: AdmissionLimits, forced_age: int) -> int | None:
    """Steps that a worker's weights may be behind; None where nothing bounds them, also where their age is forced."""
    if forced_age:
        return None
    return 0 if limits.waves else limits.max_staleness


# -- rows of the engines -------------------------------------------------------------------------------------

class Rows:
    """The sequences that all workers can run at once, from their announcements.

    `expected`: rows of the workers that the topology starts, which counts until one announced anything; `forget_s`:
    after this silence a worker is gone. At most `most` are remembered, since a name comes from outside. Workers that
    announce nothing (they do not listen on the bus) are known only by what they run.
    """

    def __init__(self, expected: int, forget_s: float, most: int = 1024) -> None:
        self.expected, self.forget_s, self.most = expected, forget_s, most
        self._announced: dict[str, tuple[int, float]] = {}  # rows of each worker, and when it announced them

    def announce(self, worker: str, rows: int, now: float) -> bool:
        """A worker can run `rows` sequences, 0 for an unknown number; False if there are too many workers already."""
        is_new = worker not in self._announced
        if is_new and len(self._announced) >= self.most and len(self.workers(now)) >= self.most:
            return False
        self._announced[worker] = rows, now
        return True

    def workers(self, now: float) -> list[str]:
        """Names of those that announced lately."""
        self._announced = {
            name: (rows, since) for name, (rows, since) in self._announced.items() if now - since < self.forget_s
        }
        return list(self._announced)

    def total(self, generating: int) -> int:
        """Rows of all workers; at least those in use."""
        announced = sum(rows for rows, _ in self._announced.values())
        return max(generating, announced or self.expected)
