"""A simulated run: the event queue, the virtual clock, and the times at which each part looks.

Drives the objects of the live roles (GroupScanner, Admission, the policy, LearnerPlan) over a ring in memory. Durations
come from `Times`, samples from `Answers`. Knows nothing of files, tables or the command line.

- The clock never goes back; the same arguments give the same run, event for event.
- As in a live run, the scheduler looks after slots came free or a version was published, the learner after a group was
  resolved.
- Rewards are delivered on a grid of `grid_s` (0: each at its own time), which bounds the looks of a large run.
- A trace may repeat for ever, and so may groups that train nothing: too many in a row end the run with the reason.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable

import numpy as np

from busrl.errors import UserError
from busrl.scheduling.admission import SegmentPlan
from busrl.scheduling.groups import GENERATED, GroupScanner, GroupView
from busrl.scheduling.plan import checkpoint_is_due, make_plan
from busrl.simulate.actors import Actors, RewardWorkers, Times, delays, noise, reward_workers
from busrl.simulate.answers import Answers
from busrl.simulate.figures import Counts, Figures
from busrl.simulate.roles import Learner, Look, Scheduler, SimRing
from busrl.states import Fate
from busrl.topology import Topology

FATES = {Fate.FLAT.letter: "flat", Fate.OLD.letter: "too old", Fate.INCOMPLETE.letter: "incomplete"}
# Flat groups in a row, and in steps of n_min, that end a run: with 99 % flat ones it happens once in 10^8 groups.
LEAST_FLAT, FLAT_STEPS = 2000, 50
TICK_S = 0.03  # mean time until the scheduler's next tick, at which it sees slots that came free without a message
SMALL_RING = 2048  # slots; above, rewards are delivered on a grid
LOOKS_PER_ANSWER = 25  # grid points in the time of a mean answer
EVENTS_WATCHED = 4096  # between two calls of `watch`
ENTROPY = 1.0  # the simulated learner's; a constant, since nothing is learned


# Kinds of events, in the order in which those of one instant are handled. Plain numbers: there are millions.
ACTOR, TOOL, REWARD, LEARNER, SCHEDULER, DEADLINE = range(6)


class World:
    """A run of `steps` optimiser steps; `run` plays it to the end."""

    def __init__(
        self, topology: Topology, times: Times, answers: Answers, *, actors: int, steps: int, seed: int = 0,
        oracle: bool = False, grid_s: float | None = None,
    ) -> None:
        derived = topology.derived
        self.topology, self.times, self.answers, self.steps = topology, times, answers, steps
        self.limits, self.limit = derived.limits, topology.generation.max_new_tokens
        self.ring = SimRing(derived.train_slots, topology.groups.size)
        self.scanner = GroupScanner(self.ring.fates, topology.groups.size, horizon=derived.horizon)
        self.actors = Actors(actors, topology.generation.max_batch, times, seed)
        self.counts = Counts()
        rows = actors * topology.generation.max_batch
        self.scheduler = Scheduler(topology, answers, self.ring, self.counts, rows, oracle=oracle)
        self.feed, self.groups = self.scheduler.feed, self.scheduler.groups
        plan = make_plan(topology, streamable=":" not in topology.learner.loss)  # a user's own loss is not loaded here
        paces = noise(times.learner_spread, [seed, 4])
        self.learner = Learner(topology, plan, times, self.ring, self.counts, paces, self.groups)
        self.cuts = SegmentPlan(topology.segments.length, topology.segments.max_segments, self.limit)
        self._trained = 0  # groups
        self._running = 0  # sequences of all actors
        self._flat = 0  # groups in a row whose members all have one reward
        self.now = 0.0
        self._heap: list[tuple[float, int, int, int, int]] = []
        self._sequence = 0
        self._member_of, self._to_make = self.scheduler.of, self.scheduler.to_make
        self._segment: list[int] = [0] * derived.train_slots  # slot -> tokens of the segment under way
        self._turn: list[int] = [0] * derived.train_slots  # slot -> number of the call under way
        self.in_tools = 0  # episodes between two calls
        self._kept_s = topology.prefix_keep_s if topology.keeps_prefixes else -1.0
        self._due: dict[float, list[int]] = {}  # reward time -> slots
        self._delays = delays(times.reward_s, [seed, 2])
        self._reward_workers = RewardWorkers(reward_workers(topology), times.reward_call_s)
        self._grid = _default_grid(topology, times, answers) if grid_s is None else grid_s
        self._view: GroupView | None = None
        self._view_of = -1
        self._busy = self._fired = self._done = False
        self._resolved = True
        self._looked_for = ("start", 0.0)
        self._deadline = math.inf
        self._next_look = math.inf
        self._looked_at = 0.0  # by the scheduler

    # -- the clock ----------------------------------------------------------------------------------------------

    def run(self, watch: Callable[[World], None] | None = None) -> Figures:
        """Play to the end; the figures of the whole run. `watch` is called every EVENTS_WATCHED events."""
        self.learner.plan.trigger.step_ended(0.0)
        self._schedule_look(0.0)
        self._learner_looks()
        while self._heap and not self._done:
            for _ in range(EVENTS_WATCHED):
                time, kind, _, subject, stamp = heapq.heappop(self._heap)
                self.now = time if time > self.now else self.now
                self.handle(kind, time, subject, stamp)
                if self._done or not self._heap:
                    break
            if watch is not None:
                watch(self)
        if not self._done and not self._draining():
            raise _stuck(self, self._looked_for[0])
        self.actors.settle(self.now)
        every = self.actors.all
        steps = sum(actor.steps for actor in every)
        busy, stalled = [actor.busy_s for actor in every], [actor.stalled_s for actor in every]
        return Figures(
            self.counts, self.now, busy, stalled, steps, reward_busy_s=self._reward_workers.busy_s(self.now),
            metrics=self.feed.metrics(),
        )

    def handle(self, kind: int, time: float, subject: int, stamp: int) -> None:
        if kind == ACTOR:
            self._actor(subject, stamp)
        elif kind == REWARD:
            self._reward(time)
        elif kind == TOOL:
            self._tool_done(subject)
        elif kind == LEARNER:
            self._learner_done()
        elif kind == SCHEDULER:
            if time >= self._next_look:
                self._next_look = math.inf
                self._dispatch()
        elif time >= self._deadline and not self._busy:
            self._deadline = math.inf
            self._learner_looks()

    def _push(self, time: float, kind: int, subject: int = 0, stamp: int = 0) -> None:
        self._sequence += 1
        heapq.heappush(self._heap, (time, kind, self._sequence, subject, stamp))

    def view(self) -> GroupView:
        """The open groups now; computed again only after a change."""
        if self._view is None or self._view_of != self.ring.changes:
            self.scanner.read_from(self.ring.fates)
            self._view, self._view_of = self.scanner.scan(self.ring.lines), self.ring.changes
        return self._view

    # -- scheduler ----------------------------------------------------------------------------------------------

    def _schedule_look(self, time: float) -> None:
        """Let the scheduler look at that time, unless it looks earlier."""
        if time < self._next_look:
            self._next_look = time
            self._push(time, SCHEDULER)

    def _dispatch(self) -> None:
        scheduler = self.scheduler
        self.counts.starved_s += self.now - self._looked_at if scheduler.starved else 0.0
        self._looked_at = self.now
        sent = scheduler.look(self.view(), self.learner, self.now)
        if scheduler.arrival < math.inf:
            self._schedule_look(scheduler.arrival)
        if sent:
            self._begin_wave()
            self._feed_actors()

    # -- rounds of segments -------------------------------------------------------------------------------------

    def _begin_wave(self) -> None:
        """Let actors take the slots that get a segment in this wave, once its round is whole."""
        if (waves := self.scheduler.waves) is not None:
            self.ring.allow(waves.claimable(self.ring.lines, self.scheduler.next_admission))

    def _end_wave(self) -> None:
        """Let scheduler and learner look if the last segment of a wave has ended."""
        waves = self.scheduler.waves
        if waves is None or self._running or self._due:
            return
        if not waves.over(self.ring.lines, self.scheduler.next_admission):
            return
        self._schedule_look(self.now)
        self._resolved = True
        if not self._busy:
            self._learner_looks()

    # -- actors -------------------------------------------------------------------------------------------------

    def _feed_actors(self) -> None:
        """Let actors with room take queued slots, the longest idle first."""
        while self.ring.queue and (index := self.actors.waiting()) is not None:
            self._take(index)

    def _take(self, index: int) -> None:
        slots = self.ring.take(self.actors.rows - self.actors.all[index].active)
        joining, prefill, drawn, queued = [], 0, set[int](), self.counts.queued
        for slot in slots:
            draw, member = self._member_of[slot]
            group, left = self.groups[draw], self._to_make[slot]
            before = group.lengths[member] - left
            if not before:
                queued.append(self.now - group.since)
            # Equal prompts are prefilled once; with what earlier segments made they are no longer equal.
            if group.turns:
                turn = self._turn[slot] = self._turn[slot] + 1 if before else 0
                self._segment[slot] = group.turns[member][turn][0]
                if before and group.turns[member][turn - 1][1] <= self._kept_s:
                    before = -group.prompt_tokens  # its engine still has all of it
            prefill += before + (group.prompt_tokens if before or draw not in drawn else 0)
            drawn.add(draw)
            if not group.turns:
                cut = self.cuts.next(int(self.ring.segs[slot]), self.limit - before)
                self._segment[slot] = min(cut.tokens, left)
            joining.append((slot, self._segment[slot]))
        self._running += len(joining)
        self._next(index, self.actors.add(index, self.now, joining, prefill))
        if slots and self.scheduler.ahead:
            self._schedule_look(self.now + max(TICK_S, self._grid))

    def _next(self, index: int, time: float) -> None:
        if time < math.inf:
            self._push(time, ACTOR, index, self.actors.all[index].stamp)

    def _actor(self, index: int, stamp: int) -> None:
        """End the sequences of an actor that end now, unless new weights or new sequences came in between."""
        if stamp != self.actors.all[index].stamp:
            return
        done = self.actors.finish(index, self.now)
        self._running -= len(done or ())
        for slot in done or ():
            self._ended(slot)
        if done and self.ring.queue:
            self._take(index)
            self._feed_actors()
        else:
            self.actors.sort_in(index)
            self._next(index, self.actors.next_event(index))
        if done:
            self._end_wave()

    def _ended(self, slot: int) -> None:
        tokens, (draw, member) = self._segment[slot], self._member_of[slot]
        self._to_make[slot] -= tokens
        self.counts.generated += tokens
        if turns := self.groups[draw].turns:
            self.in_tools += 1
            self._push(self.now + turns[member][self._turn[slot]][1], TOOL, slot)
        elif self._to_make[slot]:
            self.ring.release(slot, hold=self.scheduler.waves is not None)
        else:
            self._answered(slot)

    def _tool_done(self, slot: int) -> None:
        """Continue an episode after the tools of a turn; its agent has held the slot meanwhile."""
        self.in_tools -= 1
        if self._to_make[slot]:
            self.ring.release(slot)
            self._feed_actors()
        else:
            self._answered(slot)

    def _answered(self, slot: int) -> None:
        self.ring.move(slot, GENERATED)
        self._complete(*self._member_of[slot])
        due = self._reward_workers.done(self.now + next(self._delays))
        due = math.ceil(due / self._grid) * self._grid if self._grid else due
        if due not in self._due:
            self._due[due] = []
            self._push(due, REWARD)
        self._due[due].append(slot)

    def _complete(self, draw: int, member: int) -> None:
        """Give the length of a complete answer to policy and segments."""
        tokens = self.groups[draw].lengths[member]
        self.feed.finished(draw, tokens)
        if (auto := self.cuts.auto) is not None:
            auto.finished([tokens])
            auto.costs(self.times.weights_s, self.times.decoding(self.actors.rows)[-1])
            auto.choose()

    # -- rewards ------------------------------------------------------------------------------------------------

    def _reward(self, time: float) -> None:
        slots = self._due.pop(time)
        rewards = []
        for slot in slots:
            draw, member = self._member_of[slot]
            group = self.groups[draw]
            rewards.append(group.rewards[member])
            self.counts.completed.append(self.now - group.since)
            group.left -= 1
            if not group.left:
                self._resolved = True
                self.counts.grouped.append(self.now - group.since)
                self._flat = self._flat + 1 if len(set(group.rewards)) == 1 else 0
                if self._flat >= max(LEAST_FLAT, FLAT_STEPS * self.limits.n_min) and not self._draining():
                    raise _all_flat(self, self._flat)
        self.counts.ended += len(slots)
        self.ring.rewarded(slots, rewards)
        if self._resolved and not self._busy:
            self._learner_looks()
        self._end_wave()

    # -- learner ------------------------------------------------------------------------------------------------

    def _learner_looks(self) -> None:
        """Let the learner look; a look with work is followed by another when the work is done."""
        reason, since = self._looked_for
        self.counts.waited[reason] += self.now - since
        self._resolved = False
        view, scheduler = self.view(), self.scheduler
        self._act(self.learner.look(
            view, self.now, scheduler.next_admission, self._draining(), scheduler.wave_over(view)
        ))

    def _act(self, look: Look) -> None:
        """Apply the results of a look, and let the time of its work pass."""
        self._looked_for = (look.reason, self.now)
        self.counts.learner_busy_s += look.cost_s
        if look.freed:
            self._schedule_look(self.now + max(TICK_S, self._grid))
        if look.publishes:
            self._publish()
        if look.fired or look.cost_s:
            self._busy, self._fired = True, look.fired
            self._push(self.now + look.cost_s, LEARNER)
        else:
            self._watch_deadline()

    def _draining(self) -> bool:
        """Tell whether a stream has come to its end: every prompt was opened."""
        return self.scheduler.next_admission >= self.scheduler.end

    def _watch_deadline(self) -> None:
        rest = self.learner.plan.trigger.deadline_s(self.now)
        if rest < math.inf and rest > 0:
            self._deadline = self.now + rest
            self._push(self._deadline, DEADLINE)

    def _learner_done(self) -> None:
        """End a piece of the learner's work: a step, a micro-batch, or a publication."""
        self._busy = False
        if self._fired:
            self._fired = False
            if self.learner.finish_step(self.now):
                self._publish()
            if self.learner.step >= self.steps:
                self._done = True
                return
            self.feed.learner(self.learner.step, ENTROPY)
            self._schedule_look(self.now)
            self._resolved = True
            if self._checkpoint():
                return
        self._looked_for = (self._looked_for[0], self.now)
        if self._resolved:
            self._learner_looks()
        else:
            self._act(self.learner.rest())

    def _checkpoint(self) -> bool:
        """Begin a checkpoint if one is due after this step; returns whether the learner is busy with it."""
        groups = self.counts.rows[-1].groups
        self._trained += groups
        due = checkpoint_is_due(self.topology, self.learner.step, self._trained, groups)
        if not due or not self.times.checkpoint_s:
            return False
        self._busy = True
        self.counts.learner_busy_s += self.times.checkpoint_s
        self._push(self.now + self.times.checkpoint_s, LEARNER)
        return True

    def _publish(self) -> None:
        self.scheduler.published(self.learner.step)
        self.actors.published.append(self.now)
        self._schedule_look(self.now)


