"""Every file in configs/ loads, and the reference names every key with its default."""

from __future__ import annotations

import dataclasses
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from busrl.preflight.explain import dry_run, report
from busrl.preflight.load import load
from busrl.topology import Topology
from busrl.topology.reader import show
from tools.reference import topology_page

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

CONFIGS = Path(__file__).resolve().parents[2] / "configs"


@pytest.mark.parametrize(
    "path", sorted(set(CONFIGS.glob("*.toml")) - set(CONFIGS.glob("reference-*.toml"))), ids=lambda path: path.name
)
def test_every_file_in_configs_loads_and_survives_its_json(path: Path) -> None:
    topology = load(path)
    assert Topology.from_json(topology.to_json()) == topology
    assert str(path) in report(topology)


def test_the_reference_is_what_the_declarations_say(tmp_path: Path) -> None:
    topology_page.write(tmp_path)
    pages = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert pages == {path.name: path.read_text() for path in CONFIGS.glob("reference*.toml")}


def test_the_first_screen_of_the_reference_is_a_whole_topology(tmp_path: Path) -> None:
    first = topology_page.text().partition("\n\n")[0]
    assert first.count("\n") < 45
    assert len(re.findall(r"^\w+ = ", first, re.M)) == len(topology_page.NEEDED) + len(topology_page.COMPANIONS) == 19
    (tmp_path / "copied.toml").write_text(first)
    assert load(tmp_path / "copied.toml").process == load(CONFIGS / "reference.toml").process


def keys_of(table: Any, name: str = "") -> Iterator[str]:
    """Dotted names of all keys of parsed TOML."""
    for key, value in table.items():
        if isinstance(value, dict) and value:
            yield from keys_of(value, f"{name}{key}.")
        else:
            yield f"{name}{key}"


def test_the_files_of_the_reference_hold_every_key_once_with_its_default(tmp_path: Path) -> None:
    lines = topology_page.text().splitlines()
    cut = lines.index("")
    rest = "\n".join(line[1:] if re.match(r"#(\[|\w+ = )", line) else line for line in lines[cut:])
    one_model, heading, several = rest.partition("# Several models in one run")
    others = map(topology_page.apart, topology_page.APART)
    parts = ["\n".join(lines[:cut]), one_model, heading + several, *others]
    parsed = [tomllib.loads(part) for part in parts]
    keys = [key for part in parsed for key in keys_of(part)]
    assert len(keys) == len(set(keys))
    overrides = []
    for part in parsed:
        part.pop("process", None)
        overrides += [f"{key}={show(value)}" for key, value in leaves(part) if not is_example(value)]
    short = tmp_path / "short.toml"
    short.write_text('[model]\npath = "tiny:sort"\n[data]\ntrain = "tiny:sort"\n[learner]\nlr = 2e-4\n')
    all_given, default = load(short, overrides), load(short)
    for field in dataclasses.fields(Topology):
        if field.name not in ("source", "derived", "overrides"):
            assert getattr(all_given, field.name) == getattr(default, field.name), field.name


def is_example(value: Any) -> bool:
    """Whether it is an array of tables, which is empty by default."""
    return isinstance(value, list) and bool(value) and isinstance(value[0], dict)


def leaves(table: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted names and values of all keys."""
    for key in keys_of(table, name):
        value = table
        for part in key.split("."):
            value = value[part]
        yield key, value


def test_the_quickstart_is_the_comparison_that_the_documents_describe() -> None:
    topology = load(CONFIGS / "quickstart.toml")
    assert (topology.learner.trigger.n_min, topology.groups.size, topology.run.max_steps) == (32, 8, 50)
    assert (topology.weights.mode, topology.weights.max_staleness) == ("batch-async", 2)
    assert topology.scheduler.policy == "fifo"
    names = [process.name for process in topology.processes()]
    assert names == ["bus", "keeper", "scheduler", "learner", "reward/0", "rollout/0", "validator"]
    assert not topology.derived.warnings


def test_a_dry_run_has_one_line_of_settings_per_process() -> None:
    topology = load(CONFIGS / "quickstart.toml", ["process.rollout.count=3"])
    lines = [line for line in dry_run(topology).splitlines() if line.startswith('{"process"')]
    assert len(lines) == len(topology.processes()) == 9
    rollouts = [process.name for process in topology.processes() if process.role == "rollout"]
    assert rollouts == [f"rollout/{k}" for k in range(3)]
