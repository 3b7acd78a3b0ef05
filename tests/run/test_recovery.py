"""Recovery beyond the death of one process: deadly prompts, second ones of a kind, neighbours, a suspended machine."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from checks import check_end
from harness import ROOT, Run, read_lines, running

from busrl.errors import RingError
from busrl.ring import Fates, OfdLock, Process, Ring

DEADLY = 3  # a member of the very first group
REROLL = DEADLY + 8  # uid + G


@pytest.mark.slow
def test_a_prompt_that_kills_its_engine_is_quarantined_without_hurting_others(
    tmp_path: Path, quickstart: None
) -> None:
    command = [sys.executable, str(Path(__file__).with_name("deadly_rollout.py"))]
    run = Run(
        tmp_path / "run", f"process.rollout.command={json.dumps(command)}",
        f"process.rollout.env={{DEADLY_UID='{DEADLY}', PYTHONPATH='{ROOT}'}}", steps=12,
    )
    with running(run):
        code = run.wait()
    assert code == 0, run.tail()
    report = run.audit()
    assert not report.errors and report.counts.lost == 0 and report.counts.trained_twice == 0, report
    assert sum(report.accidents.values()) == 1, report.accidents
    fates = Fates(str(run.paths.fates), read_only=True)
    assert chr(fates.get(DEADLY)) == "P" and chr(fates.get(REROLL)) in "Tf", (fates.get(DEADLY), fates.get(REROLL))
    deaths = re.findall(r"dying of \d+ among (\d+)", run.paths.log("rollout/0").read_text())
    assert len(deaths) == run.restarts("rollout/0") == 4, deaths
    assert [int(death) for death in deaths[2:]] == [1, 1] and min(int(death) for death in deaths[:2]) > 1, deaths
    assert any(f"sample {DEADLY} is poison" in line["text"] for line in read_lines(run.paths.errors))


@contextmanager
def by_hand(run: Run, name: str) -> Iterator[subprocess.Popen[bytes]]:
    """A second process of a name, as a person might start it."""
    with open(run.paths.logs / f"second-{name}.log", "wb") as output:
        child = subprocess.Popen(
            [sys.executable, "-m", "busrl.roles", str(run.directory), name], cwd=ROOT, stdout=output, stderr=output
        )
    try:
        yield child
    finally:
        with suppress(ProcessLookupError):
            child.kill()
        child.wait()


def entry(run: Run, pid: int) -> Process | None:
    """A process in the process table."""
    try:
        ring = Ring.attach(run.paths.ring_name, read_only=True)
    except RingError:
        return None
    try:
        return next((process for process in ring.processes() if process.pid == pid), None)
    finally:
        ring.close()


def waits(run: Run, pid: int, said: str) -> bool:
    process = entry(run, pid)
    return process is not None and process.activity == said


def is_ready(run: Run, pid: int) -> bool:
    process = entry(run, pid)
    return process is not None and process.state == "ready" and not process.activity


def holder(run: Run, name: str) -> int:
    return OfdLock(str(run.paths.lock(name))).holder() or 0


def take_over(run: Run, name: str, second: subprocess.Popen[bytes]) -> None:
    """The second one waits as long as the first lives, and then works in its place."""
    first = holder(run, name)
    run.until("the second one to wait", lambda: waits(run, second.pid, f"waits for pid {first}"))
    os.kill(first, signal.SIGKILL)
    run.until("the second one to have its turn", lambda: holder(run, name) == second.pid)
    run.until("the second one to be at work", lambda: is_ready(run, second.pid))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bus", "keeper", "scheduler"])
def test_a_waiting_second_process_takes_over_and_is_killed_if_it_stalls(
    name: str, tmp_path: Path, quickstart: None
) -> None:
    run = Run(tmp_path / "run", "limits.progress_s=5", steps=150)
    with running(run):
        run.until_step(3)
        with by_hand(run, name) as second:
            take_over(run, name, second)
            second.send_signal(signal.SIGSTOP)
            assert second.wait(60) == -signal.SIGKILL
        code = run.wait()
    check_end(run, code)
    text = run.text()
    assert f"killing {name} (pid {second.pid})" in text and "this launch did not start it" in text, text
    processes = run.summary()["processes"]
    assert processes[name]["restarts"] == 1
    assert not any(process.get("killed_for_silence") for process in processes.values())


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_second_learner_waits_and_continues_from_the_first_log(tmp_path: Path, quickstart: None) -> None:
    run = Run(tmp_path / "run", steps=120)  # so many that the second one is there before the first has made them all
    with running(run):
        run.until_step(3)
        with by_hand(run, "learner") as second:
            take_over(run, "learner", second)
            run.until_step(run.step() + 5)
        assert second.returncode == -signal.SIGKILL  # and the one that launch started meanwhile has its turn
        code = run.wait(400)
    check_end(run, code)
    assert run.restarts("learner") == 1


@pytest.mark.slow
def test_two_runs_on_one_host_continue_side_by_side_without_meeting(tmp_path: Path, quickstart: None) -> None:
    runs = [Run(tmp_path / str(seed), f"run.seed={seed}", steps=12) for seed in (1, 2)]
    with running(runs[0]), running(runs[1]):
        for run in runs:
            run.until_step(2)
        rings = [Ring.attach(run.paths.ring_name, read_only=True) for run in runs]
        pids = [{process.pid for process in ring.processes()} for ring in rings]
        assert rings[0].uuid != rings[1].uuid and not pids[0] & pids[1] and len(pids[0]) == len(pids[1]) == 7
        for ring in rings:
            ring.close()
        codes = [run.wait() for run in runs]
    for run, code in zip(runs, codes):
        check_end(run, code)
    prompts = [{sample["prompt"] for sample in read_lines(run.paths.samples)} for run in runs]
    assert all(prompts) and prompts[0] != prompts[1]


@contextmanager
def suspended(run: Run) -> Iterator[None]:
    """The whole run stands still, launch before its children, and goes on in the other order."""
    assert run.child is not None
    names = {run.child.pid: "launch"} | {int(line.split()[1].rstrip(":")): line for line in run.leftover_processes()}
    stopped = list(names)
    for pid in stopped:
        os.kill(pid, signal.SIGSTOP)
    yield
    for pid in reversed(stopped):
        try:
            os.kill(pid, signal.SIGCONT)
        except ProcessLookupError:
            raise AssertionError(f"{names[pid]} ended although it was stopped") from None


@pytest.mark.slow
def test_a_suspended_machine_continues_without_any_process_killed_for_it(tmp_path: Path, quickstart: None) -> None:
    run = Run(tmp_path / "run", "limits.progress_s=4", "limits.ready_s=30", "reward.timeout_s=4", steps=30)
    with running(run):
        for step in (3, 15):
            run.until_step(step)
            with suspended(run):
                run.let_pass(12.0)
        code = run.wait()
    check_end(run, code)
    processes = run.summary()["processes"]
    troubles = [process.get("restarts") or process.get("killed_for_silence") for process in processes.values()]
    assert not any(troubles), processes
