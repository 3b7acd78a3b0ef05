"""From samples to log-probability and entropy per generated token, in the flat order of `batch`, at the least cost.

`choose_forward` looks at the model once and picks: packed rows without padding and the head in pieces, else padded rows
and the head in pieces, else all logits. Knows nothing of losses.

- A cheaper way is taken only after it gave the model's own log-probabilities on a probe, whose samples are longer than
  the sliding window where the model has one. A probe is computed in float32, of a model in fewer bits in those first
  layers that have every kind of attention.
- Rows are padded at the right, and attention is causal: padding needs no mask.
- With `replay` the samples' routes decide which experts a row is computed with.
- Rows of logits without a token are left out of every softmax (`token_rows`), as engines leave them out.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from busrl import capabilities
from busrl.data.routing import Routing, routing_of
from busrl.data.vocabulary import ALL_ROWS, TokenRows
from busrl.errors import ModelNotLoaded, cause
from busrl.training import packing
from busrl.training.batch import Flat, Ints, Sample, flatten, join, pad, pieces_of
from busrl.training.earlier import in_type
from busrl.training.head import Head
from busrl.training.model import attention_of, keep_first_layers, silence_chance, vocabulary

Scores = tuple[Tensor, Tensor]  # log-probability and entropy in nats, [generated tokens] each, on the model's device


class Replay(Protocol):
    """The experts that engines chose, in the place of those that a model would choose (`busrl/routes`)."""

    def use(self, samples: Sequence[Sample], rows: int, heads: Ints, tails: Ints, device: torch.device) -> None:
        """Let the next forward, of `rows` rows, take the routes of these samples, or none. The prompt of a piece, but
        for its last token, begins at the row of `heads`, and what follows at that of `tails`."""

    def use_rows(self, sample: Sample, begin: int, end: int, device: torch.device) -> None:
        """Let the next forward, which computes these rows of a sample of one piece alone, take their routes."""

    def loss(self, share: Tensor | None, summed: Callable[[Tensor], Tensor] | None = None) -> Tensor | None:
        """Give what the balance loss adds to the last forward, the losses of whose tokens add up to `share` if each is
        1; None where there is no such loss, or no `share`. `summed`: over all ranks that compute now."""

    def figures(self) -> Tensor | None:
        """Counts of the last forward, as `step_stats` adds them up; None in a run without routes."""

    def prove(self, compute: Callable[[], Tensor]) -> None:
        """ModelNotLoaded if the forward of `compute` gives something else with the model's own routes given back."""


