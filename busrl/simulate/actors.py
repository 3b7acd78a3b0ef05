"""The rollout processes and reward workers of a simulated run, and the service times of all its parts.

Every call has the time as an argument; `world` has the event queue. Each class keeps the rules of its live counterpart.
"""

from __future__ import annotations

import heapq
import math
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import repeat
from typing import Any

import numpy as np
import numpy.typing as npt

from busrl.topology import Topology
from busrl.topology.schema import Simulate

# -- service times -------------------------------------------------------------------------------------------

Floats = npt.NDArray[np.float64]
STATED = "assumed"
TIMES = tuple(key.name for key in fields(Simulate) if key.name.endswith(("_s", "_spread")))


class Times(Simulate):
    """The times of [simulate] (docs/simulate.md), each with its source: stated there, fitted, or assumed.

    In seconds, except spreads, which are standard deviations of a natural log and change no mean. `busy_share`: the
    share of an actor's working time that its counters call busy (the rest is its loop).
    """

    busy_share: float = 1.0
    source: Mapping[str, str] = field(default_factory=dict, compare=False)

    def __post_init__(self) -> None:
        for name in TIMES:
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name} = {getattr(self, name)}: must be a number of seconds >= 0")
        if self.step_s + self.row_s <= 0:
            raise ValueError("step_s + row_s = 0: a decoding step must take some time")

    def decoding(self, rows: int) -> list[float]:
        """Seconds of one decoding step by the number of running sequences, 0 to `rows`."""
        return [self.step_s + self.row_s * active for active in range(rows + 1)]

    def with_source(self, source: Mapping[str, str], **values: Any) -> Times:
        return replace(self, source={**self.source, **source}, **values)

    def notes(self) -> list[tuple[str, float, str]]:
        return [(name, getattr(self, name), self.source.get(name, STATED)) for name in (*TIMES, "busy_share")]


# -- rollout and reward --------------------------------------------------------------------------------------

PACE_S = 0.25  # the time for which an actor keeps its pace: the interval over which a fit measures it


def noise(spread: float, seed: Sequence[int], *, by_time: bool = False) -> Iterator[float]:
    """Log-normal factors on times; 1 without a spread.

    Their mean is 1 if each is for a piece of work, and that of their inverses if each is for a stretch of time
    (`by_time`): in both cases the same work takes as long as without noise in the long run.
    """
    mean = (0.5 if by_time else -0.5) * spread**2
    return stream_of(lambda random: np.exp(random.normal(mean, spread, 1024)), seed) if spread else repeat(1.0)


def delays(mean_s: float, seed: Sequence[int]) -> Iterator[float]:
    """Uniform between 0 and twice the mean: the wait for the next of regular doorbells."""
    return stream_of(lambda random: random.uniform(0.0, 2.0 * mean_s, 4096), seed)


def stream_of(make: Callable[[np.random.Generator], Floats], seed: Sequence[int]) -> Iterator[float]:
    """An endless stream of numbers, of which `make` makes many at a time."""
    random = np.random.default_rng(list(seed))
    while True:
        yield from reversed(make(random).tolist())


class RewardWorkers:
    """Workers of the reward processes: each makes one call after the other, and the first free worker takes the next
    answer."""

    def __init__(self, count: int, call_s: float) -> None:
        self.call_s, self._free = call_s, [0.0] * max(1, count)
        self._busy_s = 0.0

    def done(self, ready: float) -> float:
        """The time at which an answer that may be judged from `ready` on has its reward; earlier calls go first."""
        if not self.call_s:
            return ready
        ends = max(ready, self._free[0]) + self.call_s
        heapq.heapreplace(self._free, ends)
        self._busy_s += self.call_s
        return ends

    def busy_s(self, now: float) -> float:
        """Mean seconds of work of a worker up to `now`."""
        ahead = sum(max(0.0, free - now) for free in self._free)  # calls that are not over, or not begun
        return (self._busy_s - ahead) / len(self._free)


def reward_workers(topology: Topology) -> int:
    """The number of reward calls that run at once in a run of that topology."""
    return topology.reward.workers * max(1, sum(process.role == "reward" for process in topology.processes()))


@dataclass
class Actor:
    """A rollout process. `at`: time up to which `steps` is counted; `pace`: factor on all its times now, `speed` on
    average."""

    speed: float = 1.0
    pace: float = 1.0
    paced: float = 0.0  # when `pace` was drawn
    at: float = 0.0
    steps: int = 0
    active: int = 0
    ends: list[tuple[int, int]] = field(default_factory=list)  # heap of (step, slot)
    seen: int = 0  # publications that have stalled it, or found it idle
    stamp: int = 0  # of its one valid event
    busy_s: float = 0.0
    stalled_s: float = 0.0


