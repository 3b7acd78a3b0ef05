"""What a trainer has to go on from: its weights and its optimiser, saved in shards and restored, whatever number of
ranks did the one and does the other.

Used by the learner and its ranks. Talks to the trainer, to `shard_files` and to `sharded`; knows nothing
of steps, plans, the other ranks' streams or which checkpoint is the newest.

- What the optimiser holds is saved by the names of its parameters: their order may be another in the next run.
- Of a tensor that is spread each rank reads its own part, and the first rank that has a part writes it; all others are
  whole, written by rank 0.
- A checkpoint of another model or another optimiser is refused with both values before anything is changed.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from busrl.training import optimizers, sharded
from busrl.training.checkpoint import WEIGHT_PREFIX
from busrl.training.shard_files import (
    FOLDER,
    REST,
    Part,
    Saving,
    Shards,
    Writing,
    built,
    file_of,
    flattened,
    require_same,
)

if TYPE_CHECKING:
    from busrl.training.trainer import Trainer

OPTIMIZER_PREFIX = "optimizer"  # what the names of its tensors begin with

# -- saving ------------------------------------------------------------------------


def save(trainer: Trainer, folder: Path) -> Saving:
    """Begin to write this rank's share of a checkpoint; training may go on meanwhile."""
    if trainer.saving is not None:
        trainer.saving.leave()
    rank, world = sharded.rank_and_world(trainer.parameters)
    rest, parts = _shares(trainer, rank)
    (folder / FOLDER).mkdir(exist_ok=True)
    if rank == 0:
        (folder / FOLDER / REST).write_text(json.dumps(rest))
    trainer.saving = Writing(folder / file_of(rank), parts, world)
    return Saving(trainer.saving, rank)


def _shares(trainer: Trainer, rank: int) -> tuple[Any, list[Part]]:
    """What is no tensor, and this rank's share of what is."""
    state, names = trainer.optimizer.state_dict(), trainer.numbered()
    unpack = optimizers.unpacked if trainer.settings.optimizer == optimizers.ADAMW8 else dict  # blocks are of a part
    tree = {
        "state": {names[number]: unpack(own) for number, own in state["state"].items()},
        "param_groups": [{**group, "params": [names[i] for i in group["params"]]} for group in state["param_groups"]],
        optimizers.KIND: trainer.settings.optimizer, optimizers.TRAINED: trainer.settings.train_layers,
    }
    rest, tensors = flattened(tree, OPTIMIZER_PREFIX)
    tensors |= {f"{WEIGHT_PREFIX}{name}": tensor for name, tensor in trainer.kept_tensors().items()}
    parts = (_written_part(name, tensor.detach(), rank) for name, tensor in tensors.items())
    return rest, [part for part in parts if part is not None]


def _written_part(name: str, tensor: Tensor, rank: int) -> Part | None:
    """What this rank has to write of a tensor: its part, if no lower rank has the same one; all of one that is not
    spread, on rank 0 alone."""
    if not hasattr(tensor, "device_mesh"):
        return None if rank else Part(name, tensor, (0,) * tensor.ndim, tuple(tensor.shape))
    if not _first_to_have(tensor):
        return None
    return Part(name, sharded.local(tensor), sharded.box(tensor), tuple(tensor.shape))


def _first_to_have(tensor: Any) -> bool:
    mesh, where = tensor.device_mesh, tensor.device_mesh.get_coordinate()
    copies = (at for at, cut in zip(where, tensor.placements, strict=True) if cut.is_replicate())
    return bool((mesh.mesh == 0).any()) and not any(copies)


# -- restoring ---------------------------------------------------------------------


@torch.no_grad()
def restore(trainer: Trainer, path: Path, optimizer: bool = True) -> list[str]:
    """Continue with the weights of the checkpoint in shards at `path`, and with its optimiser. Returns, as text, which
    settings of the optimiser differ from those of the checkpoint."""
    found = Shards(path)
    own = {name: tensor for name, tensor in trainer.kept_tensors().items() if tensor.numel()}  # no file has empty ones
    shapes = {name: found.shapes[f"{WEIGHT_PREFIX}{name}"] for name in found.names(WEIGHT_PREFIX)}
    require_same(shapes, own, str(path), "this run's")
    if optimizer:
        trainer.require_same(found.rest, str(path))
    for name, tensor in own.items():
        read = _read_like(found, f"{WEIGHT_PREFIX}{name}", tensor)
        sharded.local(tensor).copy_(sharded.local(read))
        trainer.on_progress()
    changed = trainer.take(_state(trainer, found)) if optimizer else []
    trainer.reset()
    return changed


def _state(trainer: Trainer, found: Shards) -> dict[str, Any]:
    """The optimiser's state as torch has it, this rank's share of each tensor."""
    names, trained = trainer.numbered(), trainer.trained_tensors()
    numbers = {name: number for number, name in enumerate(names)}

    def read(tree: Any, parameter: Tensor) -> Any:
        def one(name: str) -> Tensor:
            alike = found.shapes[name] == tuple(parameter.shape)
            return _read_like(found, name, parameter if alike else None)

        return built(tree, one)

    eight = trainer.settings.optimizer == optimizers.ADAMW8 and sharded.rank_and_world(trainer.parameters)[1] == 1
    pack = optimizers.packed if eight else dict  # that of a team packs by itself
    return {
        "state": {numbers[name]: pack(read(tree, trained[name])) for name, tree in found.rest["state"].items()},
        "param_groups": [
            {**group, "params": [numbers[name] for name in group["params"]]} for group in found.rest["param_groups"]
        ],
    }


def _read_like(found: Shards, name: str, pattern: Any) -> Tensor:
    """This rank's part of a tensor of a checkpoint, spread as `pattern` is; whole where that is not spread."""
    if not hasattr(pattern, "device_mesh"):
        return found.whole(name)
    own = sharded.local(pattern)
    part = found.part(name, sharded.within(pattern)) if own.numel() else torch.empty_like(own)
    return sharded.spread_of(part, pattern)
