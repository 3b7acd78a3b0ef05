"""`errors.jsonl`, one line for each event that a person should see, and how often an event of one kind is reported.

Any process of the run appends. Talks to one file; time comes from the caller. Knows nothing of the bus or of logs, and
imports next to nothing: the broker needs it too.

- Each line is one write to a file opened for appending, so lines of two processes never mix.
- `uids` names the samples that a line is about, where it is about samples.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from busrl.paths import RunPaths


def record_error(
    paths: RunPaths, process: str, severity: str, where: str, text: str, traceback: str = "", uids: Sequence[int] = ()
) -> None:
    """Append one line; a full disk must not turn a warning into a death."""
    row = {"time": time.time(), "process": process, "severity": severity, "where": where, "text": text}
    row["trace"] = traceback
    line = msgspec.json.encode({**row, "uids": list(uids)} if uids else row)
    with contextlib.suppress(OSError), open(paths.errors, "ab", buffering=0) as file:
        file.write(line + b"\n")


EVERY_S = 5.0
LONGEST_S = 640.0
MOST_KINDS = 256
OTHERS = "(others)"
MOST_UIDS = 1000  # of one line; further samples are only counted


class Due(NamedTuple):
    """Lines of one kind that were held back: how many, the latest of them, and the samples of all."""

    times: int
    line: tuple[str, ...]
    uids: tuple[int, ...]


@dataclass
class _Kind:
    """Lines of one kind that were held back since the last one that was written."""

    reported: float
    every_s: float
    count: int = 0
    latest: tuple[str, ...] = ()
    uids: list[int] = field(default_factory=list)


class Throttle:
    """Reports the first occurrence of a kind at once, and the others counted and together.

    Call `admit` for each occurrence, and `due` from time to time for what was held back.

    - Of one kind at most one line is reported every `every_s` seconds, and no occurrence is missing from the counts. A
      kind that continues is reported half as often after each line, down to once in `LONGEST_S`, unless its lines name
      samples.
    - Kinds may hold text from outside: beyond `MOST_KINDS` at once, all further ones are one kind.
    - The samples of the occurrences are kept with them, so that a line stands for each of its samples.
    """

    def __init__(self, every_s: float = EVERY_S) -> None:
        self.every_s = every_s
        self._kinds: dict[str, _Kind] = {}

    def admit(self, kind: str, line: tuple[str, ...], now: float, uids: Sequence[int] = ()) -> bool:
        """Check whether to report this line now; if not, it is counted and comes back from `due`."""
        if kind not in self._kinds and len(self._kinds) >= MOST_KINDS:
            kind = OTHERS
        entry = self._kinds.get(kind)
        if entry is None:
            self._kinds[kind] = _Kind(now, self.every_s)
            return True
        entry.count, entry.latest = entry.count + 1, line
        entry.uids += uids[: MOST_UIDS - len(entry.uids)]
        return False

    def due(self, now: float, everything: bool = False) -> list[Due]:
        """Lines that were held back long enough. A kind that was quiet is forgotten."""
        lines = []
        for kind, entry in list(self._kinds.items()):
            if not everything and now - entry.reported < entry.every_s:
                continue
            if entry.count:
                lines.append(Due(entry.count, entry.latest, tuple(entry.uids)))
                self._kinds[kind] = _Kind(now, self.every_s if entry.uids else min(2 * entry.every_s, LONGEST_S))
            else:
                del self._kinds[kind]
        return lines
