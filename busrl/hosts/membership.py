"""A host's membership in a run: its part of the topology, the way home, its invitation, and the list of who was there.

`of_host` makes a host's topology at home; `HostSource` lies in the host's scratch directory for its processes; an
`Invitation` goes to a host that launch starts. In hosts.jsonl stands when hosts started, joined, fell silent, came
back, were replaced and went: `Roster` (for the gateway) makes lines of what has changed, `Starts` (for home's relay)
counts in them. Talks to these files; knows nothing of sockets, claims or rings.

- A host's topology is home's in all that changes an answer; only processes, bus and the size of the ring are its own.
- A line of hosts.jsonl that is lost or written twice changes no sample.
- No clock of another host is read: a host's silence is measured at home.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import msgspec

from busrl import curve
from busrl.capabilities import CALLER_ROLES
from busrl.errors import BadKeys, UserError
from busrl.paths import CLAIMED_FROM, RunPaths
from busrl.system import files
from busrl.topology.schema import Faults, Topology
from busrl.topology.sizes import call_ring, on_host, sized

SILENT = "hears nothing of the run"  # the activity of a host's relay while home does not answer
SILENT_S = 5.0  # after which a host counts as silent in hosts.jsonl
AHEAD_SHARE = 16  # of the rows: one sixteenth as many samples are claimed ahead


def claimed_from(run_json: Path) -> bytes:
    """The id of the ring that claims are of: 8 bytes of the run, 8 that are new with every ring, since a new ring gives
    the same names of claims again. UserError: launch did not write it."""
    try:
        return bytes.fromhex(files.read_map(run_json)[CLAIMED_FROM])
    except (KeyError, TypeError, ValueError):
        raise UserError(f"{run_json}: {CLAIMED_FROM} is missing; start the run again, so that it is written") from None


def rows_of(topology: Topology, host: str) -> int:
    """Samples that a host works on at the same time: sequences of its engines, or episodes of its agents."""
    if topology.has_callers:
        return on_host(topology, host, *CALLER_ROLES) * topology.agents.episodes
    return on_host(topology, host, "rollout") * topology.generation.max_batch


def ahead_of(topology: Topology, rows: int) -> int:
    """Samples that a host with so many rows claims beyond those that it runs."""
    return topology.hosts.ahead or max(topology.groups.size, rows // AHEAD_SHARE)


def of_host(topology: Topology, host: str) -> Topology:
    """The topology that the processes of a host read: home's, with bus, ring and processes of the host."""
    rows = rows_of(topology, host)
    slots = 2 * (rows + ahead_of(topology, rows))  # as many again for answers that wait to be sent
    calls = call_ring(topology, host)[0] if topology.has_callers else 0
    derived = replace(topology.derived, slots=slots, train_slots=slots, val_reserve=0, call_slots=calls)
    bus = replace(topology.bus, endpoint="ipc")
    return replace(topology, here=host, bus=bus, faults=Faults(), derived=sized(topology, derived))


@dataclass(frozen=True)
class HostSource:
    """The way home: its endpoint, the name of this host there, the ring that it claims from, and the number of its
    start (`life`). `replaced`: a later start of the same name has taken its place."""

    endpoint: str
    key_file: str
    name: str
    ring_hex: str
    life: int
    replaced: bool = False

    @property
    def ring(self) -> bytes:
        return bytes.fromhex(self.ring_hex)

    @property
    def client(self) -> curve.ClientKeys:
        return curve.load_client(Path(self.key_file))

    def write(self, file: Path) -> None:
        files.replace(file, json.dumps(asdict(self), indent=2).encode() + b"\n")

    @classmethod
    def read(cls, file: Path) -> HostSource:
        fields: dict[str, Any] = files.read_map(file)
        try:
            return cls(**fields)
        except TypeError as problem:
            text = f"{file}: not what `busrl host` wrote ({problem}); remove the directory and start it again"
            raise UserError(text) from None


class Invitation(msgspec.Struct):
    """The line that launch at home writes to the standard input of a host's command, and `busrl host -` reads there."""

    endpoint: str
    name: Annotated[str, msgspec.Meta(pattern=f"^{curve.NAME.pattern}$")]
    keys: str  # the text of the file that `busrl keys add` makes

    @classmethod
    def by_home(cls, topology: Topology, name: str) -> Invitation:
        """The invitation of host `name`, with keys that are made where it has none. BadKeys: they cannot be made."""
        directory = curve.directory_of(topology.bus.keys)
        if name not in curve.allowed(directory):
            curve.add(directory, name)
        file = curve.client_file(directory, name)
        try:
            return cls(topology.bus.endpoint, name, file.read_text(encoding="ascii"))
        except OSError as problem:
            remedy = f"`busrl keys remove {name}`, so that a new one is made"
            raise BadKeys(f"{file}: {problem.strerror}, and {name} is allowed already; {remedy}") from None

    @property
    def line(self) -> bytes:
        return msgspec.json.encode(self) + b"\n"

    @classmethod
    def of_line(cls, line: bytes) -> Invitation:
        """Read the line that launch wrote. UserError: it is something else."""
        try:
            return msgspec.json.decode(line, type=cls)
        except msgspec.DecodeError as problem:
            rule = "expected a line of JSON with endpoint, name and keys, as launch writes it"
            raise UserError(f"standard input: {problem}; {rule}") from None


# -- hosts.jsonl -----


class Roster:
    """Lines of hosts.jsonl: joined, replaced, silent, back, gone. `names` are the hosts that the topology has."""

    def __init__(self, names: Iterable[str]) -> None:
        self._names = frozenset(names)
        self._lives: dict[str, tuple[int, bool]] = {}  # life, and whether it is silent

    def changes(self, seen: Mapping[str, tuple[int, float, int]]) -> list[dict[str, Any]]:
        """Lines of what has changed since the last call. `seen`, by worker that has joined: its life, for how long it
        has been silent, how many samples it holds."""
        lines = []
        for name in sorted(self._names & seen.keys()):
            life, silent_s, holds = seen[name]
            before, silent = self._lives.get(name), silent_s > SILENT_S
            self._lives[name] = (life, silent)
            if before is None:
                lines.append(_line(name, "joined", life, holds))
            elif before[0] != life:
                lines.append(_line(name, "replaced", life, holds))
            elif before[1] != silent:
                lines.append(_line(name, "silent" if silent else "back", life, holds))
        for name in sorted(self._lives.keys() - seen.keys()):
            lines.append(_line(name, "gone", self._lives.pop(name)[0]))
        return lines


class Starts:
    """Numbers the starts of hosts. Each number is above all earlier ones of the run, whatever clocks say or dies."""

    def __init__(self, paths: RunPaths) -> None:
        self._paths = paths
        rows = files.json_lines(paths.hosts)
        self._last = max((life for row in rows if isinstance(life := row.get("life"), int)), default=0)

    def count(self, name: str, joined: int) -> int:
        """The number of a start of host `name`. `joined`: the highest number among the workers in the ring."""
        self._last = max(self._last, joined) + 1
        write_lines(self._paths, [_line(name, "started", self._last)])
        return self._last


def _line(host: str, event: str, life: int, holds: int = 0) -> dict[str, Any]:
    return {"time": time.time(), "host": host, "event": event, "life": life, "holds": holds}


def write_lines(paths: RunPaths, lines: list[dict[str, Any]]) -> None:
    """Append to hosts.jsonl; a line that cannot be written ends no process."""
    if lines:
        with contextlib.suppress(OSError), open(paths.hosts, "ab", buffering=0) as file:
            file.write(b"".join(msgspec.json.encode(line) + b"\n" for line in lines))
