"""B, W and the credit: the numbers that the specification names, and which rule says no."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from busrl.scheduling.admission import Admission, Room, derive, not_ahead

G = 4


def test_two_steps_of_staleness_at_32_groups_give_75_and_22() -> None:
    limits = derive("batch-async", 32, 2, 8)
    assert (limits.B, limits.W, limits.n_lo, limits.g_min, limits.n_floor, limits.max_age) == (75, 22, 32, 6, 8, 2)
    assert (limits.train_slots, limits.max_publish_every) == (600, 2)
    assert limits.problems() == limits.warnings() == []


def test_thresholds_16_to_64_need_four_steps_and_give_64_and_17() -> None:
    limits = derive("batch-async", 32, 4, 8, n_lo=16, n_hi=64)
    assert (limits.B, limits.W, limits.max_age) == (64, 17, 4)
    assert "max_staleness >= 4" in derive("batch-async", 32, 2, 8, n_lo=16, n_hi=64).problems()[0]
    assert "to 4 or more" in derive("batch-async", 32, 3, 8, n_lo=16, n_hi=64).warnings()[0]


def test_sync_and_fully_async_have_their_own_numbers() -> None:
    sync, free = derive("sync", 32, 2, 8), derive("fully-async", 32, 2, 8)
    assert (sync.B, sync.W, sync.max_age, sync.sync) == (32, 32, 0, True)
    assert (free.B, free.W, free.max_age, free.max_staleness) == (128, 38, None, None)
    assert free.warnings()


@given(n_min=st.integers(1, 300), staleness=st.integers(0, 12), size=st.integers(2, 16))
def test_the_bound_follows_from_b_and_w_for_every_topology(n_min: int, staleness: int, size: int) -> None:
    limits = derive("batch-async", n_min, staleness, size)
    assert limits.problems() == []
    assert (staleness + 1) * n_min + 1 >= limits.B + limits.W
    assert limits.max_age is not None and limits.max_age <= staleness
    assert n_min <= limits.B and limits.W >= 1
    assert f"{limits.B} + {limits.W} = {limits.B + limits.W}" in limits.explain()[0]


@given(mode=st.sampled_from(["batch-async", "fully-async"]), n_min=st.integers(1, 60), staleness=st.integers(1, 8),
       seats=st.integers(1, 8))
def test_below_a_step_in_flight_a_whole_draw_has_room(
    mode: str, n_min: int, staleness: int, seats: int
) -> None:
    limits = derive(mode, n_min, staleness, G, seats=seats)
    if not limits.problems():
        assert limits.B - (n_min - 1) >= seats and limits.W >= 1
        assert limits.max_publish_every * limits.step_room <= max(limits.B, limits.step_room)


def test_only_whole_draws_of_several_seats_are_admitted(table: Any) -> None:
    ring = table(G, 4 * 10)
    admission = Admission(derive("batch-async", 4, 2, G, seats=3))  # B = 10
    assert admission.limits.B == 10 and room(admission, ring).groups == 9
    for group in range(8):
        ring.put_group(group, [0.0, 1.0, 0.5, 0.5])
    assert room(admission, ring) == Room(0, "in_flight", None)
    assert room(admission, ring, unpublished=1).reason == "in_flight"
    assert room(Admission(derive("fully-async", 4, 2, G, seats=3)), ring).reason == "slots"


def test_waiting_samples_hold_back_whole_draws_of_several_seats() -> None:
    assert not_ahead(Room(6), 10, 9, G, seats=2) == Room(2)
    assert not_ahead(Room(6), 10, 1, G, seats=2) == Room(4)
    assert not_ahead(Room(6), 10, 10, G, seats=2) == Room(0, "ahead")
    assert not_ahead(Room(6), 10, 9, G) == Room(1)


def room(admission: Admission, ring: Any, **words: int) -> Room:
    base = {"unpublished": 0, "next_admission": 0, "step": 0, "free": ring.free}
    return admission.room(ring.view(), **{**base, **words})


def test_admission_stops_at_b_counting_what_is_not_published(table: Any) -> None:
    ring = table(G, 400)
    admission = Admission(derive("batch-async", 4, 2, G))  # B = 10, W = 3
    assert room(admission, ring).groups == 10
    for draw in range(6):
        ring.put_group(draw, [0.0, 1.0])  # two members still due: open, unresolved
    assert room(admission, ring, unpublished=3).groups == 1
    assert room(admission, ring, unpublished=4) == Room(0, "in_flight", 0)


def test_zero_staleness_admits_nothing_while_a_step_is_under_way(table: Any) -> None:
    ring = table(G, 400)
    admission = Admission(derive("batch-async", 32, 0, G))
    assert room(admission, ring).groups == 32
    assert room(admission, ring, unpublished=4) == Room(0, "in_flight")
    younger = Admission(derive("batch-async", 32, 1, G))
    assert room(younger, ring, unpublished=4).groups > 0


def test_slots_for_members_still_due_are_not_given_to_a_new_group(table: Any) -> None:
    ring = table(G, 2 * G)
    ring.put(0, 0)
    admission = Admission(derive("batch-async", 4, 2, G))
    assert room(admission, ring).groups == 1
    assert room(admission, ring, reserve=1) == Room(0, "slots", 0)


def test_a_round_fills_once_and_the_next_waits_for_all_in_flight(table: Any) -> None:
    ring = table(G, 400)
    admission = Admission(derive("sync", 4, 2, G))
    assert room(admission, ring).groups == 4
    slots = [ring.put_group(draw, [0.0, 1.0, 0.5, 0.5]) for draw in range(3)]
    assert room(admission, ring, next_admission=3).groups == 1
    for slot in slots[0]:
        ring.end(slot, "f")  # set aside: no refill
    assert room(admission, ring, next_admission=4).reason == "round"
    for slot in slots[1] + slots[2]:
        ring.end(slot, "T")
    assert room(admission, ring, next_admission=4, unpublished=2).groups == 0
    assert room(admission, ring, next_admission=4).groups == 4


def test_under_wait_nothing_is_admitted_while_a_group_is_too_old(table: Any) -> None:
    ring = table(G, 400)
    ring.put(0, 0, state=3, step=1)
    limits = derive("batch-async", 4, 2, G)
    assert room(Admission(limits), ring, step=3).groups > 0
    assert room(Admission(limits), ring, step=4) == Room(0, "staleness", 0)
    assert room(Admission(limits, "drop"), ring, step=4).groups > 0
