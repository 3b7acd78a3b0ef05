"""Every file in configs/ loads, and the reference names every key with its default."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from busrl.topology import Topology, load, reference
from busrl.topology.check import dry_run, report

CONFIGS = Path(__file__).resolve().parents[2] / "configs"


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.toml")), ids=lambda path: path.name)
def test_every_file_in_configs_loads_and_survives_its_json(path: Path) -> None:
    topology = load(path)
    assert Topology.from_json(topology.to_json()) == topology
    assert str(path) in report(topology)


def test_the_reference_is_what_the_declarations_say() -> None:
    assert (CONFIGS / "reference.toml").read_text() == reference.text()


def test_the_reference_holds_the_defaults(tmp_path: Path) -> None:
    given = load(CONFIGS / "reference.toml")
    short = tmp_path / "short.toml"
    roles = "".join(f'[[process]]\nrole = "{role}"\n' for role in ("rollout", "reward", "learner", "validator"))
    short.write_text(f'[model]\npath = "tiny:sort"\n[data]\ntrain = "tiny:sort"\n{roles}')
    default = load(short)
    for field in dataclasses.fields(Topology):
        if field.name not in ("source", "derived"):
            assert getattr(given, field.name) == getattr(default, field.name), field.name
    assert dataclasses.replace(given.derived, warnings=()) == dataclasses.replace(default.derived, warnings=())


def test_the_quickstart_is_the_comparison_that_the_documents_describe() -> None:
    topology = load(CONFIGS / "quickstart.toml")
    assert (topology.learner.trigger.n_min, topology.groups.size, topology.run.max_steps) == (32, 8, 150)
    assert (topology.weights.mode, topology.weights.max_staleness) == ("batch-async", 2)
    assert topology.scheduler.policy == "fifo"
    names = [process.name for process in topology.processes()]
    assert names == ["bus", "keeper", "scheduler", "learner", "reward/0", "rollout/0", "validator"]
    assert not topology.derived.warnings


def test_a_dry_run_has_one_line_of_settings_per_process() -> None:
    topology = load(CONFIGS / "quickstart.toml", ["process.rollout.count=3"])
    lines = [line for line in dry_run(topology).splitlines() if line.startswith('{"process"')]
    assert len(lines) == len(topology.processes()) == 9
    assert [one.name for one in topology.processes() if one.role == "rollout"] == [f"rollout/{k}" for k in range(3)]
