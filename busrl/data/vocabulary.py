"""Token ids of a model folder: those of its tokenizer, those that end a sequence, and rows that stand for no token.

Many models have more rows of logits than their tokenizer has tokens, padded for speed. An id of such a row has no text,
so a reward would judge a text that the policy did not write. No engine samples such an id, and the learner's softmax
leaves these rows out; `token_rows` alone decides which rows they are. Reads JSON files, and asks `busrl.data.library`
where a folder has no tokenizer.json. Knows nothing of topologies, requests or weights.

- Engine and learner leave out the same rows; otherwise the ratio of their probabilities is wrong.
- An id that config.json or generation_config.json names as an end stays, with or without a text: it ends answers.
- Without a tokenizer in the folder every row stands for a token.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from busrl.system.files import as_map, read_map

Ids = npt.NDArray[np.int32]
NO_END = 1 << 31  # more than any id

# -- rows without a token -----


@dataclass(frozen=True)
class TokenRows:
    """The rows of a model's logits that stand for a token: those below `end`, except the `holes`. `rows`: the number of
    all rows; 0 = not known."""

    end: int = NO_END
    holes: tuple[int, ...] = ()
    rows: int = 0

    @property
    def without(self) -> int:
        """The number of rows that no token has."""
        return len(self.holes) + max(0, self.rows - self.end)

    @property
    def tokens(self) -> int:
        return self.end - len(self.holes)

    @property
    def bound(self) -> int:
        """The number after the highest id that stands for a token; 0 = not known."""
        return min(self.end, self.rows or self.end) if self.end < NO_END or self.rows else 0

    def left_out(self) -> list[int]:
        """The ids of the rows without a token."""
        return [*self.holes, *range(self.end, self.rows)]

    def foreign(self, ids: Ids) -> Ids:
        """The ids that stand for no token."""
        wrong: Ids = ids[ids >= self.end] if not self.holes else ids[(ids >= self.end) | np.isin(ids, self.holes)]
        return wrong

    def describe(self, wrong: Ids) -> str:
        """The fault of an answer with these `foreign` ids, in words."""

        return f"{len(wrong)} of its ids stand for no token of the tokenizer, the first is {wrong[0]}"

    def mask(self, logits: Any) -> Any:
        """Set the logits [..., rows] of every row without a token to -inf, in place: the caller owns the tensor."""
        if self.end < logits.shape[-1]:  # mostly the last rows alone: a fill, which costs nothing beside a softmax
            logits[..., self.end :] = -math.inf
        if self.holes:
            logits[..., list(self.holes)] = -math.inf
        return logits


ALL_ROWS = TokenRows()


def token_rows(folder: Path) -> TokenRows:
    """The rows of that folder's model that stand for a token."""
    rows = vocabulary_size(folder)
    ids = _ids_of_files(folder)
    if not ids:
        return TokenRows(rows=rows)
    ids |= {token for token in end_ids(folder) if token < rows}
    end = min(max(ids) + 1, rows or NO_END)
    return TokenRows(end, tuple(token for token in range(end) if token not in ids), rows)


def _ids_of_files(folder: Path) -> set[int]:
    """The ids of tokenizer.json, or of what transformers makes of other files, and of tokens that were added beside it;
    empty without either."""
    file = folder / "tokenizer.json"
    data = read_map(file) if file.is_file() else _of_library(folder)
    vocabulary, added = as_map(data.get("model")).get("vocab"), data.get("added_tokens")
    ids = set(range(len(vocabulary))) if isinstance(vocabulary, list) else set(_ids(list(as_map(vocabulary).values())))
    if not ids:
        return ids
    if isinstance(added, list):
        ids |= {token for entry in added if isinstance(entry, dict) for token in _ids(entry.get("id"))}
    later = as_map(read_map(folder / "tokenizer_config.json").get("added_tokens_decoder"))
    return ids | {int(number) for number in later if number.isdecimal()} | set(
        _ids(list(read_map(folder / "added_tokens.json").values())))


def _of_library(folder: Path) -> dict[str, Any]:
    """The tokenizer that transformers makes of other files; empty without one."""
    from busrl.data.library import library_tokenizer  # only here: most folders have a tokenizer.json

    text = library_tokenizer(folder)
    return as_map(json.loads(text)) if text else {}


# -- what the files say -----


def vocabulary_size(folder: Path) -> int:
    """The number of the model's token ids by its config.json; 0 without one."""
    return next((part["vocab_size"] for part in id_places(folder) if isinstance(part.get("vocab_size"), int)), 0)


def end_ids(folder: Path) -> frozenset[int]:
    """Every id that config.json or generation_config.json says ends a sequence."""
    return frozenset(named_ids(folder, "eos_token_id"))


def named_ids(folder: Path, *names: str) -> list[int]:
    """The ids that these keys of config.json and generation_config.json name, in the order of `id_places`."""
    return [token for part in id_places(folder) for name in names for token in _ids(part.get(name))]


def id_places(folder: Path) -> list[Mapping[str, Any]]:
    """The places of a model folder that name token ids."""
    config = read_map(folder / "config.json")
    return [config, language_of(config), read_map(folder / "generation_config.json")]


def language_of(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part of a config that describes the language model: a table of its own, or else the whole config."""
    return as_map(config.get("text_config")) or config


def pieces(folder: Path) -> tuple[dict[str, int], dict[str, int]]:
    """Ids of the tokens of tokenizer.json, and of those that were added."""
    data = read_map(folder / "tokenizer.json")
    vocabulary, added = as_map(data.get("model")).get("vocab"), data.get("added_tokens")
    if isinstance(vocabulary, list):  # of a unigram model: [token, score]
        vocabulary = {str(row[0]): i for i, row in enumerate(vocabulary) if isinstance(row, list) and row}
    entries = [entry for entry in added if isinstance(entry, dict)] if isinstance(added, list) else []
    return as_map(vocabulary), {str(entry.get("content")): entry.get("id", -1) for entry in entries}


def _ids(value: Any) -> list[int]:
    listed = value if isinstance(value, list) else [value]
    return [token for token in listed if isinstance(token, int) and token >= 0]
