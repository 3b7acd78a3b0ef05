"""A model with other weights for a moment: those of an earlier version, of a part of its layers, or fewer bits.

Used by the parity gate, which scores the same tokens under what an engine may have had. Talks to a model's parameters
and, for keys of an earlier version, to its cache. Knows nothing of engines or versions' meaning.

- Parameters are pointed to other tensors and back: what was there is there again, bit for bit, also after an error.
- The copy is of what is trained alone, in host memory; it is made once and written over.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from busrl.data.vocabulary import TokenRows
from busrl.training import packing
from busrl.training.batch import Sample

LAYER = re.compile(r"^.*?\.\d+(?=\.)")  # of a parameter's name, up to the number of its layer


class Earlier:
    """Weights of `version`; None before the first `keep`."""

    def __init__(self) -> None:
        self.version: int | None = None
        self._kept: dict[str, Tensor] = {}

    @torch.no_grad()
    def keep(self, model: Any, version: int) -> None:
        """Copy these weights, which are of `version`."""
        self.version = None  # until it is whole
        for name, parameter in model.named_parameters():
            if not parameter.requires_grad:
                continue
            if name in self._kept and self._kept[name].shape == parameter.shape:
                self._kept[name].copy_(parameter)
            else:
                self._kept[name] = parameter.detach().to("cpu", copy=True)
        self.version = version

    def parts(self) -> dict[str, list[str]]:
        """Names of parameters by layer; those outside of any layer each by its own name."""
        found: dict[str, list[str]] = {}
        for name in self._kept:
            layer = LAYER.match(name)
            found.setdefault(layer[0] if layer else name, []).append(name)
        return found

    @contextlib.contextmanager
    def in_place(self, model: Any, names: Iterable[str] | None = None) -> Iterator[None]:
        """The model with the earlier values of these parameters, or of all."""
        wanted = set(self._kept if names is None else names)
        own = {name: parameter for name, parameter in model.named_parameters() if name in wanted}
        with pointed(own.values(), (self._kept[name].to(own[name].device, own[name].dtype) for name in own)):
            yield


@contextlib.contextmanager
def in_type(model: Any, dtype: str) -> Iterator[None]:
    """The model with its parameters in another number type."""
    every = list(model.parameters())
    with pointed(every, (one.data.to(getattr(torch, dtype)) for one in every)):
        yield


@contextlib.contextmanager
def pointed(parameters: Iterable[Any], values: Iterable[Tensor]) -> Iterator[None]:
    """Each parameter with another tensor meanwhile."""
    before: list[tuple[Any, Tensor]] = []
    try:
        for parameter, value in zip(parameters, values, strict=True):
            before.append((parameter, parameter.data))
            parameter.data = value
        yield
    finally:
        for parameter, data in before:
            parameter.data = data


@torch.no_grad()
def over_old_keys(
    model: Any, earlier: Earlier, sample: Sample, cached: int, known: TokenRows
) -> npt.NDArray[np.float32]:
    """The log-probability of each generated token, among the `known` ones, if the keys and values of the first `cached`
    tokens of the prompt are those of the earlier weights, and everything else is of the present ones."""
    ids = torch.from_numpy(sample.pieces[0].ids).long()[None].to(model.device)
    with _cacheable(model):
        with earlier.in_place(model):
            past = model(input_ids=ids[:, :cached], use_cache=True).past_key_values
        logits = model(input_ids=ids[:, cached:-1], past_key_values=past, use_cache=True).logits[0].float()
    logprobs = torch.log_softmax(known.mask(logits) / sample.temperature, -1)
    drawn = logprobs.gather(-1, ids[0, cached + 1 :, None])[-sample.generated :, 0]
    found: npt.NDArray[np.float32] = drawn.cpu().numpy()
    return found


@contextlib.contextmanager
def _cacheable(model: Any) -> Iterator[None]:
    """The model with an attention that knows of a cache, and not computing its layers again."""
    training, attention = model.training, model.config._attn_implementation
    try:
        model.eval()
        if attention == packing.NAME:
            model.set_attn_implementation("sdpa")
        yield
    finally:
        if attention == packing.NAME:
            packing.adopt(model)
        model.train(training)
