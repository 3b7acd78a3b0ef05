"""The ring, the scheduler and the learner of a simulated run, by the rules of the live ones.

Slots, states and fates are NumPy arrays, which the classes of `busrl.scheduling` read like shared memory. Every call
has the time as an argument; `world` has the event queue. Knows nothing of rollout processes, rewards or events.

- No process dies here, so a slot has no owner, a group has no re-rolls and is never half open.
- Admission, policy, predictor, waves and the learner's plan are the live ones, called in the live order.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

import numpy as np
import numpy.typing as npt

from busrl import capabilities
from busrl.data.trace import Turns
from busrl.scheduling.admission import Admission, Waves, ages, not_ahead
from busrl.scheduling.dispatch import Policy
from busrl.scheduling.groups import DISPATCHED, FREE, GENERATING, QUEUED, REWARDED, TRAINING, GroupView
from busrl.scheduling.plan import policy_of
from busrl.scheduling.predictor import Candidate, Predictor, Unpredicted
from busrl.scheduling.trigger import Claim, Fire, LearnerPlan, SetAside, Wait, publication_is_due
from busrl.simulate.actors import Times
from busrl.simulate.answers import Answers
from busrl.simulate.figures import Counts, StepRow
from busrl.states import Fate, uid_of
from busrl.topology import Topology

# -- the ring ------------------------------------------------------------------------------------------------

LINE = np.dtype("u8, u8, f8, u4, u4, u1, u1", align=True)
LINE.names = ("uid", "admission", "reward", "step", "cls", "state", "segs")
FATES_AT_FIRST = 1 << 16
UNFINISHED = 1 << 40  # added to the priority of a slot that has segments already


class SimRing:
    """`slots` slots for training, of groups of `group_size`: the lines and fates that the group scanner reads.

    `changes` counts every change of a line or a fate, so that a view is computed again only after one. Slots wait by
    priority: unfinished samples first, then groups in the order of their admission.
    """

    def __init__(self, slots: int, group_size: int) -> None:
        self.lines: npt.NDArray[Any] = np.zeros(slots, LINE)
        self.fates = np.zeros(FATES_AT_FIRST, np.uint8)
        self.size = group_size
        self.state, self.reward, self.segs = self.lines["state"], self.lines["reward"], self.lines["segs"]
        self.uid, self.admission, self.step = self.lines["uid"], self.lines["admission"], self.lines["step"]
        self.free = list(range(slots - 1, -1, -1))
        self.queue: list[tuple[int, int, int]] = []  # (minus the priority, order of arrival, slot)
        self.blocked: list[tuple[int, int, int]] = []  # the same, of slots that are QUEUED and may not be taken yet
        self.priority = [0] * slots
        self.changes = 0
        self._order = 0

    def dispatch(
        self, draw: int, members: int, admission: int, step: int, priority: int, hold: bool = False
    ) -> list[int]:
        """Move the first `members` of a group to QUEUED; returns their slots. The largest priority is taken first.
        `hold`: none is taken before `allow`."""
        first = uid_of(draw, 0, 0, self.size)
        if (lacking := first + 2 * self.size - len(self.fates)) > 0:
            self.fates = np.pad(self.fates, (0, max(lacking, len(self.fates))))
        slots = [self.free.pop() for _ in range(members)]
        self.fates[first : first + members] = DISPATCHED
        self.uid[slots] = np.arange(first, first + members, dtype=np.uint64)
        self.admission[slots], self.step[slots] = admission, step
        self.segs[slots], self.reward[slots], self.state[slots] = 0, 0.0, QUEUED
        for slot in slots:
            self.priority[slot] = priority
            self._wait(slot, 0, hold)
        self.changes += 1
        return slots

    def take(self, limit: int) -> list[int]:
        """Move up to `limit` slots from QUEUED to GENERATING, by priority."""
        slots = [heapq.heappop(self.queue)[2] for _ in range(min(limit, len(self.queue)))]
        for slot in slots:
            self.move(slot, GENERATING)
        return slots

    def release(self, slot: int, hold: bool = False) -> None:
        """End a segment that was not the last: the slot is QUEUED again, before all slots without segments."""
        self.state[slot] = QUEUED
        self.segs[slot] = min(255, int(self.segs[slot]) + 1)
        self._wait(slot, UNFINISHED, hold)
        self.changes += 1

    def allow(self, slots: npt.NDArray[np.bool_]) -> None:
        """Let actors take the held slots of this mask."""
        self.queue += [entry for entry in self.blocked if slots[entry[2]]]
        self.blocked = [entry for entry in self.blocked if not slots[entry[2]]]
        heapq.heapify(self.queue)

    def move(self, slots: int | Sequence[int], state: int) -> None:
        """Move slots to a state that only their owner may set: GENERATING, GENERATED, REWARDED, TRAINING."""
        self.state[slots] = state
        self.changes += 1

    def rewarded(self, slots: Sequence[int], rewards: Sequence[float]) -> None:
        self.reward[slots] = rewards
        self.move(slots, REWARDED)

    def end(self, slots: Sequence[int], fate: str) -> None:
        """Store the fate of each, then free the slots."""
        self.fates[self.uid[slots].astype(np.int64)] = ord(fate)
        self.state[slots] = FREE
        self.free.extend(slots)
        self.changes += 1

    def _wait(self, slot: int, ahead: int, hold: bool) -> None:
        self._order += 1
        heapq.heappush(self.blocked if hold else self.queue, (-self.priority[slot] - ahead, self._order, slot))


# -- the learner ---------------------------------------------------------------------------------------------

@dataclass
class SimulatedGroup:
    lengths: tuple[int, ...]
    rewards: tuple[float, ...]
    since: float  # its arrival, or the time of its opening in a closed loop
    prompt_tokens: int
    left: int
    turns: tuple[Turns, ...] = ()  # of the members, where they are episodes


@dataclass
class Look:
    """The results of a look of the learner: seconds of work, whether slots came free, and the reason of a wait."""

    cost_s: float = 0.0
    freed: bool = False
    fired: bool = False
    publishes: bool = False
    reason: str = "groups"


@dataclass
class Learner:
    """The learner, by the live plan. `groups`: the open ones by draw; the learner removes those that it trains or sets
    aside."""

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
        look = Look()
        actions = self.plan.decide(
            view, list(self.claimed), step=self.step, now=now, next_admission=next_admission, draining=draining,
            aside=self.aside, wave_over=wave_over,
        )
        for action in actions:
            if isinstance(action, SetAside):
                self._set_aside(view, action, look)
            elif isinstance(action, Claim):
                self._claim(view, action)
            elif isinstance(action, Fire):
                self._fire(view, action, now, look)
            else:
                self._wait(action, look)
        return look

    def finish_step(self, now: float) -> bool:
        """End the step under way; returns whether its weights are published with it."""
        assert self._row is not None
        self.step += 1
        self.counts.rows.append(replace(self._row, time_s=now))
        self._row, self.aside = None, 0
        self.plan.trigger.step_ended(now)
        published = self.step % self.topology.publish_every == 0
        if published:
            self.unpublished = 0
        return published

    def rest(self) -> Look:
        """Continue the wait of the last look after some work, if nothing has changed since."""
        look = Look(reason=self._waits.reason)
        self._wait(self._waits, look)
        return look

    def _set_aside(self, view: GroupView, action: SetAside, look: Look) -> None:
        self.ring.end(view.slots_of(action.draw), action.fate)
        self.counts.aside[action.fate] += 1
        del self.groups[action.draw]
        self.aside += 1
        look.cost_s += self.times.learner_group_s
        look.freed = True

    def _claim(self, view: GroupView, action: Claim) -> None:
        for draw in action.draws:
            slots = view.slots_of(draw)
            self.ring.move(slots, TRAINING)
            self.claimed[draw] = slots
            self._pending_tokens += sum(self.groups[draw].lengths)
            self._pending_samples += len(slots)

    def _fire(self, view: GroupView, action: Fire, now: float, look: Look) -> None:
        old: list[int] = ages(view.oldest_step[[view.index(draw) for draw in action.draws]], self.step).tolist()
        slots = [slot for draw in action.draws for slot in self.claimed[draw]]
        lengths = [tokens for draw in action.draws for tokens in self.groups.pop(draw).lengths]
        self._row = StepRow(self.step + 1, now, action.cause.value, len(old), len(slots), sum(lengths))
        self.counts.ages.update(old)
        self.counts.consumed.extend(lengths)
        self.unpublished += len(old)
        self.ring.end(slots, Fate.TRAINED.letter)
        self.claimed.clear()
        look.cost_s += self._micro_batch() + self.times.learner_step_s * self.pace
        self.pace = next(self.paces)
        look.fired = look.freed = True
        if (self.step + 1) % self.topology.publish_every == 0:
            look.cost_s += self.times.publish_s

    def _wait(self, action: Wait, look: Look) -> None:
        """Use the time like the live learner: for a micro-batch, or a publication that admission waits for."""
        self._waits, look.reason = action, action.reason
        few = self._pending_samples < self.topology.learner.micro_batch_min_samples
        if self.plan.streaming and self._pending_samples and not few:
            look.cost_s += self._micro_batch()
        elif publication_is_due(
            self.unpublished, self.step, n_min=self.plan.trigger.n_min, admitted=self.plan.limits.B,
            publish_every=self.topology.publish_every,
        ):
            look.publishes = True
            look.cost_s += self.times.publish_s
            self.unpublished = 0

    def _micro_batch(self) -> float:
        seconds = self.times.learner_token_s * self._pending_tokens * self.pace
        self._pending_tokens = self._pending_samples = 0
        return seconds


# -- policy and predictor ------------------------------------------------------------------------------------

CLOCKS = ("predictor_us_per_prompt", "predictor_us_per_answer")  # not measured here: there is no real clock


class Feed:
    """The policy with its predictor, and its inputs: open groups, finished answers, the learner's steps."""

    def __init__(self, topology: Topology, answers: Answers, oracle: bool) -> None:
        self.answers, self.tokens, self.step = answers, topology.generation.max_new_tokens, 0
        self.predictor: Predictor = Unpredicted()
        if topology.scheduler.predicts:
            self.predictor = capabilities.plug("predict", "unkept")(topology, self._lengths_of, oracle)
        self.policy: Policy = policy_of(topology, self.predictor)
        self._draws, self._lengths = list[int](), list[int]()

    def _lengths_of(self, draw: int) -> Sequence[int]:
        return self.answers.answer(draw, self.step).lengths

    def finished(self, draw: int, tokens: int) -> None:
        if self.policy.learns:
            self._draws.append(draw)
            self._lengths.append(tokens)

    def look(self, view: GroupView, rows: int) -> None:
        """Give the policy the answers since the last look, the open groups, and the rows of all actors."""
        if not self.policy.learns:
            return
        if self._draws:
            self.policy.finished(self._draws, self._lengths)
            self._draws, self._lengths = [], []
        self.policy.look(view.draws.tolist(), (view.running + view.due).tolist(), rows)
        self.policy.take_records()

    def learner(self, step: int, entropy: float) -> None:
        self.step = step
        self.policy.feedback(entropy)

    def metrics(self) -> dict[str, float]:
        """The metrics of policy and predictor; none of a policy that learns nothing."""
        if not self.policy.learns:
            return {}
        metrics = {**self.policy.metrics(), **self.predictor.metrics()}
        return {name: value for name, value in metrics.items() if math.isfinite(value) and name not in CLOCKS}


