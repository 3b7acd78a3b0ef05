"""Processes that somebody holds, as the kernel shows them: stopped, traced, frozen; and those that only wait."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from busrl.system.guardian import halted

TRACED = "import ctypes, os, signal; ctypes.CDLL(None).ptrace(0, 0, 0, 0); os.kill(os.getpid(), signal.SIGSTOP)"
GROUPS = [
    (Path("/sys/fs/cgroup"), "cgroup.freeze", "1", "0"), (Path("/sys/fs/cgroup/unified"), "cgroup.freeze", "1", "0"),
    (Path("/sys/fs/cgroup/freezer"), "freezer.state", "FROZEN", "THAWED"),
]  # fmt: skip


@contextlib.contextmanager
def child(code: str) -> Iterator[int]:
    process = subprocess.Popen([sys.executable, "-c", code])
    try:
        yield process.pid
    finally:
        process.kill()
        process.wait()


def until_halted(pid: int) -> str:
    end = time.monotonic() + 30
    while not (how := halted(pid)) and time.monotonic() < end:
        time.sleep(0.02)
    return how


def test_a_stopped_process_is_told_with_what_lets_it_go_on() -> None:
    with child("import time; time.sleep(100)") as pid:
        assert halted(pid) == ""
        os.kill(pid, signal.SIGSTOP)
        assert f"kill -CONT {pid}" in until_halted(pid)
        os.kill(pid, signal.SIGCONT)
        while halted(pid):
            time.sleep(0.02)


def test_a_traced_process_is_told() -> None:
    with child(TRACED) as pid:
        assert "debugger" in until_halted(pid)


@pytest.mark.parametrize("place, file, frozen, thawed", GROUPS, ids=["v2", "hybrid", "v1"])
def test_a_frozen_group_is_told_with_its_place(place: Path, file: str, frozen: str, thawed: str) -> None:
    group = place / f"busrl-test-{os.getpid()}"
    try:
        assert (place / "cgroup.procs").exists()
        group.mkdir()
    except (OSError, AssertionError):
        pytest.skip(f"no groups can be made in {place}")
    try:
        if not (group / file).exists():
            pytest.skip(f"{place} has no freezer")
        with child("import time; time.sleep(100)") as pid:
            (group / "cgroup.procs").write_text(str(pid))
            (group / file).write_text(frozen)
            said = until_halted(pid)
            (group / file).write_text(thawed)
        assert said == f"in a frozen group (thaw {group})"
    finally:
        while group.exists():
            with contextlib.suppress(OSError):
                group.rmdir()


def test_a_process_that_is_gone_is_not_held() -> None:
    with child("pass") as pid:
        pass
    assert halted(pid) == ""