class Forward:
    """All logits of all positions, then the wanted ones: works for every model, costs the most."""

    name = "full"
    spread = False  # its model is spread over ranks, and was prepared for that
    together = False  # computes a shared prompt once and pads nothing: a group should be in one micro-batch

    replay: Replay | None = None  # of its model, where that is a mixture of experts
    alone = False  # its model routes by itself all the same

    where: torch.device | None = None  # it computes there, if the parameters are elsewhere
    token_rows: TokenRows = ALL_ROWS  # of the logits

    def __init__(self, model: Any) -> None:
        self.model = model

    @property
    def device(self) -> torch.device:
        device: torch.device = self.where or self.model.device
        return device

    def score(self, samples: Sequence[Sample], flat: Flat) -> Scores:
        """Log-probability and entropy, at the sampling temperature, of the tokens of `flat`, the flat `samples`. Where
        its targets are a matrix, log-probabilities of several tokens in the place of each."""
        every = torch.log_softmax(self._logits(samples, flat, flat.behaviour_logprobs.dtype), -1)
        # A token that cannot occur (-inf) adds nothing to the entropy, but 0 * -inf is NaN.
        single = flat.targets.ndim == 1
        logprobs = every.gather(-1, flat.targets[:, None] if single else flat.targets)
        return logprobs[:, 0] if single else logprobs, -(every.exp() * every.clamp(min=-1e4)).sum(-1)

    @torch.no_grad()
    def best(self, samples: Sequence[Sample], flat: Flat, count: int, limit: int) -> tuple[Tensor, Tensor]:
        """Ids and log-probabilities, [tokens, count], of each place's most probable tokens with an id below `limit`."""
        logits = self._logits(samples, flat, torch.float32)
        values, best = logits[:, :limit].topk(min(count, limit, self.token_rows.tokens), -1)
        return best, values - logits.logsumexp(-1, keepdim=True)

    def _logits(self, samples: Sequence[Sample], flat: Flat, dtype: torch.dtype) -> Tensor:
        ids, rows, columns = self._padded(samples)
        wanted = self.model(input_ids=ids, use_cache=False).logits[rows, columns]
        logits: Tensor = self.token_rows.mask(wanted.to(dtype))
        return logits if flat.temperature is None else logits / flat.temperature[:, None]

    def states(self, samples: Sequence[Sample]) -> Tensor:
        """The last hidden states that predict the generated tokens, [tokens, width]: what `of_states` takes."""
        raise ModelNotLoaded(f"{type(self.model).__name__} was loaded in a way that has no hidden states")

    def of_states(self, hidden: Tensor, flat: Flat) -> Scores:
        """The `score` of these states."""
        raise ModelNotLoaded(f"{type(self.model).__name__} was loaded in a way that has no hidden states")

    def with_states(self, samples: Sequence[Sample], flat: Flat) -> tuple[Scores, Tensor]:
        """`score` and `states` of one forward."""
        hidden = self.states(samples)
        return self.of_states(hidden, flat), hidden

    def on(self, model: Any) -> Forward:
        """This way for another model of the same architecture, which routes by itself."""
        way = copy.copy(self)
        way.model, way.replay = model, None
        return way

    def by_itself(self) -> Forward:
        """This way, in which the model routes by itself: that of a reference which is the model without its adapter."""
        way = copy.copy(self)
        way.alone = True
        return way

    def leave_out_all_but(self, token_rows: TokenRows) -> None:
        self.token_rows = token_rows

    def size(self, samples: Sequence[Sample]) -> int:
        """Counts the positions that are computed, padding included."""
        lengths = [len(piece.ids) for piece in pieces_of(samples)]
        return sum(lengths) if self.together else len(lengths) * max(lengths)

    def _padded(self, samples: Sequence[Sample]) -> tuple[Tensor, Tensor, Tensor]:
        """The model's input without the last column, which predicts nothing; row and column of each wanted logit."""
        ids, rows, columns = (part.to(self.device) for part in pad(samples))
        self._route_pieces(samples, np.arange(len(ids)) * (ids.shape[1] - 1), ids[:, 1:].numel())
        return ids[:, :-1], rows, columns

    def _route_pieces(self, samples: Sequence[Sample], begins: Ints, rows: int) -> None:
        """Use the routes of samples whose pieces begin at these rows."""
        if self.replay is not None:
            firsts = np.array([piece.spans[0, 0] for piece in pieces_of(samples)])
            self._route(samples, rows, begins, begins + firsts - 1)

    def _route(self, samples: Sequence[Sample], rows: int, heads: Ints, tails: Ints) -> None:
        if self.replay is not None:
            self.replay.use(() if self.alone else samples, rows, heads, tails, self.device)


class PaddedRows(Forward):
    """The decoder over padded rows, the head in pieces over the rows that predict a generated token."""

    name = "padded"

    def __init__(self, model: Any, head: Head | None = None) -> None:
        super().__init__(model)
        self.head: Any = head or Head.of(model.config)  # a Head, or what calls one

    def score(self, samples: Sequence[Sample], flat: Flat) -> Scores:
        return self.of_states(self.states(samples), flat)

    def of_states(self, hidden: Tensor, flat: Flat) -> Scores:
        head: nn.Linear = self.model.get_output_embeddings()
        scores: Scores = self.head(hidden, head.weight, flat.targets, flat.temperature, head.bias, self.token_rows)
        return scores

    @torch.no_grad()
    def best(self, samples: Sequence[Sample], flat: Flat, count: int, limit: int) -> tuple[Tensor, Tensor]:
        head: nn.Linear = self.model.get_output_embeddings()
        chosen: tuple[Tensor, Tensor] = self.head.best(
            self.states(samples), head.weight, count, limit, flat.temperature, head.bias, self.token_rows
        )
        return chosen

    def states(self, samples: Sequence[Sample]) -> Tensor:
        ids, rows, columns = self._padded(samples)
        hidden: Tensor = self.model.base_model(input_ids=ids, use_cache=False)[0][rows, columns]
        return hidden


