"""Holds the shape of the code: how large files and functions are, which small modules there are, and the import arrows
inside the packages (those between the parts of busrl are in `test_import_arrows`)."""

from __future__ import annotations

import ast
import importlib.util
import statistics
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1] / "busrl"
FILES = sorted(ROOT.rglob("*.py"))
MOST_FILES, MOST_LINES, MOST_OF_FUNCTION, MEDIAN_OF_FUNCTION = 285, 800, 60, 8
SMALL, MOST_SMALL = 120, 15
LONGER: dict[str, int] = {}  # modules that are too long still; nothing may join them

# A module of less than SMALL lines whose only user lies in the same package -> why it is a module of its own.
REASONS: dict[str, str] = {
    "busrl.algorithms.distill": "formulas on a teacher's tokens, for losses of the user's too",
    "busrl.rewards.model": "the one file of rewards that imports torch, in a child that has a model",
}

# package -> module or package in it -> the others of the package that it may import when it runs.
INSIDE: dict[str, dict[str, str]] = {
    "agents": {
        "parsers": "", "tree": "", "llm": "", "renderer": "tree", "episode": "renderer llm parsers tree",
        "adapters": "llm", "scripted": "llm", "child": "adapters llm", "pool": "child episode llm",
        "openai": "episode llm tree", "http": "episode llm openai renderer tree",
        "atropos": "episode http openai renderer tree",
    },
    "algorithms": {
        "advantages": "", "catalog": "", "distill": "", "gae": "", "selection": "", "losses": "distill",
        "terms": "catalog losses", "diagnostics": "losses terms",
    },
    "bus": {
        "security": "", "endpoint": "security", "broker": "endpoint security", "link": "broker endpoint security",
    },
    "cli": {
        "command": "", "doctor": "", "init": "", "keys": "", "rings": "", "run": "", "watch": "",
        "evaluate": "command run", "simulate": "command",
    },
    "config": {
        "names": "", "declare": "", "learner": "declare", "prompts": "declare",
        "schema": "learner names prompts declare", "pretrained": "rules schema", "reader": "names schema declare",
        "memory": "pretrained schema", "rules": "learner reader schema declare", "engine_rules": "learner rules schema",
        "reward_rules": "pretrained reader rules schema declare",
        "prompt_tokens": "pretrained rules schema", "trial": "pretrained prompt_tokens reader schema declare",
        "named_files": "engine_rules pretrained prompt_tokens reader rules schema trial declare",
        "machine": "engine_rules pretrained schema", "sources": "pretrained prompt_tokens prompts rules schema trial",
        "derive": "named_files prompts rules schema", "hosts": "derive schema",
        "explain": "derive hosts machine memory pretrained prompts reader rules schema sources trial",
        "inflight": "derive load reader rules schema",
        "load": "derive engine_rules named_files pretrained prompts reader reward_rules rules schema sources",
    },
    "data": {
        "figures": "", "prompts": "", "chat": "prompts", "sources": "chat prompts", "trace": "prompts",
    },
    "engines": {
        "tokens": "", "base": "tokens", "openai": "base tokens", "scripted": "base tokens", "torch": "base tokens",
        "vllm": "base tokens",
    },
    "engines.openai": {"client": "", "engine": "client"},
    "engines.torch": {
        "decoder": "", "lora": "", "prefix": "", "engine": "decoder lora prefix",
    },
    "engines.vllm": {
        "cpu_patches": "", "process": "", "weights": "process", "engine": "process weights",
        "worker": "cpu_patches weights",
    },
    "launch": {
        "fates": "", "identity": "", "clusters": "", "pythons": "", "supervisor": "", "children": "supervisor",
        "rundir": "fates identity supervisor", "summary": "supervisor", "display": "summary",
        "placement": "children supervisor", "control": "rundir summary",
        "run": "children control display fates placement rundir summary supervisor",
    },
    "ledger": {
        "audit": "", "controls": "", "errors": "", "openbin": "", "skips": "", "wal": "", "trained": "wal",
    },
    "ledger.audit": {
        "report": "", "readers": "report", "inforce": "readers", "snapshot": "inforce readers report",
        "rules": "inforce readers report snapshot",
    },
    "monitor": {
        "state": "", "waits": "state", "text": "state waits", "runfiles": "state text",
        "sources": "runfiles state waits", "screen": "sources state text",
        "status": "runfiles sources state text waits",
        "recording": "runfiles sources state status", "web": "screen sources state status text",
    },
    "monitor.web": {"picture": "", "server": "picture"},
    "protocol": {
        "messages": "", "gateway": "messages", "codec": "gateway messages", "hosts": "messages",
    },
    "quickstart": {
        "task": "", "cache": "task", "maker": "cache task",
    },
    "report": {
        "record": "", "trace": "record", "waste": "record", "page": "record trace waste",
    },
    "rewards": {
        "box": "box_launcher", "box_launcher": "", "box_calls": "",
        "base": "", "judge": "base", "kinds": "base box", "model": "base", "pool": "base",
        "child": "base judge kinds model pool",
    },
    "roles.learner": {
        "alarms": "", "control": "", "groups": "", "history": "", "metrics": "alarms",
        "publish": "", "step": "", "parity": "step",
        "loop": "alarms control groups history metrics parity publish step",
    },
    "scheduling": {
        "controller": "", "lengths": "", "segments": "", "groups": "", "admission": "groups", "pass_rates": "",
        "dispatch": "groups lengths", "trigger": "admission groups",
    },
    "scheduling.lengths": {
        "base": "", "learned": "base", "rules": "base", "guard": "base rules", "history": "base learned rules",
    },
    "simulate": {
        "actors": "", "answers": "", "figures": "", "fit": "actors answers", "roles": "actors answers figures",
        "settings": "actors answers fit", "world": "actors answers figures roles",
        "report": "actors figures fit settings world",
    },
    "sinks": {"feed": "", "known": ""},
    "training": {
        "earlier": "packing batch",
        "head": "", "shard_files": "", "step_stats": "",
        "value_head": "", "batch": "", "packing": "batch", "model": "", "checkpoint": "shard_files",
        "custom": "optimizers", "optimizers": "sharded", "forward": "batch earlier head model packing",
        "sharded": "",
        "trainer": "batch checkpoint custom forward head model optimizers shard_files sharded step_stats value_head",
        "ranks": "batch checkpoint custom forward head model shard_files sharded step_stats trainer value_head",
    },
    "training.ranks": {
        "meeting": "", "mesh": "", "wire": "", "loading": "", "builder": "loading mesh",
        "leader": "builder meeting mesh wire", "follower": "builder meeting mesh wire",
    },
    "weights": {
        "base": "", "tensors": "", "folders": "base tensors", "one_copy": "base", "sparse": "tensors",
        "broadcast": "base sparse tensors", "shm": "base sparse tensors",
        "factory": "base broadcast folders one_copy shm tensors", "relay": "base folders shm sparse tensors",
    },
    "weights.broadcast": {
        "group": "", "receiver": "group", "sender": "group",
    },
}


