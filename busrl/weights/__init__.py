"""Weight transports behind one interface: shared memory on one host, or a Gloo broadcast over a changing group.

Used by the learner (Sender) and by everybody who runs the model (Receiver). One topology key chooses. Importing this
package imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from busrl.weights.base import NOTHING, GroupChange, Receiver, Sender

if TYPE_CHECKING:
    from busrl.paths import RunPaths
    from busrl.topology import Topology
    from busrl.weights.factory import Settings

__all__ = ["NOTHING", "GroupChange", "Receiver", "Sender", "make_receiver", "make_sender", "settings_of", "store_file"]


def make_sender(
    topology: Topology, paths: RunPaths, on_change: Callable[[GroupChange], None] | None = None
) -> Sender:
    """The learner's side of the transport that the topology names.

    `on_change` hears, from another thread, of each group of engines that is formed, where there are groups.
    """
    from busrl.weights.factory import Settings, sender

    return sender(Settings.of(topology, paths), on_change)


def make_receiver(topology: Topology, paths: RunPaths, name: str) -> Receiver:
    """An engine's side; `name` is the process, by which errors call it."""
    from busrl.weights.factory import Settings, receiver

    return receiver(Settings.of(topology, paths), name)


def settings_of(topology: Topology, paths: RunPaths) -> Settings:
    """What an engine needs that makes its own receiver."""
    from busrl.weights.factory import Settings

    return Settings.of(topology, paths)


def store_file(paths: RunPaths) -> Path:
    """Where a broadcasting learner writes the address of its store."""
    return paths.runtime_dir / "weights.store"
