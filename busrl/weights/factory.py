"""Makes the sender or receiver that `weights.transport` names.

Used by `busrl.weights.make_sender` and `make_receiver`. The one place that knows all transports.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from busrl.errors import UserError
from busrl.topology.schema import RESTARTS
from busrl.topology.weight_costs import held_versions, kept_versions
from busrl.topology.weight_rules import ADAPTERS, FOLDERS
from busrl.weights import store_file
from busrl.weights.base import Receiver, Sender
from busrl.weights.broadcast import BroadcastSender
from busrl.weights.broadcast_receiver import BroadcastReceiver
from busrl.weights.fingerprint import fingerprint
from busrl.weights.folder_receiver import FolderReceiver
from busrl.weights.folder_sender import FolderSender, Write
from busrl.weights.shm import ShmReceiver, ShmSender

if TYPE_CHECKING:
    from busrl.paths import RunPaths
    from busrl.topology import Topology


@dataclass(frozen=True)
class Folders:
    """Of a transport whose versions are folders: where they lie, how many stay, and the model adapters belong to."""

    root: Path
    kept: int
    held: int
    base: Path | None
    kind: str  # of the receiver: "adapter" enters a running engine, "folder" restarts it

    @classmethod
    def of(cls, topology: Topology, paths: RunPaths) -> Folders | None:
        transport = topology.weights.transport
        if transport not in FOLDERS:
            return None
        adapters = transport in ADAPTERS
        return cls(
            root=paths.adapters if adapters else paths.published,
            kept=kept_versions(topology),
            held=held_versions(topology),
            base=Path(topology.model.path) if adapters else None,
            kind="folder" if transport in RESTARTS else "adapter",
        )


@dataclass(frozen=True)
class Settings:
    """What a transport needs: its kind, the shared-memory file, the file with the store's address, the deadline."""

    transport: str
    segment: Path
    address_file: Path
    timeout_s: float
    folders: Folders | None = None

    @classmethod
    def of(cls, topology: Topology, paths: RunPaths) -> Settings:
        weights = topology.weights
        folders = Folders.of(topology, paths)
        return cls(weights.transport, paths.weights_file, store_file(paths), weights.timeout_s, folders)


def sender(
    settings: Settings, on_missing: Callable[[str, str], None] | None = None, write: Write | None = None
) -> Sender:
    """`write` makes the files of a version, where versions are folders."""
    if settings.folders is not None and write is not None:
        own = settings.folders
        kind, base = ("adapter", fingerprint(own.base)) if own.base is not None else ("checkpoint", "")
        return FolderSender(own.root, write, kind=kind, kept=own.kept, base=base)
    if settings.transport == "shm":
        return ShmSender(settings.segment)
    if settings.transport == "broadcast":
        return BroadcastSender(settings.address_file, timeout_s=settings.timeout_s, on_missing=on_missing)
    raise _unknown(settings.transport)


def receiver(settings: Settings, name: str) -> Receiver:
    if settings.folders is not None:
        own = settings.folders
        return FolderReceiver(
            own.root, name, kind=own.kind, held=own.held, base=own.base, timeout_s=settings.timeout_s
        )
    if settings.transport == "shm":
        return ShmReceiver(settings.segment, timeout_s=settings.timeout_s)
    if settings.transport == "broadcast":
        return BroadcastReceiver(settings.address_file, name, timeout_s=settings.timeout_s)
    raise _unknown(settings.transport)


def _unknown(transport: str) -> UserError:
    return UserError(f'weights.transport is {transport!r}; see docs/weights.md for those there are')
