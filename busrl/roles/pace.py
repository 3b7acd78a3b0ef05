"""How fast a rollout process decodes: sums over short intervals, from which `busrl simulate --fit` learns its times.

Talks to one file of the run, `pace/NAME.jsonl`, a line per interval. Knows nothing of the ring or of engines.

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
        row = Row(
            wall_s=round(wall / 1e9, 6), step_s=round(self._step / 1e9, 6), weights_s=round(self._weights / 1e9, 6),
            idle_s=round(self._idle / 1e9, 6), steps=self._steps, tokens=self._tokens, joined=self.joined,
            updates=self._updates, engine=self._engine(),
        )  # fmt: skip
        with contextlib.suppress(MachineError, OSError):
            self._file.append(msgspec.json.encode(row))
        self._clear()

    def close(self) -> None:
        self._file.close()
