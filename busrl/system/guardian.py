"""Ends processes that outlive their owner: those that a child of `launch`, or an agent's program, left behind.

Talks to the kernel and to /proc. Knows nothing of the ring, the bus or the work of the processes. Run as a program it
is the guardian: it waits until the launch that started it is gone, however it ended, and ends the processes left of it.

- It imports the standard library only and nothing of busrl: it runs as `python -I -S`, for as long as the run.
- Every process that a child starts bears a mark in its environment: the run, the launch, the child, and the number of
  its life. A process in a session of its own bears it too. A child's process group ends with the child as well, since a
  process that gave itself another title shows no environment.
- The guardian holds no lock of the run: the next start does not wait for it, and first ends processes with a dead mark.
- A signal is sent through a pidfd, after the mark was read again: never to another process with the same number. A
  group gets it through the pidfd of its leader, even of one that is gone. Where the kernel cannot do that yet (before
  Linux 6.9), a number that belongs to another process by now is left alone.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable

MARK = "BUSRL_STARTED_BY"
GROUPS = "/sys/fs/cgroup"
ROUNDS_S = 5.0  # a process that has not ended after this time is stuck in the kernel
PAUSE_S = 0.01
TO_GROUP = 4  # PIDFD_SIGNAL_PROCESS_GROUP
_NUMBERS = itertools.count()
DEAF = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def mark(run: str, launch: int) -> str:
    """The beginning of the marks of all children of one launch of a run; `run` is its key."""
    return f"{run}.{launch}.{born(launch)}/"


def stat_of(pid: int) -> list[str]:
    """The fields of /proc/PID/stat from the state on (field 3 of proc(5)); empty if the process is gone."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()
    except OSError:
        return []


# Controller, folder, file, and the text in the file of a frozen group.
FREEZERS = (("", "", "cgroup.events", "frozen 1"), ("", "unified/", "cgroup.events", "frozen 1"),
            ("freezer", "freezer/", "freezer.state", "FROZEN"))


def halted(pid: int) -> str:
    """Describe what halts a process, and the remedy: a signal (SIGSTOP), a debugger, or a frozen group. Empty if
    nothing does; a process that waits for a device is not halted."""
    state = (stat_of(pid) or [""])[0]
    if state == "T":
        return f"stopped (SIGSTOP; `kill -CONT {pid}` lets it go on)"
    if state == "t":
        return "held by a debugger (detach it there)"
    return f"in a frozen group (thaw {group})" if state in "SDI" and (group := _frozen_group(pid)) else ""


def _frozen_group(pid: int) -> str:
    """The control group of a process, if it is frozen."""
    with contextlib.suppress(OSError):
        with open(f"/proc/{pid}/cgroup") as file:
            groups = {controller: path for _, controller, path in (line.rstrip().split(":", 2) for line in file)}
        for controller, folder, name, mark in FREEZERS:
            place = f"{GROUPS}/{folder}{groups.get(controller, '').lstrip('/')}"
            with contextlib.suppress(OSError), open(f"{place}/{name}") as file:
                if mark in file.read():
                    return place
    return ""


def born(pid: int) -> int:
    """The time at which a process began, in the kernel's ticks: with it a pid is unique. 0 if it is not there."""
    fields = stat_of(pid)
    return int(fields[19]) if fields else 0


def own_mark() -> str:
    """A new mark for a process that this one starts; it begins with the mark of this process."""
    return f"{os.environ.get(MARK) or mark('alone', os.getpid())}:{os.getpid()}.{next(_NUMBERS)}/"


def end_marked(prefix: str, limit_s: float = ROUNDS_S) -> list[int]:
    """Kill every process whose mark begins with `prefix`, until there is none; returns their pids."""
    return _end(lambda text: text.startswith(prefix), limit_s)


def end_left_behind(run: str, limit_s: float = ROUNDS_S) -> list[int]:
    """Kill the processes that dead launches of a run left behind, and none of a launch that lives; returns their
    pids."""

    def left(text: str) -> bool:
        key, pid, began = [*text.partition("/")[0].split("."), "", ""][:3]
        return key == run and pid.isdigit() and str(born(int(pid))) != began

    return _end(left, limit_s)


