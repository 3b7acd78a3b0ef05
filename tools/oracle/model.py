"""A model folder as plain tensors: log-probabilities and entropies of answers, and their gradient.

Loads with transformers, the adapter of a LoRA run with safetensors. Every answer is put through the model's own
forward, padded at the right, in float64. Knows nothing of losses, logs or runs.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

from tools.oracle.files import Sample
from tools.oracle.maths import AdamW

ROWS = 64  # of one forward


class Model:
    """The architecture of one folder; weights are handed in with every call."""

    def __init__(self, folder: Path, dtype: str = "float64") -> None:
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging

        quiet: Any = logging
        quiet.disable_progress_bar()
        self.folder, self.dtype = folder, getattr(torch, dtype)
        self.net = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True, attn_implementation="eager")
        self.net = self.net.to(self.dtype).eval().requires_grad_(False)
        self.names = [name for name, _ in self.net.named_parameters()]
        self.ends = ends_of(folder)

    def weights(self, folder: Path | None = None) -> dict[str, Tensor]:
        """The tensors of a folder of this architecture, as copies; without one, of its own."""
        if folder is None:
            return {name: value.detach().clone() for name, value in self.net.named_parameters()}
        stored: dict[str, Tensor] = {}
        for path in sorted(folder.glob("*.safetensors")):
            stored.update(load_file(path))
        return {name: stored[name].to(self.dtype) for name in self.names}

    def logits(self, weights: dict[str, Tensor], ids: Tensor) -> Tensor:
        found: Tensor = torch.func.functional_call(self.net, weights, (), {"input_ids": ids, "use_cache": False}).logits
        return found

    def score(self, weights: dict[str, Tensor], samples: Sequence[Sample]) -> list[tuple[Tensor, Tensor]]:
        """Of each sample: the log-probabilities of its tokens at its temperature, and the entropies there."""
        found: list[tuple[Tensor, Tensor]] = []
        for begin in range(0, len(samples), ROWS):
            part = samples[begin : begin + ROWS]
            rows = [one for sample in part for one in sample.sequences()]
            logits = iter(zip(self.logits(weights, padded([ids for ids, _ in rows])), rows, strict=True))
            for sample in part:
                pieces = []
                for _ in sample.seqs:
                    scores, (_, spans) = next(logits)
                    # The logits at a position are about the token after it.
                    pieces += [scores[first - 1 : last - 1] for first, last in spans]
                own = torch.cat(pieces) / sample.temperature
                every = torch.log_softmax(own, -1)
                entropy = -(every.exp() * every.clamp(min=-1e4)).sum(-1)
                found.append((every[torch.arange(len(own)), torch.from_numpy(sample.tokens)], entropy.detach()))
        return found


def padded(rows: Sequence[np.ndarray]) -> Tensor:
    width = max(map(len, rows))
    return torch.from_numpy(np.stack([np.pad(row, (0, width - len(row))) for row in rows]).astype(np.int64))


def ends_of(folder: Path) -> set[int]:
    """Every id that ends an answer: of generation_config.json, of config.json, and the tokenizer's own."""
    found: set[int] = set()
    for name in ("generation_config.json", "config.json"):
        if (folder / name).exists():
            value = json.loads((folder / name).read_text()).get("eos_token_id")
            found.update(value if isinstance(value, list) else [] if value is None else [value])
    if (folder / "tokenizer_config.json").exists():
        from transformers import AutoTokenizer

        value = AutoTokenizer.from_pretrained(folder, local_files_only=True).eos_token_id
        found.update([] if value is None else [value])
    return found


class Dense:
    """All weights are trained."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self.leaves = model.weights()

    def load(self, checkpoint: Path) -> None:
        self.leaves = self.model.weights(checkpoint / "model")

    def effective(self) -> dict[str, Tensor]:
        return self.leaves

    def order(self) -> list[str]:
        """Names in the order of the optimiser's state: matrices first, then norms and biases."""
        shapes = {name: value.ndim for name, value in self.leaves.items()}
        return [n for n in shapes if shapes[n] >= 2] + [n for n in shapes if shapes[n] < 2]


class Lora:
    """An adapter W + scale B A on the base's linear layers is trained. It begins with what a checkpoint holds."""

    PREFIX = "base_model.model."

    def __init__(self, model: Model, scale: float) -> None:
        self.model, self.scale, self.base = model, scale, model.weights()
        self.leaves: dict[str, Tensor] = {}

    def load(self, checkpoint: Path) -> None:
        stored = load_file(checkpoint / "adapter" / "adapter_model.safetensors")
        self.leaves = {name.removeprefix(self.PREFIX): value.to(self.model.dtype) for name, value in stored.items()}

    def effective(self) -> dict[str, Tensor]:
        found = dict(self.base)
        for name, a in self.leaves.items():
            if name.endswith(".lora_A.weight"):
                layer = name.removesuffix(".lora_A.weight")
                found[f"{layer}.weight"] = found[f"{layer}.weight"] + self.scale * (
                    self.leaves[f"{layer}.lora_B.weight"] @ a
                )
        return found

    def order(self) -> list[str]:
        layers = [name.removesuffix(".weight") for name in self.model.names]
        return [f"{n}.lora_{side}.weight" for n in layers for side in "AB" if f"{n}.lora_{side}.weight" in self.leaves]


def gradients(leaves: dict[str, Tensor], total: Tensor) -> dict[str, Tensor]:
    found = torch.autograd.grad(total, list(leaves.values()), allow_unused=True)
    return {name: g for name, g in zip(leaves, found) if g is not None}


def load_adamw(adamw: AdamW, checkpoint: Path, trained: Dense | Lora) -> None:
    """The moments that a checkpoint of the run holds."""
    saved = torch.load(checkpoint / "optimizer.pt", map_location="cpu", weights_only=True)
    places = [place for group in saved["param_groups"] for place in group["params"]]
    for name, place in zip(trained.order(), places):
        if (state := saved["state"].get(place)) is not None:
            adamw.count = int(state["step"])
            adamw.first[name] = state["exp_avg"].to(trained.leaves[name])
            adamw.second[name] = state["exp_avg_sq"].to(trained.leaves[name])
