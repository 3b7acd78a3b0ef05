"""Imports point one way: between the parts of the core, from the core to the optional parts, and to torch.

The picture in docs/architecture.md is the order of the core's parts; `ARROWS` are the imports that there are.
"""

from __future__ import annotations

import ast
import re

import pytest
from syntax import (
    FILES,
    MODULES,
    OPTIONAL,
    REPOSITORY,
    ROOT,
    Import,
    absolute,
    capability_of,
    imported,
    imports,
    modules_in_strings,
    name_of,
    part_of,
)

from busrl.topology.rewards import REWARD_KINDS

# Every part of the core and the parts of the core that it imports when it runs, from the bottom to the top.
EVERYWHERE = {"errors", "states", "capabilities", "_ring", "_wire", "_blocks", "_fields", "_adapters"}
ARROWS: dict[str, str] = {
    "errors": "", "states": "", "paths": "", "pages": "",
    "capabilities": "",
    "system": "",
    "curve": "system", "protocol": "",
    "algorithms": "", "scheduling": "",
    "faults": "protocol",
    "ring": "protocol",
    "bus": "curve protocol system",
    "ledger": "paths system",
    "topology": "algorithms scheduling",
    "data": "system topology",
    "quickstart": "ring system",
    "rewards": "data system topology",
    "weights": "system topology",
    "engines": "data paths system topology weights",
    "training": "algorithms data ledger paths system topology weights",
    "status": "ledger paths protocol ring scheduling system",
    "roles": "algorithms bus data engines faults ledger paths protocol rewards ring scheduling system topology "
             "training weights",
    "preflight": "algorithms data curve engines faults pages rewards ring scheduling system topology",
    "launcher": "bus data engines faults ledger pages paths preflight protocol ring status system topology",
    "api": "launcher pages paths preflight status system topology",
    "cli": "bus curve data engines launcher ledger pages paths preflight protocol rewards ring roles status system "
           "topology training",
}
# Optional parts that load another one: why.
LOADED: dict[str, str] = {
    "busrl.service.vllm": "engines/vllm",  # made of it, and loaded where it is
    "busrl.several.audit": "ledger/audit",  # reads as it does, and is itself loaded by `busrl audit` alone
    "busrl.service.vllm_worker": "engines/vllm",
    "busrl.several.shared_engine": "engines/vllm",  # made of it, and loaded for an entry that names it
    "busrl.hosts.folders": "weights/folders",  # itself loaded by the relay of a run with such folders alone
}

HEAVY = {"torch", "transformers", "safetensors"}
WITH_TENSORS = (  # parts that work on them
    "algorithms", "engines", "quickstart", "ranks", "routes", "teachers", "training", "weights",
)
REWARD_MODELS = {f"busrl.{kind.maker.partition(':')[0]}" for kind in REWARD_KINDS.values() if kind.has_model}
WITH_A_MODEL = {
    "busrl.roles.learner", "busrl.roles.rollout", "busrl.service.adapters", "busrl.service.engine",
    "busrl.service.export", "busrl.service.model_folders", "busrl.service.models", "busrl.service.rows",
    "busrl.service.tenants", "busrl.service.whole", "busrl.several.shared_learner", "busrl.system.device",
    *REWARD_MODELS,
}
CORE = {name: path for name, path in MODULES.items() if not capability_of(name)}


def words(table: dict[str, str], key: str) -> set[str]:
    return set(table.get(key, "").split())


def picture() -> list[set[str]]:
    """The lines of the picture in docs/architecture.md, from the top to the bottom: the parts of each."""
    page = (REPOSITORY / "docs" / "architecture.md").read_text()
    block = page.split("## Imports\n")[1].split("```")[1]
    return [set(re.findall(r"[a-z_]+", line)) for line in block.splitlines() if line.strip()]


