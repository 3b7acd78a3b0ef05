"""The embedded engine: continuous batching of any Hugging Face causal language model, without a server.

The rollout role drives it through `busrl.inference.base.Engine`; the weight plane writes into `parameters()`. Knows
nothing of slots, the bus or rewards.

- Sequences join and leave between decoding steps. New ones are prefilled in a batch of their own, one row for all
  requests with the same prompt, and copied into the rows of the running batch.
- New weights enter between steps; running sequences keep the keys and values that older weights made.
- One transfer from the device and no Python per row in a step, but for rows that begin or end in it.
"""

from __future__ import annotations

import dataclasses
import time
from collections import deque
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as transformers_logging

from busrl.errors import UserError
from busrl.inference.base import ABORTED, LENGTH, Event, Finished, Pause, Request, Statistics
from busrl.inference.checks import choose
from busrl.inference.sampling import Settings, draw
from busrl.inference.seats import Index, Seats
from busrl.inference.tokens import Tokens, eos_ids_of

if TYPE_CHECKING:
    from busrl.weights.base import Receiver
    from busrl.weights.factory import Settings as WeightSettings

SPAN_STEP = 8  # attended prefixes grow in steps, so that fewer shapes occur
PREFILL_TOKENS = 16384  # padded tokens in one prefill batch
DEFAULT_MAX_LENGTH = 4096  # where neither the caller nor the model sets one
quiet: Any = transformers_logging  # it has no type hints


