"""What stands at the ring's name and is not this run's: whose it is, and what to do that can be done."""

from __future__ import annotations

import os
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from busrl.errors import RunInUse, UserError
from busrl.launcher import rundir
from busrl.launcher.rundir import _attached
from busrl.paths import SHM, RunPaths
from busrl.preflight.load import load
from busrl.ring import Ring
from busrl.topology import Topology

ROOT = Path(__file__).resolve().parents[2]
NOBODY = 65534
HOLDER = """
import sys
from busrl.ring import Ring
ring = Ring.attach(sys.argv[1])
ring.register("rollout", "rollout/0")
print("held", flush=True)
sys.stdin.read()
"""


@pytest.fixture(scope="module")
def topology() -> Topology:
    return load(ROOT / "configs" / "scripted.toml")


@pytest.fixture
def paths(tmp_path: Path) -> Iterator[RunPaths]:
    yield (paths := RunPaths.of(tmp_path))
    (SHM / paths.ring_name).unlink(missing_ok=True)


def held(paths: RunPaths, *before: str) -> subprocess.Popen[bytes]:
    """A ring of another run at this run's name, and a process that uses it."""
    Ring.create(paths.ring_name, slots=4, slot_bytes=1024, uuid=uuid.uuid4().bytes).close()
    command = [*before, sys.executable, "-c", HOLDER, paths.ring_name]
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                             env={**os.environ, "PYTHONPATH": str(ROOT)})  # fmt: skip
    assert child.stdout is not None and child.stdout.readline() == b"held\n"
    return child


def refused(paths: RunPaths, topology: Topology, child: subprocess.Popen[bytes]) -> str:
    try:
        with pytest.raises(RunInUse) as refused_with:
            _attached(paths, topology, uuid.uuid4().bytes)
    finally:
        child.communicate(timeout=30)
    return str(refused_with.value)


def test_processes_of_this_machine_are_named_with_the_command_that_ends_them(
    paths: RunPaths, topology: Topology
) -> None:
    child = held(paths)
    said = refused(paths, topology, child)
    assert said.endswith(f"end those processes first: kill {child.pid}") and "rollout/0" in said


def test_processes_of_another_container_are_not_to_be_ended_from_here(paths: RunPaths, topology: Topology) -> None:
    if os.geteuid() or subprocess.run(["unshare", "--pid", "--fork", "true"], check=False).returncode:
        pytest.skip("needs root, for a namespace of processes")
    said = refused(paths, topology, held(paths, "unshare", "--pid", "--fork"))
    assert "another container" in said and "--ipc=private" in said and "kill" not in said


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to give a file away")
@pytest.mark.parametrize("content", [b"", b"no ring" * 1000])
def test_a_file_of_another_user_is_theirs_to_remove(paths: RunPaths, topology: Topology, content: bytes) -> None:
    file = SHM / paths.ring_name
    file.write_bytes(content)
    os.chown(file, NOBODY, NOBODY)
    remedy = rf"user {NOBODY}.*have it removed by that user or by root \(`rm {file}`\)"
    with pytest.raises(UserError, match=remedy) as refused_with:
        _attached(paths, topology, uuid.uuid4().bytes)
    assert "ring clean" not in str(refused_with.value) and "--run-dir another path" in str(refused_with.value)


LOCKED = """
import sys
from busrl.ring import OfdLock
lock = OfdLock(sys.argv[1])
lock.acquire(5)
print("held", flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("seen", [True, False])
def test_a_lock_without_a_launch_names_its_holders_or_another_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seen: bool
) -> None:
    paths = RunPaths.of(tmp_path)
    child = subprocess.Popen([sys.executable, "-c", LOCKED, str(paths.lock("run"))], stdin=subprocess.PIPE,
                             stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": str(ROOT)})  # fmt: skip
    assert child.stdout is not None and child.stdout.readline() == b"held\n"
    monkeypatch.setattr(rundir, "stat_of", lambda pid: [])  # as a child of a launch that is gone
    if not seen:
        monkeypatch.setattr(rundir, "_holders", lambda name: [])
    try:
        with pytest.raises(RunInUse) as refused_with:
            rundir.take_lock(paths, timeout_s=0.1)
    finally:
        child.communicate(timeout=30)
    wanted = f"end them: kill {child.pid}" if seen else "shared with another container or host"
    assert wanted in str(refused_with.value) and ("kill" in str(refused_with.value)) == seen


def test_a_command_in_an_error_of_the_ring_can_be_typed(paths: RunPaths) -> None:
    (SHM / paths.ring_name).write_bytes(b"\1" * 100_000)
    (SHM / paths.ring_name).chmod(0o600)
    with pytest.raises(UserError, match=rf"`busrl ring clean {paths.ring_name} --force`"):
        Ring.attach(paths.ring_name)
