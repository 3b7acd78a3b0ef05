"""Makes the sender or the receiver that `weights.transport` names.

Used by the learner, by every process that runs the model, and by vLLM's workers. Imports the module of a transport only
to make it, so a process without tensors can read `TransportSettings`. Knows nothing of how weights travel.

A new transport is a module of this package with the two functions below, and a line in `topology/kinds.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from busrl.errors import UserError
from busrl.system import device as devices
from busrl.topology.kinds import ADAPTERS, FOLDERS, TRANSPORTS
from busrl.topology.sizes import held_versions, kept_versions
from busrl.weights.base import GroupCallbacks, Receiver, Sender, Write

if TYPE_CHECKING:
    from busrl.paths import RunPaths
    from busrl.topology import Topology


@dataclass(frozen=True)
class TransportSettings:
    """Settings of a transport, as plain data: `plain()` fits any wire, `from_plain` rebuilds them in another process.

    `segment` is the file in shared memory, `address_file` the socket of a broadcasting learner: paths on this host.
    With `checksum` every receiver checks the bytes of each version against a digest that came with it. `bucket_bytes`
    is the piece of a broadcast that has a deadline of its own, `backend` the library that carries it. `threshold` is
    the share of changed bytes up to which an update is sparse (0: never), `key_every` the number of versions from one
    full version to the next (docs/weights.md).
    """

    transport: str
    segment: str
    address_file: str
    timeout_s: float = 10.0
    checksum: bool = False
    bucket_bytes: int = 16 << 20
    backend: str = "gloo"
    threshold: float = 0.0
    key_every: int = 32
    folders: str = ""  # the directory of versions that are folders; empty: versions are tensors
    kept: int = 2  # versions that the learner keeps there, ...
    kept_by_engine: int = 1  # ... and that each engine keeps links to
    base: str = ""  # the model folder of the adapters; empty: versions are whole checkpoints

    def __post_init__(self) -> None:
        if self.transport not in TRANSPORTS:
            raise UserError(f"weights.transport is {self.transport!r}; docs/weights.md lists the transports")

    @classmethod
    def of(cls, topology: Topology, paths: RunPaths) -> TransportSettings:
        weights, sparse = topology.weights, topology.weights.sparse
        settings = cls(
            weights.transport, str(paths.weights_file), str(paths.runtime_dir / "cast.sock"),
            timeout_s=weights.timeout_s, checksum=weights.checksum, bucket_bytes=weights.bucket_mb << 20,
            backend=weights.backend, threshold=sparse.threshold if sparse.enabled else 0.0, key_every=sparse.key_every,
        )
        if weights.transport not in FOLDERS:
            return settings
        adapters = weights.transport in ADAPTERS
        return replace(
            settings, folders=str(paths.adapters if adapters else paths.published), kept=kept_versions(topology),
            kept_by_engine=held_versions(topology), base=topology.model.path if adapters else "",
        )

    def plain(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> TransportSettings:
        """Rebuild the settings; UserError names a field that this version of busrl does not have."""
        unknown = sorted(plain.keys() - {field.name for field in fields(cls)})
        if unknown:
            raise UserError(f"settings of the weights: {unknown[0]!r} is unknown here; both sides must run one version")
        return cls(**plain)

    @property
    def bridge_file(self) -> Path:
        """The file in which an engine says where its weights are, beside the address of a broadcast."""
        return Path(self.address_file).with_name("weights.bridge")

    @property
    def memory(self) -> str:
        """The device whose memory a broadcast uses: the host's with gloo, else this process's device."""
        return str(devices.choose(devices.kind_of(self.backend)))


def make_sender(
    settings: TransportSettings, callbacks: GroupCallbacks | None = None, write: Write | None = None
) -> Sender:
    """Make the learner's side. `callbacks` report changes of a broadcast's groups; `write` writes a version's files."""
    sender: Sender = _module(settings).make_sender(settings, callbacks, write)
    return sender


def make_receiver(settings: TransportSettings, name: str) -> Receiver:
    """Make an engine's side; `name` is the name of its process in errors."""
    receiver: Receiver = _module(settings).make_receiver(settings, name)
    return receiver


def _module(settings: TransportSettings) -> Any:
    return import_transport(settings.transport)


def import_transport(name: str) -> Any:
    """The module of a transport."""
    return import_module(f"busrl.{TRANSPORTS[name].module}")
