"""What a run and one of its hosts tell of each other: errors of the host's processes, and when it came and went.

`HostErrors` (for the satellite) reads errors.jsonl there and makes messages of its lines; `HostLog` (for the keeper at
home) makes lines of hosts.jsonl, `Starts` (for home's relay) counts in them. Talks to files; knows nothing of sockets,
claims or rings.

- A line that is lost or told twice changes no sample.
- No clock of another host is read: `HostErrors` compares its own host's times, `HostLog` goes by what home has heard.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import msgspec

from busrl.paths import RunPaths
from busrl.protocol import messages as m
from busrl.system import files

OLD_S = 30.0  # at the start of a satellite: what is older was told by the one before
MOST_AT_ONCE = 20
SILENT_S = 5.0


class HostErrors:
    """The new lines of errors.jsonl on this host, as home can file them under the host's name."""

    def __init__(self, paths: RunPaths) -> None:
        self._lines, self._since = files.LineFollower(paths.errors), time.time() - OLD_S

    def new(self) -> Iterator[m.Error]:
        rows = [row for row in map(_row, self._lines.new()) if row.get("time", 0.0) >= self._since]
        for row in rows[-MOST_AT_ONCE:]:
            words = {name: str(row.get(name, "")) for name in ("severity", "process", "text", "trace")}
            yield m.Error(severity=words["severity"][: m.MAX_NAME], where=words["process"], text=words["text"],
                          traceback=words["trace"])


def _row(line: bytes) -> dict[str, Any]:
    with contextlib.suppress(msgspec.DecodeError, UnicodeDecodeError):
        return files.as_map(msgspec.json.decode(line))
    return {}


class HostLog:
    """Lines of hosts.jsonl: joined, replaced, silent, back, gone. `names` are the hosts that the topology has."""

    def __init__(self, names: Iterable[str]) -> None:
        self._names = frozenset(names)
        self._known: dict[str, tuple[int, bool]] = {}  # life, and whether it is silent

    def changes(self, seen: Mapping[str, tuple[int, float, int]]) -> list[dict[str, Any]]:
        """What has changed since the last call. `seen`: of each worker that has joined its life, for how long it has
        been silent, and how many samples it holds."""
        found = []
        for name in sorted(self._names & seen.keys()):
            life, silent_s, holds = seen[name]
            before, silent = self._known.get(name), silent_s > SILENT_S
            self._known[name] = (life, silent)
            if before is None:
                found.append(_line(name, "joined", life, holds))
            elif before[0] != life:
                found.append(_line(name, "replaced", life, holds))
            elif before[1] != silent:
                found.append(_line(name, "silent" if silent else "back", life, holds))
        for name in sorted(self._known.keys() - seen.keys()):
            found.append(_line(name, "gone", self._known.pop(name)[0]))
        return found


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
