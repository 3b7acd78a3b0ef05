"""Signals to `launch` as something to wait for: the first asks for an orderly stop, a second one kills.

Talks to the kernel; knows nothing of children. Handlers only count; a descriptor becomes readable, so that a wait ends.
"""

from __future__ import annotations

import contextlib
import os
import signal
from types import FrameType

ORDERLY = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Signals:
    """Installed with `with`, in the main thread; what was there before is put back."""

    def __init__(self) -> None:
        self.first = 0
        self.count = 0
        self._reader, self._writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    @property
    def exit_code(self) -> int:
        """The exit code of a process that was ended by the first signal."""
        return 128 + self.first

    def fileno(self) -> int:
        return self._reader

    def clear(self) -> None:
        """Make the descriptor quiet again."""
        with contextlib.suppress(BlockingIOError):
            while os.read(self._reader, 4096):
                pass

    def _received(self, number: int, _frame: FrameType | None) -> None:
        self.first = self.first or number
        self.count += 1

    def __enter__(self) -> Signals:
        self._before = {number: signal.signal(number, self._received) for number in ORDERLY}
        self._wakeup = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        return self

    def __exit__(self, *_: object) -> None:
        signal.set_wakeup_fd(self._wakeup)
        for number, handler in self._before.items():
            signal.signal(number, handler)
        os.close(self._reader)
        os.close(self._writer)
