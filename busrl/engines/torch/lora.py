"""New weights for an embedded model from files: an adapter on top of its base, or a folder to start again with.

Used by the torch engine between two decoding steps. Talks to the model's live parameters and to folders that a receiver
has taken and verified. Knows nothing of versions, of how a receiver gets folders, or of the engine's rows.

- Everything is read and compared with the model before a parameter is touched: a refused folder changes nothing.
- W = W0 + (alpha / rank) B A, always from the base W0, so that adapters replace each other and never add up. `swap`
  keeps a copy of W0 of the adapted layers; `restart` reads W0 from its folder.
- Plain LoRA only: no DoRA, no bias, no layers trained in full, one rank and alpha for all layers.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from busrl.errors import WeightsRefused
from busrl.paths import ADAPTER_CONFIG, ADAPTER_PREFIX, ADAPTER_WEIGHTS
from busrl.weights.tensors import VOLATILE as SAVED_ANEW
from busrl.weights.tensors import added

if TYPE_CHECKING:
    from busrl.weights.base import Receiver

PLAIN: dict[str, tuple[Any, ...]] = {  # keys of adapter_config.json that would change what W is
    "peft_type": ("LORA",),
    "bias": ("none", None),
    "use_dora": (False, None),
    "fan_in_fan_out": (False, None),
    "lora_bias": (False, None),
    "modules_to_save": (None, []),
    "rank_pattern": ({}, None),
    "alpha_pattern": ({}, None),
    "layer_replication": (None,),
}
VOLATILE = (*SAVED_ANEW, "architectures")  # keys of config.json that may differ


class Low(NamedTuple):
    """The adapter of one weight: `scale` times `up` [out, rank] times `down` [rank, in]. Of the experts of a layer
    `down` has the rows of all of them and `up` the columns, as `added` takes them; a tensor `transposed` by its model
    is [experts, in, out], which the shape of a square one does not tell."""

    down: Tensor
    up: Tensor
    scale: float
    experts: int = 0  # of a tensor [experts, out, in]; 0: of a matrix
    transposed: bool = False

    def fits(self, shape: torch.Size) -> bool:
        """True if it changes a weight of that shape."""
        ends = [len(self.up), self.down.shape[1]]
        if not self.experts:
            return list(shape) == ends
        return list(shape) == [self.experts, *(ends[::-1] if self.transposed else ends)]


def read(folder: Path) -> dict[str, Low]:
    """The adapter in a folder of peft's format, by the names of its base weights, or of the layers whose experts it
    changes; WeightsRefused if no plain LoRA."""
    from safetensors.torch import load_file

    try:
        config: dict[str, Any] = json.loads((folder / ADAPTER_CONFIG).read_bytes())
        tensors = load_file(folder / ADAPTER_WEIGHTS)
        rank, alpha = int(config["r"]), float(config["lora_alpha"])
    except Exception as problem:  # JSON, safetensors' own types, missing keys: all mean an unreadable adapter
        raise WeightsRefused(f"{folder}: no adapter that can be read: {problem}") from problem
    for key, allowed in PLAIN.items():
        if key in config and config[key] not in allowed:
            raise WeightsRefused(f"{folder}: {key} = {config[key]!r}; only plain LoRA can be added to the weights")
    scale = alpha / rank**0.5 if config.get("use_rslora") else alpha / rank
    adapter: dict[str, Low] = {}
    for name, down in tensors.items():
        if not name.endswith(".lora_A.weight"):
            if not name.endswith(".lora_B.weight"):
                raise WeightsRefused(f"{folder}: {name!r} is no part of a plain LoRA")
            continue
        up = tensors.get(name.replace(".lora_A.", ".lora_B."))
        experts = config.get("target_parameters") and ".experts." in name
        rows = len(down) if experts else rank
        if up is None or down.ndim != 2 or up.ndim != 2 or down.shape[0] != rows or up.shape[1] != rows or rows % rank:
            raise WeightsRefused(f"{folder}: {name!r} has no counterpart of rank {rank}, which {ADAPTER_CONFIG} says")
        layer = name.removeprefix(ADAPTER_PREFIX).removesuffix(".lora_A.weight")
        adapter[layer if experts else f"{layer}.weight"] = Low(down, up, scale, rows // rank if experts else 0)
    if not adapter or 2 * len(adapter) != len(tensors):
        raise WeightsRefused(f"{folder}: {len(tensors)} tensors make {len(adapter)} adapted layers")
    return adapter


class WeightLoader:
    """Writes new weights into a model. `base` is the folder that it was loaded from, if any."""

    def __init__(self, model: Any, base: Path | None = None) -> None:
        self._model, self.base = model, base
        self._originals: dict[str, Tensor] = {}  # W0 of every layer that an adapter has changed

    def update(self, receiver: Receiver) -> tuple[int, int]:
        """Write the newest version of a receiver of any kind; returns (version, learner's step)."""
        if receiver.kind == "tensors":
            return receiver.fetch(dict(self._model.named_parameters()))
        version, step, folder = receiver.take()
        if receiver.kind == "adapter":
            self.swap(folder)
        else:
            self.restart(folder)
        return version, step

    @torch.no_grad()
    def swap(self, folder: Path) -> None:
        """Put an adapter in the place of the one before."""
        adapter, parameters = self._fitting(folder)
        for name in self._originals.keys() - adapter.keys():
            parameters[name].copy_(self._originals[name])
        for name, low in adapter.items():
            if name not in self._originals:
                self._originals[name] = parameters[name].clone()
            _add(parameters[name], self._originals[name], low)

    @torch.no_grad()
    def restart(self, folder: Path) -> None:
        """Start again with a folder: of a whole model, or of an adapter, added to the base as it lies on disk."""
        if not (folder / ADAPTER_CONFIG).is_file():
            self._load(folder)
            return
        adapter, parameters = self._fitting(folder)
        if self.base is None:
            raise WeightsRefused(f"{folder}: an adapter, and the engine was not loaded from a folder")
        self._load(self.base)
        for name, low in adapter.items():
            _add(parameters[name], parameters[name], low)

    def _fitting(self, folder: Path) -> tuple[dict[str, Low], dict[str, Tensor]]:
        """The adapter and the model's parameters; WeightsRefused if a layer is not in the model with that shape."""
        adapter, parameters = _named(read(folder), self._model), dict(self._model.named_parameters())
        for name, low in adapter.items():
            shape = (low.up.shape[0], low.down.shape[1])
            if name not in parameters or not low.fits(parameters[name].shape):
                there = f"has shape {list(parameters[name].shape)}" if name in parameters else "is not in this model"
                raise WeightsRefused(f"{folder}: the adapter changes {name!r} of shape {list(shape)}, which {there}")
        return adapter, parameters

    def _load(self, folder: Path) -> None:
        """Copy a folder's weights into the model; WeightsRefused if names, shapes or configuration differ."""
        from transformers import AutoModelForCausalLM

        try:
            model: Any = AutoModelForCausalLM.from_pretrained(str(folder), local_files_only=True)
        except Exception as problem:  # a library of readers, each with its own errors
            raise WeightsRefused(f"{folder}: no model that can be loaded: {problem}") from problem
        theirs, ours = model.config.to_dict(), self._model.config.to_dict()
        if differing := {k for k in theirs.keys() | ours.keys() if theirs.get(k) != ours.get(k)} - set(VOLATILE):
            raise WeightsRefused(f"{folder}: another architecture: {min(differing)} of its configuration differs")
        new, parameters = dict(model.named_parameters()), dict(self._model.named_parameters())
        for name in sorted(new.keys() | parameters.keys()):
            if name not in new or name not in parameters or new[name].shape != parameters[name].shape:
                raise WeightsRefused(f"{folder}: {name!r} is not the same in its model and in the engine's")
        for name, parameter in parameters.items():
            parameter.copy_(new[name])


def _named(adapter: dict[str, Low], model: Any) -> dict[str, Low]:
    """By names of the model's weights: of experts a file names the layer alone, and shapes tell which of its weights
    they are. The layer says in which order it has the sides of a weight."""
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    modules = dict(model.named_modules())
    named = {}
    for name, low in adapter.items():
        layer = name.replace(".base_layer", "")
        if low.experts:
            low = low._replace(transposed=getattr(modules.get(layer), "is_transposed", False))
        found = [one for one, shape in shapes.items() if one.rpartition(".")[0] == layer and low.fits(shape)]
        named[found[0] if low.experts and len(found) == 1 else name] = low
    return named


def _add(into: Tensor, base: Tensor, low: Low) -> None:
    """Add the adapter to `base`, in float32: a bfloat16 product would lose small changes of training."""
    up, down = (part.to(device=into.device, dtype=torch.float32) for part in (low.up, low.down))
    into.copy_(added(base.float(), up, down, low.scale, low.transposed))
