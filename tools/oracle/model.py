"""A model folder as plain tensors: log-probabilities, entropies and values of answers, and their gradient.

Loads with transformers, and what a checkpoint holds beside it with peft, safetensors and torch. Every answer is put
through the model's own forward, padded at the right, in float64. Knows nothing of losses, logs or runs.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

from tools.oracle.files import Sample
from tools.oracle.maths import AdamW

ROWS = 64  # of one forward


class Model:
    """The architecture of one folder; weights are handed in with every call."""

    def __init__(self, folder: Path, dtype: str = "float64", without: list[int] | None = None) -> None:
        """`without`: ids that stand for no token, and are left out of every softmax; None: those of the folder."""
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging

        quiet: Any = logging
        quiet.disable_progress_bar()
        self.folder, self.dtype = folder, getattr(torch, dtype)
        self.net = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True, attn_implementation="eager")
        self.net = self.net.to(self.dtype).eval().requires_grad_(False)
        self.names = [name for name, _ in self.net.named_parameters()]
        self.ends = ends_of(folder)
        rows = self.net.get_output_embeddings().out_features
        self.without = without_token(folder, rows) if without is None else without

    def weights(self, folder: Path | None = None) -> dict[str, Tensor]:
        """The tensors of a folder of this architecture, as copies; without one, of its own."""
        if folder is None:
            return {name: value.detach().clone() for name, value in self.net.named_parameters()}
        stored: dict[str, Tensor] = {}
        for path in sorted(folder.glob("*.safetensors")):
            stored.update(load_file(path))
        return {name: stored[name].to(self.dtype) for name in self.names}

    def logits(self, weights: dict[str, Tensor], ids: Tensor) -> Tensor:
        made: Any = torch.func.functional_call(self.net, weights, (), {"input_ids": ids, "use_cache": False})
        return self.of_tokens(made.logits)

    def of_tokens(self, logits: Tensor) -> Tensor:
        """-inf where a row stands for no token."""
        return logits.index_fill(-1, torch.tensor(self.without, dtype=torch.int64), float("-inf"))

    def score(self, weights: dict[str, Tensor], samples: Sequence[Sample]) -> list[Scores]:
        """Of each sample what its tokens were drawn with: at its temperature, under these weights."""
        found: list[Scores] = []
        for begin in range(0, len(samples), ROWS):
            part = samples[begin : begin + ROWS]
            rows = [one for sample in part for one in sample.sequences()]
            ids = padded([ids for ids, _ in rows])
            given = {"input_ids": ids, "use_cache": False, "output_hidden_states": True}
            made: Any = torch.func.functional_call(self.net, weights, (), given)
            each = iter(zip(self.of_tokens(made.logits), made.hidden_states[-1], rows, strict=True))
            for sample in part:
                logits, hidden = [], []
                for _ in sample.seqs:
                    scores, states, (_, spans) = next(each)
                    # What stands at a position is about the token after it.
                    logits += [scores[first - 1 : last - 1] for first, last in spans]
                    hidden += [states[first - 1 : last - 1] for first, last in spans]
                own = torch.cat(logits) / sample.temperature
                every = torch.log_softmax(own, -1)
                entropy = -(every.exp() * every.clamp(min=-1e4)).sum(-1)
                logp = every[torch.arange(len(own)), torch.from_numpy(sample.tokens)]
                found.append(Scores(logp, entropy, torch.cat(hidden)))
        return found


class Scores(NamedTuple):
    """Of each generated token of a sample."""

    logp: Tensor
    entropy: Tensor
    hidden: Tensor  # the last hidden state before it, [tokens, width]


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


def without_token(folder: Path, rows: int) -> list[int]:
    """Ids of rows that the folder's tokenizer has no token for; one that ends an answer is a token. None without a
    tokenizer."""
    if not (folder / "tokenizer_config.json").exists():
        return []
    from transformers import AutoTokenizer

    known = set(AutoTokenizer.from_pretrained(folder, local_files_only=True).get_vocab().values()) | ends_of(folder)
    return sorted(set(range(rows)) - known)


class Dense:
    """All weights are trained."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self.leaves = model.weights()

    def load(self, checkpoint: Path) -> None:
        if (checkpoint / "shards").is_dir():
            stored = shards(checkpoint)
            self.leaves = {name: stored[f"weights.{name}"].to(self.model.dtype) for name in self.model.names}
        else:
            self.leaves = self.model.weights(checkpoint / "model")

    def effective(self) -> dict[str, Tensor]:
        return self.leaves

    def order(self) -> list[str]:
        """Names in the order of the optimiser's state: matrices first, then norms and biases."""
        shapes = {name: value.ndim for name, value in self.leaves.items()}
        return [n for n in shapes if shapes[n] >= 2] + [n for n in shapes if shapes[n] < 2]


