"""Writes what a client of a service saved as a folder of its own: a whole model, or its adapter in peft's format.

Used by `busrl export`. Talks to the folders of saved weights and to the base model. Knows nothing of logs or clients.

- Each kind of saved weights can be written: a training's state, a sampler's snapshot, external weights.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from busrl.errors import UserError
from busrl.paths import ADAPTER_PREFIX, ADAPTER_WEIGHTS
from busrl.service import folders
from busrl.service.adapters import ALPHA, write_peft
from busrl.service.folders import ServiceFolders
from busrl.service.registry import saved
from busrl.service.tenants import read_state
from busrl.topology import Topology
from busrl.training.checkpoint import export
from busrl.training.model import load

OF_STATE = "adapter."  # beginning of the adapter's names in a state


def export_saved(run_dir: Path, topology: Topology, path: str, folder: Path, dtype: str, alone: bool) -> None:
    """Fill a folder. `alone`: with the adapter without its base. `dtype`: torch's name of a type; empty: that of the
    run's model. UserError: nothing is saved under that path."""
    rank, tensors = adapter_of(ServiceFolders(run_dir), path)
    wanted: torch.dtype = getattr(torch, dtype or topology.model.dtype)
    if alone:
        write_peft(folder, tensors, rank, wanted, topology.model.path)
        return
    model = load(topology.model.path, wanted)
    merge(model, tensors, ALPHA / rank)
    export(model, folder, Path(topology.model.path))


def adapter_of(where: ServiceFolders, path: str) -> tuple[int, dict[str, Tensor]]:
    """The rank of a saved adapter, and its tensors by their names in peft's file."""
    from safetensors.torch import load_file

    place = saved(path)
    if place is None:
        raise UserError(f"{path}: not a path of saved weights; give tinker://MODEL/weights/NAME, or one of "
                        "sampler_weights or external_weights")
    folder = where.saved_as(*place)
    described = folders.about(folder)
    if described is None:
        all_saved = folder.parents[1]
        names = sorted(str(about.parent.relative_to(all_saved)) for about in all_saved.glob("*/*/about.json"))
        raise UserError(f"{path}: nothing is saved there; of {place[0]} there are: {', '.join(names) or 'none'}")
    rank = int(described["adapter"]["rank"])
    if place[1] == "weights":
        _, tensors = read_state(folder)
        return rank, {name.removeprefix(OF_STATE): part for name, part in tensors.items() if name.startswith(OF_STATE)}
    source = where.snapshot(described["weights"]) if described["weights"] else folder
    return rank, load_file(source / ADAPTER_WEIGHTS)


@torch.no_grad()
def merge(model: torch.nn.Module, tensors: dict[str, Tensor], scale: float) -> None:
    """Add an adapter to the weights of a model in place. UserError: it is of another model."""
    layers = dict(model.named_modules())
    for name in sorted({name.split(".lora_")[0] for name in tensors}):
        layer = layers.get(name.removeprefix(ADAPTER_PREFIX))
        down, up = (tensors[f"{name}.lora_{side}.weight"].float() for side in "AB")
        weight = getattr(layer, "weight", None)
        if weight is None or weight.shape != (up.shape[0], down.shape[1]):
            raise UserError(f"the adapter has {name}, and the model no such layer; was model.path of this run changed?")
        weight.copy_(torch.addmm(weight.float(), up, down, alpha=scale))
