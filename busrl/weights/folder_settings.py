"""The part of a transport's settings that versions as folders need, and the two ends made from it.

Used by `factory`. Talks to the topology and to the model folder (its fingerprint). Imports no torch.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from busrl.errors import BugError
from busrl.topology.schema import RESTARTS
from busrl.topology.weight_costs import held_versions, kept_versions
from busrl.topology.weight_rules import ADAPTERS, FOLDERS
from busrl.weights.fingerprint import fingerprint
from busrl.weights.folder_receiver import FolderReceiver
from busrl.weights.folder_sender import FolderSender, Write

if TYPE_CHECKING:
    from busrl.paths import RunPaths
    from busrl.topology import Topology
    from busrl.weights.factory import Settings


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
