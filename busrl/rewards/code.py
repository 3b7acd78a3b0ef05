"""A part of kind `code`: the answer's program is run in boxes against the tests of its line.

Called on the event loop of a child (`busrl.rewards.child`); each answer has a thread. Talks to `busrl.rewards.box`.
Knows nothing of other parts, groups or of how often a sample is drawn again.

- The verdict is made where the answer's code cannot write: printed output is compared in this process, and asserts run
  in a box of their own that gets plain values from the answer's.
- A limit that the answer's code hits is a test that failed. A box that could not be made, or tests that cannot be run,
  are no 0: the call raises.
"""

from __future__ import annotations

import asyncio
import json
import os
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec

from busrl.errors import RewardNotLoaded
from busrl.rewards import box
from busrl.rewards.base import Answer, Setup

BLOCK = r"(?s)```(?:python|py)?[ \t]*\r?\n(.*?)```"
VERDICT_BYTES = 1 << 20
Tests = dict[str, Any]


class UnfitTests(ValueError):
    """The tests of a line cannot be run, whatever the answer."""


class Code:
    """`at_once` answers are judged at the same time."""

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
        """1 where all tests passed, else 0; or the share that did."""
        tests, code = read_tests(record, self.tests_key, self.name_key), self.find(completion)
        if not code:
            return 0.0
        passed, count = self.printed(code, tests) if not tests.get("name") else self.called(code, tests)
        return passed / count if self.share else float(passed == count)

    def printed(self, code: str, tests: Tests) -> tuple[int, int]:
        """How many inputs gave their output, word by word. Each has a box; those that no time is left for failed."""
        passed, left_s = 0, self.total_s
        for given, wanted in zip(tests["inputs"], tests["outputs"]):
            if left_s <= 0:
                break
            limits = msgspec.structs.replace(self.limits, wall_s=min(self.limits.wall_s, left_s))
            limits = msgspec.structs.replace(limits, output_bytes=len(wanted.encode()) + (64 << 10))
            result = box.run(code, given, limits, self.trust)
            left_s -= result.seconds
            if result.code == 0 and not result.cut and result.stdout.split() == wanted.split():
                passed += 1
            elif not self.share:
                break
        return passed, len(tests["inputs"])

    def called(self, code: str, tests: Tests) -> tuple[int, int]:
        """How many tests passed that call functions of the answer; what was not said to have passed failed."""
        limits = msgspec.structs.replace(self.limits, output_bytes=VERDICT_BYTES)
        said, result = box.run_tests(code, {**tests, "stop": not self.share}, limits, self.trust)
        for line in said:
            if "unfit" in line:
                raise UnfitTests(f"{self.tests_key} of the record cannot be run: {line['unfit']}")
        if not said and result.code is not None:
            raise UnfitTests(f"the program of the tests ended with {result.code}: {result.stderr[-500:]}")
        count = said[0]["tests"] if said else 1
        if not count:
            raise UnfitTests(f"{self.tests_key} of the record has no assert and no function check or test...")
        return sum(line.get("passed") is True for line in said[1:]), count


def read_tests(record: dict[str, Any], key: str, name_key: str) -> Tests:
    """The tests of a line in one form: `inputs` and `outputs`, with `name` those of a function; or `source` and `name`.

    They stand as a list of asserts, as Python source, or as {"inputs": [...], "outputs": [...]} with an optional
    "fn_name" (APPS, TACO), in JSON or as a text of JSON. Inputs of a function are lists of arguments, or texts with an
    argument of JSON in each line. A list of asserts may have its imports beside it: {"setup": "...", "asserts": [...]}.
    """
    held, name = record[key], str(record.get(name_key) or "candidate")
    if isinstance(held, str) and held.lstrip()[:1] == "{":
        try:
            held = json.loads(held)
        except ValueError:
            raise UnfitTests(f"{key} = {held[:80]!r} of the record is neither Python nor JSON") from None
    if isinstance(held, dict) and "asserts" in held:
        held = [str(held.get("setup", "")), *held["asserts"]]
    if isinstance(held, list):
        held = "\n".join(map(str, held))
    if isinstance(held, str):
        return {"source": held, "name": name}
    if not isinstance(held, dict) or not held.get("inputs") or len(held["inputs"]) != len(held.get("outputs", ())):
        raise UnfitTests(f"{key} of the record holds neither asserts nor as many inputs as outputs")
    if named := str(held.get("fn_name") or ""):
        inputs, outputs = held["inputs"], held["outputs"]
        if all(isinstance(one, str) for one in inputs):
            inputs = [[json.loads(line) for line in one.splitlines()] for one in inputs]
            outputs = [json.loads(one) for one in outputs]
        inputs = [one if isinstance(one, list) else [one] for one in inputs]
        return {"name": named, "inputs": inputs, "outputs": outputs}
    return {side: [text(one) for one in held[side]] for side in ("inputs", "outputs")}


def text(one: Any) -> str:
    """Standard input or output: a text, or its lines."""
    return "\n".join(map(str, one)) if isinstance(one, list) else str(one)
