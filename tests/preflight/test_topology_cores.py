"""Which cores a process may use: what an entry can say, what follows for the others, and what launch does with it."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from busrl.errors import UserError
from busrl.launcher.children import start
from busrl.paths import RunPaths
from busrl.preflight import machine
from busrl.preflight.explain import report
from busrl.topology import Topology
from busrl.topology.schema import Process, ProcessName

Loaded = Callable[..., Topology]
Refused = Callable[..., list[str]]
HERE = frozenset(range(4))


@given(st.sets(st.integers(0, 4095), min_size=1))
def test_numbers_and_ranges_name_the_same_cores(cores: set[int]) -> None:
    ordered = sorted(cores)
    assert machine.parse_cores(",".join(map(str, ordered))) == cores
    starts = [n for n in ordered if n - 1 not in cores]
    ends = [n for n in ordered if n + 1 not in cores]
    assert machine.parse_cores(",".join(f"{a}-{b}" for a, b in zip(starts, ends))) == cores


@pytest.mark.parametrize("text", ["a", "1-", "-1", "3-1", "1,,2", "1.5"])
def test_what_is_no_list_of_cores_is_refused_with_an_example(refused: Refused, text: str) -> None:
    problems = refused("", f"process.learner.cpus={text}")
    assert any("process.1.cpus" in message and '"0-2,7"' in message for message in problems), problems


def test_a_process_has_its_cores_and_others_share_the_rest(loaded: Loaded) -> None:
    t = loaded("", "process.learner.cpus=1-2")
    rollout, learner, reward = t.process
    assert machine.cores_of(t, learner, HERE) == {1, 2}
    for entry in (rollout, reward, Process("bus")):
        assert machine.cores_of(t, entry, HERE) == {0, 3}
    assert "on core 1-2" in report(t)


def test_without_named_cores_nobody_is_bound_nor_where_all_are_taken(loaded: Loaded) -> None:
    plain, bound = loaded(), loaded("", "process.learner.cpus=0-3")
    assert all(machine.cores_of(plain, entry, HERE) == set() for entry in plain.process)
    assert machine.cores_of(bound, bound.process[0], HERE) == set()


def test_a_core_that_is_not_there_is_refused_by_name(loaded: Loaded) -> None:
    with pytest.raises(UserError, match=r'process.1.cpus = "0-9": core 4 is not there.* may use \[0, 1, 2, 3\]'):
        machine.require_cores(loaded("", "process.learner.cpus=0-9"), HERE)


def test_more_threads_than_cores_are_warned_of(loaded: Loaded) -> None:
    t = loaded("", "process.learner.cpus=0", "process.learner.threads=2")
    assert any("1 x 2 threads share 1 cores" in text for text in t.derived.warnings)


def test_a_started_process_and_its_children_run_on_its_cores(tmp_path: Path) -> None:
    before = os.sched_getaffinity(0)
    core = frozenset({max(before)})
    paths = RunPaths.of(tmp_path)
    paths.log("reward/0").parent.mkdir(parents=True)
    command = ("sh", "-c", "grep Cpus_allowed_list /proc/self/status; true")  # grep is a process of its own
    process = ProcessName("reward/0", "reward", 0, Process("reward", command=command))
    running = start(process, paths, cores=core)
    try:
        running.wait(20)
        assert (end := running.ended()) is not None and end.code == 0
        assert paths.log("reward/0").read_text().split()[-2:] == ["Cpus_allowed_list:", str(max(core))]
        assert os.sched_getaffinity(0) == before, "launch itself is not bound"
    finally:
        running.kill()
        running.close()
