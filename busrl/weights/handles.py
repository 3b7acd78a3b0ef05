"""Handles of memory that another process can map: a CUDA allocation, or on the CPU a file in shared memory.

Used by the bridge. A handle is numbers and bytes (as hex digits), no pickle: whoever reads it can name memory, nothing
more. Knows nothing of tensors' names or of versions.

- A storage is exported in place: every tensor that is a view of it stays one, and shares it from then on.
- CPU: the file has no name, it is reached through the exporter's descriptor, and the kernel frees it with its last
  mapping. Who maps it keeps it after the exporter's death.
- CUDA: the memory belongs to the exporter. After its death what a mapping shows is undefined.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Mapping
from typing import Any

import torch

from busrl.errors import UserError, WeightsOwnerLost
from busrl.weights.mark import Mark

Handle = dict[str, Any]
CUDA_FIELDS = ("handle", "nbytes", "offset", "counter", "counter_offset", "event", "event_sync")


def export(storage: torch.UntypedStorage) -> Handle:
    """A handle of the storage, which stays where it is for whoever uses it here."""
    kind = storage.device.type
    if kind not in EXPORT:
        raise UserError(f"weights on a {kind} device can not be shared between processes; use another transport")
    return {"kind": kind, "nbytes": storage.nbytes(), **EXPORT[kind](storage)}


def map_handle(handle: Handle, device: torch.device, owner: Mark) -> torch.UntypedStorage:
    """The memory behind a handle, writable. WeightsOwnerLost if its owner is gone, UserError if it is no handle."""
    kind = handle.get("kind")
    if kind != device.type:
        raise UserError(f"the weights are on a {kind} device, this process works on {device.type}; both must be one")
    if not owner.alive:
        raise WeightsOwnerLost(f"the process that holds the weights is gone ({owner})")
    return MAP[device.type](handle, device, owner)


# ---------------------------------------------------------------------------------------------------------- CPU


def _export_file(storage: torch.UntypedStorage) -> Handle:
    descriptor, _ = storage._share_fd_cpu_()  # moves it into a file, if it is in none
    return {"descriptor": int(descriptor), "inode": os.fstat(descriptor).st_ino}


def _map_file(handle: Handle, device: torch.device, owner: Mark) -> torch.UntypedStorage:
    path = f"/proc/{owner.pid}/fd/{int(handle['descriptor'])}"
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError as problem:
        raise WeightsOwnerLost(f"{path} can not be opened ({problem.strerror}): weights of {owner}") from None
    try:
        status = os.fstat(descriptor)
        if status.st_ino != handle["inode"] or status.st_size < handle["nbytes"]:
            raise WeightsOwnerLost(f"{path} is another file by now: weights of {owner}")
        mapping = mmap.mmap(descriptor, handle["nbytes"])
    finally:
        os.close(descriptor)
    return torch.frombuffer(mapping, dtype=torch.uint8).untyped_storage()


# --------------------------------------------------------------------------------------------------------- CUDA


def _export_cuda(storage: torch.UntypedStorage) -> Handle:
    """What torch gives for another process. Its counter of users stays at one however often the handle is mapped: the
    memory is kept by its owner, which outlives all that map it or takes them along."""
    share: Any = storage._share_cuda_
    _, handle, nbytes, offset, counter, counter_offset, event, sync = share()
    return {
        "handle": handle.hex(), "nbytes": int(nbytes), "offset": int(offset), "counter": counter.hex(),
        "counter_offset": int(counter_offset), "event": event.hex(), "event_sync": bool(sync),
    }  # fmt: skip


def _map_cuda(handle: Handle, device: torch.device, owner: Mark) -> torch.UntypedStorage:
    missing = [name for name in CUDA_FIELDS if name not in handle]
    if missing:
        raise UserError(f"no handle of CUDA memory: {missing[0]} is missing; both sides must run one version of busrl")
    given = (bytes.fromhex(value) if isinstance(value, str) else value for value in (handle[n] for n in CUDA_FIELDS))
    torch.empty(0, device=device)  # the device's context has to be there before memory is mapped
    mapped: torch.UntypedStorage = torch.UntypedStorage._new_shared_cuda(device.index or 0, *given)
    return mapped


EXPORT: Mapping[str, Callable[[torch.UntypedStorage], Handle]] = {"cpu": _export_file, "cuda": _export_cuda}
MAP: Mapping[str, Callable[[Handle, torch.device, Mark], torch.UntypedStorage]] = {"cpu": _map_file, "cuda": _map_cuda}
