"""`python -m busrl.roles` by hand: a directory without a run is one message, not a traceback."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from busrl.errors import (
    NEEDS_FIX,
    NO_SPACE,
    RETRY,
    RUN_FAILED,
    DeviceMissing,
    DiskFull,
    FileCorrupt,
    MachineError,
    WriteFailed,
    process_code,
)


@pytest.mark.parametrize("name", ["bus", "keeper"])
def test_a_directory_without_a_run_is_named_with_the_remedy(tmp_path: Path, name: str) -> None:
    command = [sys.executable, "-m", "busrl.roles", str(tmp_path), name]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert f"{tmp_path}: no topology.json there; name the directory" in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "problem, code", [(FileCorrupt, RUN_FAILED), (DeviceMissing, NEEDS_FIX), (DiskFull, NO_SPACE), (WriteFailed, RETRY)]
)
def test_what_no_other_start_mends_is_not_tried_again(problem: type[MachineError], code: int) -> None:
    assert process_code(problem("wal/1: damaged")) == code
