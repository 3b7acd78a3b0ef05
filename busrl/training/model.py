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

from busrl.algorithms import trained_parameters
from busrl.data.pretrained import require_whole
from busrl.errors import ModelNotLoaded, UserError
from busrl.paths import ADAPTER_CONFIG, ADAPTER_PREFIX, ADAPTER_WEIGHTS
from busrl.system.imports import uncollected
from busrl.weights.tensors import added

WEIGHT_FILES = ("*.safetensors", "pytorch_model*.bin")


def load(
    path: str | Path, dtype: torch.dtype = torch.float32, device: torch.device | None = None, attention: str = "",
) -> Any:
    """The model of that folder in evaluation mode, on the device (the CPU), or ModelNotLoaded with the path and the
    remedy. `attention`: an implementation as transformers names it; empty: the model's own choice."""
    def read(hf: Any, **chosen: str) -> Any:
        model, info = hf.AutoModelForCausalLM.from_pretrained(
            str(path), dtype=dtype, local_files_only=True, output_loading_info=True, **chosen)
        require_whole(path, info)
        return model

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
    """Make the model of that folder, in evaluation mode; ModelNotLoaded if it cannot be trained."""
    _look_at(folder)
    with uncollected():
        import transformers as hf  # only here: the import takes seconds
        importlib.import_module("transformers.models.auto.modeling_auto")
        from transformers.utils import logging as transformers_logging

    quiet: Any = transformers_logging  # it has no type hints
    quiet.disable_progress_bar()  # the learner has a log, no terminal
    try:
        model = make(hf, **({"attn_implementation": attention} if attention else {}))
    except ModelNotLoaded:
        raise
    except Exception as error:  # of any type: the library's readers have many
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
    """Remove all layers after the first ones that have every kind of attention, if they stand where most models have
    them."""
    if isinstance(layers := getattr(model.base_model, "layers", None), nn.ModuleList):
        kinds = getattr(model.config, "layer_types", None) or [""] * len(layers)
        few = 1 + max(kinds.index(kind) for kind in set(kinds))
        model.base_model.layers, model.config.num_hidden_layers = layers[:few], few


def silence_chance(model: Any) -> None:
    """Set every probability of the model's own modules to 0: dropout, skipped layers, noise of a router."""
    for module in model.modules():
        for name, value in vars(module).items():
            is_random = "drop" in name or "jitter" in name or (name == "p" and isinstance(module, nn.Dropout))
            if is_random and isinstance(value, float):
                setattr(module, name, 0.0)


def train_only(model: Any, text: str) -> None:
    """Freeze every parameter but those that `learner.train_layers` names, if it does. UserError for a wrong item."""
    parameters = dict(model.named_parameters())
    chosen, empty = trained_parameters.chosen(text, parameters)
    if empty:
        raise UserError(
            f"learner.train_layers = {text!r}: {empty[0]!r} is no part of the model: it has {_parts(parameters)} (a "
            "head that is the embedding itself has the embedding's name)"
        )
    for name, parameter in parameters.items():
        if name not in chosen:
            parameter.requires_grad_(False)


def _parts(names: Iterable[str]) -> str:
    """Layers and last names of parameters, in words."""
    every = list(names)
    numbers = [int(number[1]) for name in every if (number := re.search(r"\.(\d+)\.", name))]
    parts = sorted({name.split(".")[-2] for name in every if "." in name})
    return (f"layers 0 to {max(numbers)}, and " if numbers else "") + ", ".join(parts)


def attention_of(model: Any) -> str:
    """The implementation of a model's attention, as transformers names it."""
    return str(model.config._attn_implementation)


def vocabulary(model: Any) -> int:
    return int(model.get_input_embeddings().num_embeddings)


def named_weights(model: Any) -> dict[str, Tensor]:
    """The parameters by name; tied weights have one name. Views, not copies."""
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def copied_weights(model: Any) -> dict[str, Tensor]:
    """Weights by name as separate copies on the host: for a model whose parameters are views of others."""
    return {name: tensor.to("cpu", copy=True) for name, tensor in named_weights(model).items()}


# -- fewer bits than are trained --------------------------------------------------

ATTRIBUTE = "busrl_master"  # the attribute of a parameter


def exact(parameter: Tensor) -> Tensor:
    """The value that is trained: the master of a rounded parameter, else the parameter itself; a view."""
    master: Tensor = getattr(parameter, ATTRIBUTE, parameter)
    return master.detach()


