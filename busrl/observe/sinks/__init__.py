"""Sinks for the numbers of a run beside its own files: TensorBoard, Weights & Biases, Trackio, Prometheus, or a class
of the user's.

`known.py` has the sinks, `feed.py` reads the run's files for them. Used by the role `sinks` alone. Knows nothing of the
ring or the bus, and nothing of busrl waits for a sink.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol


class Live(NamedTuple):
    """A number as it is now: `busrl_NAME{LABELS}`."""

    name: str
    labels: dict[str, str]
    value: float


@dataclass(frozen=True)
class RunCard:
    """The facts of a run that a sink gets. `folder`: of the sink's own files; `uuid`: the same over all starts."""

    name: str
    uuid: str
    project: str
    folder: Path
    topology: Mapping[str, Any]
    host: str = "127.0.0.1"
    port: int = 0
    live: Callable[[], Sequence[Live]] = tuple
    say: Callable[[str], None] = lambda _: None  # to the log of the process


class Sink(Protocol):
    """Is made with a RunCard. Whatever it raises is told once; it is closed and made again after a pause, and then gets
    what it has not had. It may take as long as it likes: each has a thread of its own."""

    def numbers(self, step: int, values: Mapping[str, float]) -> None:
        """Take the numbers of a step (`reward`, `wait_s/groups`: docs/metrics.md), or a round of validation
        (`val/...`), which may come after later steps."""

    def samples(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Lines of samples.jsonl."""

    def flush(self) -> None:
        """Nothing more comes for a while."""

    def close(self) -> None: ...
