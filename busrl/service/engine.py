"""The torch engine with several adapters: each request names the folder of the one that answers it.

Driven by the rollout role like every engine. Talks to adapter folders of peft's format, whose names are numbers. Knows
nothing of models that are trained, of clients or logs.

- One adapter at a time is added to the weights. Requests of others wait until what runs has ended; then the adapter
  whose request has waited longest has its turn, with all that wait for it.
- The version of a token is the number of its adapter's folder; 0 is the base.
- The scores of a prompt are of the full softmax at temperature 1, from one forward pass when its request begins.
- A folder that cannot be used refuses its requests, and nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from busrl.engines.base import Finished, PartialAnswer, Request
from busrl.engines.torch.engine import TorchEngine, warm
from busrl.engines.torch.lora import WeightLoader
from busrl.errors import WeightsRefused
from busrl.service.sampling import SCORES
from busrl.states import Finish
from busrl.system.device import choose as choose_device

if TYPE_CHECKING:
    from busrl.topology import Topology

__all__ = ["AdapterEngine", "make", "warm"]


class AdapterLoader(WeightLoader):
    """Puts one adapter after the other on the base, or none."""

    @torch.no_grad()
    def use(self, folder: str) -> None:
        if folder:
            self.swap(Path(folder))
            return
        parameters = dict(self._model.named_parameters())
        for name, original in self._originals.items():
            parameters[name].copy_(original)


class AdapterEngine(TorchEngine):
    def __init__(self, model: Any, tokenizer: Any, **settings: Any) -> None:
        super().__init__(model, tokenizer, **settings)
        self._loader: AdapterLoader = AdapterLoader(model, settings.get("base"))
        self._weights = ""  # the folder of the adapter in use
        self._scores: dict[int, dict[str, npt.NDArray[Any]]] = {}  # of requests that run, by key
        self._held: dict[int, Request] = {}  # requests that wait for their adapter, by key, oldest first

    @property
    def active(self) -> int:
        return super().active + len(self._held)

    def _begin(self, requests: list[Request]) -> None:
        if self._held or any(weights_of(request) != self._weights for request in requests):
            self._held.update((request.key, request) for request in requests)
        else:
            self._start(requests)

    def step(self) -> list[Finished]:
        if self._held and not self._running and not self.paused:
            self._change(weights_of(next(iter(self._held.values()))))
        return [self._with_scores(finished) for finished in super().step()]

    def _with_scores(self, finished: Finished) -> Finished:
        scores = self._scores.pop(finished.key, None)
        return finished if scores is None else replace(finished, extra=scores)

    def abort(self, key: int) -> Finished | None:
        self._scores.pop(key, None)
        held = self._held.pop(key, None)
        return super().abort(key) if held is None else PartialAnswer(held).finished(Finish.ABORTED)

    def _end_now(self, keys: Sequence[int]) -> None:
        super()._end_now(list(keys))
        if not self._running:  # a pause that ends everything
            self._done += [PartialAnswer(request).finished(Finish.ABORTED) for request in self._held.values()]
            self._held.clear()

    def _change(self, weights: str) -> None:
        """Put another adapter on the base, and let all requests begin that wait for it."""
        turn = [request for request in self._held.values() if weights_of(request) == weights]
        self._held = {key: request for key, request in self._held.items() if weights_of(request) != weights}
        if weights != self._weights:
            try:
                self._loader.use(weights)
            except WeightsRefused as problem:
                self._done += [PartialAnswer(request).finished(Finish.ABORTED, refused=str(problem))
                               for request in turn]
                return
            self._waiting.wait_again(())  # what is kept of earlier requests is of the other adapter
            self._weights, self.version = weights, int(Path(weights).name) if weights else 0
        self._start(turn)

    def _start(self, requests: list[Request]) -> None:
        for request in requests:
            if "score" in request.extra:
                self._scores[request.key] = self._scored(request)
        super()._begin(requests)

    @torch.inference_mode()
    def _scored(self, request: Request) -> dict[str, npt.NDArray[Any]]:
        """Log-probabilities of the prompt's tokens from the second on, and the likeliest tokens there, [n - 1, k]."""
        ids = torch.from_numpy(request.prompt_ids.astype(np.int64)).to(self._device)
        logits = self._known.mask(self._model(ids[None], use_cache=False).logits[0, :-1].float())
        scores = torch.log_softmax(logits, -1)
        measured = {SCORES[0]: scores.gather(1, ids[1:, None])[:, 0].cpu().numpy()}
        if top := min(int(request.extra["score"]), scores.shape[1]):
            best = scores.topk(top, -1)
            measured |= zip(SCORES[1:], (best.indices.to(torch.int32).cpu().numpy(), best.values.cpu().numpy()))
        return measured


def weights_of(request: Request) -> str:
    """The folder of the adapter that a request names; empty: the base."""
    return str(request.extra.get("weights", ""))


def make(topology: Topology, process: str) -> AdapterEngine:
    generation = topology.generation
    engine = AdapterEngine.load(
        topology.model.path, capacity=generation.max_batch, max_length=topology.longest, dtype=topology.model.dtype,
        device=choose_device(topology.device_of(process)), prefill_tokens=generation.prefill_tokens,
        prefix_keep_s=topology.prefix_keep_s,
    )
    assert isinstance(engine, AdapterEngine)
    return engine
