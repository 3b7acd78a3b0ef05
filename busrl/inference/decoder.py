"""Runs a causal language model over rows of a cache: the interface, and the implementation for any architecture.

Used by the torch engine. `GenericDecoder` calls the model's own forward with explicit positions and 4-D masks;
`fast_decoder` has one for the common block structure, `states` those for models that keep more than keys and values.
Knows nothing of sampling, requests or weights arriving.

- A prefill computes all tokens of a prompt but the last; the last one enters the next decoding step with all others.
  So there is one place where logits are made, and a prefill never needs the output layer.
- Prompts are padded on the right: the causal mask alone keeps padding out of every real position.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch

from busrl.inference.cache import RowCache, Staging


class Rows(Protocol):
    """What a decoder keeps of the sequences, row by row; see `RowCache`."""

    def adopt(self, staging: Staging, rows: torch.Tensor) -> None: ...
    def move(self, source: torch.Tensor, target: torch.Tensor, span: int) -> None: ...
    def begin(self, rows: torch.Tensor) -> None: ...
    def clear(self, rows: torch.Tensor) -> None: ...


class Decoder(Protocol):
    """A model bound to a cache. `equal_lengths`: a prefill has to be without padding."""

    equal_lengths: bool

    @property
    def cache(self) -> Rows: ...

    def prefill(self, ids: torch.Tensor, rows: torch.Tensor, source: torch.Tensor | None) -> None:
        """Fill `rows` from position 0 with `ids` [sequences, length]; row i holds sequence `source[i]` (None: i)."""
        ...

    def prefill_piece(self, ids: torch.Tensor, staging: Staging) -> None:
        """Append `ids` [1, length] to a sequence that is computed in pieces."""
        ...

    def step(self, tokens: torch.Tensor, positions: torch.Tensor, span: int) -> torch.Tensor:
        """Logits [rows, vocabulary] after one more token for each of the first rows; `span` > every position."""
        ...


class GenericDecoder:
    """Any Hugging Face causal language model that keeps its past in keys and values."""

    equal_lengths = False

    def __init__(self, model: Any, rows: int, max_length: int) -> None:
        self.cache = self._make_cache(rows, max_length)
        self._model = model
        self._base = model.base_model
        config = model.config.get_text_config()
        self._layer_types: tuple[str, ...] = tuple(sorted(set(getattr(config, "layer_types", None) or ())))
        self._window = window_of(config)
        self._dtype = next(model.parameters()).dtype

    def _make_cache(self, rows: int, max_length: int) -> RowCache:
        return RowCache(rows, max_length)

    def prefill(self, ids: torch.Tensor, rows: torch.Tensor, source: torch.Tensor | None) -> None:
        self.cache.plan_prefill(rows, source, ids.shape[1])
        self._fill(ids, 0)

    def prefill_piece(self, ids: torch.Tensor, staging: Staging) -> None:
        self.cache.plan_piece(staging)
        self._fill(ids, staging.done)
        staging.done += ids.shape[1]

    def _fill(self, ids: torch.Tensor, begin: int) -> None:
        keys = torch.arange(begin + ids.shape[1], device=ids.device)
        positions = keys[begin:]
        masks = self._masks(positions[None, None, :, None], keys)
        self._base(
            input_ids=ids,
            attention_mask=masks,
            position_ids=positions[None].expand(len(ids), -1),
            past_key_values=self.cache,
            use_cache=True,
        )

    def step(self, tokens: torch.Tensor, positions: torch.Tensor, span: int) -> torch.Tensor:
        self.cache.plan_step(positions, span)
        masks = self._masks(positions[:, None, None, None], torch.arange(span, device=tokens.device))
        logits: torch.Tensor = self._model(
            input_ids=tokens[:, None],
            attention_mask=masks,
            position_ids=positions[:, None],
            past_key_values=self.cache,
            use_cache=True,
        ).logits
        return logits[:, -1]

    def _masks(
        self, queries: torch.Tensor, keys: torch.Tensor
    ) -> torch.Tensor | Mapping[str, torch.Tensor | None]:
        """Additive masks, one per kind of layer where a model has several (all positions, a sliding window)."""
        full = self._additive(keys <= queries)
        if self._window is None:
            return full
        sliding = self._additive((keys <= queries) & (keys > queries - self._window))
        if not self._layer_types:
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
