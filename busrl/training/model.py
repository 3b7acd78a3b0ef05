"""A causal language model from a Hugging Face folder, ready to be trained: in few bits, with an adapter (LoRA) on it.

Used by the learner, the engines' makers and the tests. Talks to the file system and, for an adapter, to `peft`: nothing
is ever downloaded. Knows nothing of optimisers, versions or publication.

- Parameters are float32 whatever the folder holds, unless the caller wants less: gradients and optimiser add small
  numbers to large ones.
- How attention is computed is the caller's choice, else the model's own: sdpa where it can, eager where that would be
  wrong (softcaps, sinks). All are causal without a mask, so rows padded at the right are right.
- Dropout is off: a ratio between two forwards of the same weights has to be 1.
"""

from __future__ import annotations

import contextlib
import copy
import importlib
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from busrl.algorithms import selection
from busrl.errors import ModelNotLoaded, UserError
from busrl.paths import ADAPTER_CONFIG, ADAPTER_PREFIX, ADAPTER_WEIGHTS
from busrl.system.imports import uncollected

WEIGHT_FILES = ("*.safetensors", "pytorch_model*.bin")


def load(
    path: str | Path, dtype: torch.dtype = torch.float32, device: torch.device | None = None, attention: str = "",
) -> Any:
    """The model of that folder in evaluation mode, on the device (the CPU), or ModelNotLoaded with the path and the
    remedy. `attention`: an implementation as transformers names it; empty: the model's own choice."""
    def read(hf: Any, **chosen: str) -> Any:
        return hf.AutoModelForCausalLM.from_pretrained(str(path), dtype=dtype, local_files_only=True, **chosen)

    model = _made(Path(path), read, attention)
    return model if device is None else model.to(device)


def load_empty(path: str | Path, dtype: torch.dtype = torch.float32, attention: str = "") -> Any:
    """The model without weights: its parameters are on `meta`, without memory, its buffers on the CPU as they should
    be. `busrl.ranks.loading` fills it."""
    def build(hf: Any, **chosen: str) -> Any:
        config = hf.AutoConfig.from_pretrained(str(path), local_files_only=True)
        with _without_memory():
            model = hf.AutoModelForCausalLM.from_config(config, dtype=dtype, **chosen)
        with contextlib.suppress(OSError):  # a folder may have none
            model.generation_config = hf.GenerationConfig.from_pretrained(str(path), local_files_only=True)
        return model

    return _made(Path(path), build, attention)


@contextlib.contextmanager
def _without_memory() -> Iterator[None]:
    """Parameters of modules that are made meanwhile are on `meta`; buffers, which no file has, are computed."""
    register: Any = nn.Module.register_parameter

    def on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and not parameter.is_meta:
            parameter = nn.Parameter(parameter.to("meta"), parameter.requires_grad)
        register(module, name, parameter)

    nn.Module.register_parameter = on_meta  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def _made(folder: Path, make: Callable[..., Any], attention: str) -> Any:
    """Makes the model of that folder, in evaluation mode; ModelNotLoaded for what cannot be trained."""
    _look_at(folder)
    with uncollected():
        import transformers as hf  # only here: the import takes seconds
        importlib.import_module("transformers.models.auto.modeling_auto")
        from transformers.utils import logging as transformers_logging

    quiet: Any = transformers_logging  # it has no type hints
    quiet.disable_progress_bar()  # the learner has a log, no terminal
    try:
        model = make(hf, **({"attn_implementation": attention} if attention else {}))
    except Exception as error:  # whatever type it has: a library of readers, each with its own
        if attention and ("attention" in str(error).lower() or attention in str(error)):
            raise ModelNotLoaded(
                f"learner.memory.attention = {attention!r}: {folder} cannot be computed with it here: {error}; set it "
                'to "auto"'
            ) from error
        raise ModelNotLoaded(
            f"{folder}: transformers cannot load it as a causal language model: {error}; check that config.json "
            "names a causal architecture that this version of transformers knows and that the weights belong to it"
        ) from error
    if getattr(model.config, "is_encoder_decoder", False):
        raise ModelNotLoaded(f"{folder}: an encoder-decoder model; busrl trains decoder-only models")
    model.train(False)
    return model


