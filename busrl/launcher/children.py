"""Children of `launch` as processes of this host: how they are started and end, and the last lines of their logs; and
the signals that end launch itself.

Talks to the kernel only; `processes.py` decides which child to start and when. Knows nothing of the ring or the bus.

- A child is a program of its own, or is forked from the run's template (`forks.py`); its end, its log, its death with
  launch are the same.
- A child dies with `launch` (PR_SET_PDEATHSIG). The kernel sends that signal when the *thread* that forked ends, so
  children are started from the main thread only.
- Each child has its own session, so Ctrl-C in a terminal reaches `launch` alone, which then stops them in order. What a
  child has started ends with it: its group, and what bears its mark (`guardian.py`).
- busrl's own children inherit the run's lock on purpose: it is free only when the last of them is gone. A foreign
  command does not inherit it: what it starts may have reasons to outlive the run.
"""

from __future__ import annotations

import contextlib
import os
import re
import select
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import BinaryIO

from busrl.errors import LONGEST_VERDICT, RETRY, TRACE, VERDICT, BugError, first_line
from busrl.launcher.forks import Forks, Way
from busrl.launcher.supervisor import Exit
from busrl.paths import RunPaths
from busrl.system import proxies
from busrl.system.files import whole_file
from busrl.system.guardian import MARK, end_marked
from busrl.system.imports import PACKAGES, interpreter
from busrl.system.parent import bind, die_with
from busrl.system.template import THREAD_VARIABLES, TemplateRefused
from busrl.topology import ProcessName
from busrl.topology.schema import AGENT

MARKED_S = 1.0
TAIL_BYTES = 16_384  # of a log file
STARTED = re.compile(r"--- .* started by launch \(pid [0-9]+\)$")


