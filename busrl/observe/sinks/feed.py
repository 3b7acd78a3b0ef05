"""The thread that feeds one sink from the files of a run: it passes on new lines, and records how far it is.

Reads those files, and writes one of its own. Knows nothing of what a sink does.

- The files are the queue: a sink that is slow or down makes no process wait and no memory grow.
- The sink gets a step once, over all starts of a run; again only after a death or a failed flush before its place was
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
from busrl.system.files import as_map

LOOK_S = 1.0
FIRST_PAUSE_S, LONGEST_PAUSE_S = 5.0, 300.0
MOST_BYTES = 1 << 26  # of a file: older lines are left out
MOST_ROWS = 64  # samples that are passed on at once: the newest
NO_NUMBERS = ("step", "round", "time", "waits", "model_step", "number")  # of a line: its place and time, no figures
MODEL = "model"  # `kind` of a line about the step of one model of a service: each model has steps of its own


class Feed(threading.Thread):
    """A thread for one sink. `report` gets the sink's name and the text of an error, or "" when the sink works again.
    `beside`: the paths of other models of the run by their tags, which stand before the names of their numbers.
    `finish`, then `join` with a time limit."""

    def __init__(self, name: str, make: Callable[[RunCard], Sink], card: RunCard, paths: RunPaths,
                 report: Callable[[str, str], None], beside: Mapping[str, RunPaths] | None = None) -> None:
        super().__init__(name=f"sink {name}", daemon=True)
        self.sink_name, self._make, self._card, self._report = name, make, card, report
        self._place = Place(card.folder / "place.json", card.uuid)
        self._paths, self._beside, self._over = paths, beside or {}, threading.Event()
        self._broken, self._pause_s = False, FIRST_PAUSE_S

    def finish(self) -> None:
        """Have the thread pass on what is there now, and end."""
        self._over.set()

    def run(self) -> None:
        while True:
            try:
                with contextlib.closing(self._make(self._card)) as sink:
                    self._feed(sink)
                return
            except (Exception, SystemExit) as problem:  # else the thread would end unnoticed
                self._broken = True
                self._place.back()
                self._report(self.sink_name, cause(problem))
            if self._over.wait(self._pause_s):
                return
            self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)

    def _feed(self, sink: Sink) -> None:
        paths = self._paths
        followed = [files.LineFollower(path, MOST_BYTES) for path in (paths.metrics, paths.validation, paths.samples)]
        others = {tag: files.LineFollower(of_tag.metrics, MOST_BYTES) for tag, of_tag in self._beside.items()}
        while True:
            over = self._over.is_set()  # before the look, which then sees the last lines
            try:
                self._give(sink, *followed)
                self._give_others(sink, others)
            finally:  # lines that the sink has taken before a failure are not repeated
                sink.flush()
                if self._place.save() and self._broken:  # it has taken a line again
                    self._broken, self._pause_s = False, FIRST_PAUSE_S
                    self._report(self.sink_name, "")
            if over:
                return
            self._over.wait(LOOK_S)

    def _give(self, sink: Sink, steps: files.LineFollower, rounds: files.LineFollower,
              samples: files.LineFollower) -> None:
        for lines, key, numbers in ((steps, "step", of_step), (rounds, "round", figures_of)):
            for series, step, row in self._unseen(lines, key):
                sink.numbers(step, dict(numbers(row)))
                self._place.advance(series, step)
        if unseen := list(self._unseen(samples, "step", "samples")):
            series, step, _ = unseen[-1]
            sink.samples(step, [row for _, _, row in unseen[-MOST_ROWS:]])
            self._place.advance(series, step)

    def _give_others(self, sink: Sink, others: Mapping[str, files.LineFollower]) -> None:
        for tag, lines in others.items():
            for series, step, row in self._unseen(lines, "step", f"steps of {tag}"):
                sink.numbers(step, {f"{tag}/{name}": value for name, value in of_step(row)})
                self._place.advance(series, step)

    def _unseen(self, lines: files.LineFollower, key: str, kind: str = "") -> Iterator[tuple[str, int, dict[str, Any]]]:
        """Lines of steps, or of rounds of a set, that the sink has not had yet, each with its series and step."""
        before: dict[str, int] = {}
        for line in lines.new():
            try:
                row = as_map(json.loads(line))
                model = str(row["model"]) if row.get("kind") == MODEL else ""
                step = int(row["model_step" if model else key])
            except (ValueError, TypeError, KeyError, RecursionError):
                continue  # damaged
            if row.get("kind") and not model:
                continue  # groups that ended without a step
            series = kind or f"{key}s {model or row.get('set', '')}".strip()
            if step > before.setdefault(series, self._place.of(series)):
                yield series, step, row


class Place:
    """The newest step of each series that a sink has had, in a file; a file of another run is ignored."""

    def __init__(self, file: Path, uuid: str) -> None:
        self._file, self._uuid = file, uuid
        stored = files.read_map(file)
        steps = as_map(stored.get("given")) if stored.get("run") == uuid else {}
        self._newest = {name: step for name, step in steps.items() if isinstance(step, int)}
        self._saved = dict(self._newest)

    def of(self, kind: str) -> int:
        return self._newest.get(kind, -1)

    def advance(self, kind: str, step: int) -> None:
        self._newest[kind] = max(step, self.of(kind))

    def back(self) -> None:
        """Go back to the last `save`: later lines may be lost, and the sink gets them again."""
        self._newest = dict(self._saved)

    def save(self) -> bool:
        """Write how far the sink is; True if it is further than before."""
        if self._newest == self._saved:
            return False
        self._saved = dict(self._newest)
        files.show(self._file, {"run": self._uuid, "given": self._newest})
        return True


def numbers_of(row: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """The finite numbers of a line with their names; those of a map or list have its name and "/" before theirs."""
    for name, value in row.items():
        if name in NO_NUMBERS:
            continue
        if isinstance(value, list):
            value = {str(place): item for place, item in enumerate(value)}
        if isinstance(value, dict):
            yield from ((f"{name}/{inner}", item) for inner, item in numbers_of(value))
        elif isinstance(value, (int, float)) and not isinstance(value, bool):
            yield from [(name, float(value))] if math.isfinite(value) else []


def of_step(row: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """The figures of a step; that of a model has its name and "/" before theirs."""
    place = f"{row['model']}/" if row.get("kind") == MODEL else ""
    return ((place + name, value) for name, value in numbers_of(row))


def figures_of(row: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """The figures of a round of validation, with `val/` before their names, and of a named set its name too."""
    place = f"val/{row['set']}/" if row.get("set") else "val/"
    return ((place + name.removeprefix("val/"), value) for name, value in numbers_of(row))