class PackedRows(PaddedRows):
    """The decoder over one row of samples without padding, in which what they have in common stands once: prompts, and
    without replay longer beginnings."""

    name, together = "packed", True

    def on(self, model: Any) -> Forward:
        packing.adopt(model)
        return super().on(model)

    def states(self, samples: Sequence[Sample]) -> Tensor:
        plan = packing.plan_of(samples, self.device, beyond=self.replay is None)
        if self.replay is not None:
            self._route(samples, len(plan.ids), *plan.begins)
        hidden: Tensor = self.model.base_model(
            input_ids=plan.ids[None], position_ids=plan.positions[None], use_cache=False, plan=plan
        )[0]
        states = hidden[0, plan.shared :]
        return states if plan.wanted is None else states[plan.wanted]


class JoinedRows(PaddedRows):
    """The decoder over one row of whole samples; their positions begin at 0, by which transformers finds borders."""

    name, together = "joined", True

    def states(self, samples: Sequence[Sample]) -> Tensor:
        ids, positions, wanted = (part.to(self.device) for part in join(samples))
        lengths = np.array([len(piece.ids) - 1 for piece in pieces_of(samples)])
        self._route_pieces(samples, np.cumsum(lengths) - lengths, len(ids))
        hidden: Tensor = self.model.base_model(input_ids=ids[None], position_ids=positions[None], use_cache=False)[0]
        return hidden[0, wanted]


# -- the choice ----------------------------------------------------------------------

PROBE_TOLERANCE = 1e-4
ROUNDED_TOLERANCE = 2e-2  # where an attention takes no float32
LONGEST_PROBE = 1024  # of a sliding window that the probe reaches over on a CPU; elsewhere any
AUTO = "auto"  # learner.memory.attention: that of `packing`
FLASH = "flash_attention"  # begins the names of attentions that take no float32


def choose_forward(model: Any, head: Head | None = None, attention: str = AUTO) -> Forward:
    """The cheapest way that gives the model's own log-probabilities; with an attention other than AUTO the model has
    been loaded with that one, and keeps it."""
    plain = Forward(model)
    if model.base_model is model or not isinstance(model.get_output_embeddings(), nn.Linear):
        return plain
    samples = _probe(model)
    with contextlib.nullcontext() if attention.startswith(FLASH) else _in_float32(model):
        expected = _scores(plain, samples)
        padded = PaddedRows(model, head)
        fallback = padded if _agrees(padded, samples, expected) else plain
        if attention != AUTO:
            joined = JoinedRows(model, head)
            return joined if _agrees(joined, samples, expected) else fallback
        return _packed(model, head, samples, expected) or fallback


def _packed(model: Any, head: Head | None, samples: Sequence[Sample], expected: Tensor) -> Forward | None:
    """The way over packed rows: the model attends by `packing` from now on. None: the model is unchanged."""
    before = attention_of(model)
    try:
        packing.adopt(model)
        way = PackedRows(model, head)
        if _agrees(way, samples, expected):
            return way
    except (ImportError, ValueError, AttributeError, NotImplementedError):  # its class has an attention of its own
        pass
    model.set_attn_implementation(before)
    return None


@contextlib.contextmanager
def _in_float32(model: Any) -> Iterator[None]:
    """Within it the model is float32: as it is, or, if it has fewer bits, a float32 copy of its first layers."""
    if model.dtype != torch.bfloat16:
        yield
        return
    layers, count = getattr(model.base_model, "layers", None), getattr(model.config, "num_hidden_layers", 0)
    keep_first_layers(model)
    try:
        with in_type(model, "float32"):
            yield
    finally:
        if isinstance(layers, nn.ModuleList):
            model.base_model.layers, model.config.num_hidden_layers = layers, count


def replay_routes(way: Forward, routing: Routing | None, balance: float) -> None:
    """Let the way's model take the routes of samples, or count for the balance loss; `prove_replay` is to follow."""
    shape = routing or (routing_of(way.model.config.to_dict()) if balance else None)
    if shape is not None:
        key = "learner.balance" if routing is None else "learner.routes"
        way.replay = capabilities.plug("routes", "replay", key)(way.model, shape, routing is not None, balance)


def prove_replay(way: Forward) -> None:
    """ModelNotLoaded if a model computes something else with its own routes given back."""
    if way.replay is not None:
        samples = _probe(way.model)
        way.replay.prove(lambda: _scores(way, samples))


