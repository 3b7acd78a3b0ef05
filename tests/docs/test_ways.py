"""The ways of docs/concepts.md are those of the code: the reading path is short, neighbours import each other."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "concepts.md").read_text()
WAYS = {"The way of a prompt": 32, "The way of the weights": 14}
WIRES = {"ring": "busrl.ring", "bus": "busrl.bus"}


def rows(title: str) -> list[list[str]]:
    text = PAGE.split(f"## {title}\n")[1].split("\n## ")[0]
    found = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line[:1] == "|"]
    return found[2:]


def module_of(name: str) -> str:
    return "busrl." + name.removesuffix(".py").replace("/", ".")


def imports(path: Path) -> set[str]:
    """Modules that a file imports, also those that a package's `__init__` hands on."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("busrl"):
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
            package = ROOT / node.module.replace(".", "/") / "__init__.py"
            if package.exists() and package != path:
                names = {alias.name for alias in node.names}
                for inner in ast.walk(ast.parse(package.read_text())):
                    if isinstance(inner, ast.ImportFrom) and {alias.name for alias in inner.names} & names:
                        found.add(inner.module or "")
    return found


def starts(path: Path, module: str) -> bool:
    """A file may start another as a process: `python -m module`."""
    return f'"{module}"' in path.read_text()


@pytest.mark.parametrize("title", WAYS)
def test_a_way_is_short_and_its_neighbours_know_each_other(title: str) -> None:
    files = [row[0].strip("`") for row in rows(title)]
    assert len(files) == len(set(files)) <= WAYS[title]
    for name, _, then in rows(title):
        path = ROOT / "busrl" / name.strip("`")
        for wire in re.findall(r"wire: (\w+)", then):
            assert any(one.startswith((WIRES[wire], "busrl.protocol")) for one in imports(path)), f"{name}: {wire}"
        for other in re.findall(r"`([^`]+)`", then):
            there = ROOT / "busrl" / other
            assert other in files, f"{name}: {other} has no row"
            known = module_of(other) in imports(path) or module_of(name.strip("`")) in imports(there)
            assert known or starts(path, module_of(other)), f"{name} and {other} do not know each other"


def lines_of(path: Path, name: str) -> int:
    found: list[ast.stmt] = ast.parse(path.read_text()).body
    for part in name.split("."):
        [node] = [one for one in found if getattr(one, "name", "") == part]
        assert isinstance(node, ast.FunctionDef | ast.ClassDef)
        found = node.body
    assert node.end_lineno is not None
    return node.end_lineno - node.lineno + 1


def test_the_reading_path_exists_and_has_at_most_1500_lines() -> None:
    total = 0
    for name, read, _ in rows("Reading path"):
        path = ROOT / "busrl" / name.strip("`")
        for one in re.findall(r"`([^`]+)`", read):
            total += lines_of(path, one)
    assert 500 < total <= 1500, total
    assert "concepts.md#reading-path" in (ROOT / "README.md").read_text()
