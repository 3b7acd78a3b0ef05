"""Properties of the whole: no deadlock, no group twice, age within the bound, whatever order things end in."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from busrl.scheduling.admission import oldest_age, window_of
from busrl.scheduling.trigger import window_of_ready
from busrl.topology.kinds import POLICIES

pytestmark = pytest.mark.long

LOOPS = settings(max_examples=15)
PREDICTING = [name for name, kind in POLICIES.items() if kind.predicts]
SEEDS = st.integers(0, 2**32 - 1)
N_MIN = st.integers(1, 6)


def run(loop: Any, steps: int, limit: int = 60_000) -> None:
    for _ in range(limit):
        assert loop.tick(), "nothing can happen any more: a deadlock"
        if loop.step >= steps:
            return
    raise AssertionError(f"{loop.step} of {steps} steps after {limit} ticks")


@LOOPS
@given(seed=SEEDS, n_min=N_MIN, staleness=st.integers(0, 4), streaming=st.booleans(),
       policy=st.sampled_from([*POLICIES]), accidents=st.sampled_from([0.0, 0.05, 0.4]),
       lag=st.sampled_from([0.0, 0.5]), t_max_s=st.sampled_from([float("inf"), 40.0]))
def test_batch_async_never_blocks_never_trains_twice_and_keeps_the_age_bound(
    closed_loop: Any, seed: int, n_min: int, staleness: int, streaming: bool, policy: str, accidents: float, lag: float,
    t_max_s: float,
) -> None:
    loop = closed_loop(seed, n_min=n_min, staleness=max(staleness, int(lag > 0)), streaming=streaming,
                       policy=policy, accidents=accidents, lag=lag, t_max_s=t_max_s)
    run(loop, 8)
    assert max(loop.ages) <= loop.limits.max_staleness
    assert all(cause == "time" or groups >= n_min for cause, groups in loop.fired)


TERMS = st.tuples(
    st.sampled_from(["sync", "batch-async", "fully-async"]), st.integers(1, 4), st.integers(0, 4),
    st.sampled_from(["wait", "drop"]),
)


@LOOPS
@given(seed=SEEDS, terms=st.lists(TERMS, min_size=2, max_size=4), accidents=st.sampled_from([0.0, 0.2]))
def test_no_group_grows_older_than_the_largest_bound_during_its_flight(
    closed_loop: Any, seed: int, terms: list[tuple[str, int, int, str]], accidents: float
) -> None:
    """Starts with other bounds in the ring that is there: the next steps go on, and what the audit allows is kept."""
    loop = closed_loop(seed, n_min=4, staleness=4, slots=200, accidents=accidents)
    changes = [(0, loop.limits.max_age)]
    for mode, n_min, staleness, over_age in terms:
        run(loop, loop.step + 3)
        loop.resume_with(mode, n_min, staleness, over_age)
        changes.append((loop.step, loop.limits.max_age))
        before = len(loop.ages)
        run(loop, loop.step + 3)
        for step, age in zip(loop.trained_after[before:], loop.ages[before:], strict=True):
            assert age <= largest(changes, step - age, step), (changes, step, age)
            assert over_age == "wait" or age <= largest(changes[-1:], step, step)


def largest(changes: list[tuple[int, int | None]], first: int, last: int) -> float:
    """The largest bound in force from a step to another, both included; a change counts for both sides of its step."""
    ends = [*(step for step, _ in changes[1:]), last]
    held = [bound for (begin, bound), end in zip(changes, ends) if begin <= last and first <= max(end, begin)]
    return max(float("inf") if bound is None else bound for bound in held)


@LOOPS
@given(seed=SEEDS, mode=st.sampled_from(["sync", "batch-async", "fully-async"]), n_min=N_MIN,
       policy=st.sampled_from(PREDICTING), rows=st.integers(1, 12), accidents=st.sampled_from([0.0, 0.05, 0.4]),
       deaths=st.sampled_from([0.02, 0.5]), spare=st.integers(0, 3), ahead=st.sampled_from([0, 1, 5]))
def test_no_death_or_small_ring_or_late_dispatch_blocks_the_loop(
    closed_loop: Any, seed: int, mode: str, n_min: int, policy: str, rows: int, accidents: float, deaths: float,
    spare: int, ahead: int,
) -> None:
    loop = closed_loop(seed, mode=mode, n_min=n_min, policy=policy, rows=rows, accidents=accidents, deaths=deaths,
                       slots=4 * n_min + spare, ahead=ahead)
    run(loop, 6)
    assert max(loop.ages) <= (loop.limits.max_age if loop.limits.max_age is not None else 10**6)


@LOOPS
@given(seed=SEEDS, n_min=N_MIN, staleness=st.integers(0, 3), accidents=st.sampled_from([0.0, 0.1]))
@pytest.mark.slow
def test_drop_never_waits_for_an_old_group_and_never_trains_one(
    closed_loop: Any, seed: int, n_min: int, staleness: int, accidents: float
) -> None:
    loop = closed_loop(seed, n_min=n_min, staleness=staleness, over_age="drop", accidents=accidents, lag=0.5)
    run(loop, 8)
    assert max(loop.ages) <= loop.limits.max_staleness


@LOOPS
@example(seed=0, n_min=3, accidents=0.5, flats=0.0)  # re-rolls of a group without slots, under a new scheduler
@given(seed=SEEDS, n_min=N_MIN, accidents=st.sampled_from([0.0, 0.1, 0.5]), flats=st.sampled_from([0.0, 0.3, 1.0]))
def test_sync_trains_whole_rounds_at_age_zero_even_after_stepless_rounds(
    closed_loop: Any, seed: int, n_min: int, accidents: float, flats: float
) -> None:
    loop = closed_loop(seed, mode="sync", n_min=n_min, accidents=accidents, flats=flats)
    for _ in range(400):
        assert loop.tick()
    assert not loop.ages or max(loop.ages) == 0
    assert all(cause == "round" for cause, _ in loop.fired)
    assert loop.next_admission > 2 * n_min, "rounds do not follow each other"
    assert flats < 1.0 or not loop.fired


@LOOPS
@given(seed=SEEDS, n_min=N_MIN, publish_every=st.integers(2, 4))
def test_the_bound_holds_when_versions_are_published_rarely(
    closed_loop: Any, seed: int, n_min: int, publish_every: int
) -> None:
    loop = closed_loop(seed, n_min=n_min, staleness=2, publish_every=publish_every, checked=False)
    run(loop, 12)
    assert max(loop.ages) <= 2


@LOOPS
@given(seed=SEEDS, n_min=N_MIN, staleness=st.integers(0, 4), accidents=st.sampled_from([0.0, 0.1]))
def test_sums_of_b_and_w_keep_the_bound_without_age_checks(
    closed_loop: Any, seed: int, n_min: int, staleness: int, accidents: float
) -> None:
    loop = closed_loop(seed, n_min=n_min, staleness=staleness, accidents=accidents, checked=False)
    run(loop, 8)
    assert max(loop.ages) <= staleness


@LOOPS
@given(seed=SEEDS, n_min=N_MIN, spare=st.integers(0, 7), accidents=st.sampled_from([0.0, 0.3]))
def test_a_ring_of_one_step_never_fills_with_incomplete_groups(
    closed_loop: Any, seed: int, n_min: int, spare: int, accidents: float
) -> None:
    run(closed_loop(seed, n_min=n_min, slots=4 * n_min + spare, accidents=accidents), 8)


@LOOPS
@given(seed=SEEDS, n_min=N_MIN)
def test_fully_async_goes_on_without_a_bound(closed_loop: Any, seed: int, n_min: int) -> None:
    run(closed_loop(seed, mode="fully-async", n_min=n_min), 8)


@LOOPS
@given(seed=SEEDS)
def test_with_no_arrivals_there_is_no_step_however_much_time_passes(closed_loop: Any, seed: int) -> None:
    loop = closed_loop(seed, t_max_s=1.0)
    loop.schedule()
    for _ in range(20):
        loop.now += 1000.0
        assert not loop.learn()
    assert loop.step == 0 and loop.fired == []


@LOOPS
@given(seed=SEEDS, straggler=st.integers(0, 7))
def test_a_group_that_never_ends_stops_the_rest_only_at_the_window(closed_loop: Any, seed: int, straggler: int) -> None:
    loop = closed_loop(seed, n_min=4, staleness=2, accidents=0.0, deaths=0.0)
    while loop.tick(straggler):
        pass
    assert loop.step <= loop.limits.max_staleness + straggler
    assert max(loop.trained, default=0) <= straggler + loop.limits.W - 1
    run(loop, loop.step + 5)
    assert max(loop.ages) <= loop.limits.max_staleness


VECTORS = [  # S, P, f, B, W, bound, reachable when credit returns at publication, reachable when it returns at the take
    (1, 3, 0.5, 6, 3, 2, 2, 3),
    (4, 32, 0.3, 160, 48, 6, 6, 7),
    (1, 64, 0.3, 128, 38, 2, 2, 3),
    (0, 8, 0.3, 8, 2, 1, 0, 2),
    (2, 16, 0.0, 48, 1, 2, 2, 3),
]


@pytest.mark.parametrize(("staleness", "n", "share", "admitted", "window", "bound", "published", "taken"), VECTORS)
def test_windowed_fifo_vectors(
    staleness: int, n: int, share: float, admitted: int, window: int, bound: int, published: int, taken: int
) -> None:
    assert (staleness + 1) * n == admitted
    assert window_of(admitted, share) == window
    assert oldest_age(admitted, window, n) == bound
    assert worst_age(admitted, window, n, credit_at_take=False) == published <= bound
    assert worst_age(admitted, window, n, credit_at_take=True) == taken == published + (1 if published else 2)


def worst_age(admitted: int, width: int, n: int, *, credit_at_take: bool) -> int:
    """Age of the last group admitted while nothing had ended, all others ending first, by the package's own window."""
    step = 0
    late = admitted - 1 + (n if credit_at_take else 0)  # a first step's groups have given their credit back already
    trained: set[int] = set(range(n)) if credit_at_take else set()
    unpublished = 0
    highest = late + 1
    claimed: list[int] = []
    while True:
        fresh = [g for g in range(highest) if g not in trained and g not in claimed]
        ready = np.array([g != late for g in fresh])
        chosen = window_of_ready(np.array(fresh), ready, width, n - len(claimed)).chosen
        claimed += [fresh[i] for i in chosen]
        if credit_at_take:
            unpublished = 0
        in_flight = highest - len(trained) - (len(claimed) if credit_at_take else 0) + unpublished
        grown = admitted - in_flight
        highest += max(0, grown)
        if len(claimed) == n:
            trained |= set(claimed)
            claimed, step = [], step + 1
        elif not len(chosen) and grown <= 0:
            return step + int(credit_at_take)
