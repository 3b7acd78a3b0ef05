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
from busrl.routes.routers import NEITHER, choice_of, routers_of
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
    """Yield of each piece the routes of the prompt but its last token, and of the positions that predict the rest."""
    if sample.turns is None or sample.routes is None:
        yield from [(sample.prompt_routes, sample.routes)] * len(sample.pieces)
        return
    begin = 0
    for piece in sample.pieces:
        end, first = begin + len(piece.ids) - 1, int(piece.spans[0, 0]) - 1
        yield sample.routes[begin : begin + first], sample.routes[begin + first : end]
        begin = end


def lay(samples: Sequence[Sample], routing: Routing, rows: int, heads: Ints, tails: Ints) -> Laid:
    """Lay the routes of samples out over `rows` rows: of piece number i the prompt begins at row heads[i], and what
    follows, from the last token of the prompt on, at tails[i]."""
    laid = Laid(np.full((rows, *routing.shape), CHOSEN_BY_MODEL, np.int16), np.zeros(0, np.int64))
    owners = [sample for sample in samples for _ in sample.pieces]
    routes = [pair for sample in samples for pair in routes_of_pieces(sample)]
    there: set[int] = set()
    for number in sorted(range(len(owners)), key=lambda i: (owners[i].group, owners[i].member, i)):
        (head, tail), sample = routes[number], owners[number]
        if tail is not None:
            _put(laid.routes, int(tails[number]), tail, sample)
        if head is None or not len(head):  # a row of no prompt is the first one of the next
            continue
        if int(heads[number]) not in there:
            _put(laid.routes, int(heads[number]), head, sample)
            there.add(int(heads[number]))
        else:
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
    """The routers of a model, with the routes that the next forward is to take. `carries`: samples may have routes;
    else it is there for `balance` alone, the weight of a loss that spreads tokens evenly over experts."""

    def __init__(self, model: Any, routing: Routing, carries: bool = True, balance: float = 0.0) -> None:
        self.routing, self.carries, self.balance = routing, carries, balance
        self._name, self._layers = type(model).__name__, len(routing.layers)
        self._rules: list[Rule | None] = [None] * self._layers
        self._noted: list[Tensor | None] | None = None  # by layer, while `prove` looks
        self._held: Tensor | None = None  # what `prove` gives to the next forward
        self._rest()
        for place, module in enumerate(routers_of(model, routing)):
            hook: Any = torch.compiler.disable(self._hook(place))  # type: ignore[no-untyped-call]
            module.register_forward_hook(hook)

    def _rest(self) -> None:
        """Let the routers choose, and begin to count."""
        self._given: Tensor | None = None  # [rows, layers, experts of a token]
        self._partly = False  # some rows have the router's own choice
        self._laid: Laid | None = None
        self._counted: Tensor | None = None  # rows that predict trained tokens
        self._changed: list[Tensor] = []  # of these rows, those whose router chose another set, by layer
        self._any: Tensor | None = None  # of them, those for which any router did
        self._real: Tensor | None = None  # rows that are no padding
        self._shares: dict[int, tuple[Tensor, Tensor]] = {}  # of tokens and of probability by expert, by layer
        self._seen: set[int] = set()  # layers that were counted: a backward may compute them again

    def use(
        self, samples: Sequence[Sample], rows: int, heads: Ints, tails: Ints, device: torch.device
    ) -> None:
        """Take the routes of these samples in the next forward, whose rows `lay` describes; of no samples, none."""
        self._rest()
        if self._held is not None:
            self._given, self._held = self._held, None
            return
        if self.balance and samples and torch.is_grad_enabled():
            self._real = torch.from_numpy(real_rows(samples, rows, heads, tails)).to(device)
        if not self.carries or not samples:
            return
        self._laid = laid = lay(samples, self.routing, rows, heads, tails)
        if not (laid.routes >= 0).any():
            return
        self._given = torch.from_numpy(laid.routes).to(device)
        self._partly = bool((laid.routes[:, 0, 0] < 0).any())
        if torch.is_grad_enabled():
            self._counted = torch.from_numpy(laid.counted).to(device)
            self._any = torch.zeros(len(laid.counted), dtype=torch.bool, device=device)

    def use_rows(self, sample: Sample, begin: int, end: int, device: torch.device) -> None:
        """Take the routes of a part of a sample of one piece in the next forward, which computes these rows alone."""
        self._rest()
        if not self.carries:
            return
        first, rows = int(sample.pieces[0].spans[0, 0]) - 1, len(sample.pieces[0].ids) - 1
        part = lay([sample], self.routing, rows, np.array([0]), np.array([first])).routes[begin:end]
        if (part >= 0).any():
            self._given, self._partly = torch.from_numpy(part).to(device), bool((part < 0).any())

    def _hook(self, place: int) -> Callable[[Any, Any, Any], Any]:
        def hook(module: Any, _: Any, output: Any) -> Any:
            logits, weights, ids = choice_of(module, output)
            if self._noted is not None:
                self._noted[place] = ids.detach()
                self._rules[place] = rule_of(module, logits, weights, ids)
            chosen = ids if self._given is None else self._chosen(place, ids)
            if self._real is not None:
                self._spread(place, logits, chosen)
            if (rule := self._rules[place]) is None or self._given is None:
                return None
            self._count(place, ids, chosen)
            self._seen.add(place)
            return logits, rule(module, logits, chosen).to(weights.dtype), chosen
        return hook

    def _chosen(self, place: int, ids: Tensor) -> Tensor:
        assert self._given is not None
        given = self._given[:, place].to(ids)
        if given.shape != ids.shape:
            raise ValueError(f"{self._name}: routes for {tuple(given.shape)}, but its router chose {tuple(ids.shape)}")
        return torch.where(given < 0, ids, given) if self._partly else given

    @torch.no_grad()
    def _count(self, place: int, own: Tensor, chosen: Tensor) -> None:
        """Count the rows of trained tokens whose router chose another set of experts."""
        if self._counted is None or self._any is None or place in self._seen:
            return
        sets = (ids[self._counted].sort(-1)[0] for ids in (own, chosen))
        differ = (next(sets) != next(sets)).any(-1)
        self._any |= differ
        self._changed.append(differ.sum())

    # -- the loss that spreads tokens over experts -----

    def _spread(self, place: int, logits: Tensor, chosen: Tensor) -> None:
        """Keep the shares of each expert in a layer: of chosen places, and of probability. Computed again in a backward
        that computes the layer again, whose operations have to be those of the forward."""
        assert self._real is not None
        of_probability = torch.softmax(logits[self._real], -1, dtype=torch.float).mean(0)
        with torch.no_grad():
            counts = torch.bincount(chosen[self._real].flatten(), minlength=self.routing.experts)
        self._shares.setdefault(place, (counts / len(self._real), of_probability))

    def loss(self, share: Tensor | None, summed: Callable[[Tensor], Tensor] | None = None) -> Tensor | None:
        """Give what the balance loss adds: as transformers defines it, over the experts that were used, by the means
        over the rows of all ranks that compute now, over which `summed` sums; None of one rank alone. The others' part
        of the probabilities is constant here."""
        if not self._shares or self._real is None:
            return None
        tokens, probability = (torch.stack(rows).mean(0) for rows in zip(*self._shares.values(), strict=True))
        rows = len(self._real)
        if share is None:  # of a rank without work, whose rows do not count
            if summed is not None:
                summed(tokens.new_zeros(len(tokens) + 2))
            return None
        if summed is None:
            return self.balance * self.routing.experts * (tokens * probability).sum() * share
        every = summed(torch.cat([tokens * rows, tokens.new_tensor([rows]), share.to(tokens).reshape(1)]))
        rows_by_expert, all_rows, all_shares = every[:-2], every[-2], every[-1]
        used, of_here = rows_by_expert / all_rows, rows / all_rows
        return self.balance * self.routing.experts * (used * probability).sum() * of_here * all_shares

    # -- counts -----

    def figures(self) -> Tensor | None:
        """Counts of the last forward, in the order of `step_stats.ROUTES` and then by layer; None without routes."""
        if (laid := self._laid) is None:
            return None
        of_host = [len(laid.counted), laid.own, laid.shared, laid.differ]
        device = None if self._any is None else self._any.device
        changed = torch.stack(self._changed) if self._changed else torch.zeros(self._layers, device=device)
        any_layer = torch.zeros(1, device=device) if self._any is None else self._any.sum()[None]
        return torch.cat([torch.tensor(of_host, device=device), any_layer, changed]).double()

    # -- the proof -----

    @torch.no_grad()
    def prove(self, compute: Callable[[], Tensor]) -> None:
        """ModelNotLoaded if routers do not choose as `routing` says, or if the numbers of `compute`, a forward, are not
        the same with the model's own choices given back."""
        noted: list[Tensor | None] = [None] * self._layers
        self._noted = noted
        try:
            own = compute()
        finally:
            self._noted = None
        ids = torch.stack([layer for layer in noted if layer is not None], 1)
        ordered = ids.sort(-1)[0]
        sound = bool((ordered[..., 1:] != ordered[..., :-1]).all() and (ids < self.routing.experts).all())
        if ids.shape[1:] != self.routing.shape or not sound:
            raise self._refused(f"its routers do not choose {self.routing.top_k} of {self.routing.experts} experts")
        if not self.carries:
            return
        if None in self._rules:
            raise self._refused("how its routers weigh the experts they chose is not known here")
        self._held = ids
        again = compute()
        nearly = float((again - own).abs().max()) <= NEARLY * max(1.0, float(own.abs().max()))
        if not (torch.equal(own, again) or (own.device.type != "cpu" and nearly)):
            raise self._refused("with its own choices given back it computes something else")

    def _refused(self, what: str) -> ModelNotLoaded:
        return ModelNotLoaded(f"{self._name}: {what}, so it cannot replay the engine's; set {NEITHER}")


def rule_of(module: Any, logits: Tensor, weights: Tensor, ids: Tensor) -> Rule | None:
    """The rule that gives exactly the weights that the router gave."""
    for rule in RULES:
        if torch.equal(rule(module, logits, ids).to(weights.dtype), weights):
            return rule
    return None


def real_rows(samples: Sequence[Sample], rows: int, heads: Ints, tails: Ints) -> Ints:
    """The rows that are no padding."""
    real = np.zeros(rows, np.bool_)
    pieces = [piece for sample in samples for piece in sample.pieces]
    for piece, head, tail in zip(pieces, heads.tolist(), tails.tolist(), strict=True):
        first = int(piece.spans[0, 0]) - 1
        real[head : head + first] = True
        real[tail : tail + len(piece.ids) - 1 - first] = True
    return np.flatnonzero(real)
