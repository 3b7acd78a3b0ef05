"""Ends what outlives its owner: programs that a child of `launch` has started itself, after its death or launch's own.

Talks to the kernel and to /proc. Knows nothing of the ring, the bus or what the processes do. Run as a program it is
the guardian: it waits until the launch that started it is gone, however that ended, and ends what is left of it.

- Everything that a child starts bears a mark in its environment: the run, its launch, the child, and which life of it.
  A process in a session of its own bears it too. A child's process group ends with it as well, since a process that
  gave itself another title shows no environment.
- The guardian holds no lock of the run: the next start does not wait for it, and ends first what bears a dead mark.
- A signal is sent through a pidfd, after the mark was read again: never to another process with the same number. So is
  that to a group, through the pidfd of its leader, also of one that is gone. Where the kernel has not that yet (before
  Linux 6.9), a number that is another process's by now is left alone.
- It imports the standard library only, and little of that: it is there for as long as the run.

Starting children and knowing when they have ended: environment, log file, process group, death with the parent.

Talks to the kernel only; which child to start and when is the supervisor's business. Knows nothing of the ring or bus.

- A child dies with `launch` (PR_SET_PDEATHSIG). The kernel sends that signal when the *thread* that forked ends, so
  children are started from the main thread only.
- Each child has its own session, so Ctrl-C in a terminal reaches `launch` alone, which then stops them in order; and a
  death takes along what the child has started itself: its group, and what bears its mark (`orphans.py`).
- busrl's own children inherit the run's lock on purpose: it is free only when the last of them is gone. A foreign
  command does not: what it starts may live on for reasons of its own.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import re
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import BinaryIO

from busrl.config import ProcessName
from busrl.errors import TRACE, BugError, first_line
from busrl.paths import RunPaths

# -- Ends what outlives its owner: programs that a child of `launch` has started itself, after its death or ... -------


MARK = "BUSRL_STARTED_BY"
ROUNDS_S = 5.0  # what does not end after so long is stuck in the kernel
PAUSE_S = 0.01
TO_GROUP = 4  # PIDFD_SIGNAL_PROCESS_GROUP
DEAF = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def mark(run: str, launch: int) -> str:
    """What the marks of all children of one launch of a run begin with; `run` is its key."""
    return f"{run}.{launch}.{born(launch)}/"


def born(pid: int) -> int:
    """When a process began, in the kernel's ticks: with it a pid is unique. 0 if it is not there."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return int(file.read().rpartition(")")[2].split()[19])
    except (OSError, ValueError, IndexError):
        return 0


def end_marked(prefix: str, limit_s: float = ROUNDS_S) -> list[int]:
    """SIGKILL to every process whose mark begins so, until there is none; their pids."""
    return _end(lambda text: text.startswith(prefix), limit_s)


def end_left_behind(run: str, limit_s: float = ROUNDS_S) -> list[int]:
    """The same for processes of all launches of a run that are gone; of one that lives nothing is touched."""

    def left(text: str) -> bool:
        key, pid, began = [*text.partition("/")[0].split("."), "", ""][:3]
        return key == run and pid.isdigit() and str(born(int(pid))) != began

    return _end(left, limit_s)


def _end(wanted: Callable[[str], bool], limit_s: float) -> list[int]:
    ended: dict[int, None] = {}
    deadline = time.monotonic() + limit_s
    while found := [pid for pid in _pids() if wanted(mark_of(pid)) and _kill(pid, wanted)]:
        ended.update(dict.fromkeys(found))
        if time.monotonic() > deadline:
            break
        time.sleep(PAUSE_S)
    return list(ended)


def _kill(pid: int, wanted: Callable[[str], bool]) -> bool:
    """Whether there was such a process."""
    try:
        descriptor = os.pidfd_open(pid)
    except OSError:
        return False
    try:
        if not wanted(mark_of(pid)):
            return False
        signal.pidfd_send_signal(descriptor, signal.SIGKILL)
        return True
    except OSError:
        return False
    finally:
        os.close(descriptor)


def _pids() -> Iterable[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit() and int(name) != os.getpid()]


