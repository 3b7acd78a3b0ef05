"""Replay of routes: a model that is trained computes each token with the experts that the engine chose for it.

Used by the trainer's way of computing (`busrl.training.forward`), which says which row of a forward is which token.
A hook on every router gives the engine's ids in the place of its own. The weights of the experts are made of the
router's own logits, by its own rule, so the router is trained as ever. Knows nothing of slots, logs or engines.

- `prove` finds the rule of each router, and that a model's own ids given back change no number; else it is refused.
- A row without routes (padding, a sample without, prompts with routes_of = "answer") has the router's own choice.
- The routes of a forward stay until the next one begins: a backward may compute layers again.
- Of a prompt that several samples share, the routes of the sample of the lowest group and member are taken.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from busrl.data.routing import Routing
from busrl.errors import ModelNotLoaded
from busrl.routes.routers import OWN, choice_of, routers_of
from busrl.training.batch import Ints, Sample, predicting_positions

CHOSEN_BY_MODEL = -1  # in the place of an id
NEARLY = 1e-4  # of the largest score: where a device adds in any order

# -- the weights of chosen experts, as routers make them ----------------------------------

Rule = Callable[[Any, Tensor, Tensor], Tensor]  # of a router, its logits and the ids of experts


def _softmax_of_all(module: Any, logits: Tensor, ids: Tensor) -> Tensor:
    weights = torch.softmax(logits, -1, dtype=torch.float).gather(-1, ids)
    if getattr(module, "norm_topk_prob", True):
        weights = weights / weights.sum(-1, keepdim=True)
    return weights


def _softmax_of_chosen(module: Any, logits: Tensor, ids: Tensor) -> Tensor:
    return torch.softmax(logits.gather(-1, ids), -1)


def _wide_softmax_of_chosen(module: Any, logits: Tensor, ids: Tensor) -> Tensor:
    return torch.softmax(logits.gather(-1, ids).float(), -1)


def _sigmoid(module: Any, logits: Tensor, ids: Tensor) -> Tensor:
    weights = logits.sigmoid().gather(-1, ids)
    if getattr(module, "norm_topk_prob", True):
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return weights * getattr(module, "routed_scaling_factor", 1.0)


# Qwen, Mixtral, OLMoE and kin; gpt-oss; Granite; DeepSeek-V3, GLM and kin, whose groups and bias only choose.
RULES: tuple[Rule, ...] = (_softmax_of_all, _softmax_of_chosen, _wide_softmax_of_chosen, _sigmoid)


# -- the rows of a forward ------------------------------------------------------------------


@dataclass
class Laid:
    """Routes by the rows of a forward, CHOSEN_BY_MODEL where there are none; `counted`: the rows that predict a trained
    token and have some."""

    routes: NDArray[np.int16]  # [rows, layers, experts of a token]
    counted: Ints
    own: int = 0  # trained tokens of samples without routes
    shared: int = 0  # rows of prompts that another sample has, too,
    differ: int = 0  # and of them those for which its engine chose otherwise


def routes_of_pieces(sample: Sample) -> Iterator[tuple[NDArray[Any] | None, NDArray[Any] | None]]:
    """Of each piece the routes of the prompt but its last token, and of the positions that predict what follows."""
    if sample.turns is None or sample.routes is None:
        yield from [(sample.prompt_routes, sample.routes)] * len(sample.pieces)
        return
    begin = 0
    for piece in sample.pieces:
        end, first = begin + len(piece.ids) - 1, int(piece.spans[0, 0]) - 1
        yield sample.routes[begin : begin + first], sample.routes[begin + first : end]
        begin = end


def lay(samples: Sequence[Sample], routing: Routing, rows: int, heads: Ints, tails: Ints) -> Laid:
    """Lay the routes of samples out over `rows` rows: of piece number i the prompt begins at row heads[i], and the rest,
    from the last token of the prompt on, at tails[i]."""
    laid = Laid(np.full((rows, *routing.shape), CHOSEN_BY_MODEL, np.int16), np.zeros(0, np.int64))
    owners = [sample for sample in samples for _ in sample.pieces]
    routes = [pair for sample in samples for pair in routes_of_pieces(sample)]
    there: set[int] = set()
    for number in sorted(range(len(owners)), key=lambda i: (owners[i].group, owners[i].member, i)):
        (head, tail), sample = routes[number], owners[number]
        if tail is not None:
            _put(laid.routes, int(tails[number]), tail, sample)
        if head is not None and int(heads[number]) not in there:
            _put(laid.routes, int(heads[number]), head, sample)
            there.add(int(heads[number]))
        elif head is not None:
            before = laid.routes[heads[number] : heads[number] + len(head)]
            laid.shared += len(head)
            laid.differ += _others(before, head)
    _count_trained(laid, samples, tails)
    return laid


def _put(rows: NDArray[np.int16], at: int, routes: NDArray[Any], sample: Sample) -> None:
    if routes.shape[1:] != rows.shape[1:] or at + len(routes) > len(rows):
        raise ValueError(f"sample {sample.uid}: routes {routes.shape} where rows are {rows.shape}")
    rows[at : at + len(routes)] = routes


def _others(some: NDArray[Any], others: NDArray[Any]) -> int:
    """The number of rows with another set of experts in any layer."""
    if np.array_equal(some, others):
        return 0
    return int((np.sort(some, -1) != np.sort(others, -1)).any((1, 2)).sum())


def _count_trained(laid: Laid, samples: Sequence[Sample], tails: Ints) -> None:
    """Find the rows that predict trained tokens, and count those of samples without routes."""
    pieces = [piece for sample in samples for piece in sample.pieces]
    which, columns = predicting_positions(pieces)
    firsts = np.array([piece.spans[0, 0] for piece in pieces])
    rows = tails[which] + columns - (firsts[which] - 1)
    trained = rows[np.concatenate([sample.mask() for sample in samples])]
    known = laid.routes[trained, 0, 0] >= 0
    laid.counted, laid.own = trained[known], int((~known).sum())


# -- the replay -------------------------------------------------------------------------------


class Replay:
    """The routers of a model, with the routes that the next forward is to take. `carries`: samples have routes at all;
    else it is there for `balance` alone, the loss that spreads tokens over experts."""

    def __init__(self, model: Any, routing: Routing, carries: bool = True, balance: float = 0.0) -> None:
        self.routing, self.carries, self.balance = routing, carries, balance
        self._name = type(model).__name__
        self._layers = len(routing.layers)
        self._rules: list[Rule | None] = [None] * self._layers
        self._watching = False  # in `prove`: rules are found, and ids noted
        self._noted: list[Tensor | None] = [None] * self._layers
        self._given: Tensor | None = None  # [rows, layers, experts of a token]
        self._partly = False  # some rows have the router's own choice
        self._laid: Laid | None = None
        self._begin()
        for place, module in enumerate(routers_of(model, routing)):
            module.register_forward_hook(torch.compiler.disable(self._hook(place)))

    def _begin(self) -> None:
        """Begin the counts of a forward."""
        self._seen: set[int] = set()  # layers that were computed; a backward may compute them again
        self._counted: Tensor | None = None
        self._changed: list[Tensor] = []
        self._any: Tensor | None = None
        self._real: Tensor | None = None
        self._shares: list[tuple[Tensor, Tensor]] = []  # of tokens and of probability that each expert gets, by layer

    # -- what a way of computing calls -----

    def use(self, samples: Sequence[Sample], rows: int, heads: Ints, tails: Ints, device: torch.device) -> None:
        """Take the routes of these samples in the next forward, whose rows `lay` describes; no samples: none."""
        self._begin()
        self._given, self._laid = self._held, None
        self._held: Tensor | None = None
        if self._given is not None or self._watching or not len(samples):
            return
        if self.balance:
            self._real = torch.from_numpy(real_rows(samples, rows, heads, tails)).to(device)
        if not self.carries:
            return
        self._laid = laid = lay(samples, self.routing, rows, heads, tails)
        self._partly = bool((laid.routes[:, 0, 0] < 0).any())
        if any(sample.routes is not None for sample in samples):
            self._given = torch.from_numpy(laid.routes).to(device)
            if torch.is_grad_enabled():
                self._counted = torch.from_numpy(laid.counted).to(device)
                self._any = torch.zeros(len(laid.counted), dtype=torch.bool, device=device)
