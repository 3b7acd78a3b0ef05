"""The torch engine of a service: many adapters at once, and the scores of prompts.

Driven by the rollout role like every engine. Rows with adapters are `rows`; here are log-probabilities of prompts, and
how a topology makes the engine. Knows nothing of models that are trained, of clients or logs.

- The scores of a prompt are of the full softmax at temperature 1, from one forward pass when its request begins.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from busrl.engines.base import Finished, Request
from busrl.engines.torch.engine import warm
from busrl.service.rows import RowsEngine, weights_of
from busrl.service.sampling import SCORES
from busrl.system.device import choose as choose_device

if TYPE_CHECKING:
    from busrl.topology import Topology

__all__ = ["AdapterEngine", "make", "warm"]


class AdapterEngine(RowsEngine):
    def __init__(self, model: Any, tokenizer: Any, **settings: Any) -> None:
        super().__init__(model, tokenizer, **settings)
        self._scores: dict[int, dict[str, npt.NDArray[Any]]] = {}  # of requests that run, by key

    def _start(self, requests: list[Request]) -> None:
        for request in requests:
            if "score" in request.extra:
                self._scores[request.key] = self._scored(request)
        super()._start(requests)

    def _ended(self, finished: Finished) -> Finished:
        return replace(super()._ended(finished), extra=self._scores.pop(finished.key, {}))

    @torch.inference_mode()
    def _scored(self, request: Request) -> dict[str, npt.NDArray[Any]]:
        """Log-probabilities of the prompt's tokens from the second on, and the likeliest tokens there, [n - 1, k]."""
        ids = torch.from_numpy(request.prompt_ids.astype(np.int64)).to(self._device)
        with self.adapters.using(self.adapters.spread([weights_of(request)])):
            logits = self._model(ids[None], use_cache=False).logits[0, :-1].float()
        scores = torch.log_softmax(self._known.mask(logits), -1)
        measured = {SCORES[0]: scores.gather(1, ids[1:, None])[:, 0].cpu().numpy()}
        if top := min(int(request.extra["score"]), scores.shape[1]):
            best = scores.topk(top, -1)
            measured |= zip(SCORES[1:], (best.indices.to(torch.int32).cpu().numpy(), best.values.cpu().numpy()))
        return measured


def make(topology: Topology, process: str) -> AdapterEngine:
    generation = topology.generation
    engine = AdapterEngine.load(
        topology.model.path, capacity=generation.max_batch, max_length=topology.longest, dtype=topology.model.dtype,
        device=choose_device(topology.device_of(process)), prefill_tokens=generation.prefill_tokens,
    )
    assert isinstance(engine, AdapterEngine)
    return engine
