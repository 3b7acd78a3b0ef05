"""The learner of a simulated run: carries out what `LearnerPlan` decides, and says how long that takes.

Talks to the simulated ring. Every decision is the plan's; this class frees and claims slots, counts tokens and adds up
seconds. Knows nothing of actors, prompts or the event queue.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from busrl.scheduling.groups import GroupView
from busrl.scheduling.plan import Claim, Fire, LearnerPlan, SetAside, Wait
from busrl.scheduling.publication import publication_is_due
from busrl.scheduling.staleness import age
from busrl.simulate.actors import Noise
from busrl.simulate.figures import Counts, StepRow
from busrl.simulate.ring import SimRing
from busrl.simulate.times import Times
from busrl.topology import Topology


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
    """`lengths`: draw -> tokens of each member, for every open group."""

    topology: Topology
    plan: LearnerPlan
    times: Times
    ring: SimRing
    counts: Counts
    noise: Noise
    lengths: Mapping[int, tuple[int, ...]]
    pace: float = 1.0  # factor on the work of the step that fills up now
    step: int = 0
    unpublished: int = 0
    aside: int = 0
    claimed: dict[int, list[int]] = field(default_factory=dict)
    ended: set[int] = field(default_factory=set)  # draws trained or set aside since they were last collected
    _pending_tokens: int = 0
    _pending_samples: int = 0
    _row: StepRow | None = None
    _waits: Wait = field(default_factory=lambda: Wait("start"))

    def look(
        self, view: GroupView, now: float, next_admission: int, draining: bool, wave_over: bool | None = None
    ) -> Look:
        """Decide and act."""
        found = Look()
        actions = self.plan.decide(
            view, list(self.claimed), step=self.step, now=now, next_admission=next_admission, draining=draining,
            aside=self.aside, wave_over=wave_over,
        )  # fmt: skip
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

    # -- actions ------------------------------------------------------------------------------------------------

    def _set_aside(self, view: GroupView, action: SetAside, found: Look) -> None:
        self.ring.end(view.slots_of(action.draw), action.fate)
        self.counts.aside[action.fate] += 1
        self.ended.add(action.draw)
        self.aside += 1
        found.cost_s += self.times.learner_group_s
        found.freed = True

    def _claim(self, view: GroupView, action: Claim) -> None:
        for draw in action.draws:
            slots = view.slots_of(draw)
            self.ring.claim(slots)
            self.claimed[draw] = slots
            self._pending_tokens += sum(self.lengths[draw])
            self._pending_samples += len(slots)

    def _fire(self, view: GroupView, action: Fire, now: float, found: Look) -> None:
        oldest = view.oldest_step
        ages = [age(int(oldest[view.index(draw)]), self.step) for draw in action.draws]
        slots = [slot for draw in action.draws for slot in self.claimed[draw]]
        lengths = [tokens for draw in action.draws for tokens in self.lengths[draw]]
        self._row = StepRow(
            self.step + 1, now, action.cause.value, len(ages), len(slots), sum(lengths), len(ages) + self.aside,
            sum(ages) / len(ages), max(ages),
        )  # fmt: skip
        self.counts.ages.update(ages)
        self.counts.consumed.extend(lengths)
        self.ended.update(action.draws)
        self.unpublished += len(ages)
        self.ring.end(slots, "T")
        self.claimed.clear()
        found.cost_s += self._micro_batch() + self.times.learner_step_s * self.pace
        self.pace = self.noise.next()
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
            self.unpublished, self.step, n_min=self.plan.trigger.n_min, admitted=self.plan.window.B,
            publish_every=self.topology.publish_every,
        ):  # fmt: skip
            found.publishes = True
            found.cost_s += self.times.publish_s
            self.unpublished = 0

    def _micro_batch(self) -> float:
        seconds = self.times.learner_token_s * self._pending_tokens * self.pace
        self._pending_tokens = self._pending_samples = 0
        return seconds
