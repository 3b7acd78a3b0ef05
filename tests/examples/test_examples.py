"""The examples in real runs: workers in other languages do the work, while broker and keeper are killed."""

from __future__ import annotations

import json
import random
import re
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from checks import check_end
from conftest import EXAMPLES, words_of, workers
from harness import Run, running

from busrl.launch.status import status

ACTOR = [sys.executable, str(EXAMPLES / "python-actor" / "actor.py")]


def node(javascript: Path, one: str) -> list[str]:
    return ["node", str(javascript / f"js-{one}" / f"{one}.mjs")]


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


def finished(text: str) -> int:
    """The number of tasks that a worker says it finished."""
    match = re.search(r": (\d+) (tasks finished|answers judged); leaving: STOP", text)
    assert match, text
    return int(match[1])


def test_workers_in_javascript_and_bare_python_serve_a_whole_run(
    quickstart: None, javascript: Path, tmp_path: Path
) -> None:
    run = run_without(tmp_path, "reward", "rollout", steps=12)
    with running(run):
        where = wait_for_bus(run)
        js_reward, js_rollout = (node(javascript, one) for one in ("reward", "rollout"))
        with workers([*js_reward, where, "js-judge"], [*js_rollout, where, "js-gen"], [*ACTOR, where, "py"]) as started:
            run.until_step(3)
            shown = status(run.directory)
            check_end(run, run.wait())
            judged_js, generated, judged_py = (finished(words_of(child)) for child in started)
    for name in ("js-judge", "js-gen", "py"):
        assert re.search(rf"^  {name} +elsewhere +remote, holds \d+", shown, re.MULTILINE), shown
    assert judged_js > 0 and judged_py > 0 and judged_js + judged_py >= 12 * 64 and generated >= 12 * 64
    assert not run.audit().accidents and "refused" not in str(counts(run))


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
            assert finished(words_of(child)) >= 40 * 64
    assert not run.audit().accidents and counts(run)["far"]["joined"] == 1
    assert run.restarts("keeper") == 2 and run.restarts("bus") == 2


@pytest.mark.slow
def test_a_worker_that_is_killed_and_started_again_under_its_name_costs_a_retry(
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


class Lossy:
    """Mixed into the Python example: a share of what it sends and hears is lost, some comes twice."""

    chance = random.Random(7)
    loss = 0.3

    def send(self, kind: str, **fields: Any) -> None:
        for _ in range(1 + (self.chance.random() < 0.1)):
            if self.chance.random() >= self.loss:
                super().send(kind, **fields)  # type: ignore[misc]

    def heard(self, message: dict[str, Any]) -> bool:
        return self.chance.random() >= self.loss and super().heard(message)  # type: ignore[misc,no-any-return]


@pytest.mark.slow
def test_with_a_third_of_all_messages_lost_on_both_ways_every_answer_is_judged_once(
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
    assert not run.audit().accidents and told["rewarded"] >= 20 * 64 and "expired" not in told
