"""A run directory that an older busrl left, its launch killed, is continued by this one.

`left_by_older/before-the-fold.tar.gz`: model, prompts, reward and topology of a run of 12 steps (4 samples a group).
The busrl of 2026-11-22, its modules not yet folded, made it until a SIGKILL after step 6; the checkpoint is of step 4.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from busrl.ledger.audit import audit
from busrl.ledger.audit.report import render
from busrl.ledger.trained import step_lines
from busrl.paths import RunPaths

ROOT = Path(__file__).resolve().parents[2]
ARCHIVE = Path(__file__).parent / "left_by_older" / "before-the-fold.tar.gz"


@pytest.mark.long
def test_a_run_that_an_older_busrl_left_is_continued_from_its_files_alone(tmp_path: Path) -> None:
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(tmp_path, filter="data")
    paths = RunPaths.of(tmp_path / "run")
    paths.topology.write_text(paths.topology.read_text().replace("/the/old/place", str(tmp_path)))  # it was moved
    before = [row["step"] for row in step_lines(paths.metrics)]
    assert before == [1, 2, 3, 4, 5, 6] and not (paths.root / "summary.json").exists()
    env = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    command = [sys.executable, "-m", "busrl.cli", "launch", str(tmp_path / "old.toml"), "--run-dir", str(paths.root)]
    done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = step_lines(paths.metrics)
    assert sorted({row["step"] for row in rows}) == list(range(1, 13))
    log = (paths.logs / "learner.log").read_text()
    assert "resumed at step 6 (2 of them trained again from the log)" in log  # its checkpoint is that of step 4
    report = audit(paths.root)
    assert not report.errors and report.counts.trained == 12 * 4 * 4, render(report)
