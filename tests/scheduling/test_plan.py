"""The learner's decisions: set aside, claim, fire or wait, one case at a time."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from busrl.scheduling.admission import Staleness, ages, derive
from busrl.scheduling.groups import NOT_STARTED
from busrl.scheduling.trigger import Cause, Claim, Fire, LearnerPlan, SetAside, Trigger, Wait, window_of_ready

G = 4
GOOD, FLAT = [0.0, 1.0, 0.5, 0.5], [1.0] * 4
GENERATING, REWARDED, TRAINING = 3, 6, 7


@pytest.fixture
def ring(table: Any) -> Any:
    return table(G, 200)


def plan(n_min: int = 2, *, mode: str = "batch-async", streaming: bool = True, over_age: str = "wait",
         t_max_s: float = math.inf, staleness: int = 2) -> LearnerPlan:
    limits = derive(mode, n_min, staleness, G)
    trigger = Trigger(n_min, 1, t_max_s, sync=limits.sync)
    return LearnerPlan(limits, trigger, Staleness(limits.max_staleness, over_age), streaming=streaming)


MODES = st.sampled_from(["batch-async", "sync", "fully-async"])


@settings(max_examples=80)
@given(mode=MODES, n_min=st.integers(1, 5), kinds=st.lists(st.sampled_from("gfow"), min_size=1, max_size=12),
       random=st.randoms(), claimed=st.integers(0, 2), t_max_s=st.sampled_from([math.inf, 5.0]),
       now=st.sampled_from([1.0, 9.0]))
def test_no_step_fires_before_as_many_rewards_came_as_are_missing(
    table: Any, random: Any, mode: str, n_min: int, kinds: list[str], claimed: int, t_max_s: float, now: float
) -> None:
    ring, it = table(G, 200), plan(n_min, mode=mode, t_max_s=t_max_s)
    it.trigger.step_ended(0.0)
    for draw in range(claimed):
        ring.put_group(draw, GOOD)
    ring.lines["state"][: claimed * G] = TRAINING
    for draw, kind in enumerate(kinds, claimed):  # good, flat, open, waiting for its first answer
        ring.put_group(draw, {"g": GOOD, "f": FLAT, "o": GOOD[:2], "w": []}[kind])
        for member in range({"o": 2, "w": 0}.get(kind, G), G):
            ring.put(draw, member, state=GENERATING)
    more = {"now": now, "next_admission": n_min}
    if isinstance(decide(it, ring, tuple(range(claimed)), **more)[-1], Fire):
        return
    under_way = np.flatnonzero(ring.lines["state"] == GENERATING)
    missing = it.missing(ring.view(), claimed, now)
    for at, slot in enumerate(random.sample(under_way.tolist(), len(under_way))[: missing - 1]):
        ring.lines["reward"][slot], ring.lines["state"][slot] = at + 2.0, REWARDED
        assert isinstance(decide(it, ring, tuple(range(claimed)), **more)[-1], Wait)


def decide(it: LearnerPlan, ring: Any, claimed: tuple[int, ...] = (), **more: Any) -> list[Any]:
    return it.decide(ring.view(), claimed, **{"step": 0, "now": 0.0, **more})


def test_unusable_groups_are_set_aside_and_the_window_moves_past_them(ring: Any) -> None:
    ring.put_group(0, FLAT)
    ring.put_group(1, [0.0, 1.0])
    for member in (2, 3):
        for attempt in (0, 1):
            ring.end(ring.put(1, member, attempt=attempt), "H")
    ring.put_group(2, GOOD)
    assert decide(plan(), ring) == [SetAside(0, "f"), SetAside(1, "i"), Claim((2,)), Wait("groups")]


def test_a_plan_without_comparisons_takes_flat_groups_like_any_other(ring: Any) -> None:
    for draw in range(2):
        ring.put_group(draw, FLAT)
    it = plan(over_age="drop")
    it.trains_flat = True
    assert decide(it, ring) == [Claim((0, 1)), Fire(Cause.COUNT, (0, 1))]
    assert decide(it, ring, step=9)[:2] == [SetAside(0, "o"), SetAside(1, "o")]


def test_a_group_half_set_aside_by_a_killed_learner_keeps_its_reason(ring: Any) -> None:
    ring.end(ring.put_group(0, GOOD)[0], "o")
    assert decide(plan(), ring)[0] == SetAside(0, "o")


def test_streaming_claims_what_is_ready_and_fires_at_the_count(ring: Any) -> None:
    for draw in range(3):
        ring.put_group(draw, GOOD)
    assert decide(plan(4), ring) == [Claim((0, 1, 2)), Wait("groups")]
    assert decide(plan(2), ring) == [Claim((0, 1)), Fire(Cause.COUNT, (0, 1))]
    assert decide(plan(3), ring, claimed=(2,)) == [Claim((0, 1)), Fire(Cause.COUNT, (2, 0, 1))]
    assert decide(plan(3), ring, claimed=(2, 0, 1)) == [Fire(Cause.COUNT, (2, 0, 1))]


def test_without_streaming_everything_is_claimed_at_firing_in_the_order_of_draws(ring: Any) -> None:
    for draw, admission in ((7, 0), (3, 1), (5, 2)):
        ring.put_group(draw, GOOD, admission=admission)
    assert decide(plan(4, streaming=False), ring) == [Wait("groups")]
    assert decide(plan(3, streaming=False), ring) == [Claim((3, 5, 7)), Fire(Cause.COUNT, (3, 5, 7))]


def test_a_ready_group_beyond_the_window_waits_for_the_blocking_one(ring: Any) -> None:
    it = plan(4)  # B = 10, W = 3
    ring.put(0, 0, state=GENERATING)
    for draw in (1, 2, 3, 4, 5):
        ring.put_group(draw, GOOD)
    assert decide(it, ring) == [Claim((1, 2)), Wait("window", 0)]


def test_a_group_held_by_a_dead_learner_is_neither_ready_nor_skipped(ring: Any) -> None:
    ring.put_group(0, GOOD)
    ring.lines["state"][0] = TRAINING
    assert decide(plan(1), ring) == [Wait("groups", 0)]


def test_time_fires_with_the_floor_and_never_without_arrivals(ring: Any) -> None:
    it = plan(4, t_max_s=0.5)
    it.trigger.step_ended(10.0)
    assert it.trigger.deadline_s(10.2) == pytest.approx(0.3)
    assert decide(it, ring, now=99.0) == [Wait("admission")]
    ring.put_group(0, GOOD)
    assert decide(it, ring, now=10.4)[-1] == Wait("groups")
    assert decide(it, ring, now=10.5) == [Claim((0,)), Fire(Cause.TIME, (0,))]


@pytest.mark.parametrize("over_age", ["wait", "drop"])
def test_time_never_leaves_a_group_above_the_bound(ring: Any, over_age: str) -> None:
    it = plan(4, t_max_s=0.5, over_age=over_age)
    it.trigger.step_ended(0.0)
    ring.put(0, 0, state=GENERATING, step=1)
    ring.put_group(1, GOOD, step=3)
    assert decide(it, ring, step=3, now=9.0)[-1].reason == "groups"
    assert decide(it, ring, step=2, now=9.0)[-1] == Fire(Cause.TIME, (1,))


def test_a_full_step_waits_for_a_group_it_would_leave_too_old(ring: Any) -> None:
    ring.put(0, 0, state=GENERATING, step=1)
    for draw in (1, 2):
        ring.put_group(draw, GOOD, step=3)
    waits, drops = plan(1), plan(1, over_age="drop")
    assert decide(waits, ring, claimed=(1,), step=3) == [Wait("staleness", 0)]
    assert decide(drops, ring, claimed=(1,), step=3) == [Fire(Cause.COUNT, (1,))]


def test_a_group_too_old_after_the_step_is_taken_beyond_n_min(ring: Any) -> None:
    for draw, step in ((0, 3), (1, 1)):
        ring.put_group(draw, GOOD, step=step)
    assert decide(plan(1), ring, step=3) == [Claim((0, 1)), Fire(Cause.COUNT, (0, 1))]


def test_under_drop_a_group_above_the_bound_is_set_aside(ring: Any) -> None:
    ring.put_group(0, GOOD, step=1)
    assert decide(plan(over_age="drop"), ring, step=3)[0] == Claim((0,))
    assert decide(plan(over_age="drop"), ring, step=4)[0] == SetAside(0, "o")
    assert decide(plan(), ring, step=4)[0] == Claim((0,))


def test_a_sync_round_fires_with_its_usable_groups_once_all_have_ended(ring: Any) -> None:
    it = plan(3, mode="sync", streaming=False)
    ring.put_group(2, GOOD, admission=0)
    ring.put_group(0, FLAT, admission=1)
    assert decide(it, ring, next_admission=2)[-1].reason == "round"
    running = ring.put(1, 0, state=GENERATING, admission=2)
    assert decide(it, ring, next_admission=3)[-1] == Wait("round", 1)
    ring.end(running, "e")
    assert decide(it, ring, next_admission=3)[-2:] == [Claim((2,)), Fire(Cause.ROUND, (2,))]


def test_a_sync_round_without_a_usable_group_makes_no_step(ring: Any) -> None:
    for draw in range(2):
        ring.put_group(draw, FLAT)
    actions = decide(plan(2, mode="sync"), ring, next_admission=2)
    assert actions == [SetAside(0, "f"), SetAside(1, "f"), Wait("admission")]


def test_the_rest_is_trained_at_the_end_with_nothing_in_flight(ring: Any) -> None:
    ring.put_group(0, GOOD)
    running = ring.put(1, 0, state=GENERATING)
    assert decide(plan(4), ring, draining=True)[-1] == Wait("groups", 1)
    ring.end(running, "e")
    assert decide(plan(4), ring, draining=True)[-1] == Fire(Cause.DRAIN, (0,))


def test_window_choice_is_by_admission_and_names_the_anchor() -> None:
    admission = np.array([14, 10, 13, 11, 12])
    ready = np.array([True, True, True, False, True])
    window = window_of_ready(admission, ready, width=3, limit=10)
    assert admission[window.chosen].tolist() == [10, 12, 13] and admission[window.anchor] == 11 and window.waiting == 1
    assert admission[window_of_ready(admission, ready, 3, 2).chosen].tolist() == [10, 12]
    assert window_of_ready(admission, ready, 1, 10).chosen.tolist() == [1]
    empty = window_of_ready(np.empty(0, np.int64), np.empty(0, np.bool_), 3, 5)
    assert (len(empty.chosen), empty.anchor, empty.waiting) == (0, None, 0)


def test_age_counts_steps_and_a_group_that_has_not_begun_has_none() -> None:
    assert ages(np.array([3, 5, NOT_STARTED]), 5).tolist() == [2, 0, 0]


def test_the_trigger_never_fires_on_nothing() -> None:
    trigger = Trigger(1, t_max_s=1.0)
    assert trigger.n_floor == 1
    assert trigger.cause(0, 1e9, draining=True, round_full=True) is None
