"""pass@k, maj@k and intervals against enumeration, and against answers whose true share is known."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from busrl.data.figures import (
    BOOTSTRAP,
    MOST_TAGS,
    Figures,
    Judged,
    by_tag,
    figure,
    majority,
    pass_at_k,
    powers,
    tag_of,
)


@given(st.integers(1, 9).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n), st.integers(1, n))))
def test_pass_at_k_is_the_share_of_choices_with_a_right_answer(case: tuple[int, int, int]) -> None:
    n, c, k = case
    chosen = list(itertools.combinations([True] * c + [False] * (n - c), k))
    assert pass_at_k(n, c, k) == pytest.approx(sum(map(any, chosen)) / len(chosen), abs=1e-12)
    assert pass_at_k(n, c, k) == pytest.approx(1 - math.comb(n - c, k) / math.comb(n, k), abs=1e-12)


def test_pass_at_k_is_not_the_biased_estimate() -> None:
    """1 - (1 - c/n)^k, which draws the same answer twice, is too low (Chen et al. 2021, figure 3)."""
    assert pass_at_k(4, 1, 2) == pytest.approx(0.5) and 1 - (1 - 1 / 4) ** 2 < 0.44


@pytest.mark.parametrize("case", [(4, 5, 1), (4, -1, 1), (4, 1, 5), (4, 1, 0)])
def test_pass_at_k_refuses_what_cannot_be(case: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match="needs 0 <= c <= n"):
        pass_at_k(*case)


@given(st.lists(st.tuples(st.sampled_from(["a", "b", "c", None]), st.booleans()), max_size=7))
def test_the_majority_is_the_mean_over_all_ways_to_break_its_ties(votes: list[tuple[str | None, bool]]) -> None:
    counts = {name: sum(vote == name for vote, _ in votes) for name in ("a", "b", "c")}
    most = max(counts.values())
    best = [name for name, count in counts.items() if count == most]
    shares = [sum(good for vote, good in votes if vote == name) / most for name in best] if most else [0.0]
    assert majority(votes) == pytest.approx(sum(shares) / len(shares))


def test_a_majority_of_answers_that_were_not_found_decides_nothing() -> None:
    assert majority([(None, False), (None, False), ("4", True)]) == 1.0
    assert majority([(None, False)]) == majority([]) == 0.0


def test_every_power_of_two_up_to_k_and_k_itself_are_told() -> None:
    assert [powers(k) for k in (1, 2, 4, 6)] == [[1], [1, 2], [1, 2, 4], [1, 2, 4, 6]]


def test_a_prompt_with_few_answers_counts_in_lower_figures_only() -> None:
    judged = [Judged(0, 0, 1.0), *[Judged(1, 1, 0.0)] * 4]
    figures = Figures(judged, k=4).by_name()
    assert figures["pass@1"].value == 0.5 and figures["pass@1"].prompts == 2
    assert figures["pass@4"].value == 0.0 and figures["pass@4"].prompts == 1


def test_a_prompt_that_is_asked_again_votes_again() -> None:
    first = [Judged(0, 0, 1.0, "4")] * 2
    again = [Judged(0, 1, 0.0, "5")] * 2
    assert Figures([*first, *again], k=2, votes=True).by_name()["maj@2"].value == 0.5


def test_without_extracted_answers_there_is_no_majority() -> None:
    assert "maj@2" not in Figures([Judged(0, 0, 1.0)] * 2, k=2).by_name()


def test_an_answer_is_right_from_the_reward_on_that_solves_its_prompt() -> None:
    judged = [Judged(line, 0, reward) for line, reward in enumerate((0.5, 0.7, 1.0))]
    assert Figures(judged, solved=0.7).by_name()["pass@1"].value == pytest.approx(2 / 3)


@given(st.lists(st.floats(0, 1), min_size=1, max_size=40), st.integers(1, 8))
def test_an_interval_holds_the_mean_and_stays_within_0_and_1(values: list[float], k: int) -> None:
    mean = figure(values, k * len(values))
    assert mean is not None and 0 <= mean.low <= mean.value <= mean.high <= 1
    assert mean.high - mean.low > 0, "even where all are alike: there are not infinitely many"


def test_the_interval_of_right_and_wrong_is_wilsons() -> None:
    """8 of 10, z = 1.96: 0.490 to 0.943 (Wilson 1927); ours counts one degree of freedom less."""
    mean = figure([1.0] * 8 + [0.0] * 2, 10)
    assert mean is not None
    assert mean.low == pytest.approx(0.490, abs=0.03) and mean.high == pytest.approx(0.943, abs=0.01)


@pytest.mark.parametrize("k", [1, 4])
def test_intervals_hold_the_true_share_in_about_95_of_100_rounds(k: int) -> None:
    chance, hits, rounds = np.random.default_rng(0), 0, 400
    for _ in range(rounds):
        hard = chance.beta(2, 2, 60)  # the share of right answers differs between prompts; its mean is 0.5
        mean = figure((chance.random((60, k)) < hard[:, None]).mean(axis=1).tolist(), 60 * k)
        assert mean is not None
        hits += mean.low <= 0.5 <= mean.high
    assert 0.91 <= hits / rounds <= 0.99, hits / rounds


def test_rewards_beyond_0_and_1_have_a_fixed_bootstrapped_interval() -> None:
    values = np.random.default_rng(1).normal(3, 2, 200).tolist()
    mean = figure(values, 200)
    assert mean is not None and mean == figure(values, 200) and BOOTSTRAP >= 1000
    half = 1.96 * float(np.std(values, ddof=1)) / 200**0.5
    assert mean.low == pytest.approx(mean.value - half, abs=0.15 * half)
    assert mean.high == pytest.approx(mean.value + half, abs=0.15 * half)


def test_nothing_judged_has_no_figures() -> None:
    assert figure([], 0) is None and Figures([], k=4).by_name() == {} and Figures([]).mean() is None


def test_a_tag_is_the_named_key_or_source_or_tag() -> None:
    record = {"tag": "b", "source": "a", "level": 3, "deep": {"x": 1}}
    assert [tag_of(record, key) for key in ("", "level", "deep", "none")] == ["a", "3", "", ""]
    assert tag_of({"tag": "b"}, "") == "b" and tag_of({}, "") == ""


def test_the_commonest_tags_alone_have_figures() -> None:
    judged = [Judged(line, 0, 1.0) for line in range(100)]
    figures = by_tag(Figures(judged), {line: "big" if line < 10 else f"own {line}" for line in range(100)})
    assert len(figures) == MOST_TAGS and next(iter(figures)) == "big" and figures["big"]["prompts"] == 10
