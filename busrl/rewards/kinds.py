"""Kinds of rewards that need no code of a user: numbers, regular expressions, mathematics, tasks of reasoning-gym.

Each is made from a `Setup` and called as a user's function is, in a child's main thread. Talks to math-verify and
reasoning-gym, which are imported where they are asked for. Knows nothing of processes, weights or other parts.

- A completion is what a policy wrote: whatever it is, it is worth a number. A record that cannot be judged by raises.
- math-verify limits its own time by SIGALRM, which only the main thread may use; what it does not end, the deadline of
  the child does.
"""

from __future__ import annotations

import importlib
import math
import re
from collections.abc import Callable
from functools import lru_cache
from types import ModuleType
from typing import Any

from busrl.data.prompts import plain_text
from busrl.errors import RewardNotLoaded
from busrl.rewards.base import Answer, RewardFunction, Setup, compiled

GROUPED = r"\d{1,3}(?:,\d{3})+(?!\d)"  # 1,234,567
NUMBER = re.compile(rf"(?:(?<![\w.)])[-+\u2212])?(?:(?:{GROUPED}|\d+)(?:\.\d+)?|\.\d+)(?:[eE][-+]?\d+)?")


def last_number(text: str) -> float | None:
    """The last number in a text; None without one. A sign counts where it does not stand between two numbers."""
    last = ""
    for found in NUMBER.finditer(text):
        last = found.group()
    return float(last.replace(",", "").replace("\u2212", "-")) if last else None


class Numeric(Answer):
    """1 if the last number of the answer differs from the record's by at most `tolerance`, else 0."""

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup.extract, f"{setup.place}.extract")
        self.answer_key, self.tolerance = setup.answer_key or "answer", setup.tolerance

    def __call__(self, record: dict[str, Any], completion: str, token_ids: list[int]) -> float:
        right = record[self.answer_key]
        wanted = last_number(right) if isinstance(right, str) else float(right)
        if wanted is None or not math.isfinite(wanted):
            raise ValueError(f"{self.answer_key} = {right!r} of the record holds no number")
        text = self.find(completion)
        found = None if text is None else last_number(text)
        return float(found is not None and abs(found - wanted) <= self.tolerance)


def finder(kind: str, extract: str) -> Callable[[str], str | None]:
    """What finds the answer that a part of this kind judges, as a text that is the same for equal answers."""
    if kind == "gym":
        return gym_finder(extract)
    inside = Answer(extract).find

    def number(completion: str) -> str | None:
        text = inside(completion)
        found = None if text is None else last_number(text)
        return None if found is None else f"{found:.12g}"

    return number if kind == "numeric" else inside


class Regex:
    """1 if `pattern` is found in the completion, else 0."""

    def __init__(self, setup: Setup) -> None:
        self.pattern = compiled(setup.pattern, f"{setup.place}.pattern")

    def __call__(self, record: dict[str, Any], completion: str, token_ids: list[int]) -> float:
        return float(self.pattern.search(completion) is not None)


WRAPPED = re.compile(r"\$|\\boxed|\\\(|\\\[|\\begin")  # marks by which math-verify finds LaTeX


def as_math(reference: str) -> str:
    """A reference as math-verify reads it: plain text between dollars, else (1,2) would be no pair."""
    return reference if WRAPPED.search(reference) else f"${reference}$"


class Math(Answer):
    """1 if math-verify finds the answer equal to the record's, else 0.

    The library stops by itself after whole seconds for each of the three things that it does; all of them fit into
    `timeout_s`. What it cannot decide in that time counts as unequal, as the library has it.
    """

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup.extract, f"{setup.place}.extract")
        self.library = _library("math_verify", setup.place)
        self.answer_key = setup.answer_key or "answer"
        self.limit_s = max(1, int(setup.timeout_s / 4))
        self._reference = lru_cache(maxsize=1024)(self._parsed)  # the answers of a group share one

    def __call__(self, record: dict[str, Any], completion: str, token_ids: list[int]) -> float:
        right = record[self.answer_key]
        reference = self._reference(right if isinstance(right, str) else plain_number(right))
        text = self.find(completion)
        if text is None:
            return 0.0
        answer = self.library.parse(text, parsing_timeout=self.limit_s)
        return float(self.library.verify(list(reference), answer, timeout_seconds=self.limit_s))

    def _parsed(self, right: str) -> tuple[Any, ...]:
        found = self.library.parse(as_math(right), parsing_timeout=self.limit_s)
        if not found:
            raise ValueError(f"{self.answer_key} = {right!r} of the record cannot be read as mathematics")
        return tuple(found)


def plain_number(value: object) -> str:
    """A number of a JSON line as text: 3.0 as 3."""
    whole = isinstance(value, float) and value.is_integer()
    return str(int(value)) if whole and isinstance(value, float) else str(value)


def gym_finder(extract: str, named: str = "reward.extract") -> Callable[[str], str | None]:
    """What stands last between <answer> and </answer>, else the whole completion; or what `extract` finds."""
    inside = Answer(extract or r"(?s)<answer>\s?(.*?)\s?</answer>", named).find

    def find(completion: str) -> str | None:
        answer = inside(completion)
        return completion.strip() if answer is None and not extract else answer

    return find


class Gym:
    """What reasoning-gym's own `score_answer` gives. The record holds the entry's `metadata` (with `source_dataset`,
    the name of the task), its answer, and its question under the key of prompts or as `question`.

    The answer is what stands last between <answer> and </answer>, else the whole completion; or as `extract` says.
    """

    def __init__(self, setup: Setup) -> None:
        self.library = _library("reasoning_gym", setup.place)
        self.find = gym_finder(setup.extract, f"{setup.place}.extract")
        self.answer_key, self.prompt_key = setup.answer_key or "answer", setup.prompt_key
        self._score_of: dict[str, Callable[[str | None, dict[str, Any]], float]] = {}

    def __call__(self, record: dict[str, Any], completion: str, token_ids: list[int]) -> float:
        metadata = record.get("metadata")
        task = metadata.get("source_dataset") if isinstance(metadata, dict) else None
        if not isinstance(task, str):
            raise ValueError("the record has no metadata.source_dataset, by which reasoning-gym knows its task")
        question = record.get("question", plain_text(record.get(self.prompt_key, "")))
        entry = {"question": question, "answer": record[self.answer_key], "metadata": metadata}
        answer = self.find(completion)
        if task not in self._score_of:
            self._score_of[task] = self.library.get_score_answer_fn(task)
        return float(self._score_of[task](answer, entry))


class Returned:
    """What the sample's episode itself returned; one that returned nothing cannot be judged."""

    def __init__(self, setup: Setup) -> None:
        self.place = setup.place

    def __call__(
        self, record: dict[str, Any], completion: str, token_ids: list[int], episode: dict[str, Any] | None
    ) -> float:
        if episode is None or episode["reward"] is None:
            raise ValueError(f"{self.place} is what an episode returns, and this sample's returned no reward")
        return float(episode["reward"])


def _library(name: str, place: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ImportError as problem:
        raise RewardNotLoaded(f"{place}: {name} cannot be imported ({problem}): pip install 'busrl[rewards]'") from None


KINDS: dict[str, Callable[[Setup], RewardFunction]] = {
    "numeric": Numeric, "regex": Regex, "math": Math, "gym": Gym, "agent": Returned,
}
