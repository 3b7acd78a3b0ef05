"""The thread that feeds one sink from the files of a run: it reads what is new, and writes down how far it has come.

Talks to those files and to one of its own. Knows nothing of what a sink does.

- The files are the queue: a sink that is slow or down makes nobody wait and no memory grow.
- A step is given once, over all starts of a run; again only after a death or a failed flush before its place was
  written. A place counts once the sink has flushed.
- The lines of one step stand together in a file, and those of one round and set are one line.
"""

from __future__ import annotations

import contextlib
import json
import math
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from busrl.errors import cause
from busrl.observe.sinks import RunCard, Sink
from busrl.paths import RunPaths
from busrl.system import files

LOOK_S = 1.0
FIRST_PAUSE_S, LONGEST_PAUSE_S = 5.0, 300.0
MOST_BYTES = 1 << 26  # of a file: what is older is not given
MOST_ROWS = 64  # samples given at once: the newest
NO_NUMBERS = ("step", "round", "time", "waits")  # of a line: where and when, not what


class Feed(threading.Thread):
    """`told` gets an error in words, or "" when the sink works again. `finish`, then `join` with a time limit."""

    def __init__(self, name: str, make: Callable[[RunCard], Sink], card: RunCard, paths: RunPaths,
                 told: Callable[[str, str], None]) -> None:
        super().__init__(name=f"sink {name}", daemon=True)
        self.sink_name, self._make, self._card, self._told = name, make, card, told
        self._place = Place(card.folder / "place.json", card.uuid)
        self._paths, self._over = paths, threading.Event()
        self._broken, self._pause_s = False, FIRST_PAUSE_S

    def finish(self) -> None:
        """Give what is there now, and end."""
        self._over.set()

    def run(self) -> None:
        while True:
            try:
                with contextlib.closing(self._make(self._card)) as sink:
                    self._feed(sink)
                return
            except (Exception, SystemExit) as problem:  # a thread would end without a word
                self._broken = True
                self._place.back()
                self._told(self.sink_name, cause(problem))
            if self._over.wait(self._pause_s):
                return
            self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)

    def _feed(self, sink: Sink) -> None:
        paths = self._paths
        followed = [files.LineFollower(path, MOST_BYTES) for path in (paths.metrics, paths.validation, paths.samples)]
        while True:
            over = self._over.is_set()  # before the look: what was written by then is seen
            try:
                self._give(sink, *followed)
            finally:  # what was taken before a failure is not given again
                sink.flush()
                if self._place.save() and self._broken:  # it has taken something again
                    self._broken, self._pause_s = False, FIRST_PAUSE_S
                    self._told(self.sink_name, "")
            if over:
                return
            self._over.wait(LOOK_S)

    def _give(self, sink: Sink, steps: files.LineFollower, rounds: files.LineFollower,
              samples: files.LineFollower) -> None:
        for lines, key, numbers in ((steps, "step", numbers_of), (rounds, "round", figures_of)):
            for series, step, row in self._unseen(lines, key):
                sink.numbers(step, dict(numbers(row)))
                self._place.given(series, step)
        if found := list(self._unseen(samples, "step", "samples")):
            series, step, _ = found[-1]
            sink.samples(step, [row for _, _, row in found[-MOST_ROWS:]])
            self._place.given(series, step)

    def _unseen(self, lines: files.LineFollower, key: str, kind: str = "") -> Iterator[tuple[str, int, dict[str, Any]]]:
        """Lines of steps, or of rounds of a set, after those that were given before, each with its series and step."""
        before: dict[str, int] = {}
        for line in lines.new():
            try:
                row = json.loads(line)
                step = int(row[key])
            except (ValueError, TypeError, KeyError, RecursionError):
                continue  # damaged
            if row.get("kind"):
                continue  # groups that ended without a step
            series = kind or f"{key}s {row.get('set', '')}".strip()
            if step > before.setdefault(series, self._place.of(series)):
                yield series, step, row


class Place:
    """The newest step of each kind that a sink was given, in a file; of another run it counts for nothing."""

    def __init__(self, file: Path, uuid: str) -> None:
        self._file, self._uuid = file, uuid
        found = files.read_map(file)
        known = files.as_map(found.get("given")) if found.get("run") == uuid else {}
        self._given = {name: step for name, step in known.items() if isinstance(step, int)}
        self._saved = dict(self._given)

    def of(self, kind: str) -> int:
        return self._given.get(kind, -1)

    def given(self, kind: str, step: int) -> None:
        self._given[kind] = max(step, self.of(kind))

    def back(self) -> None:
        """Go back to the last `save`: what was given since may be lost, and is given again."""
        self._given = dict(self._saved)

    def save(self) -> bool:
        """Write down how far it is; true if there was anything new."""
        if self._given == self._saved:
            return False
        self._saved = dict(self._given)
        files.show(self._file, {"run": self._uuid, "given": self._given})
        return True


def numbers_of(row: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """The finite numbers of a line by their names: those of a map or list below its name and "/"."""
    for name, value in row.items():
        if name in NO_NUMBERS:
            continue
        if isinstance(value, list):
            value = {str(place): one for place, one in enumerate(value)}
        if isinstance(value, dict):
            yield from ((f"{name}/{inner}", one) for inner, one in numbers_of(value))
        elif isinstance(value, (int, float)) and not isinstance(value, bool):
            yield from [(name, float(value))] if math.isfinite(value) else []


def figures_of(row: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """The figures of a round of validation: all below `val/`, those of a named set below its name too."""
    place = f"val/{row['set']}/" if row.get("set") else "val/"
    return ((place + name.removeprefix("val/"), value) for name, value in numbers_of(row))
