"""Parts of a rank of a learner: the settings of the team, and the trainer of a model that is spread over it.

Used by `leader` and `follower`. Talks to the folder of the model through `loading`, and to the process group through
`mesh`; knows nothing of messages or processes.

- No rank ever holds the whole model: it is made without memory, cut, and then each rank reads its own rows.
- The way in which the model computes is proved on its first layers before the rest is read.
- The reference of a KL term is the base without its adapter, or a second model that is spread the same way.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from busrl.algorithms import catalog
from busrl.algorithms.losses import LossFunction
from busrl.errors import UserError
from busrl.paths import RunPaths
from busrl.ranks import mesh
from busrl.ranks.loading import WeightFiles, fill, first_layers, standing_in
from busrl.ranks.mesh import Layout, Meshes, ShardedForward
from busrl.system import device
from busrl.training.custom import reads
from busrl.training.forward import (
    AUTO,
    Forward,
    checkpoint_layers,
    compile_layers,
    compute_again,
    prove_replay,
    replay_routes,
)
from busrl.training.model import Adapter, LoraSettings, load_empty, require_vocabulary, train_only, vocabulary
from busrl.training.scorer import Reference, Teacher, teachers_of
from busrl.training.settings import TrainerSettings
from busrl.training.trainer import QUIET, Hooks, Trainer, computes_again, way_of

# -- settings -------------------------------------------------------------------------


@dataclass(frozen=True)
class TeamSettings:
    """`ranks` ranks that meet at the socket `file`, those of other `hosts` at a port of `address`. `facts`: must be the
    same on all ranks. `root`: home's run directory, whose files no other host has."""

    ranks: int
    file: Path
    facts: Mapping[str, str]
    device: torch.device
    reshard: bool = True
    layout: Layout | None = None  # None: one axis
    offload: bool = False  # parts, gradients and optimiser are in the host's memory
    start_s: float = 300.0
    collective_s: float = 120.0
    lora: LoraSettings | None = None
    refers: bool = False  # to a reference, for a KL term; a loss of the user's may read one all the same
    reference: Path | None = None  # its folder; None: the model as the run began with it
    taught: bool = False  # by a teacher; as with `refers`
    teacher: Path | None = None  # its folder
    teacher_k: int = 0  # its most probable tokens that are read
    teachers: Callable[..., Teacher] | None = None  # makes several, or others
    hosts: tuple[str, ...] = ()
    address: str = ""
    note: Path = Path()  # the file with the port at which rank 0 listens there
    root: Path = Path()
    hosts_s: float = 0.0  # that ranks of other hosts may need to come

    @classmethod
    def of(
        cls, topology: Any, paths: RunPaths, device: torch.device, fingerprint: Callable[[Path], str]
    ) -> TeamSettings:
        """From a topology's [[process]] and [learner.parallel]. `fingerprint`: a digest of a model's files; another
        host may have another model under the same path."""
        parallel, learner, model = topology.learner.parallel, topology.learner, topology.model
        lora = LoraSettings.of(topology)
        # Not all of the topology: a host has one of its own, and some of it changes in flight.
        shared = facts(repr((TrainerSettings.of(topology), parallel, model, lora, learner.kl, learner.teacher_k,
                             learner.teacher, learner.teacher_top)))
        if topology.rank_hosts:
            shared["model.path"] = f"{model.path} ({fingerprint(Path(model.path))[:12]})"
        return cls(
            topology.ranks, paths.ranks, shared, device, parallel.reshard,
            Layout(topology.ranks, parallel.replicate, parallel.tensor, parallel.expert), parallel.offload == "all",
            topology.limits.start_most_s, parallel.collective_timeout_s, lora, learner.kl != "none",
            Path(model.reference) if model.reference else None, catalog.taught(learner),
            Path(model.teacher) if model.teacher else None, learner.teacher_k, teachers_of(topology, paths.root),
            topology.rank_hosts,
            _address(topology.bus.endpoint) if topology.rank_hosts else "", paths.rank_place, paths.root,
            parallel.host_timeout_s,
        )

    @property
    def waits_s(self) -> float:
        """The seconds that a connected rank may have to wait for others."""
        return max(self.start_s, self.hosts_s if self.hosts else 0.0)

    def host_of(self, rank: int) -> str:
        """The host of a rank; empty: at home."""
        return ("", *self.hosts)[rank * (1 + len(self.hosts)) // self.ranks]

    @property
    def axes(self) -> Layout:
        return self.layout or Layout(self.ranks)


def _address(endpoint: str) -> str:
    """Address of the bus, as other hosts see it; the topology's rules allow no other."""
    host = endpoint.removeprefix("tcp://").rpartition(":")[0]
    return mesh.HOST if host == "localhost" else host


def facts(settings: str) -> dict[str, str]:
    """Facts that have to be the same on all ranks, besides the model."""
    import transformers

    import busrl

    return {
        "topology": hashlib.sha256(settings.encode()).hexdigest()[:16], "busrl": busrl.__version__,
        "torch": str(torch.__version__), "transformers": transformers.__version__,
    }


def digest(trainer: Trainer) -> str:
    """Digest of names, shapes and number types of the parameters, and of how they compute."""
    parameters = trainer.model.named_parameters()
    described = [f"{name} {tuple(parameter.shape)} {parameter.dtype}" for name, parameter in parameters]
    text = "\n".join([trainer.forward.name, *described])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


# -- the trainer of a rank ---------------------------------------------------------------


@dataclass
class TrainerBuilder:
    settings: TrainerSettings
    team: TeamSettings
    meshes: Meshes
    read: int = 0  # bytes of files, so far
    largest: int = 0  # of them at once
    _first: Path | None = None  # folder of the first model
    _others: dict[Path, ShardedForward] = field(default_factory=dict)  # models that are read and not trained

    def trainer(self, folder: Path, make: Callable[..., Trainer], hooks: Hooks = QUIET) -> Trainer:
        """Makes a trainer by `make` of the folder's model, spread over the ranks; with [lora] of an adapter on it."""
        self._first = self._first or folder
        model, way, adapter = self._spread(folder, self.team.lora)
        forward = self._sharded(way)
        if self.settings.compile:  # every rank compiles, and tries it with the others
            compile_layers(forward)
        prove_replay(forward)  # as do all ranks: it is a forward
        return make(
            model, self.settings, forward=forward, adapter=adapter, copies=self.meshes.layout.tensor, hooks=hooks,
            refer=lambda _, loss: self.reference(forward, loss, adapter, model),
            teach=lambda _, loss: self.teacher(forward, loss, model, hooks),
        )

    def _sharded(self, way: Forward) -> ShardedForward:
        return ShardedForward(way, self.team.device if self.team.offload else None)

    def _spread(self, folder: Path, lora: LoraSettings | None, frozen: bool = False) -> tuple[Any, Any, Adapter | None]:
        """The folder's model in parts, how it computes, its adapter. No rank ever holds all of it."""
        settings, attention = self.settings, "" if self.settings.attention == AUTO else self.settings.attention
        fixed = lora is not None or frozen  # what is not trained has no bits that no forward sees
        model = load_empty(folder, (settings.few_bits if fixed else None) or torch.float32, attention)
        proof = way_of(first_layers(folder, attention), settings)
        if not frozen and computes_again(settings, model, self.team.device.type):
            checkpoint_layers(proof)
            compute_again(model)
        way = proof.on(model)
        del proof
        files, adapter = WeightFiles(folder, model), None
        if lora is not None:
            with standing_in(model):
                adapter = Adapter(model, lora)
        if frozen:
            model.requires_grad_(False)
        elif lora is None:
            train_only(model, settings.train_layers)
        device.keep_freed_memory(sum(parameter.numel() for parameter in model.parameters()))
        mesh.shard(model, self.meshes, settings.few_bits, self.team.reshard, self.team.offload)
        host = torch.device("cpu") if self.team.offload else self.team.device
        fill(model, files, host, self.team.device)
        if not frozen:
            replay_routes(way, settings.routing, settings.balance)
        self.read, self.largest = self.read + files.read, max(self.largest, files.largest)
        return model, way, adapter

    def reference(self, forward: Forward, loss: LossFunction, adapter: Adapter | None, model: Any) -> Reference | None:
        """The function that gives log-probabilities under the reference: the base without its adapter, or a second
        model."""
        if not self.team.refers and not reads(loss, "reference"):
            return None
        if adapter is not None and self.team.reference is None:
            return adapter.base_alone(forward.by_itself().score)
        folder = self.team.reference or self._first
        assert folder is not None
        second = self._other(folder)
        require_vocabulary(folder, second.model, model)
        return lambda samples, flat: second.score(samples, flat)[0]

    def teacher(self, trained: Forward, loss: LossFunction, model: Any, hooks: Hooks) -> Teacher | None:
        """The function that gives a teacher's most probable tokens, of those that the model has."""
        if not self.team.taught and not reads(loss, "teacher"):
            return None
        if self.team.teachers is not None:
            return self.team.teachers(self._other, trained, vocabulary(model), hooks.on_progress, together=True)
        if self.team.teacher is None:
            rule = "it needs a teacher; set model.teacher to its folder"
            raise UserError(f'learner.loss = "{self.settings.loss}": {rule}')
        second, words, count = self._other(self.team.teacher), vocabulary(model), self.team.teacher_k
        return lambda samples, flat: second.best(samples, flat, count, words)

    def _other(self, folder: Path) -> ShardedForward:
        if folder not in self._others:
            _, way, _ = self._spread(folder, None, frozen=True)
            self._others[folder] = self._sharded(way)
            self._others[folder].leave_out_all_but(self.settings.token_rows)
        return self._others[folder]
