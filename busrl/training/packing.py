"""Packed rows: samples one after another without padding, what they share once, and the attention over them.

`plan_of` lays samples out; `attend` is the attention that transformers calls in every layer of a model that `adopt`
prepared, with the plan as an argument of the model's call.

- A token attends to what stands before it in its own sequence, to nothing else.
- Sequences that begin alike share their prompt, or, where that saves enough rows, all that they have in common: turns
  of forked episodes, the beginning of several prompts.
- Positions begin at 0 in every sample. Sliding window, cap of the scores and attention sinks are those of the layer.
- On a GPU one call of torch's flash attention computes all sequences of a layer, where its kernel knows the layer's
  rule and has given what the slow way gives. On a CPU short sequences are computed together, as rectangles of similar
  lengths. All others are computed one by one, where no score is ever kept.
"""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from busrl.training.batch import Ints, Piece, Sample, numbered, pieces_of, predicting_positions

T = TypeVar("T")
NAME = "busrl_packed"  # by which transformers knows `attend`
LONGEST_TOGETHER = 256  # of a rectangle: above, its padding and its scores cost more than separate calls
MOST_PADDING = 4000  # scores of padding in a rectangle: more would cost what one more rectangle costs
LEAST_SHARED = 32  # rows that a shared stretch has to save: every stretch is a sequence more in each layer
LEAST_SAVED = 0.05  # of all rows, that shared stretches have to save where shared prompts alone would do


@dataclass(frozen=True)
class Sequences:
    """Sequences of consecutive rows; each attends to its own rows and to earlier rows: a stretch of them, or a stretch
    of `context`, which has numbers of rows."""

    before_first: Ints  # per sequence: the first of the earlier rows, or the first place in `context`
    before: Ints  # number of earlier rows
    first: Ints  # the first of its own rows
    lengths: Ints
    context: Ints | None = None
    cache: dict[Any, Any] = field(default_factory=dict, compare=False)  # layouts and borders, once for all layers

    def once(self, key: Any, make: Callable[[], T]) -> T:
        """The value that `make` gave for that key at its first call."""
        if key not in self.cache:
            self.cache[key] = make()
        value: T = self.cache[key]
        return value

    def __getitem__(self, chosen: Ints) -> Sequences:
        return Sequences(
            self.before_first[chosen], self.before[chosen], self.first[chosen], self.lengths[chosen], self.context
        )

    def earlier(self, places: Ints) -> Ints:
        """The earlier rows at these places; places beyond the last give any row."""
        if self.context is None:
            return places
        return self.context[np.minimum(places, len(self.context) - 1)] if len(self.context) else places * 0

    def rows(self) -> Iterator[tuple[int, int, int, int]]:
        """Rows of each sequence: first and number of the rows before it, first and number of its own."""
        columns = (self.before_first, self.before, self.first, self.lengths)
        return zip(*(column.tolist() for column in columns), strict=True)


@dataclass(frozen=True)
class Plan:
    """The rows of a micro-batch, in two kinds. First the prompts (all ids before the first generated token but the last
    one), each once for all pieces that begin with it. Then, in flat order, the rest of each piece: the positions that
    predict its tokens. Where pieces have more in common all rows are of the second kind, in the order of a tree."""

    ids: Tensor  # [rows]
    positions: Tensor  # [rows]
    shared: int  # rows of the first kind
    sequences: Sequences  # cover all rows, in order: prompts, then pieces
    wanted: Tensor | None = None  # of the rows of the second kind those that predict a generated token; None: all
    begins: tuple[Ints, ...] = ()  # of each piece the first row of its prompt, and of the rest; none of a tree


def plan_of(samples: Sequence[Sample], device: torch.device | str = "cpu", beyond: bool = True) -> Plan:
    """The plan of these samples, whose ids are int32. `beyond`: they may share more than whole prompts."""
    plan, parts = _prompts_shared(samples, device), pieces_of(samples)
    if not beyond:
        return plan
    nodes = _tree(parts)
    saved = len(plan.ids) - sum(node.end - node.begin for node in nodes)
    return plan if saved < max(LEAST_SHARED, LEAST_SAVED * len(plan.ids)) else _all_shared(parts, nodes, device)


