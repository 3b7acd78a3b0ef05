"""Prompts of an open stream are there when they have arrived; late dispatch opens what engines can take soon."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from busrl.scheduling.admission import Arrivals, Room, not_ahead

# Microseconds, as a file may hold them: below a nanosecond a period counts as none.
TIMES = st.lists(st.floats(0, 100).map(lambda s: round(s, 6)), min_size=1, max_size=40).map(sorted)


def test_draws_come_one_after_the_other_and_the_file_starts_again() -> None:
    stream = Arrivals([0.0, 1.0, 2.0])
    assert [stream.count(50.0 + t) for t in (0.0, 0.9, 1.0, 2.5, 3.0, 4.2, 31.0)] == [1, 1, 2, 3, 4, 5, 32]


@given(times=TIMES, draws=st.integers(0, 200), now=st.floats(0, 1000))
def test_a_draw_is_there_from_its_time_on(times: list[float], draws: int, now: float) -> None:
    stream = Arrivals(times)
    stream.count(0.0)
    there = stream.count(now)
    assert (draws < there) == (stream.time_of(draws) <= now) or stream.time_of(draws) == pytest.approx(now)


def test_a_successor_goes_on_where_its_predecessor_was() -> None:
    stream = Arrivals([0.0, 10.0, 20.0, 30.0])
    assert stream.count(1000.0, admitted=3) == 3
    assert stream.count(1010.0) == 4


@given(groups=st.integers(1, 50), ahead=st.integers(1, 64), waiting=st.integers(0, 200), size=st.integers(2, 16))
def test_late_dispatch_never_leaves_engines_without_work(groups: int, ahead: int, waiting: int, size: int) -> None:
    room = not_ahead(Room(groups), ahead, waiting, size)
    if waiting >= ahead:
        assert room == Room(0, "ahead")
    else:
        assert room.groups == groups or ahead <= waiting + room.groups * size < ahead + size


def test_without_a_limit_and_without_room_nothing_changes() -> None:
    assert not_ahead(Room(7), 0, 500, 8) == Room(7)
    assert not_ahead(Room(0, "slots", 3), 8, 0, 8) == Room(0, "slots", 3)


def test_what_nobody_may_claim_before_it_is_whole_is_not_held_back() -> None:
    assert not_ahead(Room(16, whole=True), 8, 500, 4) == Room(16, whole=True)
