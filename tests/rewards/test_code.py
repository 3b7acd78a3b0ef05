"""A part of kind code: right answers pass, and no trick of an answer makes tests pass that it does not solve."""

import asyncio
import json
import time

import pytest

from busrl.errors import RewardNotLoaded
from busrl.rewards.base import Item, Setup
from busrl.rewards.box import boxes
from busrl.rewards.box.calls import pack, unpack
from busrl.rewards.box.programs import Code, UnfitTests, read_tests
from busrl.rewards.pool import RewardPool
from busrl.topology.rewards import Reward, RewardPart

needs_box = pytest.mark.skipif(bool(boxes.refusal()), reason="this machine makes no box")
ASSERTS = ["assert f(2) == 4", "assert f([1]) == [1, 1]", "assert f('ab') == 'abab'"]
RIGHT = "def f(x): return x * 2"


def worth(code, tests, **more):
    """What an answer with this program is worth."""
    settings = {"run_s": 60.0, "total_s": 120.0, "at_once": 1, "trust": True, **more}
    part = Code(Setup("code", place="reward.part 'code'", **settings))
    part.trust = more.get("trust", False)  # one refusal per module is enough
    return part.judge({"tests": tests, "entry_point": "f"}, f"So:\n```python\n{code}\n```\nDone.")


@needs_box
@pytest.mark.parametrize(
    ("code", "tests"),
    [
        (RIGHT, ASSERTS),
        (RIGHT, "\n".join(ASSERTS)),
        (RIGHT, "def check(candidate):\n    assert candidate(2) == 4\n"),
        (RIGHT, "def test_it():\n    for n in range(9): assert f(n) == n + n\n"),
        (RIGHT, {"setup": "import math", "asserts": ["assert math.isclose(f(1.1), 2.2)"]}),
        (RIGHT, {"fn_name": "f", "inputs": [[1], [(1, 2)]], "outputs": [2, [[1, 2, 1, 2]]]}),
        (RIGHT, json.dumps({"fn_name": "f", "inputs": ["1", '"a"'], "outputs": ["2", '"aa"']})),
        ("class Solution:\n  def f(self, x): return x, x", {"fn_name": "f", "inputs": [[1]], "outputs": [[1, 1]]}),
        ("print(int(input()) * 2)", {"inputs": ["1\n", ["2"]], "outputs": ["2", "4\n"]}),
        ("def f(x): x.sort()", "a = [2, 1]\nf(a)\nassert a == [1, 2]"),
        ("def f(g): return g(2) + 1", "assert f(lambda x: x * 10) == 21"),
        ("def f(n): yield from range(n)", "assert list(f(3)) == [0, 1, 2] and next(f(1)) == 0"),
        ("def f(x): return 1 // x", "try:\n    f(0)\n    assert False\nexcept ZeroDivisionError:\n    assert True"),
        ("class P:\n  def __init__(self, x): self.x = x\n  def up(self): self.x += 1",
         "p = P(1)\np.up()\np.up()\nassert p.x == 3 and p is not P(3)"),
        ("from collections import Counter\ndef f(x): return Counter(x), {1: (2, {3})}, b'4', 5j, 1 << 70",
         "assert f('aab') == ({'a': 2, 'b': 1}, {1: (2, {3})}, b'4', 5j, 1 << 70)"),
    ],
)  # fmt: skip
def test_a_right_answer_passes_tests_of_every_form(code, tests):
    assert worth(code, tests) == 1.0


@needs_box
def test_all_or_nothing_and_the_share():
    wrong = "def f(x): return x * 2 if x != [1] else 0"
    assert worth(wrong, ASSERTS) == 0.0
    assert worth(wrong, ASSERTS, share=True) == pytest.approx(2 / 3)
    pairs = {"inputs": ["1", "2", "3", "4"], "outputs": ["1", "2", "3", "0"]}
    assert worth("print(input())", pairs, share=True) == 0.75 and worth("print(input())", pairs) == 0.0
    assert worth("def f(:", ASSERTS, share=True) == 0.0


