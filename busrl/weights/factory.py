"""Makes the sender or receiver that `weights.transport` names.

Used by `busrl.weights.make_sender` and `make_receiver`. The one place that knows all transports.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from busrl.errors import UserError
from busrl.weights import store_file
from busrl.weights.base import Receiver, Sender
from busrl.weights.broadcast import BroadcastSender
from busrl.weights.broadcast_receiver import BroadcastReceiver
from busrl.weights.folder_sender import Write
from busrl.weights.folder_settings import folder_receiver, folder_sender, folder_settings
from busrl.weights.shm import ShmReceiver, ShmSender

if TYPE_CHECKING:
    from busrl.paths import RunPaths
    from busrl.topology import Topology


@dataclass(frozen=True)
class Settings:
    """What a transport needs: its kind, the shared-memory file, the file with the store's address, the deadline."""

    transport: str
    segment: Path
    address_file: Path
    timeout_s: float
    folders: str = ""  # where versions lie that are folders; empty: they are tensors
    kept: int = 2  # of these, by the learner ...
    held: int = 1  # ... and by each engine
    base: str = ""  # model folder that adapters belong to; empty: versions are whole checkpoints

    @classmethod
    def of(cls, topology: Topology, paths: RunPaths) -> Settings:
        weights = topology.weights
        return cls(weights.transport, paths.weights_file, store_file(paths), weights.timeout_s,
                   **folder_settings(topology, paths))  # fmt: skip


def sender(
    settings: Settings, on_missing: Callable[[str, str], None] | None = None, write: Write | None = None
) -> Sender:
    """`write` makes the files of a version, where versions are folders."""
    if settings.folders:
        return folder_sender(settings, write)
    if settings.transport == "shm":
        return ShmSender(settings.segment)
    if settings.transport == "broadcast":
        return BroadcastSender(settings.address_file, timeout_s=settings.timeout_s, on_missing=on_missing)
    raise _unknown(settings.transport)


def receiver(settings: Settings, name: str) -> Receiver:
    if settings.folders:
        return folder_receiver(settings, name)
    if settings.transport == "shm":
        return ShmReceiver(settings.segment, timeout_s=settings.timeout_s)
    if settings.transport == "broadcast":
        return BroadcastReceiver(settings.address_file, name, timeout_s=settings.timeout_s)
    raise _unknown(settings.transport)


def _unknown(transport: str) -> UserError:
    return UserError(f'weights.transport is {transport!r}; docs/weights.md has those there are')
