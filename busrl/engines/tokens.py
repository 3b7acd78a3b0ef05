"""Text to token ids and back, with the tokenizer of a model folder, and the ids that end an answer.

Talks to transformers, which it imports when there is a tokenizer to load. Knows nothing of requests or weights.

- A text gets the special tokens that the tokenizer adds (a BOS, say). A chat gets the special tokens that its template
  writes and no others: its ids are those of the tokenizer's `apply_chat_template(..., add_generation_prompt=True)`.
- In every engine an answer ends with any id that generation_config.json, config.json or the tokenizer names as an end.
- The ids that an engine emitted are trained; text made from them is for rewards and people only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import numpy.typing as npt

from busrl.data.chat import parts_of
from busrl.data.vocabulary import end_ids
from busrl.errors import UserError

if TYPE_CHECKING:
    from busrl.data import Prompt

PROMPTS_KEPT = 65536
Ids = npt.NDArray[np.int32]
NO_IDS: Ids = np.empty(0, np.int32)


class Tokens:
    """Encodes prompts (texts, or messages by the chat template) and decodes completions."""

    def __init__(self, tokenizer: Any, eos_ids: frozenset[int], chat: bool = False, tools: Sequence[Any] = ()) -> None:
        """`chat`: prompts will be chats, so a tokenizer without a template is a UserError now."""
        if chat and not getattr(tokenizer, "chat_template", None):
            name = getattr(tokenizer, "name_or_path", "") or "the model"
            raise UserError(
                f'data.template = "chat": the tokenizer of {name} has no chat template; use a chat model, or put a '
                "chat_template.jinja into its folder"
            )
        self._tokenizer = tokenizer
        self._decode_ids = _fast_decode(tokenizer)
        self.eos_ids = eos_ids
        self._tools = list(tools) or None  # what the chat template offers to the model
        self._ids_of = lru_cache(PROMPTS_KEPT)(self._encode)

    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt; the caller may keep the list but must not change it."""
        return self._ids_of(msgspec.json.encode(prompt))

    def decode(self, ids: Sequence[int] | Ids, ended: bool = True) -> str:
        """Text of generated ids, special tokens kept; with `ended` a final end-of-sequence token is left out."""
        listed: list[int] = np.asarray(ids).tolist()
        if ended and listed and listed[-1] in self.eos_ids:
            listed.pop()
        return self._decode_ids(listed)

    def _encode(self, key: bytes) -> list[int]:
        prompt: Prompt = msgspec.json.decode(key)
        if isinstance(prompt, str):
            return [int(i) for i in self._tokenizer.encode(prompt)]
        chat, tools, arguments = parts_of(prompt)
        rendered = self._tokenizer.apply_chat_template(
            chat, tools=tools or self._tools, tokenize=False, add_generation_prompt=True, **arguments
        )
        return [int(i) for i in self._tokenizer.encode(rendered, add_special_tokens=False)]


def tokens_of(folder: str | Path, chat: bool, tools: Sequence[Any] = ()) -> Tokens:
    """Make the tokens of a model folder, for an engine that loads no model itself; UserError if it has no tokenizer."""
    from transformers import AutoTokenizer

    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    except (OSError, ValueError) as problem:
        raise UserError(f"{folder}: no tokenizer ({problem}); see model.path") from problem
    return Tokens(tokenizer, end_ids(Path(folder)) | _ids(tokenizer.eos_token_id), chat, tools=tools)


def _fast_decode(tokenizer: Any) -> Callable[[list[int]], str]:
    """A decoder that keeps special tokens, and spaces as they are. `decode` of transformers spends ten times as long on
    looking at each id as on decoding, so the tokenizer's backend is called directly where the class adds nothing."""
    from transformers import PreTrainedTokenizerFast

    backend = getattr(tokenizer, "backend_tokenizer", None)
    plain = getattr(type(tokenizer), "_decode", None) is getattr(PreTrainedTokenizerFast, "_decode", tokenizer)
    if backend is not None and plain:
        return lambda ids: str(backend.decode(ids, skip_special_tokens=False))
    return lambda ids: str(tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))


def eos_ids_of(model: Any, tokenizer: Any) -> frozenset[int]:
    """All ids that end a sequence: those of generation_config, of the model's config, and the tokenizer's."""
    config: Any = getattr(model, "config", None)
    inner = config.get_text_config() if hasattr(config, "get_text_config") else None
    sources = (getattr(model, "generation_config", None), config, inner, tokenizer)
    return frozenset().union(*(_ids(getattr(source, "eos_token_id", None)) for source in sources))


def _ids(value: Any) -> frozenset[int]:
    return frozenset(int(i) for i in (value if isinstance(value, (list, tuple)) else [value]) if i is not None)
