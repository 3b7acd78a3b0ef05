"""What the end of a process means for a run: what busrl's own code in it said, never a bare exit code; and the end of a
process that nobody waits for means nothing."""

from __future__ import annotations

import json
import os
import re
import sys
import time
from pathlib import Path
from typing import Any, cast

import pytest

from busrl.errors import NEEDS_FIX, NOT_IMPORTED, RETRY, RunInUse
from busrl.hosts.placement import Placed, Placement
from busrl.launcher import children
from busrl.launcher.processes import is_hopeless
from busrl.launcher.supervisor import Exit
from busrl.paths import RunPaths
from busrl.roles.__main__ import reported
from busrl.topology import Process, ProcessName

SINKS = ProcessName("sinks", "sinks", 0, Process("sinks"))


def ended(paths: RunPaths, process: ProcessName = SINKS, **env: str) -> Exit:
    """How a process of a run ends, as launch sees it."""
    paths.logs.mkdir(parents=True, exist_ok=True)
    child = children.start(process, paths, env=env)
    child.wait(60.0)
    how = child.ended()
    child.close()
    assert how is not None, "it has not ended"
    return how


@pytest.mark.parametrize("code", [*(f"os._exit({code})" for code in (0, 2, 3, 4, 6)), "sys.exit(5)", "os.abort()"])
def test_an_exit_code_that_user_code_gives_says_nothing_of_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str
) -> None:
    command = [sys.executable, "-c", f"import os, sys; {code}"]
    monkeypatch.setattr(children, "command_of", lambda process, paths: command)
    how = ended(RunPaths.of(tmp_path))
    assert how.verdict == RETRY
    assert ("which busrl did not give" in str(how)) == (how.code > 1)
    assert not is_hopeless(how, was_ready=True), "it is started again"


@pytest.mark.parametrize("code", [0, 1, 2, 3, 9])
def test_a_foreign_program_says_no_more_than_whether_it_ended_well(tmp_path: Path, code: int) -> None:
    foreign = ProcessName("rollout/0", "rollout", 0, Process("rollout", command=("sh", "-c", f"exit {code}")))
    how = ended(RunPaths.of(tmp_path), foreign)
    assert (how.code, how.verdict) == (code, 0 if code == 0 else RETRY) and str(how) == f"exit code {code}"


def test_a_busrl_role_reports_its_verdict_and_gives_nobody_its_listener(tmp_path: Path) -> None:
    paths = RunPaths.of(tmp_path)
    paths.topology.write_text(json.dumps({"bus": {"endpoint": "ipc"}}))  # the ring is not there
    how = ended(paths, ProcessName("bus", "bus", 0, Process("bus")))
    assert (how.code, how.verdict) == (NEEDS_FIX, NEEDS_FIX) and str(how) == "exit code 2", children.last_lines(
        paths.log("bus"))
    reader, writer = os.pipe()
    if not os.fork():
        reported(3, "", writer, os.getppid())  # a copy of the process that user code made
        os._exit(0)
    os.wait()
    reported(2, "its cause", writer, os.getpid())
    assert os.read(reader, 64) == b"2 its cause"


LATE = """
import atexit
import os

atexit.register(os.write, 2, b"nanobind: leaked 64 types!\\nSomething that no list of noise knows\\n")
"""


def test_a_role_says_its_cause_itself_whatever_its_log_ends_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sitecustomize.py").write_text(LATE)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (paths := RunPaths.of(tmp_path)).topology.write_text(json.dumps({"bus": {"endpoint": "ipc"}}))
    how = ended(paths, ProcessName("bus", "bus", 0, Process("bus")))
    assert "no list of noise" in children.last_lines(paths.log("bus"))[-1]
    assert how.why and how.why in paths.log("bus").read_text() and "noise" not in how.why


BLOCKS = """
import sys


class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name == "msgspec":
            raise ModuleNotFoundError("No module named 'msgspec'", name=name)


sys.meta_path.insert(0, Blocked())
"""


def test_an_import_that_fails_is_not_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sitecustomize.py").write_text(BLOCKS)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (paths := RunPaths.of(tmp_path)).topology.write_text("{}")
    how = ended(paths)
    assert how.verdict == NOT_IMPORTED
    assert children.last_words(paths.log("sinks")) == "ModuleNotFoundError: No module named 'msgspec'"
    assert is_hopeless(how, was_ready=False) and is_hopeless(how, was_ready=True)


@pytest.mark.parametrize("mode", ["dies_early", "dies_when_ready+always", "exits_zero"])
def test_no_end_of_the_sinks_ends_a_run(scripted: Any, mode: str) -> None:
    scripted.root.mkdir(exist_ok=True)
    (scripted.root / "leave").touch()
    scripted.start({"sinks": mode, "learner": "learner"}, crash_attempts=3)
    scripted.said("sinks is not started again, and the run goes on without it: ")
    assert "giving up: it died 3 times in a row" in scripted.log()
    scripted.finish()
    assert scripted.wait() == 0, scripted.output
    assert scripted.summary()["outcome"] == "finished"
    errors = scripted.paths.errors.read_text()
    assert '"critical"' not in errors and "the run goes on without it" in errors


@pytest.mark.parametrize(("script", "again"), [
    ("cd /no/such/folder || exit 2", True), ("echo 'busrl: a: this host is not known there' >&2; exit 2", False),
    ("echo 'busrl: 2 problems'; echo 'model.path: no such folder'; exit 2", False),
])
def test_a_host_is_given_up_for_busrl_verdicts_and_not_shell_codes(
    tmp_path: Path, script: str, again: bool
) -> None:
    paths, warned, topology = RunPaths.of(tmp_path), list[str](), cast(Any, None)
    paths.logs.mkdir(parents=True)
    command = children.spawn("host-a", ["sh", "-c", script], paths.log("host-a"), os.environ)
    host = Placed("a", running=command)
    command.wait(60.0)
    placement = Placement(topology, paths, warned.append, lambda text, level: warned.append(text), [host])
    placement.look(time.monotonic(), (), False)
    assert host.over is not again and len(warned) == 1
    assert bool(re.search("again in 1 s", warned[0])) == again, warned


def test_a_verdict_is_that_of_the_problem() -> None:
    from busrl.errors import process_code

    assert [process_code(error) for error in (ImportError("x"), ModuleNotFoundError("x"), RunInUse("x"))] == [
        NOT_IMPORTED, NOT_IMPORTED, RETRY]
