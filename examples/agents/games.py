"""Two games of several turns with a state outside the model: a calculator, and guessing a number by higher and lower.

Played by the agents of `games.toml`; `make_games.py` makes the model and the tasks. Each turn goes on where the last
one ended, so an episode is one training sequence; what the world writes between the turns is read, not trained.
"""

from __future__ import annotations

from typing import Any

HIGHER, LOWER, TRIES = "|", ".", 3


async def calculator(task: dict[str, Any], llm: Any) -> float:
    """`47=`: type both digits into the calculator, then say what it shows: the last digit of their sum."""
    keys = await llm.complete(task["prompt"], max_tokens=2)
    if not keys.text.isdigit():
        return 0.0
    said = await llm.complete(f"{task['prompt']}{keys.text}|{shown(keys.text)}=", max_tokens=1)
    return float(said.text == task["answer"])


def shown(keys: str) -> int:
    return sum(map(int, keys)) % 10


def typed(text: str, tools: Any) -> tuple[str, list[tuple[str, dict[str, int]]]]:
    """How a model of 16 characters calls a tool (`agents.tools` of calculator.toml): two digits are to be added."""
    if len(text) == 2 and text.isdigit():
        return "", [(tools[0]["function"]["name"], {"a": int(text[0]), "b": int(text[1])})]
    return text, []


async def guess(task: dict[str, Any], llm: Any) -> float:
    """A digit from 1 to 6 in three tries; after each wrong one the world says whether the number is higher or lower."""
    text = task["prompt"]
    for _ in range(TRIES):
        said = (await llm.complete(text, max_tokens=1)).text
        if said == task["answer"] or not said.isdigit():
            return float(said == task["answer"])
        text += said + (HIGHER if said < task["answer"] else LOWER)
    return 0.0
