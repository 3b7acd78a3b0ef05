"""Code that a model wrote, run in a box: `run(code, stdin, limits) -> Result`.

A box is a process tree with namespaces of its own (user, mount, IPC, PID, network without a device), under Landlock
(reads Python and /usr, writes its own folder in memory), with resource limits. `busrl.rewards.box_launcher` makes it.
Knows nothing of rewards, rings or agents; calls may come from any number of threads.

- Nothing of a box outlives its `run`: it ends with process 1 of its namespace, daemons included.
- Where the kernel refuses one part of the box, nothing is run: `BoxRefused`.
- It limits accidents and reward hacking. Against a determined attacker use a container or a virtual machine.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import IO, Any

import msgspec

from busrl.rewards.box_launcher import MOUNTED

LAUNCHER = Path(__file__).with_name("box_launcher.py")
START_S = 20.0  # what making a box may take beside the time of its code, on a busy machine
PYTHON = os.path.realpath(getattr(sys, "_base_executable", sys.executable))


class BoxRefused(RuntimeError):
    """The kernel does not allow a part of the box, or did not make it in time; the code did not run to its end."""


class Limits(msgspec.Struct, frozen=True):
    """What the code in a box may use."""

    wall_s: float = 10.0  # from the start of the launcher
    cpu_s: int = 10  # of each process
    memory_mb: int = 512  # address space of each process
    processes: int = 16
    file_bytes: int = 1 << 20
    folder_bytes: int = 16 << 20
    folder_files: int = 1024
    output_bytes: int = 64 << 10  # of stdout, and of stderr; the rest is read and dropped


class Result(msgspec.Struct, frozen=True):
    """How the code ended. `code` is its exit code, negative where a signal ended it, None where `wall_s` did."""

    code: int | None
    stdout: str
    stderr: str
    cut: bool  # more output than `output_bytes`
    seconds: float


def run(code: str, stdin: str = "", limits: Limits | None = None) -> Result:
    """Run Python code in a box of its own; BoxRefused with the cause where there can be none.

    The code has the standard library, stdin, and a folder that is empty but for itself. Its output and its exit code
    are its own words: they prove nothing that the code could not have said without doing it.
    """
    limits, begun = limits or Limits(), time.monotonic()
    with tempfile.TemporaryFile() as entered, tempfile.TemporaryFile() as spec:
        entered.write(stdin.encode(errors="replace"))
        entered.seek(0)
        spec.write(json.dumps(described(code, limits)).encode())
        spec.seek(0)
        told, status = os.pipe()
        with open(told, "rb") as answers:
            try:
                process = _started(entered, spec, status)
            finally:
                os.close(status)
            with process:
                out, err, ended = _read(process, begun + limits.wall_s, limits.output_bytes)
                said = answers.read()
    return _result(said, out, err, ended, limits, time.monotonic() - begun)


def described(code: str, limits: Limits) -> dict[str, Any]:
    """What the launcher is told."""
    home = MOUNTED if os.getuid() == 0 else sys.base_prefix
    python = os.path.normpath(os.path.join(home, os.path.relpath(PYTHON, os.path.realpath(sys.base_prefix))))
    return {
        "python_home": sys.base_prefix,
        "command": [python, "-I", "-S", "-B", "answer.py"],
        "files": {"answer.py": code},
        "readable": [home, "/usr", "/lib", "/lib64", "/etc/ld.so.cache", "/dev/urandom"],
        "folder_bytes": limits.folder_bytes + 2 * len(code.encode(errors="replace")),
        "folder_files": limits.folder_files,
        "limits": {
            "RLIMIT_AS": limits.memory_mb << 20, "RLIMIT_CPU": limits.cpu_s, "RLIMIT_FSIZE": limits.file_bytes,
            "RLIMIT_NOFILE": 64, "RLIMIT_NPROC": limits.processes, "RLIMIT_CORE": 0,
        },
    }  # fmt: skip


def refusal() -> str:
    """Why this machine can make no box; empty where it can. Makes one."""
    try:
        result = run("print(6 * 7)", limits=Limits(wall_s=START_S))
    except BoxRefused as problem:
        return str(problem)
    return "" if result.stdout == "42\n" else f"a first program in a box failed: {result}"


def _started(entered: IO[bytes], spec: IO[bytes], status: int) -> subprocess.Popen[bytes]:
    words = [sys.executable, "-I", "-S", str(LAUNCHER), str(spec.fileno()), str(status), str(os.getpid())]
    return subprocess.Popen(
        words, stdin=entered, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env={}, start_new_session=True,
        pass_fds=(spec.fileno(), status),
    )  # fmt: skip


def _read(process: subprocess.Popen[bytes], deadline: float, most: int) -> tuple[bytes, bytes, bool]:
    """What it wrote to stdout and stderr, at most one byte more than `most` of each, and whether it ended in time."""
    assert process.stdout and process.stderr
    kept = {process.stdout: bytearray(), process.stderr: bytearray()}
    with selectors.DefaultSelector() as ready:
        for stream in kept:
            ready.register(stream, selectors.EVENT_READ)
        while ready.get_map() and (left := deadline - time.monotonic()) > 0:
            for found, _ in ready.select(left):
                stream = next(one for one in kept if one is found.fileobj)
                data = os.read(stream.fileno(), 1 << 16)
                kept[stream] += data[: most + 1 - len(kept[stream])]
                if not data:
                    ready.unregister(stream)
        ended = not ready.get_map()
    with contextlib.suppress(ProcessLookupError):
        if not ended:
            os.killpg(process.pid, signal.SIGKILL)  # the launcher and process 1, and by it all of the box
    return bytes(kept[process.stdout]), bytes(kept[process.stderr]), ended


def _result(said: bytes, out: bytes, err: bytes, ended: bool, limits: Limits, seconds: float) -> Result:
    status = json.loads(said) if said else {}
    if "refused" in status:
        raise BoxRefused(f"this machine makes no box for code: {status['refused']}")
    if ended and not said:
        raise BoxRefused(f"the launcher of a box ended without a word: {err.decode(errors='replace')[-500:]}")
    most = limits.output_bytes
    printed, complained = (text[:most].decode(errors="replace") for text in (out, err))
    return Result(status.get("code"), printed, complained, max(len(out), len(err)) > most, seconds)