def _arrows_module():  # type: ignore[no-untyped-def]
    spec = importlib.util.spec_from_file_location("import_arrows", HERE / "test_import_arrows.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


_arrows = _arrows_module()
imports, parsed = _arrows.imports, _arrows.parsed


def name_of(path: Path) -> str:
    return ".".join(("busrl", *path.relative_to(ROOT).with_suffix("").parts)).removesuffix(".__init__")


def members(folder: Path) -> set[str]:
    """The modules and packages in a package."""
    there = (one for one in folder.iterdir() if one.suffix == ".py" or (one / "__init__.py").exists())
    return {one.stem for one in there if not one.name.startswith("__")}


def test_the_packages_have_few_files_of_a_size_that_can_be_read() -> None:
    assert len(FILES) <= MOST_FILES
    sizes = {name_of(path): len(path.read_text().splitlines()) for path in FILES}
    assert not {name: lines for name, lines in sizes.items() if lines > LONGER.get(name, MOST_LINES)}


def test_functions_are_short() -> None:
    sizes: dict[str, int] = {}
    for path in FILES:
        for node in ast.walk(parsed(path)):
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


def test_every_package_says_which_of_its_modules_may_import_which() -> None:
    folders = {path.parent for path in FILES if path.name == "__init__.py"} - {ROOT}
    several = {name_of(one / "__init__.py").removeprefix("busrl.") for one in folders if len(members(one)) > 1}
    assert several - set(INSIDE) == {"ring", "roles"}  # test_import_arrows holds those of the roles


@pytest.mark.parametrize("package", sorted(INSIDE))
def test_the_arrows_of_a_package_name_modules_that_exist_and_make_no_circle(package: str) -> None:
    arrows = {one: set(others.split()) for one, others in INSIDE[package].items()}
    assert set(arrows) | set().union(*arrows.values()) == members(ROOT.joinpath(*package.split(".")))
    while arrows:
        free = [one for one, others in arrows.items() if not others & set(arrows)]
        assert free, f"these of {package} import each other: {sorted(arrows)}"
        arrows = {one: others for one, others in arrows.items() if one not in free}


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


def test_what_tests_import_from_beside_them_has_a_name_of_its_own() -> None:
    """Those folders stand on one path: of two modules of a name, tests would get that which was put there last."""
    found = [path.stem for path in HERE.parent.glob("*/*.py")]
    names = [stem for stem in found if not stem.startswith(("test_", "conftest", "__init__"))]
    programs = {path.stem for path in (HERE.parents[1] / "tools").rglob("*.py")}
    assert not {one for one in names if names.count(one) > 1 or one in programs}
