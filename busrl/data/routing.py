"""Routes of a mixture of experts: which layers have some, read from a model's config, and whether routes are sound.

Routes are an array [rows, layers with experts, top_k] of expert ids, a row for each position that a model read. Pure:
knows nothing of engines, slots, logs or torch.

- Row j of the routes of generated tokens is of the position that PREDICTS token j; the last token has none.
- Ids that pass `first_fault` may be given to a model: an id of no expert, or one twice, is found here and never there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from busrl.data.pretrained import LAYERS, size_in
from busrl.data.vocabulary import language_of
from busrl.topology.learner import Routing

if TYPE_CHECKING:
    from busrl.topology import Topology

__all__ = ["Routed", "Routing", "first_fault", "routing_of"]

EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
CHOSEN = ("num_experts_per_tok",)
FEW = 16  # experts of a token


def routing_of(config: Mapping[str, Any]) -> Routing | None:
    """The shape of the routes of the model whose config.json this is; None for a dense one."""
    text = language_of(config)
    experts, top_k = size_in(text, *EXPERTS), size_in(text, *CHOSEN)
    layers = tuple(layer for layer in range(size_in(text, *LAYERS)) if _has_experts(text, layer))
    return Routing(layers, experts, top_k) if layers and 0 < top_k <= experts and experts > 1 else None


def _has_experts(text: Mapping[str, Any], layer: int) -> bool:
    """Tell whether a layer has experts, by the keys of all families together: each has a few of them."""
    dense, step, every = text.get("mlp_only_layers"), text.get("decoder_sparse_step"), text.get("moe_layer_freq")
    if isinstance(dense, list) and layer in dense:
        return False
    if isinstance(step, int) and step > 0 and (layer + 1) % step:
        return False
    if isinstance(kinds := text.get("mlp_layer_types"), list):  # a word for each layer
        return layer < len(kinds) and kinds[layer] != "dense"
    if isinstance(every, list):  # a flag for each layer
        return layer < len(every) and bool(every[layer])
    if isinstance(every, int) and every > 0 and layer % every:
        return False
    return layer >= size_in(text, "first_k_dense_replace")


@dataclass(frozen=True)
class Routed:
    """The routes that the samples of a run have: their shape, and whether those of prompts are among them."""

    routing: Routing
    prompts: bool

    @classmethod
    def of(cls, topology: Topology) -> Routed | None:
        """The routes of a run's samples; None where they have none."""
        routing = topology.derived.routing
        return None if routing is None else cls(routing, topology.learner.routes_of == "all")


def first_fault(routes: npt.NDArray[Any], rows: int, routing: Routing) -> str:
    """The first rule that the routes of `rows` positions break, with row and layer; "" for sound ones."""
    expected = (rows, *routing.shape)
    if routes.shape != expected:
        return f"routes {list(routes.shape)}: must be {list(expected)} (rows, layers with experts, experts of a token)"
    if routes.dtype != routing.dtype:
        return f"routes are {routes.dtype}: must be {routing.dtype}, as ids of {routing.experts} experts"
    beyond = routes >= routing.experts
    if beyond.any():
        row, layer, at = np.argwhere(beyond)[0].tolist()
        return f"row {row}, layer {routing.layers[layer]}: expert {routes[row, layer, at]} of {routing.experts}"
    twice = _with_one_twice(routes.reshape(-1, routing.top_k))
    if twice.any():
        row, layer = divmod(int(np.argmax(twice)), len(routing.layers))
        ids, counts = np.unique(routes[row, layer], return_counts=True)
        return f"row {row}, layer {routing.layers[layer]}: expert {ids[np.argmax(counts > 1)]} twice"
    return ""


def _with_one_twice(chosen: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
    """Flags of the rows that have an id twice. Each pair of columns is compared, which for few is some twenty times as
    fast as to sort short rows."""
    if chosen.shape[1] > FEW:
        ordered = np.sort(chosen, axis=1)
        return np.asarray((ordered[:, 1:] == ordered[:, :-1]).any(axis=1))
    columns, twice = np.ascontiguousarray(chosen.T), np.zeros(len(chosen), np.bool_)
    for second in range(1, len(columns)):
        for first in range(second):
            twice |= columns[first] == columns[second]
    return twice
