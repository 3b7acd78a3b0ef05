"""Episodes of a trace: `[[process]] role = "agent" function = "busrl.agents.scripted:episode"`, for scripted runs.

Plays the `turns` of a line (`busrl.data.trace`): model calls of given lengths, and waits as long as its tools took.
Knows nothing of engines, which draw as many tokens as they are asked for.
"""

from __future__ import annotations

import asyncio
import zlib
from typing import Any

from busrl.agents.llm import Llm
from busrl.data import plain_text
from busrl.data.trace import turns_in
from busrl.errors import DataError

BYTES_PER_TOKEN, IDS = 4, 8  # a prompt has an id for so many bytes, of the first ones that every model has
RIGHT = 0.5  # share of the episodes that a coin rewards, where the line has no rewards


async def episode(task: dict[str, Any], llm: Llm) -> float:
    """Play a member of the line's group: each call reads all that was read and drawn before it."""
    turns = turns_in(task, "the line")
    if not turns:
        raise DataError("the line has no turns: [[tokens, tool_s], ...]; give a trace of episodes")
    path = [byte % IDS for byte in plain_text(task["prompt"]).encode()[::BYTES_PER_TOKEN]] or [0]
    for tokens, tool_s in turns[llm.uid % len(turns)]:
        answer = await llm.complete(path, max_tokens=tokens)
        path += [*answer.ids, path[0]]  # what tools say is one id
        await asyncio.sleep(tool_s)
    rewards = task.get("rewards") or ()
    coin = zlib.crc32(str(llm.uid).encode()) / (1 << 32)
    return float(rewards[llm.uid % len(rewards)] if rewards else coin < RIGHT)