class Actors:
    """All rollout processes of a run: continuous batching in rows; a step takes longer the more sequences run.

    An actor's time is counted in decoding steps, not in tokens: between two events its step time is constant. A
    sequence of n tokens that joins at step k ends at step k + n; the next event is the smallest such end. New weights
    interrupt every running actor once, for weights_s; that is applied at the actor's next event, with the same times as
    if at once. Busy time, stalls and idle time add up to the time that has passed.
    """

    def __init__(self, count: int, rows: int, times: Times, seed: int) -> None:
        if count < 1 or rows < 1:
            raise ValueError(f"{count} actors of {rows} rows: must be >= 1 each")
        random = np.random.default_rng([seed, 1])
        speeds = np.exp(random.normal(0.0, times.speed_spread, count)) if times.speed_spread else np.ones(count)
        self.all = [Actor(float(speed), float(speed)) for speed in speeds]
        self.paces = noise(times.step_spread, [seed, 3], by_time=True)
        self.rows, self.times = rows, times
        self.step_time = times.decoding(rows)
        self.published: list[float] = []  # times of publications
        self.idle = OrderedDict.fromkeys(range(count))  # those without any sequence, the longest idle first
        self.partly: OrderedDict[int, None] = OrderedDict()  # those that run some, and have room

    def add(self, index: int, now: float, joining: list[tuple[int, int]], prefill_tokens: int) -> float:
        """Let (slot, tokens) join at the end of the present step; returns the time of the next event."""
        actor, times = self.all[index], self.times
        if not actor.active:
            actor.at, actor.seen = now, len(self.published)
        else:
            self._catch_up(actor, now)
        cost = actor.pace * (times.sequence_s * len(joining) + times.prefill_token_s * prefill_tokens)
        actor.at += cost
        actor.busy_s += cost
        for slot, tokens in joining:
            heapq.heappush(actor.ends, (actor.steps + tokens, slot))
        actor.active += len(joining)
        self.sort_in(index)
        self._draw_pace(actor)
        return self.next_event(index)

    def finish(self, index: int, now: float) -> list[int] | None:
        """The slots whose sequences end now; None if new weights came in between, so that they end later.

        Call `add` or `sort_in` afterwards: the actor has room now.
        """
        actor = self.all[index]
        if self._stall(actor):
            return None
        step = actor.ends[0][0]
        self._advance(actor, step - actor.steps)
        done = []
        while actor.ends and actor.ends[0][0] == step:
            done.append(heapq.heappop(actor.ends)[1])
        actor.active -= len(done)
        self._draw_pace(actor)
        return done

    def next_event(self, index: int) -> float:
        """The time at which its next sequence ends, inf if none runs; sets a new stamp for that event."""
        actor = self.all[index]
        actor.stamp += 1
        if not actor.ends:
            return math.inf
        return actor.at + (actor.ends[0][0] - actor.steps) * self.step_time[actor.active] * actor.pace

    def waiting(self) -> int | None:
        """An actor with room, the longest idle first; None if there is none."""
        return next(iter(self.idle or self.partly), None)

    def sort_in(self, index: int) -> None:
        active = self.all[index].active
        for actors, belongs in ((self.idle, not active), (self.partly, 0 < active < self.rows)):
            if belongs:
                actors.setdefault(index)
            else:
                actors.pop(index, None)

    def settle(self, now: float) -> None:
        """Count everything up to `now`, the end of the run, for the figures."""
        for actor in self.all:
            if not actor.active:
                continue
            stalled = actor.stalled_s
            self._stall(actor)
            steps = (now - actor.at) / (self.step_time[actor.active] * actor.pace)
            self._advance(actor, max(0, math.floor(steps)))
            over = max(0.0, actor.at - now)  # a stall or a prefill that reaches beyond the end
            late = min(over, actor.stalled_s - stalled)
            actor.stalled_s -= late
            actor.busy_s -= over - late

    def _draw_pace(self, actor: Actor) -> None:
        """Draw a new pace every PACE_S; only when all steps up to `at` are counted, as they had the old pace."""
        if self.times.step_spread and actor.at >= actor.paced + PACE_S:
            actor.paced, actor.pace = actor.at, actor.speed * next(self.paces)

    def _stall(self, actor: Actor) -> bool:
        """Count the stalls by publications since the last event; returns whether they cost time."""
        new = len(self.published) - actor.seen
        if new <= 0:
            return False
        actor.seen = len(self.published)
        lost = new * self.times.weights_s * actor.pace
        actor.at += lost
        actor.stalled_s += lost
        return lost > 0

    def _catch_up(self, actor: Actor, now: float) -> None:
        """Count the steps up to the end of the step under way at `now`."""
        self._stall(actor)
        duration = self.step_time[actor.active] * actor.pace
        passed = math.ceil((now - actor.at) / duration - 1e-9)
        # A sequence that ends at that step is counted by its own event.
        self._advance(actor, min(max(0, passed), actor.ends[0][0] - actor.steps))

    def _advance(self, actor: Actor, steps: int) -> None:
        spent = steps * self.step_time[actor.active] * actor.pace
        actor.steps += steps
        actor.at += spent
        actor.busy_s += spent
