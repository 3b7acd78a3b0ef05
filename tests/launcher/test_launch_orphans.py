"""What a child starts itself ends with it, and with launch; nobody but busrl's own processes holds the run's lock."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from busrl.ring import OfdLock
from busrl.system import guardian as orphans
from busrl.system.guardian import MARK, born, end_group, end_left_behind, end_marked, mark, mark_of

pytestmark = pytest.mark.long  # whole starts of `busrl launch`

LEAVERS = ["leaves_a_child", "leaves_a_session"]


@pytest.mark.parametrize("mode", LEAVERS)
def test_descendants_of_a_dead_process_die_with_it_even_in_other_sessions(scripted, mode):
    scripted.start({"rollout/0": mode, "learner": "learner"})
    pid = scripted.ready("rollout/0")
    grandchild = scripted.grandchild()
    os.kill(pid, signal.SIGKILL)
    scripted.until(lambda: not scripted.alive(grandchild), "the grandchild to end")
    scripted.finish()
    assert scripted.wait() == 0, scripted.output


@pytest.mark.parametrize("mode", LEAVERS)
def test_descendants_of_a_child_end_with_a_killed_launch(scripted, mode):
    modes = {"rollout/0": mode, "learner": "learner"}
    scripted.start(modes)
    scripted.ready("rollout/0")
    grandchild = scripted.grandchild()
    scripted.kill_launch(["learner"])
    scripted.until(lambda: not scripted.alive(grandchild), "the grandchild to end")
    (scripted.root / "seen" / "grandchild").unlink()
    scripted.start(modes)
    scripted.ready("learner", 2)
    scripted.finish()
    assert scripted.wait() == 0, scripted.output


def test_launch_and_guardian_killed_together_leave_work_for_the_next_start(scripted):
    modes = {"rollout/0": "leaves_a_session", "learner": "learner"}
    launch = scripted.start(modes)
    scripted.ready("rollout/0")
    grandchild = scripted.grandchild()
    guardian = guardian_of(launch.pid)
    os.kill(guardian, signal.SIGSTOP)
    scripted.kill_launch(["learner"])
    os.kill(guardian, signal.SIGKILL)
    assert scripted.alive(grandchild)
    scripted.start(modes)
    scripted.until(lambda: not scripted.alive(grandchild), "the next start to end what was left")
    scripted.ready("learner", 2)
    scripted.finish()
    assert scripted.wait() == 0, scripted.output


def test_a_guardian_that_somebody_ended_is_replaced_and_leaves_with_the_run(scripted):
    launch = scripted.start({"rollout/0": "leaves_a_child", "learner": "learner"})
    scripted.ready("rollout/0")
    grandchild = scripted.grandchild()
    first = guardian_of(launch.pid)
    os.kill(first, signal.SIGKILL)
    scripted.said("there is another one now")
    second = guardian_of(launch.pid)
    scripted.kill_launch(["learner"])
    scripted.until(lambda: not scripted.alive(grandchild) and not scripted.alive(second), "the guardian to do its work")


def test_a_foreign_command_does_not_inherit_the_lock_of_the_run(scripted):
    scripted.start({"rollout/0": "well", "learner": "learner"})
    pid = scripted.ready("rollout/0")
    lock = os.path.realpath(scripted.paths.lock("run"))
    files = [os.path.realpath(f"/proc/{pid}/fd/{name}") for name in os.listdir(f"/proc/{pid}/fd")]
    assert lock not in files
    assert not OfdLock(str(scripted.paths.lock("run"))).try_acquire()
    scripted.finish()
    assert scripted.wait() == 0, scripted.output


def test_only_processes_with_the_mark_are_ended():
    prefix = mark("test", os.getpid())
    env = {**os.environ, MARK: f"{prefix}rollout/0/1/"}
    environments = (env, {**env, MARK: f"{prefix}rollout/0/11/"})
    ours, other = (subprocess.Popen(["sleep", "60"], env=variables) for variables in environments)
    try:
        waited(lambda: mark_of(ours.pid) and mark_of(other.pid))
        assert end_marked(f"{prefix}rollout/0/1/") == [ours.pid]
        assert ours.wait(10) == -signal.SIGKILL and other.poll() is None
        assert end_left_behind("test") == []  # their launch, this process, lives
    finally:
        for process in (ours, other):
            process.kill()
            process.wait()


def test_leftovers_of_a_gone_launch_are_known_by_pid_and_start_time():
    env = {**os.environ, MARK: f"test.{os.getpid()}.{born(os.getpid()) + 1}/rollout/0/0/"}
    left = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], env=env, start_new_session=True)
    try:
        waited(lambda: mark_of(left.pid))
        assert end_left_behind("other") == []
        assert end_left_behind("test") == [left.pid]
        assert left.wait(10) == -signal.SIGKILL
    finally:
        left.kill()
        left.wait()


# In a namespace of its own, where the next process id can be chosen: a launch is killed that had two children, both
# gone before it. The number of the first is another process's by then; the second has left a process without a mark.
# The guardian reads its lines in order and looks again at a leader whose pidfd it has just opened, so a pidfd of the
# third child, which lives, says that it is done with the other two.
REUSED = """
import contextlib, os, select, signal, subprocess, sys, time
sys.path.insert(0, sys.argv[1])
from busrl.system.guardian import Guardian, mark

