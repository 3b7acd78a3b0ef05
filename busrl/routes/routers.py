"""The routers of a model that is a mixture of experts: the modules that choose experts for each token.

Used where routes are noted (`capture`) and where they are given (`replay`). Knows a model by its modules alone: it
imports no torch.
"""

from __future__ import annotations

import re
from typing import Any

from busrl.data.routing import Routing
from busrl.errors import ModelNotLoaded

LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")  # of a module's name
OWN = 'learner.routes = "own"'
NEITHER = f"{OWN} and learner.balance = 0"


def routers_of(model: Any, routing: Routing) -> list[Any]:
    """The router of each layer of `routing`, in order; ModelNotLoaded where a layer has none, or several."""
    found: dict[int, list[Any]] = {}
    for name, module in model.named_modules():
        if type(module).__name__.lower().endswith("router") and (layer := LAYER.search(name)):
            found.setdefault(int(layer[1]), []).append(module)
    if sorted(found) != list(routing.layers) or any(len(modules) > 1 for modules in found.values()):
        counts = {layer: len(modules) for layer, modules in sorted(found.items())}
        raise ModelNotLoaded(
            f"{type(model).__name__}: by its config.json its layers {list(routing.layers)} choose experts, but routers "
            f"(by layer) are {counts or 'nowhere'}; set {NEITHER}"
        )
    return [found[layer][0] for layer in routing.layers]


def choice_of(module: Any, output: Any) -> tuple[Any, Any, Any]:
    """The logits, weights and expert ids that a router gave; ModelNotLoaded for one that gives something else."""
    if isinstance(output, tuple) and len(output) == 3 and all(part.ndim == 2 for part in output):
        logits, weights, ids = output
        if weights.shape == ids.shape and len(logits) == len(ids) and not ids.is_floating_point():
            return logits, weights, ids
    raise ModelNotLoaded(
        f"{type(module).__name__} does not give logits, weights and ids of experts, as routers of most families do; "
        f"set {NEITHER}"
    )
