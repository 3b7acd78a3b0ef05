"""The cut into micro-batches, and samples that must not be trained."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from busrl.data.vocabulary import TokenRows
from busrl.training import batch
from busrl.training.batch import Sample, first_fault


def sample(index: int, prompt: int, tokens: int, group: int = 0) -> Sample:
    return Sample(index, group, index, np.arange(prompt, dtype=np.int32), np.arange(tokens, dtype=np.int32),
                  np.full(tokens, -1.0, np.float32), np.zeros(tokens, np.uint32))


shapes = st.lists(st.tuples(st.integers(1, 9), st.integers(1, 20), st.integers(0, 3)), min_size=1, max_size=30)


@given(shapes=shapes, budget=st.integers(1, 200), together=st.booleans())
def test_a_cut_holds_every_sample_once_within_the_budget_or_alone(shapes: Any, budget: int, together: bool) -> None:
    samples = [sample(i, p, t, g) for i, (p, t, g) in enumerate(shapes)]
    parts = batch.cut(samples, budget, together)
    assert sorted(i for part in parts for i in part) == list(range(len(samples)))
    for part in parts:
        lengths = [samples[i].length for i in part]
        assert lengths == sorted(lengths)
        assert len(part) == 1 or (sum(lengths) if together else len(lengths) * max(lengths)) <= budget


@given(shapes=shapes)
def test_each_generated_token_is_a_target_once_and_no_prompt_token_ever(shapes: Any) -> None:
    samples = [sample(i, p, t, g) for i, (p, t, g) in enumerate(shapes)]
    ids, rows, columns = batch.pad(samples)
    expected = [(i, len(s.prompt_ids) - 1 + t) for i, s in enumerate(samples) for t in range(len(s.token_ids))]
    assert list(zip(rows.tolist(), columns.tolist(), strict=True)) == expected
    targets = ids[rows, columns + 1].tolist()
    assert targets == [token for s in samples for token in s.token_ids.tolist()]


def test_a_good_sample_has_no_fault_and_a_certain_token_is_fine() -> None:
    good = sample(0, 3, 4)
    assert first_fault([good, replace(good, behaviour_logprobs=np.zeros(4, np.float32))], TokenRows(rows=10)) is None


@pytest.mark.parametrize(("change", "text"), [
    ({"behaviour_logprobs": np.array([-1, -1, -1], np.float32)}, "4 tokens, 3 log-probabilities, 4 versions"),
    ({"behaviour_logprobs": np.array([-1, 0.5, -1, -1], np.float32)}, "above 0 or not a finite number: \\[0.5\\]"),
    ({"behaviour_logprobs": np.array([-1, np.nan, -1, -1], np.float32)}, "above 0 or not a finite number: \\[nan\\]"),
    ({"behaviour_logprobs": np.array([-1, -np.inf, -1, -1], np.float32)}, "-inf"),
    ({"prompt_ids": np.zeros(0, np.int32)}, "at least one of each"),
    ({"prompt_ids": np.array([10], np.int32)}, "token 10 is outside of the vocabulary of 10"),
    ({"token_ids": np.array([0, 1, -1, 2], np.int32)}, "token -1 is outside"),
    ({"temperature": 0.0}, "temperature 0.0"),
    ({"reward": float("nan")}, "reward nan: training needs a finite number"),
    ({"reward": float("inf")}, "reward inf"),
])
def test_a_sample_that_must_not_be_trained_says_why(change: dict[str, Any], text: str) -> None:
    good = sample(0, 3, 4)
    fault = first_fault([good, replace(good, **change), good], TokenRows(rows=10))
    assert fault is not None and fault[0] == 1
    assert re.search(text, fault[1]), fault
