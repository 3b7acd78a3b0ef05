"""Reads the sources of busrl for the tests of this folder: which modules there are, their parts, what each imports."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

from busrl import capabilities

REPOSITORY = Path(__file__).resolve().parents[2]
ROOT = REPOSITORY / "busrl"
FILES = sorted(ROOT.rglob("*.py"))
OPTIONAL = tuple(capability.name for capability in capabilities.CAPABILITIES)
MODULE_IN_TEXT = re.compile(r"busrl(?:\.[a-z_0-9]+)+")


class Import(NamedTuple):
    """A name that a module imports; `lazy`: inside a function, `typing`: for the type checker alone."""

    name: str
    line: int
    lazy: bool = False
    typing: bool = False


def name_of(path: Path) -> str:
    return ".".join(("busrl", *path.relative_to(ROOT).with_suffix("").parts)).removesuffix(".__init__")


MODULES = {name_of(path): path for path in FILES}


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@cache
def lines_of(path: Path) -> int:
    return len(path.read_text().splitlines())


def part_of(module: str) -> str:
    """The first name below busrl: `training` of `busrl.training.batch`."""
    return module.split(".")[1] if "." in module else ""


def capability_of(module: str) -> str:
    """The optional part that a module or a name in it belongs to; empty for the core."""
    path = module.removeprefix("busrl.").replace(".", "/") + "/"
    return next((name for name in OPTIONAL if path.startswith(name + "/")), "")


def classes() -> Iterator[tuple[str, ast.ClassDef]]:
    for module, path in MODULES.items():
        yield from ((module, node) for node in ast.walk(parsed(path)) if isinstance(node, ast.ClassDef))


@cache
def imports(path: Path) -> tuple[Import, ...]:
    package = ".".join(("busrl", *path.relative_to(ROOT).parts[:-1]))
    return tuple(imported(parsed(path), package))


def imported(node: ast.AST, package: str, lazy: bool = False, typing: bool = False) -> Iterator[Import]:
    """All names that a syntax tree imports; what it imports relatively is relative to `package`."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            yield from (Import(alias.name, child.lineno, lazy, typing) for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            module = absolute(package, child.level, child.module or "")
            yield Import(module, child.lineno, lazy, typing)
            yield from (Import(f"{module}.{alias.name}", child.lineno, lazy, typing) for alias in child.names)
        else:
            inside = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            checked = isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test)
            yield from imported(child, package, lazy or inside, typing or checked)


def absolute(package: str, level: int, module: str) -> str:
    """The full name of what `from ..module import` means in a package."""
    if not level:
        return module
    parts = package.split(".")
    return ".".join([*parts[: len(parts) - level + 1], *([module] if module else [])])


def docstrings(tree: ast.AST) -> Iterator[ast.Constant]:
    holders = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for node in ast.walk(tree):
        if isinstance(node, holders) and node.body and isinstance(node.body[0], ast.Expr):
            value = node.body[0].value
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                yield value


def modules_in_strings(path: Path) -> Iterator[Import]:
    """Modules of busrl that strings name, such as "busrl.roles.bus"; docstrings are for people."""
    skipped = {id(node) for node in docstrings(parsed(path))}
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in skipped:
            yield from (Import(name, node.lineno) for name in MODULE_IN_TEXT.findall(node.value))
