"""What launch writes down: deaths with restarts, and ERRORs of programs from outside; both are read in `status`."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from busrl.bus import Endpoint
from busrl.launcher.summary import MOST_SENDERS, EventLog
from busrl.launcher.supervisor import Child
from busrl.paths import RunPaths
from busrl.protocol import messages as m
from busrl.status.view import status
from busrl.system.clocks import OTHERS
from busrl.topology.schema import Limits

PATIENCE = Limits(ready_s=60.0, progress_s=60.0, restart_attempts=3, crash_attempts=0)


def filed(paths: RunPaths) -> list[dict[str, object]]:
    return [json.loads(line) for line in paths.errors.read_text().splitlines()] if paths.errors.exists() else []


@pytest.fixture
def paths(tmp_path: Path) -> RunPaths:
    return RunPaths.of(tmp_path)


def test_a_killed_process_is_a_problem_in_status_and_counts_its_restarts(scripted) -> None:
    scripted.start({"rollout/0": "well", "learner": "learner"})
    os.kill(scripted.ready("rollout/0"), signal.SIGKILL)
    pid = scripted.ready("rollout/0", 2)
    scripted.until(lambda: "restarted 1×" in status(scripted.root), "the restart to be counted")
    shown = status(scripted.root)
    [line] = [text for text in shown.splitlines() if f"pid {pid}" in text]
    assert "rollout/0" in line and "restarted 1×" in line, shown
    assert "launch warning: rollout/0 (pid" in shown and "signal SIGKILL; starting it again" in shown, shown
    scripted.finish()
    assert scripted.wait() == 0, scripted.output
    assert "restarted: rollout/0 1×" in status(scripted.root)
    processes = json.loads(scripted.paths.supervisor.read_text())["processes"]
    assert processes["rollout/0"]["restarts"] == 1 and processes["learner"]["restarts"] == 0
    assert "SIGKILL" in processes["rollout/0"]["latest"]


def test_an_error_from_outside_is_shown_filed_and_counted_in_status(scripted) -> None:
    scripted.start({"bus": "bus", "learner": "learner"})
    scripted.ready("learner")
    texts = {"warning": "thin ice", "error": "a crack", "critical": "\x1b[2Jit broke", "nonsense": "who knows"}

    def counted() -> bool:
        for severity, text in texts.items():
            endpoint.send(m.Error(severity=severity, where="pond", text=text))
        shown = status(scripted.root)
        severities = ("critical", "error", "warning")
        return "ERROR from my-actor: " in shown and all(severity in shown for severity in severities)

    with Endpoint("my-actor", scripted.paths.frontend, scripted.paths.backend) as endpoint:
        endpoint.ready(60.0)
        scripted.until(counted, "status to count the errors")
    scripted.finish()
    assert scripted.wait() == 0, scripted.output
    shown = status(scripted.root)
    assert "my-actor" in shown and "nonsense" not in shown and "\x1b" not in shown + scripted.output + scripted.log()
    # The first of them that launch heard is shown at once; a message may be lost while the connections come up.
    begun = ("thin ice", "a crack", "it broke", "who knows")
    assert any(f"my-actor (pond): {text}" in scripted.output for text in begun)
    assert {"my-actor"} == {row["process"] for row in filed(scripted.paths)}
    assert all(row["severity"] in m.SEVERITIES for row in filed(scripted.paths))


def test_a_flood_prints_occasional_lines_and_every_error_enters_the_count(paths: RunPaths) -> None:
    chronicle = EventLog(paths, [], [])
    for number in range(1000):
        chronicle.received(m.Error(sender="loud", severity="error", text=f"number {number}"), now=0.001 * number)
    chronicle.tick(6.0)
    texts = [row["text"] for row in filed(paths)]
    assert texts == ["number 0", "999 more from it, the latest: number 999"]
    assert chronicle.plain()["errors_from_outside"]["loud"]["error"] == 1000


def test_many_names_are_one_after_the_first_ones(paths: RunPaths) -> None:
    chronicle = EventLog(paths, [], [])
    for number in range(1000):
        chronicle.received(m.Error(sender=f"name-{number}", severity="odd", text="x"), now=0.0)
    counted = chronicle.plain()["errors_from_outside"]
    assert len(counted) == MOST_SENDERS + 1 and counted[OTHERS]["warning"] == 1000 - MOST_SENDERS
    assert len(filed(paths)) == MOST_SENDERS + 1


def test_errors_of_busrl_processes_are_shown_and_left_for_them_to_file(paths: RunPaths) -> None:
    chronicle = EventLog(paths, [Child("reward/0", PATIENCE)], ["reward/0"])
    error = m.Error(sender="reward-0", severity="error", where="judge", text="first\nsecond")
    assert chronicle.received(error, 0.0) == ["error: reward-0 (judge): first"]
    assert filed(paths) == [] and chronicle.plain()["errors_from_outside"] == {}