def _end(wanted: Callable[[str], bool], limit_s: float) -> list[int]:
    ended: dict[int, None] = {}
    deadline = time.monotonic() + limit_s
    while True:
        others = [int(name) for name in os.listdir("/proc") if name.isdigit() and int(name) != os.getpid()]
        killed = [pid for pid in others if wanted(mark_of(pid)) and _kill(pid, wanted)]
        ended.update(dict.fromkeys(killed))
        if not killed or time.monotonic() > deadline:
            return list(ended)
        time.sleep(PAUSE_S)


def _kill(pid: int, wanted: Callable[[str], bool]) -> bool:
    with contextlib.suppress(OSError):
        descriptor = os.pidfd_open(pid)
        try:
            if wanted(mark_of(pid)):
                signal.pidfd_send_signal(descriptor, signal.SIGKILL)
                return True
        finally:
            os.close(descriptor)
    return False


def mark_of(pid: int) -> str:
    """The mark in a process's environment; "" if it has none, or if this user may not read it."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            text = b"\0" + file.read()
    except OSError:
        return ""
    return text.partition(f"\0{MARK}=".encode())[2].partition(b"\0")[0].decode(errors="replace")


def end_group(descriptor: int, leader: int, began: int) -> None:
    """Kill the rest of the group of a process, identified by its pidfd, its pid and when it began."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        try:
            signal.pidfd_send_signal(descriptor, signal.SIGKILL, None, TO_GROUP)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            if born(leader) in (0, began):
                os.killpg(leader, signal.SIGKILL)


def _hold(pidfds: dict[tuple[int, int], int], leader: int, began: int) -> None:
    """Keep the pidfd of a leader, if that is still the process that began then."""
    with contextlib.suppress(OSError):
        descriptor = os.pidfd_open(leader)
        if born(leader) == began:
            pidfds[leader, began] = descriptor
        else:
            os.close(descriptor)


class Guardian:
    """The launch's side of the guardian. `hold` and `let_go` name the leaders of the groups that end with launch."""

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        self._leaders: dict[int, int] = {}  # and when each began
        self._process = self._start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def hold(self, leader: int) -> None:
        """End this child's group with launch. The caller has not waited for the child yet, so the number is its own."""
        self._leaders[leader] = born(leader)
        self._tell(f"+{leader} {self._leaders[leader]}\n")

    def let_go(self, leader: int) -> None:
        """Forget a child that has ended, and its group with it."""
        began = self._leaders.pop(leader, 0)
        self._tell(f"-{leader} {began}\n")

    def renew(self) -> bool:
        """Start another guardian if this one has ended; returns whether it had."""
        if self._process.poll() is None:
            return False
        self._shut()
        self._process = self._start()
        for leader, began in self._leaders.items():
            self._tell(f"+{leader} {began}\n")
        return True

    def close(self) -> None:
        """Let it do its work now, and wait for its end."""
        self._shut()
        try:
            self._process.wait(2 * ROUNDS_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _start(self) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [sys.executable, "-I", "-S", os.path.abspath(__file__), self._prefix],
            stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, bufsize=0,
            start_new_session=True, cwd="/", env={MARK: f"{self._prefix}guardian"},
        )

    def _shut(self) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()

    def _tell(self, line: str) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):  # it has ended: the next `renew` names the leader to another one
            self._process.stdin.write(line.encode())


def guard(prefix: str) -> None:
    """Wait for the end of launch, which closes this standard input by dying; then kill its groups and marked
    processes."""
    for number in DEAF:
        signal.signal(number, signal.SIG_IGN)
    pidfds: dict[tuple[int, int], int] = {}  # by leader, and when it began
    for line in sys.stdin:
        leader, began = map(int, line[1:].split())
        if line[0] == "+":
            _hold(pidfds, leader, began)
        elif (leader, began) in pidfds:
            os.close(pidfds.pop((leader, began)))
    for (leader, began), descriptor in pidfds.items():
        end_group(descriptor, leader, began)
    end_marked(prefix)


if __name__ == "__main__":
    guard(sys.argv[1])
