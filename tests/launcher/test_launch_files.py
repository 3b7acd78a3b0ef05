"""What others do to the run directory and to shared memory while `launch` runs: it goes on, or ends by name."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from busrl.errors import DiskFull, RunInUse
from busrl.launcher import rundir
from busrl.paths import RunPaths
from busrl.preflight.load import load
from busrl.ring import OfdLock, Ring, RingGuard
from busrl.system import files

QUICKSTART = Path(__file__).resolve().parents[2] / "configs" / "quickstart.toml"
MODES = {"keeper": "well", "learner": "learner"}


def test_a_start_on_a_full_disk_names_file_and_keeps_topology(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    paths, source = RunPaths.of(tmp_path), tmp_path / "given.toml"
    shutil.copyfile(QUICKSTART, source)
    paths.topology_file.write_text("# of before\n")
    monkeypatch.setattr(files, "write_all", full)
    with pytest.raises(DiskFull, match=r"topology\.toml: no space for \d+ bytes.*make space"):
        rundir.write_files(paths, load(source), bytes(16), {})
    assert paths.topology_file.read_text() == "# of before\n"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["given.toml", "topology.toml"]


def test_a_removed_lock_is_made_again_and_a_second_launch_is_refused(scripted):
    first = scripted.start(MODES)
    scripted.ready("learner")
    scripted.paths.lock("run").unlink()
    scripted.said(f"{scripted.paths.lock('run')} was removed by another program; it is made and held again")
    assert OfdLock(str(scripted.paths.lock("run"))).holder() == first.pid
    scripted.start(MODES)
    assert scripted.wait() != 0
    assert f"another launch is running there (pid {first.pid})" in scripted.output
    scripted.launch = first
    scripted.finish()
    assert scripted.wait() == 0, scripted.output
    assert scripted.leftovers() == []


def test_a_second_launch_finds_even_a_stopped_launch_without_its_lock(scripted):
    first = scripted.start(MODES)
    scripted.ready("learner")
    first.send_signal(signal.SIGSTOP)
    scripted.paths.lock("run").unlink()
    scripted.start(MODES)
    assert scripted.wait() != 0
    assert f"(pid {first.pid}), though somebody removed its run.lock" in scripted.output
    first.send_signal(signal.SIGCONT)
    scripted.launch = first
    scripted.said("it is made and held again")
    scripted.finish()
    assert scripted.wait() == 0, scripted.output


def test_a_launch_that_lost_its_turn_ends_and_yields_the_run(scripted):
    first = scripted.start(MODES)
    scripted.ready("learner")
    first.send_signal(signal.SIGSTOP)
    scripted.paths.lock("run").unlink()
    other = OfdLock(str(scripted.paths.lock("run")))
    assert other.try_acquire()  # on another host's pid table, say: nobody there saw the first one
    first.send_signal(signal.SIGCONT)
    assert scripted.wait() == 1
    assert f"another launch (pid {os.getpid()}) has run in {scripted.root}" in scripted.output
    assert scripted.paths.ring_file.exists() and scripted.paths.runtime_dir.exists()
    assert not scripted.paths.open_bin.exists() and not scripted.paths.summary.exists()
    ring = Ring.attach(scripted.paths.ring_name, read_only=True)
    assert ring.header("run_state") == 0 and all(ring.is_dead(process.index) for process in ring.processes())
    ring.close()
    other.release()


def test_a_foreign_object_in_place_of_the_lock_refuses_the_next_start(scripted):
    scripted.start(MODES)
    scripted.ready("learner")
    scripted.paths.lock("run").unlink()
    scripted.paths.lock("run").mkdir()
    scripted.said("another launch cannot be kept out")
    scripted.finish()
    assert scripted.wait() == 0, scripted.output
    assert scripted.log().count("another launch cannot be kept out") == 1
    scripted.start(MODES)
    assert scripted.wait() != 0
    assert "run.lock: Is a directory (errno 21); move away what is there" in scripted.output


@pytest.mark.parametrize("into", ["elsewhere", ""])
def test_a_moved_or_removed_run_directory_ends_the_run_and_leaves_nothing(scripted, into):
    scripted.start(MODES)
    scripted.ready("learner")
    if into:
        scripted.root.rename(scripted.root.with_name(into))
    else:
        shutil.rmtree(scripted.root)
    assert scripted.wait() == 1
    said = f"was moved to {scripted.root.with_name(into)}" if into else "was removed while the run went on"
    assert f"the run directory {scripted.root} {said}" in scripted.output, scripted.output
    assert not scripted.root.exists() and scripted.leftovers() == []
    if into:
        assert f"--run-dir {scripted.root.with_name(into)}" in scripted.output


def test_a_child_starts_without_its_log_where_that_cannot_be_written(scripted):
    scripted.start(MODES)
    pid = scripted.ready("keeper")
    log = scripted.paths.log("keeper")
    log.unlink()
    log.mkdir()
    os.kill(pid, signal.SIGKILL)
    scripted.ready("keeper", 2)
    assert f"has no log: {log}: Is a directory" in scripted.log()
    log.rmdir()
    shutil.rmtree(scripted.paths.logs)  # and a directory that is gone is made again
    os.kill(scripted.lives("keeper")[0], signal.SIGKILL)
    scripted.life("keeper", 3)
    scripted.until(lambda: log.is_file(), "the directory of the logs to be made again")
    scripted.finish()
    assert scripted.wait() == 0, scripted.output


def test_ring_clean_keeps_a_launched_ring_before_any_process_registers(scripted):
    """The moment between the ring's creation and its first process, held still."""
    ring = Ring.create(scripted.paths.ring_name, slots=8, slot_bytes=4096, processes=16, uuid=bytes(16))
    guard = RingGuard(scripted.paths.ring_file)
    assert guard.take()
    command = [sys.executable, "-m", "busrl.cli", "ring", "clean", scripted.paths.ring_name]
    printed = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert printed.returncode == 2 and "in use by a launch" in printed.stderr and guard.has_name(), printed
    guard.release()
    removed = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert removed.returncode == 0 and not scripted.paths.ring_file.exists(), removed
    ring.close()


