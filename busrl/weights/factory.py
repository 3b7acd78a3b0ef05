"""Makes the sender or the receiver that `weights.transport` names.

Used by the learner, by every process that runs the model, and by vLLM's workers. The one module that knows all
transports. A transport that needs torch is imported when it is made, so a process without tensors can read
`TransportSettings`.

A new transport is a module of this package, its entry in `make_sender` and `make_receiver`, and its name in the choices
of `weights.transport`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from busrl.errors import UserError
from busrl.preflight.machine import held_versions, kept_versions
from busrl.system import device as devices
from busrl.topology.schema import ADAPTERS, FOLDERS, RESTARTS, TRANSPORTS
from busrl.weights.base import GroupCallbacks, Receiver, Sender
from busrl.weights.folders import FolderReceiver, FolderSender, Write
from busrl.weights.tensors import fingerprint

if TYPE_CHECKING:
    from busrl.paths import RunPaths
    from busrl.topology import Topology


@dataclass(frozen=True)
class TransportSettings:
    """What a transport needs, as plain data: `plain()` fits any wire, `from_plain` rebuilds it in another process.

    `segment` is the file in shared memory, `address_file` is the socket of a broadcasting learner; both are paths
    on this host. `checksum`: every receiver checks the bytes of each version against a digest that came with it.
    `bucket_bytes` is the piece of a broadcast with its own deadline, `backend` what carries it. `threshold` is
    the share of changed bytes up to which updates are sparse (0: never), `key_every` a number of versions
    (docs/weights.md).
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
    base: str = ""  # model folder that adapters belong to; empty: versions are whole checkpoints

    def __post_init__(self) -> None:
        if self.transport not in TRANSPORTS:
            raise UserError(f"weights.transport is {self.transport!r}; docs/weights.md lists the transports")

    @classmethod
    def of(cls, topology: Topology, paths: RunPaths) -> TransportSettings:
        weights, sparse = topology.weights, topology.weights.sparse
        made = cls(
            weights.transport, str(paths.weights_file), str(paths.runtime_dir / "cast.sock"),
            timeout_s=weights.timeout_s, checksum=weights.checksum, bucket_bytes=weights.bucket_mb << 20,
            backend=weights.backend, threshold=sparse.threshold if sparse.enabled else 0.0, key_every=sparse.key_every,
        )
        if weights.transport not in FOLDERS:
            return made
        adapters = weights.transport in ADAPTERS
        return replace(
            made, folders=str(paths.adapters if adapters else paths.published), kept=kept_versions(topology),
            kept_by_engine=held_versions(topology), base=topology.model.path if adapters else "",
        )

    def plain(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> TransportSettings:
        """UserError names a field that this version does not know."""
        unknown = sorted(plain.keys() - {field.name for field in fields(cls)})
        if unknown:
            raise UserError(f"settings of the weights: {unknown[0]!r} is unknown here; both sides must run one version")
        return cls(**plain)

    @property
    def bridge_file(self) -> Path:
        """Where an engine says which memory its weights are in, beside the address of a broadcast."""
        return Path(self.address_file).with_name("weights.bridge")

    @property
    def memory(self) -> str:
        """The device whose memory a broadcast uses: the host with gloo, else the device that this process works on."""
        return str(devices.choose(devices.kind_of(self.backend)))


def make_sender(
    settings: TransportSettings, callbacks: GroupCallbacks | None = None, write: Write | None = None
) -> Sender:
    """The learner's side. `callbacks`: changes of a broadcast's groups; `write`: the files of a version."""
    if settings.folders:
        assert write is not None
        kind, base = ("adapter", fingerprint(Path(settings.base))) if settings.base else ("checkpoint", "")
        return FolderSender(Path(settings.folders), write, kind=kind, kept=settings.kept, base=base)
    if settings.transport == "shm":
        from busrl.weights.shm import ShmSender

        return ShmSender(
            settings.segment, checksums=settings.checksum, threshold=settings.threshold, key_every=settings.key_every,
        )
    if settings.transport == "broadcast":
        from busrl.weights.broadcast.sender import BroadcastSender

        return BroadcastSender(
            settings.address_file, timeout_s=settings.timeout_s, bucket_bytes=settings.bucket_bytes,
            checksum=settings.checksum, threshold=settings.threshold, key_every=settings.key_every,
            backend=settings.backend, device=settings.memory, callbacks=callbacks,
        )
    from busrl.weights.one_copy import OneCopySender

    return OneCopySender(settings.bridge_file, settings.segment, timeout_s=settings.timeout_s)


def make_receiver(settings: TransportSettings, name: str) -> Receiver:
    """An engine's side; `name` is the process, which errors call it by."""
    if settings.folders:
        return FolderReceiver(
            Path(settings.folders), name, kind="folder" if settings.transport in RESTARTS else "adapter",
            kept=settings.kept_by_engine, base=Path(settings.base) if settings.base else None,
            timeout_s=settings.timeout_s,
        )
    if settings.transport == "shm":
        from busrl.weights.shm import ShmReceiver

        return ShmReceiver(settings.segment, timeout_s=settings.timeout_s)
    if settings.transport == "broadcast":
        from busrl.weights.broadcast.receiver import BroadcastReceiver

        return BroadcastReceiver(settings.address_file, name, timeout_s=settings.timeout_s, device=settings.memory)
    from busrl.weights.one_copy import OneCopyReceiver

    return OneCopyReceiver(settings.bridge_file, settings.segment, name, timeout_s=settings.timeout_s)
