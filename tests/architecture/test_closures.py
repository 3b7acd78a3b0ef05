"""Sizes of what a reader must know to change one process: the modules that its import loads, and their lines.

Each module is imported in an interpreter of its own. The core has two floors: what runs in the processes of a run, and
above it the front, with which a person starts a run and looks at it.
"""

from __future__ import annotations

import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
from syntax import MODULES, capability_of, lines_of, part_of
from test_import_arrows import ARROWS

# role -> most modules of busrl that its import loads.
MOST_MODULES = {"actor": 39, "scheduler": 50, "rollout": 58, "reward": 52, "learner": 115}
MOST_LINES_OF_AN_ACTOR, MOST_LINES_OF_THE_CORE = 8_000, 36_000
FRONT = {"api", "cli", "launcher", "pages", "preflight", "quickstart", "status"}

LIGHT = [
    "busrl.cli", "busrl.launcher", "busrl.launcher.display", "busrl.roles.bus", "busrl.roles.keeper",
    "busrl.roles.scheduler", "busrl.roles.reward", "busrl.roles.validator", "busrl.topology", "busrl.ledger.audit",
    "busrl.observe.monitor.screen", "busrl.simulate.command", "busrl.agents.episode",
]


def run(code: str, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@cache
def loaded_by(module: str) -> frozenset[str]:
    """The modules of busrl that the import of `module` loads, packages included."""
    return frozenset(run(f"import sys, {module}; print(*sys.modules)").split()) & frozenset(MODULES)


@pytest.mark.parametrize("role", [*MOST_MODULES])
def test_a_role_loads_few_modules_and_no_preflight(role: str) -> None:
    loaded = loaded_by(f"busrl.roles.{role}")
    assert len(loaded) <= MOST_MODULES[role], f"{len(loaded)} > {MOST_MODULES[role]}: {sorted(loaded)}"
    checks = {module for module in loaded if module.startswith("busrl.preflight")}
    assert not checks, sorted(checks)


def test_an_actor_has_few_lines_to_read() -> None:
    lines = sum(lines_of(MODULES[module]) for module in loaded_by("busrl.roles.actor"))
    assert lines <= MOST_LINES_OF_AN_ACTOR


def test_the_core_of_a_run_has_few_lines() -> None:
    core = {module: path for module, path in MODULES.items() if not capability_of(module)}
    lines = sum(lines_of(path) for module, path in core.items() if part_of(module) not in FRONT)
    assert lines <= MOST_LINES_OF_THE_CORE, lines


def test_no_process_of_a_run_imports_the_front() -> None:
    below = [(part, other) for part, others in ARROWS.items() if part not in FRONT for other in others.split()]
    assert not [(part, other) for part, other in below if other in FRONT]


def test_a_light_process_loads_no_torch() -> None:
    """All in one interpreter, one after the other: the first that loads something heavy is named."""
    run(
        "import sys, importlib\n"
        f"for module in {LIGHT}:\n"
        "    importlib.import_module(module)\n"
        "    heavy = {'torch', 'transformers', 'safetensors', 'scipy', 'pandas'} & set(sys.modules)\n"
        "    assert not heavy, (module, sorted(heavy))"
    )


def test_the_broker_loads_neither_numpy_nor_the_topology() -> None:
    run(
        "import sys, busrl.roles.bus, busrl.roles.__main__\n"
        "heavy = {'numpy', 'asyncio', 'busrl.topology', 'busrl.scheduling'} & set(sys.modules)\n"
        "assert not heavy, sorted(heavy)"
    )


def test_the_child_of_a_reward_loads_neither_numpy_nor_the_topology() -> None:
    run(
        "import sys, busrl.rewards.child\n"
        "heavy = {'numpy', 'busrl.topology', 'busrl.rewards.pool'} & set(sys.modules)\n"
        "assert not heavy, sorted(heavy)"
    )


def test_a_topology_is_checked_without_the_quickstart_and_the_compiled_core(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n')
    topology = tmp_path / "t.toml"
    topology.write_text('[learner]\nlr = 1e-4\n[data]\ntrain = "train.jsonl"\n[model]\npath = "none"\n')
    code = """
import sys
from busrl.preflight.load import load
from busrl.errors import TopologyError
try:
    load(sys.argv[1])
except TopologyError as error:
    (problem,) = error.problems
    assert problem.rule == "no such folder", problem
else:
    raise AssertionError("a model folder that is not there was accepted")
assert not [name for name in sys.modules if name.startswith(("busrl.quickstart", "busrl.ring", "busrl._"))]
"""
    run(code, str(topology))
