"""From a parsed line to what a model is asked: a text as it stands, or the messages of a chat.

The one place that decides it: rollouts, `busrl check` and whoever shows a prompt call `prompt_of`. Talks to nothing;
messages become text and ids by the tokenizer's own chat template (`busrl.inference.tokens` in an engine, `chat` where
there is no torch). Knows nothing of token ids.

- A text under `template = "chat"` is one user turn; a list of messages is a chat already and needs that template.
- `data.system` begins every chat that has no system message of its own.
"""

from __future__ import annotations

from typing import Any, Protocol

from busrl.errors import DataError

Message = dict[str, Any]
Prompt = str | list[Message]
SYSTEM_ROLES = ("system", "developer")


class PromptSettings(Protocol):
    """The part of [data] that decides how a prompt is written."""

    @property
    def prompt_key(self) -> str: ...
    @property
    def template(self) -> str: ...
    @property
    def system(self) -> str: ...


def prompt_of(record: dict[str, Any], settings: PromptSettings) -> Prompt:
    """A text to be encoded as it stands, or the messages that the model's chat template writes; DataError otherwise."""
    value = record.get(settings.prompt_key)
    if rule := fault(value):
        raise DataError(f"{settings.prompt_key} = {value!r}: {rule}; correct the data file")
    if settings.template == "none":
        if isinstance(value, str):
            return value
        raise DataError(f'{settings.prompt_key} is a list of messages: set data.template = "chat"')
    if settings.template != "chat":
        raise DataError(f"data.template = {settings.template!r}: must be none or chat")
    chat: list[Message] = [{"role": "user", "content": value}] if isinstance(value, str) else list(value or ())
    if settings.system and chat[0]["role"] not in SYSTEM_ROLES:
        chat.insert(0, {"role": "system", "content": settings.system})
    return chat


def fault(value: object) -> str:
    """The rule that a prompt breaks, "" for a good one."""
    if isinstance(value, str):
        return ""
    if not isinstance(value, list):
        return "must be a string, or a list of messages"
    if not value:
        return "has no message: a chat needs one at least"
    for message in value:
        parts = (message.get("role"), message.get("content")) if isinstance(message, dict) else (None,)
        if not all(isinstance(part, str) for part in parts):
            return 'every message must be {"role": "...", "content": "..."} with strings'
    if value[-1]["role"] == "assistant":
        return "the last message is the assistant's own, and its answer is what is asked for"
    return ""


def plain_text(value: object) -> str:
    """A prompt as text without a template, for predictors and people: what stands in its messages, line by line."""
    if isinstance(value, list):
        return "\n".join(str(message.get("content", "")) for message in value if isinstance(message, dict))
    return str(value)
