"""What a trainer has to go on from: its weights and its optimiser, saved in shards and restored, whatever number of
ranks did the one and does the other.

Used by the learner and its ranks. Talks to the trainer, to `shard_files`, to `distributed` and, for a team, to the
other ranks' control streams; knows nothing of steps, plans or which checkpoint is the newest.

- What the optimiser holds is saved by the names of its parameters: their order may be another in the next run.
- Of a tensor that is spread each rank reads its own part, and the first rank that has a part writes it; all others are
  whole, written by rank 0.
- A checkpoint of another model or another optimiser is refused with both values before anything is changed.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from busrl.errors import DiskFull, RankFailed, WriteFailed
from busrl.training import distributed, optimizers
from busrl.training.checkpoint import WEIGHTS
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

OPTIMIZER = "optimizer"  # what the names of its tensors begin with

# -- saving ------------------------------------------------------------------------


def save(trainer: Trainer, folder: Path) -> Saving:
    """Begin to write this rank's share of a checkpoint; training may go on meanwhile."""
    if trainer.saving is not None:
        trainer.saving.leave()
    rank, world = distributed.place(trainer.parameters)
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
    rest, tensors = flattened(tree, OPTIMIZER)
    tensors |= {f"{WEIGHTS}{name}": tensor for name, tensor in trainer.kept_tensors().items()}
    parts = (distributed.part_of(name, tensor.detach(), rank) for name, tensor in tensors.items())
    return rest, [part for part in parts if part is not None]


class TeamSaving(Saving):
    """What all ranks write of a checkpoint. `streams`: those to the other ranks, in order, each with the newest answer
    to a Save as `saved`; `seq`: that of the question."""

    def __init__(self, own: Writing, streams: Sequence[Any], seq: int) -> None:
        super().__init__(own)
        self.streams, self.seq = streams, seq

    def ready(self) -> bool:
        """RankFailed if a rank says why it ends, RankLost if it is gone."""
        return not self._missing() and super().ready()

    def whose(self) -> str:
        missing = [stream.name for stream in self._missing()]
        return " and ".join(missing) or super().whose()

    def _missing(self) -> list[Any]:
        """The ranks that still write."""
        missing = []
        for stream in self.streams:
            if (stream.saved is None or stream.saved.seq < self.seq) and (words := stream.receive(0)) is not None:
                text = f"{stream.name} failed: {getattr(words, 'text', words)}"
                raise RankFailed(text, getattr(words, "uids", ()))
            if stream.saved is None or stream.saved.seq < self.seq:
                missing.append(stream)
        return missing

    def entries(self) -> dict[str, list[int]]:
        found = super().entries()
        for rank, stream in enumerate(self.streams, 1):
            saved = stream.saved
            assert saved is not None, "not ready"
            if saved.problem:
                raise (DiskFull if saved.full else WriteFailed)(f"{stream.name}: {saved.problem}")
            found[file_of(rank)] = saved.entry
        return found


# -- restoring ---------------------------------------------------------------------


@torch.no_grad()
def restore(trainer: Trainer, path: Path, optimizer: bool = True) -> list[str]:
    """Continue with the weights of the checkpoint in shards at `path`, and with its optimiser. Returns, as text, which
    settings of the optimiser differ from those of the checkpoint."""
    found = Shards(path)
    own = {name: tensor for name, tensor in trainer.kept_tensors().items() if tensor.numel()}  # no file has empty ones
    shapes = {name: found.shapes[f"{WEIGHTS}{name}"] for name in found.names(WEIGHTS)}
    require_same(shapes, own, str(path), "this run's")
    if optimizer:
        trainer.require_same(found.rest, str(path))
    for name, tensor in own.items():
        read = distributed.read_like(found, f"{WEIGHTS}{name}", tensor)
        distributed.local(tensor).copy_(distributed.local(read))
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
            return distributed.read_like(found, name, parameter if alike else None)

        return built(tree, one)

    eight = trainer.settings.optimizer == optimizers.ADAMW8 and distributed.place(trainer.parameters)[1] == 1
    pack = optimizers.packed if eight else dict  # that of a team packs by itself
    return {
        "state": {numbers[name]: pack(read(tree, trained[name])) for name, tree in found.rest["state"].items()},
        "param_groups": [
            {**group, "params": [numbers[name] for name in group["params"]]} for group in found.rest["param_groups"]
        ],
    }
