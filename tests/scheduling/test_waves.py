"""Rounds of segments in the closed loop: every unfinished answer gets one segment a wave, whoever dies meanwhile."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from busrl.scheduling.admission import Admission, Staleness, Waves, derive
from busrl.scheduling.trigger import LearnerPlan

pytestmark = pytest.mark.long

QUEUED, GENERATING, REWARDED = 2, 3, 6


@pytest.fixture(scope="session")
def wave_loop(closed_loop: Any) -> Any:
    class WaveLoop(closed_loop):  # type: ignore[misc, valid-type]
        """Members have random numbers of segments; the rest is the loop of the other modes."""

        def __init__(self, seed: int, n_min: int, most: int, end: float, **more: Any) -> None:
            super().__init__(seed, mode="sync", n_min=n_min, slots=n_min * most * 4, **more)
            self.most, self.end, self.waves = most, end, Waves(n_min)
            self.limits = derive("sync", n_min, 0, 4, waves=most)
            assert not self.limits.problems() and self.limits.train_slots == self.table.slots
            self.admission = Admission(self.limits)
            self.plan = LearnerPlan(self.limits, self.trigger, Staleness(self.limits.max_staleness), streaming=True)
            room, decide = self.admission.room, self.plan.decide
            self.admission.room = lambda view, **k: room(view, wave_over=self.over(), **k)
            self.plan.decide = lambda view, *a, **k: decide(
                view, *a, wave_over=self.over() and not view.due.any(), **k
            )

        def over(self) -> bool:
            return self.waves.over(self.table.lines, self.next_admission)

        def work(self, straggler: int | None = None) -> bool:
            lines = self.table.lines
            may = self.waves.claimable(lines, self.next_admission)
            busy = np.flatnonzero(may | (lines["state"] == GENERATING))
            if not len(busy):
                return False
            slot = int(self.random.choice(busy.tolist()))
            if lines["state"][slot] == QUEUED:
                lines["state"][slot] = GENERATING
                if not lines["segs"][slot]:
                    lines["step"][slot] = self.published
            elif self.random.random() < self.deaths:
                lines["state"][slot] = QUEUED
            elif self.random.random() < self.accidents:
                self.table.end(slot, self.random.choice("PRHMX"))
            else:
                lines["segs"][slot] += 1
                whole = lines["segs"][slot] == self.most or self.random.random() < self.end
                lines["state"][slot] = REWARDED if whole else QUEUED
                lines["reward"][slot] = self.random.random()
            return True

        def open_groups(self, view: Any) -> bool:
            before = self.next_admission
            if not before % self.limits.n_min and (room := self.admission.room(
                view, unpublished=self.unpublished, next_admission=before, step=self.step, free=self.table.free
            )).groups:
                assert room.groups == self.limits.n_min, "a round is admitted whole"
                assert self.over() and not self.unpublished and not view.resolved.any()
            return bool(super().open_groups(view))

        def fire(self, view: Any, action: Any) -> None:
            assert self.over(), "a step in the middle of a wave"
            super().fire(view, action)

    return WaveLoop


@settings(max_examples=15)
@given(
    seed=st.integers(0, 2**20), n_min=st.integers(1, 5), most=st.integers(1, 6), end=st.floats(0.0, 1.0),
    accidents=st.sampled_from([0.0, 0.05, 0.2]), deaths=st.sampled_from([0.0, 0.02]),
    ahead=st.sampled_from([0, 1, 4, 30]),
)
@example(seed=0, n_min=2, most=2, end=0.0, accidents=0.0, deaths=0.0, ahead=1)  # less than a round, and than a group
def test_waves_never_stop_and_train_each_group_once_within_its_segment_count(
    wave_loop: Any, seed: int, n_min: int, most: int, end: float, accidents: float, deaths: float, ahead: int
) -> None:
    loop = wave_loop(seed, n_min, most, end, accidents=accidents, deaths=deaths, ahead=ahead)
    for _ in range(250):
        assert loop.tick(), "nothing can happen any more: a deadlock"
        assert len(loop.scanner.scan(loop.table.lines.copy())) + loop.unpublished <= loop.limits.B
    assert loop.step > 0 or accidents or loop.next_admission < 20
    assert max(loop.ages, default=0) <= loop.limits.max_age == most - 1
    assert {cause for cause, _ in loop.fired} <= {"round"}


def test_the_ring_would_choose_the_same_order_of_wave_candidates() -> None:
    kinds = [(name, "i8") for name in ("state", "cls", "segs", "admission", "priority", "uid", "attempt")]
    lines = np.array(
        [
            (QUEUED, 0, 0, 8, -8, 80, 0),
            (QUEUED, 0, 1, 4, -4, 40, 0),
            (QUEUED, 0, 2, 4, -4, 41, 0),  # round 1 in wave 3: it has had its two segments
            (QUEUED, 0, 1, 5, -5, 50, 0),
            (QUEUED, 1, 0, 0, 9, 1, 0),  # validation knows no waves
            (QUEUED, 0, 0, 9, -9, 90, 2),  # tried twice
            (GENERATING, 0, 0, 9, -9, 91, 0),
        ],
        kinds,
    )
    waves = Waves(4)
    assert waves.best(lines, 12, 9, 1) == [1, 3, 4, 0]
    assert waves.best(lines, 12, 2, 1) == [1, 3]
    assert waves.best(lines, 12, 9, 255) == [1, 3, 4, 0, 5]
    assert not waves.over(lines, 12)


def test_limits_of_waves_hold_as_many_rounds_as_an_answer_has_segments() -> None:
    limits = derive("sync", 8, 2, 4, waves=5)
    assert (limits.B, limits.W, limits.max_age, limits.max_staleness, limits.max_publish_every) == (40, 40, 4, None, 1)
    assert not limits.problems() and "at most 5 rounds in flight" in limits.explain()[0]
    plain = derive("sync", 8, 2, 4)
    assert (plain.B, plain.max_age, plain.max_staleness, plain.waves) == (8, 0, 0, 0)
    assert derive("batch-async", 8, 2, 4, waves=5).waves == 0
