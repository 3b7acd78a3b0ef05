"""The text that an endpoint is asked about at the start, to find whether it has the tokenizer of the trained model.

Talks to the tokenizer of a model folder. Knows nothing of HTTP.

- The text is made of tokens from all over the vocabulary, and of the special ones: two tokenizers that read it in the
  same way are taken for the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

SPREAD, LONGEST = 256, 16  # tokens that are looked at: of the vocabulary, and as a sequence
LEFT = "\ufffd"  # of a token that is a part of a character


@dataclass(frozen=True)
class Probe:
    """A text with its ids by the trained model's tokenizer; a sequence of ids; the text of every id by itself."""

    text: str
    text_ids: list[int]
    ids: npt.NDArray[np.int32]
    tokenizer: Any

    @classmethod
    def of(cls, folder: str, words: int) -> Probe:
        from transformers import AutoTokenizer

        tokenizer: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        special, count = set(tokenizer.all_special_ids), min(words, len(tokenizer))
        spread = [int(at) for at in np.unique(np.linspace(0, count - 1, SPREAD).astype(int)) if int(at) not in special]
        pieces = [piece for at in spread if LEFT not in (piece := tokenizer.decode([at]))]
        text = "".join([*pieces, *tokenizer.all_special_tokens])
        ids = [int(at) for at in tokenizer.encode(text, add_special_tokens=False)]
        return cls(text, ids, np.resize(np.array(spread or [0], np.int32), LONGEST), tokenizer)

    def text_of(self, token: int) -> str:
        return str(self.tokenizer.decode([token]))
