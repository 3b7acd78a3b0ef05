"""The learner of a simulated run: claims, steps, publications and what each costs.

Drives the live `LearnerPlan`; clock values come in with every call, and the event queue is `world`'s. Knows nothing of
rollout processes or of how answers are made.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from busrl.config import Topology
from busrl.data.trace import Turns
from busrl.scheduling.admission import ages
from busrl.scheduling.groups import TRAINING, GroupView
from busrl.scheduling.lengths import Candidate
from busrl.scheduling.trigger import Claim, Fire, LearnerPlan, SetAside, Wait, publication_is_due
from busrl.simulate.actors import Times
from busrl.simulate.figures import Counts, StepRow
from busrl.simulate.ring import SimRing
from busrl.states import Fate


@dataclass
class SimulatedGroup:
    candidate: Candidate
    lengths: tuple[int, ...]
    rewards: tuple[float, ...]
    since: float  # its arrival, or the time of its opening in a closed loop
    prompt_tokens: int
    left: int
    turns: tuple[Turns, ...] = ()  # of the members, where they are episodes


@dataclass
class Look:
    """What one look came to: seconds of work, whether slots came free, and what it waits for if it does."""

    cost_s: float = 0.0
    freed: bool = False
    fired: bool = False
    publishes: bool = False
    reason: str = "groups"


@dataclass
class Learner:
    """`groups`: the open ones by draw; it removes those that it trains or sets aside."""

    topology: Topology
    plan: LearnerPlan
    times: Times
    ring: SimRing
    counts: Counts
    paces: Iterator[float]
    groups: dict[int, SimulatedGroup]
    pace: float = 1.0  # factor on the work of the step that fills up now
    step: int = 0
    unpublished: int = 0
    aside: int = 0
    claimed: dict[int, list[int]] = field(default_factory=dict)
    _pending_tokens: int = 0
    _pending_samples: int = 0
    _row: StepRow | None = None
    _waits: Wait = field(default_factory=lambda: Wait("start"))

    def look(
        self, view: GroupView, now: float, next_admission: int, draining: bool, wave_over: bool | None = None
    ) -> Look:
        found = Look()
        actions = self.plan.decide(
            view, list(self.claimed), step=self.step, now=now, next_admission=next_admission, draining=draining,
            aside=self.aside, wave_over=wave_over,
        )
        for action in actions:
            if isinstance(action, SetAside):
                self._set_aside(view, action, found)
            elif isinstance(action, Claim):
                self._claim(view, action)
            elif isinstance(action, Fire):
                self._fire(view, action, now, found)
            else:
                self._wait(action, found)
        return found

    def finish_step(self, now: float) -> bool:
        """The step under way is done; whether its weights are published with it."""
        assert self._row is not None
        self.step += 1
        self._row.time_s = now
        self.counts.rows.append(self._row)
        self._row, self.aside = None, 0
        self.plan.trigger.step_ended(now)
        published = self.step % self.topology.publish_every == 0
        if published:
            self.unpublished = 0
        return published

    def rest(self) -> Look:
        """What it does after some work if nothing has changed since its last look, which ended with a Wait."""
        found = Look(reason=self._waits.reason)
        self._wait(self._waits, found)
        return found

    def _set_aside(self, view: GroupView, action: SetAside, found: Look) -> None:
        self.ring.end(view.slots_of(action.draw), action.fate)
        self.counts.aside[action.fate] += 1
        del self.groups[action.draw]
        self.aside += 1
        found.cost_s += self.times.learner_group_s
        found.freed = True

    def _claim(self, view: GroupView, action: Claim) -> None:
        for draw in action.draws:
            slots = view.slots_of(draw)
            self.ring.move(slots, TRAINING)
            self.claimed[draw] = slots
            self._pending_tokens += sum(self.groups[draw].lengths)
            self._pending_samples += len(slots)

    def _fire(self, view: GroupView, action: Fire, now: float, found: Look) -> None:
        old: list[int] = ages(view.oldest_step[[view.index(draw) for draw in action.draws]], self.step).tolist()
        slots = [slot for draw in action.draws for slot in self.claimed[draw]]
        lengths = [tokens for draw in action.draws for tokens in self.groups.pop(draw).lengths]
        self._row = StepRow(
            self.step + 1, now, action.cause.value, len(old), len(slots), sum(lengths), len(old) + self.aside,
            sum(old) / len(old), max(old),
        )
        self.counts.ages.update(old)
        self.counts.consumed.extend(lengths)
        self.unpublished += len(old)
        self.ring.end(slots, Fate.TRAINED.letter)
        self.claimed.clear()
        found.cost_s += self._micro_batch() + self.times.learner_step_s * self.pace
        self.pace = next(self.paces)
        found.fired = found.freed = True
        if (self.step + 1) % self.topology.publish_every == 0:
            found.cost_s += self.times.publish_s

    def _wait(self, action: Wait, found: Look) -> None:
        """Use the time as the live learner does: a micro-batch, or a publication that holds up admission."""
        self._waits, found.reason = action, action.reason
        few = self._pending_samples < self.topology.learner.micro_batch_min_samples
        if self.plan.streaming and self._pending_samples and not few:
            found.cost_s += self._micro_batch()
        elif publication_is_due(
            self.unpublished, self.step, n_min=self.plan.trigger.n_min, admitted=self.plan.limits.B,
            publish_every=self.topology.publish_every,
        ):
            found.publishes = True
            found.cost_s += self.times.publish_s
            self.unpublished = 0

    def _micro_batch(self) -> float:
        seconds = self.times.learner_token_s * self._pending_tokens * self.pace
        self._pending_tokens = self._pending_samples = 0
        return seconds
