"""The embedded engine: continuous batching of any Hugging Face causal language model, without a server.

The rollout role drives it through `busrl.inference.base.Engine`; the weight plane writes into `parameters()`. Knows
nothing of slots, the bus or rewards.

- Sequences join and leave between decoding steps. Who joins is prefilled in a batch of its own (`filling`), one row for
  all requests with the same prompt, and copied into the rows of the running batch.
- New weights enter between steps. Running sequences keep the keys and values that older weights made, or, with
  `on_update = "recompute"`, wait until theirs are computed again.
- One transfer from the device and no Python per row in a step, but for rows that begin or end in it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as transformers_logging

from busrl.device import choose as choose_device
from busrl.errors import UserError
from busrl.inference.adapter import Files
from busrl.inference.base import LENGTH, Event, Finished, Pause, Request, Statistics
from busrl.inference.checks import choose
from busrl.inference.filling import Filling
from busrl.inference.pauses import Pauses
from busrl.inference.sampling import Settings, draw
from busrl.inference.seats import Index, Seats
from busrl.inference.tokens import Tokens, eos_ids_of

if TYPE_CHECKING:
    from busrl.data import Prompt
    from busrl.topology import Topology
    from busrl.weights.base import Receiver
    from busrl.weights.factory import Settings as WeightSettings

SPAN_STEP = 8  # attended prefixes grow in steps, so that fewer shapes occur
PREFILL_TOKENS = 2048  # keeps a step with a full prefill within some ten times one without, and still fills a GPU
DEFAULT_MAX_LENGTH = 4096  # where neither the caller nor the model sets one
OnUpdate = Literal["keep", "recompute"]
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
        on_update: OnUpdate = "keep",
        prefill_tokens: int = PREFILL_TOKENS,
    ) -> None:
        if capacity < 1:
            raise UserError(f"capacity is {capacity}; an engine needs at least one row (generation.max_batch)")
        self._model = model.eval().requires_grad_(False)
        self._parameters: dict[str, torch.Tensor] = dict(model.named_parameters())
        self._device: torch.device = next(model.parameters()).device
        self._max_length = _max_length(model, max_length)
        eos_ids = eos_ids_of(model, tokenizer)
        self._vocabulary: int = model.get_input_embeddings().weight.shape[0]
        eos = np.zeros(max(self._vocabulary, *eos_ids, 0) + 1, np.bool_)
        eos[list(eos_ids)] = True
        self._tokens = Tokens(tokenizer, eos_ids, chat)
        self._decoder = choose(model, capacity, self._max_length, fast)
        self._seats = Seats(capacity, self._max_length, eos)
        self._filling = Filling(self._seats, self._decoder, max(1, prefill_tokens), self._device)
        self._capacity = capacity
        self._on_update = on_update
        self._holes: list[int] = []
        self._done: list[Finished] = []
        self._settings: Settings | None = None
        self._files = Files(model)
        self._pauses = Pauses()
        self._version = self._steps = self._drawn = self._updates = 0
        self._update_s = 0.0

    @classmethod
    def load(
        cls,
        path: str | Path,
        *,
        capacity: int,
        max_length: int = 0,
        dtype: str = "float32",
        device: str | torch.device = "cpu",
        fast: bool = True,
        chat: bool = False,
        on_update: OnUpdate = "keep",
        prefill_tokens: int = PREFILL_TOKENS,
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
        engine = cls(
            model, tokenizer, capacity=capacity, max_length=max_length, fast=fast, chat=chat, on_update=on_update,
            prefill_tokens=prefill_tokens,
        )  # fmt: skip
        engine._files.base = Path(path)
        return engine

    # -- the protocol -------------------------------------------------------------------------------------------

    @property
    def capacity(self) -> int:
        return self._capacity

    @property
    def active(self) -> int:
        return self._capacity - len(self._seats.free) + len(self._done)

    @property
    def drawing(self) -> int:
        return 0 if self._pauses.on else self._running + self._filling.joining

    @property
    def max_length(self) -> int:
        return self._max_length

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
                self._filling.wait(self._seats.sit(request))
            else:
                self._done.append(_empty(request))

    def step(self) -> list[Finished]:
        finished, self._done = self._done, []
        if not self._pauses.on:
            with torch.inference_mode():
                self._arrange()
                if self._seats.active:
                    finished.extend(self._decode())
        return finished

    def abort(self, key: int) -> Finished | None:
        for index, one in enumerate(self._done):
            if one.key == key:
                return self._done.pop(index)
        for seat in self._filling.seats():
            if self._seats.key[seat] == key:
                self._filling.forget(seat)
                return self._seats.leave(seat, aborted=True)
        for row in self._used_rows():
            seat = int(self._seats.rows[row])
            if self._seats.key[seat] == key:
                self._holes = sorted([*self._holes, row])
                return self._seats.leave(seat, aborted=True)
        return None

    def events(self) -> list[Event]:
        return self._seats.events()

    def pause(self, how: Pause) -> list[Finished]:
        ended: list[Finished] = []
        while how == "wait" and self.active and not self._pauses.on:
            ended += self.step()
        if how == "abort":
            seats = [*self._filling.seats(), *(int(self._seats.rows[row]) for row in self._used_rows())]
            ended = [one for key in self._seats.key[seats].tolist() if (one := self.abort(key)) is not None]
        self._pauses.begin()
        return ended

    def resume(self) -> None:
        self._pauses.end()

    def receiver(self, settings: WeightSettings, name: str) -> Receiver | None:
        """None: the ordinary one writes into `parameters()`."""
        return None

    def update_weights(self, receiver: Receiver) -> tuple[int, int]:
        begun = time.monotonic()
        self._version, step = self._files.update(receiver)
        if self._on_update == "recompute":
            self._stand_up()
        self._updates += 1
        self._update_s += time.monotonic() - begun
        return self._version, step

    def parameters(self) -> dict[str, torch.Tensor]:
        """Live tensors by the names of `model.named_parameters()`; written in place between two steps."""
        return dict(self._parameters)

    def statistics(self) -> Statistics:
        rows = self._used_rows()
        return Statistics(
            active=self.active, waiting=len(self._filling), paused=self._pauses.on, version=self._version,
            steps=self._steps, tokens=self._drawn, prefill_tokens=self._filling.computed,
            cache_tokens=int(self._seats.position[self._seats.rows[rows]].sum()),
            cache_capacity=self._capacity * self._max_length, updates=self._updates, update_s=self._update_s,
            pause_s=self._pauses.seconds + self._update_s,
        )  # fmt: skip

    def encode(self, prompt: Prompt) -> list[int]:
        return self._tokens.encode(prompt)

    def decode(self, ids: Sequence[int] | npt.NDArray[np.int32], ended: bool = True) -> str:
        return self._tokens.decode(ids, ended)

    def close(self) -> None:
        """Nothing was started."""

    # -- joining and leaving ------------------------------------------------------------------------------------

    @property
    def _running(self) -> int:
        return self._seats.active - len(self._holes)

    def _used_rows(self) -> list[int]:
        holes = set(self._holes)
        return [row for row in range(self._seats.active) if row not in holes]

    def _arrange(self) -> None:
        """Let requests join, first in the rows of sequences that left, and close up the rows left over."""
        if not self._filling.fill(self._take_row) and not self._holes:
            return
        seats = self._seats
        if self._holes:
            span = int(seats.position[seats.rows[: seats.active]].max())
            sources, targets = seats.close_up(self._holes)
            self._holes = []
            if sources and span:
                self._decoder.cache.move(self._tensor(sources), self._tensor(targets), span)
        self._settings = None

    def _take_row(self, seat: int) -> int:
        seats = self._seats
        if self._holes:
            row = self._holes.pop(0)
        else:
            row, seats.active = seats.active, seats.active + 1
        seats.rows[row] = seat
        return row

    def _stand_up(self) -> None:
        """All that run give their rows back and wait for keys and values of the new weights."""
        self._filling.wait_again(self._seats.rows[self._used_rows()].tolist())
        self._seats.active, self._holes = 0, []

    # -- one decoding step --------------------------------------------------------------------------------------

    def _decode(self) -> list[Finished]:
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
        self._steps += 1
        self._drawn += len(running)
        if not ended.any():
            return []
        self._holes = ended.nonzero()[0].tolist()
        self._clear_spoilt(np.isnan(measured))
        return [seats.leave(seat) for seat in running[ended].tolist()]

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


def _empty(request: Request) -> Finished:
    """A request that has no room for a single token ends at once, cut by its length."""
    nothing = np.empty(0, np.int32)
    return Finished(request.key, nothing, np.empty(0, np.float32), np.empty(0, np.uint32), LENGTH)


def make(topology: Topology, process: str = "") -> TorchEngine:
    """The engine of a rollout process whose topology says `engine = "torch"`."""
    generation = topology.generation
    return TorchEngine.load(
        topology.model.path,
        capacity=generation.max_batch,
        max_length=topology.max_prompt_tokens + generation.max_new_tokens,
        dtype=topology.model.dtype,
        device=choose_device(topology.device_of(process)),
        chat=topology.data.template == "chat",
        on_update="recompute" if generation.on_update == "recompute" else "keep",
        prefill_tokens=generation.prefill_tokens,
    )
