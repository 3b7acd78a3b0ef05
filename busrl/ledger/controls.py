"""`control.jsonl`: what was asked of a run while it ran, and what is in force because of it.

`launch` alone appends; every process follows the file's size, and reads what it needs. Talks to one file. Knows nothing
of the bus, of topologies or of what a verb does.

- A line is written after topology.json: whoever reads the line finds the new value in force.
- A request of one id was done once: the same id again is answered from its line.
- Lines are folded in order, over all starts of a run: the newest value of a key holds until it is set again.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field

import msgspec

from busrl.paths import RunPaths
from busrl.system.files import json_lines

VERBS = ("stop", "pause", "resume", "checkpoint", "set", "scale")


class ControlLine(msgspec.Struct):
    """A request, and the answer. Values are TOML text; those of `scale` are of its `process.ROLE.count`.
    `step`: the run's when it was asked; `steps`: in a run of several models those of all that learn, of a checkpoint
    those of the models that write one."""

    id: str
    verb: str
    ok: bool
    text: str = ""
    key: str = ""
    old: str = ""
    new: str = ""
    who: str = ""
    step: int = 0
    time: float = 0.0
    steps: dict[str, int] | msgspec.UnsetType = msgspec.UNSET  # by tag

    @property
    def by_tag(self) -> dict[str, int]:
        """The steps by tag; that of the only model under an empty one."""
        return self.steps or {"": self.step}

    @property
    def when(self) -> str:
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.time))


@dataclass
class Controls:
    """The sum of all lines: what is in force now."""

    ids: dict[str, ControlLine] = field(default_factory=dict)
    paused: ControlLine | None = None
    settings: dict[str, ControlLine] = field(default_factory=dict)  # by key, in the order of their lines
    checkpoints: dict[str, int] = field(default_factory=dict)  # by tag the least step of the newest one asked for

    @classmethod
    def read(cls, paths: RunPaths) -> Controls:
        controls = cls()
        for line in read_lines(paths):
            controls.add(line)
        return controls

    def add(self, line: ControlLine) -> None:
        """The next line: refusals change nothing."""
        self.ids[line.id] = line
        if not line.ok:
            return
        if line.verb in ("pause", "resume"):
            self.paused = (self.paused or line) if line.verb == "pause" else None
        elif line.verb in ("set", "scale"):
            self.settings.pop(line.key, None)
            self.settings[line.key] = line
        elif line.verb == "checkpoint":
            for tag, step in line.by_tag.items():
                self.checkpoints[tag] = max(self.checkpoints.get(tag, 0), step)

    def overrides(self) -> list[str]:
        """The values in force, as overrides of a topology."""
        return [f"{key}={line.new}" for key, line in self.settings.items()]

    def words(self) -> Iterator[str]:
        """The deviations from the topology, in words."""
        if self.paused is not None:
            yield f"paused by {self.paused.who} since {self.paused.when}"
        if self.settings:
            changed = (f"{key} = {line.new}" for key, line in self.settings.items())
            yield f"changed in flight: {', '.join(changed)}"


def read_lines(paths: RunPaths) -> Iterator[ControlLine]:
    """The lines, in order; one that is damaged is left out."""
    for row in json_lines(paths.control):
        with suppress(msgspec.ValidationError):
            yield msgspec.convert(row, ControlLine)
