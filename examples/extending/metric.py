"""A metric by import path: how different the answers of a group are, and how many tokens are not of the newest policy.

    [learner]
    metrics = ["metric.py:diversity"]
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from busrl.ledger.wal import SampleRecord


def diversity(samples: Sequence[SampleRecord], row: Mapping[str, Any]) -> dict[str, float]:
    """The share of different answers in a group, and of tokens sampled before the newest version in the batch."""
    answers = {(sample.group, sample.token_ids) for sample in samples}
    versions = [version for sample in samples for version in sample.version_array().tolist()]
    newest = max(versions)
    return {
        "different_answers": len(answers) / len(samples),
        "older_tokens": sum(version < newest for version in versions) / len(versions),
        "reward_per_token": row["reward"] / max(1, row["tokens"]),
    }
