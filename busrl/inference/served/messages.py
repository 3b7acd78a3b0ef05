"""What the served engine asks of its client, and what it hears from it.

Plain data between two threads: the engine's, which makes an `Ask`, and the client's event loop, which writes on it and
answers with `Message`s.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

from busrl.inference.served.answers import Part


@dataclass
class Ask:
    """One request: `body` without what depends on the tokens so far."""

    key: int
    body: dict[str, Any]
    prompt_ids: list[int]
    limit: int
    seed: int
    ids: list[int] = field(default_factory=list)
    failures: int = 0  # in a row
    failing_since: float = 0.0
    gone: bool = False
    attempt: asyncio.Task[None] | None = None


@dataclass(frozen=True)
class Message:
    """What the client has to tell: tokens of a request, its end, why it is refused; what ends everything; or that the
    server went away, and with it (perhaps) the weights that it was given: the gate is closed then."""

    key: int
    part: Part | None = None
    version: int = 0
    ended: bool = False
    refused: str = ""
    problem: Exception | None = None
    lost: bool = False