def sleeper(number=0, **options):
    if number:
        with open("/proc/sys/kernel/ns_last_pid", "w") as file:
            file.write(str(number - 1))
    return subprocess.Popen(["sleep", "1000"], **options)

def held(folder):
    found = 0
    for one in os.listdir(folder):
        with contextlib.suppress(FileNotFoundError):  # it is closed by now
            found += "pidfd" in os.readlink(f"{folder}/{one}")
    return found

launch = os.fork()
if not launch:
    guardian = Guardian(mark("test", os.getpid()))
    first = sleeper(600, start_new_session=True)
    second = subprocess.Popen(["sh", "-c", "sleep 1000 & echo $!; read wait"], stdin=subprocess.PIPE,
                              stdout=subprocess.PIPE, start_new_session=True)
    left = int(second.stdout.readline())
    third = sleeper(start_new_session=True)
    for one in (first, second, third):
        guardian.hold(one.pid)
    end = time.monotonic() + 30
    while held(f"/proc/{guardian.pid}/fd") < 3:
        assert time.monotonic() < end, "the guardian does not hold the three"
        time.sleep(0.01)
    for one in (first, second):
        one.kill()
        one.wait()
    os.kill(guardian.pid, signal.SIGSTOP)
    with open(sys.argv[2], "w") as file:
        file.write(f"{first.pid} {left} {third.pid} {guardian.pid}")
    os.kill(os.getpid(), signal.SIGKILL)
os.waitpid(launch, 0)
first, left, third, guardian = map(int, open(sys.argv[2]).read().split())
other = sleeper(first, start_new_session=True)
assert other.pid == first, (other.pid, first)
ends = {one: os.pidfd_open(one) for one in (guardian, left, third)}
os.kill(guardian, signal.SIGCONT)
for pid, end in ends.items():
    assert select.select([end], [], [], 30)[0], f"{pid} of guardian, left and third {list(ends)} stays"
print("the other process", "lives" if other.poll() is None else "was killed")
"""


def can_choose_pids() -> bool:
    command = ["unshare", "-pf", "--mount-proc", "sh", "-c", "echo 500 > /proc/sys/kernel/ns_last_pid"]
    return shutil.which("unshare") is not None and subprocess.run(command, capture_output=True).returncode == 0


@pytest.mark.skipif(not can_choose_pids(), reason="needs root and unshare(1) for a private process namespace")
def test_the_guardian_ends_its_announced_group_and_spares_a_reused_number(tmp_path):
    script = [sys.executable, "-c", REUSED, str(Path(orphans.__file__).parents[2]), str(tmp_path / "pids")]
    done = subprocess.run(["unshare", "-pf", "--mount-proc", *script], capture_output=True, text=True, timeout=120)
    assert done.stdout == "the other process lives\n", done.stdout + done.stderr


def test_the_number_of_another_process_is_spared_without_kernel_group_signals(monkeypatch):
    def no_flags(descriptor, number, info=None, flags=0):
        raise OSError(22, "Invalid argument")

    monkeypatch.setattr(orphans.signal, "pidfd_send_signal", no_flags)
    group = subprocess.Popen(["sleep", "60"], start_new_session=True)
    descriptor = os.pidfd_open(group.pid)
    try:
        end_group(descriptor, group.pid, born(group.pid) - 1)
        assert group.poll() is None
        end_group(descriptor, group.pid, born(group.pid))
        assert group.wait(10) == -signal.SIGKILL
    finally:
        os.close(descriptor)
        group.kill()
        group.wait()


def children(pid: int) -> list[int]:
    with open(f"/proc/{pid}/task/{pid}/children") as file:
        return [int(pid) for pid in file.read().split()]


def guardian_of(launch: int) -> int:
    found: list[int] = []
    waited(lambda: found.extend(pid for pid in children(launch) if mark_of(pid).endswith("/guardian")) or found)
    return found[0]


def waited(condition) -> None:
    """For the exec of a program that was just started."""
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end, "the program was not started within 60 s"
