"""What a reward function is, how one is found by name, and what its result must be.

    def judge(record: dict, completion: str, token_ids: list[int]) -> float | dict[str, float]: ...

`record` is the whole JSONL line of the prompt. Talks to the import system only. Knows nothing of processes.

- A result is a finite number, or a map of named finite numbers whose sum is the reward. Everything else is malformed,
  NaN and infinity included.
- A function that cannot be loaded is a `RewardNotLoaded` with the import path and the cause, before any sample.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from busrl import imports
from busrl.errors import RewardNotLoaded

if TYPE_CHECKING:
    from busrl.config.schema import Reward

RewardFunction = Callable[[dict[str, Any], str, list[int]], Any]


class ExactMatch:
    """The reward function `exact_match`: 1 if the answer in a completion equals the record's answer, else 0.

    - `extract` empty: the whole completion is the answer. With a group: group 1 of its last match. Without a group: the
      text after the last match that is not empty. No match is a wrong answer, not a broken reward.
    - Text is compared as text, without surrounding space. A right answer that is not a string counts as JSON writes it
      (72, 0.5, true); a whole number with a decimal point also without.
    """

    def __init__(self, extract: str = "", answer_key: str = "answer") -> None:
        self.answer_key = answer_key
        try:
            self.pattern = re.compile(extract) if extract else None
        except re.error as problem:
            raise RewardNotLoaded(f"reward.extract = {extract!r}: not a regular expression ({problem})") from None

    def __call__(self, record: dict[str, Any], completion: str, token_ids: list[int]) -> float:
        answer = self.find(completion)
        return float(answer is not None and answer in spellings(record[self.answer_key]))

    def find(self, completion: str) -> str | None:
        """The answer in a completion, stripped; None if there is none."""
        if self.pattern is None:
            return completion.strip()
        matches = list(self.pattern.finditer(completion))
        if not matches:
            return None
        if self.pattern.groups:
            return (matches[-1].group(1) or "").strip()
        last = next((m for m in reversed(matches) if m.group()), matches[0])
        return completion[last.end() :].strip()


def spellings(answer: object) -> tuple[str, ...]:
    """How a right answer may be written."""
    if isinstance(answer, str):
        return (answer.strip(),)
    if isinstance(answer, float) and answer.is_integer():
        return (json.dumps(answer), str(int(answer)))
    return (json.dumps(answer),)


class MalformedReward(ValueError):
    """A result that is no finite number; the sample ends with fate M."""


class Setup(msgspec.Struct, frozen=True):
    """The function that judges: fields of [reward], and the directory that paths of files are relative to."""

    kind: str
    function: str
    extract: str
    answer_key: str
    base_dir: str = "."


def build(setup: Setup) -> RewardFunction:
    """The function that [reward] describes."""
    if setup.kind == "exact_match":
        return ExactMatch(setup.extract, setup.answer_key or "answer")
    if setup.kind == "python":
        return load(setup.function, setup.base_dir)
    raise RewardNotLoaded(f"reward.kind = {setup.kind!r}: must be exact_match or python")


def load(target: str, base_dir: str | Path = ".") -> RewardFunction:
    """Import `package.module:function` or `path/to/file.py:function`; RewardNotLoaded with the cause."""
    return imports.load("reward.function", target, RewardNotLoaded, base_dir)


def settle(result: Any) -> tuple[float, dict[str, float]]:
    """The reward and its parts from what a function returned."""
    if not isinstance(result, Mapping):
        return _number(result, "the reward"), {}
    parts = {str(name): _number(value, f"reward part {name!r}") for name, value in result.items()}
    if not parts:
        raise MalformedReward("the reward is an empty map: return a number or at least one part")
    return _number(sum(parts.values()), "the sum of the reward's parts"), parts


def _number(value: Any, what: str) -> float:
    if isinstance(value, (str, bytes)) or value is None:
        raise MalformedReward(f"{what} is {value!r}: must be a number")
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError) as problem:
        raise MalformedReward(f"{what} is a {type(value).__name__}: must be a number ({problem})") from None
    if not math.isfinite(number):
        raise MalformedReward(f"{what} is {number}: must be finite")
    return number


def answer_finder(settings: Reward) -> Callable[[str], str | None] | None:
    """What takes the answer that is judged from a completion; None for rewards that judge the whole of it."""
    if settings.kind == "python":
        return None
    find = getattr(build(Setup(settings.kind, "", settings.extract, settings.answer_key)), "find", None)
    return find if callable(find) else None
