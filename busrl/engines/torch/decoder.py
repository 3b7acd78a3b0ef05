"""Runs a causal language model over rows of a cache: the interface, and the implementations for any architecture.

Used by the torch engine. `fast` has another decoder for the common block structure, and chooses one. Knows nothing of
sampling, requests or weights arriving.

- A prefill computes all tokens of a prompt but the last; the last one enters the next decoding step with all others.
  So there is one place where logits are made, and a prefill never needs the output layer.
- Prompts are padded on the right: the causal mask alone keeps padding out of every real position.
- Rows in use are always the first n, so that a step works on slices instead of gathered copies.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
from transformers.cache_utils import Cache

FIRST_ROOM = 128
LOGITS = 1 << 25  # numbers that one forward of a `WholeDecoder` may write where the head cannot be called by itself
StateKey = tuple[str, int, int]  # kind (conv, recurrent), layer, number in the layer


# -- the cache -----

class RowCache(Cache):  # type: ignore[misc, unused-ignore]
    """Keys and values per layer, [rows, heads, positions, head width]; `plan_*` says what the next forward does. For
    the generic decoders it also plays the part of a transformers Cache.

    A row is written from position 0 by a prefill, perhaps continued, then one position further by each decoding step.
    Bytes past a row's own length are garbage; the mask keeps attention away from them, so rows are never cleared. Only
    the used prefix of the positions is read; room grows by doubling up to `max_length`.
    """

    def __init__(self, rows: int, max_length: int) -> None:
        # The base class would build its own layer objects; models only call the methods below.
        self.layers: Any = []
        self.rows = rows
        self.max_length = max_length
        self.room = min(max_length, FIRST_ROOM)
        self.keys: list[torch.Tensor] = []
        self.values: list[torch.Tensor] = []
        self._filled: torch.Tensor | None = None  # the rows of a prefill
        self._begun: torch.Tensor | None = None  # positions [rows, length] where they are continued
        self._span = 0
        self._active = 0
        self._positions: torch.Tensor | None = None
        self._flat: dict[int, torch.Tensor] = {}
        self._places: dict[int, int] = {}  # of the layers that attend, among themselves: others may lie in between

    # -- what the next forward does -----

    def plan_prefill(self, rows: torch.Tensor, end: int) -> None:
        """The next forward computes the first `end` positions of new sequences, one for each of `rows`."""
        self._reserve(end)
        self._filled, self._begun, self._span = rows, None, end

    def plan_extend(self, rows: torch.Tensor, positions: torch.Tensor, span: int) -> None:
        """The next forward continues `rows` at `positions` [rows, length]; `span` covers them all."""
        self._reserve(span)
        self._filled, self._begun, self._span = rows, positions, span

    def plan_step(self, positions: torch.Tensor, span: int) -> None:
        """The next forward computes one token for each of the first rows, at `positions`; `span` covers them all."""
        self._reserve(span)
        self._filled = None
        self._positions, self._active, self._span = positions, len(positions), span
        self._flat.clear()

    # -- what a model calls -----

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store new keys and values of a layer; returns those that this forward attends to."""
        layer = self._places.setdefault(layer_idx, len(self._places))
        if (rows := self._filled) is None:
            return self.store_step(layer, key_states, value_states)
        self._grow_layers(layer, key_states, value_states)
        for store, new in ((self.keys[layer], key_states), (self.values[layer], value_states)):
            if self._begun is None:
                store[rows, :, : self._span] = new
            else:
                store[rows[:, None], :, self._begun] = new.transpose(1, 2)
        if self._begun is None:
            return key_states, value_states
        return self.keys[layer][rows, :, : self._span], self.values[layer][rows, :, : self._span]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Always 0: positions and masks are passed explicitly, so nothing may be derived from this."""
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return self._span, 0

    def get_max_cache_shape(self, layer_idx: int = 0) -> int:
        return self.max_length

    # -- storage -----

    def store_step(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Store one position of each active row ([rows, heads, 1, width] or without the 1); returns the used prefix."""
        self._grow_layers(layer, keys, values)
        for store, new in ((self.keys[layer], keys), (self.values[layer], values)):
            heads, width = store.shape[1], store.shape[3]
            store.view(-1, width).index_copy_(0, self._flat_positions(heads), new.reshape(-1, width))
        rows, span = self._active, self._span
        return self.keys[layer][:rows, :, :span], self.values[layer][:rows, :, :span]

    def move(self, source: torch.Tensor, target: torch.Tensor, span: int) -> None:
        """Copy the first `span` positions of rows `source` to rows `target`."""
        for store in (*self.keys, *self.values):
            store[target, :, :span] = store[source, :, :span]

    def begin(self, rows: torch.Tensor) -> None:
        """Sequences without a prefill begin in these rows: nothing to do, since a mask hides older keys there."""

    def clear(self, rows: torch.Tensor) -> None:
        """Zero rows that hold numbers which are not finite: a masked NaN would still spoil the row's next sequence."""
        for store in (*self.keys, *self.values):
            store[rows] = 0

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


# -- decoders -----

