"""A full disk pauses a run and a full /dev/shm refuses one; both say what to do. Each case has its own small mounts."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from harness import ROOT
from small_disk import why_no_ext4, why_no_mounts

HERE = Path(__file__).parent


WHY_NOT = why_no_mounts()


@pytest.mark.long
@pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)
@pytest.mark.parametrize(
    "case", ["small_shm", "disk_fills_up", pytest.param("disk_fills_up_and_one_dies", marks=pytest.mark.slow)]
)
def test_when_space_is_short(case: str, tmp_path: Path, quickstart: None) -> None:
    command = ["unshare", "-m", sys.executable, str(HERE / "small_disk.py"), case, str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{HERE}"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=170)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.skipif(bool(WHY_NOT or why_no_ext4()), reason=WHY_NOT or why_no_ext4())
def test_a_disk_turned_read_only_ends_the_run_until_the_next_start(
    tmp_path: Path, quickstart: None
) -> None:
    test_when_space_is_short("disk_becomes_read_only", tmp_path, quickstart)