class Lora:
    """An adapter W + scale B A on the base's linear layers is trained: A as peft draws it from the seed of the run, and
    B = 0, or what a checkpoint holds."""

    PREFIX = "base_model.model."

    def __init__(self, model: Model, settings: dict[str, Any], seed: int) -> None:
        rank = settings["rank"]
        alpha = settings["alpha"] or 2 * rank
        self.model, self.scale, self.base = model, alpha / rank, model.weights()
        self.leaves: dict[str, Tensor] = self._drawn(rank, settings["targets"], seed)

    def _drawn(self, rank: int, targets: Sequence[str], seed: int) -> dict[str, Tensor]:
        """Empty where there is no peft."""
        try:
            import peft
        except ImportError:
            return {}
        from transformers import AutoModelForCausalLM

        net = AutoModelForCausalLM.from_pretrained(self.model.folder, local_files_only=True, dtype=torch.float32)
        head = net.get_output_embeddings()
        every = [(name, one) for name, one in net.named_modules() if isinstance(one, torch.nn.Linear)]
        linear = {name.rpartition(".")[2] for name, one in every if one is not head}
        config = peft.LoraConfig(r=rank, target_modules=sorted(targets or linear), task_type="CAUSAL_LM")
        torch.manual_seed(seed)
        made = dict(peft.get_peft_model(net, config).named_parameters())
        return {
            name.removeprefix(self.PREFIX).replace(".default.", "."): value.detach().to(self.model.dtype)
            for name, value in made.items() if ".lora_" in name
        }

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


class ValueHead:
    """V = h w + b, of a run with learner.advantage = "gae"; it begins at 0, and has an optimiser of its own."""

    def __init__(self, width: int, settings: dict[str, Any], dtype: torch.dtype) -> None:
        self.settings, self.dtype = settings, dtype
        self.leaves = {"weight": torch.zeros(1, width, dtype=dtype), "bias": torch.zeros(1, dtype=dtype)}
        self.adamw = AdamW({"betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0})

    def __call__(self, hidden: Tensor) -> Tensor:
        """The value before each token; the gradient by the hidden states counts `coef` times."""
        known = hidden.detach()
        scaled = known + self.settings["coef"] * (hidden - known)
        return scaled @ self.leaves["weight"][0] + self.leaves["bias"]

    def load(self, checkpoint: Path) -> None:
        stored = load_file(checkpoint / "value" / "value_head.safetensors")
        self.leaves = {name: stored[name].to(self.dtype) for name in self.leaves}
        saved = torch.load(checkpoint / "value" / "optimizer.pt", map_location="cpu", weights_only=True)
        self.adamw = AdamW({"betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0})
        for place, name in enumerate(self.leaves):
            if (state := saved["state"].get(place)) is not None:
                self.adamw.take(name, state, self.dtype)


def gradients(leaves: dict[str, Tensor], total: Tensor) -> dict[str, Tensor]:
    found = torch.autograd.grad(total, list(leaves.values()), allow_unused=True)
    return {name: g for name, g in zip(leaves, found) if g is not None}


# -- a checkpoint's files ----------------------------------------------------------


def load_adamw(adamw: AdamW, checkpoint: Path, trained: Dense | Lora) -> None:
    """The moments that a checkpoint of the run holds."""
    if (checkpoint / "shards").is_dir():
        stored = shards(checkpoint)
        states = json.loads((checkpoint / "shards" / "optimizer.json").read_text())["state"]
        for name, state in states.items():
            adamw.take(name, {key: stored[f"optimizer.state.{name}.{key}"] for key in state}, trained.model.dtype)
        return
    saved = torch.load(checkpoint / "optimizer.pt", map_location="cpu", weights_only=True)
    places = [place for group in saved["param_groups"] for place in group["params"]]
    for name, place in zip(trained.order(), places):
        if (state := saved["state"].get(place)) is not None:
            adamw.take(name, state, trained.model.dtype)


def shards(checkpoint: Path) -> dict[str, Tensor]:
    """Every tensor of a checkpoint in shards, put together from the files of all ranks. The header of each says where
    its part of a tensor begins, and what shape the whole has."""
    from safetensors import safe_open

    found: dict[str, Tensor] = {}
    for path in sorted((checkpoint / "shards").glob("rank-*.safetensors")):
        file: Any = safe_open(str(path), "pt")
        for name, (first, shape) in json.loads(file.metadata()["parts"]).items():
            part = file.get_tensor(name)
            whole = found.setdefault(name, torch.full(shape, float("nan"), dtype=part.dtype))
            whole[tuple(slice(at, at + size) for at, size in zip(first, part.shape))] = part
    return found
