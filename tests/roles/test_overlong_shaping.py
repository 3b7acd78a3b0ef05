"""The reward of a cut answer is changed in the copy of the learner only, for training, for any reward worker."""

from __future__ import annotations

import numpy as np
import pytest

from busrl.ring import State
from busrl.roles.learner.groups import shaped

LINE = np.dtype([("state", np.uint8), ("cls", np.uint8), ("finish", np.uint8), ("reward", np.float64)])
ENDED, CUT = 1, 2


def lines() -> np.ndarray:
    return np.array(
        [
            (State.REWARDED, 0, CUT, 0.75), (State.REWARDED, 0, ENDED, 0.75), (State.TRAINING, 0, CUT, 1.0),
            (State.REWARDED, 1, CUT, 0.75), (State.GENERATED, 0, CUT, 0.0),
        ],
        LINE,
    )


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({}, [0.75, 0.75, 1.0, 0.75, 0.0]),
        ({"truncated": 0.0}, [0.0, 0.75, 0.0, 0.75, 0.0]),
        ({"truncated": -1.0}, [-1.0, 0.75, -1.0, 0.75, 0.0]),
        ({"penalty": 0.5}, [0.25, 0.75, 0.5, 0.75, 0.0]),
    ],
)
def test_only_judged_training_answers_that_the_limit_cut_are_worth_something_else(
    keys: dict[str, float], expected: list[float]
) -> None:
    assert shaped(lines(), **keys)["reward"].tolist() == expected