def checkpoint_layers(way: Forward) -> None:
    """Keep the input of each layer alone and compute the rest again in backward (activation checkpointing).
    ModelNotLoaded where the model cannot, or where it computes something else while it trains."""
    model = way.model
    if not getattr(model, "supports_gradient_checkpointing", False):
        raise ModelNotLoaded(f"{type(model).__name__} cannot compute its layers again; {WITHOUT}")
    samples = _probe(model)
    expected = _scores(way, samples)
    compute_again(model)
    if not _agrees(way, samples, expected, PROBE_TOLERANCE):
        raise ModelNotLoaded(f"{type(model).__name__} computes something else in training mode; {WITHOUT}")


def compute_again(model: Any) -> None:
    """Do what `checkpoint_layers` does without the proof, for a model whose architecture has passed it."""
    # It acts in training mode alone, in which a model may draw random numbers: their probabilities become 0.
    silence_chance(model)
    again = {"use_reentrant": False}
    if hasattr(model, "activation_checkpointing_enable"):
        model.activation_checkpointing_enable(again)
    else:
        model.gradient_checkpointing_enable(again)
    model.train()


WITHOUT = 'learner.memory.activation_checkpointing = "none"'
UNCOMPILED = "learner.memory.compile = false"
COMPILE_S = 1800.0  # that `compile_layers` may take


def compile_layers(way: Forward) -> None:
    """Compile each layer for any number of rows, and run forward, backward and scoring, since the first of each takes
    minutes. Leaves gradients behind. ModelNotLoaded if it fails, or computes something else."""
    model = way.model
    layers, name = getattr(model.base_model, "layers", None), type(model).__name__
    if not isinstance(layers, nn.ModuleList):
        raise ModelNotLoaded(f"{name}: its layers are not at base_model.layers, and cannot be compiled; {UNCOMPILED}")
    samples = _probe(model)
    expected = _scores(way, samples)
    packing.stay_out_of_graphs()
    for layer in layers:
        layer.compile(dynamic=True)
    try:
        for part in (samples, samples[:2]):
            flat = flatten(part, torch.promote_types(model.dtype, torch.float32), model.device)
            torch.cat(way.score(part, flat)).sum().backward()  # type: ignore[no-untyped-call]
        _scores(way, samples)
    except Exception as problem:  # of a compiler, whatever type it has
        raise ModelNotLoaded(
            f"{name}: its layers cannot be compiled here: {cause(problem).splitlines()[0]}; {UNCOMPILED}"
        ) from problem
    if not _agrees(way, samples, expected):
        raise ModelNotLoaded(f"{name} computes something else when it is compiled; {UNCOMPILED}")


def _agrees(way: Forward, samples: Sequence[Sample], expected: Tensor, limit: float = 0.0) -> bool:
    try:
        scores = _scores(way, samples)
    except Exception:  # a decoder with another signature raises any type: this way does not suit it
        return False
    scale = max(1.0, float(expected.abs().max()))
    limit = limit or (ROUNDED_TOLERANCE if way.model.dtype == torch.bfloat16 else PROBE_TOLERANCE)
    return scores.shape == expected.shape and bool((scores - expected).abs().max() <= limit * scale)


@torch.no_grad()
def _scores(way: Forward, samples: Sequence[Sample]) -> Tensor:
    flat = flatten(samples, torch.promote_types(way.model.dtype, torch.float32), way.device)
    return torch.cat(way.score(samples, flat)).float()


def _probe(model: Any) -> list[Sample]:
    """Fixed samples of different lengths, some of which share a prompt, with ids spread over the vocabulary."""
    size, window = vocabulary(model), getattr(model.config, "sliding_window", None) or 0
    within = model.device.type != "cpu" or window <= LONGEST_PROBE
    longest = window + 3 if within and window + 4 < getattr(model.config, "max_position_embeddings", 0) else 3

    def ids(start: int, count: int) -> Any:
        return ((np.arange(count) * 7919 + start) % size).astype(np.int32)

    def sample(member: int, group: int, prompt: Any, tokens: Any) -> Sample:
        zeros = np.zeros(len(tokens), np.float32)
        return Sample(member, group, member, prompt, tokens, zeros, zeros.astype(np.uint32))

    shared, single = ids(1, 3), ids(3, 1)
    return [
        sample(0, 0, shared, ids(2, 4)), sample(1, 0, shared, ids(5, 2)), sample(2, 1, single, ids(9, longest)),
        sample(3, 1, single, ids(11, 2)),
    ]
