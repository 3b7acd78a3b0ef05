"""A low-rank adapter (LoRA) on a model that is being trained: wrapped by `peft`, kept and given away in its format.

Used by the training step: the trainer sees a model of which only the adapter's parameters want gradients. Talks to
peft and to files. Knows nothing of optimisers, versions or who publishes.

- A wrapped layer computes x (W + scale B A): A is [rank, in], drawn from a seed, B is [out, rank], zero at first, so
  the adapter begins as nothing and a learner that starts again begins with the same numbers.
- A folder of it (adapter_config.json, adapter_model.safetensors) loads with `peft` anywhere, on the same base model.
- Dropout acts while gradients are recorded and never else: scores and probes see the whole adapter.
"""

from __future__ import annotations

import copy
import importlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from busrl.errors import ModelNotLoaded

CONFIG, WEIGHTS, OWN = "adapter_config.json", "adapter_model.safetensors", "default"
PREFIX = "base_model.model."  # peft's, before the names that the model has without it


@dataclass(frozen=True)
class LoraSettings:
    """Numbers of the adapter. `targets`: last names of layers; empty = every linear layer but the output head."""

    rank: int
    scale: float
    targets: tuple[str, ...] = ()
    dropout: float = 0.0
    seed: int = 0

    def described(self) -> dict[str, Any]:
        """For the meta of a checkpoint: what an adapter has to agree in to be continued."""
        return {"rank": self.rank, "scale": self.scale, "targets": sorted(self.targets)}


class Adapter:
    """Wraps the layers of `model` in place; from then on only the adapter's parameters require gradients."""

    def __init__(self, model: Any, settings: LoraSettings) -> None:
        try:
            peft: Any = importlib.import_module("peft")  # only here: it takes seconds, and not everybody has it
        except ImportError as problem:
            raise ModelNotLoaded(f"lora.rank = {settings.rank}: {problem}; pip install 'busrl[lora]'") from problem
        self.settings, self.model = settings, model
        self._config = peft.LoraConfig(
            r=settings.rank, lora_alpha=_whole(settings.scale * settings.rank), lora_dropout=settings.dropout,
            target_modules=sorted(_targets(model, settings.targets)), bias="none", task_type="CAUSAL_LM",
        )  # fmt: skip
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(settings.seed)
            self._wrapped = peft.get_peft_model(model, self._config)
        self._layers: dict[str, Any] = {n: m for n, m in model.named_modules() if hasattr(m, "lora_A")}
        for layer in self._layers.values():
            layer.lora_dropout[OWN] = _Dropout(settings.dropout)
        self._merged: dict[str, Tensor] = {}

    def tensors(self) -> dict[str, Tensor]:
        """The adapter by the names of its file; views, valid until the next step."""
        return {
            f"{PREFIX}{name}.lora_{side}.weight": getattr(layer, f"lora_{side}")[OWN].weight.detach()
            for name, layer in self._layers.items()
            for side in ("A", "B")
        }

    @torch.no_grad()
    def merged(self, model: Any) -> dict[str, Tensor]:
        """Base and adapter as one, by the names that the model has without an adapter; valid until the next call."""
        named: dict[str, Tensor] = {}
        for name, parameter in model.named_parameters():
            if ".lora_" not in name:
                named[name.replace(".base_layer.", ".")] = parameter.detach()
        for name, layer in self._layers.items():
            weight = named[f"{name}.weight"]
            into = self._merged.setdefault(name, torch.empty_like(weight))
            a, b = layer.lora_A[OWN].weight, layer.lora_B[OWN].weight
            named[f"{name}.weight"] = torch.addmm(weight, b, a, alpha=self.settings.scale, out=into)
        return named

    def write(self, folder: Path, tensors: Mapping[str, Tensor]) -> None:
        """The folder that peft loads."""
        from safetensors.torch import save

        config = copy.copy(self._config)
        config.inference_mode = True
        config.target_modules = sorted(config.target_modules)
        folder.mkdir(exist_ok=True)
        (folder / CONFIG).write_text(json.dumps(_plain(config.to_dict()), indent=1, sort_keys=True))
        whole = {name: value.contiguous() for name, value in tensors.items()}
        (folder / WEIGHTS).write_bytes(save(whole, {"format": "pt"}))

    @torch.no_grad()
    def load(self, folder: Path) -> None:
        """Continue with an adapter that was written; ModelNotLoaded if its layers or shapes are others."""
        from safetensors.torch import load_file

        found, own = load_file(folder / WEIGHTS), self.tensors()
        if found.keys() != own.keys() or any(found[name].shape != value.shape for name, value in own.items()):
            raise ModelNotLoaded(f"{folder}: an adapter with other layers or another rank than [lora] asks for")
        for name, value in own.items():
            value.copy_(found[name])


class _Dropout(nn.Module):
    """Dropout wherever gradients are recorded, whatever mode the model is in: a model is never in training mode."""

    def __init__(self, share: float) -> None:
        super().__init__()
        self.p = share

    def forward(self, rows: Tensor) -> Tensor:
        return F.dropout(rows, self.p) if self.p and torch.is_grad_enabled() else rows


def _targets(model: Any, wanted: tuple[str, ...]) -> set[str]:
    """Last names of the layers that get an adapter; ModelNotLoaded for one that the model does not have."""
    head = model.get_output_embeddings()
    found = {name.rpartition(".")[2]: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    linear = {name for name, module in found.items() if module is not head}
    if missing := sorted(set(wanted) - linear):
        raise ModelNotLoaded(f"lora.targets: the model has no linear layer {missing[0]!r}; it has {sorted(linear)}")
    if not linear:
        raise ModelNotLoaded("lora.rank: the model has no linear layer that an adapter could be put on")
    return set(wanted) or linear


def _whole(value: float) -> int | float:
    return int(value) if value == int(value) else value


def _plain(value: Any) -> Any:
    """As peft writes its configuration: sets as sorted lists."""
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    return sorted(value) if isinstance(value, (set, frozenset)) else value
