"""What a person wants to know of a run, folded from bus messages and from the ring.

Pure: messages and numbers in, a `Progress` out. Knows nothing of terminals. The ring is the better witness: step and
version come from its header, so the picture stays right when messages are lost.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field

from busrl.launch.story import RECENT, Story
from busrl.protocol import messages as m

WINDOW_S = 20.0
HISTORY = 400


@dataclass(frozen=True)
class Row:
    """One process of the run as it is now."""

    name: str
    phase: str
    activity: str = ""
    busy: float = 0.0
    restarts: int = 0


@dataclass
class Rate:
    """How fast a counter grows, over the last `WINDOW_S`."""

    points: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=256))

    def add(self, value: float, now: float) -> None:
        if self.points and value < self.points[-1][1]:
            self.points.clear()  # its owner was started again and counts from 0
        if self.points and self.points[-1][0] == now:
            self.points.pop()  # the newest of one instant counts, or what came before would have taken no time
        self.points.append((now, value))
        while len(self.points) > 2 and now - self.points[0][0] > WINDOW_S:
            self.points.popleft()

    def per_s(self) -> float:
        if len(self.points) < 2:
            return 0.0
        (t0, v0), (t1, v1) = self.points[0], self.points[-1]
        return (v1 - v0) / (t1 - t0) if t1 > t0 else 0.0


@dataclass
class Progress:
    """The state of a run for the display and the summary."""

    name: str
    goal: int
    started: float
    step: int = 0
    version: int = 0
    groups: int = 0
    samples: int = 0
    tokens: int = 0
    generated: int = 0
    entropy: float = 0.0
    age: float = 0.0
    told: int = 0  # the newest step whose numbers are known
    before: int = 0  # steps that were done before this start
    waste: deque[tuple[float, float, float]] = field(default_factory=lambda: deque(maxlen=RECENT))
    rewards: deque[float] = field(default_factory=lambda: deque(maxlen=HISTORY))
    first_reward: float | None = None
    validations: list[tuple[int, float, int]] = field(default_factory=list)
    validating: int = -1
    waiting: str = ""
    faults: list[str] = field(default_factory=list)  # faults on purpose, in words
    rows: tuple[Row, ...] = ()
    slots: dict[str, int] = field(default_factory=dict)
    token_rate: Rate = field(default_factory=Rate)
    step_rate: Rate = field(default_factory=Rate)

    def recall(self, story: Story) -> None:
        """What earlier starts in the run directory came to: this one goes on with their story."""
        self.step = self.told = self.before = story.step
        self.rewards.extend(story.rewards()[-HISTORY:])
        self.first_reward, self.validations = story.first_reward, story.means()

    def hear(self, message: m.Message) -> list[str]:
        """Fold one message in; returns lines that a person should read."""
        if isinstance(message, m.LearnerStateUpdate):
            self._stepped(message)
        elif isinstance(message, m.SchedulerState):
            self.waiting = message.waiting
        elif isinstance(message, m.ValidationStarted):
            self.validating = message.round
        elif isinstance(message, m.ValidationDone):
            return [self._validated(message)]
        return []

    def _stepped(self, update: m.LearnerStateUpdate) -> None:
        if not self.told < update.step <= self.goal:
            return  # doubled, late, or of no step that there is
        if not all(map(math.isfinite, (update.reward, update.entropy, update.age_mean, *update.metrics.values()))):
            return  # no mean of anything
        self.told = update.step
        told = update.metrics
        self.waste.append((told.get("flat_share", 0.0), told.get("groups_ended", 0.0), told.get("cut_share", 0.0)))
        self.step, self.version = max(self.step, update.step), max(self.version, update.version)
        self.groups += update.groups
        self.samples += update.samples
        self.tokens += update.tokens
        self.entropy, self.age = update.entropy, update.age_mean
        self.rewards.append(update.reward)
        if self.first_reward is None:
            self.first_reward = update.reward

    def _validated(self, done: m.ValidationDone) -> str:
        self.validating = -1
        self.validations.append((done.round, done.mean, done.samples))
        mixed = ", versions mixed" if done.mixed else ""
        return f"validation {done.round} of version {done.version}: {done.mean:.3f} over {done.samples} samples{mixed}"

    def ring(self, *, step: int, version: int, tokens: int, slots: dict[str, int], now: float) -> None:
        """What the ring says: header words, tokens generated so far, slots by state."""
        self.step, self.version, self.slots = max(self.step, step), max(self.version, version), slots
        self.generated = tokens
        self.token_rate.add(tokens, now)
        self.step_rate.add(self.step, now)

    def recent_reward(self, count: int = 10) -> float | None:
        """Mean reward of the newest steps."""
        newest = list(self.rewards)[-count:]
        return sum(newest) / len(newest) if newest else None

    def recent_waste(self) -> tuple[float, float] | None:
        """Share of flat groups among those that ended, and of cut answers among the trained, of the newest steps."""
        ended = sum(groups for _, groups, _ in self.waste)
        if not ended > 0:
            return None
        flat = sum(share * groups for share, groups, _ in self.waste) / ended
        return flat, sum(cut for _, _, cut in self.waste) / len(self.waste)

    def left_s(self) -> float | None:
        """Estimated seconds to the goal; None while there is nothing to estimate from."""
        rate = self.step_rate.per_s()
        return (self.goal - self.step) / rate if rate > 0 else None


def duration(seconds: float) -> str:
    """`1h 02m`, `3m 07s` or `12s`."""
    whole = int(seconds)
    if whole >= 3600:
        return f"{whole // 3600}h {whole % 3600 // 60:02d}m"
    return f"{whole // 60}m {whole % 60:02d}s" if whole >= 60 else f"{whole}s"


def short(number: float) -> str:
    """`3.1k`, `12M`: three digits are enough to watch."""
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            scaled = number / size
            return f"{scaled:.1f}{unit}" if scaled < 100 else f"{scaled:.0f}{unit}"
    return f"{number:.0f}"
