"""Runs whose processes are forked from a template: nobody notices its death, and without one all is as before."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from checks import check_end
from harness import ROOT, Run, running

pytestmark = pytest.mark.long  # whole runs

SCRIPTED = ROOT / "configs" / "scripted.toml"
HERE = Path(__file__).resolve().parent


def template_of(run: Run) -> int:
    """Process number of the template, by its title among the children of launch; 0 while there is none."""
    assert run.child is not None
    with open(f"/proc/{run.child.pid}/task/{run.child.pid}/children") as file:
        children = map(int, file.read().split())
    titles = {Path(f"/proc/{pid}/cmdline").read_bytes().rstrip(b"\0"): pid for pid in children}
    return titles.get(b"busrl:template", 0)


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def test_forked_processes_are_children_of_launch_and_survive_their_template(tmp_path: Path, quickstart: None) -> None:
    run = Run(tmp_path / "run", steps=30)
    run.cold = True
    with running(run):
        run.until_step(3)
        assert run.child is not None
        assert {parent_of(process.pid) for process in run.processes().values()} == {run.child.pid}
        first = run.until("there was a template", lambda: template_of(run))
        os.kill(first, signal.SIGKILL)
        run.until_step(6)
        assert run.kill("learner") and run.kill("rollout/0")
        run.until("there was another template", lambda: template_of(run) not in (0, first))
        code = run.wait()
    assert "without a template" not in run.text()
    assert {name: run.restarts(name) for name in ("learner", "rollout/0", "scheduler")} == {
        "learner": 1, "rollout/0": 1, "scheduler": 0}
    check_end(run, code)


@pytest.mark.parametrize(("fault", "why"), [
    ("thread", "has started threads: there are 2"), ("exit", "the template died 3 times"),
    ("stop", "is stopped (SIGSTOP"),
])
def test_a_template_that_cannot_serve_costs_a_line(fault: str, why: str, tmp_path: Path, quickstart: None) -> None:
    environment = {"PYTHONPATH": f"{HERE / 'templates'}{os.pathsep}{ROOT}", "TEMPLATE_FAULT": fault}
    run = Run(tmp_path / "run", config=SCRIPTED, steps=3, env=environment)
    with running(run):
        code = run.wait()
    lines = [line for line in run.text().splitlines() if "processes start without a template" in line]
    assert len(lines) == 1 and why in lines[0], run.text()
    check_end(run, code)


def test_a_run_without_a_template_starts_each_process_alone(tmp_path: Path, quickstart: None) -> None:
    run = Run(tmp_path / "run", "run.template=false", config=SCRIPTED, steps=3)
    run.cold = True
    with running(run):
        run.until_step(1)
        assert template_of(run) == 0
        code = run.wait()
    check_end(run, code)
