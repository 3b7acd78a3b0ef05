"""Promises in force at each step of a run: by the topology of now, and back through what starts and people changed.

Reads `starts.jsonl` and `control.jsonl` with readers of its own; knows nothing of samples or of how they are judged.

- A change at step S lies between two periods that both hold S: a batch that was logged before the change may be trained
  after it, and a group is in flight on both sides of it.
- A request to a running run takes effect some steps later; until then each record has the terms that it was made by.
- A file that is damaged or missing stands for no changes: then the values of now held all the time.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from busrl.ledger.audit import readers

ABSENT = "not there"  # in starts.jsonl, of a key that a topology does not have
KEYS = (
    "weights.mode", "weights.max_staleness", "weights.over_age", "segments.length", "segments.rounds",
    "segments.max_segments", "segments.loss", "experiments.forced_age", "learner.forced_age", "learner.wal",
)


@dataclass(frozen=True)
class Promise:
    """A promise that the rules hold a step to."""

    wal: str = "sync"
    bound: int | None = None  # steps that a trained group may be old; None = nothing is promised
    masks_old: bool = False  # a group above the bound is trained without its tokens that are too old
    last_segment: bool = False  # only the last segment of an answer is trained

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Promise:
        """Read the promise from values by key; none where they do not say, or ask for ages (`forced_age`)."""
        mode, in_waves = values.get("weights.mode"), values.get("segments.rounds") == "segments"
        segments = _count(values.get("segments.max_segments")) if in_waves and values.get("segments.length") else None
        waves = segments or 1  # rounds that an answer may take in mode sync
        by_mode = {"batch-async": _count(values.get("weights.max_staleness")), "sync": waves - 1}
        forced = values.get("experiments.forced_age")
        return cls(
            str(values.get("learner.wal", "")), None if forced else by_mode.get(str(mode)),
            mode == "batch-async" and values.get("weights.over_age") == "wait" and not forced,
            values.get("segments.loss") == "last_segment",
        )


def _count(value: Any) -> int | None:
    """A whole number of a file, which may hold anything."""
    return value if isinstance(value, int) and not isinstance(value, bool) else None


@dataclass(frozen=True)
class Period:
    """From `first` to `last` finished steps, both included."""

    first: int
    last: float
    promise: Promise


@dataclass(frozen=True)
class Timeline:
    """The periods of a run, the newest first."""

    periods: tuple[Period, ...] = (Period(0, math.inf, Promise()),)

    def during(self, first: int, last: int) -> Iterator[Promise]:
        """The promises at any time from `first` to `last` finished steps."""
        return (period.promise for period in self.periods if period.first <= last and first <= period.last)

    def at(self, step: int) -> list[Promise]:
        """The promises that may have held when step `step` was made: two at a change."""
        return [*self.during(step - 1, step - 1)]

    def unlogged(self, step: int) -> bool:
        """Check whether step `step` may have been made without a log."""
        return any(promise.wal == "off" for promise in self.at(step))


@dataclass(frozen=True)
class Change:
    time: float
    step: int
    before: Mapping[str, Any]  # the values of before, by key


def timeline_of(run_dir: Path, topology: Mapping[str, Any]) -> Timeline:
    """The periods of the run in a directory, from the topology that it has now."""
    values = {key: value for key in KEYS if (value := _at(topology, key)) is not None}
    periods: list[Period] = []
    last = math.inf
    tag, asked = str(topology.get("tag", "")), run_dir / "control.jsonl"
    if tag and not topology.get("models"):  # of a model beside the lead: what is asked is asked of the run
        asked = run_dir.parent.parent / "control.jsonl"
    changes = [*_of_starts(run_dir / "starts.jsonl"), *_of_controls(asked, tag)]
    for change in sorted(changes, key=lambda change: change.time, reverse=True):
        before = {key: value for key, value in change.before.items() if key in KEYS}
        if before:
            first = int(min(change.step, last))
            periods.append(Period(first, last, Promise.of(values)))
            values = {key: value for key, value in {**values, **before}.items() if value != ABSENT}
            last = first
    return Timeline((*periods, Period(0, last, Promise.of(values))))


def _at(topology: Mapping[str, Any], key: str) -> Any:
    section, _, name = key.partition(".")
    table = topology.get(section)
    return table.get(name) if isinstance(table, dict) else None


class _Start(msgspec.Struct):
    """A line of starts.jsonl."""

    time: float
    step: int
    changes: dict[str, dict[str, Any]] = {}


class _Asked(msgspec.Struct):
    """A line of control.jsonl. `old`: a value as TOML has it; `steps`: those of several models, by their tags."""

    time: float
    step: int
    verb: str
    ok: bool
    key: str = ""
    old: str = ""
    steps: dict[str, int] = {}


def _of_starts(path: Path) -> Iterator[Change]:
    for row in readers.read_lines(path, _Start):
        yield Change(row.time, row.step, {key: change["was"] for key, change in row.changes.items() if "was" in change})


def _of_controls(path: Path, tag: str) -> Iterator[Change]:
    """The changes of the only model, or of that of a tag."""
    for row in readers.read_lines(path, _Asked):
        key = row.key.removeprefix(f"model.{tag}.") if tag else row.key
        if row.ok and row.verb == "set" and key in KEYS:
            try:
                yield Change(row.time, row.steps.get(tag, row.step), {key: msgspec.json.decode(row.old)})
            except msgspec.DecodeError:  # inf and the like, which none of the keys takes
                continue
