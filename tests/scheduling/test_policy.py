"""Order of dispatch: within the horizon, nothing starves; predictors rank and never leave their range."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from busrl.predict.lengths import RulesPredictor, kendall_tau
from busrl.scheduling.dispatch import Policy, make_policy
from busrl.scheduling.groups import slot_priority
from busrl.scheduling.predictor import Candidate, Unpredicted
from busrl.topology.kinds import POLICIES


def candidate(draw: int, length: int = 10) -> Candidate:
    return Candidate(draw, "x" * length, 4096)


def prompt_of(draw: int, lengths: list[int]) -> str:
    return "x" * lengths[draw % len(lengths)]


def supply(policy: Policy, opened: set[int], lengths: list[int]) -> None:
    """What the scheduler does: keep the policy supplied with the oldest draws that are not opened."""
    waiting = [draw for draw in range(len(opened) + policy.horizon) if draw not in opened][: policy.horizon]
    policy.offer([candidate(draw, lengths[draw % len(lengths)]) for draw in policy.missing(waiting)])


@settings(max_examples=80)
@given(
    name=st.sampled_from([*POLICIES]),
    horizon=st.integers(1, 12),
    rows=st.integers(0, 40),
    fails=st.lists(st.booleans(), max_size=40),
    aging=st.sampled_from([0.0, 0.5, 4.0]),
    lengths=st.lists(st.integers(0, 4000), min_size=1, max_size=40),
    entropies=st.lists(st.floats(0, 5), max_size=40),
)
def test_no_draw_waits_over_two_horizons_and_order_holds_within_one(
    name: str, horizon: int, rows: int, fails: list[bool], aging: float, lengths: list[int], entropies: list[float]
) -> None:
    policy = make_policy(name, horizon, RulesPredictor(), aging=aging, tail_share=0.9, group_size=2, window=4)
    opened: set[int] = set()
    within: dict[int, int] = {}  # draw -> groups opened when it came within the horizon
    tries = 0
    while (count := len(opened)) < 60:
        supply(policy, opened, lengths)
        oldest = next(draw for draw in range(100) if draw not in opened)
        for draw in range(oldest, oldest + horizon):
            within.setdefault(draw, count)
        chosen = policy.next()
        assert chosen is not None and chosen.draw not in opened
        assert oldest <= chosen.draw < oldest + horizon
        tries += 1
        if tries <= len(fails) and fails[tries - 1]:
            continue  # its dispatch failed: it is offered again, and has lost nothing
        assert count - within[chosen.draw] <= 2 * horizon - 2
        opened.add(chosen.draw)
        flying = sorted(opened)[-3:]
        policy.finished(flying[:2], [1 + 13 * count, 300][: len(flying[:2])])
        policy.look(flying, [2] * len(flying), rows)
        if count < len(entropies):
            policy.feedback(entropies[count])


@settings(max_examples=40)
@given(groups=st.integers(1, 8), lengths=st.lists(st.integers(0, 400), min_size=1, max_size=40))
def test_adaptive_opens_the_draws_of_a_round_before_any_other_longest_first(groups: int, lengths: list[int]) -> None:
    policy = make_policy("adaptive", 2 * groups, RulesPredictor(), round_groups=groups)
    opened: set[int] = set()
    order = []
    for _ in range(5 * groups):
        supply(policy, opened, lengths)
        chosen = policy.next()
        assert chosen is not None
        order.append(chosen)
        opened.add(chosen.draw)
    for start in range(0, len(order), groups):
        whole = order[start : start + groups]
        assert sorted(c.draw for c in whole) == list(range(start, start + groups))
        predicted = RulesPredictor().predict(whole).tolist()
        assert predicted == sorted(predicted, reverse=True)


def test_adaptive_keeps_its_long_group_share_and_fills_with_short_ones() -> None:
    lengths = [10] * 7 + [900]
    policy = make_policy("adaptive", 64, RulesPredictor(), tail_share=0.5, group_size=4)
    opened, long = list[int](), list[int]()
    flying: list[int] = []
    in_use = []
    for turn in range(400):
        supply(policy, set(opened), lengths)
        policy.look(sorted(flying), [4] * len(flying), 32)
        chosen = policy.next()
        assert chosen is not None
        opened.append(chosen.draw)
        flying.append(chosen.draw)
        if len(flying) > 8:  # 8 groups of 4 rows; a long one ends only when nothing else runs, or after 40 turns
            over = [d for d in flying if len(prompt_of(d, lengths)) == 10 or turn - opened.index(d) > 40]
            flying.remove(over[0] if over else flying[0])
        in_use.append(sum(4 for d in flying if len(prompt_of(d, lengths)) == 900))
        long.append(chosen.draw % 8 == 7)
    middle = in_use[100:300]
    assert max(middle) <= 20 and sum(middle) / len(middle) > 8, (max(middle), sum(middle) / len(middle))
    assert policy.metrics()["tail_reserved"] == 16.0


def test_fifo_keeps_the_order_drawn_and_sjf_takes_the_short_ones_first() -> None:
    lengths = [500, 10, 300, 20]
    for name, order in (("fifo", [0, 1, 2, 3]), ("sjf", [1, 3, 2, 0])):
        policy = make_policy(name, 4, RulesPredictor(), aging=0.0)
        policy.offer([candidate(draw, n) for draw, n in enumerate(lengths)])
        assert [c.draw for c in (policy.next() for _ in range(4)) if c] == order
        assert policy.next() is None


def test_waiting_lifts_a_long_prompt_before_the_horizon_forces_it() -> None:
    def position(aging: float) -> int:
        policy, opened = make_policy("sjf", 10, RulesPredictor(), aging=aging), set[int]()
        for count in range(30):
            supply(policy, opened, [400] + [10] * 9)
            chosen = policy.next()
            assert chosen is not None
            opened.add(chosen.draw)
            if chosen.draw == 0:
                return count
        raise AssertionError("draw 0 starved")

    assert position(aging=8.0) < position(aging=0.0) == 9


def test_low_entropy_restores_the_drawn_order_and_high_makes_sjf_strict() -> None:
    policy = make_policy("sjf", 4, RulesPredictor(), aging=0.0)
    for _ in range(20):
        policy.feedback(1.0)
    for _ in range(60):
        policy.feedback(0.1)
    policy.offer([candidate(draw, n) for draw, n in enumerate([500, 10, 300, 20])])
    assert [c.draw for c in (policy.next() for _ in range(4)) if c] == [0, 1, 2, 3]


def test_a_group_that_could_not_be_dispatched_can_be_offered_again() -> None:
    policy = make_policy("fifo", 4, Unpredicted())
    policy.offer([candidate(0), candidate(1)])
    first = policy.next()
    assert first is not None and policy.missing([0, 1, 2]) == [0, 2]
    policy.offer([first])
    assert policy.next() == first


def test_slots_of_older_groups_go_first_and_validation_may_go_before_all() -> None:
    assert 0 >= slot_priority(0) > slot_priority(1) > slot_priority(10**6) >= -(2**31)


@given(st.lists(st.tuples(st.text(max_size=80), st.integers(1, 5000)), max_size=20))
def test_predictions_are_finite_within_the_limit_and_independent_of_the_batch(tasks: list[tuple[str, int]]) -> None:
    rules = RulesPredictor()
    batch = [Candidate(i, prompt, limit) for i, (prompt, limit) in enumerate(tasks)]
    together = rules.predict(batch)
    assert together.shape == (len(batch),) and np.isfinite(together).all()
    assert all(1 <= p <= c.max_new_tokens for p, c in zip(together, batch))
    assert together.tolist() == [float(rules.predict([c])[0]) for c in batch]


def test_keywords_of_both_languages_rank_prompts() -> None:
    prompts = [
        "Answer yes or no: is 7 prime?",
        "What is 3+4?",
        "Prove step by step that 7 is prime.",
        "证明七是素数",
        "是否素数",
    ]
    short, plain, long, chinese_long, chinese_short = RulesPredictor().predict(
        [Candidate(i, prompt, 4096) for i, prompt in enumerate(prompts)]
    )
    assert short < plain < long and chinese_short < chinese_long


def test_kendall_tau_knows_order_reverse_and_nothing() -> None:
    assert kendall_tau([1, 2, 3], [10, 20, 30]) == 1.0
    assert kendall_tau([1, 2, 3], [3, 2, 1]) == -1.0
    assert kendall_tau([1, 1, 1], [1, 2, 3]) == 0.0
    assert kendall_tau([1, 2, 3, 4], [1, 2, 4, 3]) == pytest.approx(4 / 6)
