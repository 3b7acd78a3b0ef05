"""The task `sort` and its recipe: pure properties."""

from __future__ import annotations

import random
import re
from dataclasses import fields, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from busrl.errors import UserError
from busrl.quickstart import task
from busrl.quickstart.task import RECIPES, Recipe, find

RECIPE = Recipe()
SEEDS = st.integers(0, 2**32)


def test_no_prompt_is_in_both_splits_nor_twice_in_one() -> None:
    train, validation = task.splits(RECIPE)
    assert (len(train), len(validation)) == (RECIPE.train_prompts, RECIPE.validation_prompts)
    assert len({*train, *validation}) == len(train) + len(validation)


def test_the_splits_are_the_same_every_time() -> None:
    assert task.splits(RECIPE) == task.splits(RECIPE)


@given(SEEDS)
def test_a_right_completion_is_judged_right_and_fits_max_new_tokens(seed: int) -> None:
    rng = random.Random(seed)
    prompt = task.draw_prompt(RECIPE, rng)
    completion = task.draw_completion(RECIPE, prompt, 0.0, rng)
    match = re.search(task.EXTRACT, completion + task.END_TOKEN)
    assert match is not None and match[1] == task.answer_of(prompt)
    assert len(completion) + 1 <= RECIPE.max_new_tokens and len(prompt) <= RECIPE.max_prompt_tokens


@given(SEEDS)
def test_a_spoilt_answer_differs_in_one_digit(seed: int) -> None:
    rng = random.Random(seed)
    answer = task.answer_of(task.draw_prompt(RECIPE, rng))
    spoilt = task.spoil(answer, rng)
    assert len(spoilt) == len(answer) and sum(a != b for a, b in zip(answer, spoilt, strict=True)) == 1


@given(st.text("0123456789", min_size=3, max_size=10))
def test_a_completion_without_its_end_token_is_judged_wrong(digits: str) -> None:
    assert re.search(task.EXTRACT, f"..|{digits}") is None


def test_the_first_digit_sets_the_mean_length_and_lengths_spread_widely() -> None:
    rng = random.Random(0)
    means = []
    lengths = []
    for first in "0369":
        of_digit = [len(task.draw_filler(RECIPE, f"{first}12=", rng)) for _ in range(2000)]
        means.append(sum(of_digit) / len(of_digit))
        lengths += [length + 5 for length in of_digit]
    assert means == sorted(means) and means[-1] > 5 * means[0]
    lengths.sort()
    assert lengths[len(lengths) * 99 // 100] >= 8 * lengths[len(lengths) // 100]


@pytest.mark.parametrize("field", [field.name for field in fields(Recipe)])
def test_every_number_of_a_recipe_is_in_its_folder_name(field: str) -> None:
    value = getattr(RECIPE, field)
    changed = replace(RECIPE, **{field: f"{value}-b" if isinstance(value, str) else value + 1})
    assert changed.folder.rpartition("-")[2] != RECIPE.folder.rpartition("-")[2]


def test_an_unknown_name_is_refused_with_the_names_there_are() -> None:
    assert find("tiny:sort").name == "tiny:sort"
    with pytest.raises(UserError, match=r"'tiny:sorted'.*choose one of.*tiny:sort"):
        find("tiny:sorted")
    assert list(RECIPES) == ["tiny:sort"]
