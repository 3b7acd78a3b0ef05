"""Learners and players of several models in memory: real rings, fates, admission and plans, and no tensors."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np
from openings import SIZE, Model, opening

from busrl.scheduling.admission import Staleness
from busrl.scheduling.trigger import Claim, Fire, LearnerPlan, SetAside, Trigger
from busrl.states import Fate, HeaderWord, State, place_of

Rewards = Callable[[random.Random, int], list[list[float | None]]]  # by model and seat; None: the seat was not used


class Learner:
    """Trains the groups of one model by its plan; publishes each step at once."""

    def __init__(self, model: Model) -> None:
        limits = model.topology.derived.limits
        self.model, self.step, self.oldest = model, 0, 0
        self.aside, self.trained = Counter[str](), Counter[int]()  # groups by fate; trained groups by seat
        self.plan = LearnerPlan(
            limits, Trigger(limits.n_min, sync=limits.sync), Staleness(limits.max_staleness), streaming=False)
        self.scanner = model.scanner

    def look(self) -> None:
        ring = self.model.ring
        lines = ring.lines()
        self.scanner.read_from(self.model.fates.view())
        view = self.scanner.scan(lines)
        admitted = ring.header(HeaderWord.NEXT_ADMISSION)
        for action in self.plan.decide(view, [], step=self.step, now=0.0, next_admission=admitted):
            if isinstance(action, SetAside):
                self.aside[action.fate] += 1
                for slot in view.slots_of(action.draw):
                    assert ring.drop(slot, int(lines["word"][slot]), action.fate)
            elif isinstance(action, Fire):
                self._train(action.draws, [view.slots_of(group) for group in action.draws], lines)
            else:
                assert not isinstance(action, Claim) or action.draws

    def _train(self, groups: Sequence[int], slots: Sequence[Sequence[int]], lines: np.ndarray) -> None:
        ring = self.model.ring
        self.trained.update(group % self.model.seats for group in groups)
        for slot in [slot for of_group in slots for slot in of_group]:
            self.oldest = max(self.oldest, self.step - int(lines["step"][slot]))
            word = ring.claim(slot, int(lines["word"][slot]), State.TRAINING)
            assert word and ring.finish(slot, word, Fate.TRAINED.letter)
        self.step += 1
        for name in (HeaderWord.STEP, HeaderWord.VERSION_STEP, HeaderWord.VERSION):
            ring.set_header(name, self.step)


class Game:
    """Episodes of some models: draws are opened, episodes end in random order, learners look now and then."""

    def __init__(self, models: Sequence[Model], rewards: Rewards, seed: int = 0, slow: dict[int, int] | None = None):
        self.models, self.rewards, self.dice = models, rewards, random.Random(seed)
        self.learners = [Learner(model) for model in models]
        self.opening, self.slow, self.turn = opening(*models), slow or {}, 0
        self.waits = Counter[str]()
        self.apart = 0

    def play(self, steps: int, turns: int = 100_000) -> None:
        """Until every learner has made so many steps."""
        while min(learner.step for learner in self.learners) < steps:
            self.turn += 1
            assert self.turn < turns, f"stuck: {[(one.step, one.aside) for one in self.learners]}, {self.waits}"
            view, lines = self.models[0].scan()
            room = self.opening.open(view, lines, 1 << 40)
            self.waits[room.reason] += 1
            self._end_some()
            for at, learner in enumerate(self.learners):
                if self.turn % self.slow.get(at, 1) == 0:
                    learner.look()
            made = [learner.step for learner in self.learners]
            self.apart = max(self.apart, max(made) - min(made))

    def _end_some(self) -> None:
        """Some of the episodes end, each with all the sides that are queued, followers first."""
        lead = self.models[0].ring.lines()
        uids = sorted(int(uid) for uid in lead["uid"][lead["state"] == State.QUEUED])
        first = [uid for uid in uids if place_of(uid, SIZE)[0] % self.models[0].seats == 0]
        for uid in self.dice.sample(first, min(len(first), 8)):
            group, attempt, member = place_of(uid, SIZE)
            self._end(group // self.models[0].seats, attempt, member)

    def _end(self, draw: int, attempt: int, member: int) -> None:
        for model, rewards in reversed([*zip(self.models, self.rewards(self.dice, draw))]):
            for seat in reversed(range(model.seats)):
                uid = (((draw * model.seats + seat) * 2) + attempt) * SIZE + member
                reward = rewards[seat]
                if reward is None:
                    model.end(uid, Fate.UNUSED.letter)
                else:
                    model.reward(uid, reward)