class Masters:
    """Rounds a model in place, to train float32 masters. `named`: the masters by name, with their summed gradients.

    - Forward and backward compute with the rounded master, as with FSDP2 under a mixed-precision policy.
    - A parameter's gradient goes to its master as soon as a backward has computed it: sums over micro-batches are
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
        """Set the parameters to the rounded masters, after these have changed."""
        for parameter, master in zip(self._rounded, self.named.values(), strict=True):
            parameter.copy_(master)


def _pass_on(parameter: Tensor) -> None:
    gradient, master = parameter.grad, getattr(parameter, ATTRIBUTE)
    parameter.grad = None
    if gradient is not None and master.grad is None:
        master.grad = gradient.to(master.dtype)
    elif gradient is not None:
        master.grad.add_(gradient)


# -- LoRA -------------------------------------------------------------------------

OWN = "default"  # peft's name of an adapter
WRAPPED = ".base_layer"  # in the names of a wrapped layer's own parameters
PLACE = re.compile(r"\.([^.]+)\.(\d+)\.")  # the first list of layers in a name, and the number in it


@dataclass(frozen=True)
class LoraSettings:
    """Settings of the adapter. `targets`: last names of linear layers; empty = all but the output head. `layers`:
    "20-31" and the like; empty = all. `experts`: those of a mixture get one too."""

    rank: int
    scale: float
    targets: tuple[str, ...] = ()
    dropout: float = 0.0
    seed: int = 0
    layers: str = ""
    experts: bool = False

    @classmethod
    def of(cls, topology: Any) -> LoraSettings | None:
        """From a topology's [lora]; None without an adapter."""
        lora = topology.lora
        if not lora.on:
            return None
        return cls(lora.rank, lora.scale, lora.targets, lora.dropout, topology.run.seed, lora.layers, lora.experts)

    def described(self) -> dict[str, Any]:
        """The settings that a checkpoint's adapter must have to be continued, for its meta."""
        described = {"rank": self.rank, "scale": self.scale, "targets": sorted(self.targets)}
        more = {"layers": self.layers, "experts": self.experts}
        return described | {name: value for name, value in more.items() if value}


