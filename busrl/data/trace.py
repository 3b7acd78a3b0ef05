"""Traces: prompts with the lengths that their answers really had, or that a generator made up.

Talks to one file. A trace is a prompt file (`busrl.data.check`) whose lines also say how long each answer of the group
was, so the same file can be simulated, and be run for real by the scripted engine. Knows nothing of tokens, groups'
fates or schedules.

- Line: {"prompt": str, "answer": str, "tag": str, "lengths": [int, ...]} and, where known, "rewards" (one per length)
  and "arrival_s" (seconds since the start of an open stream). Other keys are kept out.
- Lengths are in tokens, the end-of-sequence token included; all are >= 1. Member m of a group has lengths[m mod n].
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from busrl.data.check import decode_line, open_file, prompt_lines
from busrl.data.prompt import plain_text
from busrl.errors import DataError

MAX_TOKENS = 1 << 30


@dataclass(frozen=True)
class Task:
    """One line of a trace."""

    prompt: str
    lengths: tuple[int, ...]
    answer: str = ""
    tag: str = ""
    rewards: tuple[float, ...] = ()
    arrival_s: float | None = None

    def length(self, member: int) -> int:
        """Tokens of the answer of member `member`."""
        return self.lengths[member % len(self.lengths)]

    def reward(self, member: int) -> float | None:
        """Reward of that answer, None where the trace has none."""
        return self.rewards[member % len(self.rewards)] if self.rewards else None


def read(path: str | Path, prompt_key: str = "prompt") -> list[Task]:
    """Every line of a trace, checked. `DataError` names file:line, the value, the rule and the remedy."""
    path = Path(path)
    with open(open_file(path), "rb") as file:
        lines = enumerate(prompt_lines(file), 1)
        tasks = [parse(line, f"{path}:{number}", prompt_key) for number, (_, line) in lines]
    if not tasks:
        raise DataError(f"{path}: the file is empty: a trace has one JSON object per line; write some")
    if len({task.arrival_s is None for task in tasks}) > 1:
        raise DataError(f"{path}: some lines have arrival_s and some have not: give it on every line or on none")
    return tasks


def parse(line: bytes, place: str, prompt_key: str = "prompt") -> Task:
    """The task of one line; `place` (file:line) starts the text of the `DataError`."""
    record = decode_line(line, place, prompt_key)
    lengths = _numbers(record, "lengths", place)
    if not lengths or not all(isinstance(n, int) and 1 <= n <= MAX_TOKENS for n in lengths):
        raise DataError(
            f"{place}: lengths = {_short(lengths)}: must be a list of whole numbers of tokens >= 1, one per answer; "
            "correct the line"
        )
    rewards = _numbers(record, "rewards", place) if "rewards" in record else []
    if rewards and len(rewards) != len(lengths):
        raise DataError(f"{place}: {len(rewards)} rewards for {len(lengths)} lengths: give one per answer, or none")
    arrival = _numbers({"arrival_s": [record["arrival_s"]]}, "arrival_s", place)[0] if "arrival_s" in record else None
    if arrival is not None and arrival < 0:
        raise DataError(f"{place}: arrival_s = {arrival}: must be >= 0 seconds; correct the line")
    return Task(
        prompt=plain_text(record[prompt_key]),
        lengths=tuple(int(n) for n in lengths),
        answer=str(record.get("answer", "")),
        tag=str(record.get("tag", "")),
        rewards=tuple(float(r) for r in rewards),
        arrival_s=None if arrival is None else float(arrival),
    )


def write(path: str | Path, tasks: Sequence[Task]) -> None:
    """Write a trace; `read` gives equal tasks back."""
    with open(path, "wb") as file:
        file.writelines(msgspec.json.encode(_line(task)) + b"\n" for task in tasks)


def _line(task: Task) -> dict[str, Any]:
    line: dict[str, Any] = {"prompt": task.prompt, "answer": task.answer, "tag": task.tag, "lengths": task.lengths}
    if task.rewards:
        line["rewards"] = task.rewards
    if task.arrival_s is not None:
        line["arrival_s"] = task.arrival_s
    return line


def _numbers(record: dict[str, object], name: str, place: str) -> list[Any]:
    """The list of finite numbers under `name`."""
    found = record.get(name)
    if not isinstance(found, list):
        raise DataError(f"{place}: {name} = {_short(found)}: must be a list of numbers; correct the line")
    for value in found:
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
            raise DataError(f"{place}: {name} holds {_short(value)}: must be a finite number; correct the line")
    return found


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
