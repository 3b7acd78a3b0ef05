"""The programs under tools/ and benchmarks/ fit the tree: each starts, and what it takes from busrl is there.

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

from benchmarks import __main__ as entry

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = sorted(
    path for folder in ("tools", "benchmarks") for path in (ROOT / folder).rglob("*.py") if path.name != "__init__.py"
)
TOOLS = [
    path for path in PROGRAMS if path.is_relative_to(ROOT / "tools")
    and "ArgumentParser(" in path.read_text() and "__main__" in path.read_text()
]
HELPED = """
import contextlib, io, json, runpy, sys
from benchmarks import __main__ as entry
tools, names = json.loads(sys.argv[1])
failed, before = {}, list(sys.path)
def help_of(program, start):
    text = io.StringIO()
    try:
        with contextlib.redirect_stdout(text):
            start()
        failed[program] = "it ran although its help was asked for"
    except SystemExit as end:
        if end.code or "usage:" not in text.getvalue():
            failed[program] = f"exit code {end.code}"
    except BaseException as problem:
        failed[program] = repr(problem)
for name in names:
    loaded = "transformers" in sys.modules
    help_of(name, lambda: entry.main([name, "--help"]))
    if not loaded and "transformers" in sys.modules:
        failed[name] = "its help waits for the import of transformers"
for program in tools:
    sys.path[:], sys.argv = [program.rpartition("/")[0], *before], [program, "--help"]
    help_of(program, lambda: runpy.run_path(program, run_name="__main__"))
print(json.dumps(failed))
"""


@pytest.mark.long
def test_each_program_starts_and_tells_its_arguments() -> None:
    names = list(entry.programs())
    assert len(TOOLS) > 3 and len(names) > 25
    command = [sys.executable, "-c", HELPED, json.dumps([list(map(str, TOOLS)), names])]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=170)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == {}


@pytest.mark.parametrize("path", PROGRAMS, ids=lambda path: str(path.relative_to(ROOT)))
def test_the_names_that_a_program_takes_from_busrl_are_there(path: Path) -> None:
    assert list(missing(ast.parse(path.read_text()))) == []


def test_a_name_that_is_gone_is_seen() -> None:
    source = "from busrl.data import trace as t\nfrom busrl.data.trace import Task\nimport busrl.errors\nt.nothing\n"
    source += "busrl.errors.nowhere\nimport busrl.nowhere\nt.read\nbusrl.errors.UserError\n"
    assert list(missing(ast.parse(source))) == [
        "line 2: busrl.data.trace.Task", "line 4: busrl.data.trace.nothing", "line 5: busrl.errors.nowhere",
        "line 6: busrl.nowhere",
    ]


def missing(tree: ast.Module) -> Iterator[str]:
    """What is imported from busrl, or read from a module of it, and is not there."""
    places, bound = [], {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            places += [(node.lineno, alias.name) for alias in node.names if ours(alias.name) and not there(alias.name)]
            bound.update({alias.asname: alias.name for alias in node.names if alias.asname and ours(alias.name)})
        elif isinstance(node, ast.ImportFrom) and ours(node.module or ""):
            names = {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
            places += [(node.lineno, name) for name in names.values() if not there(name)]
            bound.update({alias: name for alias, name in names.items() if isinstance(at(name), ModuleType)})
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            first, *rest = ast.unparse(node).split(".")
            name = ".".join([bound.get(first, first), *rest])
            inside = at(name.rpartition(".")[0]) if ours(name) else None
            if isinstance(inside, ModuleType) and not there(name):
                places.append((node.lineno, name))
    return (f"line {line}: {name}" for line, name in sorted(places))


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
