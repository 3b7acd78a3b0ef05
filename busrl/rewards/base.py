"""Reward functions: their three forms, the setup of one, what a child gets and answers, and the rules for a result.

    def judge(record: dict, completion: str, token_ids: list[int]) -> float | dict[str, float]: ...
    async def judge(record, completion, token_ids): ...  # many calls at the same time
    def judge(records: list, completions: list, token_ids: list) -> list: ...  # batch = true

`record` is the whole JSONL line of the prompt. A function with an argument named `episode` gets the facts of an episode
of several turns there (None for a single answer; a list with batch = true). Knows nothing of processes.

- A result is a finite number, or a map of named finite numbers whose sum is the reward. Everything else is malformed,
  NaN and infinity included.
- A function that cannot be loaded raises `RewardNotLoaded` with the import path and the cause, before any sample.
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
from busrl.system import imports

RewardFunction = Callable[..., Any]  # one of the three forms above


class Answer:
    """The answer in a completion, as the regular expression `extract` finds it; `key` is that of the topology.

    Empty: the whole completion is the answer. With a group: group 1 of its last match. Without a group: the text after
    the last match that is not empty.
    """

    def __init__(self, extract: str = "", key: str = "reward.extract") -> None:
        self.pattern = compiled(extract, key) if extract else None

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


def compiled(pattern: str, key: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern)
    except re.error as problem:
        raise RewardNotLoaded(f"{key} = {pattern!r}: not a regular expression ({problem})") from None


class ExactMatch(Answer):
    """The reward function `exact_match`: 1 if the answer in a completion equals the record's answer, else 0.

    - A completion in which `extract` matches nothing is a wrong answer, not a broken reward.
    - Text is compared as text, without surrounding space. A right answer that is no string is compared as JSON writes
      it (72, 0.5, true); 72.0 also as 72.
    """

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup.extract, f"{setup.place}.extract")
        self.answer_key = setup.answer_key or "answer"

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


def answer_finder(extract: str) -> Callable[[str], str | None]:
    """A function that finds the answer in a completion, as the kinds that compare text do."""
    return Answer(extract).find


class MalformedReward(ValueError):
    """A result that is not a finite number; the sample ends with fate M."""


class Setup(msgspec.Struct, frozen=True):
    """The setup of a function that judges: fields of [reward] or of one [[reward.part]] (see docs/rewards.md), `maker`
    of its kind (`busrl.topology.rewards`), `place` by which messages name it, and the folder of the topology."""

    kind: str
    function: str = ""
    extract: str = ""
    answer_key: str = ""
    base_dir: str = "."  # the topology's, for kinds that load the user's code
    place: str = "reward"
    maker: str = ""
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


READY = -1  # key of the outcome of loading the function


class Item(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """A completion to be judged. `key` is the caller's own, not negative, and comes back with the outcome. For an
    episode of several turns `completion` is the text of the last turn, and `episode` has the facts of all."""

    key: int
    record_line: bytes
    completion: str
    token_ids: list[int]
    episode: dict[str, Any] | None = None


class Outcome(msgspec.Struct, gc=False):
    """The outcome of an item: a finite `value` (and its parts), or `error`: raised | hung | malformed (or not_loaded,
    of READY only), with `text`; and the `seconds` in the function."""

    key: int
    value: float = 0.0
    parts: dict[str, float] = {}
    error: str = ""
    text: str = ""
    seconds: float = 0.0


def user_function(setup: Setup) -> RewardFunction:
    """The function that the topology names; `RewardNotLoaded` too if it was written for another trainer."""
    function = imports.load(f"{setup.place}.function", setup.function, RewardNotLoaded, setup.base_dir)
    trainer, line = adapter(function, setup)
    if trainer:
        key, alone = f"{setup.place}.function = {setup.function!r}", ", with batch = false" if setup.batch else ""
        raise RewardNotLoaded(f"{key}: it takes what {trainer} gives a reward; name `{line}` instead{alone}")
    return function


def adapter(function: RewardFunction, setup: Setup) -> tuple[str, str]:
    """The trainer for which a function was written, by its signature, and a line that adapts it to busrl; empty for any
    other function. Those trainers pass other values at the same positions, so that it would judge by wrong ones."""
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):  # of a builtin
        return "", ""
    name, waits = setup.function.rpartition(":")[2], inspect.iscoroutinefunction(function)
    of_three = sum(parameter.kind <= parameter.POSITIONAL_OR_KEYWORD for parameter in parameters.values()) >= 3
    more = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    first = next(iter(parameters), "")
    if "completions" in parameters and (more or first in ("prompts", "completions")) and not (setup.batch and of_three):
        whose, call, last = "TRL", _as_trl(name, parameters, more), "[0]"
    elif {"data_source", "solution_str", "ground_truth"} & parameters.keys():
        arguments = {"data_source": '"busrl"', "solution_str": "completion", "ground_truth": 'record["answer"]'}
        whose, last = "verl", ""
        call = f"{name}({', '.join(f'{key}={text}' for key, text in arguments.items() if key in parameters)})"
    elif list(parameters)[:3] == ["queries", "prompts", "labels"]:
        whose, last = "OpenRLHF", "[0]"
        call = f'{name}([record["prompt"] + completion], [record["prompt"]], [record["answer"]])'
    else:
        return "", ""
    begins, called = ("async def", f"(await {call})") if waits else ("def", call)
    return whose, f"{begins} score(record, completion, token_ids): return float({called}{last})"


def _as_trl(name: str, parameters: Iterable[str], more: bool) -> str:
    """The call of a TRL function, with lists of one item as keyword arguments: all columns where it takes `more`, or
    else those that its parameters name."""
    columns = {"prompts": '[record["prompt"]]', "completions": "[completion]", "completion_ids": "[token_ids]"}
    words = [f"{column}={text}" for column, text in columns.items() if column in parameters]
    if more:
        words.append('**{key: [value] for key, value in record.items() if key != "prompt"}')
    else:
        words += [f'{key}=[record["{key}"]]' for key in parameters if key not in columns]
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
