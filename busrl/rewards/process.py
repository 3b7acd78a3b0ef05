"""One child process of a reward pool, seen from its parent: non-blocking pipes, start, kill.

Talks to the operating system. Knows nothing of samples, deadlines or blame: that is `lane`.

- Nothing here waits, except `close` for the end of a process that it has killed.
- The child leads its own session; killing takes its process group, so what user code has started goes with it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import signal
import subprocess
import sys
from collections.abc import Sequence
from typing import IO

import msgspec

from busrl.errors import MachineError
from busrl.rewards.frames import Answer, Setup, Splitter, frame

PIPE_BYTES = 1 << 20
READ_BYTES = 1 << 18
END_S = 5.0  # a killed process that does not go within this time is stuck in the kernel
_encoder = msgspec.msgpack.Encoder()
_answers = msgspec.msgpack.Decoder(Answer)


class ChildProcess:
    """States: running -> ended (its pipe is closed) -> closed."""

    def __init__(self, setup: Setup, poller: select.epoll, pass_fds: Sequence[int] = ()) -> None:
        # From the main thread: the child is tied to the life of the thread that starts it.
        self._process = subprocess.Popen(
            [sys.executable, "-m", "busrl.rewards.child", str(os.getpid())],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0, start_new_session=True, pass_fds=pass_fds,
        )  # fmt: skip
        self._poller = poller
        self._in, self._out = _pipe(self._process.stdin), _pipe(self._process.stdout)
        self._pending = bytearray()
        self._splitter = Splitter()
        self._writing = False
        self.ended = False
        poller.register(self._out, select.EPOLLIN)
        self.send(setup)

    @property
    def pid(self) -> int:
        return self._process.pid

    def send(self, message: object) -> None:
        """Queue one frame and write what the pipe takes."""
        self._pending += frame(_encoder, message)
        self.flush()

    def flush(self) -> None:
        """Write what is queued; the poller wakes up when there is room for the rest."""
        try:
            while self._pending:
                del self._pending[: os.write(self._in, self._pending)]
        except BlockingIOError:
            pass
        except BrokenPipeError:
            self._pending.clear()  # it is dead; the end of its output says so too
        self._want_write(bool(self._pending))

    def read(self) -> list[Answer]:
        """Every answer that is complete; sets `ended` when the process has closed its end."""
        bodies: list[bytes] = []
        while not self.ended:
            try:
                data = os.read(self._out, READ_BYTES)
            except BlockingIOError:
                break
            if data:
                bodies += self._splitter.feed(data)
            else:
                self.ended = True
        return [_answers.decode(body) for body in bodies]

    def stop(self) -> None:
        """Let it end by itself after what it is doing: it sees the end of its input."""
        self._want_write(False)
        if self._in >= 0:
            os.close(self._in)
            self._in = -1

    def close(self, grace_s: float = 0.0) -> str:
        """End it and its children, and say how it ended. `grace_s`: time to end by itself first."""
        self.stop()
        if grace_s:
            with contextlib.suppress(OSError):
                _wait_unreaped(self._process.pid, grace_s)
        # Before it is reaped: its process id, and so its group's, can not belong to anybody else yet.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        try:
            status = self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            raise MachineError(f"reward child {self.pid} does not end {END_S:g} s after SIGKILL") from None
        if self._out >= 0:
            self._poller.unregister(self._out)
            os.close(self._out)
            self._out = -1
        return f"killed by {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"

    def _want_write(self, wanted: bool) -> None:
        if wanted != self._writing and self._in >= 0:
            self._writing = wanted
            if wanted:
                self._poller.register(self._in, select.EPOLLOUT)
            else:
                self._poller.unregister(self._in)


def _pipe(stream: IO[bytes] | None) -> int:
    """Our end of a pipe as a bare non-blocking descriptor, larger than the default."""
    assert stream is not None
    fd = os.dup(stream.fileno())
    stream.close()
    os.set_blocking(fd, False)
    with contextlib.suppress(OSError):  # a limit on pipe memory costs speed only
        fcntl.fcntl(fd, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
    return fd


def _wait_unreaped(pid: int, timeout_s: float) -> None:
    """Wait for the end of a process without collecting it."""
    fd = os.pidfd_open(pid)
    poller = select.poll()
    poller.register(fd, select.POLLIN)
    try:
        poller.poll(timeout_s * 1000)
    finally:
        os.close(fd)