def mark_of(pid: int) -> str:
    """The mark in a process's environment; "" if it has none, or if it is not ours to look at."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            text = b"\0" + file.read()
    except OSError:
        return ""
    return text.partition(f"\0{MARK}=".encode())[2].partition(b"\0")[0].decode(errors="replace")


def end_group(descriptor: int, leader: int, began: int) -> None:
    """SIGKILL to what is left of the group of a process, known by its pidfd, its pid and when it began."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        try:
            signal.pidfd_send_signal(descriptor, signal.SIGKILL, None, TO_GROUP)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            if born(leader) in (0, began):
                os.killpg(leader, signal.SIGKILL)


def _hold(held: dict[tuple[int, int], int], leader: int, began: int) -> None:
    """Keep the pidfd of a leader, if that is still the process that began then."""
    try:
        descriptor = os.pidfd_open(leader)
    except OSError:
        return
    if born(leader) == began:
        held[leader, began] = descriptor
    else:
        os.close(descriptor)


class Guardian:
    """The guardian as its launch sees it. `hold` and `let_go` name the leaders of the groups that end with launch."""

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        self._held: dict[int, int] = {}  # and when each began
        self._process = self._start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def hold(self, leader: int) -> None:
        """This child's group ends with launch. Nobody has waited for the child yet, so the number is its own."""
        self._held[leader] = born(leader)
        self._tell(f"+{leader} {self._held[leader]}\n")

    def let_go(self, leader: int) -> None:
        """This child has ended, and its group with it."""
        began = self._held.pop(leader, 0)
        self._tell(f"-{leader} {began}\n")

    def renew(self) -> bool:
        """Start another one if somebody has ended it; whether that was so."""
        if self._process.poll() is None:
            return False
        self._shut()
        self._process = self._start()
        for leader, began in self._held.items():
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
        with contextlib.suppress(OSError):  # it was ended: the next `renew` tells another one
            self._process.stdin.write(line.encode())


def guard(prefix: str) -> None:
    """Wait for the end of launch, which closes our standard input by dying; then end what it held and marked."""
    for number in DEAF:
        signal.signal(number, signal.SIG_IGN)
    held: dict[tuple[int, int], int] = {}  # pidfds
    for line in sys.stdin:
        leader, began = map(int, line[1:].split())
        if line[0] == "+":
            _hold(held, leader, began)
        elif (leader, began) in held:
            os.close(held.pop((leader, began)))
    for (leader, began), descriptor in held.items():
        end_group(descriptor, leader, began)
    end_marked(prefix)


if __name__ == "__main__":
    guard(sys.argv[1])


# -- Starting children and knowing when they have ended: environment, log file, process group, death with the parent --


PR_SET_PDEATHSIG = 1
MARKED_S = 1.0
_libc = ctypes.CDLL(None, use_errno=True)
NOTHING: Mapping[str, str] = MappingProxyType({})
STARTED = re.compile(r"--- .* started by launch \(pid [0-9]+\)$")
THREAD_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMEXPR_NUM_THREADS")