def test_relative_imports_are_seen_as_what_they_import() -> None:
    text = "from . import near\nfrom .deep import one\nfrom ..training import trainer\nfrom .. import weights\n"
    names = {use.name for use in imported(ast.parse(text), "busrl.scheduling")}
    assert {"busrl.scheduling", "busrl.scheduling.deep", "busrl.training", "busrl.weights"} <= names
    assert absolute("busrl.roles.learner", 2, "process") == "busrl.roles.process"


def test_the_picture_shows_every_core_part_once_with_arrows_pointing_down() -> None:
    lines = picture()
    heights = {part: height for height, line in enumerate(reversed(lines)) for part in line}
    assert sum(map(len, lines)) == len(heights)
    assert set(heights) == set(ARROWS), sorted(set(heights) ^ set(ARROWS))
    arrows = [(part, other) for part, others in ARROWS.items() for other in others.split()]
    up = [(part, other) for part, other in arrows if heights[other] >= heights[part]]
    assert not up


@pytest.mark.parametrize("part", [*ARROWS])
def test_a_part_of_the_core_imports_what_its_arrows_allow(part: str) -> None:
    used: dict[str, list[Import]] = {}
    for module, path in CORE.items():
        if part_of(module) == part:
            for use in imports(path):
                other = part_of(use.name) if use.name.startswith("busrl.") and not use.typing else part
                if other not in EVERYWHERE | {part} and not capability_of(use.name):
                    used.setdefault(other, []).append(use)
    beyond = {other: uses for other, uses in used.items() if other not in words(ARROWS, part)}
    assert not beyond, f"{part} imports {beyond}: see ARROWS"
    assert not words(ARROWS, part) - set(used), f"{part} has arrows that no import follows"


def test_every_part_of_the_core_has_arrows() -> None:
    parts = {part_of(module) for module in CORE} - {""}
    assert parts <= set(ARROWS), sorted(parts - set(ARROWS))


def test_the_core_names_no_optional_part_outside_its_table() -> None:
    beyond = []
    for module, path in CORE.items():
        if module == "busrl.capabilities":
            continue
        uses = [*imports(path), *modules_in_strings(path)]
        beyond += [(module, use.line, use.name) for use in uses if capability_of(use.name)]
    assert not beyond, f"by capabilities.plugs instead: {beyond}"


def test_an_optional_part_imports_another_only_where_it_needs_it() -> None:
    beyond = []
    for module, path in MODULES.items():
        allowed = {"", capability_of(module)} | words(LOADED, module)
        if capability_of(module):
            uses = [use for use in imports(path) if not use.lazy and not use.typing]
            beyond += [(module, use.line, use.name) for use in uses if capability_of(use.name) not in allowed]
    assert not beyond, f"inside the function that needs it, or by capabilities.plug: {beyond}"


def test_every_optional_part_has_a_folder_or_a_module() -> None:
    assert all((ROOT / name / "__init__.py").is_file() or (ROOT / f"{name}.py").is_file() for name in OPTIONAL)


def test_torch_is_imported_only_where_tensors_are_worked_on() -> None:
    for module, path in MODULES.items():
        heavy = {use.name.split(".")[0] for use in imports(path) if not use.typing} & HEAVY
        allowed = part_of(module) in WITH_TENSORS or {module, module.rpartition(".")[0]} & WITH_A_MODEL
        assert allowed or not heavy, f"{module} imports {heavy}"


ROLES = {name: path for name, path in MODULES.items() if name.startswith("busrl.roles.")}
SHARED_BY_ROLES = {"process", "actor", "answers", "episodes", "intake", "ledgers", "version_pin", "probes"}


def test_a_role_imports_no_module_of_another() -> None:
    for module, path in ROLES.items():
        role = module.split(".")[2]
        used = {use.name.split(".")[2] for use in imports(path) if use.name.startswith("busrl.roles.")} - {role}
        assert used <= SHARED_BY_ROLES, f"{module} imports {sorted(used - SHARED_BY_ROLES)}"


def test_busrl_imports_no_pickle_anywhere() -> None:
    pickles = {"pickle", "cloudpickle", "dill", "marshal", "shelve"}
    assert not [name_of(path) for path in FILES if {use.name for use in imports(path)} & pickles]