def _look_at(folder: Path) -> None:
    if not folder.is_dir():
        raise ModelNotLoaded(f"{folder}: no such folder; set model.path to a folder with config.json and *.safetensors")
    if not (folder / "config.json").is_file():
        raise ModelNotLoaded(f"{folder}: no config.json in it; set model.path to a Hugging Face model folder")
    if not any(any(folder.glob(pattern)) for pattern in WEIGHT_FILES):
        raise ModelNotLoaded(f"{folder}: no weights (*.safetensors) in it; copy them there, nothing is downloaded")


def keep_first_layers(model: Any) -> None:
    """Leaves those first layers that have every kind of attention, if its layers stand where most models have them."""
    if isinstance(layers := getattr(model.base_model, "layers", None), nn.ModuleList):
        kinds = getattr(model.config, "layer_types", None) or [""] * len(layers)
        few = 1 + max(kinds.index(kind) for kind in set(kinds))
        model.base_model.layers, model.config.num_hidden_layers = layers[:few], few


def silence_chance(model: Any) -> None:
    """Set every probability of the model's own modules to 0: dropout, skipped layers, noise of a router."""
    for module in model.modules():
        for name, value in vars(module).items():
            drawn = "drop" in name or "jitter" in name or (name == "p" and isinstance(module, nn.Dropout))
            if drawn and isinstance(value, float):
                setattr(module, name, 0.0)


def train_only(model: Any, text: str) -> None:
    """Freeze every parameter but those that `learner.train_layers` names, if it does. UserError for a wrong item."""
    named = dict(model.named_parameters())
    chosen, empty = selection.chosen(text, named)
    if empty:
        raise UserError(
            f"learner.train_layers = {text!r}: {empty[0]!r} is no part of the model: it has {_parts(named)} (a head "
            "that is the embedding itself has the embedding's name)"
        )
    for name, parameter in named.items():
        if name not in chosen:
            parameter.requires_grad_(False)


def _parts(names: Iterable[str]) -> str:
    """Layers and last names of parameters, in words."""
    every = list(names)
    numbers = [int(found[1]) for name in every if (found := re.search(r"\.(\d+)\.", name))]
    parts = sorted({name.split(".")[-2] for name in every if "." in name})
    return (f"layers 0 to {max(numbers)}, and " if numbers else "") + ", ".join(parts)


def vocabulary(model: Any) -> int:
    return int(model.get_input_embeddings().num_embeddings)


def named_weights(model: Any) -> dict[str, Tensor]:
    """The parameters by name, each once (tied weights have one name); views, not copies."""
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def copied_weights(model: Any) -> dict[str, Tensor]:
    """Weights by name as separate copies on the host: for a model whose parameters are views of others."""
    return {name: tensor.to("cpu", copy=True) for name, tensor in named_weights(model).items()}


# -- fewer bits than are trained --------------------------------------------------

ATTRIBUTE = "busrl_master"  # the attribute of a parameter


def exact(parameter: Tensor) -> Tensor:
    """The value that is trained: the master of a rounded parameter, else the parameter itself; a view."""
    found: Tensor = getattr(parameter, ATTRIBUTE, parameter)
    return found.detach()


