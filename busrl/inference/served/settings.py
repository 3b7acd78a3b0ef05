"""What [openai] comes to: where to ask, with which key, how long to wait, which tools to name. Talks to no server."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from busrl.errors import UserError

if TYPE_CHECKING:
    from busrl.topology.machinery import Openai


@dataclass(frozen=True)
class Endpoint:
    """Where to ask and how long to wait; see [openai]."""

    url: str  # of the API, with /v1
    path: str  # "/completions" or "/chat/completions"
    headers: dict[str, str]
    timeout_s: float
    retries: int
    patience_s: float
    vocabulary: int = 0  # 0 = unknown
    eos_ids: frozenset[int] = frozenset()

    @property
    def chat(self) -> bool:
        return self.path.startswith("/chat")


def endpoint_of(settings: Openai, vocabulary: int, eos_ids: frozenset[int]) -> Endpoint:
    """UserError if the key is not in the environment."""
    headers = {}
    if settings.api_key_env:
        key = os.environ.get(settings.api_key_env, "")
        if not key:
            raise UserError(f"openai.api_key_env names ${settings.api_key_env}, which is not set in this environment")
        headers["Authorization"] = f"Bearer {key}"
    path = "/chat/completions" if settings.endpoint == "chat" else "/completions"
    return Endpoint(
        settings.base_url.rstrip("/"), path, headers, settings.timeout_s, settings.retries, settings.patience_s,
        vocabulary, eos_ids,
    )  # fmt: skip


def tools_of(settings: Openai) -> list[Any]:
    """The tools that every chat request names, from a JSON file; none by completions."""
    path = settings.tools if settings.endpoint == "chat" else ""
    if not path:
        return []
    try:
        found = json.loads(Path(path).read_bytes())
    except (OSError, ValueError) as problem:
        raise UserError(f"openai.tools: {path}: {problem}") from problem
    if not isinstance(found, list) or not all(isinstance(tool, dict) for tool in found):
        raise UserError(f"openai.tools: {path}: not a list of objects, each a tool as the chat endpoint takes it")
    return found
