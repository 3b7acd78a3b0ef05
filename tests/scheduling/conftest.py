"""A closed loop in memory: the real scheduling classes around a pretended ring, with deaths, accidents and re-rolls.

It keeps the ledger's rules (fates before slots are freed, unpublished counted before slots are freed) and nothing else;
every decision is the package's own.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import numpy as np
import pytest

from busrl.predict.lengths import RulesPredictor
from busrl.scheduling.admission import Admission, Staleness, derive, not_ahead
from busrl.scheduling.dispatch import make_policy
from busrl.scheduling.groups import UNKNOWN, FinishedAnswers, GroupScanner, GroupView
from busrl.scheduling.predictor import Candidate
from busrl.scheduling.trigger import Cause, Claim, Fire, LearnerPlan, SetAside, Trigger
from busrl.states import uid_of

FREE, QUEUED, GENERATING, REWARDED, TRAINING = 0, 2, 3, 6, 7
LINE = np.dtype([("state", "u1"), ("segs", "u1"), ("cls", "u4"), ("uid", "u8"), ("admission", "u8"), ("step", "u4"),
                 ("reward", "f8"), ("finish", "u2"), ("response_tokens", "u4"), ("priority", "i4")])
DRAWS = 4096


@dataclass
class Table:
    """Ring lines and fates, and the few operations on them that tests need."""

    group_size: int
    slots: int
    lines: np.ndarray = field(init=False)
    fates: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        self.lines = np.zeros(self.slots, LINE)
        self.fates = np.zeros(DRAWS * 2 * self.group_size, np.uint8)

    @property
    def free(self) -> int:
        return int(np.count_nonzero(self.lines["state"] == FREE))

    def put(self, draw: int, member: int, *, attempt: int = 0, state: int = QUEUED, admission: int | None = None,
            step: int = 0, reward: float = 0.0, segs: int = 0, cls: int = 0, priority: int = 0) -> int:
        """Dispatch a member into the first free slot, already in `state`."""
        slot = int(np.argmin(self.lines["state"] != FREE))
        assert self.lines["state"][slot] == FREE, "the ring is full"
        uid = uid_of(draw, attempt, member, self.group_size)
        self.fates[uid] = ord("D")
        index = draw if admission is None else admission
        self.lines[slot] = (state, segs, cls, uid, index, step, reward, 0, 0, priority)
        return slot

    def put_group(self, draw: int, rewards: list[float], **line: int) -> list[int]:
        return [self.put(draw, m, state=REWARDED, reward=r, **line) for m, r in enumerate(rewards)]

    def end(self, slot: int, fate: str) -> None:
        """Store a fate, then free the slot."""
        self.fates[int(self.lines["uid"][slot])] = ord(fate)
        self.lines["state"][slot] = FREE

    def view(self) -> GroupView:
        return GroupScanner(self.fates, self.group_size).scan(self.lines.copy())


class ClosedLoop:
    """Scheduler, workers and one learner around a Table. Each `tick` does a few random things that are possible."""

    def __init__(self, seed: int, *, mode: str = "batch-async", n_min: int = 4, staleness: int = 2, group_size: int = 4,
                 over_age: str = "wait", streaming: bool = True, policy: str = "fifo", t_max_s: float = float("inf"),
                 accidents: float = 0.05, flats: float = 0.2, deaths: float = 0.02, lag: float = 0.0,
                 publish_every: int = 1, slots: int = 0, checked: bool = True, rows: int = 0,
                 ahead: int = 0, n_lo: int | None = None, n_hi: int | None = None) -> None:
        self.random = random.Random(seed)
        self.limits = derive(mode, n_min, staleness, group_size, n_lo, n_hi)
        assert not self.limits.problems()
        self.table = Table(group_size, slots or self.limits.train_slots)
        self.admission = Admission(self.limits, over_age)
        self.policy_name, self.accidents, self.flats, self.deaths, self.lag = policy, accidents, flats, deaths, lag
        self.horizon = 2 * n_min
        self.trigger = Trigger(n_min, self.limits.n_floor, t_max_s, sync=self.limits.sync)
        staleness_rule = Staleness(self.limits.max_staleness if checked else None, over_age)
        self.plan = LearnerPlan(self.limits, self.trigger, staleness_rule, streaming=streaming)
        self.publish_every = publish_every
        self.ahead = ahead
        self.rows = rows  # 0: any number, taken in any order
        self.next_admission = self.step = self.published = self.unpublished = 0
        self.claimed: list[int] = []
        self.trained: list[int] = []
        self.ages: list[int] = []
        self.trained_after: list[int] = []  # so many finished steps, of each group
        self.fired: list[tuple[str, int]] = []
        self.opened: list[int] = []
        self.now = 0.0
        self.start_scheduler()
        self.start_learner()

    def start_scheduler(self) -> None:
        self.scanner = GroupScanner(self.table.fates, self.table.group_size, horizon=self.horizon)
        rounds = self.limits.n_min if self.limits.sync else 0
        self.policy = make_policy(
            self.policy_name, self.horizon, RulesPredictor(), round_groups=rounds, window=self.limits.W,
            group_size=self.limits.group_size,
        )
        self.answers = FinishedAnswers()

    def start_learner(self) -> None:
        """A new learner: what the old one had claimed is rewarded again."""
        training = self.table.lines["state"] == TRAINING
        self.table.lines["state"][training] = REWARDED
        self.claimed = []
        self.learner_scanner = GroupScanner(self.table.fates, self.table.group_size, horizon=self.horizon)

    def resume_with(self, mode: str, n_min: int, staleness: int, over_age: str) -> None:
        """A start with other limits, in the ring that is there."""
        self.limits = derive(mode, n_min, staleness, self.table.group_size)
        self.admission = Admission(self.limits, over_age)
        self.trigger = Trigger(n_min, self.limits.n_floor, sync=self.limits.sync)
        rule = Staleness(self.limits.max_staleness, over_age)
        self.plan = LearnerPlan(self.limits, self.trigger, rule, streaming=self.plan.streaming)
        self.publish()
        self.start_scheduler()
        self.start_learner()

    # -- one thing at a time --------------------------------------------------------------------------------------

    def tick(self, straggler: int | None = None) -> bool:
        """Scheduler and learner look, then some samples move. False if nothing at all could happen: a deadlock."""
        self.now += 1.0
        moved = self.schedule() | self.learn()
        for _ in range(self.random.choice((1, 1, 4, 16))):
            moved |= self.work(straggler)
        if self.random.random() < self.deaths:
            self.start_scheduler()
        if self.random.random() < self.deaths:
            self.start_learner()
        return moved

    def schedule(self) -> bool:
        view = self.scanner.scan(self.table.lines.copy())
        self.tell(view)
        return self.finish_open(view) + self.open_groups(view) > 0

    def tell(self, view: GroupView) -> None:
        """What the policy is told at each look."""
        self.policy.adopt([prompt_of(draw) for draw in self.policy.unknown(view.draws.tolist())])
        uids, tokens = self.answers.look(self.table.lines)
        self.policy.finished((uids // (2 * self.table.group_size)).tolist(), tokens.tolist())
        self.policy.look(view.draws.tolist(), (view.running + view.due).tolist(), self.rows)

    def finish_open(self, view: GroupView) -> int:
        sent = 0
        for todo in view.todo:
            if not self.table.free:
                break
            admission = max(0, self.next_admission - 1) if todo.admission == UNKNOWN else todo.admission
            self.table.put(todo.draw, todo.member, attempt=todo.attempt, admission=admission, step=self.published,
                           priority=self.policy.priority(todo.draw, admission))
            sent += 1
        return sent

    def open_groups(self, view: GroupView) -> int:
        room = self.admission.room(view, unpublished=self.unpublished, next_admission=self.next_admission,
                                   step=self.step, free=view.free_slots)
        room = not_ahead(room, self.ahead, view.queued, self.table.group_size)
        missing = self.policy.missing(view.unopened(self.horizon + room.groups))
        self.policy.offer([prompt_of(draw) for draw in missing])
        sent = 0
        for _ in range(room.groups):
            candidate = self.policy.next()
            assert candidate is not None
            admission = self.take_admission()
            self.opened.append(candidate.draw)
            for member in range(self.table.group_size):
                self.table.put(candidate.draw, member, admission=admission, step=self.published,
                               priority=self.policy.priority(candidate.draw, admission))
                sent += 1
                if self.random.random() < self.deaths / 8:
                    self.start_scheduler()  # killed in the middle of a group: a successor finishes it
                    return sent
        return sent

    def take_admission(self) -> int:
        self.next_admission += 1
        return self.next_admission - 1

    def work(self, straggler: int | None = None) -> bool:
        """Begin, end, lose or break one random sample, never one of the group `straggler`."""
        lines = self.table.lines
        busy = np.flatnonzero((lines["state"] == QUEUED) | (lines["state"] == GENERATING))
        if straggler is not None:
            busy = busy[lines["uid"][busy] // (2 * self.table.group_size) != straggler]
        if self.rows:
            busy = self.within_rows(busy)
        if not len(busy):
            return False
        slot = int(self.random.choice(busy.tolist()))
        if lines["state"][slot] == QUEUED:
            late = self.random.random() < self.lag
            lines["state"][slot], lines["step"][slot] = GENERATING, max(0, self.published - late)
        elif self.random.random() < self.deaths:
            lines["state"][slot] = QUEUED
        elif self.random.random() < self.accidents:
            self.table.end(slot, self.random.choice("PRHMX"))
        else:
            lines["state"][slot] = REWARDED
            lines["finish"][slot], lines["response_tokens"][slot] = 1, self.random.randint(1, 64)
            draw = int(lines["uid"][slot]) // (2 * self.table.group_size)
            flat = random.Random(draw).random() < self.flats
            lines["reward"][slot] = 1.0 if flat else self.random.random()
        return True

    def within_rows(self, busy: np.ndarray) -> np.ndarray:
        """What may move when there are `rows` rows: what has one, and the best that waits if one is free."""
        lines = self.table.lines
        running = busy[lines["state"][busy] == GENERATING]
        waiting = busy[lines["state"][busy] == QUEUED]
        if len(running) >= self.rows or not len(waiting):
            return running
        order = np.lexsort((lines["uid"][waiting], lines["admission"][waiting], -lines["priority"][waiting]))
        return np.append(running, waiting[order[0]])

    def learn(self) -> bool:
        """Carry out what the plan says. Publishes every `publish_every` steps, or when nothing is on its way."""
        view = self.learner_scanner.scan(self.table.lines.copy())
        actions = self.plan.decide(view, self.claimed, step=self.step, now=self.now,
                                   next_admission=self.next_admission)
        for action in actions:
            if isinstance(action, SetAside):
                for slot in view.slots_of(action.draw):
                    self.table.end(slot, action.fate)
            elif isinstance(action, Claim):
                self.claim(view, action)
            elif isinstance(action, Fire):
                self.fire(view, action)
            elif action.group is None and self.unpublished:
                self.publish()
                return True
        return len(actions) > 1 or isinstance(actions[-1], Fire)

    def claim(self, view: GroupView, action: Claim) -> None:
        for draw in action.draws:
            assert draw not in self.claimed
            slots = view.slots_of(draw)
            assert len(slots) >= self.limits.g_min
            assert all(self.table.lines["state"][slot] == REWARDED for slot in slots)
            self.table.lines["state"][slots] = TRAINING
            self.claimed.append(draw)

    def fire(self, view: GroupView, action: Fire) -> None:
        assert sorted(action.draws) == sorted(self.claimed)
        for draw in action.draws:
            assert draw not in self.trained, "trained twice"
            self.trained.append(draw)
            self.ages.append(self.step - int(view.oldest_step[view.index(draw)]))
            self.trained_after.append(self.step)
        self.unpublished += len(action.draws)
        for slot in np.flatnonzero(self.table.lines["state"] == TRAINING):
            self.table.end(int(slot), "T")
        self.claimed = []
        self.step += 1
        self.fired.append((Cause(action.cause).value, len(action.draws)))
        self.trigger.step_ended(self.now)
        if self.step % self.publish_every == 0:
            self.publish()

    def publish(self) -> None:
        self.published, self.unpublished = self.step, 0


def prompt_of(draw: int) -> Candidate:
    return Candidate(draw, "x" * (draw * 7919 % 97), 64)


@pytest.fixture(scope="session")
def table() -> type[Table]:
    return Table


@pytest.fixture(scope="session")
def closed_loop() -> type[ClosedLoop]:
    return ClosedLoop
