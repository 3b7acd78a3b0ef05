"""Holds the shape of the code: how large files and functions are, which small modules there are, and the import arrows
inside the packages that have packages of their own (those between the parts of busrl are in `test_import_arrows`)."""

from __future__ import annotations

import ast
import importlib.util
import statistics
from functools import cache
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1] / "busrl"
FILES = sorted(ROOT.rglob("*.py"))
MOST_FILES, MOST_LINES, MOST_OF_FUNCTION, MEDIAN_OF_FUNCTION = 230, 800, 60, 8
SMALL, MOST_SMALL = 120, 15
LONGER: dict[str, int] = {}  # modules that are too long still; nothing may join them

# A module of less than SMALL lines whose only user lies in the same package -> why it is a module of its own.
REASONS: dict[str, str] = {
    "busrl.algorithms.distill": "formulas on a teacher's tokens, for losses of the user's too",
    "busrl.config.trials": "tables for trying a run out, which would make the schema longer than 800 lines",
    "busrl.rewards.model": "the one file of rewards that imports torch, in a child that has a model",
    "busrl.engines.vllm.cpu_patches": "work-arounds for vLLM on CPUs, kept out of the worker that runs on GPUs",
}

# package -> module or package in it -> the others of the package that it may import when it runs.
INSIDE: dict[str, dict[str, str]] = {
    "algorithms": {
        "advantages": "", "catalog": "", "distill": "", "gae": "", "selection": "", "losses": "distill",
        "terms": "catalog losses", "diagnostics": "losses terms",
    },
    "engines": {
        "base": "", "tokens": "", "scripted": "base", "torch": "base tokens", "openai": "base tokens",
        "vllm": "base tokens",
    },
    "engines.torch": {"decoder": "", "fast": "decoder", "lora": "", "engine": "decoder fast lora"},
    "engines.openai": {"client": "", "weights": "client", "engine": "client weights"},
    "engines.vllm": {
        "process": "", "weights": "process", "engine": "process weights", "cpu_patches": "",
        "worker": "cpu_patches weights",
    },
    "ledger": {"wal": "", "errors": "", "openbin": "", "trainlog": "wal", "trained": "trainlog wal", "audit": ""},
    "ledger.audit": {
        "report": "", "readers": "report", "snapshot": "readers report", "rules": "readers report snapshot",
    },
    "roles.learner": {
        "step": "", "metrics": "", "alarms": "", "groups": "", "control": "step", "history": "step", "publish": "step",
        "loop": "alarms control groups history metrics publish step",
    },
    "scheduling": {
        "limits": "", "segments": "", "controller": "", "lengths": "", "groups": "limits", "admission": "groups limits",
        "trigger": "admission groups limits", "pool": "groups lengths", "dispatch": "groups lengths pool",
    },
    "scheduling.lengths": {
        "base": "", "rules": "base", "learned": "base", "history": "base learned rules",
        "guard": "base rules",
    },
    "training": {
        "head": "", "optimizers": "", "precision": "", "schedule": "", "shard_files": "", "step_stats": "",
        "value_head": "", "batch": "", "packing": "batch", "model": "precision", "checkpoint": "shard_files",
        "custom": "optimizers", "forward": "batch head model packing", "distributed": "batch forward shard_files",
        "state": "checkpoint distributed optimizers shard_files",
        "trainer": "batch checkpoint custom distributed forward head model optimizers precision shard_files state "
                   "step_stats value_head",
        "ranks": "batch checkpoint distributed forward model shard_files state step_stats trainer",
    },
    "training.ranks": {
        "wire": "", "loading": "", "parts": "loading", "leader": "parts wire", "follower": "parts wire",
    },
    "weights": {
        "base": "", "tensors": "", "sparse": "tensors", "folders": "base tensors", "one_copy": "base",
        "shm": "base sparse tensors", "broadcast": "base sparse tensors",
        "factory": "base broadcast folders one_copy shm tensors",
    },
    "weights.broadcast": {"group": "", "receiver": "group", "sender": "group"},
}


def _arrows_module():  # type: ignore[no-untyped-def]
    spec = importlib.util.spec_from_file_location("import_arrows", HERE / "test_import_arrows.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


imports = cache(_arrows_module().imports)


def name_of(path: Path) -> str:
    return ".".join(("busrl", *path.relative_to(ROOT).with_suffix("").parts)).removesuffix(".__init__")


def test_the_packages_have_few_files_of_a_size_that_can_be_read() -> None:
    assert len(FILES) <= MOST_FILES
    sizes = {name_of(path): len(path.read_text().splitlines()) for path in FILES}
    assert not {name: lines for name, lines in sizes.items() if lines > LONGER.get(name, MOST_LINES)}


def test_functions_are_short() -> None:
    sizes: dict[str, int] = {}
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                assert node.end_lineno is not None
                sizes[f"{name_of(path)}.{node.name}:{node.lineno}"] = node.end_lineno - node.lineno + 1
    assert not {name: lines for name, lines in sizes.items() if lines > MOST_OF_FUNCTION}
    assert statistics.median(sizes.values()) <= MEDIAN_OF_FUNCTION


def test_a_small_module_with_one_user_in_its_package_has_a_reason() -> None:
    found = set()
    for path in FILES:
        if path.name.startswith("__") or len(path.read_text().splitlines()) >= SMALL:
            continue
        users = [one for one in FILES if one != path and name_of(path) in imports(one)]
        inside = [one for one in users if one.parent == path.parent and one.name != "__init__.py"]
        if len(inside) == len(users) == 1 or (not inside and users == [path.parent / "__init__.py"]):
            found.add(name_of(path))
    assert found == set(REASONS), f"without a reason: {found - set(REASONS)}; gone: {set(REASONS) - found}"
    assert len(found) <= MOST_SMALL


def test_every_package_that_has_packages_says_who_may_import_whom() -> None:
    folders = {path.parent for path in FILES if path.name == "__init__.py"}
    inner = {folder for folder in folders if folder.parent not in (ROOT, ROOT.parent)}
    named = {name_of(one / "__init__.py").removeprefix("busrl.") for folder in inner for one in (folder, folder.parent)}
    assert named - set(INSIDE) <= {"ring", "ring.capi", "roles"}  # test_import_arrows holds those of the roles


@pytest.mark.parametrize("package", sorted(INSIDE))
def test_inside_a_package_imports_follow_its_arrows(package: str) -> None:
    folder, arrows = ROOT.joinpath(*package.split(".")), INSIDE[package]
    within = f"busrl.{package}."
    for path in folder.rglob("*.py"):
        own = path.relative_to(folder).parts[0].removesuffix(".py")
        if own.startswith("__"):
            continue
        assert own in arrows, f"{own} is new in {package}: say here what it may import"
        used = {name.removeprefix(within).split(".")[0] for name in imports(path, True) if name.startswith(within)}
        beyond = used & set(arrows) - {own} - set(arrows[own].split())
        assert not beyond, f"{path.name} of {package} imports {sorted(beyond)}"
