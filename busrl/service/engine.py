"""The torch engine of a service: how its tokens are drawn, and the scores of prompts.

Driven by the rollout role like every engine. Rows with adapters are `rows`; how a topology makes the engine is here.
Knows nothing of models that are trained, of clients or logs.

- Whatever a token was drawn from (temperature, top-k, top-p), its log-probability is of the full softmax at temperature
  1, as `forward` of a trainer gives it.
- A prompt is scored in pieces, one before each decoding step, so that it keeps running rows waiting for one piece at
  most. Its pieces begin at the same places whatever is asked of it.
- A text that ends an answer ends its row with the token that completes it; the caller cuts where the text begins to
  be there.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from busrl.data.vocabulary import TokenRows
from busrl.engines.base import Finished, Request
from busrl.engines.torch.decoder import LOGITS
from busrl.engines.torch.engine import PREFILL_TOKENS, Index, Sampling, sample_tokens, warm
from busrl.service.beside import weights_of
from busrl.service.registry import FULL
from busrl.service.rows import RowsEngine
from busrl.service.sampling import SCORES, Places, has_a_stop
from busrl.states import Finish
from busrl.system.device import choose as choose_device

if TYPE_CHECKING:
    from busrl.topology import Topology

__all__ = ["AdapterEngine", "make", "warm"]


# -- drawing -----


@dataclass(frozen=True)
class ServiceSampling(Sampling):
    """`top_k`: of all rows, [rows, 1], 0 where all tokens may be drawn; None where no row needs it. `most`: the
    largest."""

    top_k: Tensor | None
    most: int

    @property
    def as_it_is(self) -> bool:
        """True if all rows draw from the full softmax at temperature 1."""
        return all(part is None for part in (self.inverse_temperature, self.greedy, self.top_p, self.top_k))


def draw_tokens(logits: Tensor, uniforms: Tensor, settings: Sampling) -> tuple[Tensor, Tensor]:
    """Token ids and float32 log-probabilities, [rows] each, as `sample_tokens` draws them, top-k before top-p; the
    log-probabilities are of the full softmax at temperature 1."""
    assert isinstance(settings, ServiceSampling)
    likeliest = logits if settings.top_k is None else _keep_top(logits, settings.top_k, settings.most)
    tokens, logprobs = sample_tokens(likeliest, uniforms, settings)
    if not settings.as_it_is:
        logprobs = torch.log_softmax(logits.float(), -1).gather(-1, tokens[:, None])[:, 0].clamp_(max=0.0)
    return tokens, logprobs


def _keep_top(logits: Tensor, top_k: Tensor, most: int) -> Tensor:
    """The logits, -inf below the k-th largest of each row; tokens that are as likely as that one stay."""
    largest = logits.topk(min(most, logits.shape[-1])).values
    floor = largest.gather(-1, (top_k - 1).clamp(0, largest.shape[-1] - 1))
    return logits.masked_fill((top_k > 0) & (logits < floor), -torch.inf)


# -- scoring -----


class Scoring:
    """A prompt that is scored in pieces of `piece` tokens: so many of its ids are `read`."""

    def __init__(self, request: Request, piece: int, device: torch.device) -> None:
        self.request, self._piece = request, piece
        self.asked = msgspec.convert(request.extra["score"], Places)
        self.read = 0
        self._ids = torch.from_numpy(request.prompt_ids.astype(np.int64)).to(device)
        self._targets = torch.from_numpy(self.asked.target_ids().astype(np.int64)).to(device)
        self._past: Any = None  # the model's own cache
        self._parts: dict[str, list[npt.NDArray[Any]]] = {}

    @property
    def done(self) -> bool:
        return self.read >= self.asked.end - 1

    def advance(self, model: Any, known: TokenRows, spares: bool) -> None:
        """Read the next piece. `spares`: the model can leave out logits that nobody asks for."""
        begin, self.read = self.read, min(self.read + self._piece, self.asked.end - 1)
        first = max(self.asked.first, begin + 1)  # the logits of an id are those of the place behind it
        more = {"logits_to_keep": 1} if spares and first > self.read else {}
        output = model(self._ids[None, begin : self.read], past_key_values=self._past, use_cache=True, **more)
        self._past = output.past_key_values
        if first <= self.read:
            self._score(known.mask(output.logits[0, first - 1 - begin :].float()).log_softmax(-1), first)

    def _score(self, scores: Tensor, first: int) -> None:
        """Take over what is asked for of the places from `first` on, a row of `scores` each."""
        places = slice(first, first + len(scores))
        measured = {SCORES[0]: scores.gather(1, self._ids[places, None])[:, 0]}
        if top := min(self.asked.top, scores.shape[1]):
            best = scores.topk(top, -1)
            measured |= {SCORES[1]: best.indices.to(torch.int32), SCORES[2]: best.values}
        if self._targets.numel():
            wanted = self._targets[first - self.asked.first :][: len(scores)]
            measured[SCORES[3]] = scores.gather(1, wanted.clamp(min=0))
        for name, part in measured.items():
            self._parts.setdefault(name, []).append(part.cpu().numpy())

    def finished(self) -> Finished:
        """The end of its request, whose one token is the last that was scored."""
        extra = {name: np.concatenate(parts) for name, parts in self._parts.items()}
        token, logprob = self.request.prompt_ids[self.asked.end - 1 : self.asked.end], extra[SCORES[0]][-1:]
        return Finished(self.request.key, token, logprob, np.zeros(1, np.uint32), Finish.LENGTH, computed=self.read,
                        extra=extra)


# -- the engine -----


class AdapterEngine(RowsEngine):
    """Requests say by `extra` what else they want: `score` (`Places`), `top_k`, `ends` (False: the model's own do not
    end the answer), `stop_texts`."""

    draw = staticmethod(draw_tokens)

    def __init__(self, model: Any, tokenizer: Any, *, prefill_tokens: int = PREFILL_TOKENS, **settings: Any) -> None:
        super().__init__(model, tokenizer, prefill_tokens=prefill_tokens, **settings)
        self._piece = max(1, min(prefill_tokens, LOGITS // self._vocabulary))
        self._spares = "logits_to_keep" in inspect.signature(model.forward).parameters
        self._scoring: dict[int, Scoring] = {}  # by key, oldest first
        self._top_k = np.zeros(self.capacity, np.int64)  # by seat
        self._texts: dict[int, Sequence[str]] = {}  # that end an answer, by key

    # -- requests -----

    def _advance(self) -> None:
        super()._advance()
        if self._scoring:
            self._score()

    def _start(self, requests: list[Request]) -> None:
        drawing = [request for request in requests if "score" not in request.extra]
        super()._start(drawing)
        for request in drawing:
            self._top_k[self._running[request.key]] = request.extra.get("top_k", 0)
            if texts := request.extra.get("stop_texts"):
                self._texts[request.key] = texts
        self._scoring |= {
            request.key: Scoring(request, self._piece, self._device)
            for request in requests if "score" in request.extra
        }

    def _ended(self, finished: Finished) -> Finished:
        self._texts.pop(finished.key, None)
        self._scoring.pop(finished.key, None)
        return super()._ended(finished)

    @torch.inference_mode()
    def _score(self) -> None:
        """Read the next piece of the oldest prompt that is scored."""
        key, scoring = next(iter(self._scoring.items()))
        with self.adapters.using(self.adapters.spread([weights_of(scoring.request)])):
            scoring.advance(self._model, self._known, self._spares)
        if scoring.done:
            del self._beside[key]
            self._done.append(self._ended(scoring.finished()))

    # -- rows -----

    def _make_sampling(self, running: Index) -> Sampling:
        sampling, top_k = super()._make_sampling(running), self._top_k[running]
        most = int(top_k.max(initial=0))
        return ServiceSampling(
            sampling.inverse_temperature, sampling.greedy, sampling.top_p,
            self._to_device(top_k[:, None]) if most > 0 else None, most,
        )

    def _decode(self) -> list[Finished]:
        return [*super()._decode(), *self._completed()]

    def _completed(self) -> list[Finished]:
        """End the rows whose text now has one of their stops."""
        completed = [key for key, texts in self._texts.items() if key in self._running and self._has(key, texts)]
        if not completed:
            return []
        self._end_now(completed)
        ended = [finished for finished in self._done if finished.key in completed]
        self._done = [finished for finished in self._done if finished.key not in completed]
        return [replace(finished, finish=Finish.EOS) for finished in ended]

    def _has(self, key: int, texts: Sequence[str]) -> bool:
        seat = self._running[key]
        return has_a_stop(texts, int(self._seats.produced[seat]), partial(self._seats.sampled, seat), self.decode)


def make(topology: Topology, process: str) -> AdapterEngine:
    generation = topology.generation
    engine = AdapterEngine.load(
        topology.model.path, capacity=generation.max_batch, max_length=topology.longest, dtype=topology.model.dtype,
        device=choose_device(topology.device_of(process)), prefill_tokens=generation.prefill_tokens,
        whole=topology.tinker.weights == FULL,
    )
    assert isinstance(engine, AdapterEngine)
    return engine
