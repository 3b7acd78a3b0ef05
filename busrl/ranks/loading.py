"""Loading of a model for which no process has room: each rank reads the rows of its shards from the folder's files.

Used by the ranks of a learner. Talks to the weight files of a Hugging Face folder, to transformers' own table of their
names and, in `fill`, to the parts of spread tensors. Knows nothing of processes or messages.

- A part of one tensor is read at once; only a tensor that transformers makes of several (the experts of a layer) may be
  in memory whole.
- A tensor that the files do not have is an error: nothing is trained from random numbers.
- The way in which a model computes is proved on its first layers and words, in float32, before the rest is read.
"""

from __future__ import annotations

import contextlib
import copy
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from busrl.errors import ModelNotLoaded
from busrl.training import sharded
from busrl.training.model import keep_first_layers, load_empty

# In the order in which transformers looks for them: a file, or the list of several.
NAMES = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")
WORDS = 1024  # of the vocabulary, for a proof
Place = tuple[slice, ...]  # of a tensor, a slice per dimension

# -- the files --------------------------------------------------------------------


class WeightFiles:
    """The tensors of a folder by the names that `model` has for them, read in parts. `read` counts bytes, `largest`
    those of the largest part."""

    def __init__(self, folder: Path, model: Any) -> None:
        """ModelNotLoaded if there are none, or quantised ones."""
        if getattr(model.config, "quantization_config", None) is not None:
            raise ModelNotLoaded(f"{folder}: its weights are quantised, which ranks cannot read; use ranks = 1")
        self.folder, self.read, self.largest = folder, 0, 0
        self._readers = dict(_readers(folder))
        self._model = model
        self._sources = _sources(model, list(self._readers))
        aliases: dict[int, list[str]] = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            aliases.setdefault(id(parameter), []).append(name)
        self._others = {name: names for names in aliases.values() for name in names}

    def part(self, name: str, place: Place) -> Tensor:
        """Reads that part of the model's tensor, in the number type of the file; ModelNotLoaded if no file has it."""
        alias = next((candidate for candidate in self._others.get(name, [name]) if candidate in self._sources), None)
        if alias is None:
            raise ModelNotLoaded(f"{self.folder}: no file in it has {name!r}; copy all weight files of the model there")
        part = self._sources[alias].part(alias, place, self._readers, self._model)
        self.read, self.largest = self.read + part.nbytes, max(self.largest, part.nbytes)
        return part


Reader = Callable[[Place], Tensor]  # of one tensor of a file


def _readers(folder: Path) -> Iterator[tuple[str, Reader]]:
    """Every tensor of the folder's files by its name there."""
    first = next((folder / name for name in NAMES if (folder / name).is_file()), None)
    if first is None:
        raise ModelNotLoaded(f"{folder}: none of {', '.join(NAMES)} in it; copy the model's weights there")
    files = [first]
    if first.suffix == ".json":
        files = [folder / name for name in sorted(set(json.loads(first.read_text())["weight_map"].values()))]
    for path in files:
        if not path.is_file():
            raise ModelNotLoaded(f"{path} is missing, {first.name} names it; copy it there")
        yield from _in_safetensors(path) if path.suffix == ".safetensors" else _in_pickle(path)


def _in_safetensors(path: Path) -> Iterator[tuple[str, Reader]]:
    from safetensors import safe_open

    opened: Any = safe_open(str(path), framework="pt")  # mapped, not read; stays open with its readers

    def reader(name: str) -> Reader:
        return lambda place: opened.get_slice(name)[place] if place else opened.get_tensor(name)

    for name in opened.keys():  # noqa: SIM118 - it cannot be iterated
        yield name, reader(name)


def _in_pickle(path: Path) -> Iterator[tuple[str, Reader]]:
    tensors: dict[str, Tensor] = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    for name, tensor in tensors.items():
        yield name, tensor.__getitem__


# -- names ----------------------------------------------------------------------------


@dataclass
class _Source:
    """The origin of a tensor of a model: one of a file, or several that transformers makes it of."""

    keys: list[tuple[str, str]] = field(default_factory=list)  # pattern of transformers' table, name in the file
    converter: Any = None
    first: str = ""  # the name that the converter gives to the first of what it makes

    def part(self, name: str, place: Place, readers: dict[str, Reader], model: Any) -> Tensor:
        if self.converter is None:
            return readers[self.keys[0][1]](place)
        keys, left = self._needed(place)
        converter = copy.deepcopy(self.converter)
        for pattern, key in keys:
            converter.add_tensor(self.first, key, pattern, lambda key=key: readers[key]((slice(None),)))
        converted = converter.convert(self.first, model=model, config=model.config)[name]
        tensor: Tensor = converted[0] if isinstance(converted, list) else converted
        return tensor[left]

    def _needed(self, place: Place) -> tuple[list[tuple[str, str]], Place]:
        """The tensors of files that these rows need (of experts only the wanted ones), and the rows of the result."""
        operation = self.converter.operations[0]
        if type(operation).__name__ != "MergeModulelist" or operation.dim or not place:
            return self.keys, place
        by_pattern: dict[str, list[str]] = {}
        for pattern, key in self.keys:
            by_pattern.setdefault(pattern, []).append(key)
        keys = [(pattern, key) for pattern, keys_ in by_pattern.items() for key in keys_[place[0]]]
        return keys, (slice(None), *place[1:])


