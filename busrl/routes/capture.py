"""Routes that the torch engine's model takes, noted as it computes: a decoder around another one.

Made by the engine where a run carries routes. A hook on every router notes its choices; they lie beside the keys and
values, by row of the cache and position, and are copied with them, so a kept prefix keeps its routes. Knows nothing of
requests, sampling or weights.

- A row of the store is valid as far as the cache row is: what lies beyond is of earlier sequences, or of padding.
- A token keeps the route that it was drawn by: what was computed before new weights is remembered by sequence ("seat"),
  and counts though the row is computed again.
- One transfer from the device for each call of the decoder.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from busrl.data.routing import Routing
from busrl.engines.base import Routes
from busrl.engines.torch.decoder import Decoder, RowCache
from busrl.errors import ModelNotLoaded
from busrl.routes.routers import OWN, choice_of, routers_of


class RoutedCache:
    """A decoder's cache, and the routes of its rows."""

    def __init__(self, cache: Any, routing: Routing, rows: int, max_length: int) -> None:
        self._cache = cache
        # Untouched pages cost nothing.
        self.routes: Routes = np.empty((rows, max_length, *routing.shape), routing.dtype)

    def move(self, source: Tensor, target: Tensor, span: int) -> None:
        self._cache.move(source, target, span)
        self.routes[target.cpu().numpy(), :span] = self.routes[source.cpu().numpy(), :span]

    def begin(self, rows: Tensor) -> None:
        self._cache.begin(rows)

    def clear(self, rows: Tensor) -> None:
        self._cache.clear(rows)


class RoutedDecoder(Decoder):
    """A decoder whose cache has the routes of every position that was computed."""

    cache: RoutedCache  # type: ignore[assignment]

    def __init__(self, decoder: Decoder, model: Any, routing: Routing, rows: int, max_length: int) -> None:
        if not isinstance(decoder.cache, RowCache):
            raise ModelNotLoaded(
                f"{type(model).__name__}: the torch engine computes whole sequences for every token of it, and does "
                f"not note its routes; set {OWN}, or use engine = vllm"
            )
        self._decoder, self._shape = decoder, routing.shape
        self.equal_lengths = decoder.equal_lengths
        self.cache = RoutedCache(decoder.cache, routing, rows, max_length)
        self._noted: list[Tensor] = [torch.empty(0)] * len(routing.layers)
        self._first: dict[int, Routes] = {}  # seat -> routes of its tokens before the newest weights
        for place, module in enumerate(routers_of(model, routing)):
            module.register_forward_hook(self._hook(place))

    def _hook(self, place: int) -> Any:
        def hook(module: Any, _: Any, output: Any) -> None:
            self._noted[place] = choice_of(module, output)[2]
        return hook

    def prefill(self, ids: Tensor, rows: Tensor) -> None:
        self._decoder.prefill(ids, rows)
        self._keep(rows, np.arange(ids.shape[1])[None])

    def extend(self, ids: Tensor, rows: Tensor, positions: Tensor, span: int) -> None:
        self._decoder.extend(ids, rows, positions, span)
        self._keep(rows, positions.cpu().numpy())

    def step(self, tokens: Tensor, positions: Tensor, span: int) -> Tensor:
        logits = self._decoder.step(tokens, positions, span)
        self._keep(torch.arange(len(tokens)), positions.cpu().numpy()[:, None])
        return logits

    def remember(self, seats: Iterable[int], rows: Iterable[int], ends: Iterable[int]) -> None:
        """Remember the routes of sequences, each with so many tokens in its row, before the rows are computed again."""
        self._first |= {seat: self.taken(seat, row, end) for seat, row, end in zip(seats, rows, ends, strict=True)}

    def taken(self, seat: int, row: int | None, end: int) -> Routes:
        """Take the routes of the first `end` tokens of a sequence; without a row it has those that are remembered."""
        first = self._first.pop(seat, self.cache.routes[0, :0])
        if row is None:
            return first[:end]
        routes: Routes = self.cache.routes[row, :end].copy()
        routes[: len(first)] = first
        return routes

    def _keep(self, rows: Tensor, positions: npt.NDArray[np.int64]) -> None:
        """Write what the routers chose for `rows` at `positions` [rows or 1, length]."""
        chosen = torch.stack(self._noted, 1).to(torch.int16).cpu().numpy()
        routes = chosen.reshape(len(rows), -1, *self._shape)
        self.cache.routes[rows.cpu().numpy()[:, None], positions] = routes