def _prompts_shared(samples: Sequence[Sample], device: torch.device | str) -> Plan:
    parts = pieces_of(samples)
    firsts = np.array([piece.spans[0, 0] for piece in parts])
    prompts: dict[bytes, int] = {}
    which = np.array([
        prompts.setdefault(piece.ids[:first].tobytes(), len(prompts)) for piece, first in zip(parts, firsts.tolist())
    ])
    pieces = [np.frombuffer(prompt, np.int32)[:-1] for prompt in prompts]
    shared_lengths = np.array([len(piece) for piece in pieces])
    own_lengths = np.array([len(piece.ids) for piece in parts]) - firsts
    pieces += [piece.ids[first - 1 : -1] for piece, first in zip(parts, firsts.tolist())]
    shared, before = int(shared_lengths.sum()), shared_lengths[which]
    positions = np.concatenate([numbered(shared_lengths), numbered(own_lengths) + np.repeat(before, own_lengths)])
    shared_first = np.cumsum(shared_lengths) - shared_lengths
    own_first = np.cumsum(own_lengths) - own_lengths + shared
    none, wanted = np.zeros_like(shared_lengths), None
    if any(len(piece.spans) > 1 for piece in parts):
        rows, columns = predicting_positions(parts)
        wanted = torch.from_numpy(columns - before[rows] + own_first[rows] - shared).to(device)
    return Plan(
        ids=torch.from_numpy(np.concatenate(pieces).astype(np.int64)).to(device),
        positions=torch.from_numpy(positions).to(device), shared=shared, wanted=wanted,
        begins=(shared_first[which], own_first), sequences=Sequences(
            np.concatenate([none, shared_first[which]]), np.concatenate([none, before]),
            np.concatenate([shared_first, own_first]), np.concatenate([shared_lengths, own_lengths]),
        ),
    )


class Node(NamedTuple):
    """Ids `begin` to `end` of a piece, which all pieces below this node have in these places."""

    parent: int  # -1: none
    piece: int
    begin: int
    end: int
    leaf: bool  # of this piece alone


def _tree(parts: Sequence[Piece]) -> list[Node]:
    """Find what pieces have in common from their beginning on, parents first, without the last id of each, which
    predicts nothing. Every piece has one leaf, perhaps an empty one."""
    keys = [piece.ids[:-1].astype(">i4").tobytes() for piece in parts]
    order = sorted(range(len(parts)), key=keys.__getitem__)
    ids = [parts[at].ids[:-1] for at in order]
    common = np.array([0, *(_common(one, other) for one, other in itertools.pairwise(ids))])
    nodes: list[Node] = []
    open_parts = [(0, len(order), 0, -1)]  # pieces in order, ids that are in nodes already, the node above
    while open_parts:
        first, last, begin, parent = open_parts.pop()
        if last - first == 1:
            nodes.append(Node(parent, order[first], begin, len(ids[first]), True))
            continue
        inner = common[first + 1 : last]
        end = int(inner.min())
        if (last - first - 1) * (end - begin) >= LEAST_SHARED:
            nodes.append(Node(parent, order[first], begin, end, False))
            begin, parent = end, len(nodes) - 1
        cuts = [first, *(np.flatnonzero(inner == end) + first + 1).tolist(), last]
        open_parts += [(*pair, begin, parent) for pair in itertools.pairwise(cuts)]
    return nodes


def _common(one: NDArray[np.int32], other: NDArray[np.int32]) -> int:
    """The number of ids with which both begin."""
    length = min(len(one), len(other))
    differs = one[:length] != other[:length]
    return int(differs.argmax()) if differs.any() else length


def _all_shared(parts: Sequence[Piece], nodes: Sequence[Node], device: torch.device | str) -> Plan:
    """The plan in which each node of the tree is a sequence behind those above it."""
    lengths = np.array([node.end - node.begin for node in nodes])
    first = np.cumsum(lengths) - lengths
    paths: list[Ints] = []  # of each node: the rows of all ids up to its end
    places = np.empty(len(parts), np.int64)  # the leaf of each piece
    contexts: dict[int, int] = {}  # by the node above: where its rows begin in the context
    filled = 0
    for number, node in enumerate(nodes):
        above = paths[node.parent] if node.parent >= 0 else np.zeros(0, np.int64)
        paths.append(np.concatenate([above, np.arange(first[number], first[number] + lengths[number])]))
        if node.leaf:
            places[node.piece] = number
        if node.parent not in contexts:
            contexts[node.parent] = filled
            filled += len(above)
    rows, columns = predicting_positions(parts)
    begins = np.cumsum([0, *(len(paths[place]) for place in places.tolist())])
    wanted = np.concatenate([paths[place] for place in places.tolist()])[begins[rows] + columns]
    return Plan(
        ids=torch.from_numpy(np.concatenate([parts[node.piece].ids[node.begin : node.end] for node in nodes])
                             .astype(np.int64)).to(device),
        positions=torch.from_numpy(numbered(lengths) + np.repeat([node.begin for node in nodes], lengths)).to(device),
        shared=0, wanted=torch.from_numpy(wanted).to(device),
        sequences=Sequences(
            np.array([contexts[node.parent] for node in nodes]), np.array([node.begin for node in nodes]), first,
            lengths,
            np.concatenate([paths[above] if above >= 0 else np.zeros(0, np.int64) for above in contexts]),
        ),
    )


