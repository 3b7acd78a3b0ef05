"""What an OpenAI-compatible server may answer, read strictly: token ids with their log-probabilities, or garbage.

Pure; used by the client for whole answers and for chunks of a stream. Knows nothing of HTTP or of retries.

- Token ids come as `token_ids` (vLLM's `return_token_ids`) or as tokens that read `token_id:7`. Text is never made into
  ids: the tokens that would be trained are then not those that were drawn.
- An id without a log-probability, a log-probability that is not a number, an id that the model does not know: garbage.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from typing import Any

SHOWN = 200  # characters of an answer in a message
ABOVE_ZERO = 1e-3  # a log-probability is at most 0, give or take the server's rounding
NAMED = "token_id:"


class Garbage(Exception):
    """An answer that can not be used; the message says why, and shows its beginning."""

    def __init__(self, why: str, shown: object = "") -> None:
        text = shown if isinstance(shown, str) else json.dumps(shown, default=str)
        super().__init__(f"{why}: {text[:SHOWN]!r}" if text else why)


@dataclass(frozen=True)
class Part:
    """New tokens of an answer; `finish` is the server's word where the answer ends with them."""

    ids: list[int]
    logprobs: list[float]
    finish: str | None = None
    prompt_ids: list[int] | None = None


@dataclass
class Whole:
    """The chunks of an answer by chat, in one piece when all have come: it can not be continued, so no chunk counts
    alone. A server that keeps tokens back (a parser of tool calls or of reasoning does) is found out by its own count.
    """

    limit: int
    vocabulary: int
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish: str | None = None
    prompt_ids: list[int] | None = None
    counted: int | None = None

    def add(self, data: dict[str, Any]) -> None:
        part = read(data, self.vocabulary)
        self.ids += part.ids
        self.logprobs += part.logprobs
        self.finish, self.prompt_ids = part.finish or self.finish, part.prompt_ids or self.prompt_ids
        usage = data.get("usage")
        self.counted = usage.get("completion_tokens") if isinstance(usage, dict) else self.counted
        if len(self.ids) > self.limit:
            raise Garbage(f"more than the {self.limit} tokens that were asked for")

    def part(self) -> Part:
        if self.finish is None:
            raise Garbage("the stream ends before the answer does")
        if self.counted is not None and self.counted != len(self.ids):
            raise Garbage(f"{len(self.ids)} tokens came of an answer of {self.counted}, by the server's own count")
        return Part(self.ids, self.logprobs, self.finish, self.prompt_ids)


def load(data: bytes | str) -> dict[str, Any]:
    """One JSON object; an error that the server sends in place of an answer is garbage with its text."""
    try:
        found = json.loads(data)
    except ValueError:
        text = data if isinstance(data, str) else data.decode("utf-8", "replace")
        raise Garbage("not JSON", text) from None
    if not isinstance(found, dict):
        raise Garbage("not a JSON object", found)
    if found.get("error"):
        raise Garbage("an error in place of an answer", found["error"])
    return found


def read(data: dict[str, Any], vocabulary: int = 0) -> Part:
    """The tokens of an answer, or of a chunk of one, by completions or by chat. `vocabulary` 0 = unknown."""
    choices = data.get("choices")
    if not isinstance(choices, list):
        raise Garbage("no choices", data)
    if not choices:
        return Part([], [])  # a chunk with nothing but usage
    if len(choices) != 1 or not isinstance(choices[0], dict):
        raise Garbage("not one choice", data)
    choice = choices[0]
    finish = choice.get("finish_reason")
    if finish is not None and not isinstance(finish, str):
        raise Garbage("a finish_reason that is no word", choice)
    tokens, logprobs = _measured(choice)
    ids = _ids(choice, tokens)
    if len(ids) != len(logprobs):
        raise Garbage(f"{len(ids)} token ids and {len(logprobs)} log-probabilities", choice)
    _check(ids, logprobs, vocabulary)
    prompt = choice.get("prompt_token_ids") or data.get("prompt_token_ids")
    return Part(ids, [min(0.0, value) for value in logprobs], finish, prompt if isinstance(prompt, list) else None)


def until_end(part: Part, ends: frozenset[int]) -> Part:
    """The tokens up to the first that ends an answer: a server that does not know all of these goes on behind them."""
    at = next((k for k, token in enumerate(part.ids) if token in ends), None)
    return part if at is None else Part(part.ids[: at + 1], part.logprobs[: at + 1], "stop", part.prompt_ids)


def _measured(choice: dict[str, Any]) -> tuple[list[Any], list[Any]]:
    """Tokens as the server writes them, and their log-probabilities."""
    found = choice.get("logprobs")
    if not found:
        return [], []
    if not isinstance(found, dict):
        raise Garbage("logprobs that are no object", choice)
    content = found.get("content")
    if isinstance(content, list):
        if not all(isinstance(item, dict) for item in content):
            raise Garbage("logprobs.content that are no objects", choice)
        return [item.get("token") for item in content], [item.get("logprob") for item in content]
    tokens, logprobs = found.get("tokens") or [], found.get("token_logprobs") or []
    if not isinstance(tokens, list) or not isinstance(logprobs, list):
        raise Garbage("logprobs that are no lists", choice)
    return tokens, logprobs


def _ids(choice: dict[str, Any], tokens: list[Any]) -> list[int]:
    ids = choice.get("token_ids")
    if isinstance(ids, list):
        return ids
    named = [token[len(NAMED) :] for token in tokens if isinstance(token, str) and token.startswith(NAMED)]
    if len(named) != len(tokens) or not all(text.isdecimal() for text in named):
        raise Garbage("no token ids: the server has to know return_token_ids, as vLLM does", choice)
    return [int(text) for text in named]


def _check(ids: list[Any], logprobs: list[Any], vocabulary: int) -> None:
    for token in ids:
        if type(token) is not int or token < 0 or (vocabulary and token >= vocabulary):
            raise Garbage(f"token id {token!r} (the model knows {vocabulary or 'an unknown number of'} tokens)")
    for value in logprobs:
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not math.isfinite(value):
            raise Garbage(f"log-probability {value!r}")
        if value > ABOVE_ZERO:
            raise Garbage(f"log-probability {value!r}, above 0")
