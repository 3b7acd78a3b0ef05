"""The whole run ends early, by a kill or by request, and a later start in the same directory finishes it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from checks import check_end, check_tokens
from harness import ROOT, Run, running

STEPS = 40


def busrl(*arguments: str) -> str:
    done = subprocess.run([sys.executable, "-m", "busrl.cli", *arguments], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.long
def test_children_end_with_a_killed_launch_and_the_next_adopts_the_ring(
    tmp_path: Path, undisturbed: Callable[[int], int]
) -> None:
    run = Run(tmp_path / "run", steps=STEPS // 2)
    with running(run):
        run.until_step(5)
        run.kill_launch()
        assert run.leftover_processes() == [] and run.paths.ring_file.exists()
        run.start()
        code = run.wait()
    assert "adopted the ring" in run.text()
    check_end(run, code)
    check_tokens(run, undisturbed(STEPS // 2))


@pytest.mark.slow
def test_ring_clean_removes_an_unwanted_ring_and_its_samples_are_regenerated(
    tmp_path: Path, quickstart: None
) -> None:
    run = Run(tmp_path / "run", steps=STEPS)
    with running(run):
        run.until_step(5)
        run.kill_launch()
        assert "removed" in busrl("ring", "clean", str(run.directory))
        assert run.leftovers() == []
        run.start()
        code = run.wait()
    assert "adopted" not in run.text() and "are generated again" in run.text()
    check_end(run, code)


@pytest.mark.slow
@pytest.mark.parametrize("weights_too", [True, False])
def test_after_a_reboot_of_the_host_the_next_start_generates_again(
    weights_too: bool, tmp_path: Path, quickstart: None
) -> None:
    run = Run(tmp_path / "run", steps=STEPS)
    with running(run):
        run.until_step(13)  # past a checkpoint, with records after it
        run.kill_launch()
        run.paths.ring_file.unlink()
        if weights_too:
            run.paths.weights_file.unlink()
        run.start()
        code = run.wait()
    assert "are generated again" in run.text()
    check_end(run, code)


@pytest.mark.long
def test_a_stopped_run_ends_in_order_and_later_starts_finish_it(
    tmp_path: Path, quickstart: None
) -> None:
    run = Run(tmp_path / "run", steps=STEPS)
    with running(run):
        for step, number in ((4, signal.SIGINT), (12, signal.SIGTERM)):
            run.until_step(step)
            assert run.child is not None
            engine = run.pid("rollout/0")
            os.kill(engine, signal.SIGSTOP)  # or all that was dispatched may end while the scheduler does
            run.child.send_signal(number)
            run.until("the scheduler to end", lambda: "scheduler" not in run.processes())
            os.kill(engine, signal.SIGCONT)
            assert run.wait() == 128 + number, run.tail()
            report = run.audit()
            assert not report.errors and report.counts.lost == 0 and report.counts.open > 0, report
            assert run.paths.open_bin.exists() and run.leftovers() == []
            assert run.summary()["outcome"] == "stopped" and run.step() < STEPS
            assert "signal SIG" not in (run.paths.logs / "launch.log").read_text(), run.tail()
            run.start()
        code = run.wait()
    check_end(run, code)
    assert "signal SIG" not in (run.paths.logs / "launch.log").read_text(), run.tail()
    told, rows = run.summary(), run.metrics()
    assert told["steps_before"] >= 12 and told["reward"]["first"] == rows[0]["reward"], "the story of all its starts"
    assert "continues after step" in run.text()
    assert run.start().wait() == 0 and f"{STEPS} of {STEPS} steps are done; to go on" in run.text()
    assert run.summary() == told, "a finished run is left as it is"


@pytest.mark.slow
@pytest.mark.parametrize("after", ["bus", "keeper", "rollout/0", "learner"])
def test_a_run_is_asked_to_end_while_a_process_is(after: str, tmp_path: Path, quickstart: None) -> None:
    """A process that has just begun, or is being started again, ends in order as well."""
    run = Run(tmp_path / "run", steps=STEPS)
    with running(run):
        run.until_step(3)
        run.kill(after)
        assert run.child is not None
        run.child.send_signal(signal.SIGTERM)
        assert run.wait() == 128 + signal.SIGTERM, run.tail()
        assert not run.audit().errors and run.leftovers() == []
        run.start()
        code = run.wait()
    check_end(run, code)
