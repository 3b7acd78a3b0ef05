"""Writes what a client of a service saved as a folder of its own: a whole model, or its adapter in peft's format.

Used by `busrl export`. Talks to the folders of saved weights and to the base model. Knows nothing of logs or clients.

- Each kind of saved weights can be written: a training's state, a sampler's snapshot, external weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from busrl.errors import UserError
from busrl.paths import ADAPTER_PREFIX, ADAPTER_WEIGHTS
from busrl.service import folders
from busrl.service.adapters import ALPHA, write_peft
from busrl.service.folders import ServiceFolders
from busrl.service.model_folders import read_into
from busrl.service.models import Saved, read_state
from busrl.service.registry import saved
from busrl.service.whole import OF_WEIGHTS
from busrl.topology import Topology
from busrl.training.checkpoint import export
from busrl.training.model import load, named_weights

OF_STATE = "adapter."  # beginning of the adapter's names in a state


class SavedWeights(NamedTuple):
    """Saved weights: the rank of its adapter, 0 for all weights; the folder of its files, a state's or an engine's."""

    rank: int
    folder: Path
    is_state: bool

    def tensors(self, prefix: str) -> Mapping[str, Tensor]:
        """The tensors of a state whose names begin so, by the rest of their names; those of a snapshot as they are."""
        if not self.is_state:
            return Saved(self.folder / ADAPTER_WEIGHTS)
        _, state = read_state(self.folder)
        return {name.removeprefix(prefix): state[name] for name in state if name.startswith(prefix)}


def export_saved(run_dir: Path, topology: Topology, path: str, folder: Path, dtype: str, alone: bool) -> None:
    """Fill a folder. `alone`: with the adapter without its base. `dtype`: torch's name of a type; empty: that of the
    run's model. UserError: nothing is saved under that path, or no adapter."""
    found = find(ServiceFolders(run_dir), path)
    wanted: torch.dtype = getattr(torch, dtype or topology.model.dtype)
    if alone and not found.rank:
        raise UserError(f"--adapter: {path} has all weights of a model, and no adapter; leave --adapter out")
    if alone:
        write_peft(folder, found.tensors(OF_STATE), found.rank, wanted, topology.model.path)
        return
    model = load(topology.model.path, wanted)
    if found.rank:
        merge(model, found.tensors(OF_STATE), ALPHA / found.rank)
    else:
        replace(model, found)
    export(model, folder, Path(topology.model.path))


def find(where: ServiceFolders, path: str) -> SavedWeights:
    """Find what a client saved under a path."""
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
    source = where.snapshot(described["weights"]) if described["weights"] else folder
    return SavedWeights(int(described["adapter"]["rank"]), source, place[1] == "weights")


@torch.no_grad()
def replace(model: Any, found: SavedWeights) -> None:
    """Set all weights of a model in place. UserError: they are of another model."""
    weights = named_weights(model)
    if not found.is_state:
        read_into(found.folder, weights)
        return
    _, state = read_state(found.folder)
    for name, weight in weights.items():
        if state.shape(f"{OF_WEIGHTS}{name}") != list(weight.shape):
            raise UserError(f"the saved model has no {name} of the shape {list(weight.shape)}; was model.path of this "
                            "run changed?")
        weight.copy_(state[f"{OF_WEIGHTS}{name}"])


@torch.no_grad()
def merge(model: torch.nn.Module, tensors: Mapping[str, Tensor], scale: float) -> None:
    """Add an adapter to the weights of a model in place. UserError: it is of another model."""
    layers = dict(model.named_modules())
    for name in sorted({name.split(".lora_")[0] for name in tensors}):
        layer = layers.get(name.removeprefix(ADAPTER_PREFIX))
        down, up = (tensors[f"{name}.lora_{side}.weight"].float() for side in "AB")
        weight = getattr(layer, "weight", None)
        if weight is None or weight.shape != (up.shape[0], down.shape[1]):
            raise UserError(f"the adapter has {name}, and the model no such layer; was model.path of this run changed?")
        weight.copy_(torch.addmm(weight.float(), up, down, alpha=scale))
