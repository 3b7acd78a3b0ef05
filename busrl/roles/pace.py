"""How fast a rollout process decodes: sums over short intervals, from which `busrl simulate --fit` learns its times.

Talks to one file of the run, `pace/NAME.jsonl`, a line per interval. Knows nothing of the ring or of engines.

- The file is thinned as it grows, also over restarts: each further `MIB_EACH` MiB take as long as all before, down to
  a line a minute. A first week makes some 20 MB, later ones 3 MB. Each line is of one short interval, whatever was left
  out beside it, so a fit reads all alike.
- A line ends with what the engine tells of itself by then, so its errors can be seen while the run lives.
- Within an interval wall = steps + weights + idle + what the loop itself takes.
- A disk that is full costs lines, never the process.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from busrl.errors import MachineError
from busrl.ledger.files import LineFile

EVERY_S = 0.25
MIB_EACH = 2  # of the file, after which half as many intervals are written
MOST_LEFT_OUT = 256  # one interval in so many is written at least: a person may look for what an engine tells


class Row(msgspec.Struct, kw_only=True):
    """One interval. `tokens`: running sequences summed over the steps, so their mean is tokens / steps. `engine`: its
    statistics since it was made."""

    wall_s: float
    step_s: float
    weights_s: float
    idle_s: float
    steps: int
    tokens: int
    joined: int
    updates: int
    engine: Any


class Pace:
    """Counts of the interval under way. `joined` is added to from outside; `engine` is asked at its end."""

    def __init__(self, directory: Path, name: str, engine: Callable[[], Any]) -> None:
        self._engine = engine
        directory.mkdir(exist_ok=True)
        self._file = LineFile(directory / f"{name}.jsonl")
        self._left_out = 0
        self._clear()

    def _clear(self) -> None:
        self._began = time.monotonic_ns()
        self._step = self._weights = self._idle = 0
        self._steps = self._tokens = self._updates = self.joined = 0

    def stepped(self, active: int, drawn: int, nanoseconds: int) -> None:
        """An engine's step: `drawn` tokens by `active` sequences, which is one decoding step or several."""
        self._step += nanoseconds
        self._steps += drawn // active
        self._tokens += drawn
        self._write_when_due()

    def idled(self, nanoseconds: int) -> None:
        """A wait for slots."""
        self._idle += nanoseconds
        self._write_when_due()

    def updated(self, nanoseconds: int) -> None:
        """New weights were loaded."""
        self._weights += nanoseconds
        self._updates += 1

    def _write_when_due(self) -> None:
        wall = time.monotonic_ns() - self._began
        if wall < EVERY_S * 1e9:
            return
        self._left_out += 1
        if self._left_out >= one_in(self._file.size()):
            self._left_out = 0
            self._write(wall)
        self._clear()

    def _write(self, wall: int) -> None:
        row = Row(
            wall_s=round(wall / 1e9, 6), step_s=round(self._step / 1e9, 6), weights_s=round(self._weights / 1e9, 6),
            idle_s=round(self._idle / 1e9, 6), steps=self._steps, tokens=self._tokens, joined=self.joined,
            updates=self._updates, engine=self._engine(),
        )  # fmt: skip
        with contextlib.suppress(MachineError, OSError):
            self._file.append(msgspec.json.encode(row))

    def close(self) -> None:
        self._file.close()


def one_in(nbytes: int) -> int:
    """Of how many intervals one is written to a file of `nbytes`."""
    return min(MOST_LEFT_OUT, 1 << min(32, nbytes // (MIB_EACH << 20)))
