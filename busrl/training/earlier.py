"""A model with other weights for a moment: those of an earlier version, of a part of its layers, or fewer bits.

Used by the parity gate, which scores tokens under weights that an engine may have had. Talks to a model's parameters
and, for keys of an earlier version, to its cache. Knows nothing of engines or of the meaning of versions.

- Parameters are pointed to other tensors and back: the tensors of before are restored bit for bit, also after an error.
- The copy has only the trained parameters, in host memory; it is made once and written over.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from busrl.data.vocabulary import TokenRows
from busrl.training import packing
from busrl.training.batch import Sample
from busrl.training.model import attention_of

if TYPE_CHECKING:
    from busrl.training.forward import Replay

LAYER = re.compile(r"^.*?\.\d+(?=\.)")  # of a parameter's name, up to the number of its layer


class Earlier:
    """Weights of `version`; None before the first `keep`."""

    def __init__(self) -> None:
        self.version: int | None = None
        self._copies: dict[str, Tensor] = {}

    @torch.no_grad()
    def keep(self, model: Any, version: int) -> None:
        """Copy these weights, which are of `version`."""
        self.version = None  # until all parameters are copied
        for name, parameter in model.named_parameters():
            if not parameter.requires_grad:
                continue
            if name in self._copies and self._copies[name].shape == parameter.shape:
                self._copies[name].copy_(parameter)
            else:
                self._copies[name] = parameter.detach().to("cpu", copy=True)
        self.version = version

    def parts(self) -> dict[str, list[str]]:
        """Names of parameters by layer; one outside of all layers stands alone under its name."""
        by_layer: dict[str, list[str]] = {}
        for name in self._copies:
            layer = LAYER.match(name)
            by_layer.setdefault(layer[0] if layer else name, []).append(name)
        return by_layer

    @contextlib.contextmanager
    def in_place(self, model: Any, names: Iterable[str] | None = None) -> Iterator[None]:
        """The model with the earlier values of these parameters, or of all."""
        wanted = set(self._copies if names is None else names)
        parameters = {name: parameter for name, parameter in model.named_parameters() if name in wanted}
        values = (self._copies[name].to(parameter.device, parameter.dtype) for name, parameter in parameters.items())
        with pointed(parameters.values(), values):
            yield


@contextlib.contextmanager
def in_type(model: Any, dtype: str) -> Iterator[None]:
    """The model with its parameters in another number type."""
    every = list(model.parameters())
    with pointed(every, (parameter.data.to(getattr(torch, dtype)) for parameter in every)):
        yield


@contextlib.contextmanager
def pointed(parameters: Iterable[Any], values: Iterable[Tensor]) -> Iterator[None]:
    """Within it each parameter has another tensor."""
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
    model: Any, earlier: Earlier, sample: Sample, cached: int, token_rows: TokenRows, replay: Replay | None = None
) -> npt.NDArray[np.float32]:
    """The log-probability of each generated token, over `token_rows`, with keys and values of the earlier weights for
    the first `cached` tokens of the prompt, and the present weights for all else. `replay`: of the model's routers."""
    ids = torch.from_numpy(sample.pieces[0].ids).long()[None].to(model.device)

    def routed(begin: int, end: int) -> None:
        if replay is not None:
            replay.use_rows(sample, begin, end, model.device)

    with _cacheable(model):
        with earlier.in_place(model):
            routed(0, cached)
            past = model(input_ids=ids[:, :cached], use_cache=True).past_key_values
        routed(cached, ids.shape[1] - 1)
        logits = model(input_ids=ids[:, cached:-1], past_key_values=past, use_cache=True).logits[0].float()
    logprobs = torch.log_softmax(token_rows.mask(logits) / sample.temperature, -1)
    chosen = logprobs.gather(-1, ids[0, cached + 1 :, None])[-sample.generated :, 0]
    row: npt.NDArray[np.float32] = chosen.cpu().numpy()
    return row


@contextlib.contextmanager
def _cacheable(model: Any) -> Iterator[None]:
    """The model with an attention that knows of a cache, and not computing its layers again."""
    training, attention = model.training, attention_of(model)
    try:
        model.eval()
        if attention == packing.NAME:
            model.set_attn_implementation("sdpa")
        yield
    finally:
        if attention == packing.NAME:
            packing.adopt(model)
        model.train(training)
