"""Which processes are forked from a run's template, and which start as programs of their own."""

from __future__ import annotations

import dataclasses
import os
import selectors
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import pytest
from topologies import Loader

from busrl.launcher import forks as forks_module
from busrl.launcher.children import common_environment
from busrl.launcher.forks import Forks, Patience, Warmth, Way
from busrl.launcher.summary import EventLog, Journal
from busrl.paths import RunPaths
from busrl.system.template import TemplateRefused
from busrl.topology import ProcessName
from busrl.topology.schema import Process

ROLLOUTS = (
    Process("rollout"), Process("rollout", engine="mock"), Process("rollout", env={"A": "1"}),
    Process("rollout", threads=2), Process("rollout", command=("worker",)), Process("rollout", engine="vllm"),
    Process("rollout", python="/usr/bin/python3"),
)
LIGHT, MODELS = {"keeper", "scheduler", "reward/0", "rollout/1"}, {"learner", "rollout/0", "rollout/3"}
ALONE = {"bus", "rollout/2", "rollout/4", "rollout/5", "rollout/6"}


class Scene(NamedTuple):
    forks: Forks
    processes: list[ProcessName]
    said: list[str]
    selector: selectors.BaseSelector


ROWS = (Process("learner"), Process("reward"), *ROLLOUTS)


def forks_of(
    loaded: Loader, tmp_path: Path, *overrides: str, rows: tuple[Process, ...] = ROWS, **variables: str
) -> Scene:
    topology = dataclasses.replace(loaded("", *overrides), process=rows)
    paths = RunPaths.of(tmp_path)
    paths.log("launch").parent.mkdir()
    said = list[str]()
    journal = Journal(paths, said.append, EventLog(paths, (), ()))
    selector = selectors.DefaultSelector()
    forks = Forks(paths, topology, {**common_environment(1, paths), **variables}, selector, journal)
    return Scene(forks, list(topology.processes()), said, selector)


@pytest.mark.parametrize(("warmth", "forked", "waits"), [
    (Warmth.COLD, set(), LIGHT | MODELS), (Warmth.WARMING_LIGHT, set(), LIGHT | MODELS), (Warmth.LIGHT, LIGHT, MODELS),
    (Warmth.WARMING_ALL, set(), LIGHT | MODELS), (Warmth.ALL, LIGHT | MODELS, set()), (Warmth.OFF, set(), set()),
])
def test_a_process_waits_until_the_template_is_so_far(
    warmth: Warmth, forked: set[str], waits: set[str], loaded: Loader, tmp_path: Path
) -> None:
    forks, processes, _, _ = forks_of(loaded, tmp_path)
    forks.warmth = warmth
    ways = {process.name: forks.way_of(process) for process in processes}
    assert {name for name, way in ways.items() if way is Way.FORKED} == forked
    assert {name for name, way in ways.items() if way is Way.WAITS} == waits
    assert {name for name, way in ways.items() if way is Way.ALONE} >= ALONE


def test_the_door_of_a_service_waits_for_no_library_of_models(loaded: Loader, tmp_path: Path) -> None:
    rows = (Process("tinker"), Process("tuner"), Process("rollout"))
    forks, processes, _, _ = forks_of(loaded, tmp_path, rows=rows)
    forks.warmth = Warmth.LIGHT
    ways = {process.name: forks.way_of(process) for process in processes}
    assert (ways["tinker"], ways["tuner"], ways["rollout/0"]) == (Way.FORKED, Way.WAITS, Way.WAITS)


def test_a_template_is_turned_off_by_its_key(loaded: Loader, tmp_path: Path) -> None:
    forks, processes, _, _ = forks_of(loaded, tmp_path, "run.template=false")
    assert {forks.way_of(process) for process in processes} == {Way.ALONE}


@pytest.mark.parametrize("variable", ["OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY", "KMP_AFFINITY"])
def test_variables_that_bind_threads_to_cores_turn_a_template_off(
    variable: str, loaded: Loader, tmp_path: Path
) -> None:
    forks, processes, said, _ = forks_of(loaded, tmp_path, **{variable: "1"})
    assert {forks.way_of(process) for process in processes} == {Way.ALONE}
    assert len(said) == 1 and f"{variable} is set, which binds a process to cores" in said[0]


def test_a_closed_template_is_gone_and_wakes_nobody(loaded: Loader, tmp_path: Path) -> None:
    forks, processes, _, selector = forks_of(loaded, tmp_path)
    forks.look(processes)
    template = forks.pid
    assert template and list(selector.get_map())
    forks.close()
    assert not list(selector.get_map()) and forks.pid == 0
    assert {forks.way_of(process) for process in processes} == {Way.ALONE}
    with pytest.raises(ProcessLookupError):
        os.kill(template, 0)


def test_a_template_whose_imports_use_no_cpu_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forks_module, "IDLE_S", 0.3)
    with subprocess.Popen(["sleep", "60"]) as waiting:
        patience = Patience(waiting.pid)
        with pytest.raises(TemplateRefused, match=rf"pid {waiting.pid}\) imports, and has used no CPU for 0.3 s"):
            look_for_a_minute(patience)
        waiting.kill()


def test_a_template_whose_imports_never_end_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forks_module, "MOST_CPU_S", 0.2)
    monkeypatch.setattr(forks_module, "SLOW_S", 0.0)
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as spinning:
        patience = Patience(spinning.pid)
        assert "still imports after 0 s; processes wait" in patience.look()
        with pytest.raises(TemplateRefused, match=r"has used 0\.2 CPU seconds to import"):
            look_for_a_minute(patience)
        spinning.kill()


def look_for_a_minute(patience: Patience) -> None:
    end = time.monotonic() + 60.0
    while time.monotonic() < end:
        assert patience.look() == ""
        time.sleep(0.02)
