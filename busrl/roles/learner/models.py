"""The models of a learner: the one that is trained, what it is compared with, and their files.

Used by the training step and by publication. Talks to `busrl.training`, to the folders of models and to checkpoints;
knows nothing of advantages, the log or the ring.

- A checkpoint of other lora settings or of another base is refused before anything is loaded.
- A model that is only read (a reference, a teacher) is loaded once, however many read it.
- Over several ranks the team's trainer has reference and teacher.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from busrl.algorithms import catalog
from busrl.algorithms.losses import LossFunction
from busrl.errors import UserError
from busrl.system import device
from busrl.topology import Topology
from busrl.topology.kinds import ADAPTERS, ONE_COPY
from busrl.training import checkpoint
from busrl.training.checkpoint import Checkpoint, Pending
from busrl.training.custom import OwnLoss, reads
from busrl.training.forward import AUTO, Forward, choose_forward
from busrl.training.model import (
    Adapter,
    LoraSettings,
    copied_weights,
    load,
    named_weights,
    require_vocabulary,
    vocabulary,
)
from busrl.training.scorer import Reference, Teacher, teachers_of
from busrl.training.settings import TrainerSettings
from busrl.training.trainer import Hooks, Team, Trainer
from busrl.training.value_head import FOLDER as VALUE
from busrl.weights.tensors import fingerprint

ADAPTER = "adapter"  # folder of a checkpoint
Read = Callable[[Path, torch.dtype, torch.device, str], Any]  # as `load` of `busrl.training.model`


class Models:
    """The trainer of a learner and the models beside it. Loading a checkpoint may make another `trainer`."""

    def __init__(
        self, topology: Topology, team: Team | None, hooks: Hooks, root: Path = Path(), read: Read = load,
    ) -> None:
        """`team`: the other ranks, where the model is spread over several. `root`: the run directory. `read` gives the
        model of a folder."""
        self.config, self.team, self._hooks, self._read = topology.learner, team, hooks, read
        self._teachers = teachers_of(topology, root)
        self.source = Path(topology.model.path)
        self.device = device.choose(topology.device_of("learner"))
        self.settings = TrainerSettings.of(topology)
        self.lora = LoraSettings.of(topology)
        self.gives_adapters = topology.weights.transport in ADAPTERS
        self.shared = topology.weights.transport == ONE_COPY
        # An adapter is small, and its checkpoint a folder that peft loads.
        self.in_shards = not topology.lora.on and not topology.rank_hosts and (
            team is not None or self.config.checkpoint_mode == "async")
        self.changed: list[str] = []  # settings of the optimiser that are others than those of the checkpoint
        self.from_elsewhere = False  # it began with other weights than those of model.path
        self.referred = Path(topology.model.reference) if topology.model.reference else None
        self.teacher = Path(topology.model.teacher) if topology.model.teacher else None
        self._others: dict[Path, Forward] = {}  # models that are read and not trained
        self.trainer = self._trainer(self.source)
        self.token_rows = replace(self.settings.token_rows, rows=vocabulary(self.trainer.model))

    def follow(self, topology: Topology) -> None:
        """Go by these values from the next step on."""
        self.config = topology.learner

    # -- models -------------------------------------------------------------------------------------------------

    def _trainer(self, folder: Path) -> Trainer:
        """A trainer of the folder's model; with [lora] of an adapter on it, whose base is not trained and so has the
        number type of the model."""
        if self.team is not None:
            return self.team.trainer(folder, self.settings, self._hooks)
        dtype = torch.float32 if self.lora is None else getattr(torch, self.settings.compute_dtype)
        model = self._loaded(folder, dtype)
        device.keep_freed_memory(sum(parameter.numel() for parameter in model.parameters()))
        adapter = None if self.lora is None else Adapter(model, self.lora)
        return Trainer(
            model, self.settings, adapter=adapter, hooks=self._hooks, teach=self._teach,
            refer=lambda forward, loss: self._refer(forward, loss, adapter),
        )

    def _loaded(self, folder: Path, dtype: torch.dtype) -> Any:
        attention = "" if self.settings.attention == AUTO else self.settings.attention
        return self._read(folder, dtype, self.device, attention)

    def _refer(self, trained: Forward, loss: LossFunction, adapter: Adapter | None) -> Reference | None:
        """The function that gives log-probabilities under the reference: the base without its adapter, or a second
        model."""
        if self.config.kl == "none" and not reads(loss, "reference"):
            return None
        if adapter is not None and self.referred is None:
            return adapter.base_alone(trained.by_itself().score)
        forward = self._other(self.referred or self.source)
        require_vocabulary(self.referred or self.source, forward.model, trained.model)
        return lambda samples, flat: forward.score(samples, flat)[0]

    def _teach(self, trained: Forward, loss: LossFunction) -> Teacher | None:
        """The function that gives a teacher's most probable tokens, of those that the model has."""
        if not catalog.taught(self.config) and not reads(loss, "teacher"):
            return None
        if self._teachers is not None:
            words = vocabulary(trained.model)
            made: Teacher = self._teachers(self._other, trained, words, self._hooks.on_progress)
            return made
        if self.teacher is None:
            raise UserError(f'learner.loss = "{self.config.loss}": it needs a teacher; set model.teacher to its folder')
        forward, words = self._other(self.teacher), vocabulary(trained.model)
        return lambda samples, flat: forward.best(samples, flat, self.config.teacher_k, words)

    def _other(self, folder: Path) -> Forward:
        """The folder's model, only to be read, in the compute type."""
        if folder not in self._others:
            model = self._loaded(folder, getattr(torch, self.settings.compute_dtype)).requires_grad_(False)
            self._others[folder] = way = choose_forward(model, attention=self.settings.attention)
            way.leave_out_all_but(self.settings.token_rows)
        return self._others[folder]

    def loss_may_read(self, name: str) -> bool:
        """True if the loss reads that input; a loss that does not name its inputs may read each."""
        loss = self.trainer.loss
        return not isinstance(loss, OwnLoss) or loss.uses is None or loss.reads(name)

    @property
    def streamable(self) -> bool:
        """True if the loss, if it is the user's own, may be computed on parts of a step."""
        loss = self.trainer.loss
        return not isinstance(loss, OwnLoss) or loss.streamable

    # -- publication --------------------------------------------------------------------------------------------

    def weights(self) -> Mapping[str, Tensor]:
        """Tensors to publish: the weights, or the adapter alone; valid until the next step. Where the engine shares the
        weights, they are the trained tensors themselves."""
        if self.shared:
            return named_weights(self.trainer.model)
        if self.trainer.adapter is not None and self.gives_adapters:
            return self.trainer.adapter_weights()
        return self.trainer.named_weights()

    def adopt(self, views: Mapping[str, Tensor]) -> None:
        """Train these tensors, which hold the present weights, in the place of the model's own."""
        for name, parameter in self.trainer.model.named_parameters():
            parameter.data = views[name]
        device.empty_cache(self.device)

    def write(self, folder: Path, tensors: Mapping[str, Tensor]) -> None:
        """Write the tensors of `weights` as the files of a published folder: an adapter, or a model with its
        tokenizer."""
        if self.trainer.adapter is not None and self.gives_adapters:
            self.trainer.adapter.write(folder, tensors)
        else:
            checkpoint.export(self.trainer.model, folder, self.source, tensors)

    # -- checkpoints --------------------------------------------------------------------------------------------

    def load_checkpoint(self, root: Path, torn: dict[Path, str] | None = None) -> Checkpoint | None:
        """Continue from the newest whole one under `root`; None if there is none. `torn` gets the damaged ones."""
        newest = checkpoint.latest(root, torn)
        if newest is not None:
            self._load(newest)
            newest.restore_random(self.device)
        return newest

    def start_from(self, path: Path, optimizer: bool) -> None:
        """Begin with the weights of a checkpoint of another run, and with its optimiser if asked for. UserError if it
        is damaged, or of another model or optimiser."""
        if fault := checkpoint.fault_of(path):
            raise UserError(
                f"learner.start_from = {path}: it is no whole checkpoint ({fault}); name another one, or copy one of a "
                "running run before that run removes it (learner.keep_last)"
            )
        self._load(Checkpoint(path, 0, json.loads((path / checkpoint.META).read_text())), optimizer)
        self.from_elsewhere = True

    def _load(self, saved: Checkpoint, optimizer: bool = True) -> None:
        self._load_model(saved)
        self.changed = self.trainer.restore(saved, optimizer)
        if not self._load_value_head(saved.path / VALUE, optimizer):
            self.changed.append(f'learner.advantage = "{catalog.GAE}" (before: no value head; it begins at 0)')

    def _load_value_head(self, folder: Path, optimizer: bool) -> bool:
        """False where there is a head, and the checkpoint has none."""
        if (head := self.trainer.value_head) is None:
            return True
        if folder.is_dir():
            head.load(folder, optimizer)
        return folder.is_dir()

    def _load_model(self, saved: Checkpoint) -> None:
        """The weights of a checkpoint: with [lora] those of the base, and its adapter. Those in shards come with the
        optimiser."""
        before, now = saved.meta.get("lora"), self._lora_meta()
        if before != now:
            raise UserError(
                f"{saved.path} was trained with lora {before}, the topology and model.path give {now}; continue with "
                f"those settings, or start a new run with model.path = the folder that `busrl export` makes of it"
            )
        if self.trainer.adapter is not None:
            self.trainer.load_adapter(saved.path / ADAPTER)
        elif not saved.sharded:
            self.trainer = self._trainer(saved.model)

    def _lora_meta(self) -> dict[str, Any] | None:
        return None if self.lora is None else {**self.lora.described(), "base": fingerprint(self.source)}

    def begin_checkpoint(
        self, root: Path, step: int, meta: Mapping[str, Any], extras: Callable[[Path], None]
    ) -> Pending | None:
        """Begin to write a checkpoint in shards; or write a whole one with the model as a folder, and return None."""
        more: dict[str, Any] = {"dtype": self.settings.compute_dtype, "optimizer": self.config.optimizer}
        if self.lora is not None:
            more["lora"] = self._lora_meta()

        def files(directory: Path) -> None:
            if self.trainer.adapter is not None:
                self.trainer.adapter.write(directory / ADAPTER, dict(self.trainer.adapter_weights()))
            if self.trainer.value_head is not None:
                self.trainer.value_head.write(directory / VALUE)
            extras(directory)

        both: dict[str, Any] = {
            "meta": {**meta, **more}, "source": self.source, "extras": files, "keep_last": self.config.keep_last,
            "on_progress": self._hooks.on_progress, "where": self.device,
        }
        if self.in_shards:
            return Pending(root, step, trainer=self.trainer, **both)
        checkpoint.save(
            root, step, model=self.trainer.model, optimizer_state=self.trainer.optimizer_state(),
            weights=self._folder_weights(), **both,
        )
        return None

    def _folder_weights(self) -> Mapping[str, Tensor] | None:
        """Weights of a checkpoint's model, in the number type that is published: a copy of shared weights, or base and
        adapter as one. None: the trained tensors as they are."""
        adapted = self.trainer.adapter is not None
        if self.shared and not adapted:
            return copied_weights(self.trainer.model)
        alone = self.team is None and not adapted
        return None if alone and self.settings.few_bits is None else self.trainer.named_weights()
