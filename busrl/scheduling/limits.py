"""How many groups may be in flight (B) and how far the learner looks ahead (W): the sums behind a staleness bound.

Arithmetic on a few numbers of the topology. Knows nothing of slots' contents, clocks or the ring.

- batch-async: B + W <= (max_staleness + 1) x n_lo + 1. A group is trained after at most B - 1 older and W - 1 younger
  ones, and every step takes at least n_lo of them, so its age is at most (B + W - 2) // n_lo <= max_staleness.
- A group's credit must return when its step is *published*: returned when taken, one step more is reachable.
- B and W never change during a run, also when a controller moves the threshold n_min between n_lo and n_hi.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

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
        return 1 if self.sync else max(1, self.B // max(1, self.n_hi))

    @property
    def train_slots(self) -> int:
        """Slots that B groups need; a re-roll takes the slot that its parent left."""
        return self.B * self.group_size

    def explain(self) -> list[str]:
        """The sums, one line each, for `busrl check`."""
        lines = [_explain_mode(self)]
        lines.append(f"train slots = B x groups.size = {self.B} x {self.group_size} = {self.train_slots}")
        lines.append(f"a group of {self.group_size} trains with at least g_min = {self.g_min} survivors")
        if not self.sync:
            lines.append(f"a step by time (t_max) needs at least n_floor = {self.n_floor} groups")
        return lines

    def problems(self) -> list[str]:
        """Rules that these numbers break; a run must not start with any."""
        found = []
        if self.n_min < 1 or self.group_size < 1:
            found.append(f"n_min = {self.n_min}, groups.size = {self.group_size}: must be >= 1")
        if not self.n_lo <= self.n_min <= self.n_hi <= self.B:
            found.append(f"n_lo <= n_min <= n_hi <= B does not hold: {self.n_lo}, {self.n_min}, {self.n_hi}, {self.B}")
        if self.window and self.window > min(self.B, self.W):
            found.append(
                f"weights.window = {self.window} is larger than the buffer: {self._room_text}; set window <= "
                f"{self._largest_window}, or 0 to derive it"
            )
        elif self.W < 1:
            need = least_staleness(self.n_lo, self.n_hi)
            found.append(
                f"no window is left for thresholds {self.n_lo} to {self.n_hi} with max_staleness = "
                f"{self.max_staleness}: W = {self.W} must be >= 1; set weights.max_staleness >= {need}"
            )
        return found

    @property
    def _room_text(self) -> str:
        if self.max_staleness is None:
            return f"B = {self.B} groups are admitted at most"
        total = (self.max_staleness + 1) * self.n_lo + 1
        return f"B + W <= {total} with max_staleness = {self.max_staleness}, B >= W and B >= {self.n_hi} for one step"

    @property
    def _largest_window(self) -> int:
        """The largest W that leaves B >= W and a step of n_hi groups."""
        if self.max_staleness is None:
            return self.B
        total = (self.max_staleness + 1) * self.n_lo + 1
        return max(1, min(total // 2, total - self.n_hi))

    def warnings(self) -> list[str]:
        found = []
        if not self.sync and 1 <= self.W < self.B // 8:
            bound = f"weights.max_staleness to {least_staleness(self.n_lo, self.n_hi)} or more"
            remedy = "weights.window, or set it to 0, so that it is derived" if self.window else bound
            found.append(
                f"W = {self.W} of B = {self.B}: one slow group holds up nearly everything behind it; raise {remedy}"
            )
        if self.mode == "fully-async":
            found.append("fully-async: nothing bounds the age of a sample; watch age_max and the clip fraction")
        return found


def derive(
    mode: str, n_min: int, max_staleness: int, group_size: int, n_lo: int | None = None, n_hi: int | None = None,
    n_floor: int = 0, window: int = 0, waves: int = 0,
) -> AdmissionLimits:
    """The limits of a run. `n_lo`, `n_hi`: thresholds that a controller may choose (default: n_min, it does not act);
    `window`: W, 0 to derive it; `waves`: segments of an answer where rounds of sync are made of segments.

    Never raises for numbers that do not fit together: `problems()` says what is wrong with the result.
    """
    low, high = n_min if n_lo is None else n_lo, n_min if n_hi is None else n_hi
    if mode == "sync":
        low = high = n_min
        admitted = width = n_min * max(1, waves)
    elif mode == "fully-async":
        admitted = max(4 * n_min, high)
        width = window or window_of(admitted)
    else:
        admitted, width = _admitted(low, high, max_staleness, window)
    return AdmissionLimits(
        mode=mode, n_min=n_min, n_lo=low, n_hi=high, n_floor=n_floor or min(low, max(4, n_min // 4)),
        max_staleness={"sync": None if waves else 0, "fully-async": None}.get(mode, max_staleness),
        group_size=group_size, g_min=least_survivors(group_size), B=admitted, W=width,
        waves=waves if mode == "sync" else 0, window=0 if mode == "sync" else window,
    )


def _admitted(n_lo: int, n_hi: int, staleness: int, window: int) -> tuple[int, int]:
    """(B, W) under a bound: the window asked for and what is left for B, or 0.3 B; a step of n_hi groups must fit."""
    total = (staleness + 1) * n_lo + 1
    admitted = max(n_hi, total - window if window else _largest_admitted(total))
    return admitted, total - admitted


def window_of(admitted: int, share: float = WINDOW_SHARE) -> int:
    """Window that goes with `admitted` groups: floor(share x B), at least 1 (which is strict order)."""
    return max(1, math.floor(share * admitted + 1e-9))


def oldest_age(admitted: int, window: int, n_lo: int) -> int:
    """The largest age, in steps, that a group can reach under the window."""
    return (admitted + window - 2) // n_lo


def least_survivors(group_size: int) -> int:
    """g_min: members that must have survived for a group to be trained; at least 2 of several are compared."""
    return min(group_size, max(2, math.ceil(0.75 * group_size)))


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
