"""`busrl launch --dry-run` prints for each process the tables that it reads: compared with the code of the roles."""

from __future__ import annotations

import ast
import json
from pathlib import Path

import pytest

from busrl.config import load
from busrl.config.explain import SECTIONS_OF, dry_run
from busrl.config.reader import SECTIONS

ROOT = Path(__file__).resolve().parents[2]
HOLDERS = ("topology", "t")  # names under which modules have a topology


def file_of(module: str) -> Path | None:
    """The source of a module of busrl."""
    path = ROOT / module.replace(".", "/")
    found = (one for one in (path.with_suffix(".py"), path / "__init__.py") if one.is_file())
    return next(found, None)


def trees(start: str) -> dict[str, ast.Module]:
    """A module and all of busrl that it imports, outside of the topology's own package."""
    found: dict[str, ast.Module] = {}
    left = [start]
    while left:
        module = left.pop()
        file = file_of(module)
        if module in found or file is None or module.startswith("busrl.config"):
            continue
        found[module] = ast.parse(file.read_text())
        for node in ast.walk(found[module]):
            if isinstance(node, ast.ImportFrom) and node.module:
                left += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
            elif isinstance(node, ast.Import):
                left += [alias.name for alias in node.names]
        left = [name for name in left if name.startswith("busrl.")]
    return found


def tables_read(tree: ast.Module) -> set[str]:
    """Tables that a module takes from something named topology."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in SECTIONS:
            holder = node.value
            name = holder.id if isinstance(holder, ast.Name) else getattr(holder, "attr", "")
            found |= {node.attr} if name in HOLDERS else set()
    return found


@pytest.mark.parametrize("role", sorted(SECTIONS_OF))
def test_what_is_printed_of_a_role_holds_every_table_that_its_code_reads(role: str) -> None:
    read = {name: tables_read(tree) for name, tree in trees(f"busrl.roles.{role}").items()}
    missing = {name: found - set(SECTIONS_OF[role]) - {"faults"} for name, found in read.items()}
    assert not {name: found for name, found in missing.items() if found}


def test_the_walk_through_the_code_sees_what_a_role_reads() -> None:
    read = set[str]().union(*(tables_read(tree) for tree in trees("busrl.roles.rollout").values()))
    assert {"segments", "openai", "vllm", "mock", "limits", "lora"} <= read


def test_a_rollout_is_printed_with_its_segments_its_endpoint_and_its_limits() -> None:
    topology = load(ROOT / "configs" / "quickstart.toml")
    lines = (json.loads(line) for line in dry_run(topology).splitlines() if line.startswith('{"process"'))
    settings = {line["process"]: line["settings"] for line in lines}
    assert {"segments", "openai", "limits", "vllm"} <= settings["rollout/0"].keys()
    assert "faults" not in settings["rollout/0"] and "simulate" not in settings["rollout/0"]
