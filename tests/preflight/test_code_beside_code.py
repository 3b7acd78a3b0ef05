"""Code of the user's finds what lies beside it and beside the topology, wherever busrl was started, and hides nothing
of the standard library from busrl."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from busrl.agents import child as agent_child
from busrl.errors import UserError
from busrl.launcher.children import command_of, environment_of
from busrl.paths import RunPaths
from busrl.preflight.load import load
from busrl.rewards.base import Item
from busrl.rewards.pool import RewardPool
from busrl.system import imports
from busrl.topology import Process, ProcessName, Topology
from busrl.topology.rewards import Reward

pytestmark = pytest.mark.long

NAMES = ("random", "token", "types", "queue", "tempfile", "ctypes")  # that busrl's processes import themselves
# `code/` has files that are named; each imports its neighbour, and a package in the topology's folder.
OWN = """import beside_it
from helpers_of_mine.deep import WORTH


def score(record, completion, token_ids):
    return beside_it.HALF * WORTH


def loss(inputs, settings):
    return -inputs.trainer_logprobs * inputs.advantages * beside_it.HALF * WORTH


def advantage(rewards, lengths):
    return [beside_it.HALF * WORTH * reward for reward in rewards]


def metric(samples, row):
    return {"mine": beside_it.HALF * WORTH}


def rows():
    yield {"prompt": "1+1=", "answer": str(beside_it.HALF * WORTH)}


def keep(row):
    return beside_it.HALF * WORTH == 1.0


def episode(task, llm):
    return beside_it.HALF * WORTH


def parse(text, tools):
    return text, []


class Sink:
    def __init__(self, card):
        self.worth = beside_it.HALF * WORTH
"""
OPTIMIZER = """import torch

import beside_it
from helpers_of_mine.deep import WORTH


class Mine(torch.optim.SGD):
    worth = beside_it.HALF * WORTH
"""


@pytest.fixture
def mine(here: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a topology with code beside it; the current directory is another one, of hostile names."""
    files = {
        "code/own.py": OWN, "code/own_optimizer.py": OPTIMIZER, "code/beside_it.py": "HALF = 0.5\n",
        "helpers_of_mine/__init__.py": "", "helpers_of_mine/deep.py": "WORTH = 2\n",
        "helpers_of_mine/judge.py": "import beside_the_topology\n\n\ndef score(record, completion, token_ids):\n"
                                    "    return 1.0\n",
        "beside_the_topology.py": "",
    }
    for name, text in files.items():
        (here / name).parent.mkdir(exist_ok=True)
        (here / name).write_text(text)
    (here / "elsewhere").mkdir()
    for name in NAMES:
        for folder in (here, here / "code", here / "elsewhere"):
            (folder / f"{name}.py").write_text(f"raise RuntimeError('the {name} of {folder.name} was imported')\n")
    monkeypatch.chdir(here / "elsewhere")
    return here


REST = """[learner]
lr = 1e-4
{learner}
[[process]]
role = "rollout"
{more}
"""
KEYS = {
    "reward": ("", '[reward]\nfunction = "code/own.py:score"'),
    "a module": ("", '[reward]\nfunction = "helpers_of_mine.judge:score"'),
    "a part": ("", '[[reward.part]]\nkind = "python"\nfunction = "code/own.py:score"'),
    "loss": ('loss = "code/own.py:loss"', ""),
    "advantage": ('advantage = "code/own.py:advantage"', ""),
    "metric": ('metrics = ["code/own.py:metric"]', ""),
    "optimizer": ('optimizer = "code/own_optimizer.py:Mine"', ""),
    "rows": ("", '[[data.source]]\nfunction = "code/own.py:rows"'),
    "filter": ("", '[[data.source]]\npath = "train.jsonl"\nfilter = "code/own.py:keep"'),
    "sink": ("", '[sinks]\nto = ["code/own.py:Sink"]'),
    "episode": ("", '[[process]]\nrole = "agent"\nfunction = "code/own.py:episode"'),
    "parser": ("", '[agents]\ntools = "code/own.py:parse"\n'
               '[[process]]\nrole = "agent"\nfunction = "code/own.py:episode"'),
}


def topology(folder: Path, learner: str, more: str) -> Topology:
    data = "" if "[[data.source]]" in more else '[data]\ntrain = "train.jsonl"\n'
    text = '[model]\npath = "model"\n' + data + REST.format(learner=learner, more=more)
    (folder / "own.toml").write_text(text)
    return load(folder / "own.toml", [])