# What an answer may try that cannot solve the tests. `LINK` finds the socket to the tests and writes a frame to it.
LINK = """
import json, os, struct
def say(*frames):
    for fd in range(3, 64):
        try:
            for one in frames:
                data = json.dumps(one).encode()
                os.write(fd, struct.pack('<I', len(data)) + data)
        except OSError: pass
"""
TRICKS = {
    "prints the verdict": "import sys\nfor out in (sys.stdout, sys.stderr, sys.__stdout__):\n"
    "  for n in range(9): print('{\"passed\": true, \"why\": \"\"}', file=out, flush=True)",
    "prints the verdict when called": "def f(x): print('{\"passed\": true}', flush=True)",
    "ends its process": "import os\nos._exit(0)",
    "ends its process when called": "import os\ndef f(x): os._exit(0)",
    "raises SystemExit": "import sys\ndef f(x): sys.exit(0)",
    "ends every process that it sees": "import os\ndef f(x):\n  os.kill(-1, 9)",
    "patches builtins": "import builtins\nclass E(Exception): pass\nbuiltins.AssertionError = E\n"
    "builtins.isinstance = lambda *a: True\nbuiltins.all = lambda *a: True\nbuiltins.len = lambda x: 1\n"
    "def f(x): return True",
    "patches the server": "import __main__, sys\nfor m in list(sys.modules.values()):\n"
    "  if hasattr(m, 'pack'): m.pack = lambda value, other: True\ndef f(x): return True",
    "traces": "import sys, threading\nseen = []\ndef t(frame, event, arg):\n  seen.append(frame)\n  return t\n"
    "sys.settrace(t)\nsys.setprofile(t)\nthreading.settrace(t)\ndef f(x): return seen[-1].f_locals.get('wanted')",
    "reads frames": "import sys\ndef f(x):\n  frame = sys._getframe()\n  while frame:\n    for held in "
    "(*frame.f_locals.values(), *frame.f_globals.values()):\n      if 'assert' in str(held): return 4\n"
    "    frame = frame.f_back",
    "looks for the tests in memory": "import gc\ndef f(x):\n  for one in gc.get_objects():\n"
    "    if isinstance(one, dict) and 'wanted' in one: return one['wanted']",
    "reads files": "import glob\ndef f(x):\n  for name in glob.glob('/tmp/**', recursive=True):\n"
    "    if 'tests' in name: return 4",
    "closes descriptors": "import os\nos.closerange(0, 64)\ndef f(x): return x",
    "closes descriptors when called": "import os\ndef f(x): os.closerange(0, 64)",
    "leaves by atexit": "import atexit, os\n"
    "atexit.register(lambda: os.write(1, b'{\"passed\": true}\\n'))\ndef f(x): exit()",
    "overrides ==": "class A:\n  def __eq__(self, o): return True\n"
    "  __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __eq__\n"
    "  def __bool__(self): return True\n  def __len__(self): return 1\n  def __hash__(self): return 1\n"
    "  def __contains__(self, o): return True\ndef f(x): return A()",
    "overrides == of an int": "class A(int):\n  def __eq__(self, o): return True\n  __hash__ = int.__hash__\n"
    "def f(x): return A(7)",
    "overrides == of a list": "class A(list):\n  def __eq__(self, o): return True\ndef f(x): return A([7])",
    "overrides == of a str": "class A(str):\n  def __eq__(self, o): return True\n  def __str__(self): return self\n"
    "def f(x): return A('7')",
    "says frames before it is asked": LINK + "say({'value': True}, {'passed': True}, {'tests': 0})\ndef f(x): return x",
    "says a frame of nonsense": LINK + "def f(x): say([1], 7, {'value': {'object': -1}}, {'value': {'q': 1}})",
    "says a huge frame": LINK + "def f(x): os.write(3, struct.pack('<I', 1 << 31) + b'x')",
    "says a deep frame": LINK + "def f(x):\n  d = b'[' * 900000\n  os.write(3, struct.pack('<I', len(d)) + d)",
    "calls a function of the tests that there is not": LINK + "def f(x): say({'callback': 0, 'args': []})",
    "redefines a module of the tests": "class math:\n  isclose = lambda *a, **k: True\ndef f(x): return x",
    "redefines a function of Python": "abs = round = sorted = all = len = lambda *a, **k: True\ndef f(x): return True",
    "imports the tests": "try:\n  import tests\nexcept Exception: pass\ndef f(x): return open('tests.json').read()",
    "raises an AssertionError": "def f(x): raise AssertionError",
    "raises what looks like the end": "def f(x): raise StopIteration",
    "never returns": "def f(x):\n  while True: pass",
    "asks for input": "def f(x): return input()",
    "recurses": "def f(x): return f(x)",
    "returns a list in itself": "def f(x):\n  a = []\n  a.append(a)\n  return a",
    "takes all memory": "def f(x): return 'x' * (1 << 40)",
    "leaves a thread": "import threading, time\n"
    "threading.Thread(target=lambda: time.sleep(1000)).start()\ndef f(x): return 1",
}
HARD = [
    "import math as m2", "assert f(2) == 4", "assert math.isclose(f(2), 4)", "assert abs(f(2) - 4) < 1e-9",
    "assert sorted(f([2])) == [2, 2]", "assert f('a') in ('aa', 'b')", "assert not f(2) != 4",
    "assert len(f('ab')) == 4",
]  # fmt: skip


