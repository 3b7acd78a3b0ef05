"""The taking game: of seven stones two players take one or two by turns, and who takes the last one wins.

Played by one model in both seats (`take_game.toml`), or against another that is not trained. The text of a game is all
that both have read so far: `7=16=24=` is seven stones, one taken, six left, two taken, four left. Who moves first can
always win, by leaving a multiple of three.
"""

from __future__ import annotations

from typing import Any


async def game(task: dict[str, Any], llm: Any) -> dict[str, float]:
    """Self-play: who wins gets 1, the other 0. Each seat has a group, and so a baseline, of its own."""
    winner = await played(task["prompt"], llm["first"], llm["second"])
    return {"first": float(winner == 0), "second": float(winner == 1)}


async def together(task: dict[str, Any], llm: Any) -> float:
    """The same with one reward for both seats, what they won together: always 1, so that nothing can be learnt."""
    return sum((await game(task, llm)).values())


async def against(task: dict[str, Any], llm: Any) -> float:
    """Play with one trained seat, which begins, against another model (`[[model]]` with `trained = false`)."""
    return float(await played(task["prompt"], llm["player"], llm["opponent"]) == 0)


async def played(text: str, *players: Any) -> int:
    """Play to the end: the number of the winner. A move that is none loses."""
    left, turn = int(text[:-1]), 0
    while True:
        move = (await players[turn].complete(text, max_tokens=1)).text
        if move not in ("1", "2") or int(move) > left:
            return 1 - turn
        left -= int(move)
        if left == 0:
            return turn
        text, turn = f"{text}{move}{left}=", 1 - turn
