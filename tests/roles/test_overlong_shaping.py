"""The reward of a cut answer is changed in the copy of the learner only, for training, for any reward worker."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from busrl.ring import State
from busrl.roles.learner.groups import overlong, shaped
from busrl.topology.rewards import Reward

FIELDS = [("state", np.uint8), ("cls", np.uint8), ("finish", np.uint8), ("reward", np.float64), ("length", np.uint32)]
LINE = np.dtype([(name.replace("length", "response_tokens"), kind) for name, kind in FIELDS])
ENDED, CUT = 1, 2
LIMIT = 100


def lines() -> np.ndarray:
    return np.array(
        [
            (State.REWARDED, 0, CUT, 0.75, 100), (State.REWARDED, 0, ENDED, 0.75, 90),
            (State.TRAINING, 0, CUT, 1.0, 100), (State.REWARDED, 1, CUT, 0.75, 100),
            (State.GENERATED, 0, CUT, 0.0, 100), (State.REWARDED, 0, ENDED, 1.0, 80),
        ],
        LINE,
    )


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({}, [0.75, 0.75, 1.0, 0.75, 0.0, 1.0]),
        ({"truncated": 0.0}, [0.0, 0.75, 0.0, 0.75, 0.0, 1.0]),
        ({"truncated": -1.0}, [-1.0, 0.75, -1.0, 0.75, 0.0, 1.0]),
        ({"truncated": "mask"}, [0.75, 0.75, 1.0, 0.75, 0.0, 1.0]),
        ({"truncated_penalty": 0.5}, [0.25, 0.75, 0.5, 0.75, 0.0, 1.0]),
        ({"overlong_tokens": 20}, [-0.25, 0.25, 0.0, 0.75, 0.0, 1.0]),
        ({"overlong_tokens": 40, "overlong_penalty": 0.4}, [0.35, 0.45, 0.6, 0.75, 0.0, 0.8]),
        ({"overlong_tokens": 20, "truncated": -1.0}, [-1.0, 0.25, -1.0, 0.75, 0.0, 1.0]),
    ],
)
def test_only_long_or_cut_judged_training_answers_change_in_reward(
    keys: dict[str, Any], expected: list[float]
) -> None:
    assert shaped(lines(), Reward(**keys), LIMIT)["reward"].tolist() == pytest.approx(expected)


@given(st.integers(1, 1000), st.integers(1, 1000), st.floats(0, 10), st.lists(st.integers(0, 2000), min_size=1))
def test_the_punishment_of_long_answers_is_the_published_one(
    limit: int, buffer: int, factor: float, lengths: list[int]
) -> None:
    buffer = min(buffer, limit)
    published = [max(-1.0, min(0.0, -(length - (limit - buffer)) / buffer)) * factor for length in lengths]
    assert overlong(np.array(lengths), limit, buffer, factor).tolist() == pytest.approx(published)
