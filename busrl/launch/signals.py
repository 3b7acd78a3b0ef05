"""Signals to `launch` as something to wait for: the first asks for an orderly stop, a second one kills.

Talks to the kernel; knows nothing of children. Handlers only count; a descriptor becomes readable, so that a wait ends.

- SIGHUP and SIGINT that were ignored when launch began stay ignored: so ask `nohup`, and a shell that starts something
  in the background. SIGTERM is always heard: by it `busrl stop` asks.
- Output to a terminal that belongs to another job (SIGTTOU, under `stty tostop`) does not stop launch.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from types import FrameType

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
        heard = [one for one in ORDERLY if one not in LEFT_IGNORED or signal.getsignal(one) is not signal.SIG_IGN]
        self._before = {number: signal.signal(number, self._received) for number in heard}
        self._before[signal.SIGTTOU] = signal.signal(signal.SIGTTOU, signal.SIG_IGN)
        self._wakeup = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        return self

    def __exit__(self, *_: object) -> None:
        signal.set_wakeup_fd(self._wakeup)
        for number, handler in self._before.items():
            signal.signal(number, handler)
        os.close(self._reader)
        os.close(self._writer)
