"""An advantage estimator by import path: each reward against the mean of the others (RLOO, arXiv 2402.14740).

    [learner]
    advantage = "advantage.py:leave_one_out"
"""

from __future__ import annotations

from collections.abc import Sequence


def leave_one_out(rewards: Sequence[float], lengths: Sequence[int]) -> list[float]:
    """R minus the mean of the other rewards of the group. `lengths`, in tokens, are not used here."""
    total, others = sum(rewards), len(rewards) - 1
    return [reward - (total - reward) / others for reward in rewards]
