"""Weights by collectives: one group of the learner and its engines. Knows nothing of what is trained.

`sender` is the learner's side, `receiver` an engine's, `group` the connections that both use. This module makes either
side without importing the other.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from busrl.weights.base import GroupCallbacks, Receiver, Sender, Write

if TYPE_CHECKING:
    from busrl.weights.factory import TransportSettings


def make_sender(settings: TransportSettings, callbacks: GroupCallbacks | None, write: Write | None) -> Sender:
    from busrl.weights.broadcast.sender import BroadcastSender

    return BroadcastSender(
        settings.address_file, timeout_s=settings.timeout_s, bucket_bytes=settings.bucket_bytes,
        checksum=settings.checksum, threshold=settings.threshold, key_every=settings.key_every,
        backend=settings.backend, device=settings.memory, callbacks=callbacks,
    )


def make_receiver(settings: TransportSettings, name: str) -> Receiver:
    from busrl.weights.broadcast.receiver import BroadcastReceiver

    return BroadcastReceiver(settings.address_file, name, timeout_s=settings.timeout_s, device=settings.memory)
