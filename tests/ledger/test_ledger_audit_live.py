"""The audit of a run that goes on at full speed beside it: never an accusation, and the numbers move."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import busrl.ledger.audit as audit_module
from busrl.ledger.audit import audit
from busrl.ledger.audit.snapshot import take


@pytest.fixture
def live(tmp_path: Path) -> Iterator[tuple[Path, subprocess.Popen[bytes]]]:
    """A run directory whose run is going on in a child."""
    root = tmp_path / "run"
    root.mkdir()
    here = Path(__file__).parent
    paths = [str(here), *(path for path in sys.path if path)]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    child = subprocess.Popen(
        [sys.executable, str(here / "live_run.py"), str(root)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env
    )
    assert child.stdin is not None and child.stdout is not None
    assert child.stdout.readline() == b"ready\n"
    yield root, child
    child.stdin.close()
    child.wait(timeout=30)
    child.stdout.close()


@pytest.mark.parametrize("looks", [25, pytest.param(150, marks=pytest.mark.slow)])
def test_a_running_run_is_never_accused_even_by_a_single_look(live, looks: int) -> None:
    root, child = live
    steps = []
    for _ in range(looks):
        report = audit_module.report_of(root, take(root, None))
        assert report.errors == (), report.errors
        assert report.state == "running"
        steps.append(report.counts.step)
    assert child.poll() is None
    assert steps == sorted(steps)
    assert steps[-1] > steps[0]


def test_a_run_killed_at_full_speed_has_nothing_lost_and_nothing_twice(live) -> None:
    root, child = live
    while audit(root).counts.step < 3:
        assert child.poll() is None
    child.send_signal(signal.SIGKILL)
    child.wait(timeout=30)
    report = audit(root)
    assert report.state == "killed"
    assert (report.counts.lost, report.counts.trained_twice, report.errors) == (0, 0, ())
