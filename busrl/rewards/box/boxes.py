"""Code that a model wrote, run in a box: `run(code, stdin, limits) -> Result`, or `await run_async(...)`.

A box is a process tree with namespaces of its own (user, mount, IPC, PID, network without a device), under Landlock
(reads Python and /usr, writes its own folder in memory) and seccomp (system calls), with resource limits.
`launcher` makes it, `calls` is the program of tests. Calls may come from any number of threads. Knows nothing of
rewards, rings or agents.

- Nothing of a box outlives its `run`: it ends with process 1 of its namespace, daemons included.
- Where the kernel refuses one part of the box, nothing is run: `BoxRefused`.
- With `trust` there is no box: the code runs as this user, with limits on its resources alone; its daemons may stay.
- It limits accidents and reward hacking. Against a determined attacker use a container or a virtual machine.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

import msgspec

from busrl.rewards.box.launcher import MOUNTED

LAUNCHER, CALLS = Path(__file__).with_name("launcher.py"), Path(__file__).with_name("calls.py")
START_S = 20.0  # for making a box, on a busy machine; the time of its code begins afterwards
PYTHON = os.path.realpath(getattr(sys, "_base_executable", sys.executable))


class BoxRefused(RuntimeError):
    """The kernel refuses a part of the box, or did not make it in time; the code did not run to its end."""

    def __init__(self, why: str) -> None:
        super().__init__(f"this machine makes no box for code: {why}")


class Limits(msgspec.Struct, frozen=True):
    wall_s: float = 10.0  # from the start of its Python
    cpu_s: int = 10  # of each process
    memory_mb: int = 512  # address space of each process
    processes: int = 16
    file_bytes: int = 1 << 20
    folder_bytes: int = 16 << 20
    folder_files: int = 1024
    output_bytes: int = 64 << 10  # of stdout, and of stderr; the rest is read and dropped


class Result(msgspec.Struct, frozen=True):
    """The end of a run. `code` is the exit code, negative where a signal ended it, None where `wall_s` did."""

    code: int | None
    stdout: str
    stderr: str
    cut: bool  # more output than `output_bytes`
    seconds: float  # from the start of its Python


def run(code: str, stdin: str = "", limits: Limits | None = None, trust: bool = False) -> Result:
    """Run Python code in a box of its own; BoxRefused with the cause where no box can be made.

    The code has the standard library, stdin, and a folder that is empty except for its own file. Output and exit code
    prove nothing: code can print a result without computing it.
    """
    limits = limits or Limits()
    with tempfile.TemporaryFile() as entered:
        entered.write(stdin.encode(errors="replace"))
        entered.seek(0)
        with Box({"answer.py": code}, ["answer.py"], entered.fileno(), limits, trust) as box:
            return box.result()


async def run_async(code: str, stdin: str = "", limits: Limits | None = None, trust: bool = False) -> Result:
    """Run code from a coroutine, for example in a tool of an agent; after a cancellation the code runs to its limits.
    """
    return await asyncio.to_thread(run, code, stdin, limits, trust)


def run_tests(
    code: str, tests: Mapping[str, Any], limits: Limits | None = None, trust: bool = False
) -> tuple[list[dict[str, Any]], Result]:
    """Run `tests` (in the form of `busrl.rewards.box.calls`) in one box on the functions of `code` in another; returns
    the lines of the tests' program, and its end.

    The code serves calls over a socket and has no other access to the tests: values leave its box as plain data, and
    all lines come from the box of the tests.
    """
    limits, program = limits or Limits(), {"box_calls.py": CALLS.read_text()}
    answer_files, tester_files = program | {"answer.py": code}, program | {"tests.json": json.dumps(tests)}
    ours, theirs = socket.socketpair()
    with (
        ours, theirs,
        Box(answer_files, ["box_calls.py", "answer"], theirs.fileno(), limits, trust, quiet=True) as answer,
        Box(tester_files, ["box_calls.py", "tests"], ours.fileno(), limits, trust) as tester,
    ):  # fmt: skip
        ours.close()
        theirs.close()  # so that the end of one box closes the socket of the other
        answer.await_start()
        result = tester.result()
    lines = [json.loads(line) for line in result.stdout.splitlines(keepends=True) if line.endswith("\n")]
    return lines, result


def described(files: Mapping[str, bytes], words: list[str], limits: Limits, trust: str) -> list[str]:
    """The instructions for the launcher. `trust` names a folder to run the code in without a box; "" makes a box."""
    home = MOUNTED if os.getuid() == 0 and not trust else sys.base_prefix
    python = os.path.normpath(os.path.join(home, os.path.relpath(PYTHON, os.path.realpath(sys.base_prefix))))
    most = {
        "RLIMIT_AS": limits.memory_mb << 20, "RLIMIT_CPU": limits.cpu_s, "RLIMIT_FSIZE": limits.file_bytes,
        "RLIMIT_NOFILE": 64, "RLIMIT_CORE": 0, "RLIMIT_SIGPENDING": 256, "RLIMIT_MSGQUEUE": 0,
        **({} if trust else {"RLIMIT_NPROC": limits.processes}),
    }  # fmt: skip
    # A Python that is bound to another path for the box would find no library there, or that of another Python.
    shared = home == MOUNTED and any(Path(sys.base_prefix, "lib").glob("libpython*.so*"))
    words_by_name: dict[str, list[Any]] = {
        "library": [f"{home}/lib"] if shared else [""],
        "python_home": [sys.base_prefix], "trust": [trust], "folder_files": [limits.folder_files],
        "folder_bytes": [limits.folder_bytes + 2 * sum(map(len, files.values()))],
        "command": [python, "-I", "-S", "-B", *words],
        "readable": [home, "/usr", "/lib", "/lib64", "/etc/ld.so.cache", "/dev/urandom"],
        "limit": [f"{name}={value}" for name, value in most.items()],
        "file": [f"{name}={len(content)}" for name, content in files.items()],
    }  # fmt: skip
    return [f"{name}={value}" for name, values in words_by_name.items() for value in values]


def refusal() -> str:
    """The reason why this machine can make no box; empty where it can. Makes a box to try it."""
    try:
        result = run("print(6 * 7)", limits=Limits(wall_s=START_S))
    except BoxRefused as problem:
        return str(problem)
    return "" if result.stdout == "42\n" else f"a first program in a box failed: {result}"


def parts() -> str:
    """Each part of a box, and whether this kernel grants it to this user."""
    done = subprocess.run([sys.executable, "-I", "-S", str(LAUNCHER), "parts"], capture_output=True, timeout=START_S,
                          check=True, env={}, text=True)
    return done.stdout.rstrip()


class Box:
    """A box around one command. A context manager, whose end ends every process of the box."""

    def __init__(
        self, files: Mapping[str, str], words: list[str], stdin: int, limits: Limits, trust: bool = False,
        quiet: bool = False,
    ) -> None:
        self.limits, self._begun, self._status = limits, time.monotonic(), b""
        self._folder = tempfile.TemporaryDirectory(prefix="busrl-code-", ignore_cleanup_errors=True) if trust else None
        output = subprocess.DEVNULL if quiet else subprocess.PIPE
        read, write = os.pipe()
        self._status_pipe: IO[bytes] = os.fdopen(read, "rb", buffering=0)
        try:
            with tempfile.TemporaryFile() as file:
                contents = {name: text.encode(errors="replace") for name, text in files.items()}
                file.write(b"".join(contents.values()))
                file.seek(0)
                instructions = described(contents, words, limits, self._folder.name if self._folder else "")
                launcher = [sys.executable, "-I", "-S", str(LAUNCHER), str(file.fileno()), str(write), str(os.getpid())]
                self._process = subprocess.Popen(
                    [*launcher, *instructions], stdin=stdin, stdout=output, stderr=output, env={},
                    start_new_session=True, pass_fds=(file.fileno(), write),
                )
        finally:
            os.close(write)

    def __enter__(self) -> Box:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)  # the launcher and process 1, whose end ends all of the box
        with self._process, self._status_pipe:
            pass
        if self._folder:
            self._folder.cleanup()

    def await_start(self) -> None:
        """Wait until the command begins; BoxRefused where it never does."""
        while b"\n" not in self._status:
            left = self._begun + START_S - time.monotonic()
            with selectors.DefaultSelector() as ready:
                ready.register(self._status_pipe, selectors.EVENT_READ)
                events = ready.select(max(0.0, left))
            if not events:
                raise BoxRefused(f"it was not there after {START_S:g} s")
            if not (data := self._status_pipe.read(4096)):
                raise BoxRefused(self._last_words())
            self._status += data
        if self._status.splitlines()[0] != b"started":
            raise BoxRefused(self._refused())
        self._begun = time.monotonic()

    def result(self) -> Result:
        """Wait for the command's end, at most `wall_s`, and return how it ended."""
        self.await_start()
        out, err, ended = self._read(self._begun + self.limits.wall_s)
        seconds, code = time.monotonic() - self._begun, None
        if ended:
            self._status += self._status_pipe.read()
            how, _, number = self._status.splitlines()[-1].partition(b" ")
            if how != b"code":
                raise BoxRefused(self._refused() or "its process 1 was ended from outside")
            code = int(number)
        most = self.limits.output_bytes
        printed, complained = (text[:most].decode(errors="replace") for text in (out, err))
        return Result(code, printed, complained, max(len(out), len(err)) > most, seconds)

    def _refused(self) -> str:
        """The reason for which the launcher, or process 1, stopped; empty if it wrote none."""
        word, _, why = self._status.splitlines()[-1].partition(b" ")
        return why.decode(errors="replace") if word == b"refused" else ""

    def _last_words(self) -> str:
        if not self._process.stderr:
            return "no word of it"
        text = self._process.stderr.read()[-500:].decode(errors="replace")
        return f"the launcher of a box ended without a word: {text}"

    def _read(self, deadline: float) -> tuple[bytes, bytes, bool]:
        """The bytes of stdout and stderr, of each at most one more than `output_bytes`, and whether both were closed in
        time."""
        out, err = bytearray(), bytearray()
        with selectors.DefaultSelector() as ready:
            for stream, buffer in ((self._process.stdout, out), (self._process.stderr, err)):
                assert stream
                ready.register(stream, selectors.EVENT_READ, buffer)
            while ready.get_map() and (left := deadline - time.monotonic()) > 0:
                for key, _ in ready.select(left):
                    data = os.read(key.fd, 1 << 16)
                    key.data.extend(data[: self.limits.output_bytes + 1 - len(key.data)])
                    if not data:
                        ready.unregister(key.fileobj)
            ended = not ready.get_map()
        return bytes(out), bytes(err), ended