class Adapter:
    """A low-rank adapter on a model: wraps its layers in place; from then on only the adapter requires gradients.

    - A wrapped layer computes x (W + scale B A): A is [rank, in], drawn from a seed, B is [out, rank], zero at first,
      so the adapter begins as nothing and a learner that starts again begins with the same numbers.
    - The experts of a layer are one tensor [experts, out, in], with an A and a B for each of them; peft keeps those as
      [experts * rank, in] and [out, rank * experts].
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
            **_chosen_layers(model, settings), **_experts(model, settings),
        )
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(settings.seed)
            self.peft_model = peft.get_peft_model(model, self._config)
        self._layers: dict[str, Any] = {n: m for n, m in model.named_modules() if hasattr(m, "lora_A")}
        for layer in self._layers.values():
            if not hasattr(layer, "parameter_name"):  # of experts peft takes none
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
        context: contextlib.AbstractContextManager[None] = self.peft_model.disable_adapter()
        return context

    def base_alone(self, score: Callable[..., tuple[Tensor, Tensor]]) -> Callable[..., Tensor]:
        """The function that gives the log-probabilities of `score` under the base without the adapter."""

        def of_base(*arguments: Any) -> Tensor:
            with self.off():
                return score(*arguments)[0]

        return of_base

    def merged(self, model: Any) -> Mapping[str, Tensor]:
        """Base and adapter as one, by the names of the model alone, in the base's number type. Each access computes a
        tensor, which is valid until the next step."""
        return Merged(model, self._layers, self.settings.scale)

    def write(self, folder: Path, tensors: Mapping[str, Tensor]) -> None:
        """Write the folder that peft loads."""
        from safetensors.torch import save

        config = copy.copy(self._config)
        config.inference_mode = True
        config.target_modules = sorted(config.target_modules)
        folder.mkdir(exist_ok=True)
        (folder / ADAPTER_CONFIG).write_text(json.dumps(_plain(config.to_dict()), indent=1, sort_keys=True))
        contiguous = {name: value.contiguous() for name, value in tensors.items()}
        (folder / ADAPTER_WEIGHTS).write_bytes(save(contiguous, {"format": "pt"}))

    @torch.no_grad()
    def load(self, folder: Path, spread: Callable[[Tensor, Tensor], Tensor] = lambda tensor, _: tensor) -> None:
        """Continue with the adapter of a folder; ModelNotLoaded if its layers or shapes are others. `spread` gives the
        part of a whole tensor that a tensor of this process has."""
        from safetensors.torch import load_file

        saved, tensors = load_file(folder / ADAPTER_WEIGHTS), self.tensors()
        if saved.keys() != tensors.keys() or any(saved[name].shape != value.shape for name, value in tensors.items()):
            raise ModelNotLoaded(f"{folder}: an adapter with other layers or another rank than [lora] asks for")
        for name, value in tensors.items():
            value.copy_(spread(saved[name].to(value.dtype), value))
        for layer in self._layers.values():
            for part in (layer.lora_A[OWN].weight, layer.lora_B[OWN].weight):
                part.copy_(exact(part))


class Merged(Mapping[str, Tensor]):
    def __init__(self, model: Any, layers: Mapping[str, Any], scale: float) -> None:
        self._layers, self._scale = {
            f"{name.replace(WRAPPED, '')}.{getattr(layer, 'parameter_name', 'weight')}": layer
            for name, layer in layers.items()
        }, scale
        self._base: dict[str, Tensor] = {
            name.replace(WRAPPED, ""): parameter.detach() for name, parameter in model.named_parameters()
            if ".lora_" not in name
        }
        self.described: Mapping[str, Tensor] = self._base  # names, shapes and number types, without making a tensor

    def __getitem__(self, name: str) -> Tensor:
        return self.merge(name, lambda tensor: tensor)

    def merge(self, name: str, gather: Callable[[Tensor], Tensor]) -> Tensor:
        """Compute the tensor of that name from its parts, each passed through `gather`."""
        weight = gather(self._base[name])
        if name not in self._layers:
            return weight
        layer = self._layers[name]
        a, b = gather(exact(layer.lora_A[OWN].weight)), gather(exact(layer.lora_B[OWN].weight))
        merged = added(weight.to(b.dtype), b, a, self._scale, getattr(layer.get_base_layer(), "is_transposed", False))
        return merged.to(weight.dtype)

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
    layers = ((name, module) for name, module in model.named_modules() if isinstance(module, nn.Linear))
    by_last_name = {name.rpartition(".")[2]: module for name, module in layers}
    linear = {name for name, module in by_last_name.items() if module is not head}
    if missing := sorted(set(wanted) - linear):
        raise ModelNotLoaded(f"lora.targets: the model has no linear layer {missing[0]!r}; it has {sorted(linear)}")
    if not linear:
        raise ModelNotLoaded("lora.rank: the model has no linear layer that an adapter could be put on")
    return set(wanted) or linear


def _chosen_layers(model: Any, settings: LoraSettings) -> dict[str, Any]:
    """The arguments by which peft adapts the layers of `lora.layers` alone; none where it names none. ModelNotLoaded
    for one that the model does not have."""
    if not settings.layers:
        return {}
    places = {(place[1], int(place[2])) for name, _ in model.named_modules() if (place := PLACE.search(f".{name}."))}
    lists, count = sorted({name for name, _ in places}), 1 + max((number for _, number in places), default=-1)
    wanted = sorted(trained_parameters.layers(settings.layers, count))
    if len(lists) != 1 or not wanted or trained_parameters.highest(settings.layers) >= count:
        rule = f"it has the layers 0 to {count - 1}" if len(lists) == 1 else f"its layers are in {len(lists)} lists"
        raise ModelNotLoaded(f"lora.layers = {settings.layers!r}: no such layers in {type(model).__name__}: {rule}")
    return {"layers_to_transform": wanted, "layers_pattern": lists}


def _experts(model: Any, settings: LoraSettings) -> dict[str, Any]:
    """The argument by which peft adapts experts; none where they get no adapter. ModelNotLoaded where no layer has its
    experts in one parameter."""
    if not settings.experts:
        return {}
    every = [name for name, parameter in model.named_parameters() if parameter.ndim == 3 and ".experts." in name]
    wanted = every
    if settings.layers:  # peft asks for the layer of a module alone
        wanted = sorted(trained_parameters.chosen(settings.layers, every)[0])
    if not wanted:
        where = f" in the layers {settings.layers}" if every else ""
        raise ModelNotLoaded(
            f"lora.experts: {type(model).__name__} has no parameter that holds the experts of a layer{where}; false "
            "(experts that are linear layers of their own are among lora.targets)"
        )
    return {"target_parameters": wanted}


def require_vocabulary(folder: Path, reference: Any, trained: Any) -> None:
    """UserError if the reference of that folder has another number of tokens than the trained model."""
    if vocabulary(reference) != vocabulary(trained):
        raise UserError(
            f"model.reference = {folder}: its vocabulary has {vocabulary(reference)} tokens, that of the "
            f"trained model {vocabulary(trained)}; give an earlier version of the model, or none"
        )


def _plain(value: Any) -> Any:
    """Plain values as peft writes its configuration: sets as sorted lists."""
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    return sorted(value) if isinstance(value, (set, frozenset)) else value