def _sources(model: Any, keys: Sequence[str]) -> dict[str, _Source]:
    """By the model's names; as transformers 5 finds them. Before it files had the model's names."""
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key
    except ImportError:
        return {key: _Source([("", key)]) for key in keys}
    table = get_model_conversion_mapping(model)
    renamings = [entry for entry in table if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in table if isinstance(entry, WeightConverter)]
    of_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    wanted, sources = model.state_dict(), dict[str, _Source]()
    for key in sorted(keys, key=dot_natural_key):
        name, pattern = rename_source_key(key, renamings, converters, model.base_model_prefix, wanted)
        if name not in wanted and key in wanted:
            name, pattern = key, None
        if pattern is None:
            sources[name] = _Source([("", key)])
            continue
        targets = of_pattern[pattern].target_patterns
        source = sources.setdefault(name, _Source(converter=of_pattern[pattern], first=name))
        source.keys.append((pattern, key))
        sources.update({name.replace(targets[0], target): source for target in targets[1:]})
    return sources


# -- filling a model ------------------------------------------------------------------


def fill(model: Any, files: WeightFiles, device: torch.device, buffers_on: torch.device | None = None) -> None:
    """Give memory to every parameter on `meta`, and read its values from the files: this rank's part of a spread one.
    Other parameters stay as they are."""
    absent = {name for name, parameter in model.named_parameters() if parameter.device.type == "meta"}
    _give_memory(model, device, buffers_on or device)
    persistent = model.state_dict().keys()
    buffers = {name: buffer for name, buffer in model.named_buffers() if name in persistent}
    parameters = {name: parameter for name, parameter in model.named_parameters() if name in absent}
    with torch.no_grad():
        for name, tensor in (parameters | buffers).items():
            local = sharded.local(tensor)
            if local.numel():
                local.copy_(files.part(name.replace(".base_layer.", "."), sharded.within(tensor)))


def _give_memory(model: Any, device: torch.device, buffers_on: torch.device) -> None:
    """Give memory to every parameter on `meta`; a parameter that several modules share stays shared."""
    replaced: dict[nn.Parameter, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            if parameter.device.type == "meta" and not hasattr(parameter, "device_mesh"):
                empty = torch.empty_like(parameter, device=device)
                replaced.setdefault(parameter, nn.Parameter(empty, parameter.requires_grad))
                setattr(module, name, replaced[parameter])
    # FSDP2, which holds the shards of a parameter, notices this call, but not the setting of attributes.
    model._apply(lambda tensor: tensor if tensor.device.type != "meta" else torch.empty_like(
        tensor, device=device if isinstance(tensor, nn.Parameter) else buffers_on))


@contextlib.contextmanager
def standing_in(model: Any) -> Iterator[None]:
    """Within it every parameter on `meta` is zeros on the CPU, with memory for one value: for code that puts further
    parameters on the device of those of a model."""
    absent = [(module, name, parameter) for module in model.modules()
              for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False)]
    for module, name, parameter in absent:
        zeros = torch.zeros((), dtype=parameter.dtype).expand(parameter.shape)
        setattr(module, name, nn.Parameter(zeros, parameter.requires_grad))
    try:
        yield
    finally:
        for module, name, parameter in absent:
            setattr(module, name, parameter.requires_grad_(getattr(module, name).requires_grad))


# -- a proof before all is read ----------------------------------------------------------


def first_layers(folder: Path, attention: str = "") -> Any:
    """The folder's model in float32 with those first layers that have every kind of attention, and the first words of
    its vocabulary: enough to prove a way of computing on."""
    model = load_empty(folder, attention=attention)
    files = WeightFiles(folder, model)
    keep_first_layers(model)
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    words, tied = min(WORDS, embedding.weight.shape[0]), head is not None and head.weight is embedding.weight
    for module in (embedding, head):
        if module is not None:
            _shorten(module, words)
    if tied:
        head.weight = embedding.weight
    fill(model, files, torch.device("cpu"))
    return model


def _shorten(module: Any, rows: int) -> None:
    """A table of words, on `meta`, for the first of them alone."""
    for name, parameter in module.named_parameters(recurse=False):
        setattr(module, name, nn.Parameter(parameter[:rows]))
    if isinstance(module, nn.Embedding):
        module.num_embeddings = rows
        module.padding_idx = None if (module.padding_idx or 0) >= rows else module.padding_idx
    else:
        module.out_features = rows
