"""State of a trainer that a checkpoint holds: the trained tensors and the optimiser's state, in one file or in shards.

Made by the trainer, used by checkpoints and by the ranks of a learner. Talks to the optimiser and to files of shards;
knows nothing of losses, samples or steps.

- The settings of the optimiser stay those of this run: what differs in a checkpoint is returned as text.
- A checkpoint of another model or of another optimiser is refused before anything is changed.
- In shards tensors go by their names: parameters may have another order in the next run.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from busrl.training import optimizers, shard_files, sharded
from busrl.training.checkpoint import WEIGHT_PREFIX, Checkpoint, buffers
from busrl.training.model import Masters
from busrl.training.settings import TrainerSettings
from busrl.training.shard_files import Part, Saving, Shards, Writing

MASTER = "master"
OPTIMIZER_PREFIX = "optimizer"  # what the names of its tensors in shards begin with


class TrainerState:
    """The tensors and the optimiser of one trainer. Whoever loads a state has to give up the gradient under way."""

    def __init__(
        self, model: Any, masters: Masters | None, settings: TrainerSettings, on_progress: Callable[[], None]
    ) -> None:
        """`masters`: what is trained where the model computes in fewer bits; None where its parameters are."""
        self.model, self.settings, self._masters, self._on_progress = model, settings, masters, on_progress
        self.parameters = list(self.trained_tensors().values())
        adam = {key: getattr(settings, key) for key in optimizers.ADAM_KEYS}
        self.optimizer = optimizers.make(settings.optimizer, self.parameters, adam, settings.options, settings.base_dir)
        self.saving: Writing | None = None  # of these tensors, by a thread

    def trained_tensors(self) -> dict[str, Tensor]:
        """Tensors that the optimiser changes, by name."""
        if self._masters is not None:
            return self._masters.named
        return {name: parameter for name, parameter in self.model.named_parameters() if parameter.requires_grad}

    def kept_tensors(self) -> dict[str, Tensor]:
        """Tensors that a checkpoint in shards holds of the model: what is trained, the rest of it, and its buffers."""
        return {**buffers(self.model), **dict(self.model.named_parameters()), **self.trained_tensors()}

    def update(self, lr: float) -> None:
        """Change the trained tensors by their gradients, once a file that is being written has its copy of them."""
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        if self.saving is not None:
            self.saving.stage()
        self.optimizer.step()
        self.round()

    def round(self) -> None:
        """Let the model compute with what is trained, rounded to its number type."""
        if self._masters is not None:
            self._masters.round()

    # -- in one file ----------------------------------------------------------------------------------------------

    def saved(self) -> dict[str, Any]:
        """Tensors, numbers and lists only. `master`: what is trained, where the model's folder has it rounded."""
        masters = {MASTER: self.trained_tensors()} if self.settings.few_bits is not None else {}
        kinds = {optimizers.KIND: self.settings.optimizer, optimizers.TRAINED: self.settings.train_layers}
        return {**self.optimizer.state_dict(), **kinds, **masters}

    def gathered(self, keep: bool) -> dict[str, Any]:
        """The state of `saved`, whole and on the host, of a trainer whose parameters are spread: a collective
        per tensor. Without `keep` this rank only takes part, and gets nothing."""
        state = self.saved()
        for name in ("state", MASTER):
            if name in state:
                state[name] = _whole(state[name], keep)
        self._on_progress()
        return state if keep else {}

    @torch.no_grad()
    def load(self, state: dict[str, Any]) -> list[str]:
        """Continue from what `saved` gave; weights are loaded from the checkpoint's model folder. The settings stay
        those of this trainer: returns, as text, which of them differ from those of `state`."""
        changed = self._take({"state": self._spread(state["state"]), "param_groups": state["param_groups"]})
        for name, parameter in self.trained_tensors().items():
            if MASTER in state:
                parameter.copy_(sharded.spread_like(state[MASTER][name], parameter))
        self.round()
        return changed

    def _take(self, state: dict[str, Any]) -> list[str]:
        """Load a state whose tensors are spread as the parameters are; the settings stay those of this trainer."""
        names = optimizers.settings_of(self.settings.optimizer, self.settings.options)
        return optimizers.keep_settings(self.optimizer, names, lambda: self.optimizer.load_state_dict(state))

    def _spread(self, states: Mapping[int, Any]) -> dict[int, Any]:
        """This rank's part of the states of an optimiser, by the numbers of its parameters."""
        order = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
        return {
            number: {
                key: sharded.spread_like(value, order[number])
                if isinstance(value, Tensor) and value.shape == order[number].shape else value
                for key, value in self._as_kept(state).items()
            }
            for number, state in states.items()
        }

    def _as_kept(self, state: dict[str, Any]) -> dict[str, Any]:
        """A parameter's state as the optimiser takes it: in 8 bits, but for one of parts, which packs by itself."""
        if sharded.any_spread(self.parameters):
            return optimizers.unpacked(state)
        return optimizers.packed(state) if self.settings.optimizer == optimizers.ADAMW8 else state

    def restore(self, checkpoint: Checkpoint, optimizer: bool = True) -> list[str]:
        """Continue with the optimiser of a checkpoint whose model was loaded, and with the weights where they are in
        shards; returns what `load` returns. UserError if it is of another model or optimiser than this one."""
        if checkpoint.sharded:
            return self._restore_shards(checkpoint.path, optimizer)
        if not optimizer:
            return []
        state = checkpoint.optimizer_state()
        self._require_same(state, str(checkpoint.path))
        return self.load(state)

    def _require_same(self, state: Mapping[str, Any], folder: str) -> None:
        """UserError if the state of a checkpoint is of another optimiser, or of other parameters, than this one's."""
        optimizers.require_same(state, self.settings.optimizer, folder)
        names = [name for name, _ in self.model.named_parameters()]
        optimizers.require_same_layers(state, self.settings.train_layers, names, folder)

    # -- in shards ------------------------------------------------------------------------------------------------

    def save(self, folder: Path) -> Saving:
        """Begin to write this rank's share of a checkpoint; training may go on meanwhile. Of a tensor that is spread
        the first rank that has a part writes it; all others are whole, written by rank 0."""
        if self.saving is not None:
            self.saving.leave()
        rank, world = sharded.rank_and_world(self.parameters)
        rest, tensors = shard_files.flattened(self._by_name(), OPTIMIZER_PREFIX)
        tensors |= {f"{WEIGHT_PREFIX}{name}": tensor for name, tensor in self.kept_tensors().items()}
        parts = [
            Part(name, sharded.local(tensor.detach()), sharded.begin(tensor), tuple(tensor.shape))
            for name, tensor in tensors.items() if sharded.first_to_have(tensor, rank)
        ]
        (folder / shard_files.FOLDER).mkdir(exist_ok=True)
        if rank == 0:
            (folder / shard_files.FOLDER / shard_files.REST).write_text(json.dumps(rest))
        self.saving = Writing(folder / shard_files.file_of(rank), parts, world)
        return Saving(self.saving, rank)

    def _numbered(self) -> list[str]:
        """The names of the parameters in the order in which the optimiser counts them."""
        names = {id(tensor): name for name, tensor in self.trained_tensors().items()}
        return [names[id(parameter)] for group in self.optimizer.param_groups for parameter in group["params"]]

    def _by_name(self) -> dict[str, Any]:
        """The optimiser's state by the names of its parameters."""
        state, names = self.optimizer.state_dict(), self._numbered()
        return {  # blocks of 8 bits are of a part
            "state": {names[number]: optimizers.unpacked(values) for number, values in state["state"].items()},
            "param_groups": [
                {**group, "params": [names[i] for i in group["params"]]} for group in state["param_groups"]
            ],
            optimizers.KIND: self.settings.optimizer, optimizers.TRAINED: self.settings.train_layers,
        }

    @torch.no_grad()
    def _restore_shards(self, path: Path, optimizer: bool) -> list[str]:
        """Refuses a checkpoint of another model or another optimiser, with both values before anything is changed."""
        shards = Shards(path)
        # No file has empty ones.
        tensors = {name: tensor for name, tensor in self.kept_tensors().items() if tensor.numel()}
        shapes = {name: shards.shapes[f"{WEIGHT_PREFIX}{name}"] for name in shards.names(WEIGHT_PREFIX)}
        shard_files.require_same(shapes, tensors, str(path), "this run's")
        if optimizer:
            self._require_same(shards.rest, str(path))
        for name, tensor in tensors.items():
            sharded.local(tensor).copy_(sharded.local(_read_like(shards, f"{WEIGHT_PREFIX}{name}", tensor)))
            self._on_progress()
        changed = self._take(self._of_shards(shards)) if optimizer else []
        self.round()
        return changed

    def _of_shards(self, shards: Shards) -> dict[str, Any]:
        """The optimiser's state as torch has it, this rank's share of each tensor."""
        numbers, trained = {name: number for number, name in enumerate(self._numbered())}, self.trained_tensors()

        def read(tree: Any, parameter: Tensor) -> Any:
            return shard_files.built(tree, lambda name: _read_like(
                shards, name, parameter if shards.shapes[name] == tuple(parameter.shape) else None))

        return {
            "state": {
                numbers[name]: self._as_kept(read(tree, trained[name])) for name, tree in shards.rest["state"].items()
            },
            "param_groups": [
                {**group, "params": [numbers[name] for name in group["params"]]}
                for group in shards.rest["param_groups"]
            ],
        }


def _read_like(shards: Shards, name: str, pattern: Any) -> Tensor:
    """This rank's part of a tensor of a checkpoint, spread as `pattern` is; whole where that is not spread."""
    if not hasattr(pattern, "device_mesh"):
        return shards.whole(name)
    local = sharded.local(pattern)
    part = shards.part(name, sharded.within(pattern)) if local.numel() else torch.empty_like(local)
    return sharded.spread_of(part, pattern)


def _whole(tree: Any, keep: bool) -> Any:
    """Dicts of tensors with each tensor whole and on the host, in an order that is the same on all ranks."""
    if isinstance(tree, dict):
        return {name: _whole(tree[name], keep) for name in sorted(tree)}
    if not isinstance(tree, Tensor):
        return tree
    gathered = sharded.whole(tree)
    return gathered.cpu() if keep else None
