"""Packed rows: samples one after another without padding, a shared prompt once, and the attention over them.

`plan_of` lays samples out; `attend` is the attention that transformers calls in every layer of a model that `adopt`
prepared, with the plan as an argument of the model's call. Knows nothing of heads, losses or optimisers.

- A generated token attends to the prompt of its own sample and to what was generated before it there, to nothing else.
- Positions begin at 0 in every sample. Sliding window, cap of the scores and attention sinks are those of the layer.
- On a CPU short sequences are computed together, as rectangles; long ones, and all on other devices, one by one, where
  no score is ever kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from busrl.training.batch import Ints, Sample, numbered

NAME = "busrl_packed"  # by which transformers knows `attend`
PIECES, SMALLEST_PIECE = 8, 8  # rectangles of a micro-batch at most, sequences of one at least
LONGEST_TOGETHER = 256  # of a rectangle: above, its padding and its scores cost more than separate calls


@dataclass(frozen=True)
class Sequences:
    """Consecutive rows of some sequences, each of which attends to itself and to a stretch of rows before it."""

    before_first: Ints  # per sequence: the first row of that stretch,
    before: Ints  # and how many they are
    first: Ints
    lengths: Ints
    made: dict[Any, Any] = field(default_factory=dict, compare=False)  # rectangles by window, made once for all layers

    @property
    def longest(self) -> int:
        return int((self.before + self.lengths).max(initial=1))


@dataclass(frozen=True)
class Plan:
    """The rows of a micro-batch: the prompt of a group but for its last token, once for all members, then one row per
    generated token, in flat order: the position that predicts it."""

    ids: Tensor  # [rows]
    positions: Tensor  # [rows]
    shared: int  # rows of the first kind
    parts: tuple[Sequences, ...]  # cover all rows, in order


def plan_of(samples: Sequence[Sample], device: torch.device | str = "cpu") -> Plan:
    """The plan of these samples, whose ids are int32."""
    prompts: dict[bytes, int] = {}
    which = np.array([prompts.setdefault(sample.prompt_ids.tobytes(), len(prompts)) for sample in samples])
    pieces = [np.frombuffer(prompt, np.int32)[:-1] for prompt in prompts]
    shared_lengths = np.array([len(piece) for piece in pieces])
    own_lengths = np.array([len(sample.token_ids) for sample in samples])
    pieces += [part for sample in samples for part in (sample.prompt_ids[-1:], sample.token_ids[:-1])]
    shared, before = int(shared_lengths.sum()), shared_lengths[which]
    positions = np.concatenate([numbered(shared_lengths), numbered(own_lengths) + np.repeat(before, own_lengths)])
    shared_first = np.cumsum(shared_lengths) - shared_lengths
    own_first = np.cumsum(own_lengths) - own_lengths + shared
    none = np.zeros_like(shared_lengths)
    # Consecutive samples in a few rectangles, cut where lengths change enough: little padding.
    cuts = np.array_split(np.arange(len(samples)), min(PIECES, 1 + len(samples) // SMALLEST_PIECE))
    own = [Sequences(shared_first[which[part]], before[part], own_first[part], own_lengths[part]) for part in cuts]
    prompt = [Sequences(none, none, shared_first, shared_lengths)] if shared else []
    return Plan(
        ids=torch.from_numpy(np.concatenate(pieces).astype(np.int64)).to(device),
        positions=torch.from_numpy(positions).to(device), shared=shared, parts=(*prompt, *own),
    )


# -- attention ------------------------------------------------------------------------


def adopt(model: Any) -> None:
    """Let every layer of the model attend by `attend`; its next calls need `plan=`."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, lambda *_, **__: None)  # no mask: the plan says all
    model.set_attn_implementation(NAME)


def attend(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: None, *, plan: Plan | None = None,
    scaling: float | None = None, sliding_window: int | None = None, softcap: float | None = None,
    s_aux: Tensor | None = None, **_: Any,
) -> tuple[Tensor, None]:
    """What transformers asks of an attention: query [1, heads, rows, size], key and value perhaps with fewer heads;
    returns [1, rows, heads, size]. `s_aux` are the sinks of the heads. Without a plan every row of a batch is one
    sequence, padded at the right if at all."""
    rule = Rule(query.shape[-1] ** -0.5 if scaling is None else scaling, sliding_window or 0, softcap or 0.0, s_aux)
    if plan is None:
        batch = [part.transpose(0, 1).flatten(1, 2)[None] for part in (query, key, value)]
        mixed = _attended(batch[0], batch[1], batch[2], (_rows_of(len(query), query.shape[2]),), rule)
        return mixed.view(len(query), -1, *mixed.shape[1:]), None
    return _attended(query, key, value, plan.parts, rule)[None], None


def _rows_of(count: int, length: int) -> Sequences:
    """A batch of so many rows as one row of as many sequences."""
    none = np.zeros(count, np.int64)
    return Sequences(none, none, np.arange(count) * length, np.full(count, length))


