"""Kinds of rewards that need no code of a user: numbers, regular expressions, mathematics, tasks of reasoning-gym, and
what an episode returned.

Each is made from a `Setup` and called like a user's function, in the main thread of a child. Talks to math-verify and
reasoning-gym, each imported by the kind that uses it. Knows nothing of processes, weights or other parts.

- Every completion gets a number, whatever the policy wrote. A record that cannot be judged by raises.
- What limits the mathematics is CPU time (SIGPROF, which only the main thread may use), so that a busy machine calls no
  right answer wrong; the deadline of the child ends a call that this limit does not end.
"""

from __future__ import annotations

import importlib
import math
import re
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, lru_cache
from types import FrameType, ModuleType
from typing import Any, TypeVar

from busrl.data.prompts import plain_text
from busrl.errors import RewardNotLoaded
from busrl.rewards.base import Answer, Setup, compiled

GROUPED = r"\d{1,3}(?:,\d{3})+(?!\d)"  # 1,234,567
NUMBER = re.compile(rf"(?:(?<![\w.)])[-+\u2212])?(?:(?:{GROUPED}|\d+)(?:\.\d+)?|\.\d+)(?:[eE][-+]?\d+)?")


def last_number(text: str) -> float | None:
    """The last number in a text; None without one. A sign counts where it does not stand between two numbers."""
    last = ""
    for match in NUMBER.finditer(text):
        last = match.group()
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
        number = None if text is None else last_number(text)
        return float(number is not None and abs(number - wanted) <= self.tolerance)


def number_finder(extract: str) -> Callable[[str], str | None]:
    """A function that finds the last number of the answer in a completion; equal numbers give the same text."""
    inside = Answer(extract).find

    def find(completion: str) -> str | None:
        text = inside(completion)
        number = None if text is None else last_number(text)
        return None if number is None else f"{number:.12g}"

    return find


class Regex:
    """1 if `pattern` is found in the completion, else 0."""

    def __init__(self, setup: Setup) -> None:
        self.pattern = compiled(setup.pattern, f"{setup.place}.pattern")

    def __call__(self, record: dict[str, Any], completion: str, token_ids: list[int]) -> float:
        return float(self.pattern.search(completion) is not None)


WRAPPED = re.compile(r"\$|\\boxed|\\\(|\\\[|\\begin")  # marks by which math-verify finds LaTeX


def as_math(reference: str) -> str:
    """A reference as math-verify reads it: plain text between dollars, as (1,2) without them would be no pair."""
    return reference if WRAPPED.search(reference) else f"${reference}$"


Found = TypeVar("Found")
NEVER_S = 86_400  # for the library's own limits, which are of the clock


@contextmanager
def limited(cpu_s: float, late: type[BaseException]) -> Iterator[None]:
    """Raise `late` in this block after so many CPU seconds of the process, and again after as many more."""
    def end(number: int, frame: FrameType | None) -> None:
        raise late

    before = signal.signal(signal.SIGPROF, end)
    signal.setitimer(signal.ITIMER_PROF, cpu_s, cpu_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        signal.signal(signal.SIGPROF, before)


class Math(Answer):
    """1 if math-verify finds the answer equal to the record's, else 0.

    Each of the library's three steps has a quarter of `timeout_s` as CPU time. Answers that it cannot compare in that
    time count as unequal: that is the library's own rule.
    """

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup.extract, f"{setup.place}.extract")
        self.library = _library("math_verify", setup.place)
        self.late: type[BaseException] = _library("math_verify.errors", setup.place).TimeoutException
        self.answer_key, self.limit_s = setup.answer_key or "answer", setup.timeout_s / 4
        self._reference = lru_cache(maxsize=1024)(self._parsed)  # the answers of a group share one

    def __call__(self, record: dict[str, Any], completion: str, token_ids: list[int]) -> float:
        right = record[self.answer_key]
        reference = self._reference(right if isinstance(right, str) else plain_number(right))
        text = self.find(completion)
        if text is None:
            return 0.0
        answer = self._parse(text)
        return float(self._within(lambda: self.library.verify(list(reference), answer, timeout_seconds=NEVER_S), False))

    def _parsed(self, right: str) -> tuple[Any, ...]:
        if not (parsed := self._parse(as_math(right))):
            raise ValueError(f"{self.answer_key} = {right!r} of the record cannot be read as mathematics")
        return tuple(parsed)

    def _parse(self, text: str) -> list[Any]:
        return self._within(lambda: self.library.parse(text, parsing_timeout=NEVER_S), [])

    def _within(self, step: Callable[[], Found], otherwise: Found) -> Found:
        """Run a step of the library within its CPU time. The library itself gives `otherwise` where it catches the
        end of that time, which is nearly everywhere."""
        try:
            with limited(self.limit_s, self.late):
                return step()
        except self.late:
            return otherwise


def plain_number(value: object) -> str:
    """A number of a JSON line as text: 3.0 as 3."""
    integral = isinstance(value, float) and value.is_integer()
    return str(int(value)) if integral and isinstance(value, float) else str(value)


def gym_finder(extract: str, key: str = "reward.extract") -> Callable[[str], str | None]:
    """A function that finds the text between the last <answer> and </answer>, or else the whole completion; with an
    `extract`, the match of that."""
    inside = Answer(extract or r"(?s)<answer>\s?(.*?)\s?</answer>", key).find

    def find(completion: str) -> str | None:
        answer = inside(completion)
        return completion.strip() if answer is None and not extract else answer

    return find


class Gym:
    """The score of reasoning-gym's own `score_answer`. The record holds the entry's `metadata` (with `source_dataset`,
    the name of the task), its answer, and its question under the key of prompts or as `question`.

    `gym_finder` finds the answer in a completion.
    """

    def __init__(self, setup: Setup) -> None:
        self.library = _library("reasoning_gym", setup.place)
        self.find = gym_finder(setup.extract, f"{setup.place}.extract")
        self.answer_key, self.prompt_key = setup.answer_key or "answer", setup.prompt_key
        self._scorer = cache(self.library.get_score_answer_fn)  # by the name of a task

    def __call__(self, record: dict[str, Any], completion: str, token_ids: list[int]) -> float:
        metadata = record.get("metadata")
        task = metadata.get("source_dataset") if isinstance(metadata, dict) else None
        if not isinstance(task, str):
            raise ValueError("the record has no metadata.source_dataset, by which reasoning-gym knows its task")
        question = record.get("question", plain_text(record.get(self.prompt_key, "")))
        entry = {"question": question, "answer": record[self.answer_key], "metadata": metadata}
        return float(self._scorer(task)(self.find(completion), entry))


class Returned:
    """The reward that the sample's episode itself returned; an episode that returned none cannot be judged."""

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
