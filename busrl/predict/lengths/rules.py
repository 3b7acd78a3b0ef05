"""`rules`: prompt length, digits, weighted words, the task's tag and the limit. Needs no data and learns nothing.

The words come from a user's table, which `check` checks, or from the package's `keywords.toml`.

- A weight is a finite number of tokens, at most LARGEST in either direction. No word is blank; words that differ only
  in case are the same word.
- A word counts once, however often the prompt has it; a word does not count beside a longer one that contains it. Of a
  very long prompt the beginning and the end are searched.
"""

from __future__ import annotations

import functools
import math
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any, NamedTuple

import numpy as np

from busrl.predict.lengths.base import limited
from busrl.scheduling.predictor import Candidate, Floats, Predictor

# -- tables of words -----------------------------------------------------------------------------------------

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

LARGEST = 1e6
TABLES = ("words", "tags")


@dataclass(frozen=True)
class Keywords:
    """Tokens that a word in the prompt, or the tag of its task, adds to the expected answer; all in lower case."""

    words: Mapping[str, float]
    tags: Mapping[str, float]


class Fault(NamedTuple):
    """A fault at one key of a table."""

    path: tuple[str, ...]
    value: str
    rule: str
    remedy: str


def check(tables: Mapping[str, Any]) -> tuple[Keywords, list[Fault]]:
    """The sound entries of a parsed table of keywords, and the faults of the others."""
    rule, remedy = "a table of keywords has [words] and [tags], nothing else", "remove it, or correct its name"
    faults = [Fault((name,), name, rule, remedy) for name in tables if name not in TABLES]
    words, tags = (_weights(name, tables.get(name, {}), faults) for name in TABLES)
    if not words and not tags and not faults:
        faults.append(Fault((), "", "there is no word and no tag in it", 'write "prove" = 300 or the like in [words]'))
    return Keywords(words, tags), faults


def _weights(table: str, values: Any, faults: list[Fault]) -> dict[str, float]:
    if not isinstance(values, Mapping):
        remedy = f"write [{table}] and lines below it"
        faults.append(Fault((table,), f"{table} = {values!r}", "must be a table", remedy))
        return {}
    weights: dict[str, float] = {}
    for word, weight in values.items():
        fault = _fault(table, word, weight, weights)
        if fault is None:
            weights[word.strip().lower()] = float(weight)
        else:
            faults.append(fault)
    return weights


def _fault(table: str, word: str, weight: Any, weights: Mapping[str, float]) -> Fault | None:
    path, shown = (table, word), f"{word!r} = {repr(weight)[:40]}"
    if not word.strip():
        return Fault(path, shown, "an empty word is in every prompt", "remove the line")
    if word.strip().lower() in weights:
        return Fault(path, shown, "the same word is there already (case does not matter)", "remove one of the two")
    if isinstance(weight, Mapping):
        return Fault(path, repr(word), "must be a number of tokens, not a table", "put a word with a dot in quotes")
    if isinstance(weight, bool) or not isinstance(weight, (int, float)):
        return Fault(path, shown, "a weight must be a number of tokens", f'for example "{word}" = 100')
    if isinstance(weight, float) and not math.isfinite(weight):
        return Fault(path, shown, "a weight must be finite", f'for example "{word}" = 100')
    if abs(weight) > LARGEST:
        return Fault(path, shown, f"a weight must be within {LARGEST:.0f} tokens either way", "use a smaller one")
    return None


@functools.cache
def shipped() -> Keywords:
    """The table of busrl itself, Chinese and English."""
    text = resources.files(__package__).joinpath("keywords.toml").read_text("utf-8")
    return check(tomllib.loads(text))[0]


# -- the predictor -------------------------------------------------------------------------------------------

BASE, PER_CHARACTER, PER_DIGIT = 16.0, 0.3, 1.0  # tokens
PER_LIMIT = 0.02  # tokens per token of the limit: a longer limit expects longer answers
HEAD, TAIL = 2000, 1000  # characters searched for words
DIGITS = "0123456789"
_WORD = re.compile("[a-z0-9_]+")  # words of other scripts match anywhere, as those have no spaces between words


class RulesPredictor(Predictor):
    """A weighted sum of the visible features of a prompt."""

    name = "rules"

    def __init__(self, keywords: Keywords | None = None) -> None:
        self.keywords = keywords or shipped()
        words = self.keywords.words
        self._single = {word for word in words if _WORD.fullmatch(word)}
        self._phrases: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # by their first Latin word, "" without one
        for word in words:
            if word.isascii() and word not in self._single:
                first = (_WORD.findall(word) or [""])[0]
                pattern = re.compile(rf"(?<![a-z0-9_]){re.escape(word)}(?![a-z0-9_])")
                self._phrases.setdefault(first, []).append((word, pattern))
        self._others: dict[str, list[str]] = {}  # by their first character
        for word in words:
            if not word.isascii():
                self._others.setdefault(word[0], []).append(word)
        self._longer = {w: tuple(o for o in words if w in o and w != o) for w in words}

    def predict(self, candidates: Sequence[Candidate]) -> Floats:
        return limited(np.fromiter((self._score(c) for c in candidates), np.float64, len(candidates)), candidates)

    def _score(self, candidate: Candidate) -> float:
        prompt = candidate.prompt
        digits = sum(map(prompt.count, DIGITS))
        words = self._words_in(prompt if len(prompt) <= HEAD + TAIL else f"{prompt[:HEAD]} {prompt[-TAIL:]}")
        weight = sum(self.keywords.words[word] for word in words) + self.keywords.tags.get(candidate.tag.lower(), 0.0)
        return BASE + PER_CHARACTER * len(prompt) + PER_DIGIT * digits + PER_LIMIT * candidate.max_new_tokens + weight

    def _words_in(self, prompt: str) -> list[str]:
        text = prompt.lower()
        latin = {*_WORD.findall(text), ""}
        words = list(self._single & latin)
        for first in self._phrases.keys() & latin:
            words += [phrase for phrase, pattern in self._phrases[first] if pattern.search(text)]
        if not text.isascii():
            for first in self._others.keys() & set(text):
                words += [word for word in self._others[first] if word in text]
        if len(words) > 1:
            words = [word for word in words if not any(longer in words for longer in self._longer[word])]
        return words
