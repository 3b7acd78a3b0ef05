"""[[reward.part]]: what is refused, with place and remedy, and what a check says of each part."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from busrl.preflight import explain
from busrl.topology import Topology
from busrl.topology.declare import items
from busrl.topology.rewards import REWARD_KINDS, RewardPart

Loaded = Callable[..., Topology]
Refused = Callable[..., list[str]]
TWO = """
[[reward.part]]
kind = "numeric"
name = "right"
[[reward.part]]
kind = "regex"
weight = 0.25
pattern = '^[0-9]'
"""


def part(kind: str, *lines: str) -> str:
    return "\n".join(["", "[[reward.part]]", f'kind = "{kind}"', *lines, ""])


def test_what_a_part_leaves_out_comes_from_the_reward(loaded: Loaded) -> None:
    keys = 'timeout_s = 3.0\nanswer_key = "prompt"\n'
    topology = loaded(f"[reward]\n{keys}{TWO}" + part("judge", 'base_url = "http://h/v1"'))
    assert [part.name for part in topology.reward.part] == ["right", "regex", "judge"]
    assert [part.timeout_s for part in topology.reward.part] == [3.0, 3.0, 60.0]
    assert {part.answer_key for part in topology.reward.part} == {"prompt"}
    assert Topology.from_json(topology.to_json()) == topology


def test_every_key_of_a_part_is_read_by_some_kind() -> None:
    named = {name for kind in REWARD_KINDS.values() for name in kind.keys}
    assert named == set(items(RewardPart)) - {"kind", "name", "weight", "timeout_s"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (part("maths"), r'''t.toml:13: reward.part.0.kind = "maths": expected one of.*did you mean "math"'''),
        (part("regex", "pattern = 'a'", "patern = 'a'"), r"t.toml:15: patern: unknown key in"),
        (part("regex"), r"t.toml:13: reward.part.0.pattern = \"\".*a part of kind regex needs it"),
        (part("regex", "pattern = '('"), r"t.toml:14: reward.part.0.pattern = \"\(\": not a regular expression"),
        (part("numeric", "pattern = 'a'"), r"t.toml:14: .*pattern.*a part of kind numeric does not read it, "),
        (part("python"), r"t.toml:13: reward.part.0.function = \"\".*needs it; for example function"),
        (part("python", 'function = "own.py"'), r"t.toml:14: .*expected a function as package.module:name"),
        (part("numeric") * 2, r"t.toml:1\d: reward.part.1.name = \"numeric\": the part before it \(number 1\)"),
        (part("numeric", 'name = "a b"'), r"t.toml:14: .*a name is 1 to 64 letters"),
        (part("numeric", "weight = 0"), r"t.toml:14: .*every part has weight 0"),
        (part("numeric", "weight = inf"), r"t.toml:14: reward.part.0.weight = inf: expected a number"),
        (part("judge"), r"t.toml:13: reward.part.0.base_url.*for example base_url"),
        (part("judge", 'base_url = "junk"'), r"t.toml:14: .*is not the address of an endpoint; for example http://"),
        (part("judge", 'base_url = "http://h/v1"', 'verdict = "yes"'), r"t.toml:15: .*it has no group"),
        (part("judge", 'base_url = "http://h/v1"', 'template = "{prompt}"'), r"t.toml:15: .*would not see the answer"),
        (part("judge", 'base_url = "http://h/v1"', 'api_key_env = "BUSRL_S_NONE"'), r"t.toml:15: .*\$BUSRL_S_NONE"),
        (part("model", 'path = "gone"'), r"t.toml:14: .*no such folder; give a Hugging Face folder"),
        (part("model", 'path = "model"'), r"t.toml:14: .*its architecture is TestLM, and a reward model is a"),
        ("[reward]\nfunction = 'own.py:f'\n" + TWO, r"t.toml:12: reward.function = .*a reward has a function or parts"),
        ("[reward]\nextract = 'a'\n" + TWO, r"t.toml:12: reward.extract = .*write extract into"),
        ("[reward]\npart = 3\n", r"t.toml:12: reward.part = 3: is an array of tables; write \[\[reward.part\]\]"),
        ("[reward]\noverlong_tokens = 100\n", r"t.toml:12: reward.overlong_tokens = 100.*has at most generation"),
        ('[reward]\ntruncated = "mask"\ntruncated_penalty = 0.5\n', r"t.toml:12: .*a cut answer is worth either"),
    ],
)
def test_a_wrong_part_is_refused_with_its_place_and_a_remedy(refused: Refused, text: str, message: str) -> None:
    (problem,) = refused(text)
    assert re.search(message, problem, re.S), problem


def test_a_part_without_its_package_is_refused(refused: Refused, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "math_verify", None)
    (problem,) = refused(part("math"))
    assert 'kind = "math" needs the package math_verify' in problem and "pip install 'busrl[rewards]'" in problem


def test_a_part_that_compares_needs_the_answer_of_every_line(refused: Refused, here: Path) -> None:
    (here / "train.jsonl").write_text('{"prompt": "a"}\n')
    (problem,) = refused(part("numeric"))
    assert "the key 'answer' is missing" in problem


def test_a_reward_process_may_have_a_device_for_a_reward_model_alone(
    loaded: Loaded, refused: Refused, here: Path
) -> None:
    base = '[model]\npath = "model"\n[data]\ntrain = "train.jsonl"\n[[process]]\nrole = "reward"\ndevice = "cpu"\n'
    assert "runs no model" in refused(TWO, base=base)[0]
    folder = here / "classifier"
    folder.mkdir()
    (folder / "config.json").write_text('{"architectures": ["LlamaForSequenceClassification"]}')
    assert loaded(part("model", 'path = "classifier"'), base=base).device_of("reward/0") == "cpu"


FUNCTIONS = """
import asyncio
def raises(record, completion, token_ids): raise ValueError("no such luck")
async def one(record, completion, token_ids): return float(completion == record["answer"])
def lists(records, completions, token_ids): return [0.5 for _ in completions]
"""


def test_a_function_of_a_part_is_tried_before_the_run(loaded: Loaded, refused: Refused, here: Path) -> None:
    (here / "own.py").write_text(FUNCTIONS)
    broken = TWO + part("python", 'function = "own.py:raises"')
    (problem,) = refused(broken)
    assert re.match(r"t.toml:2\d: reward.part.2.function", problem) and "ValueError: no such luck" in problem
    (problem,) = refused(TWO + part("python", 'function = "own.py:gone"'))
    assert "cannot be used" in problem and "has no 'gone'" in problem


def test_a_check_shows_what_each_part_says_of_two_answers(loaded: Loaded, here: Path) -> None:
    (here / "own.py").write_text(FUNCTIONS)
    both = part("python", 'name = "one"', 'function = "own.py:one"')
    both += part("python", 'name = "lists"', "batch = true", 'function = "own.py:lists"')
    page = explain.report(loaded(TWO + both)).splitlines()
    assert "reward: 1 x right (numeric) + 0.25 x regex (regex) + 1 x one (python) + 1 x lists (python)" in page
    for line in (
        "  reward part right of an empty answer: 0", '  reward part right of the right answer "0": 1',
        '  reward part regex of the right answer "0": 1', '  reward part one of the right answer "0": 1',
        "  reward part lists of an empty answer: 0.5",
    ):
        assert line in page, page


def test_code_is_tried_before_the_run_and_check_names_boxes(
    loaded: Loaded, refused: Refused, here: Path
) -> None:
    (told,) = refused(part("code", "trust = true"))
    assert "fails for an empty answer to the first prompt: KeyError: 'tests'" in told
    (here / "train.jsonl").write_text(json.dumps({"prompt": "a", "tests": "assert f() == 1"}) + "\n")
    (told,) = refused(part("code", "trust = true", "total_s = 50"))
    assert re.search(r"reward.part.0.timeout_s = .*may take total_s = 50.*at least 70", told), told
    told = explain.report(loaded(part("code", "trust = true")))
    assert re.search(r"^boxes for code: user namespace: .*Landlock: ", told, re.M)
    assert re.search(r"reward part code of .*: 0$", told, re.M), told


def test_check_names_an_absent_judge_and_an_expression_that_hangs(loaded: Loaded, here: Path) -> None:
    pytest.importorskip("aiohttp")
    (here / "train.jsonl").write_text(json.dumps({"prompt": "a", "answer": "a" * 60 + "!"}) + "\n")
    judge = part("judge", 'base_url = "http://127.0.0.1:9/v1"', "retries = 0")
    hostile = part("regex", "timeout_s = 1.0", r"pattern = '^(a+)+$'")
    page = explain.report(loaded(judge + hostile))
    assert "reward part judge of an empty answer: JudgeFailed: http://127.0.0.1:9/v1/chat/completions" in page
    assert "no result after 1 s (its timeout_s)" in page
