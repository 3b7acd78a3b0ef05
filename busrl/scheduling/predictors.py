"""How long an answer will be: predictors behind one interface, called with many prompts at once.

Talks to nothing. A prediction is in tokens, but only its order matters: judge a predictor by Kendall's tau, not by its
error. Knows nothing of groups, ages or who uses the number.

- A prediction is finite, at least 1 and at most the task's max_new_tokens.
- Same prompt, same prediction, until `observe` says more.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

# Tokens that a word in the prompt adds to (or takes from) the expected answer. Any language; matched in lower case.
KEYWORDS: Mapping[str, float] = {
    "prove": 300, "proof": 300, "derive": 250, "step by step": 250, "show that": 200, "explain": 150, "why": 80,
    "integral": 150, "equation": 100, "triangle": 100, "probability": 100, "how many": 80, "essay": 400, "code": 200,
    "function": 150, "list all": 100, "yes or no": -100, "true or false": -100, "in one word": -150, "briefly": -80,
    "证明": 300, "推导": 250, "逐步": 250, "一步一步": 250, "解释": 150, "为什么": 80, "积分": 150, "方程": 100,
    "三角形": 100, "概率": 100, "多少": 80, "论文": 400, "代码": 200, "函数": 150, "列出": 100, "是否": -80,
    "判断": -80, "一个词": -150, "简要": -80, "简短": -80,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Candidate:
    """A group that may be opened: its draw, the text of its prompt, the limit of its answers, and its task's tag."""

    draw: int
    prompt: str
    max_new_tokens: int
    tag: str = ""


class Predictor(Protocol):
    """Predicted tokens per answer."""

    name: str

    def predict(self, candidates: Sequence[Candidate]) -> Floats:
        """One number per candidate, in their order."""
        ...

    def observe(self, finished: Sequence[tuple[Candidate, int]]) -> None:
        """Finished answers: what was predicted about, and the real length of one member, each."""
        ...

    def state(self) -> dict[str, Any]:
        """All that was learned, as plain data: numbers, strings, lists, dicts with string keys, NumPy arrays."""
        ...

    def load(self, state: Mapping[str, Any]) -> None:
        """Take over what `state` gave. ValueError or KeyError if it does not fit; nothing is changed then."""
        ...


class RulesPredictor:
    """Prompt length, digits and weighted keywords; needs no data, so it is what a run starts with."""

    name = "rules"

    def __init__(
        self,
        keywords: Mapping[str, float] | None = None,
        *,
        per_character: float = 0.3,
        per_digit: float = 1.0,
        base: float = 16.0,
    ) -> None:
        self.weights = {word.lower(): float(weight) for word, weight in (keywords or KEYWORDS).items()}
        self.per_character, self.per_digit, self.base = per_character, per_digit, base
        # Longest first, so that "step by step" is not read as a shorter word that begins it.
        words = sorted(self.weights, key=len, reverse=True)
        self._words = re.compile("|".join(map(_pattern, words)))
        self._digits = re.compile(r"\d")

    def predict(self, candidates: Sequence[Candidate]) -> Floats:
        raw = np.fromiter((self._score(c.prompt) for c in candidates), np.float64, len(candidates))
        limit = np.fromiter((c.max_new_tokens for c in candidates), np.float64, len(candidates))
        return np.clip(raw, 1.0, np.maximum(1.0, limit))

    def observe(self, finished: Sequence[tuple[Candidate, int]]) -> None:
        """Rules do not learn,"""

    def state(self) -> dict[str, Any]:
        return {}

    def load(self, state: Mapping[str, Any]) -> None:
        """and there is nothing to take over."""

    def _score(self, prompt: str) -> float:
        found = set(self._words.findall(prompt.lower()))  # a word counts once, however often it is said
        digits = len(self._digits.findall(prompt))
        weight = sum(self.weights[word] for word in found)
        return self.base + self.per_character * len(prompt) + self.per_digit * digits + weight


def make_predictor(name: str) -> Predictor:
    """The predictor that `scheduler.predictor` names."""
    if name != "rules":
        raise ValueError(f"predictor = {name!r}: must be rules")
    return RulesPredictor()


def kendall_tau(predicted: Sequence[float], actual: Sequence[float]) -> float:
    """Ranking quality, -1 to 1 (tau-b, ties corrected); 0 where one side does not vary. For some thousand pairs."""
    p, a = np.sign(np.subtract.outer(predicted, predicted)), np.sign(np.subtract.outer(actual, actual))
    varying = float(np.count_nonzero(p)) * float(np.count_nonzero(a))
    return float((p * a).sum() / np.sqrt(varying)) if varying else 0.0


def _pattern(word: str) -> str:
    """A Latin word matches as a word; other scripts have no spaces to go by."""
    return rf"\b{re.escape(word)}\b" if word.isascii() else re.escape(word)
