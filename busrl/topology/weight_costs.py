"""What published versions cost: bytes of one, how many exist at most, and where they lie.

Reads the headers of the model's safetensors, so that `busrl check` knows before anything starts. Used by `check.py` and
by the weight plane, which keeps as many versions as are counted here. Knows nothing of how they are written.

- Sizes are 0 where the model folder does not tell them (weights that are no safetensors, a tiny model not yet made).
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from busrl.errors import DiskFull
from busrl.topology import machine, vllm
from busrl.topology.schema import RESTARTS, Topology
from busrl.topology.weight_rules import ADAPTERS, FOLDERS, rollouts

Shapes = Mapping[str, tuple[int, ...]]
ADAPTER_BYTES = 4  # an adapter is float32 whatever the model is
UNBOUNDED = 8  # versions of an adapter that vLLM may be asked for where nothing bounds their age
SMALL_FILES = 16 << 10  # configuration and stamp of an adapter
HEADS = ("lm_head", "embed_out", "output", "score")


@dataclass(frozen=True)
class Cost:
    """Folders of versions: bytes of one, how many the learner keeps, and how many there may be at the same time."""

    version: int
    kept: int
    most: int

    @property
    def total(self) -> int:
        return self.version * self.most


def kept_versions(t: Topology) -> int:
    """Versions that stay in the place of publication. An adapter may be asked for as long as a sample of it counts."""
    if t.weights.transport == "lora_hotswap" and t.weights.mode == "batch-async":
        return max(2, t.weights.max_staleness + 1)
    return 2  # the newest, and the one that an engine may be reading


def adapter_slots(t: Topology) -> int:
    """Adapters that one vLLM holds at a time: those that its running answers may be of, and the newest."""
    if t.weights.mode == "sync" or t.weights.transport in RESTARTS:
        return 2
    return (t.weights.max_staleness if t.weights.mode == "batch-async" else UNBOUNDED) + 2


def held_versions(t: Topology) -> int:
    """Versions that one engine holds on to: those that its running sequences may be of."""
    if t.weights.transport in ADAPTERS and vllm.used(t):
        return adapter_slots(t)  # it reads an adapter from its folder as long as it has a place for it
    return 1 if t.weights.transport in RESTARTS else kept_versions(t)


def cost(t: Topology, model: Path | None) -> Cost | None:
    """None for a transport that publishes no folders."""
    if t.weights.transport not in FOLDERS:
        return None
    shapes = machine.tensor_shapes(model) if model is not None else {}
    if t.weights.transport in ADAPTERS:
        parts = adapted(shapes, t.lora.targets)
        size = sum(ADAPTER_BYTES * t.lora.rank * (rows + columns) for rows, columns in parts) if parts else 0
        size += SMALL_FILES if size else 0
    else:
        size = sum(machine.elements(shape) for shape in shapes.values()) * machine.BYTES_OF[t.model.dtype]
    kept, engines = kept_versions(t), sum(entry.count for _, entry in rollouts(t))
    return Cost(size, kept, kept + 1 + engines * held_versions(t))


def broadcast_copies(t: Topology) -> list[tuple[str, float]]:
    """Who holds how many times the size of all values in a broadcast: the learner the version that it sends and the
    one that comes next (and frames of changes), an engine the version that it has and the one that arrives."""
    sparse = t.weights.sparse.enabled
    found = [("learner, two blocks" + (" and frames of changes" if sparse else ""), 2.5 if sparse else 2.0)]
    if any(entry.engine != "vllm" for _, entry in rollouts(t)):
        found.append(("each engine, front and back", 2.0))
    if vllm.used(t):
        found.append(("each worker of vLLM, front, back and staging", 3.0))
    return found


def adapted(shapes: Shapes, targets: tuple[str, ...]) -> list[tuple[int, int]]:
    """Shapes of the weights that get an adapter, as far as names and shapes tell."""
    found = []
    for name, shape in shapes.items():
        *_, layer, kind = ("", *name.split("."))
        if kind == "weight" and len(shape) == 2 and (layer in targets if targets else not _outer(layer)):
            found.append((shape[0], shape[1]))
    return found


def layers(shapes: Shapes) -> set[str]:
    """Last names of the layers that may get an adapter, as far as names and shapes tell: matrices, no embeddings."""
    matrices = {name.split(".")[-2] for name, shape in shapes.items() if len(shape) == 2 and name.endswith(".weight")}
    return {name for name in matrices if name in HEADS or not _outer(name)}


def require_disk(t: Topology, model: Path | None, run_dir: Path) -> None:
    """DiskFull with the sum, if the versions that checkpoint_restart writes into the run directory do not fit."""
    found = cost(t, model)
    if found is None or t.weights.transport in ADAPTERS:
        return
    place = next(path for path in (run_dir, *run_dir.absolute().parents) if path.exists())
    free = shutil.disk_usage(place).free
    if found.total > free:
        raise DiskFull(
            f"{place} has {free >> 20} MiB free, {t.weights.transport} needs {found.most} versions of "
            f"{found.version >> 20} MiB = {found.total >> 20} MiB there; free some, choose another --run-dir, or "
            'weights.transport = "shm"'
        )


def _outer(layer: str) -> bool:
    """Embeddings and output heads, which get no adapter unless they are named."""
    return layer in HEADS or "embed" in layer or layer in ("wte", "wpe")