class Decoder(ABC):
    """A model bound to a cache. `equal_lengths`: a prefill has to be without padding."""

    equal_lengths = False
    cache: RowCache | TokenRows

    @abstractmethod
    def prefill(self, ids: torch.Tensor, rows: torch.Tensor) -> None:
        """Fill `rows` from the beginning with `ids` [rows, length]."""

    @abstractmethod
    def extend(self, ids: torch.Tensor, rows: torch.Tensor, positions: torch.Tensor, span: int) -> None:
        """Continue `rows` with `ids` at `positions`, both [rows, length], over what they hold; `span` > every position.
        With `equal_lengths` one row at a time."""

    @abstractmethod
    def step(self, tokens: torch.Tensor, positions: torch.Tensor, span: int) -> torch.Tensor:
        """Logits [rows, vocabulary] after one more token for each of the first rows; `span` > every position."""


class GenericDecoder(Decoder):
    """Any Hugging Face causal model with keys and values: its own forward, explicit positions, 4-D masks."""

    cache_type = RowCache
    cache: RowCache

    def __init__(self, model: Any, rows: int, max_length: int) -> None:
        self.cache = self.cache_type(rows, max_length)
        self._model = model
        self._base = model.base_model
        config = model.config.get_text_config()
        self._layer_types: tuple[str, ...] = tuple(sorted(set(getattr(config, "layer_types", None) or ())))
        self._window = window_of(config)
        self._dtype = next(model.parameters()).dtype

    def prefill(self, ids: torch.Tensor, rows: torch.Tensor) -> None:
        self.cache.plan_prefill(rows, ids.shape[1])
        keys = torch.arange(ids.shape[1], device=ids.device)
        self._forward(self._base, ids, keys[None], keys)

    def extend(self, ids: torch.Tensor, rows: torch.Tensor, positions: torch.Tensor, span: int) -> None:
        self.cache.plan_extend(rows, positions, span)
        self._forward(self._base, ids, positions, torch.arange(span, device=ids.device))

    def step(self, tokens: torch.Tensor, positions: torch.Tensor, span: int) -> torch.Tensor:
        self.cache.plan_step(positions, span)
        keys = torch.arange(span, device=tokens.device)
        logits: torch.Tensor = self._forward(self._model, tokens[:, None], positions[:, None], keys).logits
        return logits[:, -1]

    def _forward(self, model: Any, ids: torch.Tensor, positions: torch.Tensor, keys: torch.Tensor) -> Any:
        """Of `ids` [sequences, length] at `positions` [sequences or 1, length], over the positions `keys`."""
        return model(
            input_ids=ids, attention_mask=self._masks(positions[:, None, :, None], keys),
            position_ids=positions.expand(len(ids), -1), past_key_values=self.cache, use_cache=True,
        )

    def _masks(self, queries: torch.Tensor, keys: torch.Tensor) -> Any:
        """Additive masks, one per kind of layer where a model has several (all positions, a sliding window)."""
        full = sliding = self._additive(keys <= queries)
        if self._window is not None:
            sliding = self._additive((keys <= queries) & (keys > queries - self._window))
        return self._by_kind(full, sliding)

    def _by_kind(self, full: torch.Tensor, sliding: torch.Tensor) -> Any:
        if self._window is None or not self._layer_types:
            return sliding
        return {kind: sliding if "sliding" in kind else full for kind in self._layer_types}

    def _additive(self, allowed: torch.Tensor) -> torch.Tensor:
        mask = torch.zeros(allowed.shape, dtype=self._dtype, device=allowed.device)
        return mask.masked_fill_(~allowed, torch.finfo(self._dtype).min)


def window_of(config: Any) -> int | None:
    """The sliding window, if any layer uses one."""
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None)
    if not window or getattr(config, "use_sliding_window", True) is False:
        return None
    if kinds and not any("sliding" in kind for kind in kinds):
        return None
    return int(window)


# -- models that do not keep their past in keys and values alone -----