@needs_box
@pytest.mark.parametrize("trick", TRICKS)
def test_no_trick_passes_a_test(trick):
    run_s = 2.0 if trick in ("never returns", "patches builtins") else 60.0
    assert worth(TRICKS[trick], HARD, run_s=run_s, share=True) == 0.0


@needs_box
@pytest.mark.parametrize("trick", ["prints the verdict", "ends its process", "leaves by atexit", "patches builtins"])
def test_no_trick_gives_the_output_of_a_program(trick):
    assert worth(TRICKS[trick], {"inputs": ["1", ""], "outputs": ["2", "3"]}, share=True) == 0.0


@needs_box
def test_a_test_that_catches_exceptions_does_not_pass_a_missing_answer():
    tests = "try:\n    f(0)\nexcept Exception:\n    pass\nassert True"
    assert worth("import os\ndef f(x): os._exit(0)", tests) == 0.0
    assert worth("import os\ndef f(x): os.closerange(0, 64)", tests) == 0.0


@needs_box
def test_a_returned_value_does_not_change_what_the_tests_gave():
    cases = "cases = [(1, 2), (2, 4)]\nf(cases)\nfor one, two in cases:\n    assert f(one) == two"
    assert worth("def f(x):\n  if isinstance(x, list): x.clear()\n  return 0", cases) == 0.0


@needs_box
def test_limits_that_the_answer_hits_are_failed_tests():
    asleep = "import time\nif input() == '2': time.sleep(1000)\nprint(1)"
    pairs = {"inputs": ["1", "2", "1"], "outputs": ["1", "1", "1"]}
    begun = time.monotonic()
    assert worth(asleep, pairs, run_s=3.0, total_s=3.0, share=True) == pytest.approx(1 / 3)
    assert time.monotonic() - begun < 60.0
    assert worth("import time\nprint(1, flush=True)\ntime.sleep(1000)", pairs, run_s=1.0) == 0.0
    assert worth("x = 'x' * (1 << 30)\nprint(1)", pairs) == 0.0
    assert worth("print(1)\nraise SystemExit(1)", pairs) == 0.0


@needs_box
@pytest.mark.parametrize(
    "tests",
    [
        "import numpy\nassert f(1) == 2", "assert f(", "f(1)", "class T: pass\nassert f(T()) == 1", "", "{not json",
        {"inputs": ["1"], "outputs": []}, {"inputs": [], "outputs": []}, 7,
    ],
)  # fmt: skip
def test_tests_that_cannot_be_run_are_no_zero(tests):
    with pytest.raises(UnfitTests):
        worth(RIGHT, tests)


