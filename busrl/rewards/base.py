"""Reward functions: their form, how they are found by name or by kind, and what their result must be.

    def judge(record: dict, completion: str, token_ids: list[int]) -> float | dict[str, float]: ...
    async def judge(record, completion, token_ids): ...  # many calls at the same time
    def judge(records: list, completions: list, token_ids: list) -> list: ...  # batch = true

`record` is the whole JSONL line of the prompt. A function that has an argument named `episode` gets what is known of an
episode of several turns there (None for one answer; a list of them with batch = true). Knows nothing of processes.

- A result is a finite number, or a map of named finite numbers whose sum is the reward. Everything else is malformed,
  NaN and infinity included.
- A function that cannot be loaded is a `RewardNotLoaded` with the import path and the cause, before any sample.
"""

from __future__ import annotations

import inspect
import json
import math
import re
import reprlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import msgspec

from busrl.errors import RewardNotLoaded

RewardFunction = Callable[..., Any]  # one of the three forms above


class Answer:
    """The answer in a completion, as the regular expression `extract` finds it; `named` is the key that holds it.

    Empty: the whole completion is the answer. With a group: group 1 of its last match. Without a group: the text after
    the last match that is not empty.
    """

    def __init__(self, extract: str = "", named: str = "reward.extract") -> None:
        self.pattern = compiled(extract, named) if extract else None

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


def compiled(pattern: str, named: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern)
    except re.error as problem:
        raise RewardNotLoaded(f"{named} = {pattern!r}: not a regular expression ({problem})") from None


class ExactMatch(Answer):
    """The reward function `exact_match`: 1 if the answer in a completion equals the record's answer, else 0.

    - No match of `extract` is a wrong answer, not a broken reward.
    - Text is compared as text, without surrounding space. A right answer that is not a string counts as JSON writes it
      (72, 0.5, true); a whole number with a decimal point also without.
    """

    def __init__(self, extract: str = "", answer_key: str = "answer", named: str = "reward.extract") -> None:
        super().__init__(extract, named)
        self.answer_key = answer_key

    def __call__(self, record: dict[str, Any], completion: str, token_ids: list[int]) -> float:
        answer = self.find(completion)
        return float(answer is not None and answer in spellings(record[self.answer_key]))


def spellings(answer: object) -> tuple[str, ...]:
    """The spellings of a right answer."""
    if isinstance(answer, str):
        return (answer.strip(),)
    if isinstance(answer, float) and answer.is_integer():
        return (json.dumps(answer), str(int(answer)))
    return (json.dumps(answer),)


class MalformedReward(ValueError):
    """A result that is no finite number; the sample ends with fate M."""


class Setup(msgspec.Struct, frozen=True):
    """The function that judges: fields of [reward] or of one [[reward.part]] (docs/rewards.md says what they mean),
    `place` by which messages name it, and the folder of the topology."""

    kind: str
    function: str = ""
    extract: str = ""
    answer_key: str = ""
    base_dir: str = "."  # of kinds that load code of the user's
    place: str = "reward"
    batch: bool = False
    pattern: str = ""
    tolerance: float = 0.0
    timeout_s: float = 10.0
    prompt_key: str = "prompt"
    path: str = ""
    device: str = "auto"
    batch_tokens: int = 16384
    base_url: str = ""
    model: str = ""
    template: str = ""
    verdict: str = ""
    max_tokens: int = 1024
    concurrency: int = 16
    retries: int = 4
    api_key_env: str = ""
    memory_mb: int = 0
    tests: str = "tests"
    entry: str = "entry_point"
    share: bool = False
    run_s: float = 5.0
    total_s: float = 30.0
    cpu_s: int = 10
    run_mb: int = 512
    at_once: int = 0
    trust: bool = False


def adapter(function: RewardFunction, setup: Setup) -> tuple[str, str]:
    """The trainer whose signature a foreign function has, and a line that calls it as a reward of busrl; empty for any
    other. In the same places those trainers give other things, by which it would judge."""
    try:
        known = inspect.signature(function).parameters
    except (TypeError, ValueError):  # of a builtin
        return "", ""
    name, waits = setup.function.rpartition(":")[2], inspect.iscoroutinefunction(function)
    of_three = sum(parameter.kind <= parameter.POSITIONAL_OR_KEYWORD for parameter in known.values()) >= 3
    more = any(parameter.kind is parameter.VAR_KEYWORD for parameter in known.values())
    first = next(iter(known), "")
    if "completions" in known and (more or first in ("prompts", "completions")) and not (setup.batch and of_three):
        whose, call, last = "TRL", _as_trl(name, known, more), "[0]"
    elif {"data_source", "solution_str", "ground_truth"} & known.keys():
        arguments = {"data_source": '"busrl"', "solution_str": "completion", "ground_truth": 'record["answer"]'}
        whose, last = "verl", ""
        call = f"{name}({', '.join(f'{key}={text}' for key, text in arguments.items() if key in known)})"
    elif list(known)[:3] == ["queries", "prompts", "labels"]:
        whose, last = "OpenRLHF", "[0]"
        call = f'{name}([record["prompt"] + completion], [record["prompt"]], [record["answer"]])'
    else:
        return "", ""
    begins, called = ("async def", f"(await {call})") if waits else ("def", call)
    return whose, f"{begins} score(record, completion, token_ids): return float({called}{last})"


def _as_trl(name: str, known: Iterable[str], more: bool) -> str:
    """The call with lists of one, by keywords: of a function of any `more` columns, or of those that it names."""
    columns = {"prompts": '[record["prompt"]]', "completions": "[completion]", "completion_ids": "[token_ids]"}
    words = [f"{column}={text}" for column, text in columns.items() if column in known]
    if more:
        words.append('**{key: [value] for key, value in record.items() if key != "prompt"}')
    else:
        words += [f'{key}=[record["{key}"]]' for key in known if key not in columns]
    return f"{name}({', '.join(words)})"


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
        raise MalformedReward(f"{what} is {reprlib.repr(value)}: must be a number")
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError) as problem:
        raise MalformedReward(f"{what} is a {type(value).__name__}: must be a number ({problem})") from None
    if not math.isfinite(number):
        raise MalformedReward(f"{what} is {number}: must be finite")
    return number
