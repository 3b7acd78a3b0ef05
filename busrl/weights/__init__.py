"""Weight transports behind one interface: shared memory on one host, a broadcast over a changing group, folders, or
one copy that engine and learner share.

Used by the learner (Sender) and by everybody who runs the model (Receiver). One topology key chooses. Importing this
package imports no torch.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from busrl.weights.base import NOTHING, GroupChange, News, Receiver, Sender

if TYPE_CHECKING:
    from busrl.config import Topology
    from busrl.paths import RunPaths
    from busrl.weights.factory import Settings
    from busrl.weights.folders import Write

__all__ = [
    "NOTHING", "GroupChange", "News", "Receiver", "Sender", "bridge_file", "make_receiver", "make_sender",
    "settings_of", "share_weights", "store_file",
]


def make_sender(
    topology: Topology,
    paths: RunPaths,
    news: News | None = None,
    write: Write | None = None,
) -> Sender:
    """The learner's side of the transport that the topology names.

    `news` hears, from another thread, of groups of engines, where there are such; `write` fills folders, where versions
    are such.
    """
    from busrl.weights.factory import Settings, sender

    return sender(Settings.of(topology, paths), news, write)


def make_receiver(topology: Topology, paths: RunPaths, name: str) -> Receiver:
    """An engine's side; `name` is the process, by which errors call it."""
    from busrl.weights.factory import Settings, receiver

    return receiver(Settings.of(topology, paths), name)


def share_weights(receiver: Receiver, engine: Any) -> None:
    """Where the learner trains the engine's own weights (cuda_ipc) it may map them from here on; else nothing.

    An engine whose model is in another process shares it there, with the receiver that it brings.
    """
    share = getattr(receiver, "share", None)
    if share is not None:
        share(engine.parameters())


def bridge_file(address_file: Path) -> Path:
    """Where an engine says in which memory its weights are, beside the address of a broadcast."""
    return address_file.with_name("weights.bridge")


def settings_of(topology: Topology, paths: RunPaths) -> Settings:
    """What an engine needs that makes its own receiver."""
    from busrl.weights.factory import Settings

    return Settings.of(topology, paths)


def store_file(paths: RunPaths) -> Path:
    """Where a broadcasting learner writes the address of its store."""
    return paths.runtime_dir / "weights.store"