# -- attention ------------------------------------------------------------------------


def stay_out_of_graphs() -> None:
    """Let compiled layers call `attend` uncompiled: each micro-batch has another plan, which would be compiled in."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, torch.compiler.disable(attend))  # type: ignore[no-untyped-call]


def adopt(model: Any) -> None:
    """Let every layer of the model attend by `attend`; its next calls need `plan=`."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, lambda *_, **__: None)  # the plan replaces the mask
    model.set_attn_implementation(NAME)


def attend(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: None, *, plan: Plan | None = None,
    scaling: float | None = None, sliding_window: int | None = None, softcap: float | None = None,
    s_aux: Tensor | None = None, **_: Any,
) -> tuple[Tensor, None]:
    """The attention that transformers calls: query [1, heads, rows, size], key and value perhaps with fewer heads;
    returns [1, rows, heads, size]. `s_aux` are the sinks of the heads. Without a plan every row of a batch is one
    sequence, padded at the right if at all."""
    rule = Rule(query.shape[-1] ** -0.5 if scaling is None else scaling, sliding_window or 0, softcap or 0.0, s_aux)
    if plan is None:
        count, length, none = len(query), query.shape[2], np.zeros(len(query), np.int64)
        rows = Sequences(none, none, np.arange(count) * length, np.full(count, length))
        batch = [part.transpose(0, 1).flatten(1, 2)[None] for part in (query, key, value)]
        mixed = _attended(batch[0], batch[1], batch[2], rows, rule)
        return mixed.view(count, -1, *mixed.shape[1:]), None
    return _attended(query, key, value, plan.sequences, rule)[None], None


def _attended(query: Tensor, key: Tensor, value: Tensor, sequences: Sequences, rule: Rule) -> Tensor:
    if _flash_knows(query, key, rule):
        return _at_once(query, key, value, sequences, rule)
    layout = sequences.once((rule.window, query.dtype), lambda: _layout(sequences, rule.window, query))
    mixed = _together(query, key, value, layout, rule)
    mixed += [_alone(query, key, value, rows, layout.context, rule) for rows in layout.alone]
    rows = torch.cat(mixed)
    return rows if layout.order is None else F.embedding(layout.order, rows.flatten(1)).view(-1, *rows.shape[1:])


# -- all sequences at once, on a GPU ---------------------------------------------------

FLASH_TYPES = (torch.bfloat16, torch.float16)
FLASH_TOLERANCE = 2e-2  # of the largest number: what two orders of rounding to bfloat16 may differ by
LONGEST_HEAD = 256  # numbers that flash attention takes


