"""The machine's side of a run: cores, shared memory, disk, and how much of it published weights take.

The weight transports keep as many versions as are counted here.

- A process whose entry names cores runs on those. All others share the cores that no entry names, or all if none is
  left. Where no entry names any, no process is bound.
"""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from busrl.algorithms import trained_parameters
from busrl.data import pretrained
from busrl.data.vocabulary import language_of
from busrl.errors import DiskFull, UserError
from busrl.preflight import unfit_models
from busrl.preflight.host_rules import parse_cores
from busrl.topology.kinds import ADAPTERS, FOLDERS
from busrl.topology.schema import Process, Topology
from busrl.topology.sizes import held_versions, kept_versions, rollouts, vllm_entries

# -- memory and cores -----

SHM = "/dev/shm"


def shm_free() -> int:
    """Free bytes of /dev/shm, 0 where there is none."""
    try:
        return shutil.disk_usage(SHM).free
    except OSError:
        return 0


def cores() -> frozenset[int]:
    return frozenset(os.sched_getaffinity(0))


def cores_of(t: Topology, entry: Process, here: frozenset[int]) -> frozenset[int]:
    """The cores, of those `here`, that processes of this entry run on; empty: they are not bound."""
    if entry.cpus:
        return parse_cores(entry.cpus)
    bound = [parse_cores(other.cpus) for other in t.every_entry if other.cpus]
    return here.difference(*bound) if bound else frozenset()


def require_cores(t: Topology, here: frozenset[int]) -> None:
    for index, entry in enumerate(t.every_entry):
        if entry.cpus and (missing := sorted(parse_cores(entry.cpus) - here)):
            raise UserError(
                f'process.{index}.cpus = "{entry.cpus}": core {missing[0]} is not there, or not for this process, '
                f"which may use {sorted(here)}; name others, or remove cpus"
            )


PLANS = {"tensor": "base_model_tp_plan", "expert": "base_model_ep_plan"}  # of transformers, by axis


def require_axes(t: Topology) -> None:
    """Raise UserError if the model's heads or experts cannot be divided as [learner.parallel] wants."""
    parallel, folder = t.learner.parallel, pretrained.model_at(t.model.path)
    config = pretrained.read_config(folder) if folder and t.ranks > 1 else {}
    text = language_of(config)
    experts = pretrained.size_in(text, "num_experts", "num_local_experts", "n_routed_experts")
    for key, over, what, count in (
        ("tensor", parallel.tensor, "num_attention_heads", pretrained.size_in(text, "num_attention_heads")),
        ("tensor", parallel.tensor, "num_key_value_heads", pretrained.size_in(text, "num_key_value_heads")),
        ("expert", parallel.expert, "num_experts", experts),
    ):
        if text and over > 1 and (count % over or (key == "expert" and not count)):
            remedy = f"set a divisor of {count}" if count else "set 1"
            raise UserError(f"learner.parallel.{key} = {over}: the model at {t.model.path} has {what} = {count}, which "
                            f"cannot be dealt out evenly over {over} ranks; {remedy}")
    kind = str(config.get("model_type", ""))
    for key, over in (("tensor", parallel.tensor), ("expert", parallel.expert)):
        if kind and over > 1 and unfit_models.has_plan(kind, PLANS[key]) is False:
            raise UserError(f"learner.parallel.{key} = {over}: transformers has no plan ({PLANS[key]}) for a model of "
                            f"model_type {kind!r}; set 1")


# -- published versions -----

ADAPTER_BYTES = 4  # an adapter is float32 whatever the model is
SMALL_FILES = 16 << 10  # configuration and stamp of an adapter


@dataclass(frozen=True)
class Cost:
    """Folders of versions: bytes of one, how many the learner keeps, and how many there may be at the same time."""

    version: int
    kept: int
    most: int

    @property
    def total(self) -> int:
        return self.version * self.most


def weight_cost(t: Topology, model: Path | None) -> Cost | None:
    """The disk or memory that published folders take; None for a transport that publishes none."""
    if t.weights.transport not in FOLDERS:
        return None
    shapes = pretrained.tensor_shapes(model) if model is not None else {}
    if t.weights.transport in ADAPTERS:
        chosen = trained_parameters.chosen(t.lora.layers, shapes)[0]
        parts = pretrained.adapted({name: shapes[name] for name in shapes if name in chosen}, t.lora.targets)
        size = sum(ADAPTER_BYTES * t.lora.rank * (rows + columns) for rows, columns in parts) if parts else 0
        size += SMALL_FILES if size else 0
    else:
        size = pretrained.count_of(shapes) * pretrained.BYTES_OF[t.model.dtype]
    kept, engines = kept_versions(t), sum(entry.count for _, entry in rollouts(t))
    return Cost(size, kept, kept + 1 + engines * held_versions(t))


def broadcast_copies(t: Topology) -> list[tuple[str, float]]:
    """Copies of all values in a broadcast, by who holds them: the learner the version that it sends and the
    one that comes next (and frames of changes), an engine the version that it has and the one that arrives."""
    sparse = t.weights.sparse.enabled
    copies = [("learner, two blocks" + (" and frames of changes" if sparse else ""), t.weights.copies)]
    if any(entry.engine != "vllm" for _, entry in rollouts(t)):
        copies.append(("each engine, front and back", 2.0))
    if vllm_entries(t):
        copies.append(("each worker of vLLM, front, back and staging", 3.0))
    return copies


def require_disk(t: Topology, model: Path | None, run_dir: Path) -> None:
    """Raise DiskFull, with the sum, if the versions of checkpoint_restart do not fit beside the run directory."""
    cost = weight_cost(t, model)
    if cost is None or t.weights.transport in ADAPTERS:
        return
    place = next(path for path in (run_dir, *run_dir.absolute().parents) if path.exists())
    free = shutil.disk_usage(place).free
    if cost.total > free:
        raise DiskFull(
            f"{place} has {free >> 20} MiB free, {t.weights.transport} needs {cost.most} versions of "
            f"{cost.version >> 20} MiB = {cost.total >> 20} MiB there; free some, choose another --run-dir, or "
            'weights.transport = "shm"'
        )
