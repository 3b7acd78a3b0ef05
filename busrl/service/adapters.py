"""Low-rank adapters beside one frozen model: the layers they may change, their numbers, and how the model wears one.

Used by `tenants`. Talks to the model's linear layers by hooks, one adapter at a time, and to folders of peft's format.
Knows nothing of losses, optimisers, requests or clients.

- A layer with an adapter computes x W + (alpha / rank) (x A) B, A and B in the type of x. A [rank, in] is drawn from a
  seed in the order of the layers, B [out, rank] is zero at first: an adapter begins as nothing.
- The numbers of an adapter are one float32 vector, its gradients another: a step and a norm are each one operation. The
  pairs of the layers are views.
- Alpha is the same for every rank, so that a learning rate does not depend on the rank.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from busrl.engines.torch.lora import Low
from busrl.paths import ADAPTER_CONFIG, ADAPTER_PREFIX, ADAPTER_WEIGHTS
from busrl.service.sums import UserFault
from busrl.training.forward import PaddedRows

ALPHA = 32.0
ATTENTION, MLP = ("attn", "attention"), ("mlp", "feed_forward", "ffn", "moe")  # in a part of a layer's name
ROUTERS = {"gate", "router"}  # last names of layers that choose experts: they stay as they are
EXPERTS = "experts"  # in the name of a layer: the part of the model that holds all of them
PIECE_BYTES = 1 << 26  # of one float32 buffer of logits


@dataclass(frozen=True)
class Adapter:
    """The shape of an adapter: rank, the seed of A, and the parts of the model that it changes. Rank 0: no adapter, all
    weights are trained."""

    rank: int
    seed: int = 0
    attn: bool = True
    mlp: bool = True
    unembed: bool = True

    @property
    def parts(self) -> tuple[str, ...]:
        return tuple(part for part in ("attn", "mlp", "unembed") if getattr(self, part))

    def check(self, max_rank: int) -> None:
        if not 1 <= self.rank <= max_rank:
            raise UserFault(f"lora_config: rank = {self.rank}; 1 to {max_rank} are served")
        if not self.parts:
            raise UserFault("lora_config trains nothing; set train_attn, train_mlp or train_unembed")


class Site(NamedTuple):
    """A linear layer that an adapter may change."""

    name: str
    inputs: int
    outputs: int


class Numbers:
    """The numbers of one adapter, and their gradients while there are any. `pairs`: views of them by layer, which
    autograd takes as leaves."""

    def __init__(self, adapter: Adapter, sites: Iterable[Site], device: torch.device) -> None:
        self.adapter, self.sites = adapter, tuple(sites)
        self.scale = ALPHA / adapter.rank
        self.vector = self._drawn().to(device)
        self.gradients: Tensor | None = None
        self.pairs: dict[str, Low] = {}
        self._lay_out()

    def _drawn(self) -> Tensor:
        vector, random = torch.zeros(sum(self._sizes())), torch.Generator().manual_seed(self.adapter.seed)
        for site, (down, _) in zip(self.sites, self.views(vector).values(), strict=True):
            bound = 1 / math.sqrt(site.inputs)  # as peft draws it
            down.uniform_(-bound, bound, generator=random)
        return vector

    def _sizes(self) -> list[int]:
        return [self.adapter.rank * width for site in self.sites for width in (site.inputs, site.outputs)]

    def views(self, vector: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
        """A and B of each layer in a vector of this adapter's length."""
        parts, rank = iter(torch.split(vector, self._sizes())), self.adapter.rank
        return {
            site.name: (next(parts).view(rank, site.inputs), next(parts).view(site.outputs, rank))
            for site in self.sites
        }

    def _lay_out(self) -> None:
        """Make the leaves, with their gradients if there are any."""
        gradients = {} if self.gradients is None else self.views(self.gradients)
        self.pairs = {}
        for name, pair in self.views(self.vector).items():
            down, up = (part.detach().requires_grad_() for part in pair)
            if name in gradients:
                down.grad, up.grad = gradients[name]
            self.pairs[name] = Low(down, up, self.scale)

    def ready(self) -> None:
        """Make room for gradients."""
        if self.gradients is None:
            self.gradients = torch.zeros_like(self.vector)
            self._lay_out()

    def drop_gradients(self) -> None:
        if self.gradients is not None:
            self.gradients.zero_()

    def named(self, vector: Tensor) -> dict[str, Tensor]:
        """The parts of a vector of this adapter's length by their names in peft's file."""
        return {
            f"{ADAPTER_PREFIX}{name}.lora_{side}.weight": part
            for name, pair in self.views(vector).items() for side, part in zip("AB", pair)
        }


