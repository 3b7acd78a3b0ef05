"""Rows stay closed up, whoever leaves."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from busrl.engines import Request
from busrl.engines.torch.engine import Seats
from busrl.states import Finish


def request(key: int) -> Request:
    return Request(key, key, 0, np.asarray([1, 2], np.int32), np.empty(0, np.int32), 4, 1.0, 1.0, 0)


def seated(count: int) -> Seats:
    seats = Seats(count, 16, np.zeros(8, np.bool_))
    for row in range(count):
        seats.rows[row] = seats.sit(request(row))
    seats.active = count
    return seats


@settings(max_examples=200)
@given(st.integers(1, 24), st.data())
def test_after_closing_up_the_first_rows_hold_exactly_those_who_stayed(count: int, data: st.DataObject) -> None:
    holes = sorted(data.draw(st.sets(st.integers(0, count - 1))))
    seats = seated(count)
    cache = list(range(count))  # which sequence each cache row holds
    sources, targets = seats.close_up(holes)
    for source, target in zip(sources, targets):
        assert target < seats.active <= source
        cache[target] = cache[source]
    assert seats.active == count - len(holes)
    assert sorted(cache[: seats.active]) == sorted(set(range(count)) - set(holes))
    assert [int(seats.key[seat]) for seat in seats.rows[: seats.active]] == cache[: seats.active]
    assert len(set(seats.rows[: seats.active].tolist())) == seats.active


def test_tokens_are_recorded_with_the_version_of_their_step() -> None:
    seats = seated(2)
    everyone = seats.rows[:2]
    for step in range(4):
        ended = seats.record(everyone, np.asarray([3, 4]), np.asarray([-1, -2], np.float32), version=10 + step // 2)
        assert ended.tolist() == [step == 3] * 2
    assert seats.cached(int(everyone[1])).tolist() == [1, 2, 4, 4, 4]  # all that is known but the last
    result = seats.leave(int(everyone[1]))
    assert seats.free == [int(everyone[1])]
    assert result.token_ids.tolist() == [4] * 4 and result.versions.tolist() == [10, 10, 11, 11]
    assert result.logprobs.tolist() == [-2.0] * 4 and result.key == 1


def test_a_stop_id_ends_only_its_own_sequence() -> None:
    seats = Seats(2, 16, np.zeros(8, np.bool_))
    both = np.array([seats.sit(replace(request(0), stop_ids=(3, 5))), seats.sit(request(1))], np.intp)
    assert seats.record(both, np.asarray([4, 3]), np.asarray([-1, -2], np.float32), 1).tolist() == [False, False]
    assert seats.record(both, np.asarray([5, 5]), np.asarray([-1, -2], np.float32), 1).tolist() == [True, False]
    assert [seats.sampled(int(seat), 1).tolist() for seat in both] == [[5], [5]]
    stopped, seat = seats.leave(int(both[0])), int(both[0])
    assert stopped.token_ids.tolist() == [4, 5] and stopped.finish == Finish.EOS
    assert seats.sit(request(2)) == seat
    assert not seats.record(both[:1], np.asarray([5]), np.asarray([-1], np.float32), 1)[0], "the seat has forgotten it"
    assert seats.leave(seat, aborted=True).finish == Finish.ABORTED
