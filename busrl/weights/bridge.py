"""The bridge: a file by which one process makes its model's tensors another's, without a copy.

Written by the engine, which owns the memory; read by the learner, whose parameters become views of it. JSON of handles
(`weights.handles`), the engine's tensors in them (shape, dtype, strides) and, by the checkpoint's names, the rows of
those tensors (`weights.fusing`). Talks to files and memory; knows nothing of versions or of when anything may change.

- Mode 0600, and whole from the moment it has its name: a reader never sees half of it.
- Nothing in it is executed or unpickled; what does not fit is refused with the first difference.
"""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from busrl import device as devices
from busrl.errors import UserError, WeightsOwnerLost
from busrl.private import exposed, write_private
from busrl.weights import fusing
from busrl.weights.handles import Handle, export, map_handle
from busrl.weights.mark import Mark

MAGIC, LAYOUT = "busrl-bridge", 1
Named = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class Bridge:
    """What the file says. `tensors`: name, storage, offset in items, shape, strides, dtype; `parts` as in `fusing`."""

    id: str
    name: str  # of the process that wrote it
    owner: Mark
    device: str  # identity of the device
    storages: list[Handle]
    tensors: list[dict[str, Any]]
    parts: list[fusing.Part]

    def to_json(self) -> str:
        return json.dumps(
            {
                "magic": MAGIC, "layout": LAYOUT, "id": self.id, "name": self.name,
                "owner": [self.owner.pid, self.owner.started], "device": self.device, "storages": self.storages,
                "tensors": self.tensors, "parts": [[p.name, p.tensor, p.start, p.stop] for p in self.parts],
            },
            separators=(",", ":"),
        )  # fmt: skip


def describe(name: str, named: Named, wanted: Mapping[str, fusing.Shape] | None = None) -> Bridge:
    """Export the tensors of this process's model, in place. `wanted`: the checkpoint's names and shapes, where the
    engine has fused its own; None: the names are the checkpoint's."""
    shapes = {key: tuple(tensor.shape) for key, tensor in named.items()}
    parts = fusing.parts(shapes, wanted if wanted is not None else shapes)
    storages: dict[int, int] = {}
    handles: list[Handle] = []
    tensors: list[dict[str, Any]] = []
    for key, tensor in named.items():
        storage = tensor.untyped_storage()
        at = storage.data_ptr()
        if at not in storages:
            handles.append(export(storage))
            at = storage.data_ptr()  # on a CPU it has moved into a file
            storages[at] = len(handles) - 1
        tensors.append(
            {
                "name": key, "storage": storages[at], "offset": tensor.storage_offset(), "shape": list(tensor.shape),
                "strides": list(tensor.stride()), "dtype": str(tensor.dtype).removeprefix("torch."),
            }
        )  # fmt: skip
    where = next(iter(named.values())).device
    return Bridge(uuid.uuid4().hex, name, Mark.mine(), devices.identity(where), handles, tensors, parts)


def write(path: Path, bridge: Bridge) -> None:
    write_private(path, bridge.to_json())


def read(path: Path) -> Bridge | None:
    """What the file says; None if there is none. UserError if it is another user's, open to others, or not ours."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    except OSError as problem:
        raise UserError(f"{path}: {problem.strerror}; it is no bridge of this run, have it removed") from None
    with os.fdopen(descriptor, encoding="ascii") as file:
        if why := exposed(Path(f"/proc/self/fd/{descriptor}")):
            raise UserError(f"{path}: {why}; it names memory that others could change, have it removed")
        try:
            return _parse(json.load(file))
        except (ValueError, KeyError, TypeError) as problem:
            raise UserError(f"{path}: not a bridge of this version of busrl ({problem!r}); have it removed") from None


def _parse(data: dict[str, Any]) -> Bridge:
    if (data["magic"], data["layout"]) != (MAGIC, LAYOUT):
        raise ValueError(f"magic {data['magic']!r}, layout {data['layout']!r}")
    pid, started = data["owner"]
    parts = [fusing.Part(str(n), str(t), int(a), int(b)) for n, t, a, b in data["parts"]]
    return Bridge(str(data["id"]), str(data["name"]), Mark(int(pid), int(started)), str(data["device"]),
                  list(data["storages"]), list(data["tensors"]), parts)  # fmt: skip


def map_parts(bridge: Bridge, device: torch.device) -> dict[str, torch.Tensor]:
    """The checkpoint's tensors, by name, as views of the owner's memory on this device."""
    if bridge.device != devices.identity(device):
        raise UserError(
            f"{bridge.name} has the weights on {bridge.device}, this process works on {devices.identity(device)}: "
            "one copy needs one device; give both processes the same devices in [[process]]"
        )
    storages = [map_handle(handle, device, bridge.owner) for handle in bridge.storages]
    whole = {entry["name"]: _view(storages[entry["storage"]], entry, device) for entry in bridge.tensors}
    found = {p.name: whole[p.tensor][p.start : p.stop] if p.stop else whole[p.tensor] for p in bridge.parts}
    if not bridge.owner.alive:
        raise WeightsOwnerLost(f"{bridge.name} ({bridge.owner}) ended while its weights were mapped")
    return found


def _view(storage: torch.UntypedStorage, entry: dict[str, Any], device: torch.device) -> torch.Tensor:
    dtype = getattr(torch, entry["dtype"])
    last = entry["offset"] + sum((n - 1) * stride for n, stride in zip(entry["shape"], entry["strides"]))
    if (last + 1) * dtype.itemsize > storage.nbytes():
        raise UserError(f"weights: {entry['name']} does not fit into its memory; the bridge is damaged")
    made = torch.empty(0, dtype=dtype, device=device)
    return made.set_(storage, entry["offset"], entry["shape"], entry["strides"])


def check(views: Named, own: Named, *, same_dtype: bool) -> None:
    """UserError with the first difference between the engine's weights and this model's."""
    for missing, text in ((own.keys() - views.keys(), "not among the engine's weights"),
                          (views.keys() - own.keys(), "in the engine, and not in this model")):  # fmt: skip
        if missing:
            raise UserError(f"weights: {min(missing)!r} is {text}; both sides must run the same model.path")
    for name, tensor in own.items():
        other = views[name]
        if other.shape != tensor.shape or (same_dtype and other.dtype != tensor.dtype):
            raise UserError(
                f"weights: {name!r} is {other.dtype}{list(other.shape)} in the engine and "
                f"{tensor.dtype}{list(tensor.shape)} here; both sides must run the same model.path and model.dtype"
            )
