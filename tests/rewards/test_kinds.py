"""Kinds of rewards without code of a user, each on its own."""

from __future__ import annotations

import itertools
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from busrl.errors import RewardNotLoaded
from busrl.rewards.base import RewardFunction
from busrl.rewards.child import build
from busrl.rewards.kinds import as_math, last_number
from busrl.rewards.pool import setups
from busrl.system.imports import of_busrl
from busrl.topology.rewards import REWARD_KINDS, Reward, RewardPart


def function_of(kind: str, **keys: Any) -> RewardFunction:
    """What the child of a part named p calls."""
    part = RewardPart(kind, "p", **{"timeout_s": 10.0, **keys})
    ((setup, _, _),) = setups(Reward(part=(part,)), ".", "prompt", "cpu")
    return build(setup)


def judged(kind: str, completion: str, record: dict[str, Any], **keys: Any) -> Any:
    return function_of(kind, **keys)(record, completion, [])


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("It is 42.", 42.0), ("1,234,567 in all", 1234567.0), ("1,23", 23.0), ("from 3 to -4.5", -4.5), ("5-3", 3.0),
        ("x = \u22127", -7.0), (".5", 0.5), ("2e3", 2000.0), ("#### 72", 72.0), ("nothing", None), ("", None),
        ("(3)-1", 1.0), ("7%", 7.0), ("$18", 18.0),
    ],
)
def test_the_last_number_of_a_text_is_found(text: str, number: float | None) -> None:
    assert last_number(text) == number


@given(st.floats(allow_nan=False, allow_infinity=False), st.text(alphabet="abc =:\n", max_size=20))
def test_a_number_is_read_as_it_was_written(number: float, words: str) -> None:
    assert last_number(f"1 {words} {number!r}") == number


@pytest.mark.parametrize(
    ("completion", "answer", "value"),
    [
        ("so it is 42", 42, 1.0), ("42.0000001", 42, 1.0), ("42.1", 42, 0.0), ("none", 42, 0.0),
        ("72", "work\n#### 72", 1.0), ("1e999", 42, 0.0), ("9" * 5000, 1, 0.0),
    ],
)
def test_numeric_compares_last_numbers_within_the_tolerance(completion: str, answer: object, value: float) -> None:
    assert judged("numeric", completion, {"a": answer}, answer_key="a", tolerance=1e-6) == value


def test_numeric_takes_what_extract_finds() -> None:
    settings = {"answer_key": "a", "extract": r"Answer:\s*(.*)"}
    assert judged("numeric", "Answer: 3\n7", {"a": 3}, **settings) == 1.0
    assert judged("numeric", "3", {"a": 3}, **settings) == 0.0


def test_a_record_without_a_number_is_an_error_and_no_zero() -> None:
    with pytest.raises(ValueError, match="holds no number"):
        judged("numeric", "3", {"answer": "three"})


def test_regex_is_one_where_the_pattern_is_found() -> None:
    pattern = r"(?s)^<think>.*</think>"
    assert judged("regex", "<think>a\nb</think> 3", {}, pattern=pattern) == 1.0
    assert judged("regex", "3", {}, pattern=pattern) == 0.0
    with pytest.raises(RewardNotLoaded, match=r"reward.part 'p'.pattern = '\(': not a regular expression"):
        judged("regex", "", {}, pattern="(")


def test_a_plain_reference_is_put_between_dollars_and_one_in_latex_stays() -> None:
    assert as_math("(1,2)") == "$(1,2)$"
    for text in ("$3$", r"\boxed{3}", r"\(3\)", r"\[3\]"):
        assert as_math(text) == text


@pytest.mark.parametrize(
    ("completion", "answer", "value"),
    [
        (r"so \boxed{\frac{1}{2}}", "0.5", 1.0), ("the answer is 3/4", r"\frac{3}{4}", 1.0),
        (r"\boxed{(1,2)}", "(1,2)", 1.0), (r"\boxed{(2,1)}", "(1,2)", 0.0), (r"$x^2+2x+1$", "(x+1)^2", 1.0),
        ("7", 7, 1.0), ("7", 7.0, 1.0), ("8", 7, 0.0), ("no idea", "7", 0.0), ("", "7", 0.0),
    ],
)
def test_math_finds_equal_what_is_equal(completion: str, answer: object, value: float) -> None:
    pytest.importorskip("math_verify")
    assert judged("math", completion, {"answer": answer}) == value