def test_a_launch_holds_the_guard_of_its_own_and_its_adopted_ring(scripted):
    for life in (1, 2):
        scripted.start(MODES)
        scripted.ready("learner", life)
        guard = RingGuard(scripted.paths.ring_file)
        assert not guard.try_take()
        guard.release()
        if life == 1:
            scripted.kill_launch(MODES)
            free = RingGuard(scripted.paths.ring_file)
            assert free.try_take()
            free.release()
    scripted.finish()
    assert scripted.wait() == 0, scripted.output
    assert "adopted the ring" in scripted.output


def test_a_removed_ring_ends_the_run_at_the_next_attach(scripted):
    scripted.start(MODES)
    scripted.ready("learner")
    pid = scripted.ready("keeper")
    scripted.paths.ring_file.unlink()
    os.kill(pid, signal.SIGKILL)
    assert scripted.wait() == 1
    said = f"keeper cannot be started: {scripted.paths.ring_file} was removed or replaced by another program; start"
    assert said in scripted.output and scripted.lives("keeper")[1] == 1, scripted.output
    assert scripted.paths.open_bin.exists() and scripted.leftovers() == []
    scripted.start(MODES)
    scripted.ready("learner", 2)
    scripted.finish()
    assert scripted.wait() == 0, scripted.output


def test_a_stuck_cleaner_holding_a_ring_is_named_and_the_start_refused(tmp_path, monkeypatch):
    paths = RunPaths.of(tmp_path)
    Ring.create(paths.ring_name, slots=2, slot_bytes=4096, processes=2, uuid=bytes(16)).close()
    cleaner = RingGuard(paths.ring_file)
    try:
        assert cleaner.try_take()
        monkeypatch.setattr(RingGuard.take, "__defaults__", (0.01,))
        with pytest.raises(RunInUse, match="has been removing it"):
            rundir.take_guard(paths)
    finally:
        cleaner.release()
        Ring.unlink(paths.ring_name)
