"""Which processes are forked from a run's template, and which start as programs of their own."""

from __future__ import annotations

import dataclasses
import selectors
from pathlib import Path

import pytest
from topologies import Loader

from busrl.launch.forks import Forks, Warmth, Way
from busrl.paths import RunPaths
from busrl.topology import ProcessName
from busrl.topology.schema import Process

ROLLOUTS = (
    Process("rollout"), Process("rollout", engine="mock"), Process("rollout", env={"A": "1"}),
    Process("rollout", threads=2), Process("rollout", command=("worker",)), Process("rollout", engine="vllm"),
    Process("rollout", python="/usr/bin/python3"),
)
LIGHT, MODELS = {"keeper", "scheduler", "reward/0", "rollout/1"}, {"learner", "rollout/0"}
ALONE = {"bus", "rollout/2", "rollout/3", "rollout/4", "rollout/5", "rollout/6"}


def forks_of(loaded: Loader, tmp_path: Path, *overrides: str) -> tuple[Forks, list[ProcessName]]:
    rows = (Process("learner"), Process("reward"), *ROLLOUTS)
    topology = dataclasses.replace(loaded("", *overrides), process=rows)
    forks = Forks(RunPaths.of(tmp_path), topology, lambda threads: {}, selectors.DefaultSelector(), print)
    return forks, list(topology.processes())


@pytest.mark.parametrize(("warmth", "forked", "waits"), [
    (Warmth.COLD, set(), LIGHT | MODELS), (Warmth.WARMING_LIGHT, set(), LIGHT | MODELS), (Warmth.LIGHT, LIGHT, MODELS),
    (Warmth.WARMING_ALL, set(), LIGHT | MODELS), (Warmth.ALL, LIGHT | MODELS, set()), (Warmth.OFF, set(), set()),
])
def test_a_process_waits_until_the_template_is_so_far(
    warmth: Warmth, forked: set[str], waits: set[str], loaded: Loader, tmp_path: Path
) -> None:
    forks, processes = forks_of(loaded, tmp_path)
    forks.warmth = warmth
    ways = {process.name: forks.way_of(process) for process in processes}
    assert {name for name, way in ways.items() if way is Way.FORKED} == forked
    assert {name for name, way in ways.items() if way is Way.WAITS} == waits
    assert {name for name, way in ways.items() if way is Way.ALONE} >= ALONE


def test_a_template_is_turned_off_by_its_key(loaded: Loader, tmp_path: Path) -> None:
    forks, processes = forks_of(loaded, tmp_path, "run.template=false")
    assert {forks.way_of(process) for process in processes} == {Way.ALONE}
