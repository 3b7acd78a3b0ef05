"""Sinks for the numbers of a run beside its own files: TensorBoard, Weights & Biases, Trackio, Prometheus, or a class
of the user's.

`known.py` has the sinks, `feed.py` reads the run's files for them. Used by the role `sinks` alone. Knows nothing of the
ring or the bus.

- No process of a run waits for a sink.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol


class Live(NamedTuple):
    """A present value: `busrl_NAME{LABELS}`."""

    name: str
    labels: dict[str, str]
    value: float


@dataclass(frozen=True)
class RunCard:
    """The facts of a run that a sink gets. `folder` is for the sink's own files; `uuid` is the same over all starts."""

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
    """A sink; its class is called with a RunCard. An exception of its methods is reported once; the sink is closed,
    made again after a pause, and then gets what it has missed. A method may take any time: each sink has a thread."""

    def numbers(self, step: int, values: Mapping[str, float]) -> None:
        """Take the numbers of a step (`reward`, `wait_s/groups`: docs/metrics.md), or a round of validation
        (`val/...`), which may come after later steps."""

    def samples(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Take lines of samples.jsonl."""

    def flush(self) -> None:
        """Pass on what is buffered: nothing more comes for a while."""

    def close(self) -> None: ...
