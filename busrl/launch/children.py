"""Starts the children of `launch` and knows when they have ended: environment, log file, group, death with the parent;
and the signals that ask launch itself for an end.

Talks to the kernel only; the supervisor decides which child to start and when. Knows nothing of the ring or the bus.

- A child dies with `launch` (PR_SET_PDEATHSIG). The kernel sends that signal when the *thread* that forked ends, so
  children are started from the main thread only.
- Each child has its own session, so Ctrl-C in a terminal reaches `launch` alone, which then stops them in order. A
  death takes along what the child has started: its group, and what bears its mark (`guardian.py`).
- busrl's own children inherit the run's lock on purpose: it is free only when the last of them is gone. A foreign
  command does not: what it starts may have its reasons to outlive the run.
"""

from __future__ import annotations

import contextlib
import ctypes
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
from busrl.launch.supervisor import Exit
from busrl.paths import RunPaths
from busrl.system import proxies
from busrl.system.files import whole_file
from busrl.system.guardian import MARK, end_marked
from busrl.system.imports import PACKAGES, interpreter
from busrl.topology import ProcessName
from busrl.topology.schema import AGENT

PR_SET_PDEATHSIG = 1
MARKED_S = 1.0
TAIL_BYTES = 16_384  # of a log file
_libc = ctypes.CDLL(None, use_errno=True)
STARTED = re.compile(r"--- .* started by launch \(pid [0-9]+\)$")
THREAD_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMEXPR_NUM_THREADS")


@dataclass
class RunningChild:
    """A child that was started and whose end has not been seen yet."""

    name: str
    popen: subprocess.Popen[bytes]
    pidfd: int
    mark: str = ""
    unlogged: str = ""  # why what it says is lost
    on_end: Callable[[int], None] = lambda pid: None  # called when its group is ended, while the pid is taken
    told: int = -1  # the descriptor by which a process of busrl's says its verdict

    @property
    def pid(self) -> int:
        return self.popen.pid

    def fileno(self) -> int:
        return self.pidfd

    def ended(self) -> Exit | None:
        """Return how it ended, or None while it runs; what it left behind in its group is killed first."""
        if self.popen.returncode is None:
            if os.waitid(os.P_PIDFD, self.pidfd, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
                return None
            self.kill_group()  # while the pid is still taken, so that the group cannot be somebody else's
            self.on_end(self.pid)
            self.popen.wait()
            if self.mark:
                end_marked(self.mark, MARKED_S)
        code, (verdict, why) = self.popen.returncode, self._verdict()
        foreign = self.told >= 0 and code > 0 and code != verdict
        return Exit(code, f"exit code {code}, which busrl did not give" if foreign else "", verdict, why)

    def _verdict(self) -> tuple[int, str]:
        """Read the verdict that the child wrote; of a foreign program only an end with 0 says something."""
        if self.told < 0:
            return 0 if self.popen.returncode == 0 else RETRY, ""
        with contextlib.suppress(OSError, ValueError):
            code, _, why = os.read(self.told, LONGEST_VERDICT).decode(errors="replace").partition(" ")
            return int(code), why
        return RETRY, ""

    def signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.pidfd, number)

    def kill(self) -> None:
        self.signal(signal.SIGKILL)
        self.kill_group()

    def kill_group(self) -> None:
        """End what it has started itself and left behind."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)

    def wait(self, timeout_s: float) -> None:
        poller = select.poll()  # a pidfd is readable when its process has ended
        poller.register(self.pidfd, select.POLLIN)
        poller.poll(timeout_s * 1000)

    def close(self) -> None:
        os.close(self.pidfd)
        if self.told >= 0:
            os.close(self.told)


def command_of(process: ProcessName, paths: RunPaths) -> list[str]:
    if process.spec.command:
        known = {"{run_dir}": str(paths.root), "{name}": process.name}
        return [re.sub(r"\{(run_dir|name)\}", lambda found: known[found[0]], part) for part in process.spec.command]
    return [*interpreter(own_python(process), with_busrl=True), "busrl.roles", str(paths.root), process.name]


def own_python(process: ProcessName) -> str:
    """The interpreter of another environment that the process runs in; empty: this one."""
    return "" if process.role == AGENT else process.spec.python


def environment_of(
    process: ProcessName, paths: RunPaths, more: Mapping[str, str], hosts: Sequence[str] = ()
) -> dict[str, str]:
    """Variables of a child: thread counts from `threads`, where the run is, what the topology adds, then `more`; and no
    proxy for the run's own addresses, `hosts` among them."""
    # Another Python has a busrl of its own; what is installed must not come before the standard library.
    own = [] if own_python(process) or os.path.basename(PACKAGES).endswith("-packages") else [PACKAGES]
    searched = [*own, *filter(None, [os.environ.get("PYTHONPATH")])]
    return proxies.environment({
        **os.environ,
        **dict.fromkeys(THREAD_VARIABLES, str(process.spec.threads)),
        "OMP_WAIT_POLICY": "PASSIVE",  # spinning workers of one process would starve the others
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONUNBUFFERED": "1",
        "PYTHONPATH": os.pathsep.join(searched),
        "BUSRL_RUN_DIR": str(paths.root),
        "BUSRL_NAME": process.name,
        **process.spec.env,
        **more,
    }, *hosts)