class Masters:
    """Rounds a model in place, to train float32 masters. `named`: these, by name, with their summed gradients.

    - What a forward and a backward compute with is the master, rounded, as FSDP2 does by a mixed-precision policy.
    - A parameter's gradient goes to its master as soon as a backward has all of it: sums over micro-batches are
      float32, and no second gradient stays.
    - A frozen parameter is rounded and has no master: the base under an adapter has one copy, in few bits.
    """

    def __init__(self, model: Any, dtype: torch.dtype) -> None:
        self.named: dict[str, Tensor] = {}
        self._rounded: list[nn.Parameter] = []
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                self.named[name] = parameter.detach().to(torch.float32)
                self._rounded.append(parameter)
            parameter.data = parameter.data.to(dtype)  # buffers stay: positions need their bits
        for parameter, master in zip(self._rounded, self.named.values(), strict=True):
            setattr(parameter, ATTRIBUTE, master)
            parameter.register_post_accumulate_grad_hook(_pass_on)  # type: ignore[no-untyped-call]

    @torch.no_grad()
    def round(self) -> None:
        """After the masters have changed: the parameters are their rounded values again."""
        for parameter, master in zip(self._rounded, self.named.values(), strict=True):
            parameter.copy_(master)


def _pass_on(parameter: Tensor) -> None:
    found, master = parameter.grad, getattr(parameter, ATTRIBUTE)
    parameter.grad = None
    if found is not None and master.grad is None:
        master.grad = found.to(master.dtype)
    elif found is not None:
        master.grad.add_(found)


# -- LoRA -------------------------------------------------------------------------

OWN = "default"  # peft's name of an adapter


@dataclass(frozen=True)
class LoraSettings:
    """Settings of the adapter. `targets`: last names of layers; empty = every linear layer but the output head."""

    rank: int
    scale: float
    targets: tuple[str, ...] = ()
    dropout: float = 0.0
    seed: int = 0

    @classmethod
    def of(cls, topology: Any) -> LoraSettings | None:
        """From a topology's [lora]; None without an adapter."""
        own = topology.lora
        return cls(own.rank, own.scale, own.targets, own.dropout, topology.run.seed) if own.on else None

    def described(self) -> dict[str, Any]:
        """For the meta of a checkpoint: what an adapter has to agree in to be continued."""
        return {"rank": self.rank, "scale": self.scale, "targets": sorted(self.targets)}


class Adapter:
    """A low-rank adapter on a model: wraps its layers in place; from then on only the adapter requires gradients.

    - A wrapped layer computes x (W + scale B A): A is [rank, in], drawn from a seed, B is [out, rank], zero at first,
      so the adapter begins as nothing and a learner that starts again begins with the same numbers.
    - Its folder (adapter_config.json, adapter_model.safetensors) loads with `peft` anywhere, on the same base model.
    - Dropout acts while gradients are recorded only: scores and probes see the whole adapter.
    """

    def __init__(self, model: Any, settings: LoraSettings) -> None:
        try:
            peft: Any = importlib.import_module("peft")  # only here: it takes seconds, and is an extra
        except ImportError as problem:
            raise ModelNotLoaded(f"lora.rank = {settings.rank}: {problem}; pip install 'busrl[lora]'") from problem
        self.settings, self.model = settings, model
        alpha = settings.scale * settings.rank
        self._config = peft.LoraConfig(
            r=settings.rank, lora_alpha=int(alpha) if alpha == int(alpha) else alpha, lora_dropout=settings.dropout,
            target_modules=sorted(_targets(model, settings.targets)), bias="none", task_type="CAUSAL_LM",
        )
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(settings.seed)
            self._wrapped = peft.get_peft_model(model, self._config)
        self._layers: dict[str, Any] = {n: m for n, m in model.named_modules() if hasattr(m, "lora_A")}
        for layer in self._layers.values():
            layer.lora_dropout[OWN] = _Dropout(settings.dropout)

    def tensors(self) -> dict[str, Tensor]:
        """The adapter by the names of its file; views, valid until the next step."""
        return {
            f"{ADAPTER_PREFIX}{name}.lora_{side}.weight": exact(getattr(layer, f"lora_{side}")[OWN].weight)
            for name, layer in self._layers.items()
            for side in ("A", "B")
        }

    def off(self) -> contextlib.AbstractContextManager[None]:
        """Within it the model is its base alone."""
        found: contextlib.AbstractContextManager[None] = self._wrapped.disable_adapter()
        return found

    def base_alone(self, score: Callable[..., tuple[Tensor, Tensor]]) -> Callable[..., Tensor]:
        """The function that gives the log-probabilities of `score` under the base without the adapter."""

        def of_base(*given: Any) -> Tensor:
            with self.off():
                return score(*given)[0]

        return of_base

    def merged(self, model: Any) -> Mapping[str, Tensor]:
        """Base and adapter as one, by the names of the model alone, in the base's number type; each tensor is made when
        it is asked for, valid until the next step."""
        return Merged(model, self._layers, self.settings.scale)

    def write(self, folder: Path, tensors: Mapping[str, Tensor]) -> None:
        """The folder that peft loads."""
        from safetensors.torch import save

        config = copy.copy(self._config)
        config.inference_mode = True
        config.target_modules = sorted(config.target_modules)
        folder.mkdir(exist_ok=True)
        (folder / ADAPTER_CONFIG).write_text(json.dumps(_plain(config.to_dict()), indent=1, sort_keys=True))
        whole = {name: value.contiguous() for name, value in tensors.items()}
        (folder / ADAPTER_WEIGHTS).write_bytes(save(whole, {"format": "pt"}))

    @torch.no_grad()
    def load(self, folder: Path, spread: Callable[[Tensor, Tensor], Tensor] = lambda tensor, _: tensor) -> None:
        """Continue with an adapter that was written; ModelNotLoaded if its layers or shapes are others. `spread` gives
        of a whole tensor what a tensor of this process has of it."""
        from safetensors.torch import load_file

        found, own = load_file(folder / ADAPTER_WEIGHTS), self.tensors()
        if found.keys() != own.keys() or any(found[name].shape != value.shape for name, value in own.items()):
            raise ModelNotLoaded(f"{folder}: an adapter with other layers or another rank than [lora] asks for")
        for name, value in own.items():
            value.copy_(spread(found[name].to(value.dtype), value))
        for layer in self._layers.values():
            for part in (layer.lora_A[OWN].weight, layer.lora_B[OWN].weight):
                part.copy_(exact(part))


