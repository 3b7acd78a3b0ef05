"""The kind of rewards that judges programs: `Code` runs what an answer holds in boxes, against the tests of its line.

Made from a `Setup` and called like a user's function, on the event loop of a child. Talks to `boxes`. Knows nothing of
processes, weights or other parts.

- The verdict on a program is made where the program's code cannot write: printed output is compared in this process,
  and asserts run in a box of their own that gets plain values from the answer's box. A program that hits a limit fails
  the test. Without a box, or with tests that cannot be run, the call raises: that is no reward of 0.
"""

from __future__ import annotations

import asyncio
import json
import os
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec

from busrl.errors import RewardNotLoaded
from busrl.rewards.base import Answer, Setup
from busrl.rewards.box import boxes

BLOCK = r"(?s)```(?:python|py)?[ \t]*\r?\n(.*?)```"
VERDICT_BYTES = 1 << 20
Tests = dict[str, Any]


class UnfitTests(ValueError):
    """The tests of a line cannot be run, whatever the answer."""


class Code:
    """1 if the program in the answer passes the tests of its line, else 0, or the share of tests that pass. `at_once`
    answers are judged at the same time."""

    def __init__(self, setup: Setup) -> None:
        why = "" if setup.trust else boxes.refusal()
        if why:
            raise RewardNotLoaded(
                f"{setup.place}: {why} ({boxes.parts()}); use a kernel that has all of it, or set trust = true to run "
                "the answers' code as this user, for example in a container that holds nothing else"
            )
        self.find = Answer(setup.extract or BLOCK, f"{setup.place}.extract").find
        self.tests_key, self.name_key, self.share, self.trust = setup.tests, setup.entry, setup.share, setup.trust
        self.limits = boxes.Limits(wall_s=min(setup.run_s, setup.total_s), cpu_s=setup.cpu_s, memory_mb=setup.run_mb)
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
            result = boxes.run(code, entered, limits, self.trust)
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
        lines, result = boxes.run_tests(code, {**tests, "stop": not self.share}, limits, self.trust)
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