class Wearer:
    """A model whose layers compute with the adapter that it wears, if any. The model is frozen. `of_experts`: whoever
    draws with an adapter can have one of a single expert."""

    def __init__(self, model: Any, of_experts: bool = True) -> None:
        self.model = model.requires_grad_(False)
        self.head: nn.Linear = model.get_output_embeddings()
        self._sites: dict[str, list[Site]] = {"attn": [], "mlp": [], "unembed": []}
        self._worn: Mapping[str, Low] = {}
        self._head_name = ""
        self._fused = any(parameter.ndim > 2 and EXPERTS in name for name, parameter in model.named_parameters())
        for name, layer in model.named_modules():
            if isinstance(layer, nn.Linear) and (part := self._part_of(name, layer)):
                self._head_name = name if layer is self.head else self._head_name
                self._sites[part].append(Site(name, layer.in_features, layer.out_features))
                layer.register_forward_hook(partial(self._add, name))
        self._expert = next((site.name for site in self._sites["mlp"] if is_of_expert(site.name)), "")
        self._of_experts = of_experts

    def sites(self, adapter: Adapter) -> list[Site]:
        """The layers of an adapter; UserFault if one of its parts cannot have any."""
        name, remedy = type(self.model).__name__, "create the model with"
        if adapter.unembed and self.model.get_input_embeddings().weight is getattr(self.head, "weight", None):
            raise UserFault(f"train_unembed: the head of {name} is its embedding; {remedy} train_unembed=False")
        if adapter.mlp and self._fused:
            raise UserFault(f"train_mlp: the experts of {name} are one tensor; {remedy} train_mlp=False")
        if adapter.mlp and self._expert and not self._of_experts:
            raise UserFault(f"train_mlp: {self._expert} is an expert, which sees the tokens of all samples that are "
                            f"routed to it, and the torch engine cannot tell whose they are; {remedy} train_mlp=False")
        for part in adapter.parts:
            if not self._sites[part]:
                raise UserFault(f"train_{part}: {name} has no linear layer there; {remedy} train_{part}=False")
        return [site for part in adapter.parts for site in self._sites[part]]

    def _part_of(self, name: str, layer: nn.Linear) -> str:
        if layer is self.head:
            return "unembed"
        *above, last = name.split(".")
        if last in ROUTERS:
            return ""
        kinds = (("attn", ATTENTION), ("mlp", MLP))
        return next((part for part, words in kinds if any(word in step for step in above for word in words)), "")

    def _add(self, name: str, layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        if (low := self._worn.get(name)) is None:
            return output
        rows = inputs[0]
        change = F.linear(F.linear(rows, low.down.to(rows.dtype)), low.up.to(rows.dtype))
        return output + change * low.scale

    @contextlib.contextmanager
    def wearing(self, numbers: Numbers) -> Iterator[None]:
        """Within it the model computes with that adapter, backward included."""
        self._worn = numbers.pairs
        try:
            yield
        finally:
            self._worn = {}

    @property
    def wears_head(self) -> bool:
        return self._head_name in self._worn

    def through_head(self, way: PaddedRows, hidden: Tensor, targets: Tensor) -> Tensor:
        """Log-probabilities of targets [n] or [n, m] from hidden states [n, width], through the head with its adapter;
        logits exist in pieces, in backward too."""
        cap = way.head.cap

        def score(rows: Tensor, wanted: Tensor) -> Tensor:
            logits = self.head(rows).float() * way.head.scale
            logits = way.token_rows.mask(cap * torch.tanh(logits / cap) if cap else logits)
            logprobs: Tensor = logits.log_softmax(-1).gather(-1, wanted)
            return logprobs

        single, count = targets.ndim == 1, max(1, PIECE_BYTES // (4 * self.head.out_features))
        pieces = zip(torch.split(hidden, count), torch.split(targets[:, None] if single else targets, count))
        scores = torch.cat([
            checkpoint(score, *piece, use_reentrant=False, preserve_rng_state=False) for piece in pieces
        ])
        return scores[:, 0] if single else scores


def is_of_expert(layer: str) -> bool:
    """True for the name of a layer that is a part of one expert."""
    return EXPERTS in layer.split(".")


# -- folders of peft's format -----


def write_folder(folder: Path, numbers: Numbers, dtype: torch.dtype, base: str) -> None:
    """Write the adapter in that type as peft, vLLM and the torch engine load it. `base`: the model's name."""
    folder.mkdir(parents=True, exist_ok=True)
    write_peft(folder, numbers.named(numbers.vector), numbers.adapter.rank, dtype, base)


def write_peft(folder: Path, tensors: Mapping[str, Tensor], rank: int, dtype: torch.dtype, base: str) -> None:
    """Write the tensors of an adapter, by their names in peft's file, and their description."""
    from safetensors.torch import save_file

    config = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": base, "inference_mode": True,
        "r": rank, "lora_alpha": ALPHA, "lora_dropout": 0.0, "bias": "none", "fan_in_fan_out": False,
        "use_rslora": False, "use_dora": False, "modules_to_save": None, "rank_pattern": {}, "alpha_pattern": {},
        "target_modules": sorted({name.split(".lora_")[0].rpartition(".")[2] for name in tensors}),
    }
    (folder / ADAPTER_CONFIG).write_text(json.dumps(config, indent=1))
    kept = {name: part.to("cpu", dtype).contiguous() for name, part in tensors.items()}
    save_file(kept, folder / ADAPTER_WEIGHTS, {"format": "pt"})