# -- looks ---------------------------------------------------------------------------------------------------

CHARACTERS_PER_TOKEN = 4  # of a prompt, for the cost of its prefill


class Scheduler:
    """The scheduler, by the live rules. `rows`: sequences that all actors can run at once."""

    def __init__(
        self, topology: Topology, answers: Answers, ring: SimRing, counts: Counts, rows: int, *, oracle: bool
    ) -> None:
        self.limits, self.answers, self.ring, self.counts = topology.derived.limits, answers, ring, counts
        self.size, self.rows, self.ahead = topology.groups.size, rows, topology.scheduler.ahead
        self.admission = Admission(self.limits, topology.weights.over_age)
        self.feed = Feed(topology, answers, oracle)
        self.waves = Waves.of(self.limits)
        self.groups: dict[int, SimulatedGroup] = {}
        slots = topology.derived.train_slots
        self.of: list[tuple[int, int]] = [(-1, -1)] * slots  # slot -> draw, member
        self.to_make: list[int] = [0] * slots  # slot -> tokens still to be generated
        self.next_admission = self.version_step = 0
        self.end: float = math.inf  # the first draw that does not exist
        self.arrival: float = math.inf  # of the next prompt of a stream, if the last look found it too early
        self.starved = False  # the last look could have opened more groups than prompts had arrived
        self._reserve = topology.derived.val_reserve

    def published(self, step: int) -> None:
        """From now on groups are opened under the weights of this step."""
        self.version_step = step

    def look(self, view: GroupView, learner: Learner, now: float) -> int:
        """Dispatch every group that may be dispatched now; returns the number of samples."""
        self.arrival, self.starved = math.inf, False
        self.feed.look(view, self.rows)
        free = len(self.ring.free) + self._reserve
        room = self.admission.room(
            view, unpublished=learner.unpublished, next_admission=self.next_admission, step=learner.step,
            free=free, reserve=self._reserve, wave_over=bool(self.wave_over(view)),
        )
        room = not_ahead(room, self.ahead, view.queued, self.size)
        if room.groups <= 0:
            return 0
        self._offer(view, room.groups, now)
        opened = list(islice(iter(self.feed.policy.next, None), room.groups))
        self.starved = len(opened) < room.groups and self.arrival < math.inf
        for candidate in opened:
            self._open(candidate, learner.step, now)
        return len(opened) * self.size

    def wave_over(self, view: GroupView) -> bool | None:
        """Tell whether the wave is over and no member is still to be dispatched; None without rounds of segments."""
        if self.waves is None:
            return None
        return not view.due.any() and self.waves.over(self.ring.lines, self.next_admission)

    def _offer(self, view: GroupView, groups: int, now: float) -> None:
        policy, offered = self.feed.policy, []
        for draw in policy.missing(view.unopened(policy.horizon + groups)):
            task = self.answers.prompt(draw)
            if task is None:
                self.end = min(self.end, draw)
                break
            if task.arrival_s is not None and task.arrival_s > now:
                self.arrival = task.arrival_s
                break
            offered.append(Candidate(draw, task.prompt, self.feed.tokens, task.tag))
        policy.offer(offered)

    def _open(self, candidate: Candidate, step: int, now: float) -> None:
        draw = candidate.draw
        answer, task = self.answers.answer(draw, step), self.answers.prompt(draw)
        since = now if task is None or task.arrival_s is None else task.arrival_s
        tokens = 1 + len(candidate.prompt) // CHARACTERS_PER_TOKEN
        self.groups[draw] = SimulatedGroup(answer.lengths, answer.rewards, since, tokens, self.size, answer.turns)
        self.counts.drawn.extend(answer.lengths)
        index, self.next_admission = self.next_admission, self.next_admission + 1
        priority = self.feed.policy.priority(draw, index)
        slots = self.ring.dispatch(draw, self.size, index, self.version_step, priority, self.waves is not None)
        for member, slot in enumerate(slots):
            self.of[slot] = (draw, member)
            self.to_make[slot] = answer.lengths[member]
