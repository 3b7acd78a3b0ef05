"""Code that a model wrote, run in a box: `run(code, stdin, limits) -> Result`, or `await run_async(...)`.

A box is a process tree with namespaces of its own (user, mount, IPC, PID, network without a device), under Landlock
(reads Python and /usr, writes its own folder in memory) and seccomp (system calls), with resource limits.
`busrl.rewards.box_launcher` makes it. Calls may come from any number of threads. `python -m busrl.rewards.box` prints
what this kernel has. Knows nothing of rewards, rings or agents.

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

from busrl.rewards.box_launcher import MOUNTED

LAUNCHER, CALLS = Path(__file__).with_name("box_launcher.py"), Path(__file__).with_name("box_calls.py")
START_S = 20.0  # what making a box may take beside the time of its code, on a busy machine
PYTHON = os.path.realpath(getattr(sys, "_base_executable", sys.executable))


class BoxRefused(RuntimeError):
    """The kernel does not allow a part of the box, or did not make it in time; the code did not run to its end."""

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
    """The end of the code. `code` is its exit code, negative where a signal ended it, None where `wall_s` did."""

    code: int | None
    stdout: str
    stderr: str
    cut: bool  # more output than `output_bytes`
    seconds: float  # from the start of its Python


def run(code: str, stdin: str = "", limits: Limits | None = None, trust: bool = False) -> Result:
    """Run Python code in a box of its own; BoxRefused with the cause where there can be none.

    The code has the standard library, stdin, and a folder that is empty but for itself. Its output and its exit code
    are its own words: they prove nothing that the code could not have said without doing it.
    """
    limits = limits or Limits()
    with tempfile.TemporaryFile() as entered:
        entered.write(stdin.encode(errors="replace"))
        entered.seek(0)
        with Box({"answer.py": code}, ["answer.py"], entered.fileno(), limits, trust) as box:
            return box.result()


async def run_async(code: str, stdin: str = "", limits: Limits | None = None, trust: bool = False) -> Result:
    """Run code from a coroutine, for example a tool of an agent; what is cancelled runs to its limits."""
    return await asyncio.to_thread(run, code, stdin, limits, trust)


def run_tests(
    code: str, tests: Mapping[str, Any], limits: Limits | None = None, trust: bool = False
) -> tuple[list[dict[str, Any]], Result]:
    """Run `tests` (as `busrl.rewards.box_calls` has them) in one box on the functions of `code` in another; what the
    first said, line by line, and how it ended.

    The code serves calls over a socket and has nothing else of the tests: values come out of its box as plain data, and
    what is said here is said by the tests.
    """
    limits, program = limits or Limits(), {"box_calls.py": CALLS.read_text()}
    answers, told = program | {"answer.py": code}, program | {"tests.json": json.dumps(tests)}
    ours, theirs = socket.socketpair()
    with (
        ours, theirs,
        Box(answers, ["box_calls.py", "answer"], theirs.fileno(), limits, trust, quiet=True) as answer,
        Box(told, ["box_calls.py", "tests"], ours.fileno(), limits, trust) as tester,
    ):  # fmt: skip
        ours.close()
        theirs.close()  # so that the end of one box is seen in the other
        answer.await_start()
        result = tester.result()
    said = [json.loads(line) for line in result.stdout.splitlines(keepends=True) if line.endswith("\n")]
    return said, result


def described(files: Mapping[str, bytes], words: list[str], limits: Limits, trust: str) -> list[str]:
    """The instructions for the launcher. `trust` names a folder to run the code in without a box; "" makes a box."""
    home = MOUNTED if os.getuid() == 0 and not trust else sys.base_prefix
    python = os.path.normpath(os.path.join(home, os.path.relpath(PYTHON, os.path.realpath(sys.base_prefix))))
    most = {
        "RLIMIT_AS": limits.memory_mb << 20, "RLIMIT_CPU": limits.cpu_s, "RLIMIT_FSIZE": limits.file_bytes,
        "RLIMIT_NOFILE": 64, "RLIMIT_CORE": 0, "RLIMIT_SIGPENDING": 256, "RLIMIT_MSGQUEUE": 0,
        **({} if trust else {"RLIMIT_NPROC": limits.processes}),
    }  # fmt: skip
    # A Python that was moved for the box would find its library no more, or that of another Python.
    shared = home == MOUNTED and any(Path(sys.base_prefix, "lib").glob("libpython*.so*"))
    told: dict[str, list[Any]] = {
        "library": [f"{home}/lib"] if shared else [""],
        "python_home": [sys.base_prefix], "trust": [trust], "folder_files": [limits.folder_files],
        "folder_bytes": [limits.folder_bytes + 2 * sum(map(len, files.values()))],
        "command": [python, "-I", "-S", "-B", *words],
        "readable": [home, "/usr", "/lib", "/lib64", "/etc/ld.so.cache", "/dev/urandom"],
        "limit": [f"{name}={value}" for name, value in most.items()],
        "file": [f"{name}={len(content)}" for name, content in files.items()],
    }  # fmt: skip
    return [f"{name}={value}" for name, values in told.items() for value in values]


def refusal() -> str:
    """The reason why this machine can make no box; empty where it can. Makes one."""
    try:
        result = run("print(6 * 7)", limits=Limits(wall_s=START_S))
    except BoxRefused as problem:
        return str(problem)
    return "" if result.stdout == "42\n" else f"a first program in a box failed: {result}"


def parts() -> str:
    """Each part of a box, and whether this kernel has it for this user."""
    done = subprocess.run([sys.executable, "-I", "-S", str(LAUNCHER), "parts"], capture_output=True, timeout=START_S,
                          check=True, env={}, text=True)
    return done.stdout.rstrip()


class Box:
    """A box that is being made around one command. Use it with `with`, whose end ends all of the box."""

    def __init__(
        self, files: Mapping[str, str], words: list[str], stdin: int, limits: Limits, trust: bool = False,
        quiet: bool = False,
    ) -> None:
        self.limits, self._begun, self._status = limits, time.monotonic(), b""
        self._folder = tempfile.TemporaryDirectory(prefix="busrl-code-", ignore_cleanup_errors=True) if trust else None
        output = subprocess.DEVNULL if quiet else subprocess.PIPE
        read, write = os.pipe()
        self._told: IO[bytes] = os.fdopen(read, "rb", buffering=0)
        try:
            with tempfile.TemporaryFile() as held:
                contents = {name: text.encode(errors="replace") for name, text in files.items()}
                held.write(b"".join(contents.values()))
                held.seek(0)
                told = described(contents, words, limits, self._folder.name if self._folder else "")
                launcher = [sys.executable, "-I", "-S", str(LAUNCHER), str(held.fileno()), str(write), str(os.getpid())]
                self._process = subprocess.Popen(
                    [*launcher, *told], stdin=stdin, stdout=output, stderr=output, env={}, start_new_session=True,
                    pass_fds=(held.fileno(), write),
                )  # fmt: skip
        finally:
            os.close(write)

    def __enter__(self) -> Box:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)  # the launcher and process 1, and by it all of the box
        with self._process, self._told:
            pass
        if self._folder:
            self._folder.cleanup()

    def await_start(self) -> None:
        """Wait until the command begins; BoxRefused where it never does."""
        while b"\n" not in self._status:
            left = self._begun + START_S - time.monotonic()
            with selectors.DefaultSelector() as ready:
                ready.register(self._told, selectors.EVENT_READ)
                found = ready.select(max(0.0, left))
            if not found:
                raise BoxRefused(f"it was not there after {START_S:g} s")
            if not (data := self._told.read(4096)):
                raise BoxRefused(self._last_words())
            self._status += data
        if self._status.splitlines()[0] != b"started":
            raise BoxRefused(self._refused())
        self._begun = time.monotonic()

    def result(self) -> Result:
        """Wait for the command's end, at most for its time, and say how it ended."""
        self.await_start()
        out, err, ended = self._read(self._begun + self.limits.wall_s)
        seconds, code = time.monotonic() - self._begun, None
        if ended:
            self._status += self._told.read()
            how, _, number = self._status.splitlines()[-1].partition(b" ")
            if how != b"code":
                raise BoxRefused(self._refused() or "its process 1 was ended from outside")
            code = int(number)
        most = self.limits.output_bytes
        printed, complained = (text[:most].decode(errors="replace") for text in (out, err))
        return Result(code, printed, complained, max(len(out), len(err)) > most, seconds)

    def _refused(self) -> str:
        """The reason why the launcher, or process 1, went no further; empty if it said nothing of the kind."""
        word, _, why = self._status.splitlines()[-1].partition(b" ")
        return why.decode(errors="replace") if word == b"refused" else ""

    def _last_words(self) -> str:
        if not self._process.stderr:
            return "no word of it"
        said = self._process.stderr.read()[-500:].decode(errors="replace")
        return f"the launcher of a box ended without a word: {said}"

    def _read(self, deadline: float) -> tuple[bytes, bytes, bool]:
        """The bytes that it wrote to stdout and stderr, at most one byte more of each than is kept, and whether it
        ended in time."""
        out, err = bytearray(), bytearray()
        with selectors.DefaultSelector() as ready:
            for stream, kept in ((self._process.stdout, out), (self._process.stderr, err)):
                assert stream
                ready.register(stream, selectors.EVENT_READ, kept)
            while ready.get_map() and (left := deadline - time.monotonic()) > 0:
                for found, _ in ready.select(left):
                    data = os.read(found.fd, 1 << 16)
                    found.data.extend(data[: self.limits.output_bytes + 1 - len(found.data)])
                    if not data:
                        ready.unregister(found.fileobj)
            ended = not ready.get_map()
        return bytes(out), bytes(err), ended


if __name__ == "__main__":
    print(parts())
    print(refusal() or "a first program ran in a box")
