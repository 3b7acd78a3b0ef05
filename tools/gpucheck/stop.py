"""Ending: what runs is ended by a signal to the tool, and dies with it where the tool itself is killed.

Used by the tool for its checks, and by a check for the processes that it starts. Knows nothing of what they do.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
from pathlib import Path
from types import FrameType

TOOL = Path(__file__).resolve().parents[1] / "gpu_check.py"
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
PR_SET_PDEATHSIG = 1


class Stop:
    """Whether a signal asked the tool to end. The check that runs then is killed with its process group."""

    def __init__(self) -> None:
        self.number = 0
        self._group = 0

    def listen(self) -> None:
        for number in SIGNALS:
            signal.signal(number, self._received)

    @property
    def name(self) -> str:
        return signal.Signals(self.number).name if self.number else ""

    def _received(self, number: int, frame: FrameType | None) -> None:
        self.number = self.number or number
        self._kill()

    def runs(self, group: int) -> None:
        """This process group is what runs now; 0: none is. A signal from before counts for it too."""
        self._group = group
        if self.number:
            self._kill()

    def _kill(self) -> None:
        if self._group:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._group, signal.SIGKILL)


def dies_with_parent(*command: str) -> list[str]:
    """That command in a process that the kernel kills when this one dies, however it dies."""
    return [sys.executable, str(TOOL), "--child-of", str(os.getpid()), *command]


def become(parent: int, command: list[str]) -> None:
    """The other side of `dies_with_parent`. A parent that is dead already sends no signal."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() == parent:
        os.execvp(command[0], command)