def _attended(query: Tensor, key: Tensor, value: Tensor, parts: Sequence[Sequences], rule: Rule) -> Tensor:
    mixed = [
        _together(query, key, value, part, rule)
        if query.device.type == "cpu" and part.longest <= LONGEST_TOGETHER
        else _one_by_one(query, key, value, part, rule)
        for part in parts
    ]
    return torch.cat(mixed)


@dataclass(frozen=True)
class Rule:
    """How a layer turns scores into shares; 0 and None: not at all."""

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


def _seen(before: Ints, queries: Ints, keys: Ints, window: int) -> Any:
    """Whether query number q of a sequence may look at row k of what it attends to; broadcasts [.., q] and [.., k]."""
    distance = before[..., None, None] + queries[:, None] - keys
    return (distance >= 0) & (distance < window) if window else distance >= 0


@dataclass(frozen=True)
class Rectangle:
    """One attention over padded sequences of consecutive rows."""

    queries: Tensor  # [sequences, longest], rows
    keys: Tensor  # [sequences, longest context], rows
    hidden: Tensor  # [sequences, 1, longest, longest context], 0 or -inf
    real: Tensor  # the places in `queries`, flattened, that are no padding


def rectangle(part: Sequences, window: int, dtype: torch.dtype) -> Rectangle:
    """The rectangle of these sequences, made once for all layers with that window."""
    if (window, dtype) not in part.made:
        part.made[window, dtype] = _rectangle(part, window, dtype)
    found: Rectangle = part.made[window, dtype]
    return found


def _rectangle(part: Sequences, window: int, dtype: torch.dtype) -> Rectangle:
    place, span = np.arange(max(int(part.lengths.max()), 1)), np.arange(part.longest)
    real, before = place < part.lengths[:, None], part.before[:, None]
    own = np.where(span < before + part.lengths[:, None], part.first[:, None] + span - before, 0)
    # A padded query sees the first key: a row of -inf alone would be NaN.
    seen = _seen(part.before, place, span, window) | (~real[..., None] & (span == 0))
    hidden = torch.zeros(seen.shape, dtype=dtype).masked_fill_(torch.from_numpy(~seen), float("-inf"))
    return Rectangle(
        queries=torch.from_numpy(np.where(real, part.first[:, None] + place, 0)),
        keys=torch.from_numpy(np.where(span < before, part.before_first[:, None] + span, own)),
        hidden=hidden[:, None], real=torch.from_numpy(real.ravel().nonzero()[0]),
    )


def _together(query: Tensor, key: Tensor, value: Tensor, part: Sequences, rule: Rule) -> Tensor:
    """All sequences of the part as one rectangle; [rows of the part, heads, size]."""
    made = rectangle(part, rule.window, query.dtype)
    repeats = query.shape[1] // key.shape[1]
    keys, values = (_gathered(rows, made.keys, repeats) for rows in (key, value))
    mixed = rule.mixed(_gathered(query, made.queries), keys, values, made.hidden)
    return mixed.transpose(1, 2).flatten(0, 1)[made.real]


def _gathered(heads: Tensor, index: Tensor, repeats: int = 1) -> Tensor:
    """[1, heads, rows, size] at an index of [sequences, length], as [sequences, heads x repeats, length, size]."""
    rows = heads[0].transpose(0, 1)
    found = F.embedding(index, rows.flatten(1)).view(*index.shape, *rows.shape[1:]).transpose(1, 2)
    return found if repeats == 1 else found.repeat_interleave(repeats, 1)


def _one_by_one(query: Tensor, key: Tensor, value: Tensor, part: Sequences, rule: Rule) -> Tensor:
    """Sequence after sequence; [rows of the part, heads, size]."""
    repeats, mixed = query.shape[1] // key.shape[1], []
    for start, count, first, length in zip(part.before_first, part.before, part.first, part.lengths, strict=True):
        own = slice(int(first), int(first + length))
        stretch = slice(int(start), int(start + count))
        queries = query[:, :, own]
        keys, values = (
            torch.cat([rows[:, :, stretch], rows[:, :, own]], 2).repeat_interleave(repeats, 1) for rows in (key, value)
        )
        mixed.append(_sequence(queries, keys, values, int(count), rule)[0].transpose(0, 1))
    return torch.cat(mixed)


def _sequence(queries: Tensor, keys: Tensor, values: Tensor, before: int, rule: Rule) -> Tensor:
    """One sequence: [1, heads, length, size], of which `before` keys more than queries."""
    length, context = queries.shape[2], keys.shape[2]
    window = rule.window if rule.window < context else 0
    if not (window or before or rule.cap) and rule.sinks is None:
        return F.scaled_dot_product_attention(queries, keys, values, is_causal=True, scale=rule.scale)
    seen = _seen(np.array(before), np.arange(length), np.arange(context), window)
    hidden = torch.zeros(seen.shape, dtype=queries.dtype).masked_fill_(torch.from_numpy(~seen), float("-inf"))
    return rule.mixed(queries, keys, values, hidden.to(queries.device))
