"""Makes the sender or receiver that `weights.transport` names.

Used by `busrl.weights.make_sender` and `make_receiver`. The one place that knows all transports.
Importing it imports no torch: an engine without tensors of its own needs `Settings` too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from busrl import device as devices
from busrl.errors import UserError
from busrl.weights import bridge_file, store_file
from busrl.weights.base import News, Receiver, Sender
from busrl.weights.folder_sender import Write
from busrl.weights.folder_settings import folder_receiver, folder_sender, folder_settings

if TYPE_CHECKING:
    from busrl.paths import RunPaths
    from busrl.topology import Topology


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
        from busrl.weights.broadcast import BroadcastSender
        from busrl.weights.outbox import Sparse

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
        from busrl.weights.one_copy import OneCopySender

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
        from busrl.weights.broadcast_receiver import BroadcastReceiver

        where = _memory_of(settings)
        return BroadcastReceiver(settings.address_file, name, timeout_s=settings.timeout_s, device=where)
    if settings.transport == "cuda_ipc":
        from busrl.weights.one_copy import OneCopyReceiver

        at = bridge_file(Path(settings.address_file))
        return OneCopyReceiver(at, settings.segment, name, timeout_s=settings.timeout_s)
    raise _unknown(settings.transport)


def _memory_of(settings: Settings) -> str:
    """Where the blocks of a broadcast are: on the host with gloo, else on the device that this process works on."""
    return str(devices.choose(devices.kind_of(settings.backend)))


def _unknown(transport: str) -> UserError:
    return UserError(f'weights.transport is {transport!r}; docs/weights.md has those there are')
