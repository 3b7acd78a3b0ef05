"""The time in which a call imports modules is none of the call's: it may take as long as the start of its process."""

from __future__ import annotations

import importlib
import select
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from busrl.rewards.base import Item, Outcome, Setup
from busrl.rewards.pool import JudgeProcess, RewardPool
from busrl.system import imports
from busrl.topology.rewards import PYTHON, REWARD_KINDS, Reward

# A module that is imported until the test lets it go; `finds` imports it as transformers does its own, by a call.
SLOW = """import pathlib, time
while not pathlib.Path(__file__).with_name("go").exists():
    time.sleep(0.01)
WORTH = 0.5
"""
JUDGE = """def judge(record, completion, token_ids):
    if completion == "finds":
        import importlib
        return importlib.import_module("slow_module").WORTH
    from slow_module import WORTH
    return WORTH


def batch(records, completions, token_ids):
    return [judge(None, text, None) for text in completions]


async def waits(record, completion, token_ids):
    return judge(record, completion, token_ids)
"""
LANE_S, READY_S = 5.0, 120.0


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "slow_module.py").write_text(SLOW)
    (tmp_path / "judge.py").write_text(JUDGE)
    return tmp_path


class Lane:
    """A child whose clock is the test's own."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        self.poller, self.now = select.epoll(), 0.0
        setup = Setup(PYTHON, base_dir=str(folder), timeout_s=LANE_S, maker=REWARD_KINDS[PYTHON].maker, **settings)
        self.process = JudgeProcess(setup, self.poller, READY_S, self.now)
        self.until(lambda: self.process.serving)

    def until(self, reached: Callable[[], bool]) -> list[Outcome]:
        """What comes until something is so; the clock stands still."""
        outcomes = self.process.collect(self.now, 0.0)
        while not reached() and not outcomes:
            assert self.poller.poll(60.0), "nothing came"
            outcomes += self.process.collect(self.now, 0.0)
        return outcomes

    def passes(self, seconds: float) -> list[Outcome]:
        self.now += seconds
        return self.process.collect(self.now, seconds)


@pytest.fixture
def lane(folder: Path) -> Iterator[Callable[..., Lane]]:
    lanes: list[Lane] = []

    def build(function: str = "judge", **settings: Any) -> Lane:
        lanes.append(Lane(folder, function=f"judge.py:{function}", **settings))
        return lanes[-1]

    yield build
    for entry in lanes:
        entry.process.close()
        entry.poller.close()


@pytest.mark.parametrize(("function", "settings", "asks"), [
    ("judge", {}, ""), ("judge", {}, "finds"), ("batch", {"batch": True}, ""), ("waits", {}, ""),
])
def test_an_import_within_a_call_does_not_count_against_it(
    lane: Callable[..., Lane], folder: Path, function: str, settings: dict[str, Any], asks: str
) -> None:
    child = lane(function, **settings)
    child.process.submit([Item(1, b"{}", asks, [])], child.now)
    assert child.until(lambda: child.process.importing) == []
    assert child.passes(20 * LANE_S) == [] and child.process.remaining_s() == READY_S - 20 * LANE_S
    (folder / "go").touch()
    (outcome,) = child.until(lambda: False)
    assert (outcome.value, outcome.error) == (0.5, "")


def test_an_import_that_does_not_end_is_named_as_one(lane: Callable[..., Lane]) -> None:
    child = lane()
    child.process.submit([Item(1, b"{}", "", [])], child.now)
    child.until(lambda: child.process.importing)
    (outcome,) = child.passes(READY_S)
    assert (outcome.error, outcome.text) == ("hung", "it imports modules for 120 s and more")


def test_time_after_an_import_counts_again(lane: Callable[..., Lane], folder: Path) -> None:
    (folder / "judge.py").write_text(JUDGE + "\n\ndef hangs(record, completion, token_ids):\n"
                                     "    import slow_module, time\n    time.sleep(3600)\n")
    child = lane("hangs")
    child.process.submit([Item(1, b"{}", "", [])], child.now)
    child.until(lambda: child.process.importing)
    assert child.passes(READY_S - 1) == []
    (folder / "go").touch()
    child.until(lambda: not child.process.importing)
    (outcome,) = child.passes(LANE_S)
    assert outcome.error == "hung" and "no result after 5 s" in outcome.text


def test_the_time_of_imports_is_in_no_measure_of_the_function(folder: Path) -> None:
    (folder / "go").touch()
    (folder / "slow_module.py").write_text("import time\nbegun = time.monotonic()\n"
                                           "while time.monotonic() < begun + 0.5: pass\nWORTH = 0.5\n")
    settings = Reward(kind="python", function="judge.py:judge", timeout_s=0.4)
    with RewardPool(settings, base_dir=folder) as pool:
        pool.submit([Item(1, b"{}", "", [])])
        (outcome,) = pool.poll(60.0)
    assert (outcome.value, outcome.error) == (0.5, "") and outcome.seconds < 0.5


CLOCK = """
import os, sys, threading
from busrl.system import imports
said = []
clock = imports.ImportClock(said.append)
sys.path.insert(0, sys.argv[1])
import outer_module
print(said, 0.0 < clock.spent_s, outer_module.inner_module.__name__)
said.clear()
import outer_module
thread = threading.Thread(target=lambda: __import__("colorsys"))
thread.start(); thread.join()
try:
    import no_such_module_at_all
except ModuleNotFoundError:
    print(said)
if not os.fork():
    said.clear()
    import cmd
    print(said, flush=True)
    os._exit(0)
os.wait()
"""


def test_the_clock_tells_of_outermost_imports_of_the_main_thread_alone(tmp_path: Path) -> None:
    (tmp_path / "outer_module.py").write_text("import inner_module\n")
    (tmp_path / "inner_module.py").write_text("")
    done = subprocess.run([sys.executable, "-c", CLOCK, str(tmp_path)], capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines() == ["[True, False] True inner_module", "[True, False]", "[]"], done


def test_the_clock_stands_still_while_something_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    now, seen = [100.0], []

    def takes_30_s(name: str, importer: object) -> ModuleType:
        now[0] += 30.0
        return sys

    monkeypatch.setattr("importlib._bootstrap._find_and_load", takes_30_s)
    clock = imports.ImportClock(lambda begins: seen.append((begins, clock.now())))
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    importlib.import_module("a_module")
    now[0] += 2.0
    assert clock.spent_s == 30.0 and clock.now() == 102.0 and seen == [(True, 100.0), (False, 100.0)]
