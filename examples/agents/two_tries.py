"""An episode of the quickstart's task: the model may try a second time where its first answer is wrong.

Played by the agents of `configs/agents.toml`. `task` is the line of the data; what the function returns is the reward.
"""

from __future__ import annotations

from typing import Any

SECOND_TRY = 0.5  # a right answer is worth this much then


async def episode(task: dict[str, Any], llm: Any) -> float:
    """Two calls at most, each a training sequence of its own."""
    for worth in (1.0, SECOND_TRY):
        answer = await llm.complete(task["prompt"])
        if answer.text.rpartition("|")[2] == task["answer"]:
            return worth
    return 0.0