class Merged(Mapping[str, Tensor]):
    def __init__(self, model: Any, layers: Mapping[str, Any], scale: float) -> None:
        self._layers, self._scale = {f"{name}.weight": layer for name, layer in layers.items()}, scale
        self._base: dict[str, Tensor] = {
            name.replace(".base_layer.", "."): parameter.detach() for name, parameter in model.named_parameters()
            if ".lora_" not in name
        }
        self.described: Mapping[str, Tensor] = self._base  # names, shapes and number types, without making a tensor

    def __getitem__(self, name: str) -> Tensor:
        return self.made(name, lambda tensor: tensor)

    def made(self, name: str, whole: Callable[[Tensor], Tensor]) -> Tensor:
        """The tensor of that name, of tensors that `whole` makes whole."""
        weight = whole(self._base[name])
        if name not in self._layers:
            return weight
        layer = self._layers[name]
        a, b = whole(exact(layer.lora_A[OWN].weight)), whole(exact(layer.lora_B[OWN].weight))
        found: Tensor = torch.addmm(weight.to(b.dtype), b, a, alpha=self._scale).to(weight.dtype)
        return found

    def __iter__(self) -> Iterator[str]:
        return iter(self._base)

    def __len__(self) -> int:
        return len(self._base)


class _Dropout(nn.Module):
    """Dropout wherever gradients are recorded, whatever mode the model is in."""

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


def require_vocabulary(folder: Path, found: Any, own: Any) -> None:
    """UserError if the reference in that folder knows other tokens than the model that is trained."""
    if vocabulary(found) != vocabulary(own):
        raise UserError(
            f"model.reference = {folder}: its vocabulary has {vocabulary(found)} tokens, that of the "
            f"trained model {vocabulary(own)}; give an earlier version of the model, or none"
        )


def _plain(value: Any) -> Any:
    """Plain values as peft writes its configuration: sets as sorted lists."""
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    return sorted(value) if isinstance(value, (set, frozenset)) else value