def before_each_parse(monkeypatch: pytest.MonkeyPatch, first: Callable[[], object]) -> None:
    parser = pytest.importorskip("math_verify.parser")
    extract = parser.extract_target_from_pred
    monkeypatch.setattr(parser, "extract_target_from_pred", lambda *args, **more: (first(), extract(*args, **more))[1])


def test_mathematics_that_waits_for_a_core_is_judged_as_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    before_each_parse(monkeypatch, lambda: time.sleep(1.1))  # as long as a busy machine lets it wait
    assert judged("math", "$7$", {"answer": "7"}, timeout_s=4.0) == 1.0


def test_mathematics_that_would_never_end_is_unequal(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("math_verify")
    judge = function_of("math", timeout_s=1.0)
    assert judge({"answer": "7"}, "$7$", []) == 1.0  # which reads the reference
    before_each_parse(monkeypatch, lambda: all(True for _ in itertools.count()))
    assert judge({"answer": "7"}, "$7$", []) == 0.0
    assert signal.getsignal(signal.SIGPROF) == signal.SIG_DFL


def test_math_says_so_where_the_reference_cannot_be_read() -> None:
    pytest.importorskip("math_verify")
    with pytest.raises(ValueError, match="cannot be read as mathematics"):
        judged("math", "7", {"answer": ""})


def test_gym_gives_what_the_task_s_own_score_gives() -> None:
    gym = pytest.importorskip("reasoning_gym")
    part = function_of("gym", answer_key="answer")
    for task in ("spell_backward", "countdown", "chain_sum"):
        for entry in gym.create_dataset(task, size=3, seed=1):
            record = {"prompt": entry["question"], **entry}
            right = str(entry["answer"])
            wanted = gym.get_score_answer_fn(task)
            for text, answer in ((right, right), (f"well <answer>{right}</answer>", right), ("no", "no"), ("", "")):
                assert part(record, text, []) == wanted(answer, entry), (task, text)
    assert part(record, f"<answer>{right}</answer>", []) == 1.0
    with pytest.raises(ValueError, match=r"metadata\.source_dataset"):
        part({"answer": "1"}, "1", [])


@pytest.mark.parametrize(
    ("kind", "extract", "completion", "answer"),
    [
        ("numeric", "", "It is 1,000.", "1000"), ("numeric", "", "so 1000.0", "1000"), ("numeric", "", "none", None),
        ("numeric", "#### (.*)", "3 #### 4.50 kg", "4.5"), ("numeric", "#### (.*)", "3", None),
        ("gym", "", "I say <answer> 4 </answer>", "4"), ("gym", "", " four ", "four"), ("gym", "=(.*)", "four", None),
        ("exact_match", "", " four ", "four"), ("math", "=(.*)", "x = 2", "2"),
    ],
)
def test_equal_answers_are_one_vote_by_the_kind_of_the_reward(
    kind: str, extract: str, completion: str, answer: str | None
) -> None:
    assert of_busrl(REWARD_KINDS[kind].finder)(extract)(completion) == answer


def test_votes_are_of_the_part_that_finds_an_answer() -> None:
    function, plain = RewardPart("python", function="a.py:b"), RewardPart("math")
    finders = {name: kind.finder for name, kind in REWARD_KINDS.items()}
    assert Reward().finder == (finders["exact_match"], "") and Reward(kind="python").finder is None
    assert Reward(part=(function, plain)).finder is None
    assert Reward(part=(function, plain, RewardPart("numeric"))).finder == (finders["numeric"], "")
    assert Reward(part=(RewardPart("math", extract="=(.*)"),)).finder == (finders["math"], "=(.*)")
