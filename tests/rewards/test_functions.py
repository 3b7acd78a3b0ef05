"""Reward functions: exact match, loading by name, and what counts as a result."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from busrl.errors import RewardNotLoaded, cause
from busrl.rewards.base import ExactMatch, MalformedReward, Setup, settle
from busrl.system import imports


@pytest.mark.parametrize(
    ("extract", "completion", "answer", "reward"),
    [
        ("", " 1 2 3\n", "1 2 3", 1.0),
        ("", "1 2 4", "1 2 3", 0.0),
        ("Answer:", "think. Answer: 7 no. Answer: 8 ", " 8", 1.0),
        ("Answer:", "8", "8", 0.0),
        (r"\|*", "|||123", "123", 1.0),
        (r"\|*", "123", "123", 1.0),
        (r"=([0-9 ]*)<end>", "..=1<end>=2 3<end>", "2 3", 1.0),
        (r"####\s*(\S+)?", "####", "", 1.0),
    ],
)
def test_exact_match_compares_the_text_that_extract_finds(
    extract: str, completion: str, answer: str, reward: float
) -> None:
    judge = ExactMatch(Setup("exact_match", extract=extract, answer_key="a"))
    assert judge({"a": answer}, completion, []) == reward


def test_a_bad_expression_is_refused_before_any_sample() -> None:
    with pytest.raises(RewardNotLoaded, match=r"reward.extract = '\(': not a regular expression"):
        ExactMatch(Setup("exact_match", extract="("))


def load(target: str, base_dir: str | Path) -> Callable[..., Any]:
    return imports.load("reward.function", target, RewardNotLoaded, base_dir)


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_a_function_is_found_in_a_file_and_a_module_beside_it(tmp_path: Path) -> None:
    write(tmp_path / "busrl_s_pkg/__init__.py", "")
    write(tmp_path / "busrl_s_pkg/judge.py", "class A:\n    @staticmethod\n    def f(r, c, t): return len(c)\n")
    write(tmp_path / "judge.py", "from busrl_s_pkg.judge import A\ndef f(r, c, t): return A.f(r, c, t) + 1\n")
    assert load("judge.py:f", tmp_path)({}, "abc", []) == 4
    assert load("busrl_s_pkg.judge:A.f", tmp_path)({}, "abc", []) == 3


def test_functions_of_a_file_share_state_and_files_of_one_name_not(tmp_path: Path) -> None:
    module = "seen = []\ndef add(r, c, t): seen.append(c)\ndef count(r, c, t): return len(seen)\n"
    for place in ("one", "two"):
        write(tmp_path / place / "own.py", module)
    load("own.py:add", tmp_path / "one")({}, "abc", [])
    assert load("own.py:count", tmp_path / "one")({}, "", []) == 1
    assert load("own.py:count", tmp_path / "two")({}, "", []) == 0


def test_cycles_are_not_collected_while_libraries_are_imported_but_afterwards() -> None:
    with imports.uncollected():
        with imports.uncollected():
            assert not gc.isenabled()
        assert not gc.isenabled()
    assert gc.isenabled()
    with pytest.raises(ImportError), imports.uncollected():
        raise ImportError
    assert gc.isenabled()


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ("judge.py", ["must be package.module:function or file.py:function"]),
        ("gone.py:f", ["there is no file", "gone.py"]),
        ("judge.py:g", ["has no 'g'", "it has f"]),
        ("judge.py:x", ["x is a int, not a function"]),
        ("broken.py:f", ["importing it raised ZeroDivisionError", "broken.py:2"]),
        ("leaves.py:f", ["importing it raised SystemExit"]),
        ("busrl_s_no_such:f", ["importing it raised ModuleNotFoundError"]),
    ],
)
def test_a_function_that_can_not_be_had_says_why(tmp_path: Path, target: str, words: list[str]) -> None:
    write(tmp_path / "judge.py", "x = 1\ndef f(r, c, t): return 0\n")
    write(tmp_path / "broken.py", "def f(r, c, t): return 0\n1 / 0\n")
    write(tmp_path / "leaves.py", "import sys\nsys.exit(3)\n")
    with pytest.raises(RewardNotLoaded) as caught:
        load(target, tmp_path)
    assert f"reward.function = {target!r}" in str(caught.value)
    assert all(word in str(caught.value) for word in words)


def test_a_map_is_summed() -> None:
    assert settle({"right": 1, "short": np.float32(0.5)}) == (1.5, {"right": 1.0, "short": 0.5})
    assert settle(True) == (1.0, {})


@pytest.mark.parametrize("bad", [None, "1", math.nan, math.inf, [], {}, {"a": "x"}, {"a": math.nan}, 1j, 10**400])
def test_everything_but_finite_numbers_is_malformed(bad: Any) -> None:
    with pytest.raises(MalformedReward):
        settle(bad)


def _raised(score: Callable[[], object]) -> BaseException:
    try:
        score()
    except BaseException as problem:
        return problem
    raise AssertionError("it was to raise")


def test_a_cause_goes_from_what_was_raised_to_the_users_line(tmp_path: Path) -> None:
    write(tmp_path / "own.py", "import json\ndef f(r, c, t):\n    return json.loads(c) + r['answer']\n")
    judge = load("own.py:f", tmp_path)
    causes = [cause(_raised(lambda text=text: judge({}, text, []))) for text in ("1", "{")]
    assert causes[0] == f"KeyError: 'answer' ({tmp_path}/own.py:3, in f)"
    assert causes[1].startswith("JSONDecodeError: Expecting") and causes[1].endswith(f"({tmp_path}/own.py:3, in f)")
    assert cause(RewardNotLoaded("what to do\nabout it")) == "what to do about it"
    assert cause(SystemExit()) == "SystemExit"


@pytest.mark.parametrize(
    ("answer", "right", "wrong"),
    [
        (72, ["72", " 72 "], ["72.0", "7", "seventy-two"]),
        (0.5, ["0.5"], [".5", "0.50"]),
        (3.0, ["3.0", "3"], ["3.00"]),
        (True, ["true"], ["True", "1"]),
        ("72", ["72"], ["72.0"]),
    ],
)
def test_an_answer_that_is_no_text_counts_as_json_writes_it(answer: object, right: list[str], wrong: list[str]) -> None:
    judge = ExactMatch(Setup("exact_match"))
    assert [judge({"answer": answer}, text, []) for text in right] == [1.0] * len(right)
    assert [judge({"answer": answer}, text, []) for text in wrong] == [0.0] * len(wrong)