class StateCache(RowCache):
    """A `RowCache` that also plays the part of transformers' cache for convolution and recurrent states."""

    def __init__(self, rows: int, max_length: int) -> None:
        super().__init__(rows, max_length)
        self.states: dict[StateKey, torch.Tensor] = {}  # [rows, ...] each
        self._row = 0  # that is continued

    def plan_extend(self, rows: torch.Tensor, positions: torch.Tensor, span: int) -> None:
        super().plan_extend(rows, positions, span)
        self._row = int(rows)

    # -- what a model calls -----

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        """The last inputs of a convolution; None at the beginning. The model may write into it."""
        return self._state(("conv", layer_idx, state_idx))

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        return self._state(("recurrent", layer_idx, state_idx))

    def update_conv_state(
        self, conv_states: torch.Tensor, layer_idx: int, state_idx: int = 0, conv_kernel_size: int | None = None,
        **_: object,
    ) -> torch.Tensor:
        """Keep the last inputs; returns those before and the new ones."""
        key = ("conv", layer_idx, state_idx)
        before = self._state(key)
        size = conv_kernel_size or (conv_states if before is None else before).shape[-1]
        if before is not None:
            full = torch.cat((before, conv_states), -1)
        else:
            full = torch.nn.functional.pad(conv_states, (max(0, size - conv_states.shape[-1]), 0))
        self._keep(key, full[..., -size:])
        return full

    def update_recurrent_state(
        self, recurrent_states: torch.Tensor, layer_idx: int, state_idx: int = 0, **_: object
    ) -> torch.Tensor:
        self._keep(("recurrent", layer_idx, state_idx), recurrent_states)
        return recurrent_states

    def is_recording_past(self, layer_idx: int) -> bool:
        return False

    # -- storage -----

    def move(self, source: torch.Tensor, target: torch.Tensor, span: int) -> None:
        super().move(source, target, span)
        for store in self.states.values():
            store[target] = store[source]

    def begin(self, rows: torch.Tensor) -> None:
        for store in self.states.values():
            store[rows] = 0

    def clear(self, rows: torch.Tensor) -> None:
        super().clear(rows)
        self.begin(rows)

    def _state(self, key: StateKey) -> torch.Tensor | None:
        if self._filled is None:
            return self.states[key][: self._active] if key in self.states else None
        # A view: for a single token the model writes into it.
        return self.states[key][self._row : self._row + 1] if self._begun is not None else None

    def _keep(self, key: StateKey, new: torch.Tensor) -> None:
        if key not in self.states:
            self.states[key] = new.new_zeros((self.rows, *new.shape[1:]))
        self.states[key][slice(self._active) if self._filled is None else self._filled] = new


class StateDecoder(GenericDecoder):
    """A model some of whose layers keep states (linear attention, convolutions, Mamba), row by row beside the keys and
    values of the others. Masks go to layers that attend. A state has no positions that a mask could hide: a prefill has
    no padding, and a row begins with states of zero."""

    equal_lengths = True
    cache_type = StateCache

    def _by_kind(self, full: torch.Tensor, sliding: torch.Tensor) -> Any:
        if not (kinds := self._layer_types):
            return sliding
        attending = [kind for kind in kinds if "hybrid" in kind or ("attention" in kind and "linear" not in kind)]
        if not attending:
            return None
        # Layers of both kinds in one ask for the mask of an attention layer.
        found = {"full_attention": full, **dict.fromkeys((*kinds, "linear_attention"))}
        return found | {kind: sliding if "sliding" in kind else full for kind in attending}


class TokenRows:
    """What a `WholeDecoder` keeps: the tokens, row by row."""

    def __init__(self, rows: int, max_length: int, device: torch.device) -> None:
        self.ids = torch.zeros((rows, max_length), dtype=torch.int64, device=device)

    def move(self, source: torch.Tensor, target: torch.Tensor, span: int) -> None:
        self.ids[target] = self.ids[source]

    def begin(self, rows: torch.Tensor) -> None:
        """Nothing: what a row has beyond its own tokens lies to the right of them."""

    def clear(self, rows: torch.Tensor) -> None:
        self.ids[rows] = 0


class WholeDecoder(Decoder):
    """Any causal language model: each step is a forward pass over all tokens. New weights leave nothing stale in it. It
    reads the logits of each row's last token, where a causal model sees no padding to the right."""

    cache: TokenRows

    def __init__(self, model: Any, rows: int, max_length: int, head_apart: bool = True) -> None:
        self._model = model
        self._head = model.get_output_embeddings() if head_apart else None
        self._vocabulary = model.get_input_embeddings().weight.shape[0]
        self.cache = TokenRows(rows, max_length, next(model.parameters()).device)

    def prefill(self, ids: torch.Tensor, rows: torch.Tensor) -> None:
        self.cache.ids[rows, : ids.shape[1]] = ids

    def extend(self, ids: torch.Tensor, rows: torch.Tensor, positions: torch.Tensor, span: int) -> None:
        self.cache.ids[rows[:, None], positions] = ids

    def step(self, tokens: torch.Tensor, positions: torch.Tensor, span: int) -> torch.Tensor:
        everyone = torch.arange(len(tokens), device=tokens.device)
        self.cache.ids[everyone, positions] = tokens
        if self._head is not None:
            hidden = self._model.base_model(input_ids=self.cache.ids[everyone, :span], use_cache=False)[0]
            logits: torch.Tensor = self._head(hidden[everyone, positions])
            return logits
        some = max(1, LOGITS // (span * self._vocabulary))
        return torch.cat([self._logits(rows, positions, span) for rows in torch.split(everyone, some)])

    def _logits(self, rows: torch.Tensor, positions: torch.Tensor, span: int) -> torch.Tensor:
        found = self._model(input_ids=self.cache.ids[rows, :span], use_cache=False).logits
        last: torch.Tensor = found[torch.arange(len(rows), device=rows.device), positions[rows]]
        return last


def whole_by_logits(model: Any, rows: int, max_length: int) -> WholeDecoder:
    """For models that change what their head says, by a scale or a cap."""
    return WholeDecoder(model, rows, max_length, head_apart=False)
