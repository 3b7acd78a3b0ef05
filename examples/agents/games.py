"""Two games of several turns with a state outside the model: a calculator, and guessing a number by higher and lower.

Played by the agents of `games.toml`; `make_games.py` makes the model and the tasks. Each turn continues the last one,
so an episode is one training sequence. The text that the game writes between the turns is read, not trained.
"""

from __future__ import annotations

from typing import Any

HIGHER, LOWER, TRIES = "|", ".", 3


async def calculator(task: dict[str, Any], llm: Any) -> float:
    """The game of `47=`: type both digits into the calculator, then write the digit that it shows, the last of their
    sum."""
    keys = await llm.complete(task["prompt"], max_tokens=2)
    if not keys.text.isdigit():
        return 0.0
    answer = await llm.complete(f"{task['prompt']}{keys.text}|{shown(keys.text)}=", max_tokens=1)
    return float(answer.text == task["answer"])


def shown(keys: str) -> int:
    return sum(map(int, keys)) % 10


def typed(text: str, tools: Any) -> tuple[str, list[tuple[str, dict[str, int]]]]:
    """Read the calls of tools in a text (`agents.tools` of calculator.toml): two digits, which are to be added."""
    if len(text) == 2 and text.isdigit():
        return "", [(tools[0]["function"]["name"], {"a": int(text[0]), "b": int(text[1])})]
    return text, []


async def guess(task: dict[str, Any], llm: Any) -> float:
    """The game of a digit from 1 to 6 in three tries: after a wrong one the game writes whether it is higher or lower.
    """
    text = task["prompt"]
    for _ in range(TRIES):
        digit = (await llm.complete(text, max_tokens=1)).text
        if digit == task["answer"] or not digit.isdigit():
            return float(digit == task["answer"])
        text += digit + (HIGHER if digit < task["answer"] else LOWER)
    return 0.0
