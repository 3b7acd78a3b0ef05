"""Questions of the real run: sums of one-digit numbers from reasoning-gym, and which of them are held out.

Imports reasoning-gym when it makes questions. `trained` is the filter of real.toml, called with each row of a source.

- Its text decides whether a question is held out, so no source and no warm-up has one, with any seed: reasoning-gym's
  item i of seed s is item i + 1 of seed s - 1, so that another seed does not separate the sets.
"""

from __future__ import annotations

import zlib
from typing import Any

KINDS = {  # a validation set each: options of the task chain_sum
    "short": {"min_terms": 2, "max_terms": 3, "min_digits": 1, "max_digits": 1},
    "long": {"min_terms": 4, "max_terms": 4, "min_digits": 1, "max_digits": 1},
}
ONE_IN = 12  # one question in so many is held out


def held_out(question: str) -> bool:
    return zlib.crc32(question.encode()) % ONE_IN == 0


def trained(record: dict[str, Any]) -> bool:
    """Check whether a row may be trained on."""
    return not held_out(record["prompt"])


def questions(kind: str, count: int, seed: int, *, held: bool) -> list[dict[str, Any]]:
    """So many different questions, as lines of prompts; all of them held out, or none."""
    import reasoning_gym

    rows: dict[str, dict[str, Any]] = {}
    size = count * (4 * ONE_IN if held else 4)  # of up to three numbers there are 4,200
    for entry in reasoning_gym.create_dataset("chain_sum", seed=seed, size=size, **KINDS[kind]):
        if held_out(entry["question"]) is held and len(rows) < count:
            row = {"prompt": entry["question"], "answer": entry["answer"], "metadata": entry["metadata"], "tag": kind}
            rows[entry["question"]] = row
    return list(rows.values())