def _flash_knows(query: Tensor, key: Tensor, rule: Rule) -> bool:
    """True if the kernel computes this layer: one without capped scores and without sinks."""
    fits = query.is_cuda and query.dtype in FLASH_TYPES and query.shape[-1] <= LONGEST_HEAD
    return fits and not rule.cap and rule.sinks is None and flash_is_right(
        query.device, query.dtype, query.shape[1] // key.shape[1], query.shape[-1], bool(rule.window))


@functools.cache
def _flash() -> tuple[Callable[..., Any], bool] | None:
    """torch's flash attention over sequences of any lengths, if this torch has it with a scale and a window; and True
    if it takes fewer heads of keys than of queries (torch 2.12)."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:  # before torch 2.10
        return None
    parameters = set(inspect.signature(varlen_attn).parameters)
    return (varlen_attn, "enable_gqa" in parameters) if {"scale", "window_size"} <= parameters else None


@functools.cache
def flash_is_right(device: torch.device, dtype: torch.dtype, repeats: int, size: int, windowed: bool) -> bool:
    """True if the kernel gives values and gradients of the slow way, for a shared prompt and for sequences alone."""
    if _flash() is None:
        return False
    rule = Rule(size ** -0.5, 3 if windowed else 0, 0.0, None)
    plan = Sequences(np.array([0, 0, 0, 0]), np.array([0, 5, 5, 0]), np.array([0, 5, 9, 20]), np.array([5, 4, 11, 7]))
    random = torch.Generator().manual_seed(0)
    shapes = [(1, heads, 27, size) for heads in (repeats, 1, 1, repeats)]
    tensors = [torch.randn(shape, generator=random).to(device, dtype) for shape in shapes]
    answers = []
    try:
        for way in (_at_once, _one_by_one):
            three = [tensor.clone().requires_grad_() for tensor in tensors[:3]]
            mixed = way(three[0], three[1], three[2], plan, rule)
            mixed.backward(tensors[3][0].transpose(0, 1))  # type: ignore[no-untyped-call]
            answers.append([mixed.detach(), *(tensor.grad for tensor in three)])
    except RuntimeError:  # no kernel for this device
        return False
    return all(
        float((left - right).abs().max()) <= FLASH_TOLERANCE * float(right.abs().max())
        for left, right in zip(*answers, strict=True)
    )


@dataclass(frozen=True)
class Borders:
    """Places where sequences begin, as the kernel asks for them."""

    keys: Tensor | None  # rows that the sequences attend to, one sequence after another; None: the rows as they are
    of_queries: Tensor  # int32 [sequences + 1]
    of_keys: Tensor
    longest: tuple[int, int]  # of queries, of keys

    @classmethod
    def of(cls, sequences: Sequences, device: torch.device) -> Borders:
        some = sequences[np.flatnonzero(sequences.lengths)]
        spans, keys = some.before + some.lengths, None
        if some.before.any():
            place, before = numbered(spans), np.repeat(some.before, spans)
            shared, first = np.repeat(some.before_first, spans), np.repeat(some.first, spans)
            rows = np.where(place < before, sequences.earlier(shared + place), first + place - before)
            keys = torch.from_numpy(rows).to(device)
        ends = (np.concatenate([[0], np.cumsum(part)]).astype(np.int32) for part in (some.lengths, spans))
        of_queries, of_keys = (torch.from_numpy(part).to(device) for part in ends)
        return cls(keys, of_queries, of_keys, (int(some.lengths.max()), int(spans.max())))


def _at_once(query: Tensor, key: Tensor, value: Tensor, sequences: Sequences, rule: Rule) -> Tensor:
    """Every sequence by one call of the kernel, [rows, heads, size]; a query is the last of the keys that it sees."""
    borders, flash = sequences.once(query.device, lambda: Borders.of(sequences, query.device)), _flash()
    assert flash is not None
    kernel, grouped = flash
    queries, keys, values = (part[0].transpose(0, 1) for part in (query, key, value))
    if borders.keys is not None:
        keys, values = (part.index_select(0, borders.keys) for part in (keys, values))
    if not grouped:
        keys, values = (part.repeat_interleave(query.shape[1] // key.shape[1], 1) for part in (keys, values))
    mixed: Tensor = kernel(
        queries.contiguous(), keys.contiguous(), values.contiguous(), borders.of_queries, borders.of_keys,
        *borders.longest, scale=rule.scale, window_size=(rule.window - 1 if rule.window else -1, 0),
        **({"enable_gqa": True} if grouped else {}),
    )
    return mixed


def _one_by_one(query: Tensor, key: Tensor, value: Tensor, sequences: Sequences, rule: Rule) -> Tensor:
    context = _on(sequences.context, query.device)
    return torch.cat([_alone(query, key, value, rows, context, rule) for rows in sequences.rows() if rows[3]])


def _on(context: Ints | None, device: torch.device) -> Tensor | None:
    return None if context is None else torch.from_numpy(context).to(device)


# -- rectangles, and sequences one by one ----------------------------------------------


@dataclass(frozen=True)
class Rule:
    """The rule by which a layer turns scores into shares. A window or cap of 0 and sinks of None are absent."""

    scale: float
    window: int
    cap: float
    sinks: Tensor | None

    def mixed(self, queries: Tensor, keys: Tensor, values: Tensor, hidden: Tensor) -> Tensor:
        """Attention of [..., heads, queries, size]; `hidden` is added to the scores: 0 or -inf."""
        if not self.cap and self.sinks is None:
            return F.scaled_dot_product_attention(queries, keys, values, attn_mask=hidden, scale=self.scale)
        scores = (queries * self.scale) @ keys.transpose(-1, -2)
        if self.cap:
            scores = torch.tanh(scores / self.cap) * self.cap
        scores = scores + hidden
        if self.sinks is None:
            return torch.softmax(scores, -1).to(values.dtype) @ values
        sinks = self.sinks[:, None, None].to(scores.dtype).expand(*scores.shape[:-1], 1)
        return torch.softmax(torch.cat([scores, sinks], -1), -1)[..., :-1].to(values.dtype) @ values


def visible(before: Any, queries: Any, keys: Any, window: int) -> Any:
    """True if query q of a sequence attends to row k of its context; broadcasts [.., q] and [.., k]."""
    distance = before[..., None, None] + queries[:, None] - keys
    return (distance >= 0) & (distance < window) if window else distance >= 0


@dataclass(frozen=True)
class Layout:
    """Attention of the sequences of a plan: some are padded to rectangles, others computed alone."""

    queries: Tensor  # rows in all rectangles, one after another
    keys: Tensor  # rows that they attend to
    shapes: tuple[tuple[int, int, int], ...]  # per rectangle: sequences, longest, longest context
    hidden: tuple[Tensor, ...]  # per rectangle [sequences, 1, longest, longest context]: 0 or -inf
    alone: tuple[tuple[int, int, int, int], ...]  # per sequence: first and number of rows before, first and number
    order: Tensor | None  # where each row stands in rectangles and sequences alone; None: as it is
    context: Tensor | None  # rows before the sequences alone, if they are no stretch of rows


def _layout(sequences: Sequences, window: int, like: Tensor) -> Layout:
    spans, some = sequences.before + sequences.lengths, sequences.lengths > 0
    short = some & (spans <= LONGEST_TOGETHER) & (like.device.type == "cpu")
    cuts = _cuts(sequences, np.flatnonzero(short))
    rectangles = [_rectangle(sequences[chosen], window, like.dtype) for chosen in cuts]
    long = sequences[np.flatnonzero(some & ~short)]
    return Layout(
        queries=_flat([rectangle.queries for rectangle in rectangles]),
        keys=_flat([rectangle.keys for rectangle in rectangles]),
        shapes=tuple((*rectangle.queries.shape, rectangle.keys.shape[1]) for rectangle in rectangles),
        hidden=tuple(rectangle.hidden for rectangle in rectangles), alone=tuple(long.rows()),
        order=_order(rectangles, long) if rectangles else None, context=_on(sequences.context, like.device),
    )


def _cuts(sequences: Sequences, chosen: Ints) -> Iterator[Ints]:
    """Sequences by length, cut into rectangles before there is too much padding in one."""
    chosen = chosen[np.argsort(-sequences.lengths[chosen], kind="stable")]
    begin, highest, filled = 0, 0, 0
    for place, (_, before, _, length) in enumerate(sequences[chosen].rows()):
        span = before + length
        highest, filled = max(highest, span), filled + length * span
        if (place + 1 - begin) * int(sequences.lengths[chosen[begin]]) * highest - filled > MOST_PADDING:
            yield chosen[begin:place]
            begin, highest, filled = place, span, length * span
    if len(chosen):
        yield chosen[begin:]


@dataclass(frozen=True)
class Rectangle:
    """Sequences padded to the longest; the numbers are rows of the plan, 0 for padding."""

    queries: Ints  # [sequences, longest]
    keys: Ints  # [sequences, longest context]
    hidden: Tensor  # [sequences, 1, longest, longest context]: 0 or -inf
    real: NDArray[np.bool_]  # [sequences, longest]


def _rectangle(part: Sequences, window: int, dtype: torch.dtype) -> Rectangle:
    spans, before = part.before + part.lengths, part.before[:, None]
    place, span = np.arange(part.lengths.max()), np.arange(spans.max())
    real = place < part.lengths[:, None]
    queried = np.where(span < spans[:, None], part.first[:, None] + span - before, 0)
    # A padded query sees the first key: a row of -inf alone would be NaN.
    seen = visible(part.before, place, span, window) | (~real[..., None] & (span == 0))
    hidden = torch.zeros(seen.shape, dtype=dtype).masked_fill_(torch.from_numpy(~seen), float("-inf"))
    return Rectangle(
        queries=np.where(real, part.first[:, None] + place, 0),
        keys=np.where(span < before, part.earlier(part.before_first[:, None] + span), queried), hidden=hidden[:, None],
        real=real,
    )


def _order(rectangles: Sequence[Rectangle], long: Sequences) -> Tensor:
    """For each row of the plan its place in all rectangles and what follows them."""
    real = np.concatenate([rectangle.real.ravel() for rectangle in rectangles])
    rows = [rectangle.queries[rectangle.real] for rectangle in rectangles]
    rows += [np.arange(count) + first for _, _, first, count in long.rows()]
    order = np.empty(sum(len(part) for part in rows), np.int64)
    places = np.concatenate([np.flatnonzero(real), np.arange(long.lengths.sum()) + len(real)])
    order[np.concatenate(rows)] = places
    return torch.from_numpy(order)


def _flat(arrays: Sequence[Ints]) -> Tensor:
    return torch.from_numpy(np.concatenate([array.ravel() for array in arrays])) if arrays else torch.empty(0)


def _together(query: Tensor, key: Tensor, value: Tensor, layout: Layout, rule: Rule) -> list[Tensor]:
    """The attention of each rectangle, [places, heads, size], padding included."""
    if not layout.shapes:
        return []
    places = [count * longest for count, _, longest in layout.shapes]
    pieces = zip(
        torch.split_with_sizes(_gathered(query, layout.queries), [count * most for count, most, _ in layout.shapes]),
        torch.split_with_sizes(_gathered(key, layout.keys), places),
        torch.split_with_sizes(_gathered(value, layout.keys), places), strict=True,
    )
    mixed = []
    for (count, _, _), three, hidden in zip(layout.shapes, pieces, layout.hidden, strict=True):
        queries, keys, values = (_heads_first(rows, count, query.shape[1]) for rows in three)
        mixed.append(rule.mixed(queries, keys, values, hidden).transpose(1, 2).flatten(0, 1))
    return mixed


def _gathered(heads: Tensor, index: Tensor) -> Tensor:
    """[1, heads, rows, size] at an index of rows, as [places, heads, size]."""
    rows = heads[0].transpose(0, 1)
    return F.embedding(index, rows.flatten(1)).view(-1, *rows.shape[1:])


def _heads_first(rows: Tensor, sequences: int, heads: int) -> Tensor:
    """[places, heads, size] as [sequences, heads, length, size], with so many heads."""
    by_head = rows.view(sequences, -1, *rows.shape[1:]).transpose(1, 2)
    return by_head if by_head.shape[1] == heads else by_head.repeat_interleave(heads // by_head.shape[1], 1)


def _alone(
    query: Tensor, key: Tensor, value: Tensor, place: tuple[int, int, int, int], context: Tensor | None, rule: Rule
) -> Tensor:
    """A sequence alone: [rows, heads, size]."""
    start, count, first, length = place
    queried, stretch = slice(first, first + length), slice(start, start + count)
    repeats = query.shape[1] // key.shape[1]
    before = (
        rows[:, :, stretch] if context is None else rows.index_select(2, context[stretch]) for rows in (key, value)
    )
    keys, values = (
        torch.cat([rows, own[:, :, queried]], 2).repeat_interleave(repeats, 1)
        for rows, own in zip(before, (key, value), strict=True)
    )
    return _sequence(query[:, :, queried], keys, values, count, rule)[0].transpose(0, 1)


def _sequence(queries: Tensor, keys: Tensor, values: Tensor, before: int, rule: Rule) -> Tensor:
    """A sequence alone: [1, heads, length, size], of which `before` keys more than queries."""
    length, context = queries.shape[2], keys.shape[2]
    window = rule.window if rule.window < context else 0
    if not (window or before or rule.cap) and rule.sinks is None:
        return F.scaled_dot_product_attention(queries, keys, values, is_causal=True, scale=rule.scale)
    place, span = (torch.arange(count, device=queries.device) for count in (length, context))
    seen = visible(torch.tensor(before, device=queries.device), place, span, window)
    hidden = torch.zeros(seen.shape, dtype=queries.dtype, device=queries.device)
    return rule.mixed(queries, keys, values, hidden.masked_fill_(~seen, float("-inf")))
