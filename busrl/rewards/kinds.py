"""Kinds of rewards that need no code of a user: numbers, regular expressions, mathematics, tasks of reasoning-gym, and
programs that are run in boxes against the tests of their line.

Each is made from a `Setup` and called like a user's function, in a child (`Code` on its event loop, the others in its
main thread). Talks to math-verify and reasoning-gym, each imported by the kind that uses it, and to the `box`. Knows
nothing of processes, weights or other parts.

- Every completion gets a number, whatever the policy wrote. A record that cannot be judged by raises.
- math-verify limits its own time by SIGALRM, which only the main thread may use; the deadline of the child ends a call
  that this limit does not end.
- The verdict on a program is made where the program's code cannot write: printed output is compared in this process,
  and asserts run in a box of their own that gets plain values from the answer's box. A program that hits a limit fails
  the test. Without a box, or with tests that cannot be run, the call raises: that is no reward of 0.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import math
import os
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache, lru_cache
from types import ModuleType
from typing import Any

import msgspec

from busrl.data.prompts import plain_text
from busrl.errors import RewardNotLoaded
from busrl.rewards import box
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


class Math(Answer):
    """1 if math-verify finds the answer equal to the record's, else 0.

    The library has a limit in whole seconds for each of its three steps; all of them fit into `timeout_s`. Answers that
    it cannot compare in that time count as unequal: that is the library's own rule.
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
        parsed = self.library.parse(as_math(right), parsing_timeout=self.limit_s)
        if not parsed:
            raise ValueError(f"{self.answer_key} = {right!r} of the record cannot be read as mathematics")
        return tuple(parsed)


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


# -- programs ---------------------------------------------

BLOCK = r"(?s)```(?:python|py)?[ \t]*\r?\n(.*?)```"
VERDICT_BYTES = 1 << 20
Tests = dict[str, Any]


class UnfitTests(ValueError):
    """The tests of a line cannot be run, whatever the answer."""


class Code:
    """1 if the program in the answer passes the tests of its line, else 0, or the share of tests that pass. `at_once`
    answers are judged at the same time."""

    def __init__(self, setup: Setup) -> None:
        why = "" if setup.trust else box.refusal()
        if why:
            raise RewardNotLoaded(
                f"{setup.place}: {why} ({box.parts()}); use a kernel that has all of it, or set trust = true to run "
                "the answers' code as this user, for example in a container that holds nothing else"
            )
        self.find = Answer(setup.extract or BLOCK, f"{setup.place}.extract").find
        self.tests_key, self.name_key, self.share, self.trust = setup.tests, setup.entry, setup.share, setup.trust
        self.limits = box.Limits(wall_s=min(setup.run_s, setup.total_s), cpu_s=setup.cpu_s, memory_mb=setup.run_mb)
        self.total_s = setup.total_s
        self.at_once = setup.at_once or len(os.sched_getaffinity(0))
        self.threads = ThreadPoolExecutor(self.at_once)

    async def __call__(self, record: dict[str, Any], completion: str, token_ids: list[int]) -> float:
        return await asyncio.get_running_loop().run_in_executor(self.threads, self.judge, record, completion)

    def judge(self, record: dict[str, Any], completion: str) -> float:
        """The reward of a completion: 1 if all tests passed, else 0; with `share` the share of tests that passed."""
        tests, code = read_tests(record, self.tests_key, self.name_key), self.find(completion)
        if not code:
            return 0.0
        passed, count = self.printed(code, tests) if not tests.get("name") else self.called(code, tests)
        return passed / count if self.share else float(passed == count)

    def printed(self, code: str, tests: Tests) -> tuple[int, int]:
        """The number of inputs that gave their output, compared word by word, and the number of all. Each input has a
        box of its own; inputs for which no time is left failed."""
        passed, left_s = 0, self.total_s
        for entered, wanted in zip(tests["inputs"], tests["outputs"]):
            if left_s <= 0:
                break
            most, wall_s = len(wanted.encode()) + (64 << 10), min(self.limits.wall_s, left_s)
            limits = msgspec.structs.replace(self.limits, wall_s=wall_s, output_bytes=most)
            result = box.run(code, entered, limits, self.trust)
            left_s -= result.seconds
            if result.code == 0 and not result.cut and result.stdout.split() == wanted.split():
                passed += 1
            elif not self.share:
                break
        return passed, len(tests["inputs"])

    def called(self, code: str, tests: Tests) -> tuple[int, int]:
        """The number of passed tests, and of all, of tests that call functions of the answer. A test without a line
        that it passed has failed."""
        limits = msgspec.structs.replace(self.limits, output_bytes=VERDICT_BYTES)
        lines, result = box.run_tests(code, {**tests, "stop": not self.share}, limits, self.trust)
        for line in lines:
            if "unfit" in line:
                raise UnfitTests(f"{self.tests_key} of the record cannot be run: {line['unfit']}")
        if not lines and result.code is not None:
            raise UnfitTests(f"the program of the tests ended with {result.code}: {result.stderr[-500:]}")
        count = lines[0]["tests"] if lines else 1
        if not count:
            raise UnfitTests(f"{self.tests_key} of the record has no assert and no function check or test...")
        return sum(line.get("passed") is True for line in lines[1:]), count


def read_tests(record: dict[str, Any], key: str, name_key: str) -> Tests:
    """The tests of a line in one form: `inputs` and `outputs`, with `name` those of a function; or `source` and `name`.

    A line has them as a list of asserts, as Python source, or as {"inputs": [...], "outputs": [...]} with an optional
    "fn_name" (APPS, TACO), in JSON or as a text of JSON. Inputs of a function are lists of arguments, or texts with an
    argument of JSON in each line. A list of asserts may have its imports beside it: {"setup": "...", "asserts": [...]}.
    """
    tests, name = record[key], str(record.get(name_key) or "candidate")
    if isinstance(tests, str) and tests.lstrip()[:1] == "{":
        try:
            tests = json.loads(tests)
        except ValueError:
            raise UnfitTests(f"{key} = {tests[:80]!r} of the record is neither Python nor JSON") from None
    if isinstance(tests, dict) and "asserts" in tests:
        tests = [str(tests.get("setup", "")), *tests["asserts"]]
    if isinstance(tests, list):
        tests = "\n".join(map(str, tests))
    if isinstance(tests, str):
        return {"source": tests, "name": name}
    if not isinstance(tests, dict) or not tests.get("inputs") or len(tests["inputs"]) != len(tests.get("outputs", ())):
        raise UnfitTests(f"{key} of the record holds neither asserts nor as many inputs as outputs")
    if function := str(tests.get("fn_name") or ""):
        inputs, outputs = tests["inputs"], tests["outputs"]
        if all(isinstance(entry, str) for entry in inputs):
            inputs = [[json.loads(line) for line in entry.splitlines()] for entry in inputs]
            outputs = [json.loads(entry) for entry in outputs]
        inputs = [entry if isinstance(entry, list) else [entry] for entry in inputs]
        return {"name": function, "inputs": inputs, "outputs": outputs}
    return {side: [text(entry) for entry in tests[side]] for side in ("inputs", "outputs")}


def text(value: Any) -> str:
    """Standard input or output: a text, or its lines."""
    return "\n".join(map(str, value)) if isinstance(value, list) else str(value)
