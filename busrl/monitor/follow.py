"""Reads the files of a run while it writes them: facts once, lines of metrics.jsonl and errors.jsonl as they come.

Opens files for reading only, and keeps none open. Knows nothing of the bus or of what is shown.

- A line counts once it has its end; a torn last one is read later. A damaged line is left out.
- At first only the end of a long file is read, so attaching to an old run takes no longer than to a young one.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec

from busrl.errors import NoSuchRun
from busrl.launch.state import read_map, restarts_of
from busrl.launch.story import sample_line
from busrl.monitor.seen import ErrorSeen, Facts, MetricsLine, RoundSeen, StepSeen
from busrl.paths import RunPaths

TAIL_BYTES: Final = 4 << 20
SAMPLE_BYTES: Final = 1 << 18
CHUNK: Final = 1 << 20
T = TypeVar("T")


class Follower:
    """The complete lines of one file that were not given before; `skipped` is how many earlier ones were not read."""

    def __init__(self, path: Path, tail_bytes: int = TAIL_BYTES) -> None:
        self._path, self._tail = path, tail_bytes
        self._file = (0, 0)
        self._at = 0
        self.skipped = 0

    def new(self) -> list[bytes]:
        """Lines that were completed since the last call; all anew if the file was replaced."""
        try:
            with open(self._path, "rb") as file:
                info = os.fstat(file.fileno())
                if (info.st_dev, info.st_ino) != self._file or info.st_size < self._at:
                    self._file = (info.st_dev, info.st_ino)
                    self._at = self._start(file, info.st_size)
                if info.st_size == self._at:
                    return []
                file.seek(self._at)
                found = file.read(info.st_size - self._at)
        except OSError:
            return []
        whole = found.rfind(b"\n") + 1
        self._at += whole
        return found[:whole].split(b"\n")[:-1]

    def _start(self, file: Any, size: int) -> int:
        """Where the first line begins that is read; the ones before it are only counted."""
        self.skipped = 0
        left = size - self._tail
        if left <= 0:
            return 0
        at = 0
        while left > 0 and (part := file.read(min(CHUNK, left))):
            self.skipped += part.count(b"\n")
            at, left = at + len(part), left - len(part)
        rest = file.readline()  # the line that the cut is in
        self.skipped += rest.endswith(b"\n")
        return at + len(rest)


class RunFiles:
    """The files of one run directory."""

    def __init__(self, paths: RunPaths) -> None:
        self._paths = paths
        self._metrics, self._errors = Follower(paths.metrics), Follower(paths.errors)
        self._rounds = Follower(paths.validation)
        self._samples = Follower(paths.samples, SAMPLE_BYTES)
        self._skipped_told = False

    def facts(self) -> Facts:
        """What run.json and topology.json say; what is missing there stays unknown."""
        run, topology = read_map(self._paths.run_json), read_map(self._paths.topology)
        if not run:
            raise NoSuchRun(f"{self._paths.root}: no run.json there; name the directory that `busrl launch` printed")
        trigger = _map(_map(topology.get("learner")).get("trigger"))
        return Facts(
            name=_get(_map(topology.get("run")), "name", ""),
            run_id=_get(run, "run_id", ""),
            uuid=_get(run, "uuid", ""),
            run_dir=str(self._paths.root),
            launch_pid=_get(run, "launch_pid", 0),
            started=_number(run.get("started"), 0.0),
            max_steps=_get(_map(topology.get("run")), "max_steps", 0),
            group_size=_get(_map(topology.get("groups")), "size", 0),
            n_min=_get(trigger, "n_min", 0),
            t_max_s=_t_max_s(trigger),
            mode=_get(_map(topology.get("weights")), "mode", ""),
            max_staleness=_get(_map(topology.get("weights")), "max_staleness", 0),
            progress_s=_number(_map(topology.get("limits")).get("progress_s"), 30.0),
            slots=_get(_map(topology.get("derived")), "slots", 0),
        )

    def tap(self) -> str:
        """Where the run's tap is."""
        return _get(read_map(self._paths.run_json), "tap", "") or self._paths.tap

    def steps(self) -> list[StepSeen]:
        """Steps that were written since the last call."""
        return [row for row in _decoded(self._metrics.new(), MetricsLine) if not row.kind]

    def step_age_s(self) -> float | None:
        """Seconds since a step was written; None if none was."""
        try:
            return max(0.0, time.time() - self._paths.metrics.stat().st_mtime)
        except OSError:
            return None

    def rounds(self) -> list[RoundSeen]:
        """Rounds of validation that were finished since the last call."""
        return list(_decoded(self._rounds.new(), RoundSeen))

    def sample(self) -> str:
        """What the model wrote lately, in one line; "" if nothing was written since the last call."""
        return next(filter(None, map(sample_line, _decoded(self._samples.new()[::-1], dict[str, Any]))), "")

    def errors(self) -> list[ErrorSeen]:
        """Warnings and errors that were filed since the last call."""
        return list(_decoded(self._errors.new(), ErrorSeen))

    def errors_before(self) -> int:
        """How many were filed earlier than what `errors` gave; told once."""
        told, self._skipped_told = self._skipped_told, True
        return 0 if told else self._errors.skipped

    def restarts(self) -> dict[str, int]:
        """How often launch has started each of its children again."""
        return restarts_of(self._paths)

    def ended(self) -> str:
        """How the run ended, in words; empty if no summary says so."""
        summary = read_map(self._paths.summary)
        return f"{summary.get('outcome')}: {summary.get('why')}" if summary else ""


def _decoded(lines: list[bytes], kind: type[T]) -> Iterator[T]:
    decoder = msgspec.json.Decoder(kind, strict=False)
    for line in lines:
        try:
            yield decoder.decode(line)
        except (ValueError, RecursionError):
            continue


def _t_max_s(trigger: dict[str, Any]) -> float:
    """In seconds; a run of an older busrl has milliseconds, under another name."""
    if "t_max_s" in trigger:
        return _number(trigger["t_max_s"], math.inf)
    return _number(trigger.get("t_max"), math.inf) / 1000


def _map(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _get(found: dict[str, Any], key: str, default: T) -> T:
    value = found.get(key, default)
    return value if isinstance(value, type(default)) else default


def _number(value: Any, default: float) -> float:
    if value == "inf":
        return math.inf
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else default
