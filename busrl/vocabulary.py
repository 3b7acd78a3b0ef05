"""Token ids of a model folder: those of its tokenizer, those that end a sequence, and rows that stand for no token.

Many a model has more rows of logits than its tokenizer has tokens, padded for speed. An id of such a row has no text: a
reward would judge what was not written. So no engine draws one, and the learner's softmax has none: both ask
`token_rows`, the only place that decides. Reads JSON files; asks transformers for a tokenizer that has no
tokenizer.json. Knows nothing of topologies, requests or weights.

- Engine and learner leave out the same rows, or the ratio of their probabilities is wrong.
- An id that config.json or generation_config.json names as an end stays, with or without a text: it ends answers.
- Where nothing says which tokens there are, every row stands for one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from busrl.files import as_map, read_map

Ids = npt.NDArray[np.int32]
NO_END = 1 << 31  # more than any id
OTHER_FILES = ("tokenizer.model", "vocab.json", "vocab.txt")  # of tokenizers without a tokenizer.json

# -- rows without a token -----


@dataclass(frozen=True)
class TokenRows:
    """Which rows of a model's logits stand for a token: those below `end`, but for the `holes`. `rows`: how many there
    are; 0 = not known."""

    end: int = NO_END
    holes: tuple[int, ...] = ()
    rows: int = 0

    @property
    def without(self) -> int:
        """How many rows no token has."""
        return len(self.holes) + max(0, self.rows - self.end)

    @property
    def tokens(self) -> int:
        return self.end - len(self.holes)

    @property
    def bound(self) -> int:
        """One more than the highest id that stands for a token; 0 = not known."""
        return min(self.end, self.rows or self.end) if self.end < NO_END or self.rows else 0

    def left_out(self) -> list[int]:
        """The ids of the rows without a token."""
        return [*self.holes, *range(self.end, self.rows)]

    def foreign(self, ids: Ids) -> Ids:
        """Those of the ids that stand for no token."""
        wrong: Ids = ids[ids >= self.end] if not self.holes else ids[(ids >= self.end) | np.isin(ids, self.holes)]
        return wrong

    def told(self, wrong: Ids) -> str:
        """Ids of an answer that `foreign` gave, in words."""
        return f"{len(wrong)} of its ids stand for no token of the tokenizer, the first is {wrong[0]}"

    def mask(self, logits: Any) -> Any:
        """Logits [..., rows] of a tensor that nobody else reads: in place, -inf in every row without a token."""
        if self.end < logits.shape[-1]:  # mostly the last rows alone: a fill, which costs nothing beside a softmax
            logits[..., self.end :] = -math.inf
        if self.holes:
            logits[..., list(self.holes)] = -math.inf
        return logits


ALL_ROWS = TokenRows()


def token_rows(folder: Path) -> TokenRows:
    """Which rows of that folder's model stand for a token."""
    rows = vocabulary_size(folder)
    known = _ids_of_files(folder) or _ids_of_library(folder)
    if not known:
        return TokenRows(rows=rows)
    known |= {one for one in end_ids(folder) if one < rows}
    end = min(max(known) + 1, rows or NO_END)
    return TokenRows(end, tuple(one for one in range(end) if one not in known), rows)


def _ids_of_files(folder: Path) -> set[int]:
    """The ids of tokenizer.json, and of tokens that were added beside it; empty without that file."""
    data = read_map(folder / "tokenizer.json")
    known, added = as_map(data.get("model")).get("vocab"), data.get("added_tokens")
    found = set(range(len(known))) if isinstance(known, list) else set(_ids(list(as_map(known).values())))
    if not found:
        return found
    if isinstance(added, list):
        found |= {token for one in added if isinstance(one, dict) for token in _ids(one.get("id"))}
    later = as_map(read_map(folder / "tokenizer_config.json").get("added_tokens_decoder"))
    return found | {int(one) for one in later if one.isdecimal()} | set(
        _ids(list(read_map(folder / "added_tokens.json").values())))


def _ids_of_library(folder: Path) -> set[int]:
    """The same of a tokenizer in other files, by transformers; empty where there is none, or no transformers."""
    if not any((folder / name).is_file() for name in OTHER_FILES):
        return set()
    try:
        from transformers import AutoTokenizer

        tokenizer: Any = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
        return set(_ids(list(tokenizer.get_vocab().values())))
    except Exception:  # no such package, or what it cannot read: an engine that needs a tokenizer says so itself
        return set()


# -- what the files say -----


def vocabulary_size(folder: Path) -> int:
    """How many token ids the model has by its config.json; 0 if it does not say."""
    return next((part["vocab_size"] for part in id_places(folder) if isinstance(part.get("vocab_size"), int)), 0)


def end_ids(folder: Path) -> frozenset[int]:
    """Every id that config.json or generation_config.json says ends a sequence."""
    return frozenset(named_ids(folder, "eos_token_id"))


def named_ids(folder: Path, *names: str) -> list[int]:
    """The ids that these keys of config.json and generation_config.json name, the first place first."""
    return [one for part in id_places(folder) for name in names for one in _ids(part.get(name))]


def id_places(folder: Path) -> list[Mapping[str, Any]]:
    """The places of a model folder that name token ids."""
    config = read_map(folder / "config.json")
    return [config, language_of(config), read_map(folder / "generation_config.json")]


def language_of(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part of a config that describes the language model: of several in one, or all of it."""
    return as_map(config.get("text_config")) or config


def pieces(folder: Path) -> tuple[dict[str, int], dict[str, int]]:
    """Ids of the tokens of tokenizer.json, and of those that were added."""
    data = read_map(folder / "tokenizer.json")
    known, added = as_map(data.get("model")).get("vocab"), data.get("added_tokens")
    if isinstance(known, list):  # of a unigram model: [token, score]
        known = {str(row[0]): i for i, row in enumerate(known) if isinstance(row, list) and row}
    rows = [one for one in added if isinstance(one, dict)] if isinstance(added, list) else []
    return as_map(known), {str(one.get("content")): one.get("id", -1) for one in rows}


def _ids(value: Any) -> list[int]:
    listed = value if isinstance(value, list) else [value]
    return [one for one in listed if isinstance(one, int) and one >= 0]
