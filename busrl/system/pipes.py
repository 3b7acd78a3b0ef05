"""The child's side of the pipes to its parent, for processes in which code of the user's runs.

Used by the children of `rewards` and of `agents`, which say what the lines are. Knows nothing of either.

- User code can neither read nor write the pipes; what it prints goes to stderr, of each call the first MiB.
- A child dies with its parent, also in the middle of user code.
- A copy that user code makes of the process by fork writes nothing.
"""

from __future__ import annotations

import contextlib
import ctypes
import io
import os
import signal
import sys
from typing import Any

import msgspec

PR_SET_PDEATHSIG = 1
READ_BYTES = 1 << 20
PRINTED_BYTES = 1 << 20  # of a call, and of importing it
OWN_PID = os.getpid()


class Requests:
    """Lines of the parent; `over` when it has closed the pipe."""

    def __init__(self, fd: int) -> None:
        self.fd, self.over, self._rest = fd, False, b""

    def read(self) -> list[bytes]:
        """Lines that one read completes, maybe none."""
        data = os.read(self.fd, READ_BYTES)
        self.over = not data
        *found, self._rest = (self._rest + data).split(b"\n") if data else [b""]
        return found


def private_pipes() -> tuple[Requests, int]:
    """Move the two pipes away from descriptors 0 and 1, so that user code can neither read nor write them."""
    requests, answers = Requests(os.dup(0)), os.dup(1)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(2, 1)
    os.close(nothing)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115 - lives as long as the process
    sys.stdout = sys.stderr = io.TextIOWrapper(printed, errors="backslashreplace", write_through=True)
    return requests, answers


class Printed(io.FileIO):
    """Output of user code, at most PRINTED_BYTES of it for each outcome; the rest is dropped."""

    left = PRINTED_BYTES

    def begin(self) -> None:
        """Give the next outcome its whole share."""
        self.left = PRINTED_BYTES

    def write(self, data: Any, /) -> int:
        whole, taken = len(data), memoryview(data)[: max(0, self.left)]
        self.left -= whole
        while taken:
            taken = taken[super().write(taken) or 0 :]
        if self.left < 0 <= self.left + whole:
            super().write(b"\n(busrl: the rest of what this call prints is dropped)\n")
        return whole


printed = Printed(2, "w", closefd=False)


def die_with_parent(parent: int) -> None:
    """Ask the kernel for SIGKILL when the parent's main thread ends; it may have ended already."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def write(fd: int, line: bytes, lock: contextlib.AbstractContextManager[Any] | None = None) -> None:
    """All of the line; a parent that is gone ends this process, and so does being a copy of it. `lock`: where several
    threads write."""
    if os.getpid() != OWN_PID:
        os._exit(0)
    data = memoryview(line)
    with lock or contextlib.nullcontext():
        try:
            while data:
                data = data[os.write(fd, data) :]
        except BrokenPipeError:
            os._exit(0)


def line_of(frame: msgspec.Struct) -> bytes:
    """A frame as a line of JSON. Half a character in its texts, which nobody can encode, is named by its number."""
    try:
        return msgspec.json.encode(frame) + b"\n"
    except UnicodeEncodeError:
        return msgspec.json.encode(_named_halves(msgspec.to_builtins(frame))) + b"\n"


def _named_halves(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode(errors="backslashreplace").decode()
    if isinstance(value, dict):
        return {_named_halves(name): _named_halves(one) for name, one in value.items()}
    return [_named_halves(one) for one in value] if isinstance(value, (list, tuple)) else value
