"""Recipes set what a file leaves out; combinations that train something else than was asked for are refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from busrl.algorithms import catalog
from busrl.config import Topology
from busrl.config.explain import report

Loaded = Callable[..., Topology]
Refused = Callable[..., list[str]]


@pytest.mark.parametrize("recipe", sorted(catalog.RECIPES))
def test_a_recipe_is_accepted_as_it_is_and_check_prints_all_that_it_set(loaded: Loaded, recipe: str) -> None:
    topology = loaded("", f"learner.recipe={recipe}")
    facts = catalog.LOSSES[topology.learner.loss]
    page, plain = report(topology), loaded()
    for key, value in {**facts.settings, **catalog.RECIPES[recipe]}.items():
        section, name = key.split(".")
        if isinstance(value, catalog.OfLimit):
            value = topology.generation.max_new_tokens // value.parts
        assert getattr(getattr(topology, section), name) == value
        if getattr(getattr(plain, section), name) != value:
            assert f"  {key} = " in page


def test_what_the_file_says_wins_over_the_recipe_and_over_the_loss_and_check_tells(loaded: Loaded) -> None:
    topology = loaded("", "learner.recipe=grpo", "learner.kl_coef=0.001", "learner.clip_high=0.3")
    assert (topology.learner.kl, topology.learner.kl_coef, topology.learner.clip_high) == ("k3", 0.001, 0.3)
    assert "learner.kl_coef = 0.001 is the file's; recipe \"grpo\" would set 0.04" in report(topology)
    own = loaded("", "learner.loss=gspo", "learner.clip_low=0.01").learner
    assert (own.clip_low, own.clip_high, own.aggregation) == (0.01, 4e-4, "seq-mean-token-mean")


def test_the_sum_of_dr_grpo_is_divided_by_the_limit_of_an_answer(loaded: Loaded) -> None:
    topology = loaded("", "learner.recipe=dr_grpo")
    assert topology.learner.length_norm == topology.generation.max_new_tokens
    assert loaded("", "learner.recipe=dr_grpo", "learner.length_norm=7").learner.length_norm == 7


def test_a_recorded_topology_keeps_what_the_recipe_set(loaded: Loaded) -> None:
    topology = loaded("", "learner.recipe=cispo")
    assert Topology.from_json(topology.to_json()) == topology


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        (("correction=token_tis",), "count it twice"),
        (("loss=dppo", "correction=icepop"), "count them twice"),
        (("loss=decoupled", "updates_per_batch=2", "correction=icepop"), "count them twice"),
        (("ratio=proximal",), "nothing corrects for old samples"),
        (("newest_ratio=one", "updates_per_batch=2"), "not 1 any more"),
        (("newest_ratio=one", "loss=reinforce", "correction=token_tis"), "hides from the correction"),
        (("newest_ratio=one", "ratio=proximal", "updates_per_batch=2"), "recorded log-probabilities"),
        (("loss=gspo", "aggregation=token-mean"), "ratio is of whole samples"),
        (("kl_coef=0.1",), "no KL is computed"),
        (("kl=k3_is", "kl_coef=0.1", "kl_in=reward"), "no gradient"),
        (("loss=reinforce", "correction=icepop", "correction_low=6"), "everything would be dropped"),
        (("loss=clip_cov", "clip_cov_range=[5, 1]"), "no covariance"),
        (("recipe=grpoo",), "grpo"),
    ],
    ids=str,
)
def test_a_combination_that_trains_something_else_is_refused_by_name(
    refused: Refused, keys: tuple[str, ...], words: str
) -> None:
    found = refused("", *(f"learner.{key}" for key in keys))
    assert any(words in text for text in found), found


def test_a_reference_is_looked_at_before_a_start(refused: Refused) -> None:
    found = refused("", "learner.kl=k3", "learner.kl_coef=0.1", "model.reference=/nowhere")
    assert any("model.reference" in text and "no such folder" in text for text in found), found


@pytest.mark.parametrize(
    ("keys", "why"),
    [
        ((), ""), (("recipe=scalerl",), ""), (("recipe=reinforce_pp",), "compares all samples"),
        (("recipe=m2po",), "chooses among all tokens"),
        (("recipe=scalerl", "entropy_coef=0.01"), "divides by a number of the step"),
    ],
    ids=str,
)
def test_check_says_why_a_step_is_not_streamed(loaded: Loaded, keys: tuple[str, ...], why: str) -> None:
    page = report(loaded("", *(f"learner.{key}" for key in keys)))
    assert ("computed at once" in page) == bool(why) and why in page


def test_check_tells_what_old_samples_ask_of_the_learning_rate(loaded: Loaded) -> None:
    assert "careful start" not in report(loaded())
    assert "up to 8 steps old a careful start is 1.5e-04" in report(loaded("", "weights.max_staleness=8"))
    assert "samples of any age" in report(loaded("", "weights.mode=fully-async"))