@pytest.mark.parametrize("kind", KEYS)
def test_each_kind_of_code_is_found_from_another_directory(mine: Path, kind: str) -> None:
    assert topology(mine, *KEYS[kind]).base_dir == str(mine)


@pytest.mark.parametrize("kind", ["sink", "parser"])
def test_sinks_and_parsers_are_imported_before_the_start(mine: Path, kind: str) -> None:
    (mine / "code" / "beside_it.py").write_text("1 / 0\n")
    table = '[sinks]\nto = ["code/own.py:Sink"]' if kind == "sink" else KEYS[kind][1]
    with pytest.raises(UserError, match="cannot be used: importing it raised ZeroDivisionError"):
        topology(mine, "", table)


def test_rewards_start_among_files_named_as_the_standard_library(mine: Path) -> None:
    with RewardPool(Reward(kind="python", function="code/own.py:score"), base_dir=mine) as pool:
        pool.submit([Item(1, b"{}", "", [])])
        outcomes = pool.poll(60.0)
    assert [(outcome.value, outcome.error) for outcome in outcomes] == [(1.0, "")]


@pytest.mark.parametrize("name", ["reward/0", "bus", "sinks"])
def test_a_role_starts_among_files_with_names_of_the_standard_library(mine: Path, name: str) -> None:
    process, paths = ProcessName(name, name.partition("/")[0], 0, Process("reward")), RunPaths.of(mine / "run")
    command, known = command_of(process, paths), environment_of(process, paths, {})
    done = subprocess.run(command, env=known, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and "no topology.json there" in done.stderr, done.stderr


def test_what_is_installed_never_comes_before_the_standard_library(mine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("busrl.launcher.children.PACKAGES", "/venv/lib/python3/site-packages")
    monkeypatch.setenv("PYTHONPATH", "/mine")
    process = ProcessName("reward/0", "reward", 0, Process("reward"))
    assert environment_of(process, RunPaths.of(mine / "run"), {})["PYTHONPATH"] == "/mine"


ORDER = """
import sys
from busrl.system import imports
from busrl.errors import UserError
first = imports.load("a", "one/own.py:name", UserError, ".")
second = imports.load("b", "two/own.py:name", UserError, ".")
import random, queue
print(first(), second(), hasattr(random, "Random"), hasattr(queue, "Queue"))
"""


def test_neighbours_come_before_installed_packages_and_each_file_gets_its_own(mine: Path) -> None:
    for folder in ("one", "two"):
        (mine / folder).mkdir()
        (mine / folder / "own.py").write_text("import msgspec_like\n\n\ndef name():\n    return msgspec_like.NAME\n")
        (mine / folder / "msgspec_like.py").write_text(f"NAME = {folder!r}\n")
    (mine / "installed").mkdir()
    (mine / "installed" / "msgspec_like.py").write_text("NAME = 'installed'\n")
    packages = os.pathsep.join([str(mine / "installed"), imports.PACKAGES])
    done = subprocess.run([sys.executable, "-c", imports.APART + ORDER], cwd=mine, capture_output=True, text=True,
                          timeout=60, env={**os.environ, "PYTHONPATH": packages})
    assert done.stdout.split() == ["one", "two", "True", "True"], done.stderr


def test_a_module_named_as_the_library_is_named_by_its_file(mine: Path) -> None:
    (mine / "token.py").write_text("def score(record, completion, token_ids):\n    return 1.0\n")
    with pytest.raises(UserError, match=r"the standard library has that name: write token\.py:NAME"):
        imports.load("reward.function", "token:score", UserError, mine)
    assert imports.load("reward.function", "token.py:score", UserError, mine)({}, "", []) == 1.0


def test_modules_of_an_environment_hide_none_of_the_library(mine: Path) -> None:
    command = [*imports.interpreter(), "busrl.agents.child", str(os.getpid())]
    setup = agent_child.EpisodeSetup("", str(mine), environment="gymnasium:no_such_module_of_mine:X")
    line = agent_child.pipes.line_of(setup)
    done = subprocess.run(command, input=line, capture_output=True, timeout=60)
    assert b"no_such_module_of_mine" in done.stdout and b"was imported" not in done.stdout + done.stderr, done
