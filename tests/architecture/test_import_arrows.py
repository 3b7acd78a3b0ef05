"""Holds the import arrows of docs/architecture.md and the rule that light processes never load torch."""

from __future__ import annotations

import ast
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2] / "busrl"

# part -> the parts of busrl that it may import. A part is the first name below busrl.
ARROWS: dict[str, set[str]] = {
    "states": set(),
    "errors": set(),
    "device": {"errors"},
    "files": {"errors"},
    "vocabulary": {"files"},
    "paths": set(),
    "protocol": {"errors"},
    "ring": {"errors", "protocol", "_ring"},
    "private": {"errors"},
    "proxies": set(),
    "pipes": set(),
    "listener": set(),
    "guardian": set(),
    "imports": {"errors"},
    "keys": {"errors", "files", "private"},
    "bus": {"errors", "protocol", "ring", "private", "keys", "_wire"},
    "watching": set(),
    "gateway": {"errors", "protocol", "watching"},
    "scheduling": set(),
    "algorithms": set(),
    "data": {"errors", "files", "imports", "vocabulary"},
    "rewards": {"errors", "data", "imports", "device", "pipes", "proxies", "guardian"},
    "agents": {"errors", "data", "imports", "rewards", "pipes", "guardian", "listener", "proxies"},
    "ledger": {"errors", "files", "paths"},
    "faults": {"protocol"},
    "config": {
        "errors", "files", "data", "scheduling", "keys", "faults", "device", "algorithms", "imports", "proxies",
        "vocabulary",
    },
    "quickstart": {"errors", "data", "files", "imports", "ring"},
    "training": {"errors", "files", "paths", "algorithms", "ledger", "device", "imports", "listener", "vocabulary"},
    "engines": {
        "errors", "files", "paths", "config", "data", "quickstart", "weights", "device", "guardian", "imports", "pipes",
        "proxies", "vocabulary",
    },
    "weights": {"errors", "files", "config", "paths", "ring", "device", "guardian", "private", "listener", "_blocks"},
    "sinks": {"errors", "files", "listener", "paths"},
    "roles": {
        "errors", "files", "paths", "protocol", "ring", "bus", "scheduling", "algorithms", "data", "rewards", "ledger",
        "config", "training", "engines", "weights", "quickstart", "keys", "faults", "gateway", "device", "agents",
        "imports", "sinks", "watching", "vocabulary",
    },
    "launch": {
        "errors", "files", "paths", "protocol", "ring", "bus", "config", "ledger", "quickstart", "faults", "watching",
        "device", "monitor", "guardian", "imports", "proxies",
    },
    "simulate": {"errors", "files", "paths", "config", "scheduling", "data", "ledger"},
    "monitor": {"errors", "files", "paths", "protocol", "ring", "bus", "scheduling", "ledger", "gateway", "guardian",
                "listener"},
    "report": {"errors", "files", "paths", "ledger", "monitor"},
    "cli": {
        "errors", "files", "paths", "config", "launch", "ledger", "ring", "quickstart", "bus", "keys", "monitor",
        "data", "simulate", "roles", "engines", "training", "guardian", "imports", "rewards", "report",
        "protocol", "vocabulary",
    },
    "notebook": {"errors", "files", "imports", "paths", "monitor"},
}
BY_ALL = {"states"}
TYPES_OF = {"config": {"data", "faults", "rewards"}}  # named by these for the type checker alone
TORCH_ALLOWED = {"device", "algorithms", "training", "engines", "weights", "quickstart"}
TORCH_ROLES = {
    "roles/rollout.py", "roles/learner/loop.py", "roles/learner/step.py", "roles/learner/publish.py",
    "roles/rank.py",
}
TORCH_FILES = {*TORCH_ROLES, "rewards/model.py"}


def test_the_page_on_architecture_has_these_arrows() -> None:
    page = (ROOT.parent / "docs" / "architecture.md").read_text()
    everywhere = {"errors", "_ring", "_wire", "_blocks"}
    for part, used in ARROWS.items():
        if part not in BY_ALL | everywhere:
            names = ", ".join(f"`{name}`" for name in sorted(used - everywhere)) or "-"
            assert f"| `{part}` | {names} |\n" in page, f"write | `{part}` | {names} | into docs/architecture.md"


def part_of(path: Path) -> str:
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