@dataclass
class Running:
    """A child that was started and whose end has not been seen yet."""

    name: str
    popen: subprocess.Popen[bytes]
    pidfd: int
    mark: str = ""
    unlogged: str = ""  # why what it says is lost
    on_end: Callable[[int], None] = lambda pid: None  # told when its group is ended, while the pid is still taken

    @property
    def pid(self) -> int:
        return self.popen.pid

    def fileno(self) -> int:
        return self.pidfd

    def ended(self) -> str | None:
        """How it ended, in words, or None while it runs; what it left behind in its group is killed first."""
        if self.popen.returncode is None:
            if os.waitid(os.P_PIDFD, self.pidfd, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
                return None
            self.kill_group()  # while the pid is still taken, so that the group can not be somebody else's
            self.on_end(self.pid)
            self.popen.wait()
            if self.mark:
                end_marked(self.mark, MARKED_S)
        return describe(self.popen.returncode)

    def signal(self, number: int) -> None:
        """Send a signal to it alone; nothing happens if it has ended."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.pidfd, number)

    def kill(self) -> None:
        """SIGKILL to it and to everything in its session's group."""
        self.signal(signal.SIGKILL)
        self.kill_group()

    def kill_group(self) -> None:
        """End what it has started itself and left behind."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)

    def wait(self, timeout_s: float) -> None:
        """Wait for its end at most so long."""
        poller = select.poll()  # a pidfd is readable when its process has ended
        poller.register(self.pidfd, select.POLLIN)
        poller.poll(timeout_s * 1000)

    def close(self) -> None:
        os.close(self.pidfd)


def describe(code: int) -> str:
    """An exit status as a person reads it."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"signal {signal.Signals(-code).name}"
    except ValueError:
        return f"signal {-code}"


def command_of(process: ProcessName, paths: RunPaths) -> list[str]:
    """What is executed for a process of the topology."""
    if process.spec.command:
        known = {"{run_dir}": str(paths.root), "{name}": process.name}
        return [re.sub(r"\{(run_dir|name)\}", lambda found: known[found[0]], part) for part in process.spec.command]
    return [sys.executable, "-m", "busrl.roles", str(paths.root), process.name]


def environment_of(process: ProcessName, paths: RunPaths, more: Mapping[str, str]) -> dict[str, str]:
    """Variables of a child: thread counts from `threads`, where the run is, what the topology adds, then `more`."""
    package_root = str(Path(__file__).resolve().parents[2])
    known = os.environ.get("PYTHONPATH")
    return {
        **os.environ,
        **dict.fromkeys(THREAD_VARIABLES, str(process.spec.threads)),
        "OMP_WAIT_POLICY": "PASSIVE",  # spinning workers of one process would starve the others
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONUNBUFFERED": "1",
        "PYTHONPATH": f"{package_root}{os.pathsep}{known}" if known else package_root,
        "BUSRL_RUN_DIR": str(paths.root),
        "BUSRL_NAME": process.name,
        **process.spec.env,
        **more,
    }


def start(
    process: ProcessName,
    paths: RunPaths,
    keep_fds: tuple[int, ...] = (),
    env: Mapping[str, str] = NOTHING,
    cores: frozenset[int] = frozenset(),
    mark: str = "",
) -> Running:
    """Start one child on these cores (none named: on any), `env` and its mark added to its environment; its output goes
    to the end of its log file."""
    if threading.current_thread() is not threading.main_thread():
        raise BugError(f"{process.name} was to be started from a thread, with whose end the kernel would kill it")
    log = paths.log(process.name)
    output, unlogged = _open_log(log)
    with output:
        popen = subprocess.Popen(
            command_of(process, paths),
            env=environment_of(process, paths, {**env, MARK: mark}),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            pass_fds=() if process.spec.command else keep_fds,
            start_new_session=True,
            preexec_fn=_prepare(os.getpid(), cores),
        )
    return Running(process.name, popen, os.pidfd_open(popen.pid), mark, unlogged)


def _open_log(log: Path) -> tuple[BinaryIO, str]:
    """The end of a log file, and why it is not that one: a process does its work with a full disk and without a log."""
    unlogged = ""
    try:
        if log.parent.parent.is_dir():
            log.parent.mkdir(exist_ok=True)
        output: BinaryIO = open(log, "ab", buffering=0)  # noqa: SIM115
    except OSError as error:
        output, unlogged = open(os.devnull, "ab", buffering=0), f"{log}: {error.strerror}"  # noqa: SIM115
    with contextlib.suppress(OSError):
        output.write(f"--- {time.strftime('%Y-%m-%d %H:%M:%S')} started by launch (pid {os.getpid()})\n".encode())
    return output, unlogged


def _prepare(parent: int, cores: frozenset[int]) -> Callable[[], None]:
    """Done in the child: it dies with launch, and it is bound before it has any thread."""

    def prepare() -> None:
        if cores:
            with contextlib.suppress(OSError):  # a core that was there when the topology was checked
                os.sched_setaffinity(0, cores)
        _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:  # it died before the line above: nobody would tell us any more
            os._exit(1)

    return prepare


def last_lines(path: Path, count: int = 12, block: int = 16_384) -> list[str]:
    """The end of a log file, for a person who has to find out why a child died."""
    try:
        with open(path, "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - block))
            text = file.read().decode(errors="replace")
    except OSError as error:
        return [f"(its log can not be read: {error})"]
    return [line for line in text.splitlines() if line.strip()][-count:]


def last_words(path: Path) -> str:
    """What a child that died said last, in one line: what it raised if its log ends in a traceback, else the last line.

    Of this life of it alone; "" if it said nothing.
    """
    lines = last_lines(path, 200)
    begun = max((at for at, line in enumerate(lines) if STARTED.match(line)), default=-1)
    lines = lines[begun + 1 :]
    trace = max((at for at, line in enumerate(lines) if line.startswith(TRACE)), default=None)
    return first_line("\n".join(lines[trace:] if trace is not None else lines[-1:]))