def test_the_last_block_is_the_answer_and_none_is_worth_nothing():
    part = Code(Setup("code", place="p", trust=True, run_s=60.0, total_s=60.0))
    judge = lambda text: part.judge({"tests": ASSERTS}, text)  # noqa: E731
    assert judge(f"```python\nx\n```\nno:\n```py\n{RIGHT}\n```") == 1.0
    assert judge(RIGHT) == 0.0 == judge(f"```python\n{RIGHT}") == judge("")
    part = Code(Setup("code", place="p", trust=True, run_s=60.0, total_s=60.0, extract=r"(?s)\A(.*)"))
    assert judge(RIGHT) == 1.0


def test_a_machine_without_boxes_is_refused_unless_it_is_trusted(monkeypatch):
    monkeypatch.setattr(boxes, "refusal", lambda: "this machine makes no box for code: landlock: version 4")
    with pytest.raises(RewardNotLoaded, match=r"landlock: version 4 .*PID namespace: .*set trust = true"):
        Code(Setup("code", place="reward.part 'code'"))
    part = Code(Setup("code", place="p", trust=True, run_s=60.0, total_s=60.0))
    assert part.judge({"tests": {"inputs": ["3"], "outputs": ["3"]}}, "```\nprint(input())\n```") == 1.0


def test_a_box_that_is_not_made_raises(monkeypatch, tmp_path):
    broken = tmp_path / "launcher.py"
    broken.write_text("raise SystemExit('no')")
    monkeypatch.setattr(boxes, "LAUNCHER", broken)
    for tests in (ASSERTS, {"inputs": ["1"], "outputs": ["1"]}):
        with pytest.raises(boxes.BoxRefused, match=r"without a word|no word"):
            worth(RIGHT, tests)


@needs_box
def test_a_weighted_part_loses_a_broken_lines_sample_alone():
    parts = (
        RewardPart("code", "code", 2.0, 180.0, run_s=60.0, total_s=120.0, share=True),
        RewardPart("regex", "style", 0.5, 10.0, pattern="^So"),
    )
    right, half = ("So:\n```python\n" + text + "\n```" for text in (RIGHT, "def f(x): return 4"))
    lines = [json.dumps({"tests": tests}).encode() for tests in (ASSERTS[:2], ASSERTS[:2], "assert f(")]
    with RewardPool(Reward(part=parts), base_dir=".") as pool:
        pool.submit([Item(n, line, text, []) for n, (line, text) in enumerate(zip(lines, (right, half, right)))])
        outcomes = {}
        while len(outcomes) < 3:
            outcomes |= {outcome.key: outcome for outcome in pool.poll(60.0)}
    assert [outcomes[n].value for n in (0, 1)] == [2.5, 1.5] and outcomes[1].parts == {"code": 0.5, "style": 1.0}
    assert outcomes[2].error == "raised"
    assert "part code: UnfitTests: tests of the record cannot be run" in outcomes[2].text


@needs_box
def test_a_coroutine_runs_code_in_boxes_side_by_side():
    async def both():
        return await asyncio.gather(*(boxes.run_async(f"print({n})", "", boxes.Limits(wall_s=60.0)) for n in range(3)))

    assert [result.stdout for result in asyncio.run(both())] == ["0\n", "1\n", "2\n"]


@pytest.mark.parametrize(
    "value",
    [None, True, -1, 1 << 80, 0.1, float("inf"), "\ud800", [1, (2, {3}, frozenset({4}))], {(1,): {}}, b"\0",
     bytearray(b"a"), 2j, range(3)],
)  # fmt: skip
def test_plain_values_come_back_as_they_were(value):
    again = unpack(json.loads(json.dumps(pack(value, None))), None)
    assert again == value and type(again) is type(value)


def test_inputs_may_be_lines_or_texts_of_json():
    text = json.dumps({"fn_name": "f", "inputs": ['[1]\n"a"'], "outputs": ["null"]})
    assert read_tests({"t": text}, "t", "e") == {"name": "f", "inputs": [[[1], "a"]], "outputs": [None]}
    lines = {"t": {"inputs": [["1", "2"]], "outputs": [3]}}
    assert read_tests(lines, "t", "e") == {"inputs": ["1\n2"], "outputs": ["3"]}