@cache
def imports(path: Path, runtime_only: bool = False) -> set[str]:
    """Full names that a file imports, those in `if TYPE_CHECKING` left out when asked for."""
    package = ".".join(("busrl", *path.relative_to(ROOT).parts[:-1]))
    return imported(parsed(path), package, runtime_only)


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def imported(tree: ast.Module, package: str, runtime_only: bool = False) -> set[str]:
    """The same of a module's text; what it imports relatively is relative to `package`."""
    skipped: set[int] = set()
    if runtime_only:
        for node in ast.walk(tree):
            if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
                skipped |= {id(inner) for inner in ast.walk(node)}
    found: set[str] = set()
    for node in ast.walk(tree):
        if id(node) in skipped:
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            module = absolute(package, node.level, node.module or "")
            found |= {module} | {f"{module}.{alias.name}" for alias in node.names}
    return found


def absolute(package: str, level: int, module: str) -> str:
    """The full name of what `from ..module import` means in a package."""
    if not level:
        return module
    parts = package.split(".")
    return ".".join([*parts[: len(parts) - level + 1], *([module] if module else [])])


def test_relative_imports_are_seen_as_what_they_import() -> None:
    text = "from . import near\nfrom .deep import one\nfrom ..training import trainer\nfrom .. import weights\n"
    found = imported(ast.parse(text), "busrl.scheduling")
    assert {"busrl.scheduling", "busrl.scheduling.deep", "busrl.training", "busrl.weights"} <= found


FILES = sorted(path for path in ROOT.rglob("*.py") if path.name != "__init__.py" or path.parent != ROOT)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_module_imports_only_what_its_arrows_allow(path: Path) -> None:
    part = part_of(path)
    assert part in ARROWS, f"{part} is new: give it a place and arrows in docs/architecture.md and here"
    used = {name.split(".")[1] for name in imports(path) if name.startswith("busrl.")}
    loaded = {name.split(".")[1] for name in imports(path, runtime_only=True) if name.startswith("busrl.")}
    used -= {other for other, parts in TYPES_OF.items() if part in parts} - loaded
    beyond = used - {part} - ARROWS[part] - BY_ALL
    assert not beyond, f"{path.name} of {part} imports {sorted(beyond)}"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_torch_is_imported_only_where_tensors_are_worked_on(path: Path) -> None:
    uses = {name.split(".")[0] for name in imports(path, runtime_only=True)} & {"torch", "transformers", "safetensors"}
    if uses:
        allowed = part_of(path) in TORCH_ALLOWED or str(path.relative_to(ROOT)) in TORCH_FILES
        assert allowed, f"{path.relative_to(ROOT)} imports {sorted(uses)}"


SHARED_BY_ROLES = {
    "process", "actor", "answers", "episodes", "holder", "intake", "predictor_state", "remote_ledgers",
    "version_pin", "host_log", "probes",
}
ROLES = sorted((ROOT / "roles").rglob("*.py"))


@pytest.mark.parametrize("path", ROLES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_role_imports_no_other_roles_module(path: Path) -> None:
    """A role is one file, the learner a package; `__main__` imports by name the one that is asked for."""
    own = path.relative_to(ROOT / "roles").parts[0].removesuffix(".py")
    used = {name.split(".")[2] for name in imports(path) if name.startswith("busrl.roles.")}
    assert used - {own} <= SHARED_BY_ROLES, f"{path.name} imports {sorted(used - {own} - SHARED_BY_ROLES)}"


def test_busrl_imports_no_pickle_anywhere() -> None:
    for path in FILES:
        assert not imports(path) & {"pickle", "cloudpickle", "dill", "marshal", "shelve"}, path


LIGHT = [
    "busrl.cli", "busrl.launch", "busrl.launch.display", "busrl.roles.bus", "busrl.roles.keeper",
    "busrl.roles.scheduler", "busrl.roles.reward", "busrl.roles.validator", "busrl.topology", "busrl.ledger.audit",
    "busrl.monitor.screen", "busrl.cli.simulate", "busrl.agents.episode",
]


def test_a_light_process_loads_no_torch() -> None:
    """All in one interpreter, one after the other: the first that loads something heavy is named."""
    code = (
        "import sys, importlib\n"
        f"for module in {LIGHT}:\n"
        "    importlib.import_module(module)\n"
        "    heavy = {'torch', 'transformers', 'safetensors', 'scipy', 'pandas'} & set(sys.modules)\n"
        "    assert not heavy, (module, sorted(heavy))"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_the_broker_for_which_all_others_wait_loads_neither_numpy_nor_the_topology() -> None:
    code = (
        "import sys, busrl.roles.bus, busrl.roles.__main__\n"
        "heavy = {'numpy', 'asyncio', 'busrl.topology', 'busrl.scheduling'} & set(sys.modules)\n"
        "assert not heavy, sorted(heavy)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_a_topology_is_parsed_without_the_quickstart_and_the_compiled_core(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n')
    (tmp_path / "t.toml").write_text('[learner]\nlr = 1e-4\n[data]\ntrain = "train.jsonl"\n[model]\npath = "none"\n')
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
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "t.toml")], check=True, timeout=60)
