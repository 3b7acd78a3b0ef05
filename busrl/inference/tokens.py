"""Text to token ids and back, with the tokenizer of a model folder.

Used by the torch engine. Prompts come in groups, so ids are kept per text. Knows nothing of requests or sampling.

- What is trained is the ids that an engine emitted; text made from them is for rewards and people only.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from transformers import PreTrainedTokenizerFast


class Tokens:
    """Encodes prompts (plain, or as one user turn of the chat template) and decodes completions."""

    def __init__(
        self,
        tokenizer: Any,
        eos_ids: frozenset[int],
        chat: bool = False,
        cached: int = 65536,
        tools: Sequence[Any] = (),
    ) -> None:
        self._tokenizer = tokenizer
        self._decode_ids = _fast_decode(tokenizer)
        self._eos_ids = eos_ids
        self._chat = chat
        self._tools = list(tools) or None  # what the chat template tells the model that it may call
        self._cached = cached
        self._ids: OrderedDict[str, list[int]] = OrderedDict()

    def encode(self, text: str) -> list[int]:
        """Token ids of a prompt; the caller may keep the list but must not change it."""
        ids = self._ids.get(text)
        if ids is None:
            ids = self._ids[text] = self._encode(text)
            if len(self._ids) > self._cached:
                self._ids.popitem(last=False)
        return ids

    def decode(self, ids: Sequence[int] | npt.NDArray[np.int32], ended: bool = True) -> str:
        """Text of generated ids, special tokens kept; with `ended` a final end-of-sequence token is left out."""
        listed: list[int] = np.asarray(ids).tolist()
        if ended and listed and listed[-1] in self._eos_ids:
            listed.pop()
        return self._decode_ids(listed)

    def _encode(self, text: str) -> list[int]:
        if not self._chat:
            return [int(i) for i in self._tokenizer.encode(text)]
        rendered = self._tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], tools=self._tools, tokenize=False, add_generation_prompt=True
        )
        return [int(i) for i in self._tokenizer.encode(rendered, add_special_tokens=False)]


def _fast_decode(tokenizer: Any) -> Callable[[list[int]], str]:
    """Special tokens kept, spaces as they are. transformers looks at every id for ten times as long as it takes to
    decode them, so its own backend is asked directly where the class adds nothing to it."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    plain = getattr(type(tokenizer), "_decode", None) is getattr(PreTrainedTokenizerFast, "_decode", tokenizer)
    if backend is not None and plain:
        return lambda ids: str(backend.decode(ids, skip_special_tokens=False))
    return lambda ids: str(tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))


def eos_ids_of(model: Any, tokenizer: Any) -> frozenset[int]:
    """All ids that end a sequence: those of generation_config, else of the model's config, and the tokenizer's."""
    found: set[int] = set()
    for source in (getattr(model, "generation_config", None), getattr(model, "config", None), tokenizer):
        value = getattr(source, "eos_token_id", None)
        if value is not None:
            found.update(int(i) for i in (value if isinstance(value, (list, tuple)) else [value]))
    return frozenset(found)
