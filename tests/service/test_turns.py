"""Turns of owners: the same time for all who wait, and small steps of one who comes now and then go first."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from busrl.service.driver import CREDIT_S, Turns

OWNERS = ("ann", "bob", "eve")
LONGEST_S = 3.0
ROUND = 1e-6
waits = st.lists(
    st.tuples(st.sets(st.sampled_from(OWNERS), min_size=1), st.floats(0.01, LONGEST_S)), min_size=1, max_size=60)


def chosen(turns: Turns, waiting: set[str]) -> str:
    return min(sorted(waiting), key=lambda owner: turns.place(owner, owner))


@given(waits)
def test_owners_who_wait_together_get_the_same_time(course: list[tuple[set[str], float]]) -> None:
    turns, since = Turns(), {pair: [0.0, 0.0] for pair in itertools.combinations(OWNERS, 2)}
    for waiting, seconds in course:
        owner = chosen(turns, waiting)
        turns.took(owner, owner, seconds)
        for pair, served in since.items():
            if not waiting >= set(pair):
                served[:] = 0.0, 0.0
            elif owner in pair:
                served[pair.index(owner)] += seconds
            assert abs(served[0] - served[1]) <= CREDIT_S + 2 * LONGEST_S + ROUND


@given(st.floats(0.01, CREDIT_S), st.floats(0.01, CREDIT_S / 4), st.integers(1, 4))
def test_a_small_step_waits_for_no_turn_but_the_one_under_way(heavy_s: float, light_s: float, parts: int) -> None:
    turns = Turns()
    for owner in OWNERS[:2]:
        turns.took(owner, owner, light_s)
    while turns.place("ann", "ann")[0] < CREDIT_S + light_s:  # ann asks for much, bob was away
        turns.took("ann", "ann", heavy_s)
    for _ in range(parts):
        assert chosen(turns, {"ann", "bob"}) == "bob"
        turns.took("bob", "bob", light_s)


@given(st.floats(0.01, LONGEST_S), st.floats(0.01, LONGEST_S), st.floats(0.01, LONGEST_S))
def test_a_turn_in_two_parts_counts_as_a_whole_one(first_s: float, more_s: float, bob_s: float) -> None:
    whole, parts = Turns(), Turns()
    for turns in (whole, parts):
        turns.took("bob", "bob", bob_s)
    whole.took("ann", "ann", first_s + more_s)
    parts.took("ann", "ann", first_s)
    parts.took_more("ann", "ann", more_s)
    for owner in OWNERS:
        assert parts.place(owner, owner) == pytest.approx(whole.place(owner, owner))


def test_an_owner_who_is_new_is_owed_nothing() -> None:
    turns = Turns()
    for _ in range(100):
        turns.took("ann", "ann", 1.0)
    order = []
    for _ in range(8):
        order.append(chosen(turns, {"ann", "bob"}))
        turns.took(order[-1], order[-1], 1.0)
    assert order.count("ann") >= 3


def test_who_was_away_for_long_is_owed_a_little_alone() -> None:
    turns = Turns()
    turns.took("bob", "bob", 1.0)
    for _ in range(1000):
        turns.took("ann", "ann", 1.0)
    order = []
    for _ in range(20):
        order.append(chosen(turns, {"ann", "bob"}))
        turns.took(order[-1], order[-1], 1.0)
    assert order.count("bob") - order.count("ann") <= CREDIT_S + 2  # turns of a second
