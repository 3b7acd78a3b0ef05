"""`rules`: prompt length, digits, weighted words, the task's tag and the limit; what a run starts with.

Talks to a table of words (`keywords`). Needs no data and learns nothing. Knows nothing of tokens that were really
generated.

- A word counts once, however often it is said; one that stands in the prompt only as part of a longer one does not
  count beside it.
- Of a very long prompt the beginning and the end are searched for words.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from busrl.scheduling.predictors.base import Candidate, Finished, Floats, limited
from busrl.scheduling.predictors.keywords import Keywords, shipped

BASE, PER_CHARACTER, PER_DIGIT = 16.0, 0.3, 1.0  # tokens
PER_LIMIT = 0.02  # tokens per token of the limit: who allows longer answers expects them
HEAD, TAIL = 2000, 1000  # characters searched for words
DIGITS = "0123456789"
_WORD = re.compile("[a-z0-9_]+")  # other scripts have no spaces to go by: their words match anywhere


class RulesPredictor:
    """A weighted sum of what a prompt shows."""

    name = "rules"

    def __init__(self, keywords: Keywords | None = None) -> None:
        self.keywords = keywords or shipped()
        words = self.keywords.words
        self._single = {word for word in words if _WORD.fullmatch(word)}
        self._phrases: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # by their first Latin word, "" without one
        for word in words:
            if word.isascii() and word not in self._single:
                first = (_WORD.findall(word) or [""])[0]
                whole = re.compile(rf"(?<![a-z0-9_]){re.escape(word)}(?![a-z0-9_])")
                self._phrases.setdefault(first, []).append((word, whole))
        self._others: dict[str, list[str]] = {}  # by their first character
        for word in words:
            if not word.isascii():
                self._others.setdefault(word[0], []).append(word)
        self._longer = {w: tuple(o for o in words if w in o and w != o) for w in words}

    def predict(self, candidates: Sequence[Candidate]) -> Floats:
        return limited(np.fromiter((self._score(c) for c in candidates), np.float64, len(candidates)), candidates)

    def observe(self, finished: Sequence[Finished]) -> None:
        """Rules do not learn."""

    def state(self) -> dict[str, Any]:
        return {}

    def load(self, state: Mapping[str, Any]) -> None:
        """There is nothing to take over."""

    def _score(self, candidate: Candidate) -> float:
        prompt = candidate.prompt
        digits = sum(map(prompt.count, DIGITS))
        found = self._found(prompt if len(prompt) <= HEAD + TAIL else f"{prompt[:HEAD]} {prompt[-TAIL:]}")
        weight = sum(self.keywords.words[word] for word in found) + self.keywords.tags.get(candidate.tag.lower(), 0.0)
        return BASE + PER_CHARACTER * len(prompt) + PER_DIGIT * digits + PER_LIMIT * candidate.max_new_tokens + weight

    def _found(self, prompt: str) -> list[str]:
        text = prompt.lower()
        latin = {*_WORD.findall(text), ""}
        found = list(self._single & latin)
        for first in self._phrases.keys() & latin:
            found += [phrase for phrase, whole in self._phrases[first] if whole.search(text)]
        if not text.isascii():
            for first in self._others.keys() & set(text):
                found += [word for word in self._others[first] if word in text]
        if len(found) > 1:
            found = [word for word in found if not any(longer in found for longer in self._longer[word])]
        return found
