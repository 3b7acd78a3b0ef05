"""The child's side of the pipes to its parent, for processes in which user code runs.

Used by the children of `rewards` and of `agents`, which define the lines. Knows nothing of either.

- User code can neither read nor write the pipes. Its output goes to stderr, the first MiB of each call.
- A copy of the process that user code makes by fork writes nothing.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
from typing import Any

import msgspec

READ_BYTES = 1 << 20
PRINTED_BYTES = 1 << 20  # that a call may print, and an import
OWN_PID = os.getpid()


class Requests:
    """The lines of the parent; `over` once it has closed the pipe."""

    def __init__(self, fd: int) -> None:
        self.fd, self.over, self._rest = fd, False, b""

    def read(self) -> list[bytes]:
        """The lines that a read completes; there may be none."""
        data = os.read(self.fd, READ_BYTES)
        self.over = not data
        *lines, self._rest = (self._rest + data).split(b"\n") if data else [b""]
        return lines


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
        size, rest = len(data), memoryview(data)[: max(0, self.left)]
        self.left -= size
        while rest:
            rest = rest[super().write(rest) or 0 :]
        if self.left < 0 <= self.left + size:
            super().write(b"\n(busrl: the rest of what this call prints is dropped)\n")
        return size


printed = Printed(2, "w", closefd=False)


def write(fd: int, line: bytes, lock: contextlib.AbstractContextManager[Any] | None = None) -> None:
    """Write all of the line. Ends this process if its parent is gone, or if it is a copy made by fork. `lock`: where
    several threads write."""
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
    """The frame as a line of JSON. Half a character in its texts, which has no encoding, is written as its number."""
    try:
        return msgspec.json.encode(frame) + b"\n"
    except UnicodeEncodeError:
        return msgspec.json.encode(_named_halves(msgspec.to_builtins(frame))) + b"\n"


def _named_halves(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode(errors="backslashreplace").decode()
    if isinstance(value, dict):
        return {_named_halves(name): _named_halves(item) for name, item in value.items()}
    return [_named_halves(item) for item in value] if isinstance(value, (list, tuple)) else value
