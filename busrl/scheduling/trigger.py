"""When an optimiser step fires: enough groups, or enough time, or the end of a round or of the run.

Talks to nothing: counts and a clock value come in, a cause comes out. Knows nothing of which groups they are.

- No groups, no step: every cause needs at least one group, `time` at least n_floor.
- `time` never leaves another group above the staleness bound.
- `n_min` and `t_max_s` may be changed between steps (by a controller); nothing else is.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum


class Cause(str, Enum):
    """Why a step fired; the value is what the train log says."""

    COUNT = "count"
    TIME = "time"
    ROUND = "round"
    DRAIN = "drain"


@dataclass(frozen=True)
class Moment:
    """What the trigger looks at. `groups` = claimed + ready inside the window; `counted` goes against n_min."""

    groups: int
    now: float
    counted: int = 0
    unresolved: int = 0  # open groups that are not resolved yet
    round_full: bool = False  # sync: every group of the round has been admitted
    draining: bool = False  # nothing will be admitted any more
    leaves_too_old: bool = False  # a step now would leave a group above the staleness bound


class Trigger:
    """Two thresholds, and the ends. `sync` knows rounds only.

    With `count_ended` the groups set aside since the last step count against n_min too: a step is then made of n_min
    *drawn* groups, as in a loop that does not refill its batch, and not of n_min groups that carry a signal.
    """

    def __init__(
        self,
        n_min: int,
        n_floor: int = 0,
        t_max_s: float = math.inf,
        *,
        sync: bool = False,
        count_ended: bool = False,
    ) -> None:
        if n_min < 1 or n_floor < 0 or t_max_s <= 0:
            raise ValueError(f"n_min = {n_min}, n_floor = {n_floor}, t_max_s = {t_max_s}: must be >= 1, >= 0 and > 0")
        self.n_min, self.t_max_s, self.sync = n_min, t_max_s, sync
        self.count_ended = count_ended
        self._floor = n_floor
        self._since: float | None = None

    @property
    def n_floor(self) -> int:
        """Fewest groups that a step by time may have."""
        return self._floor or min(self.n_min, max(4, self.n_min // 4))

    def set(self, n_min: int, t_max_s: float) -> None:
        """New thresholds, between two steps."""
        if n_min < 1 or t_max_s <= 0:
            raise ValueError(f"n_min = {n_min}, t_max_s = {t_max_s}: must be >= 1 and > 0")
        self.n_min, self.t_max_s = n_min, t_max_s

    def step_ended(self, now: float) -> None:
        """Start the time threshold anew: at the start of the run and after every step."""
        self._since = now

    def deadline_s(self, now: float) -> float:
        """Seconds until `time` can fire, inf if it never does: no need to look earlier than that."""
        since = now if self._since is None else self._since
        return max(0.0, since + self.t_max_s - now)

    def cause(self, moment: Moment) -> Cause | None:
        """Why to fire now, or None."""
        if self._since is None:
            self._since = moment.now
        if moment.groups < 1:
            return None
        at_rest = moment.unresolved == 0
        if self.sync:
            if at_rest and moment.round_full:
                return Cause.ROUND
        elif max(moment.groups, moment.counted) >= self.n_min:
            return Cause.COUNT
        elif self._time_is_up(moment):
            return Cause.TIME
        return Cause.DRAIN if at_rest and moment.draining else None

    def _time_is_up(self, moment: Moment) -> bool:
        late = self.deadline_s(moment.now) <= 0 < self.t_max_s
        return late and moment.groups >= self.n_floor and not moment.leaves_too_old
