"""From a parsed line to the text that an engine encodes.

Talks to nothing; the chat template itself belongs to the model's tokenizer and is passed in by the caller, so that this
module needs no tokenizer. Knows nothing of token ids.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from busrl.errors import DataError

Message = dict[str, str]
ChatTemplate = Callable[[list[Message]], str]


class TemplateSettings(Protocol):
    """The part of [data] that decides how a prompt is written."""

    @property
    def prompt_key(self) -> str: ...
    @property
    def template(self) -> str: ...


def render(record: dict[str, Any], settings: TemplateSettings, chat: ChatTemplate | None = None) -> str:
    """The prompt's text: as it stands, or as one user turn followed by the start of the answer.

    `chat` is the tokenizer's template, called with the messages; needed when `data.template` is "chat".
    """
    prompt = record.get(settings.prompt_key)
    if not isinstance(prompt, str):
        raise DataError(f"{settings.prompt_key} = {prompt!r}: the prompt must be a string; correct the data file")
    if settings.template == "none":
        return prompt
    if settings.template != "chat":
        raise DataError(f"data.template = {settings.template!r}: must be none or chat")
    if chat is None:
        raise DataError("data.template = chat: the model's tokenizer has no chat template; use template = none")
    return chat([{"role": "user", "content": prompt}])
