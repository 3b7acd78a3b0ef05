"""Episodes of a trace, for scripted runs: `[[process]] role = "agent" function = "busrl.agents.scripted:episode"`.

Plays the `turns` of a line (`busrl.data.trace`): a model call for as many tokens as the turn has, then a pause as long
as the turn's tools took. Knows nothing of engines.
"""

from __future__ import annotations

import asyncio
import zlib
from typing import Any

from busrl.agents.llm import Llm
from busrl.data import plain_text
from busrl.data.trace import turns_in
from busrl.errors import DataError

BYTES_PER_TOKEN, IDS = 4, 8  # a prompt is encoded as an id for every 4 bytes, of the first 8: every model has those
RIGHT = 0.5  # share of the episodes that get the reward 1 where the line has no rewards


async def episode(task: dict[str, Any], llm: Llm) -> float:
    """Play a member of the line's group. Each call reads what the calls before it read and drew."""
    turns = turns_in(task, "the line")
    if not turns:
        raise DataError("the line has no turns: [[tokens, tool_s], ...]; give a trace of episodes")
    path = [byte % IDS for byte in plain_text(task["prompt"]).encode()[::BYTES_PER_TOKEN]] or [0]
    for tokens, tool_s in turns[llm.uid % len(turns)]:
        answer = await llm.complete(path, max_tokens=tokens)
        path += [*answer.ids, path[0]]  # the result of a tool is one id
        await asyncio.sleep(tool_s)
    rewards = task.get("rewards") or ()
    coin = zlib.crc32(str(llm.uid).encode()) / (1 << 32)
    return float(rewards[llm.uid % len(rewards)] if rewards else coin < RIGHT)
