"""Makes the sender or receiver that `weights.transport` names.

Used by `busrl.weights.make_sender` and `make_receiver`. The one place that knows all transports.
Importing it imports no torch: an engine without tensors of its own needs `Settings` too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from busrl.errors import UserError
from busrl.weights import store_file
from busrl.weights.base import Receiver, Sender

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

    @classmethod
    def of(cls, topology: Topology, paths: RunPaths) -> Settings:
        weights = topology.weights
        return cls(weights.transport, paths.weights_file, store_file(paths), weights.timeout_s)


def sender(settings: Settings, on_missing: Callable[[str, str], None] | None = None) -> Sender:
    if settings.transport == "shm":
        from busrl.weights.shm import ShmSender

        return ShmSender(settings.segment)
    if settings.transport == "broadcast":
        from busrl.weights.broadcast import BroadcastSender

        return BroadcastSender(settings.address_file, timeout_s=settings.timeout_s, on_missing=on_missing)
    raise _unknown(settings.transport)


def receiver(settings: Settings, name: str) -> Receiver:
    if settings.transport == "shm":
        from busrl.weights.shm import ShmReceiver

        return ShmReceiver(settings.segment, timeout_s=settings.timeout_s)
    if settings.transport == "broadcast":
        from busrl.weights.broadcast_receiver import BroadcastReceiver

        return BroadcastReceiver(settings.address_file, name, timeout_s=settings.timeout_s)
    raise _unknown(settings.transport)


def _unknown(transport: str) -> UserError:
    return UserError(f'weights.transport is {transport!r}; it must be "shm" or "broadcast"')
