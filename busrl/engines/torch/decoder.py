"""Runs a causal language model over rows of a cache, in the quickest way that agrees with the model's own forward.

Used by the torch engine. `choose_decoder` compares decoders with that forward when an engine is built, because wrong
log-probabilities would spoil training silently. A decoder that disagrees or raises is not used: the log says why, and
the next slower one is tried. Knows nothing of sampling, requests or updates of weights.

- A prefill computes all tokens of a prompt but the last, which enters the next decoding step with those of all others.
  So logits are computed in one place, and a prefill never needs the output layer.
- Prompts are padded on the right: the causal mask alone keeps padding out of every real position.
- Rows in use are always the first n, so that a step works on slices instead of gathered copies.
- The model's parameters stay the only copy: fused projections are made by moving the parameters' storage into one
  tensor each, so that a write into a parameter is a write into the fused one.
- Nothing derived from a weight is kept between steps; the rotary table depends on the configuration alone.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers.cache_utils import Cache

from busrl.errors import UserError

log = logging.getLogger("busrl")
FIRST_ROOM = 128
LOGITS = 1 << 25  # numbers that one forward of a `WholeDecoder` may write where the head cannot be called by itself
ROPE_TYPES = ("default", "linear", "llama3", "yarn")  # those whose table does not depend on the sequence's length
StateKey = tuple[str, int, int]  # kind (conv, recurrent), layer, number in the layer


# -- the cache -----

class RowCache(Cache):  # type: ignore[misc, unused-ignore]
    """Keys and values per layer, [rows, heads, positions, head width]. Call `plan_*` before each forward. For the
    generic decoders it is the transformers Cache too.

    A prefill writes a row from position 0 on, `extend` may continue it, and each decoding step writes one position
    more. Positions past a row's own length hold garbage, which the mask hides, so rows are never cleared. Only the used
    prefix of the positions is read; room grows by doubling up to `max_length`.
    """

    def __init__(self, rows: int, max_length: int) -> None:
        # The constructor of the base class would build layer objects; models call the methods below alone.
        self.layers: Any = []
        self.rows = rows
        self.max_length = max_length
        self.room = min(max_length, FIRST_ROOM)
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []
        self._filled: Tensor | None = None  # the rows of a prefill
        self._begun: Tensor | None = None  # positions [rows, length] at which those rows are continued
        self._span = 0
        self._active = 0
        self._positions: Tensor | None = None
        self._flat: dict[int, Tensor] = {}
        self._places: dict[int, int] = {}  # a layer's index -> its number among the layers that attend

    # -- what the next forward does -----

    def plan_prefill(self, rows: Tensor, end: int) -> None:
        """The next forward computes the first `end` positions of new sequences, one for each of `rows`."""
        self.reserve(end)
        self._filled, self._begun, self._span = rows, None, end

    def plan_extend(self, rows: Tensor, positions: Tensor, span: int) -> None:
        """The next forward continues `rows` at `positions` [rows, length]; `span` covers them all."""
        self.reserve(span)
        self._filled, self._begun, self._span = rows, positions, span

    def plan_step(self, positions: Tensor, span: int) -> None:
        """The next forward computes one token for each of the first rows, at `positions`; `span` covers them all."""
        self.reserve(span)
        self._filled = None
        self._positions, self._active, self._span = positions, len(positions), span
        self._flat.clear()

    # -- what a model calls -----

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
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

    def store_step(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Store one position of each active row ([rows, heads, 1, width] or without the 1); returns the used prefix."""
        self._grow_layers(layer, keys, values)
        for store, new in ((self.keys[layer], keys), (self.values[layer], values)):
            heads, width = store.shape[1], store.shape[3]
            store.view(-1, width).index_copy_(0, self._flat_positions(heads), new.reshape(-1, width))
        rows, span = self._active, self._span
        return self.keys[layer][:rows, :, :span], self.values[layer][:rows, :, :span]

    def move(self, source: Tensor, target: Tensor, span: int) -> None:
        """Copy the first `span` positions of rows `source` to rows `target`."""
        for store in (*self.keys, *self.values):
            store[target, :, :span] = store[source, :, :span]

    def begin(self, rows: Tensor) -> None:
        """Begin sequences without a prefill in these rows. Nothing to do: the mask hides older keys."""

    def clear(self, rows: Tensor) -> None:
        """Zero rows with numbers that are not finite: a NaN would spoil the row's next sequence even where masked."""
        for store in (*self.keys, *self.values):
            store[rows] = 0

    def _flat_positions(self, heads: int) -> Tensor:
        """Index of each (row, head, position) that this step writes; the same for all layers with as many heads."""
        index = self._flat.get(heads)
        if index is None:
            assert self._positions is not None
            lines = torch.arange(self._active * heads, device=self._positions.device).view(-1, heads) * self.room
            index = self._flat[heads] = (lines + self._positions[:, None]).view(-1)
        return index

    def _grow_layers(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Allocate the layer if it is new: only its first keys and values show its shape."""
        if layer < len(self.keys):
            return
        for stores, like in ((self.keys, keys), (self.values, values)):
            shape = (self.rows, like.shape[1], self.room, like.shape[-1])
            stores.append(torch.zeros(shape, dtype=like.dtype, device=like.device))

    def reserve(self, length: int, rows: int = 0) -> None:
        """Make room for so many positions; `rows` more than the cache was made with only before its first use."""
        self.rows = max(self.rows, rows)
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
    """A model bound to a cache. `equal_lengths`: a prefill must have no padding."""

    equal_lengths = False
    cache: RowCache | TokenRows

    @abstractmethod
    def prefill(self, ids: Tensor, rows: Tensor) -> None:
        """Fill `rows` from the beginning with `ids` [rows, length]."""

    @abstractmethod
    def extend(self, ids: Tensor, rows: Tensor, positions: Tensor, span: int) -> None:
        """Continue `rows` with `ids` at `positions`, both [rows, length], after what they hold; `span` > every
        position. With `equal_lengths` one row at a time."""

    @abstractmethod
    def step(self, tokens: Tensor, positions: Tensor, span: int) -> Tensor:
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

    def prefill(self, ids: Tensor, rows: Tensor) -> None:
        self.cache.plan_prefill(rows, ids.shape[1])
        keys = torch.arange(ids.shape[1], device=ids.device)
        self._forward(self._base, ids, keys[None], keys)

    def extend(self, ids: Tensor, rows: Tensor, positions: Tensor, span: int) -> None:
        self.cache.plan_extend(rows, positions, span)
        self._forward(self._base, ids, positions, torch.arange(span, device=ids.device))

    def step(self, tokens: Tensor, positions: Tensor, span: int) -> Tensor:
        self.cache.plan_step(positions, span)
        keys = torch.arange(span, device=tokens.device)
        logits: Tensor = self._forward(self._model, tokens[:, None], positions[:, None], keys).logits
        return logits[:, -1]

    def _forward(self, model: Any, ids: Tensor, positions: Tensor, keys: Tensor) -> Any:
        """Hidden states of `ids` [sequences, length] at `positions` [sequences or 1, length], over the positions
        `keys`."""
        return model(
            input_ids=ids, attention_mask=self._masks(positions[:, None, :, None], keys),
            position_ids=positions.expand(len(ids), -1), past_key_values=self.cache, use_cache=True,
        )

    def _masks(self, queries: Tensor, keys: Tensor) -> Any:
        """Additive masks, one per kind of layer where a model has several (all positions, a sliding window)."""
        full = sliding = self._additive(keys <= queries)
        if self._window is not None:
            sliding = self._additive((keys <= queries) & (keys > queries - self._window))
        return self._by_kind(full, sliding)

    def _by_kind(self, full: Tensor, sliding: Tensor) -> Any:
        if self._window is None or not self._layer_types:
            return sliding
        return {kind: sliding if "sliding" in kind else full for kind in self._layer_types}

    def _additive(self, allowed: Tensor) -> Tensor:
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
        self.states: dict[StateKey, Tensor] = {}  # [rows, ...] each
        self._row = 0  # the row that is continued

    def plan_extend(self, rows: Tensor, positions: Tensor, span: int) -> None:
        super().plan_extend(rows, positions, span)
        self._row = int(rows)

    # -- what a model calls -----

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """The last inputs of a convolution; None at the beginning. The model may write into it."""
        return self._state(("conv", layer_idx, state_idx))

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        return self._state(("recurrent", layer_idx, state_idx))

    def update_conv_state(
        self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, conv_kernel_size: int | None = None,
        **_: object,
    ) -> Tensor:
        """Keep the last inputs; returns those before and the new ones."""
        key = ("conv", layer_idx, state_idx)
        before = self._state(key)
        size = conv_kernel_size or (conv_states if before is None else before).shape[-1]
        if before is not None:
            full = torch.cat((before, conv_states), -1)
        else:
            full = F.pad(conv_states, (max(0, size - conv_states.shape[-1]), 0))
        self._keep(key, full[..., -size:])
        return full

    def update_recurrent_state(
        self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **_: object
    ) -> Tensor:
        self._keep(("recurrent", layer_idx, state_idx), recurrent_states)
        return recurrent_states

    def is_recording_past(self, layer_idx: int) -> bool:
        return False

    # -- storage -----

    def move(self, source: Tensor, target: Tensor, span: int) -> None:
        super().move(source, target, span)
        for store in self.states.values():
            store[target] = store[source]

    def begin(self, rows: Tensor) -> None:
        for store in self.states.values():
            store[rows] = 0

    def clear(self, rows: Tensor) -> None:
        super().clear(rows)
        self.begin(rows)

    def _state(self, key: StateKey) -> Tensor | None:
        if self._filled is None:
            return self.states[key][: self._active] if key in self.states else None
        # A view: for a single token the model writes into it.
        return self.states[key][self._row : self._row + 1] if self._begun is not None else None

    def _keep(self, key: StateKey, new: Tensor) -> None:
        if key not in self.states:
            self.states[key] = new.new_zeros((self.rows, *new.shape[1:]))
        self.states[key][slice(self._active) if self._filled is None else self._filled] = new


class StateDecoder(GenericDecoder):
    """A model with layers that keep states (linear attention, convolutions, Mamba), row by row, beside the keys and
    values of its other layers. Only layers that attend get masks. No mask can hide positions of a state, so a prefill
    has no padding and a row begins with states of zero."""

    equal_lengths = True
    cache_type = StateCache

    def _by_kind(self, full: Tensor, sliding: Tensor) -> Any:
        if not (kinds := self._layer_types):
            return sliding
        attending = [kind for kind in kinds if "hybrid" in kind or ("attention" in kind and "linear" not in kind)]
        if not attending:
            return None
        # A layer of both kinds takes the mask of an attention layer.
        masks = {"full_attention": full, **dict.fromkeys((*kinds, "linear_attention"))}
        return masks | {kind: sliding if "sliding" in kind else full for kind in attending}


class TokenRows:
    """The tokens that a `WholeDecoder` keeps, row by row."""

    def __init__(self, rows: int, max_length: int, device: torch.device) -> None:
        self.ids = torch.zeros((rows, max_length), dtype=torch.int64, device=device)

    def move(self, source: Tensor, target: Tensor, span: int) -> None:
        self.ids[target] = self.ids[source]

    def begin(self, rows: Tensor) -> None:
        """Nothing to do: older tokens of a row lie to the right of its own."""

    def clear(self, rows: Tensor) -> None:
        self.ids[rows] = 0


class WholeDecoder(Decoder):
    """Any causal language model: each step is a forward pass over all tokens, so new weights leave nothing stale. Takes
    the logits of each row's last token, from which a causal model does not see the padding to its right."""

    cache: TokenRows

    def __init__(self, model: Any, rows: int, max_length: int, head_apart: bool = True) -> None:
        self._model = model
        self._head = model.get_output_embeddings() if head_apart else None
        self._vocabulary = model.get_input_embeddings().weight.shape[0]
        self.cache = TokenRows(rows, max_length, next(model.parameters()).device)

    def prefill(self, ids: Tensor, rows: Tensor) -> None:
        self.cache.ids[rows, : ids.shape[1]] = ids

    def extend(self, ids: Tensor, rows: Tensor, positions: Tensor, span: int) -> None:
        self.cache.ids[rows[:, None], positions] = ids

    def step(self, tokens: Tensor, positions: Tensor, span: int) -> Tensor:
        everyone = torch.arange(len(tokens), device=tokens.device)
        self.cache.ids[everyone, positions] = tokens
        if self._head is not None:
            hidden = self._model.base_model(input_ids=self.cache.ids[everyone, :span], use_cache=False)[0]
            logits: Tensor = self._head(hidden[everyone, positions])
            return logits
        some = max(1, LOGITS // (span * self._vocabulary))
        return torch.cat([self._logits(rows, positions, span) for rows in torch.split(everyone, some)])

    def _logits(self, rows: Tensor, positions: Tensor, span: int) -> Tensor:
        logits = self._model(input_ids=self.cache.ids[rows, :span], use_cache=False).logits
        last: Tensor = logits[torch.arange(len(rows), device=rows.device), positions[rows]]
        return last


def whole_by_logits(model: Any, rows: int, max_length: int) -> WholeDecoder:
    """For models that change the logits of their head, by a scale or a cap."""
    return WholeDecoder(model, rows, max_length, head_apart=False)


# -- the common block: Llama, Qwen2, Qwen3, Mistral -----

class NotRecognised(Exception):
    """The model has another structure; the message says which part."""


class Block:
    """The weights of one layer, as views of the model's parameters."""

    def __init__(self, layer: Any) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        self.attention_norm = layer.input_layernorm.weight
        self.qkv, self.qkv_bias = _fuse(attention.q_proj, attention.k_proj, attention.v_proj)
        self.q_norm = attention.q_norm.weight if hasattr(attention, "q_norm") else None
        self.k_norm = attention.k_norm.weight if hasattr(attention, "k_norm") else None
        self.output, self.output_bias = attention.o_proj.weight, attention.o_proj.bias
        self.mlp_norm = layer.post_attention_layernorm.weight
        self.gate_up, self.gate_up_bias = _fuse(mlp.gate_proj, mlp.up_proj)
        self.down, self.down_bias = mlp.down_proj.weight, mlp.down_proj.bias


class FastDecoder(Decoder):
    """Pre-norm blocks with rotary positions, grouped-query attention and a gated MLP, in few operations per token."""

    cache: RowCache

    def __init__(self, model: Any, rows: int, max_length: int) -> None:
        base = _recognise(model)
        attention = base.layers[0].self_attn
        self.cache = RowCache(rows, max_length)
        self.linear: Callable[[Tensor, Tensor, Tensor | None], Tensor] = F.linear  # an engine with adapters adds theirs
        self._width = int(attention.head_dim)
        self._kv_heads = attention.k_proj.out_features // self._width
        self._heads = attention.q_proj.out_features // self._width
        self._groups = self._heads // self._kv_heads
        self._scale = float(attention.scaling)
        self._eps = float(base.norm.variance_epsilon)
        self._activation = base.layers[0].mlp.act_fn
        self._inner = base.layers[0].mlp.gate_proj.out_features
        self._embedding = base.embed_tokens.weight
        self._norm = base.norm.weight
        self._head = model.lm_head.weight
        self._head_bias = model.lm_head.bias
        self.blocks = [Block(layer) for layer in base.layers]
        self._cos, self._sin = _rotary_table(base.rotary_emb, max_length, self._embedding)
        self._small = self._embedding.dtype == torch.float32 and self._embedding.device.type == "cpu"

    def prefill(self, ids: Tensor, rows: Tensor) -> None:
        length = ids.shape[1]
        self.cache.plan_prefill(rows, length)
        self._read(ids, self._cos[:length, None], self._sin[:length, None], None)

    def extend(self, ids: Tensor, rows: Tensor, positions: Tensor, span: int) -> None:
        self.cache.plan_extend(rows, positions, span)
        visible = torch.arange(span, device=ids.device) <= positions[:, None, :, None]
        self._read(ids, self._cos[positions][:, :, None], self._sin[positions][:, :, None], visible)

    def _read(self, ids: Tensor, cos: Tensor, sin: Tensor, visible: Tensor | None) -> None:
        """Keys and values of `ids` [sequences, length] into the cache; `visible` masks attention, None is causal."""
        x = F.embedding(ids, self._embedding)
        for layer, block in enumerate(self.blocks):
            q, k, v = self._project(x, block, cos, sin)
            k, v = self.cache.update(k.transpose(1, 2), v.transpose(1, 2), layer)
            if layer == len(self.blocks) - 1:
                return  # of a prompt the keys and values alone are needed
            mixed = F.scaled_dot_product_attention(
                q.transpose(1, 2), k, v, visible, is_causal=visible is None, scale=self._scale,
                enable_gqa=self._groups > 1,
            )
            x = self._finish(x, mixed.transpose(1, 2).reshape(*ids.shape, -1), block)

    def step(self, tokens: Tensor, positions: Tensor, span: int) -> Tensor:
        self.cache.plan_step(positions, span)
        cos, sin = self._cos[positions, None], self._sin[positions, None]
        mask = self._mask(positions, span)
        x = F.embedding(tokens, self._embedding)
        for layer, block in enumerate(self.blocks):
            q, k, v = self._project(x, block, cos, sin)
            keys, values = self.cache.store_step(layer, k, v)
            mixed = self._attend(q, keys, values, mask)
            x = self._finish(x, mixed, block)
        return self.linear(self._normed(x, self._norm), self._head, self._head_bias)

    # -- parts of a block -----

    def _normed(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), weight, self._eps)

    def _project(self, x: Tensor, block: Block, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys (both rotated) and values, [..., heads, width]."""
        heads = self.linear(self._normed(x, block.attention_norm), block.qkv, block.qkv_bias)
        heads = heads.view(*heads.shape[:-1], -1, self._width)
        rotated, values = heads[..., : -self._kv_heads, :], heads[..., -self._kv_heads :, :]
        if block.q_norm is not None and block.k_norm is not None:
            rotated = F.rms_norm(rotated, (self._width,), None, self._eps)
            rotated[..., : self._heads, :].mul_(block.q_norm)
            rotated[..., self._heads :, :].mul_(block.k_norm)
        rotated = torch.addcmul(rotated * cos, rotated.roll(self._width // 2, -1), sin)
        return rotated[..., : self._heads, :], rotated[..., self._heads :, :], values

    def _mask(self, positions: Tensor, span: int) -> Tensor:
        beyond = torch.arange(span, device=positions.device) > positions[:, None]
        mask = torch.zeros(beyond.shape, dtype=self._embedding.dtype, device=beyond.device)
        mask = mask.masked_fill_(beyond, -torch.inf)[:, None, None]
        if not self._small:
            return mask
        return mask.expand(-1, self._kv_heads, 1, -1).reshape(-1, 1, span)

    def _attend(self, q: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
        """Attention of one query a row. Batched products beat the fused kernel on a CPU, where it starts per head."""
        rows = len(q)
        if not self._small:
            mixed = F.scaled_dot_product_attention(
                q[:, :, None], keys, values, mask, scale=self._scale, enable_gqa=self._groups > 1
            )
            return mixed.reshape(rows, -1)
        queries = q.reshape(rows * self._kv_heads, self._groups, self._width)
        scores = torch.baddbmm(mask, queries, keys.flatten(0, 1).transpose(1, 2), alpha=self._scale)
        return torch.bmm(scores.softmax(-1), values.flatten(0, 1)).view(rows, -1)

    def _finish(self, x: Tensor, mixed: Tensor, block: Block) -> Tensor:
        """The rest of a block: output projection and MLP, each added to the residual stream."""
        x = x + self.linear(mixed, block.output, block.output_bias)
        both = self.linear(self._normed(x, block.mlp_norm), block.gate_up, block.gate_up_bias)
        gated = self._activation(both[..., : self._inner]).mul_(both[..., self._inner :])
        return x + self.linear(gated, block.down, block.down_bias)


# -- recognising and fusing -----

def _recognise(model: Any) -> Any:
    """The base model, or NotRecognised with the part that differs."""
    base = getattr(model, "model", None)
    wanted = ("embed_tokens", "layers", "norm", "rotary_emb")
    if base is None or not all(hasattr(base, name) for name in wanted) or not hasattr(model, "lm_head"):
        raise NotRecognised(f"{type(model).__name__} has no model.{{{', '.join(wanted)}}} and lm_head")
    if window_of(model.config) is not None:
        raise NotRecognised("it has sliding-window layers")
    if getattr(base.rotary_emb, "rope_type", "default") not in ROPE_TYPES:
        raise NotRecognised(f"its rotary table ({base.rotary_emb.rope_type}) depends on the sequence's length")
    for layer in base.layers:
        parts = {name for name, module in layer.named_modules() if name and next(module.children(), None) is None}
        required = {f"self_attn.{p}_proj" for p in "qkvo"} | {f"mlp.{p}_proj" for p in ("gate", "up", "down")}
        required |= {"input_layernorm", "post_attention_layernorm"}
        optional = {"self_attn.q_norm", "self_attn.k_norm", "mlp.act_fn"}
        if not required <= parts <= required | optional:
            raise NotRecognised(f"its layers have other parts: {sorted(parts ^ required)}")
    return base


def _fuse(*modules: Any) -> tuple[Tensor, Tensor | None]:
    """Make one weight (and bias) for modules with the same input; their parameters become views of it."""
    weight = _concatenate([module.weight for module in modules])
    if all(module.bias is None for module in modules):
        return weight, None
    if any(module.bias is None for module in modules):
        raise NotRecognised("only some of the fused projections have a bias")
    return weight, _concatenate([module.bias for module in modules])


def _concatenate(parameters: list[Any]) -> Tensor:
    fused = torch.cat([parameter.detach() for parameter in parameters])
    start = 0
    for parameter in parameters:
        stop = start + parameter.shape[0]
        parameter.data = fused[start:stop]
        start = stop
    return fused


def _rotary_table(rotary: Any, length: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """Cosine and signed sine of all positions. With x rolled by half a head, x * cos + rolled * sin is the rotation."""
    positions = torch.arange(length, device=like.device)[None]
    with torch.inference_mode():
        cos, sin = rotary(like, positions)
    cos, sin = cos[0], sin[0].clone()
    sin[:, : sin.shape[-1] // 2].neg_()
    return cos.contiguous(), sin


# -- choosing a decoder -----

TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-8}
LOOSE = 0.15  # bfloat16 and float16: rounding in another order
Maker = Callable[[Any, int, int], Decoder]
WAYS: tuple[Any, ...] = (FastDecoder, GenericDecoder, StateDecoder, WholeDecoder, whole_by_logits)  # quickest first
SLOW = (WholeDecoder, whole_by_logits)
SLOW_TEXT = "every token costs a forward pass over its whole sequence; engine = vllm is quicker"


def choose_decoder(model: Any, rows: int, max_length: int, fast: bool) -> Decoder:
    """The quickest decoder that agrees with the model; UserError if none does."""
    name = type(model).__name__
    objections: list[str] = []
    maker: Maker
    for maker in WAYS if fast else WAYS[1:]:
        why = _objection(model, maker, max_length)
        if not why:
            if maker in SLOW:
                log.warning("%s: %s; %s", name, "; ".join(objections), SLOW_TEXT)
            return maker(model, rows, max_length)
        objections.append(f"{maker.__name__}: {why}")
        if maker is FastDecoder:
            log.info("generic decoder for %s: %s", name, why)
    raise UserError(
        f"{name}: decoding differs from its plain forward ({'; '.join(objections)}); the torch engine cannot run this "
        "architecture, use another engine"
    )


def _objection(model: Any, maker: Maker, max_length: int) -> str:
    """The reason why this decoder is not for the model; "" if it is."""
    try:
        gap = disagreement(model, maker, max_length)
    except NotRecognised as problem:
        return str(problem)
    except Exception as problem:  # a model that asks its cache for something else: whatever it raises
        return f"{type(problem).__name__}: {problem}"
    allowed = TOLERANCE.get(next(model.parameters()).dtype, LOOSE)
    return "" if gap <= allowed else f"its logits differ from the model's by {gap:.2g} (allowed {allowed:.2g})"


def disagreement(model: Any, maker: Maker, max_length: int) -> float:
    """Largest difference of logits over random sequences of unequal length, prefilled, continued and stepped."""
    # The decoder is made outside of inference mode: it may move the parameters, which must stay writable.
    return _disagreement(model, maker(model, 3, max_length), max_length)


@torch.inference_mode()
def _disagreement(model: Any, decoder: Decoder, max_length: int) -> float:
    rows, device = 3, next(model.parameters()).device
    length = max(2, min(12, max_length))
    vocabulary = model.get_input_embeddings().weight.shape[0]
    ids = torch.randint(vocabulary, (rows, length), generator=torch.Generator().manual_seed(0)).to(device)
    wanted = model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False).logits.float()
    lengths = torch.tensor([length // 2, length // 3, length // 2], device=device)  # tokens prefilled, per row
    order, everyone = torch.tensor([2, 0, 1], device=device), torch.arange(rows, device=device)
    if decoder.equal_lengths:
        decoder.prefill(ids[[2, 0], : length // 2], everyone[[2, 0]])
        decoder.prefill(ids[1:2, : length // 3], everyone[1:2])
    else:
        decoder.prefill(ids[order, : length // 2], everyone[order])
    _continue(decoder, ids, -(-length // 4), lengths)
    gap = 0.0
    for k in range(length - length // 2):
        positions = lengths + k
        logits = decoder.step(ids[everyone, positions], positions, int(positions.max()) + 1).float()
        gap = max(gap, float((logits - wanted[everyone, positions]).abs().max()))
    scale = max(1.0, float(wanted.abs().max()))
    return gap / scale if gap == gap else float("inf")


def _continue(decoder: Decoder, ids: Tensor, piece: int, lengths: Tensor) -> None:
    """Fill the first two rows again, each in two pieces; their second pieces begin at unequal positions."""
    pairs = [[0], [1]] if decoder.equal_lengths else [[0, 1]]
    for rows in (torch.tensor(pair, device=ids.device) for pair in pairs):
        begins = torch.minimum((piece - rows).clamp(min=1), lengths[rows])
        decoder.prefill(ids[rows, : int(begins.max())], rows)
        longest = int((lengths[rows] - begins).max())
        if longest:
            positions = begins[:, None] + torch.arange(longest, device=ids.device)
            decoder.extend(ids[rows[:, None], positions], rows, positions, int(positions.max()) + 1)