@dataclass
class RunningChild:
    """A child that was started and whose end was not noticed yet."""

    name: str
    pid: int
    pidfd: int
    mark: str = ""
    unlogged: str = ""  # why it has no log
    on_end: Callable[[int], None] = lambda pid: None  # called after its group was killed, before its pid is free again
    verdict_fd: int = -1  # a process of busrl writes its verdict to the other end
    code: int | None = None  # its exit code once it was waited for; -n after signal n

    def fileno(self) -> int:
        return self.pidfd

    def ended(self) -> Exit | None:
        """Return how it ended, or None while it runs. What is left of its group is killed first."""
        if self.code is None:
            if os.waitid(os.P_PIDFD, self.pidfd, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
                return None
            self.kill_group()  # before the pid is free: another group could have its number
            self.on_end(self.pid)
            self.code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
            if self.mark:
                end_marked(self.mark, MARKED_S)
        verdict, why = self._verdict(self.code)
        foreign = self.verdict_fd >= 0 and self.code > 0 and self.code != verdict
        return Exit(self.code, f"exit code {self.code}, which busrl did not give" if foreign else "", verdict, why)

    def _verdict(self, exit_code: int) -> tuple[int, str]:
        """Read the verdict that the child wrote. A foreign program writes none: only its end with 0 counts."""
        if self.verdict_fd < 0:
            return 0 if exit_code == 0 else RETRY, ""
        with contextlib.suppress(OSError, ValueError):
            code, _, why = os.read(self.verdict_fd, LONGEST_VERDICT).decode(errors="replace").partition(" ")
            return int(code), why
        return RETRY, ""

    def signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.pidfd, number)

    def kill(self) -> None:
        self.signal(signal.SIGKILL)
        self.kill_group()

    def kill_group(self) -> None:
        """Kill what the child has started itself."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)

    def wait(self, timeout_s: float) -> None:
        poller = select.poll()  # a pidfd is readable when its process has ended
        poller.register(self.pidfd, select.POLLIN)
        poller.poll(timeout_s * 1000)

    def close(self) -> None:
        os.close(self.pidfd)
        if self.verdict_fd >= 0:
            os.close(self.verdict_fd)


def command_of(process: ProcessName, paths: RunPaths) -> list[str]:
    if process.spec.command:
        values = {"{run_dir}": str(paths.root), "{name}": process.name}
        return [re.sub(r"\{(run_dir|name)\}", lambda match: values[match[0]], part) for part in process.spec.command]
    return [*interpreter(own_python(process), with_busrl=True), "busrl.roles", str(paths.root), process.name]


def own_python(process: ProcessName) -> str:
    """The interpreter of another environment in which the process runs; "" for this one."""
    return "" if process.role == AGENT else process.spec.python


def environment_of(
    process: ProcessName, paths: RunPaths, more: Mapping[str, str], hosts: Sequence[str] = ()
) -> dict[str, str]:
    """Environment of a child: that of all, its name, what the topology adds, then `more`."""
    of_this_one = {"BUSRL_NAME": process.name, **process.spec.env, **more}
    return common_environment(process.spec.threads, paths, hosts, of_this_one, bool(own_python(process)))


def common_environment(
    threads: int, paths: RunPaths, hosts: Sequence[str] = (), more: Mapping[str, str] | None = None,
    other_python: bool = False,
) -> dict[str, str]:
    """Environment of any child: thread counts, the place of the run, then `more`; and no proxy for the run's own
    addresses, `hosts` among them."""
    # Another Python has a busrl of its own, and site-packages must not come before the standard library.
    packages = [] if other_python or os.path.basename(PACKAGES).endswith("-packages") else [PACKAGES]
    searched = [*packages, *filter(None, [os.environ.get("PYTHONPATH")])]
    return proxies.environment({
        **os.environ,
        **dict.fromkeys(THREAD_VARIABLES, str(threads)),
        "OMP_WAIT_POLICY": "PASSIVE",  # spinning workers of one process would starve the others
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONUNBUFFERED": "1",
        "PYTHONPATH": os.pathsep.join(searched),
        "BUSRL_RUN_DIR": str(paths.root),
        **(more or {}),
    }, *hosts)


def start(
    process: ProcessName, paths: RunPaths, keep_fds: tuple[int, ...] = (), env: Mapping[str, str] | None = None,
    cores: frozenset[int] = frozenset(), mark: str = "", hosts: Sequence[str] = (), forks: Forks | None = None,
) -> RunningChild:
    """Start one child on these cores (empty: on any), with its mark and `env`; its output goes to its log."""
    variables = environment_of(process, paths, {**(env or {}), MARK: mark}, hosts)
    command, log = command_of(process, paths), paths.log(process.name)
    if process.spec.command:
        return spawn(process.name, command, log, variables, (), cores, mark)
    reader, writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        child = forked(process, log, variables, (writer, *keep_fds), cores, mark, forks) if forks else None
        variables[VERDICT] = str(writer)
        child = child or spawn(process.name, command, log, variables, (*keep_fds, writer), cores, mark)
    except BaseException:
        os.close(reader)
        raise
    finally:
        os.close(writer)
    child.verdict_fd = reader
    return child


def spawn(
    name: str, command: Sequence[str], log: Path, env: Mapping[str, str], keep_fds: tuple[int, ...] = (),
    cores: frozenset[int] = frozenset(), mark: str = "", stdin: int = subprocess.DEVNULL,
) -> RunningChild:
    """Start a program in a session of its own that dies with launch; a descriptor `stdin` is closed here."""
    _check_thread(name)
    output, unlogged = _open_log(log)
    try:
        with output:
            popen = subprocess.Popen(
                command, env=env, stdin=stdin, stdout=output, stderr=output, pass_fds=keep_fds, start_new_session=True,
                preexec_fn=_prepare(os.getpid(), sorted(cores)),
            )
    finally:
        if stdin >= 0:
            os.close(stdin)
    popen.returncode = 0  # `ended` waits for it, as for a child that was forked: Popen must not wait for it itself
    return RunningChild(name, popen.pid, _pidfd_of(popen.pid), mark, unlogged)


def _check_thread(name: str) -> None:
    if threading.current_thread() is not threading.main_thread():
        raise BugError(f"{name} was to be started from a thread, with whose end the kernel would kill it")


def _pidfd_of(child: int) -> int:
    """The pidfd of a child that was just started; where there is none (no descriptor is free), the child ends."""
    try:
        return os.pidfd_open(child)
    except OSError:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        raise


def forked(
    process: ProcessName, log: Path, env: Mapping[str, str], keep_fds: tuple[int, ...], cores: frozenset[int],
    mark: str, forks: Forks,
) -> RunningChild | None:
    """A child that the template forks; None if this one has to start alone."""
    _check_thread(process.name)
    if forks.way_of(process) is not Way.FORKED:
        return None
    output, unlogged = _open_log(log)
    with output:
        try:
            pid = forks.fork(process, env, (output.fileno(), *keep_fds), cores)
        except TemplateRefused:
            return None
    return RunningChild(process.name, pid, _pidfd_of(pid), mark, unlogged)


def _open_log(log: Path) -> tuple[BinaryIO, str]:
    """Open a log file at its end. Where that fails, open the null device, and return the reason too: a process works
    without a log."""
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


def _prepare(parent: int, cores: Sequence[int]) -> Callable[[], None]:
    """Make the function that runs in the child before its program: it binds it to cores while it has one thread, and
    to the life of launch."""

    def prepare() -> None:
        bind(cores)
        die_with(parent)

    return prepare


def last_lines(path: Path, count: int = 12) -> list[str]:
    try:
        text = b"".join(whole_file(path, TAIL_BYTES)).decode(errors="replace")
    except OSError as error:
        return [f"(its log cannot be read: {error})"]
    return [line for line in text.splitlines() if line.strip()][-count:]


def lines_of_life(path: Path) -> list[str]:
    """The last lines of a log, of the newest life of its process alone."""
    lines = last_lines(path, 200)
    begun = max((at for at, line in enumerate(lines) if STARTED.match(line)), default=-1)
    return lines[begun + 1 :]


# Lines that libraries write while a process ends, whatever it died of.
NOISE = re.compile(
    r"nanobind: |See https://nanobind| - (leaked|\.\.\. skipped) |OMP: (Info|Warning|Hint)|terminate called|"
    r"WARNING: All log messages before absl::|[IWE]\d{4} \d\d:\d\d:\d+|(\[rank\d+\]:)?\[[IW]\d+ |"
    r".*resource_tracker\b.*|.*Warning: .*|  warnings\.warn\(|"
    r"(Current t|T)hread 0x|  File \"|Extension modules: |  <no Python frame>|Stack \(most recent call first\)"
)
ASIDE = ("Exception ignored ", "Error in atexit.", "Exception in thread ")  # and the traceback behind it
FATAL = re.compile(r"  what\(\): |Fatal Python error: ")


def last_words(path: Path) -> str:
    """The cause of death that a child's log shows, in one line: its exception if the log ends in a traceback, else a
    fatal error, else the last line that is not `NOISE`. Of the newest life alone; "" if that wrote nothing."""
    lines = _without_asides(lines_of_life(path))
    trace = max((at for at, line in enumerate(lines) if line.startswith(TRACE)), default=None)
    if trace is not None:
        return first_line("\n".join(lines[trace:]))
    fatal = [line.strip().removeprefix("what():").strip() for line in lines if FATAL.match(line)]
    telling = [line for line in lines if not NOISE.match(line)]
    return first_line((fatal[:1] or telling[-1:] or lines[-1:] or [""])[0])


def _without_asides(lines: Sequence[str]) -> list[str]:
    """The lines without tracebacks that Python calls ignored, or that are of other threads than the main one."""
    remaining, aside = list[str](), ""
    for line in lines:
        if line.startswith(ASIDE):
            aside = "head"
        elif aside == "head" and line.startswith((TRACE, " ")):
            continue
        elif aside == "head":  # the exception itself ends it
            aside = ""
        else:
            remaining.append(line)
    return remaining


# -- signals that end launch -------------------------------------------------------------------------------------------

ORDERLY = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
LEFT_IGNORED = (signal.SIGINT, signal.SIGHUP)


class Interrupted(Exception):
    """A signal came during work that may be given up (`Signals.interrupting`); its name is the text."""


class Signals:
    """Handlers of the signals that end launch: `with` installs them, in the main thread, and restores those of before.
    `first` is the first signal's number, `count` how many came."""

    def __init__(self) -> None:
        self.first = 0
        self.count = 0
        self._raises = False
        self._reader, self._writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    def fileno(self) -> int:
        return self._reader

    def clear(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while os.read(self._reader, 4096):
                pass

    @contextlib.contextmanager
    def interrupting(self) -> Iterator[None]:
        """Have a signal raise `Interrupted`: for work that only reads, and that may be given up."""
        self._raises = True
        try:
            yield
        finally:
            self._raises = False

    def _received(self, number: int, _frame: FrameType | None) -> None:
        self.first = self.first or number
        self.count += 1
        if self._raises:
            self._raises = False
            raise Interrupted(signal.Signals(number).name)

    def __enter__(self) -> Signals:
        ignored = {number for number in LEFT_IGNORED if signal.getsignal(number) is signal.SIG_IGN}
        self._before = {number: signal.signal(number, self._received) for number in ORDERLY if number not in ignored}
        self._before[signal.SIGTTOU] = signal.signal(signal.SIGTTOU, signal.SIG_IGN)
        self._wakeup = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        return self

    def __exit__(self, *_: object) -> None:
        signal.set_wakeup_fd(self._wakeup)
        for number, handler in self._before.items():
            signal.signal(number, handler)
        os.close(self._reader)
        os.close(self._writer)