def _default_grid(topology: Topology, times: Times, answers: Answers) -> float:
    """Seconds between two deliveries of rewards; 0 for a small ring, where each is delivered by itself."""
    if topology.derived.train_slots <= SMALL_RING:
        return 0.0
    draws = [draw for draw in range(64) if answers.prompt(draw) is not None]
    length = float(np.mean([np.mean(answers.answer(draw, 0).lengths) for draw in draws]))
    return length * times.decoding(topology.generation.max_batch)[-1] / LOOKS_PER_ANSWER


def _stuck(world: World, reason: str) -> UserError:
    gone = ", ".join(f"{count} {FATES.get(fate, fate)}" for fate, count in world.counts.aside.items()) or "none"
    return UserError(
        f"the simulated run stands still at step {world.learner.step} after {world.now:.1f} s: the learner waits for "
        f"{reason}, {len(world.groups)} groups are open, and nothing is under way (groups set aside: {gone}); are all "
        "groups flat (simulate.flat_share, rewards of the trace), or is learner.trigger.n_min above what can be "
        "admitted?"
    )


def _all_flat(world: World, groups: int) -> UserError:
    share = world.topology.simulate.flat_share
    return UserError(
        f"the simulated run does not get on: after step {world.learner.step}, at {world.now:.1f} s, {groups} groups in "
        "a row ended with equal rewards for all their members, and such a group trains nothing; correct the rewards of "
        f"the {world.answers.name}" + (f", or lower simulate.flat_share = {share:g}" if share else "")
    )
