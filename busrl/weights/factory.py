"""The part of a transport's settings that versions as folders need, and the two ends made from it.

Used by `factory`. Talks to the topology and to the model folder (its fingerprint). Imports no torch.

Makes the sender or receiver that `weights.transport` names.

Used by `busrl.weights.make_sender` and `make_receiver`. The one place that knows all transports.
Importing it imports no torch: an engine without tensors of its own needs `Settings` too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from busrl import device as devices
from busrl.config.machine import held_versions, kept_versions
from busrl.config.schema import ADAPTERS, FOLDERS, RESTARTS
from busrl.errors import BugError, UserError
from busrl.weights import bridge_file, store_file
from busrl.weights.base import News, Receiver, Sender
from busrl.weights.folders import FolderReceiver, FolderSender, Write
from busrl.weights.tensors import fingerprint

if TYPE_CHECKING:
    from busrl.config import Topology
    from busrl.paths import RunPaths



# -- The part of a transport's settings that versions as folders need, and the two ends made from it ------------------


def folder_settings(topology: Topology, paths: RunPaths) -> dict[str, Any]:
    """Fields of `factory.Settings`; none for a transport of tensors."""
    transport = topology.weights.transport
    if transport not in FOLDERS:
        return {}
    adapters = transport in ADAPTERS
    return {
        "folders": str(paths.adapters if adapters else paths.published),
        "kept": kept_versions(topology),
        "held": held_versions(topology),
        "base": topology.model.path if adapters else "",
    }


def folder_sender(settings: Settings, write: Write | None) -> FolderSender:
    if write is None:
        raise BugError(f"{settings.transport} publishes folders, and nobody said how their files are made")
    root = Path(settings.folders)
    if not settings.base:
        return FolderSender(root, write, kind="checkpoint", kept=settings.kept)
    return FolderSender(root, write, kind="adapter", kept=settings.kept, base=fingerprint(Path(settings.base)))


def folder_receiver(settings: Settings, name: str) -> FolderReceiver:
    return FolderReceiver(
        Path(settings.folders),
        name,
        kind="folder" if settings.transport in RESTARTS else "adapter",
        held=settings.held,
        base=Path(settings.base) if settings.base else None,
        timeout_s=settings.timeout_s,
    )


# -- Makes the sender or receiver that `weights.transport` names ------------------------------------------------------


@dataclass(frozen=True)
class Settings:
    """What a transport needs, as plain data: `plain()` goes over any wire, `from_plain` rebuilds it elsewhere.

    `segment` is the file in shared memory, `address_file` says where a broadcasting learner is found; both are paths
    on this host. `checksum`: every receiver checks the bytes of each version against a digest that came with it.
    `bucket_bytes` is the piece of a broadcast with a deadline of its own, `backend` what carries it. `sparse_threshold`
    is a share of the bytes of all values, `key_every` a number of versions (docs/sparse.md).
    """

    transport: str
    segment: str
    address_file: str
    timeout_s: float = 10.0
    checksum: bool = False
    bucket_bytes: int = 16 << 20
    backend: str = "gloo"
    sparse: bool = False
    sparse_threshold: float = 0.1
    key_every: int = 32
    folders: str = ""  # where versions lie that are folders; empty: they are tensors
    kept: int = 2  # of these, by the learner ...
    held: int = 1  # ... and by each engine
    base: str = ""  # model folder that adapters belong to; empty: versions are whole checkpoints

    @classmethod
    def of(cls, topology: Topology, paths: RunPaths) -> Settings:
        weights = topology.weights
        return cls(
            transport=weights.transport,
            segment=str(paths.weights_file),
            address_file=str(store_file(paths)),
            timeout_s=weights.timeout_s,
            checksum=weights.checksum,
            bucket_bytes=weights.bucket_mb << 20,
            backend=weights.backend,
            sparse=weights.sparse.enabled,
            sparse_threshold=weights.sparse.threshold,
            key_every=weights.sparse.key_every,
            **folder_settings(topology, paths),
        )

    def plain(self) -> dict[str, Any]:
        """Numbers, strings and booleans by field name."""
        return asdict(self)

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> Settings:
        """The other way; UserError names a field that this version does not know."""
        unknown = sorted(plain.keys() - {field.name for field in fields(cls)})
        if unknown:
            raise UserError(f"settings of the weights: {unknown[0]!r} is unknown here; both sides must run one version")
        return cls(**plain)


def sender(
    settings: Settings, news: News | None = None, write: Write | None = None
) -> Sender:
    """`news` hears of groups of engines, where there are such; `write` fills the folder of a version that is one."""
    if settings.folders:
        return folder_sender(settings, write)
    if settings.transport == "shm":
        from busrl.weights.shm import ORDERED_STORES, ShmSender

        return ShmSender(
            settings.segment,
            checksums=settings.checksum or not ORDERED_STORES,
            threshold=settings.sparse_threshold if settings.sparse else 0.0,
            key_every=settings.key_every,
        )
    if settings.transport == "broadcast":
        from busrl.weights.broadcast.sender import BroadcastSender, Sparse

        return BroadcastSender(
            settings.address_file,
            timeout_s=settings.timeout_s,
            bucket_bytes=settings.bucket_bytes,
            checksum=settings.checksum,
            sparse=Sparse(settings.sparse_threshold if settings.sparse else 0.0, settings.key_every),
            backend=settings.backend,
            device=_memory_of(settings),
            news=news,
        )
    if settings.transport == "cuda_ipc":
        from busrl.weights.shared import OneCopySender

        at = bridge_file(Path(settings.address_file))
        return OneCopySender(at, settings.segment, timeout_s=settings.timeout_s)
    raise _unknown(settings.transport)


def receiver(settings: Settings, name: str) -> Receiver:
    if settings.folders:
        return folder_receiver(settings, name)
    if settings.transport == "shm":
        from busrl.weights.shm import ShmReceiver

        return ShmReceiver(settings.segment, timeout_s=settings.timeout_s)
    if settings.transport == "broadcast":
        from busrl.weights.broadcast.receiver import BroadcastReceiver

        where = _memory_of(settings)
        return BroadcastReceiver(settings.address_file, name, timeout_s=settings.timeout_s, device=where)
    if settings.transport == "cuda_ipc":
        from busrl.weights.shared import OneCopyReceiver

        at = bridge_file(Path(settings.address_file))
        return OneCopyReceiver(at, settings.segment, name, timeout_s=settings.timeout_s)
    raise _unknown(settings.transport)


def _memory_of(settings: Settings) -> str:
    """Where the blocks of a broadcast are: on the host with gloo, else on the device that this process works on."""
    return str(devices.choose(devices.kind_of(settings.backend)))


def _unknown(transport: str) -> UserError:
    return UserError(f'weights.transport is {transport!r}; docs/weights.md has those there are')
