"""Weights of a whole model from its Hugging Face folder, into tensors that are there.

Used by the tuner and the engines of a service that trains all weights. Talks to files alone. Knows nothing of who
wrote a folder.

- A tensor is read at a time: there is no second copy of the model. A folder whose tensors have other names than the
  model's parameters is read by transformers, all of it.
- Names and shapes are compared before a tensor is touched: a folder that is refused changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from busrl.errors import ModelNotLoaded, WeightsRefused
from busrl.training.model import load, named_weights


def tensors_in(folder: Path) -> dict[str, Any]:
    """The file that has each tensor of a folder, by the tensor's name. WeightsRefused if there is none to be read."""
    from safetensors import safe_open

    try:
        files: list[Any] = [safe_open(str(path), "pt") for path in sorted(folder.glob("*.safetensors"))]
    except Exception as problem:  # the system's, safetensors' own types
        raise WeightsRefused(f"{folder}: weights that cannot be read: {problem}") from problem
    if not files:
        raise WeightsRefused(f"{folder}: no weights (*.safetensors) in it")
    return {name: file for file in files for name in [*file.keys()]}


def read_all(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """Name and value of each tensor of a folder, each read when it is asked for."""
    return ((name, file.get_tensor(name)) for name, file in tensors_in(folder).items())


@torch.no_grad()
def read_into(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    """Copy a folder's weights into the parameters of a model, by their names."""
    files = tensors_in(folder)
    if not tensors.keys() <= files.keys():
        _read_by_transformers(folder, tensors)
        return
    _require_shapes(folder, tensors, {name: tuple(files[name].get_slice(name).get_shape()) for name in tensors})
    for name, tensor in tensors.items():
        tensor.copy_(files[name].get_tensor(name))


def _read_by_transformers(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    try:
        read = named_weights(load(folder, next(iter(tensors.values())).dtype))
    except ModelNotLoaded as problem:
        raise WeightsRefused(str(problem)) from problem
    _require_shapes(folder, tensors, {name: tuple(tensor.shape) for name, tensor in read.items()})
    for name, tensor in tensors.items():
        tensor.copy_(read[name])


def _require_shapes(folder: Path, tensors: Mapping[str, Tensor], shapes: Mapping[str, tuple[int, ...]]) -> None:
    for name, tensor in tensors.items():
        if shapes.get(name) != tuple(tensor.shape):
            raise WeightsRefused(f"{folder}: {name} has the shape {shapes.get(name)} there, and {tuple(tensor.shape)} "
                                 "in the model that is served")
