"""`python -m benchmarks`: the one entry of all benchmarks, and that each program can be found by it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

import pytest

from benchmarks import __main__ as entry

PROGRAMS = entry.programs()


@pytest.mark.parametrize("name", PROGRAMS)
def test_every_program_has_a_main_and_a_line(name: str) -> None:
    tree = ast.parse(PROGRAMS[name].read_text())
    assert any(isinstance(node, ast.FunctionDef) and node.name == "main" for node in tree.body)
    assert entry.summary(PROGRAMS[name]) and "__main__" not in PROGRAMS[name].read_text(), "it has the one entry"


@pytest.mark.parametrize("name", PROGRAMS)
def test_no_variable_takes_the_name_of_a_function_that_is_called(name: str) -> None:
    tree = ast.parse(PROGRAMS[name].read_text())
    made = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    for function in (node for node in tree.body if isinstance(node, ast.FunctionDef)):
        nodes = list(ast.walk(function))
        stored = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
        called = {node for call in nodes if isinstance(call, ast.Call) for node in chosen(call.func)}
        assert not made & stored & {node.id for node in called if isinstance(node, ast.Name)}, function.name


def chosen(function: ast.expr) -> Iterator[ast.expr]:
    """The expressions that a call may stand for: both branches of a choice."""
    yield from chain(chosen(function.body), chosen(function.orelse)) if isinstance(function, ast.IfExp) else (function,)


def test_without_a_name_every_program_is_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert entry.main([]) == 0
    listed = [line.split()[0] for line in capsys.readouterr().out.splitlines() if line.startswith("  ")]
    assert sorted(listed) == list(PROGRAMS)


def test_a_misspelt_name_gets_the_nearest_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert entry.main(["predicters"]) == 2
    assert "did you mean predictors?" in capsys.readouterr().err
    assert entry.main(["xyzzy"]) == 2
    assert "did you mean" not in capsys.readouterr().err


def test_a_program_gets_the_arguments_after_its_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "benchmarks").mkdir()
    program = tmp_path / "benchmarks" / "made_up.py"
    program.write_text('"""Made up."""\nimport sys\n\n\ndef main():\n    return len(sys.argv)\n')
    monkeypatch.setattr(entry, "ROOT", tmp_path)
    monkeypatch.setattr(entry, "programs", lambda: {"made-up": program})
    monkeypatch.setattr("benchmarks.__path__", [str(tmp_path / "benchmarks")])
    monkeypatch.setattr("sys.argv", [])
    monkeypatch.setenv("PYTHONPATH", "")
    assert entry.main(["made-up", "--one", "two"]) == 3
