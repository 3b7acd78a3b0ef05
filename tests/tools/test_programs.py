"""The programs under tools/ and docs/experiments fit the tree: each starts, and what it takes from busrl is there.

Their help is asked for in one process, so that the libraries are imported once. Programs of rivals are not started.
"""

from __future__ import annotations

import ast
import importlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = sorted(
    path for folder in ("tools", "docs/experiments") for path in (ROOT / folder).rglob("*.py")
    if path.name != "__init__.py"
)
RIVALS = ("datasets", "trl", "ray", "iceoryx2", "faster_fifo", "transfer_queue", "tensordict")
PARSES = [path for path in PROGRAMS if "ArgumentParser(" in path.read_text() and "__main__" in path.read_text()]
HELPED = """
import contextlib, io, json, runpy, sys
failed, before = {}, list(sys.path)
for program in json.loads(sys.argv[1]):
    folder = program.rpartition("/")[0]
    for name in [n for n, m in sys.modules.items() if str(getattr(m, "__file__", "")).rpartition("/")[0] == folder]:
        del sys.modules[name]  # two programs may have modules of one name beside them
    sys.path[:], sys.argv, told = [folder, *before], [program, "--help"], io.StringIO()
    try:
        with contextlib.redirect_stdout(told):
            runpy.run_path(program, run_name="__main__")
        failed[program] = "it ran although its help was asked for"
    except SystemExit as end:
        if end.code or "usage:" not in told.getvalue():
            failed[program] = f"exit code {end.code}"
    except BaseException as problem:
        failed[program] = repr(problem)
print(json.dumps(failed))
"""


@pytest.mark.long
def test_each_program_starts_and_tells_its_arguments() -> None:
    ours = [str(path) for path in PARSES if not any(f"import {name}" in path.read_text() or f"from {name}" in
            path.read_text() for name in RIVALS)]
    assert len(ours) > 25
    done = subprocess.run([sys.executable, "-c", HELPED, json.dumps(ours)], cwd=ROOT, capture_output=True, text=True,
                          timeout=170)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == {}


@pytest.mark.parametrize("path", PROGRAMS, ids=lambda path: str(path.relative_to(ROOT)))
def test_the_names_that_a_program_takes_from_busrl_are_there(path: Path) -> None:
    assert list(missing(ast.parse(path.read_text()))) == []


def test_a_name_that_is_gone_is_seen() -> None:
    source = "from busrl.data import trace as t\nfrom busrl.data.trace import Task\nimport busrl.files\nt.nothing\n"
    source += "busrl.files.nowhere\nimport busrl.topology\nt.read\nbusrl.files.replace\n"
    assert list(missing(ast.parse(source))) == [
        "line 2: busrl.data.trace.Task", "line 4: busrl.data.trace.nothing", "line 5: busrl.files.nowhere",
        "line 6: busrl.topology",
    ]


def missing(tree: ast.Module) -> Iterator[str]:
    """What is imported from busrl, or read from a module of it, and is not there."""
    found, bound = [], {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [(node.lineno, one.name) for one in node.names if ours(one.name) and not there(one.name)]
            bound.update({one.asname: one.name for one in node.names if one.asname and ours(one.name)})
        elif isinstance(node, ast.ImportFrom) and ours(node.module or ""):
            names = {one.asname or one.name: f"{node.module}.{one.name}" for one in node.names}
            found += [(node.lineno, name) for name in names.values() if not there(name)]
            bound.update({alias: name for alias, name in names.items() if isinstance(at(name), ModuleType)})
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            first, *rest = ast.unparse(node).split(".")
            name = ".".join([bound.get(first, first), *rest])
            inside = at(name.rpartition(".")[0]) if ours(name) else None
            if isinstance(inside, ModuleType) and not there(name):
                found.append((node.lineno, name))
    return (f"line {line}: {name}" for line, name in sorted(found))


def ours(name: str) -> bool:
    return name.partition(".")[0] == "busrl"


def there(name: str) -> bool:
    return at(name) is not None


def at(name: str) -> object:
    """The module, or the attribute of a module, of this name; None if there is neither."""
    module, _, last = name.rpartition(".")
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as problem:
        if not ours(problem.name or ""):
            raise
    return getattr(at(module), last, None) if module else None