def start(
    process: ProcessName, paths: RunPaths, keep_fds: tuple[int, ...] = (), env: Mapping[str, str] | None = None,
    cores: frozenset[int] = frozenset(), mark: str = "", hosts: Sequence[str] = (),
) -> RunningChild:
    """Start one child on these cores (none named: any), with its mark and `env`; its output goes to its log."""
    known = environment_of(process, paths, {**(env or {}), MARK: mark}, hosts)
    command, log = command_of(process, paths), paths.log(process.name)
    if process.spec.command:
        return spawn(process.name, command, log, known, (), cores, mark)
    told, tells = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        known[VERDICT] = str(tells)
        child = spawn(process.name, command, log, known, (*keep_fds, tells), cores, mark)
    except BaseException:
        os.close(told)
        raise
    finally:
        os.close(tells)
    child.told = told
    return child


def spawn(
    name: str, command: Sequence[str], log: Path, env: Mapping[str, str], keep_fds: tuple[int, ...] = (),
    cores: frozenset[int] = frozenset(), mark: str = "", stdin: int = subprocess.DEVNULL,
) -> RunningChild:
    """A program in a session of its own that dies with launch; a descriptor `stdin` is closed here."""
    if threading.current_thread() is not threading.main_thread():
        raise BugError(f"{name} was to be started from a thread, with whose end the kernel would kill it")
    output, unlogged = _open_log(log)
    try:
        with output:
            popen = subprocess.Popen(
                command, env=env, stdin=stdin, stdout=output, stderr=output, pass_fds=keep_fds, start_new_session=True,
                preexec_fn=_prepare(os.getpid(), cores),
            )
    finally:
        if stdin >= 0:
            os.close(stdin)
    return RunningChild(name, popen, os.pidfd_open(popen.pid), mark, unlogged)


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
        if os.getppid() != parent:  # it died before the line above: no signal would come any more
            os._exit(1)

    return prepare


def last_lines(path: Path, count: int = 12) -> list[str]:
    try:
        text = b"".join(whole_file(path, TAIL_BYTES)).decode(errors="replace")
    except OSError as error:
        return [f"(its log cannot be read: {error})"]
    return [line for line in text.splitlines() if line.strip()][-count:]


def lines_of_life(path: Path) -> list[str]:
    """The last lines of a log, of the newest life of the process alone."""
    lines = last_lines(path, 200)
    begun = max((at for at, line in enumerate(lines) if STARTED.match(line)), default=-1)
    return lines[begun + 1 :]


# What libraries write while a process ends, whatever it died of.
NOISE = re.compile(
    r"nanobind: |See https://nanobind| - (leaked|\.\.\. skipped) |OMP: (Info|Warning|Hint)|terminate called|"
    r"WARNING: All log messages before absl::|[IWE]\d{4} \d\d:\d\d:\d+|(\[rank\d+\]:)?\[[IW]\d+ |"
    r".*resource_tracker\b.*|.*Warning: .*|  warnings\.warn\(|"
    r"(Current t|T)hread 0x|  File \"|Extension modules: |  <no Python frame>|Stack \(most recent call first\)"
)
ASIDE = ("Exception ignored ", "Error in atexit.", "Exception in thread ")  # and the traceback behind it
FATAL = re.compile(r"  what\(\): |Fatal Python error: ")


def last_words(path: Path) -> str:
    """Read what a child that died said last, in one line: its exception if its log ends in a traceback, else what ended
    it, else the last line; but not what libraries say of every end.

    Of this life of it alone; "" if it said nothing.
    """
    lines = _without_asides(lines_of_life(path))
    trace = max((at for at, line in enumerate(lines) if line.startswith(TRACE)), default=None)
    if trace is not None:
        return first_line("\n".join(lines[trace:]))
    fatal = [line.strip().removeprefix("what():").strip() for line in lines if FATAL.match(line)]
    own = [line for line in lines if not NOISE.match(line)]
    return first_line((fatal[:1] or own[-1:] or lines[-1:] or [""])[0])


def _without_asides(lines: Sequence[str]) -> list[str]:
    """Without the tracebacks of what Python calls ignored, or not the main thread's."""
    kept, aside = list[str](), ""
    for line in lines:
        if line.startswith(ASIDE):
            aside = "head"
        elif aside == "head" and line.startswith((TRACE, " ")):
            continue
        elif aside == "head":  # the exception itself ends it
            aside = ""
        else:
            kept.append(line)
    return kept


# -- signals that ask for an end ---------------------------------------------------------------------------------------

ORDERLY = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
LEFT_IGNORED = (signal.SIGINT, signal.SIGHUP)


class Interrupted(Exception):
    """A signal came while nothing was at stake any more (`Signals.interrupting`); its name is the text."""


class Signals:
    """Installed with `with`, in the main thread; what was there before is put back."""

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
        """Inside, a signal raises `Interrupted`: for work that only reads and that nobody has to wait for."""
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
        caught = [one for one in ORDERLY if one not in LEFT_IGNORED or signal.getsignal(one) is not signal.SIG_IGN]
        self._before = {number: signal.signal(number, self._received) for number in caught}
        self._before[signal.SIGTTOU] = signal.signal(signal.SIGTTOU, signal.SIG_IGN)
        self._wakeup = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        return self

    def __exit__(self, *_: object) -> None:
        signal.set_wakeup_fd(self._wakeup)
        for number, handler in self._before.items():
            signal.signal(number, handler)
        os.close(self._reader)
        os.close(self._writer)
