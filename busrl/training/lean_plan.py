"""Where every row of a micro-batch's lean forward comes from and which rows attend to which.

Made from the samples with NumPy once per micro-batch, shared by all layers. Knows nothing of weights.

- Rows are: for each distinct prompt all tokens but the last; then, per sample, the last prompt token and all
  generated tokens but the last. The second part has one row per trained token, in flat order.
- A padded query reads row 0 and its result is dropped; a padded key lies to the right of every real query of its row.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from .batch import Ints, Sample

PIECES, SMALLEST_PIECE = 4, 32


class Heads(NamedTuple):
    """Head counts and size. A row of projections is [query heads, key heads, value heads] of `size` numbers each."""

    query: int
    key: int
    size: int

    @property
    def all(self) -> int:
        return self.query + 2 * self.key


@dataclass(frozen=True)
class Spot:
    """One attention over a rectangle, for consecutive rows."""

    queries: Tensor  # [sequences x heads x longest], indices into rows of single query heads
    keys: Tensor  # [sequences x longest context], rows
    bias: Tensor  # [sequences, queries, keys], 0 or -inf
    results: Tensor  # per row and head: its place in `queries`


@dataclass(frozen=True)
class Plan:
    """`prompts` and `own` cover the two kinds of rows, in the order of the rows."""

    ids: Tensor
    positions: Tensor
    shared: int  # rows of the first kind
    prompts: Spot
    own: tuple[Spot, ...]


def plan_of(samples: Sequence[Sample], heads: Heads, dtype: torch.dtype) -> Plan:
    """The plan of these samples."""
    prompts: dict[bytes, int] = {}
    which = np.array([prompts.setdefault(sample.prompt_ids.tobytes(), len(prompts)) for sample in samples])
    first = {index: sample for sample, index in zip(reversed(samples), which[::-1].tolist(), strict=True)}
    shared_lengths = np.array([len(first[index].prompt_ids) - 1 for index in range(len(prompts))])
    own_lengths = np.fromiter((len(sample.token_ids) for sample in samples), np.int64, len(samples))
    starts = shared_lengths[which]
    shared = int(shared_lengths.sum())
    pieces = [first[index].prompt_ids[:-1] for index in range(len(prompts))]
    pieces += [part for sample in samples for part in (sample.prompt_ids[-1:], sample.token_ids[:-1])]
    positions = np.concatenate([_counts(shared_lengths), _counts(own_lengths) + np.repeat(starts, own_lengths)])
    shared_first, own_first = _starts(shared_lengths), _starts(own_lengths) + shared
    none = np.zeros_like(shared_lengths)
    return Plan(
        ids=torch.from_numpy(np.concatenate(pieces).astype(np.int64)),
        positions=torch.from_numpy(positions), shared=shared,
        prompts=_spot(none, none, shared_first, shared_lengths, heads, dtype),
        own=tuple(_spot(shared_first[which[part]], starts[part], own_first[part], own_lengths[part], heads, dtype)
                  for part in _alike(own_lengths + starts)))  # fmt: skip


def _alike(lengths: Ints) -> list[slice]:
    """Consecutive samples cut where the lengths change enough: a rectangle per piece, little padding, few pieces."""
    pieces = min(PIECES, 1 + len(lengths) // SMALLEST_PIECE)
    edges = [len(lengths) * piece // pieces for piece in range(pieces + 1)]
    return [slice(low, high) for low, high in itertools.pairwise(edges)]


def _starts(lengths: Ints) -> Ints:
    return np.cumsum(lengths) - lengths


def _counts(lengths: Ints) -> Ints:
    return np.arange(int(lengths.sum())) - np.repeat(_starts(lengths), lengths)


def _spot(before_first: Ints, before: Ints, first: Ints, lengths: Ints, heads: Heads, dtype: torch.dtype) -> Spot:
    """Per sequence, attention of the rows from `first` on to themselves and to `before` rows from `before_first` on."""
    wide = max(int(lengths.max()), 1)
    place = np.arange(wide)
    queries = np.where(place < lengths[:, None], first[:, None] + place, 0)
    spots = np.arange(max(int((before + lengths).max()), 1))
    own = np.where(spots < (before + lengths)[:, None], first[:, None] + spots - before[:, None], 0)
    keys = np.where(spots < before[:, None], before_first[:, None] + spots, own)
    seen = spots <= before[:, None, None] + place[:, None]
    bias = torch.zeros(seen.shape, dtype=dtype).masked_fill_(torch.from_numpy(~seen), float("-inf"))
    return Spot(
        queries=_per_head(queries, heads), keys=torch.from_numpy(keys).view(-1), bias=bias,
        results=_results(lengths, wide, heads))  # fmt: skip


def _per_head(rows: Ints, heads: Heads) -> Tensor:
    """[sequences, length] of rows to [sequences x heads x length] of rows of single heads."""
    return torch.from_numpy(rows[:, None] * heads.query + np.arange(heads.query)[:, None]).view(-1)


def _results(lengths: Ints, wide: int, heads: Heads) -> Tensor:
    """Per row and head the place in [sequences, heads, wide]."""
    sequences = np.repeat(np.arange(len(lengths)), lengths)
    each = np.arange(heads.query)
    return torch.from_numpy((sequences[:, None] * heads.query + each) * wide + _counts(lengths)[:, None]).view(-1)
