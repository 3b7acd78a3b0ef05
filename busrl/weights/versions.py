"""Which version of the weights is newest in the shared-memory segment, read without torch and without copying it.

Used by the receiver of `weights.shm`, which adds the copy, and as it stands by a process that has no model (the
scripted engine). Talks to one file in /dev/shm (`weights.segment`). Knows nothing of tensors.

- A version is named only if its buffer is complete and was not written to while its words were read.
"""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

from busrl.errors import WeightsTimeout
from busrl.weights import segment as layout
from busrl.weights.base import NOTHING, Kind, StepTable
from busrl.weights.segment import SEQ, STEP, VERSION, WRITING, Segment

if TYPE_CHECKING:
    import torch

LOOK_EVERY_S = 0.005


class VersionReceiver:
    """Follows the newest version; a fetch only notes which one it is. `timeout_s` bounds a fetch."""

    kind: Kind = "tensors"

    def __init__(self, path: str | Path, *, timeout_s: float = 10.0) -> None:
        self.path = Path(path)
        self._timeout_s = timeout_s
        self._segment: Segment | None = None
        self._steps = StepTable()

    def newest(self) -> tuple[int, int]:
        segment = self._current()
        while segment is not None and (k := segment.newest()) is not None:
            seq, stamp = int(segment.buffer[k][SEQ]), stamp_of(segment, k)
            if not seq & 1 and int(segment.buffer[k][SEQ]) == seq:
                return stamp
        return NOTHING

    def wait_for(self, version: int, timeout_s: float) -> tuple[int, int]:
        """Nothing in another process's memory can be waited on, so this looks every few milliseconds."""
        deadline, pause = time.monotonic() + timeout_s, threading.Event()
        while (found := self.newest())[0] < version:
            if time.monotonic() > deadline:
                raise WeightsTimeout(f"{self._where()}: no version {version} after {timeout_s:g} s, newest {found[0]}")
            pause.wait(LOOK_EVERY_S)
        return found

    def fetch(self, params: dict[str, torch.Tensor]) -> tuple[int, int]:
        deadline = time.monotonic() + self._timeout_s
        while True:
            segment = self._current()
            stamp = None if segment is None else self._take(segment, params)
            if stamp is not None:
                self._steps.add(*stamp)
                return stamp
            if segment is None or segment.newest() is None or time.monotonic() > deadline:
                raise WeightsTimeout(f"{self._where()}: no complete version within {self._timeout_s:g} s")

    def step_of(self, version: int) -> int:
        return self._steps.step_of(version)

    def close(self) -> None:
        if self._segment is not None:
            self._segment.close()
            self._segment = None

    def _take(self, segment: Segment, params: dict[str, torch.Tensor]) -> tuple[int, int] | None:
        """Make the newest complete version one's own; None if it was written to meanwhile. Here: take note of it."""
        stamp = self.newest()
        return None if stamp == NOTHING else stamp

    def _current(self) -> Segment | None:
        """The segment that the path leads to now."""
        if self._segment is not None and not self._segment.still_named():
            self.close()
        if self._segment is None:
            self._segment = layout.attach(self.path)
        return self._segment

    def _where(self) -> str:
        """The path, and what its writer was doing."""
        if self._segment is None:
            return f"{self.path} is not there: the learner has published nothing yet"
        pid = self._segment.writer_pid
        alive = "alive" if os.path.exists(f"/proc/{pid}") else "dead"
        torn = [int(words[WRITING]) for words in self._segment.buffer if int(words[SEQ]) & 1]
        doing = f", in the middle of version {torn[0]}" if torn else ""
        return f"{self.path}: writer pid {pid} is {alive}{doing}"


def stamp_of(segment: Segment, k: int) -> tuple[int, int]:
    """Version and step of buffer k."""
    return int(segment.buffer[k][VERSION]), int(segment.buffer[k][STEP])
