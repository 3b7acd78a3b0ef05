"""Each example does all the work of its role in a real run, while broker, keeper or itself are killed."""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from checks import check_end
from harness import ROOT, Run, running
from outside import EXAMPLES, finished, node, words_of, workers

ACTOR = [sys.executable, str(EXAMPLES / "python-actor" / "actor.py")]


def run_without(tmp_path: Path, *roles: str, steps: int) -> Run:
    """A run that expects these roles from outside."""
    return Run(tmp_path / "run", *[f"process.{role}.count=0" for role in roles], "limits.lease_s=5", steps=steps)


def wait_for_bus(run: Run) -> str:
    """The run directory, once there is something to connect to."""
    run.until("there was a broker", lambda: run.pid("bus"))
    return str(run.directory)


def counts(run: Run) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(run.paths.gateway.read_text())["workers"]
    return found


@pytest.mark.slow
@pytest.mark.parametrize("which", ["python", "reward", "rollout"])
def test_an_example_goes_on_when_broker_and_keeper_are_killed(
    quickstart: None, request: pytest.FixtureRequest, tmp_path: Path, which: str
) -> None:
    command = ACTOR if which == "python" else node(request.getfixturevalue("javascript"), which)
    run = run_without(tmp_path, "reward" if which == "python" else which, steps=40)
    with running(run):
        where = wait_for_bus(run)
        with workers([*command, where, "far"]) as [child]:
            for step, victim in ((3, "keeper"), (8, "bus"), (13, "keeper"), (18, "bus")):
                run.until_step(step)
                run.kill(victim)
            check_end(run, run.wait())
            assert finished(words_of(child)) >= 40 * 8 * 4
    assert not run.audit().accidents and counts(run)["far"]["joined"] == 1
    assert run.restarts("keeper") == 2 and run.restarts("bus") == 2


@pytest.mark.slow
def test_a_remote_rollout_and_one_of_busrls_own_continue_each_others_answers(
    quickstart: None, javascript: Path, tmp_path: Path
) -> None:
    settings = ("segments.length=4", "segments.max_segments=14", "generation.max_new_tokens=40", "limits.lease_s=5")
    run = Run(tmp_path / "run", *settings, "generation.max_batch=16", steps=15)
    with running(run):
        where = wait_for_bus(run)
        with workers([*node(javascript, "rollout"), where, "far"]) as [child]:
            run.until_step(5)
            run.kill("rollout/0")
            check_end(run, run.wait())
            assert finished(words_of(child)) > 100
    told = counts(run)["far"]
    assert not run.audit().accidents and told["answered"] > 100 and "refused" not in told, told
    assert max(row["segments_max"] for row in run.metrics()) > 3


@pytest.mark.slow
def test_a_worker_killed_and_restarted_under_its_name_costs_one_retry(
    quickstart: None, tmp_path: Path
) -> None:
    run = run_without(tmp_path, "reward", steps=20)
    with running(run):
        where = wait_for_bus(run)
        with workers([*ACTOR, where, "far"]) as [first]:
            run.until_step(5)
            first.kill()
        with workers([*ACTOR, where, "far"]) as [second]:
            check_end(run, run.wait())
            finished(words_of(second))
    assert not run.audit().accidents and counts(run)["far"]["joined"] == 2


@pytest.mark.slow
def test_a_worker_continues_after_the_whole_run_is_killed_and_restarted(quickstart: None, tmp_path: Path) -> None:
    run = run_without(tmp_path, "reward", steps=20)
    with running(run):
        where = wait_for_bus(run)
        with workers([*ACTOR, where, "far"]) as [child]:
            run.until_step(5)
            run.kill_launch()
            run.start()
            check_end(run, run.wait())
            finished(words_of(child))
    assert not run.audit().accidents and counts(run)["far"]["joined"] == 1, "its entry outlived keeper and launch"


@pytest.mark.slow
def test_launch_starts_and_restarts_a_worker_named_in_the_topology(
    quickstart: None, tmp_path: Path
) -> None:
    text = (ROOT / "configs" / "quickstart.toml").read_text()
    topology = tmp_path / "named.toml"
    topology.write_text(f'{text}\n[[process]]\nrole = "reward"\ncommand = {json.dumps(ACTOR)}\n')
    run = Run(tmp_path / "run", config=topology, steps=20)
    with running(run):
        run.until_step(5)
        [pid] = [pid for pid in children_of(run) if "actor.py" in Path(f"/proc/{pid}/cmdline").read_text()]
        os.kill(pid, signal.SIGKILL)
        check_end(run, run.wait())
    assert run.restarts("reward/0") == 1 and counts(run)["reward-0"]["joined"] == 2
    assert "reward/0 (pid" in run.paths.log("launch").read_text()


def children_of(run: Run) -> list[int]:
    assert run.child is not None
    return [int(pid) for pid in Path(f"/proc/{run.child.pid}/task/{run.child.pid}/children").read_text().split()]


class Lossy:
    """Mixed into the Python example: a share of what it sends and hears is lost, some comes twice."""

    chance = random.Random(7)
    loss = 0.3

    def send(self, kind: str, **fields: Any) -> None:
        for _ in range(1 + (self.chance.random() < 0.1)):
            if self.chance.random() >= self.loss:
                super().send(kind, **fields)  # type: ignore[misc]

    def receive(self, message: dict[str, Any]) -> bool:
        return self.chance.random() >= self.loss and super().receive(message)  # type: ignore[misc,no-any-return]


@pytest.mark.slow
def test_every_answer_is_judged_once_despite_a_third_of_messages_lost(
    quickstart: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES / "python-actor"))
    from actor import Actor

    run = run_without(tmp_path, "reward", steps=20)
    with running(run):
        worker = type("LossyActor", (Lossy, Actor), {})(wait_for_bus(run), "lossy")
        thread = threading.Thread(target=worker.run, daemon=True)
        thread.start()
        check_end(run, run.wait())
        worker.stopping = worker.stopping or "the test is over"
        thread.join(20)
        assert not thread.is_alive()
    told = counts(run)["lossy"]
    assert not run.audit().accidents and told["rewarded"] >= 20 * 8 * 4 and "expired" not in told
