"""hosts.jsonl: when the run's other hosts started, joined, fell silent, came back, were replaced and went.

`Roster` (for the gateway) makes lines of what has changed, `Starts` (for home's relay) counts in them. Talks to that
file alone; knows nothing of sockets, claims or rings.

- A line that is lost or written twice changes no sample.
- No clock of another host is read: a host's silence is measured at home.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from busrl.paths import RunPaths
from busrl.system import files

SILENT_S = 5.0


class Roster:
    """Lines of hosts.jsonl: joined, replaced, silent, back, gone. `names` are the hosts that the topology has."""

    def __init__(self, names: Iterable[str]) -> None:
        self._names = frozenset(names)
        self._known: dict[str, tuple[int, bool]] = {}  # life, and whether it is silent

    def changes(self, seen: Mapping[str, tuple[int, float, int]]) -> list[dict[str, Any]]:
        """Lines of what has changed since the last call. `seen`: by worker that has joined its life, for how long it
        has been silent, and how many samples it holds."""
        lines = []
        for name in sorted(self._names & seen.keys()):
            life, silent_s, holds = seen[name]
            before, silent = self._known.get(name), silent_s > SILENT_S
            self._known[name] = (life, silent)
            if before is None:
                lines.append(_line(name, "joined", life, holds))
            elif before[0] != life:
                lines.append(_line(name, "replaced", life, holds))
            elif before[1] != silent:
                lines.append(_line(name, "silent" if silent else "back", life, holds))
        for name in sorted(self._known.keys() - seen.keys()):
            lines.append(_line(name, "gone", self._known.pop(name)[0]))
        return lines


class Starts:
    """Numbers the starts of hosts: each is above all that this run ever gave, whatever clocks say and whoever dies."""

    def __init__(self, paths: RunPaths) -> None:
        self._paths = paths
        rows = files.json_lines(paths.hosts)
        self._last = max((life for row in rows if isinstance(life := row.get("life"), int)), default=0)

    def count(self, name: str, joined: int) -> int:
        """The number of a start of host `name`. `joined`: the highest of the workers that the ring knows."""
        self._last = max(self._last, joined) + 1
        write(self._paths, [_line(name, "started", self._last)])
        return self._last


def _line(host: str, event: str, life: int, holds: int = 0) -> dict[str, Any]:
    return {"time": time.time(), "host": host, "event": event, "life": life, "holds": holds}


def write(paths: RunPaths, lines: list[dict[str, Any]]) -> None:
    """Append them; a full disk must not turn news into a death."""
    if lines:
        with contextlib.suppress(OSError), open(paths.hosts, "ab", buffering=0) as file:
            file.write(b"".join(msgspec.json.encode(line) + b"\n" for line in lines))
