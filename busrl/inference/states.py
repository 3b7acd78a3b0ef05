"""Decoders for models that do not keep their past in keys and values alone: linear attention, convolutions, Mamba.

Used by the torch engine where `GenericDecoder` does not agree with the model. `StateDecoder` keeps the states of such
layers row by row beside the keys and values of the others, as transformers' own cache does; `WholeDecoder` keeps the
tokens and computes everything again, which any causal model allows. Knows nothing of sampling or requests.

- A state has no positions that a mask could hide: a prefill has no padding, and a row begins with states of zero.
- `WholeDecoder` pads on the right and reads the logits of each row's last token: a causal model sees no padding there.
"""

from __future__ import annotations

from typing import Any

import torch

from busrl.inference.cache import RowCache, Staging, StateKey
from busrl.inference.decoder import GenericDecoder

LOGITS = 1 << 25  # numbers that one forward of a `WholeDecoder` may write where the head can not be called by itself


class StateCache(RowCache):
    """A `RowCache` that also plays the part of transformers' cache for convolution and recurrent states."""

    def __init__(self, rows: int, max_length: int) -> None:
        super().__init__(rows, max_length)
        self.states: dict[StateKey, torch.Tensor] = {}  # [rows, ...] each

    # -- what a model calls ---------------------------------------------------------------------------------------

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        """The last inputs of a convolution; None at the beginning. The model may write into it."""
        return self._state(("conv", layer_idx, state_idx))

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        return self._state(("recurrent", layer_idx, state_idx))

    def update_conv_state(
        self, conv_states: torch.Tensor, layer_idx: int, state_idx: int = 0, conv_kernel_size: int | None = None,
        **_: object,
    ) -> torch.Tensor:  # fmt: skip
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

    # -- storage ----------------------------------------------------------------------------------------------------

    def adopt(self, staging: Staging, rows: torch.Tensor) -> None:
        super().adopt(staging, rows)
        for key, state in staging.states.items():
            self._store(key, state)[rows] = state

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
        if self._staging is not None:
            return self._staging.states.get(key)
        if self._prefill is not None or key not in self.states:
            return None
        return self.states[key][: self._active]

    def _keep(self, key: StateKey, new: torch.Tensor) -> None:
        if self._staging is not None:
            self._staging.states[key] = new.clone()
        elif self._prefill is not None:
            rows, source = self._prefill
            self._store(key, new)[rows] = new if source is None else new[source]
        else:
            self._store(key, new)[: self._active] = new

    def _store(self, key: StateKey, like: torch.Tensor) -> torch.Tensor:
        if key not in self.states:
            self.states[key] = like.new_zeros((self.rows, *like.shape[1:]))
        return self.states[key]


class StateDecoder(GenericDecoder):
    """A model some of whose layers keep states. Masks go to layers that attend; the others see no padding at all."""

    equal_lengths = True

    def _make_cache(self, rows: int, max_length: int) -> RowCache:
        return StateCache(rows, max_length)

    def _masks(self, queries: torch.Tensor, keys: torch.Tensor) -> Any:
        full = self._additive(keys <= queries)
        if not self._layer_types:
            return full
        window = self._window
        sliding = full if window is None else self._additive((keys <= queries) & (keys > queries - window))
        found = {kind: _mask_of(kind, full, sliding) for kind in self._layer_types}
        # Layers of both kinds in one ask for the mask of an attention layer; without any the model wants no masks.
        both = {"linear_attention": None, "full_attention": full, **found}
        return both if any(map(_attends, self._layer_types)) else None


def _attends(kind: str) -> bool:
    return "hybrid" in kind or ("attention" in kind and "linear" not in kind)


def _mask_of(kind: str, full: torch.Tensor, sliding: torch.Tensor) -> torch.Tensor | None:
    if not _attends(kind):
        return None
    return sliding if "sliding" in kind else full


class Tokens:
    """What a `WholeDecoder` keeps: the tokens, row by row."""

    def __init__(self, rows: int, max_length: int, device: torch.device) -> None:
        self.ids = torch.zeros((rows, max_length), dtype=torch.int64, device=device)

    def adopt(self, staging: Staging, rows: torch.Tensor) -> None:
        self.ids[rows, : staging.length] = torch.cat(staging.pieces, -1)

    def move(self, source: torch.Tensor, target: torch.Tensor, span: int) -> None:
        self.ids[target] = self.ids[source]

    def begin(self, rows: torch.Tensor) -> None:
        """Nothing: what a row has beyond its own tokens lies to the right of them."""

    def clear(self, rows: torch.Tensor) -> None:
        self.ids[rows] = 0


class WholeDecoder:
    """Any causal language model: each step is a forward pass over all tokens. New weights leave nothing stale in it."""

    equal_lengths = False

    def __init__(self, model: Any, rows: int, max_length: int, head_apart: bool = True) -> None:
        self._model = model
        self._head = model.get_output_embeddings() if head_apart else None
        self._vocabulary = model.get_input_embeddings().weight.shape[0]
        self.cache = Tokens(rows, max_length, next(model.parameters()).device)

    def prefill(self, ids: torch.Tensor, rows: torch.Tensor, source: torch.Tensor | None) -> None:
        self.cache.ids[rows, : ids.shape[1]] = ids if source is None else ids[source]

    def prefill_piece(self, ids: torch.Tensor, staging: Staging) -> None:
        staging.pieces.append(ids)
        staging.done += ids.shape[1]

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
