"""What the numbers of the newest steps have to be before somebody is told of them."""

from __future__ import annotations

from math import nan
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from busrl.roles.learner.alarms import Alarms


def row(
    step: int, ess: float = 0.99, k3: float = 0.004, flat: float = 0.3, ended: int = 12, cut: float = 0.5,
    tokens: int = 900,
) -> dict[str, Any]:
    return {
        "step": step, "ess": ess, "k3": k3, "flat_share": flat, "groups_ended": ended, "reward": 0.25, "entropy": 0.5,
        "lr": 3e-4, "samples": 32, "tokens": tokens, "cut_share": cut, "length_mean": 512.0,
    }


def told(alarms: Alarms, *rows: dict[str, Any]) -> list[str]:
    return [text for row in rows for text in alarms.step(row).values()]


def test_a_drifted_policy_is_reported_once_with_numbers_and_a_remedy() -> None:
    alarms = Alarms()
    assert told(alarms, *(row(step) for step in range(5))) == []
    assert told(alarms, row(5, ess=0.1, k3=2.0)) == [], "one step is no proof"
    (text,) = told(alarms, row(6, ess=0.2, k3=1.5))
    assert "step 6: the policy has left the one that drew the answers: ess 0.2" in text
    assert "k3 1.5" in text and "lr 0.0003" in text and "learner.lr" in text
    assert told(alarms, *(row(step, ess=0.1, k3=2.0) for step in range(7, 30))) == [], "it goes on"
    assert told(alarms, *(row(step) for step in range(30, 34))) == []
    assert len(told(alarms, *(row(step, k3=0.5) for step in range(34, 38)))) == 1, "k3 alone is enough"


def test_steps_without_trained_tokens_or_numbers_say_nothing_of_the_policy() -> None:
    alarms = Alarms()
    assert told(alarms, *(row(step, ess=0.0, k3=0.0, tokens=0) for step in range(9))) == []
    assert told(alarms, *(row(step, ess=nan, k3=nan) for step in range(9, 12)), *(row(12 + k) for k in range(3))) == []


def test_a_flat_group_share_swinging_around_its_limit_is_one_alarm() -> None:
    shares = [0.95] * 12 + [0.86, 0.95, 0.87, 0.96] * 12
    assert len(told(Alarms(), *(row(step, flat=share, ended=40) for step, share in enumerate(shares)))) == 1


def test_flat_groups_are_told_of_where_there_are_enough_of_them() -> None:
    assert told(Alarms(), *(row(step, flat=0.95, ended=4) for step in range(12))) == [], "40 groups"
    (text,) = told(Alarms(), *(row(step, flat=0.95, ended=40) for step in range(12)))
    assert "step 1: 95% of the last 80 groups were flat" in text and "mean reward of 0.25" in text


def test_flat_groups_of_several_seats_are_told_seat_by_seat() -> None:
    seats = {"seat/first/reward": 0.05, "seat/second/reward": 0.95, "seat/first/groups": 20}
    (text,) = told(Alarms(), *(row(step, flat=0.95, ended=40) | seats for step in range(12)))
    assert "entropy 0.5 (first 0.05, second 0.95 in the newest step): play has settled" in text
    assert "the task is solved" not in text and "learner.entropy_coef" in text


def test_all_cut_answers_raise_an_alarm_naming_the_end_token_first() -> None:
    assert told(Alarms(), *(row(step, cut=0.9) for step in range(12))) == []
    (text,) = told(Alarms(), *(row(step, cut=1.0) for step in range(12)))
    assert "step 1: 100% of the last 64 answers were cut at their limit, 512 tokens" in text and "end token" in text
    assert told(Alarms(), *(row(step, cut=1.0) | {"episodes": {"turns_mean": 2.0}} for step in range(12))) == []


@given(st.lists(st.tuples(st.floats(0.5, 1.0), st.floats(0, 0.2), st.floats(0, 0.85), st.integers(1, 500))))
def test_nothing_is_said_of_a_healthy_run(steps: list[tuple[float, float, float, int]]) -> None:
    alarms = Alarms()
    rows = (row(n, ess, k3, flat, ended) for n, (ess, k3, flat, ended) in enumerate(steps))
    assert told(alarms, *rows) == []


def test_users_set_the_effective_sample_size_limit_and_zero_disables_it() -> None:
    rows = [row(step, ess=0.4) for step in range(6)]
    assert told(Alarms(), *rows) == [] and told(Alarms(0.0), *(row(step, ess=0.01) for step in range(6))) == []
    (text,) = told(Alarms(0.5), *rows)
    assert "ess 0.4 (below 0.5 is too far, learner.ess_alarm)" in text
