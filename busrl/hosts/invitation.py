"""A host's share of a run: its part of the topology, and the file that says where home is.

`of_host` is worked out at home; `HostSource` lies in the host's scratch directory for its processes; an `Invitation`
goes to a host that launch starts.

- A host's topology is home's in all that changes an answer; only processes, bus and the size of the ring are its own.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import msgspec

from busrl import keys
from busrl.errors import BadKeys, UserError
from busrl.paths import CLAIMED_FROM
from busrl.states import CALLER_ROLES
from busrl.system import files
from busrl.topology.schema import Faults, Topology
from busrl.topology.sizes import call_ring, on_host, sized

SILENT = "hears nothing of the run"  # what the relay of a host is doing while that is so
AHEAD_SHARE = 16  # of the rows, held beside those that engines run


def claimed_from(run_json: Path) -> bytes:
    """The ring that claims are of: 8 bytes of the run, 8 that are new with every ring, in which names of claims begin
    anew. UserError: launch did not write it."""
    try:
        return bytes.fromhex(files.read_map(run_json)[CLAIMED_FROM])
    except (KeyError, TypeError, ValueError):
        raise UserError(f"{run_json}: {CLAIMED_FROM} is missing; start the run again, so that it is written") from None


def rows_of(topology: Topology, host: str) -> int:
    """Samples that a host works on at the same time: sequences of its engines, or episodes that are played there."""
    if topology.has_callers:
        return on_host(topology, host, *CALLER_ROLES) * topology.agents.episodes
    return on_host(topology, host, "rollout") * topology.generation.max_batch


def ahead_of(topology: Topology, rows: int) -> int:
    """Samples that a host with so many rows holds beside those that it runs."""
    return topology.hosts.ahead or max(topology.groups.size, rows // AHEAD_SHARE)


def of_host(topology: Topology, host: str) -> Topology:
    rows = rows_of(topology, host)
    slots = 2 * (rows + ahead_of(topology, rows))  # as many again for answers that wait to be sent
    calls = call_ring(topology, host)[0] if topology.has_callers else 0
    derived = replace(topology.derived, slots=slots, train_slots=slots, val_reserve=0, call_slots=calls)
    bus = replace(topology.bus, endpoint="ipc")
    return replace(topology, here=host, bus=bus, faults=Faults(), derived=sized(topology, derived))


@dataclass(frozen=True)
class HostSource:
    """The way home: its endpoint, the name of this host there, the ring that it claims from, and the life of its name.
    `replaced`: another start of the name has taken its place."""

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
    def client(self) -> keys.ClientKeys:
        return keys.load_client(Path(self.key_file))

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
    name: Annotated[str, msgspec.Meta(pattern=f"^{keys.NAME.pattern}$")]
    keys: str  # the text of the file that `busrl keys add` makes

    @classmethod
    def by_home(cls, topology: Topology, name: str) -> Invitation:
        """BadKeys: there are none and they cannot be made."""
        directory = keys.directory_of(topology.bus.keys)
        if name not in keys.allowed(directory):
            keys.add(directory, name)
        file = keys.client_file(directory, name)
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
        """UserError: it is something else."""
        try:
            return msgspec.json.decode(line, type=cls)
        except msgspec.DecodeError as problem:
            rule = "expected a line of JSON with endpoint, name and keys, as launch writes it"
            raise UserError(f"standard input: {problem}; {rule}") from None
