"""Numbers of samples, groups, draws and episodes where models have seats."""

from __future__ import annotations

import itertools

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from busrl.states import draw_of, episode_of, place_of, seat_of, side_of, uid_of

NUMBERS = st.integers(0, 1 << 40)
SIZES = st.integers(1, 64)
SEATS = st.integers(1, 8)


def test_uids_of_seats_are_the_numbers_from_zero_on_without_a_hole() -> None:
    for seats, size in itertools.product((1, 2, 3, 5), (1, 2, 8)):
        uids = [
            uid_of(draw * seats + seat, attempt, member, size)
            for draw in range(7) for seat in range(seats) for attempt in (0, 1) for member in range(size)
        ]
        assert sorted(uids) == list(range(len(uids)))


@given(draw=NUMBERS, seat=st.integers(0, 7), attempt=st.integers(0, 1), member=st.integers(0, 63), size=SIZES,
       seats=SEATS)
def test_a_uid_leads_back_to_draw_seat_try_and_member(
    draw: int, seat: int, attempt: int, member: int, size: int, seats: int
) -> None:
    seat, member = seat % seats, member % size
    uid = uid_of(draw * seats + seat, attempt, member, size)
    group, again, which = place_of(uid, size)
    assert (draw_of(group, seats), seat_of(group, seats), again, which) == (draw, seat, attempt, member)
    episode = episode_of(uid, size, seats)
    assert episode == uid_of(draw, attempt, member, size)
    assert side_of(episode, seat, size, seats) == uid


@given(uid=NUMBERS, size=SIZES)
def test_with_one_seat_the_episode_has_the_number_of_its_sample(uid: int, size: int) -> None:
    assert episode_of(uid, size, 1) == uid == side_of(uid, 0, size, 1)


@given(episode=NUMBERS, size=SIZES, seats=st.tuples(SEATS, SEATS))
def test_sides_in_ledgers_with_other_numbers_of_seats_are_of_one_episode(
    episode: int, size: int, seats: tuple[int, int]
) -> None:
    sides = {side_of(episode, seat, size, count): count for count in seats for seat in range(count)}
    assert {episode_of(uid, size, count) for uid, count in sides.items()} == {episode}


def test_arrays_of_uids_are_taken_apart_like_single_ones() -> None:
    uids = np.arange(200, dtype=np.int64)
    groups = place_of(uids, 4)[0]
    assert draw_of(groups, 3).tolist() == [draw_of(place_of(uid, 4)[0], 3) for uid in range(200)]
    assert episode_of(uids, 4, 3).tolist() == [episode_of(uid, 4, 3) for uid in range(200)]
