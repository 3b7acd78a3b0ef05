"""The key-value cache: one row per running sequence, every row with its own write position.

Used by both decoders; for the generic one it also plays the part of a transformers Cache. A row is written from
position 0 by a prefill, or at once from a `Staging` that a long prompt filled in pieces; then one position further by
each decoding step. Knows nothing of requests.

- Bytes past a row's own length are garbage; the mask keeps attention away from them, so rows are never cleared.
- Rows in use are always the first n, so that a step works on slices instead of gathered copies.
- Only the used prefix of the positions is read; room grows by doubling up to `max_length`.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers.cache_utils import Cache

FIRST_ROOM = 128
StateKey = tuple[str, int, int]  # kind (conv, recurrent), layer, number in the layer


class Staging:
    """Keys and values of one sequence of `length` tokens while it is prefilled in pieces; `done` of them are there."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.done = 0
        self.keys: list[torch.Tensor] = []
        self.values: list[torch.Tensor] = []
        self.states: dict[StateKey, torch.Tensor] = {}  # of layers that keep their past in states
        self.pieces: list[torch.Tensor] = []  # the tokens so far, for a decoder that keeps nothing else

    def store(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Append a piece [1, heads, positions, width] to a layer; returns all that the piece attends to."""
        stop = self.done + keys.shape[2]
        for stores, new in ((self.keys, keys), (self.values, values)):
            if layer == len(stores):
                stores.append(new.new_empty((1, new.shape[1], self.length, new.shape[3])))
            stores[layer][:, :, self.done : stop] = new
        return self.keys[layer][:, :, :stop], self.values[layer][:, :, :stop]


class RowCache(Cache):  # type: ignore[misc, unused-ignore]
    """Keys and values per layer, [rows, heads, positions, head width]; `plan_*` says what the next forward does."""

    def __init__(self, rows: int, max_length: int) -> None:
        # The base class would build layer objects of its own; models only call the methods below.
        self.layers: Any = []
        self.rows = rows
        self.max_length = max_length
        self.room = min(max_length, FIRST_ROOM)
        self.keys: list[torch.Tensor] = []
        self.values: list[torch.Tensor] = []
        self._prefill: tuple[torch.Tensor, torch.Tensor | None] | None = None
        self._staging: Staging | None = None
        self._span = 0
        self._active = 0
        self._positions: torch.Tensor | None = None
        self._flat: dict[int, torch.Tensor] = {}
        self._places: dict[int, int] = {}  # of the layers that attend, among themselves: others may lie in between

    # -- what the next forward does -----------------------------------------------------------------------------

    def plan_prefill(self, rows: torch.Tensor, source: torch.Tensor | None, length: int) -> None:
        """The next forward computes `length` positions of new sequences; sequence `source[i]` goes to row `rows[i]`."""
        self._reserve(length)
        self._prefill, self._staging = (rows, source), None

    def plan_piece(self, staging: Staging) -> None:
        """The next forward computes a piece of the one sequence of `staging`, after those that it has."""
        self._prefill, self._staging = None, staging

    def plan_step(self, positions: torch.Tensor, span: int) -> None:
        """The next forward computes one token for each of the first rows, at `positions`; `span` covers them all."""
        self._reserve(span)
        self._prefill = self._staging = None
        self._positions, self._active, self._span = positions, len(positions), span
        self._flat.clear()

    # -- what a model calls ---------------------------------------------------------------------------------------

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store new keys and values of a layer; returns those that this forward attends to."""
        layer = self._places.setdefault(layer_idx, len(self._places))
        if self._staging is not None:
            return self._staging.store(layer, key_states, value_states)
        if self._prefill is not None:
            self._grow_layers(layer, key_states, value_states)
            self._store_prefill(self.keys[layer], key_states)
            self._store_prefill(self.values[layer], value_states)
            return key_states, value_states
        return self.store_step(layer, key_states, value_states)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Always 0: positions and masks are passed explicitly, so nothing may be derived from this."""
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        if self._staging is not None:
            return self._staging.done + query_length, 0
        return (query_length if self._prefill is not None else self._span), 0

    def get_max_cache_shape(self, layer_idx: int = 0) -> int:
        return self.max_length

    # -- storage ----------------------------------------------------------------------------------------------------

    def store_step(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Store one position of each active row ([rows, heads, 1, width] or without the 1); returns the used prefix."""
        self._grow_layers(layer, keys, values)
        for store, new in ((self.keys[layer], keys), (self.values[layer], values)):
            heads, width = store.shape[1], store.shape[3]
            store.view(-1, width).index_copy_(0, self._flat_positions(heads), new.reshape(-1, width))
        rows, span = self._active, self._span
        return self.keys[layer][:rows, :, :span], self.values[layer][:rows, :, :span]

    def adopt(self, staging: Staging, rows: torch.Tensor) -> None:
        """Write a sequence that is complete into each of `rows`."""
        self._reserve(staging.length)
        for layer, (keys, values) in enumerate(zip(staging.keys, staging.values)):
            self._grow_layers(layer, keys, values)
            self.keys[layer][rows, :, : staging.length] = keys
            self.values[layer][rows, :, : staging.length] = values

    def move(self, source: torch.Tensor, target: torch.Tensor, span: int) -> None:
        """Copy the first `span` positions of rows `source` to rows `target`."""
        for store in (*self.keys, *self.values):
            store[target, :, :span] = store[source, :, :span]

    def begin(self, rows: torch.Tensor) -> None:
        """Sequences without a prefill begin in these rows: nothing to do, since a mask hides what others left there."""

    def clear(self, rows: torch.Tensor) -> None:
        """Zero rows that hold numbers which are not finite: a masked NaN would still spoil the row's next sequence."""
        for store in (*self.keys, *self.values):
            store[rows] = 0

    def _store_prefill(self, store: torch.Tensor, new: torch.Tensor) -> None:
        assert self._prefill is not None
        rows, source = self._prefill
        store[rows, :, : new.shape[2]] = new if source is None else new[source]

    def _flat_positions(self, heads: int) -> torch.Tensor:
        """Index of each (row, head, position) that this step writes; the same for all layers with as many heads."""
        index = self._flat.get(heads)
        if index is None:
            assert self._positions is not None
            lines = torch.arange(self._active * heads, device=self._positions.device).view(-1, heads) * self.room
            index = self._flat[heads] = (lines + self._positions[:, None]).view(-1)
        return index

    def _grow_layers(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Allocate a layer that is the next one: its shape is only known from its first keys and values."""
        if layer < len(self.keys):
            return
        if layer != len(self.keys):
            raise IndexError(f"cache layer {layer} came before layer {len(self.keys)}; layers must come in order")
        for stores, like in ((self.keys, keys), (self.values, values)):
            shape = (self.rows, like.shape[1], self.room, like.shape[-1])
            stores.append(torch.zeros(shape, dtype=like.dtype, device=like.device))

    def _reserve(self, length: int) -> None:
        if length <= self.room:
            return
        if length > self.max_length:
            raise IndexError(f"position {length} is past the cache's max_length {self.max_length}")
        old, self.room = self.room, min(self.max_length, max(length, 2 * self.room))
        for stores in (self.keys, self.values):
            for layer, store in enumerate(stores):
                grown = store.new_zeros((store.shape[0], store.shape[1], self.room, store.shape[3]))
                grown[:, :, :old] = store
                stores[layer] = grown
