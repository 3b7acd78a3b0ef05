"""Credit by turn: unbiased where the policy decides when to stop, against exact sums over a small world."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from busrl.algorithms.advantages import group_std, turn_advantages

rewards = st.floats(-5, 5).map(lambda value: round(value, 3))
groups = st.lists(st.lists(rewards, min_size=1, max_size=5), min_size=2, max_size=5)


@given(group=groups, gamma=st.sampled_from([1.0, 0.9, 0.5]))
def test_an_advantage_is_what_came_of_a_turn_less_the_others(
    group: list[list[float]], gamma: float
) -> None:
    returns = [[sum(r * gamma**k for k, r in enumerate(own[t:])) for t in range(len(own))] for own in group]
    credit = turn_advantages(group, gamma)
    for i, row in enumerate(credit):
        assert len(row) == len(group[i])
        for t, value in enumerate(row):
            others = [turn[t] if t < len(turn) else 0.0 for j, turn in enumerate(returns) if j != i]
            assert value == pytest.approx(returns[i][t] - sum(others) / len(others), abs=1e-9)


@given(group=groups)
def test_the_advantages_of_a_turn_that_all_reached_add_up_to_0(group: list[list[float]]) -> None:
    credit = turn_advantages(group)
    for t in range(min(map(len, group))):
        assert math.fsum(row[t] for row in credit) == pytest.approx(0.0, abs=1e-9)


def test_an_ended_episode_counts_0_in_later_baselines() -> None:
    assert turn_advantages([[1.0, 2.0, 4.0], [8.0]]) == [[7.0 - 8.0, 6.0, 4.0], [8.0 - 7.0]]


def test_episodes_of_one_turn_compare_as_leave_one_out() -> None:
    values = [0.0, 1.0, 1.0, 4.0]
    credit = torch.tensor(turn_advantages([[value] for value in values], scaled=True), dtype=torch.float64)[:, 0]
    assert torch.allclose(credit, group_std(values) * 4 / 3)
    with pytest.raises(ValueError, match="a group of 1 has no advantage"):
        turn_advantages([[1.0]])


# -- bias, over all episodes of a world of three turns ----

TURNS = 3
WORTH = ((1.0, -2.0), (0.5, 3.0), (-1.0, 4.0))  # of going on at each turn, of stopping there
Advantages = Callable[[Sequence[Sequence[float]]], Sequence[Sequence[float]]]


def episodes(stop: Tensor) -> list[tuple[list[float], list[Tensor]]]:
    """All that can happen, by the chances to stop at each turn: rewards, and the log-probability of each act."""
    found = []
    for last in range(TURNS):
        acts = [torch.log(1 - stop[t]) for t in range(last)] + [torch.log(stop[last])]
        found.append(([*(WORTH[t][0] for t in range(last)), WORTH[last][1]], acts))
    acts = [torch.log(1 - stop[t]) for t in range(TURNS)]
    return [*found, ([going for going, _ in WORTH], acts)]


def expected(policy: Tensor, advantages: Advantages) -> Tensor:
    """The expectation of the gradient estimate of groups of 2, exactly: over all pairs of episodes."""
    world = episodes(torch.sigmoid(policy))
    total = torch.zeros(())
    for pair in itertools.product(world, repeat=2):
        probability = math.exp(sum(float(act.detach()) for _, acts in pair for act in acts))
        values = advantages([own for own, _ in pair])
        score = sum(
            (act * value for (_, acts), row in zip(pair, values, strict=True) for act, value in zip(acts, row)),
            start=torch.zeros(()),
        )
        total = total + probability * score / 2
    (gradient,) = torch.autograd.grad(total, policy)
    return gradient


def right(policy: Tensor) -> Tensor:
    """The gradient of the mean reward."""
    value = sum((torch.stack(acts).sum().exp() * sum(own) for own, acts in episodes(torch.sigmoid(policy))),
                start=torch.zeros(()))
    (gradient,) = torch.autograd.grad(value, policy)
    return gradient


def among_those_that_got_there(group: Sequence[Sequence[float]]) -> list[list[float]]:
    """The biased variant: the mean over the episodes that have a turn at t, itself included."""
    returns = [[sum(own[t:]) for t in range(len(own))] for own in group]
    there = [[row[t] for row in returns if t < len(row)] for t in range(max(map(len, returns)))]
    return [[value - sum(there[t]) / len(there[t]) for t, value in enumerate(row)] for row in returns]


def test_the_gradient_has_no_bias_where_a_policy_learns_to_stop() -> None:
    policy = torch.tensor([-0.4, 0.3, 0.8], dtype=torch.float64, requires_grad=True)
    wanted = right(policy)
    error = float((expected(policy, turn_advantages) - wanted).norm() / wanted.norm())
    assert error < 1e-12
    assert float((expected(policy, among_those_that_got_there) - wanted).norm() / wanted.norm()) > 0.1


# -- keys: turns that an episode names by what they are for --

KEYS = ("", "plan", "code")
keyed = st.lists(st.lists(st.tuples(rewards, st.sampled_from(KEYS)), min_size=1, max_size=5), min_size=2, max_size=5)


@given(group=keyed, gamma=st.sampled_from([1.0, 0.5]), scaled=st.booleans())
def test_a_turn_with_a_key_is_compared_with_others_of_that_key(
    group: list[list[tuple[float, str]]], gamma: float, scaled: bool
) -> None:
    own = [[reward for reward, _ in row] for row in group]
    returns = [[sum(r * gamma**k for k, r in enumerate(row[t:])) for t in range(len(row))] for row in own]
    plain = turn_advantages(own, gamma)
    credit = turn_advantages(own, gamma, scaled, [[key for _, key in row] for row in group])
    scale = float(torch.tensor([sum(row) for row in own], dtype=torch.float64).std() + 1e-6) if scaled else 1.0
    for i, row in enumerate(group):
        for t, (_, key) in enumerate(row):
            each = [[returns[j][k] for k, (_, its) in enumerate(other) if its == key] for j, other in enumerate(group)]
            there = [sum(found) / len(found) for j, found in enumerate(each) if key and j != i and found]
            wanted = returns[i][t] - sum(there) / len(there) if there else plain[i][t]
            assert credit[i][t] * scale == pytest.approx(wanted, abs=1e-8)


@given(group=groups)
def test_a_group_without_keys_is_credited_as_if_there_were_none(group: list[list[float]]) -> None:
    assert turn_advantages(group, keys=[[""] * len(own) for own in group]) == turn_advantages(group)
    assert turn_advantages(group, keys=[[] for _ in group]) == turn_advantages(group)


# A world in which the first act decides the key of the second turn: x or y. The policy is three logits.
OUTCOMES = ((1.0, 3.0), (0.0, 7.0))  # by the first act, and by the second


def choices(policy: Tensor) -> list[tuple[list[float], list[str], list[Tensor]]]:
    """All that can happen: rewards and keys of the turns, and the log-probability of each act."""
    found = []
    for first, second in itertools.product((0, 1), repeat=2):
        acts = [torch.sigmoid(policy[0]), torch.sigmoid(policy[1 + first])]
        logs = [torch.log(chance if act else 1 - chance) for act, chance in zip((first, second), acts, strict=True)]
        found.append(([0.0, OUTCOMES[first][second]], ["", "xy"[first]], logs))
    return found


def estimated(policy: Tensor, credit: Callable[..., Sequence[Sequence[float]]], members: int = 3) -> Tensor:
    """The expectation of the gradient estimate of groups, exactly: over all that can happen in them."""
    total = torch.zeros(())
    for group in itertools.product(choices(policy), repeat=members):
        probability = math.exp(sum(float(act.detach()) for _, _, acts in group for act in acts))
        values = credit([own for own, _, _ in group], [keys for _, keys, _ in group])
        terms = (act * value for (_, _, acts), row in zip(group, values, strict=True) for act, value in zip(acts, row))
        total = total + probability * sum(terms, start=torch.zeros(())) / members
    (gradient,) = torch.autograd.grad(total, policy)
    return gradient


def with_itself(rewards: Sequence[Sequence[float]], keys: Sequence[Sequence[str]]) -> list[list[float]]:
    """The biased variant: the mean over all episodes with the key of a turn, its own among them."""
    credit = turn_advantages(rewards)
    for i, own in enumerate(keys):
        same = [row[1] for row, its in zip(rewards, keys, strict=True) if its[1] == own[1]]
        credit[i][1] = rewards[i][1] - sum(same) / len(same)
    return credit


def test_a_baseline_by_a_key_that_the_episode_chose_has_no_bias() -> None:
    policy = torch.logit(torch.tensor([0.35, 0.2, 0.6], dtype=torch.float64)).requires_grad_()
    mean = sum((torch.stack(acts).sum().exp() * sum(own) for own, _, acts in choices(policy)), start=torch.zeros(()))
    (wanted,) = torch.autograd.grad(mean, policy)
    found = estimated(policy, lambda own, keys: turn_advantages(own, keys=keys))
    assert float((found - wanted).abs().max()) < 1e-9
    assert float((estimated(policy, with_itself) - wanted).abs().max()) > 0.1
