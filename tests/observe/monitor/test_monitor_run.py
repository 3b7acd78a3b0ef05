"""Monitors and recorders at one real run of the quickstart, which all tests here share; the last one ends it."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from harness import Run, running
from monitor_scene import entries, finished, until

from busrl.observe.monitor.recording import End, Kind, summary
from busrl.observe.monitor.sources import living_runs
from busrl.paths import RunPaths

pytestmark = pytest.mark.long

Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture(scope="module")
def run(quickstart: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    run = Run(tmp_path_factory.mktemp("watched") / "run", steps=1_000_000)
    with running(run):
        run.until_step(3)
        yield run


@pytest.fixture(scope="module")
def held(run: Run) -> Iterator[dict[str, Any]]:
    """What stays attached while the other tests run: a recorder, and one that was stopped."""
    folder = run.directory.parent
    children = {
        name: subprocess.Popen(
            [os.sys.executable, "-m", "busrl.cli", "record", str(run.directory), "-o", str(folder / f"{name}.rec")],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for name in ("whole", "stopped")
    }
    until("both record", lambda: all((folder / f"{name}.rec").exists() for name in children))
    children["stopped"].send_signal(signal.SIGSTOP)
    yield {"folder": folder, **children}
    for child in children.values():
        child.kill()
        child.communicate()


def test_a_snapshot_of_a_real_run_tells_who_does_what(run: Run, held: dict[str, Any], started: Start) -> None:
    told = json.loads(finished(started("monitor", str(run.directory), "--once", "--json", "--seconds", "1")))
    rows = {row["name"]: row for row in told["processes"]}
    assert {"bus", "keeper", "scheduler", "learner", "reward/0", "rollout/0", "validator"} <= set(rows)
    pids = {process.label: process.pid for process in run.processes().values()}
    assert {name: row["pid"] for name, row in rows.items()} == pids
    assert all(row["state"] == "ready" and not row["late"] for row in rows.values())
    assert told["state"] == "running" and told["step"] >= 3
    assert 0 <= told["groups"]["ready"] <= told["groups"]["open"] > 0
    rewards = {row["step"]: row["reward"] for row in run.metrics()}
    newest = told["newest_step"]
    assert newest["reward"] == pytest.approx(rewards[newest["step"]]) and 0 <= newest["age_max"] <= 2
    by_name = told["messages"]["by_name"]
    assert by_name["DATA_GENERATED"]["count"] > 0 and by_name["HEARTBEAT"]["count"] > 0
    assert told["messages"]["missed"] == told["messages"]["malformed"] == 0
    assert told["samples_per_s"] > 0 and told["tokens_per_s"] > 0 and told["steps_per_min"] > 0


def test_a_process_that_was_killed_and_started_again_is_shown_as_such(run: Run, started: Start) -> None:
    def restarts() -> int:
        told = json.loads(finished(started("monitor", str(run.directory), "--once", "--json", "--seconds", "0.1")))
        return next((row["restarts"] for row in told["processes"] if row["name"] == "reward/0"), 0)

    assert restarts() == 0
    os.kill(run.pid("reward/0"), signal.SIGKILL)
    until("the restart is told", lambda: restarts() == 1)


def test_a_real_run_is_found_without_a_name(run: Run) -> None:
    assert run.paths.root in list(living_runs())


def test_a_killed_monitor_is_not_noticed_by_the_run(run: Run, held: dict[str, Any], started: Start) -> None:
    before = {name: (process.index, process.pid) for name, process in run.processes().items()}
    names = sorted(path.name for path in run.paths.root.rglob("*.lock")), sorted(os.listdir(run.paths.runtime_dir))
    child = started("monitor", str(run.directory))
    assert child.stdout is not None
    until("its first line", child.stdout.readline)
    child.kill()
    child.wait()
    step = run.step()
    run.until("it goes on", lambda: run.step() > step + 2)
    assert {name: (process.index, process.pid) for name, process in run.processes().items()} == before
    assert names == (
        sorted(path.name for path in run.paths.root.rglob("*.lock")), sorted(os.listdir(run.paths.runtime_dir))
    )


def test_a_recording_of_a_real_run_shows_it_again(
    run: Run, held: dict[str, Any], started: Start, short_dir: Path
) -> None:
    path, bind = held["folder"] / "part.rec", f"ipc://{short_dir}/bus.sock"

    def recorded() -> bool:  # it is written still, block by block: what is there can be read
        shutil.copy(held["folder"] / "whole.rec", path)
        return summary(path)["messages"].get("LEARNER_STATE_UPDATE", 0) > 3

    run.until("some steps are in the recording", recorded)
    player = started("replay", str(path), "--speed", "max", "--bind", bind)
    told = json.loads(finished(started("monitor", bind, "--once", "--json")))
    finished(player)
    counted = {name: counts["count"] for name, counts in told["messages"]["by_name"].items()}
    assert counted == summary(path)["messages"] and counted["LEARNER_STATE_UPDATE"] > 0
    assert told["step"] >= 3 and told["name"] == "quickstart"
    assert {row["name"] for row in told["processes"]} >= {"learner", "rollout/0"}
    assert told["messages"]["missed"] == 0


def test_run_and_recording_end_in_order_despite_a_stopped_recorder(
    run: Run, held: dict[str, Any]
) -> None:
    assert run.child is not None
    run.child.send_signal(signal.SIGTERM)
    assert run.wait() == 143
    report = run.audit()
    assert report.counts.lost == 0 and report.counts.trained_twice == 0 and not report.errors, report
    assert report.accidents == {}
    assert all(run.restarts(name) == 0 for name in ("bus", "learner", "scheduler", "rollout/0"))
    assert "the run has ended" in finished(held["whole"])
    records = entries(held["folder"] / "whole.rec")
    end = msgspec.msgpack.decode(records[-1].body, type=End)
    assert records[-1].kind == Kind.END and end.missed == 0
    updates = [record.body for record in records if record.topic == b"LEARNER_STATE_UPDATE/"]
    steps = [msgspec.msgpack.decode(body)["step"] for body in updates]
    assert steps == list(range(steps[0], steps[-1] + 1)) and steps[-1] == run.step()
    assert any(record.topic == b"STOP/" for record in records)
    assert not RunPaths.of(run.directory).ring_file.exists()
    held["stopped"].send_signal(signal.SIGCONT)
    assert "the run has ended" in finished(held["stopped"])
