"""What a training answer is worth that the limit cut: its reward, a fixed number, or its reward less a penalty.

Applied by the learner to its copy of the ring's lines, so that it holds for rewards from every kind of worker, and the
slot keeps what the judge said. Knows nothing of groups. Validation is not touched: it measures the task itself.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from busrl.inference.base import LENGTH

REWARDED, TRAINING = 6, 7
TRAIN = 0


class Worth:
    """`truncated`: "reward" or the number that takes its place; `penalty` is subtracted."""

    def __init__(self, truncated: float | str = "reward", penalty: float = 0.0) -> None:
        self.fixed = None if isinstance(truncated, str) else float(truncated)
        self.penalty = penalty

    def apply(self, lines: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Correct the rewards of a copy of the lines, in place."""
        if self.fixed is None and not self.penalty:
            return lines
        state = lines["state"]
        cut = ((state == REWARDED) | (state == TRAINING)) & (lines["cls"] == TRAIN) & (lines["finish"] == LENGTH)
        worth = lines["reward"] - self.penalty if self.fixed is None else self.fixed
        lines["reward"] = np.where(cut, worth, lines["reward"])
        return lines