class TorchEngine:
    """`capacity` rows of one model on one device. Use `load` for a model folder."""

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        *,
        capacity: int,
        max_length: int = 0,
        fast: bool = True,
        chat: bool = False,
    ) -> None:
        if capacity < 1:
            raise UserError(f"capacity is {capacity}; an engine needs at least one row (generation.max_batch)")
        self._model = model.eval().requires_grad_(False)
        self._device: torch.device = next(model.parameters()).device
        self._max_length = _max_length(model, max_length)
        eos_ids = eos_ids_of(model, tokenizer)
        self._vocabulary: int = model.get_input_embeddings().weight.shape[0]
        eos = np.zeros(max(self._vocabulary, *eos_ids, 0) + 1, np.bool_)
        eos[list(eos_ids)] = True
        self._tokens = Tokens(tokenizer, eos_ids, chat)
        self._decoder = choose(model, capacity, self._max_length, fast)
        self._seats = Seats(capacity, self._max_length, eos)
        self._capacity = capacity
        self._waiting: deque[Request] = deque()
        self._holes: list[int] = []
        self._done: list[Finished] = []
        self._settings: Settings | None = None
        self._version = 0
        self._paused_at: float | None = None
        self._updates, self._update_s, self._pause_s = 0, 0.0, 0.0

    @classmethod
    def load(
        cls,
        path: str | Path,
        *,
        capacity: int,
        max_length: int = 0,
        dtype: str = "float32",
        device: str = "cpu",
        fast: bool = True,
        chat: bool = False,
    ) -> TorchEngine:
        """An engine for a model folder; nothing is fetched from anywhere."""
        model: Any
        quiet.disable_progress_bar()  # this is a process with a log, not a terminal
        try:
            model = AutoModelForCausalLM.from_pretrained(str(path), local_files_only=True)
            tokenizer = AutoTokenizer.from_pretrained(str(path), local_files_only=True)
        except (OSError, ValueError) as problem:
            raise UserError(f"{path}: no causal language model and tokenizer ({problem}); see model.path") from problem
        model = model.to(device=device, dtype=getattr(torch, dtype))
        return cls(model, tokenizer, capacity=capacity, max_length=max_length, fast=fast, chat=chat)

    # -- the protocol -------------------------------------------------------------------------------------------

    @property
    def capacity(self) -> int:
        return self._capacity

    @property
    def active(self) -> int:
        return self._seats.active - len(self._holes) + len(self._waiting) + len(self._done)

    @property
    def drawing(self) -> int:
        return 0 if self._paused_at is not None else self.active - len(self._done)

    @property
    def max_length(self) -> int:
        return self._max_length

    @property
    def version(self) -> int:
        """Version that the next tokens will carry."""
        return self._version

    @property
    def decoder_name(self) -> str:
        """Class of the decoder in use: `FastDecoder` or `GenericDecoder`."""
        return type(self._decoder).__name__

    def submit(self, requests: Sequence[Request]) -> None:
        if self.active + len(requests) > self._capacity:
            raise ValueError(f"{len(requests)} requests for {self._capacity - self.active} free rows; look at capacity")
        self._check(requests)
        for request in requests:
            if self._seats.room_for(request) > 0:
                self._waiting.append(request)
            else:
                self._done.append(_empty(request))

    def step(self) -> list[Finished]:
        finished, self._done = self._done, []
        if self._paused_at is not None:
            return finished
        with torch.inference_mode():
            self._arrange()
            if self._seats.active:
                finished.extend(self._decode())
        return finished

    def abort(self, key: int) -> Finished | None:
        for request in self._waiting:
            if request.key == key:
                self._waiting.remove(request)
                return _empty(request, ABORTED)
        for row in range(self._seats.active):
            if row not in self._holes and self._seats.key[self._seats.rows[row]] == key:
                self._holes = sorted([*self._holes, row])
                return dataclasses.replace(self._seats.result(int(self._seats.rows[row])), finish=ABORTED)
        return None

    def events(self) -> list[Event]:
        return []

    def pause(self, how: Pause) -> list[Finished]:
        ended: list[Finished] = []
        while how == "wait" and self.active:
            ended += self.step()
        if how == "abort":
            seats, holes = self._seats, self._holes
            keys = [int(seats.key[seats.rows[row]]) for row in range(seats.active) if row not in holes]
            keys += [request.key for request in self._waiting]
            ended = [one for key in keys if (one := self.abort(key)) is not None]
        if self._paused_at is None:
            self._paused_at = time.monotonic()
        return ended

    def resume(self) -> None:
        if self._paused_at is not None:
            self._pause_s += time.monotonic() - self._paused_at
            self._paused_at = None

    def receiver(self, settings: WeightSettings, name: str) -> Receiver | None:
        """None: the ordinary one writes into `parameters()`."""
        return None

    def update_weights(self, receiver: Receiver) -> tuple[int, int]:
        begun = time.monotonic()
        self._version, step = receiver.fetch(self.parameters())
        self._updates, self._update_s = self._updates + 1, self._update_s + time.monotonic() - begun
        return self._version, step

    def statistics(self) -> Statistics:
        return Statistics(
            active=self.active, waiting=len(self._waiting), paused=self._paused_at is not None, version=self._version,
            updates=self._updates, update_s=self._update_s, pause_s=self._pause_s,
        )  # fmt: skip

    def close(self) -> None:
        """Nothing was started."""

    def parameters(self) -> dict[str, torch.Tensor]:
        return dict(self._model.named_parameters())

    def encode(self, text: str) -> list[int]:
        return self._tokens.encode(text)

    def decode(self, ids: Sequence[int] | npt.NDArray[np.int32], ended: bool = True) -> str:
        return self._tokens.decode(ids, ended)

    # -- joining and leaving ------------------------------------------------------------------------------------

    def _arrange(self) -> None:
        """Let requests join, first in the rows of sequences that left, and close up the rows left over."""
        if not self._holes and not self._waiting:
            return
        seats = self._seats
        joining: list[tuple[int, Request]] = []
        while self._waiting:
            if self._holes:
                row = self._holes.pop(0)
            else:
                row, seats.active = seats.active, seats.active + 1
            request = self._waiting.popleft()
            seats.sit(row, request)
            joining.append((row, request))
        if joining:
            self._prefill(joining)
        if self._holes:
            span = int(seats.position[seats.rows[: seats.active]].max())
            sources, targets = seats.close_up(self._holes)
            self._holes = []
            if sources and span:
                self._decoder.cache.move(self._tensor(sources), self._tensor(targets), span)
        self._settings = None

    def _prefill(self, joining: list[tuple[int, Request]]) -> None:
        """Keys and values of all but the last known token, computed once for equal prompts, shortest first."""
        rows_of: dict[bytes, list[int]] = {}
        for row, request in joining:
            known = np.concatenate((request.prompt_ids, request.prefix_ids)).astype(np.int32)[:-1]
            if len(known):
                rows_of.setdefault(known.tobytes(), []).append(row)
        batch: list[bytes] = []
        for known_bytes in sorted(rows_of, key=len):
            if batch and (len(batch) + 1) * len(known_bytes) // 4 > PREFILL_TOKENS:
                self._prefill_batch(batch, rows_of)
                batch = []
            batch.append(known_bytes)
        if batch:
            self._prefill_batch(batch, rows_of)

    def _prefill_batch(self, batch: list[bytes], rows_of: dict[bytes, list[int]]) -> None:
        ids = np.zeros((len(batch), len(batch[-1]) // 4), np.int64)
        rows: list[int] = []
        source: list[int] = []
        for k, known_bytes in enumerate(batch):
            ids[k, : len(known_bytes) // 4] = np.frombuffer(known_bytes, np.int32)
            rows.extend(rows_of[known_bytes])
            source.extend([k] * len(rows_of[known_bytes]))
        copied = self._tensor(source) if len(rows) > len(batch) else None
        self._decoder.prefill(torch.from_numpy(ids).to(self._device), self._tensor(rows), copied)

    # -- one decoding step --------------------------------------------------------------------------------------

    def _decode(self) -> Iterable[Finished]:
        seats = self._seats
        running: Index = seats.rows[: seats.active]
        positions = seats.position[running]
        span = min(-(-(int(positions.max()) + 1) // SPAN_STEP) * SPAN_STEP, self._max_length)
        if self._settings is None:
            self._settings = self._make_settings(running)
        logits = self._decoder.step(self._to_device(seats.last[running]), self._to_device(positions), span)
        tokens, logprobs = draw(logits, self._to_device(seats.uniforms(running)), self._settings)
        drawn, measured = tokens.cpu().numpy(), logprobs.cpu().numpy()
        ended = seats.record(running, drawn, measured, self._version)
        if not ended.any():
            return []
        self._holes = [int(row) for row in ended.nonzero()[0]]
        self._clear_spoilt(np.isnan(measured))
        return [seats.result(int(seat)) for seat in running[ended]]

    def _clear_spoilt(self, spoilt: npt.NDArray[np.bool_]) -> None:
        if spoilt.any():
            self._decoder.cache.clear(self._tensor(spoilt.nonzero()[0].tolist()))

    def _make_settings(self, running: Index) -> Settings:
        """Sampling settings of the running rows; rebuilt only when sequences joined or left."""
        temperature, top_p = self._seats.temperature[running], self._seats.top_p[running]
        greedy = temperature <= 0
        inverse = 1.0 / np.where(greedy, 1.0, temperature)
        return Settings(
            inverse_temperature=self._to_device(inverse[:, None]) if (inverse != 1.0).any() else None,
            greedy=self._to_device(greedy[:, None]) if greedy.any() else None,
            top_p=self._to_device(top_p[:, None]) if (top_p < 1.0).any() else None,
        )

    # -- small things -------------------------------------------------------------------------------------------

    def _check(self, requests: Sequence[Request]) -> None:
        """`ValueError` that names the request without tokens, or with one that the model does not know."""
        for request in requests:
            if not len(request.prompt_ids) + len(request.prefix_ids):
                raise ValueError(
                    f"request {request.key} (uid {request.uid}) has no tokens; a prompt needs at least one"
                )
        if not requests or self._knows([ids for r in requests for ids in (r.prompt_ids, r.prefix_ids)]):
            return
        for request in requests:
            if not self._knows([request.prompt_ids, request.prefix_ids]):
                ids = np.concatenate((request.prompt_ids, request.prefix_ids))
                low, high = int(ids.min()), int(ids.max())
                raise ValueError(
                    f"request {request.key} (uid {request.uid}) has token id {low if low < 0 else high}; "
                    f"the model knows 0 to {self._vocabulary - 1}"
                )

    def _knows(self, parts: Sequence[npt.NDArray[Any]]) -> bool:
        ids = np.concatenate(parts)
        return int(ids.min()) >= 0 and int(ids.max()) < self._vocabulary

    def _tensor(self, values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self._device)

    def _to_device(self, array: npt.NDArray[Any]) -> torch.Tensor:
        return torch.from_numpy(array).to(self._device, non_blocking=True)


def _max_length(model: Any, wanted: int) -> int:
    """The smaller of what the caller asks for and what the model has positions for."""
    config = model.config.get_text_config()
    own = getattr(config, "max_position_embeddings", None) or getattr(config, "n_positions", None)
    limits = [int(limit) for limit in (wanted, own) if limit]
    return min(limits) if limits else DEFAULT_MAX_LENGTH


def _empty(request: Request, finish: int = LENGTH) -> Finished:
    """A request that has no room for a single token ends at once, cut by its length; or it was aborted."""
    nothing = np.empty(0, np.int32)
    return Finished(request.key, nothing, np.empty(0, np.float32), np.empty(0, np.uint32), finish)
