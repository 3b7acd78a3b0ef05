"""Requests for samples, from their body to the answer in the log: each sample is a call in the ring of model calls.

Talks to engines through `busrl.ring.calls`, to the desk for requests and answers. Knows nothing of HTTP or tensors.

- A sample is drawn by the request's seed, or by the name of its future, and its index: asked for again after a death it
  is the same one, if engine and weights are.
- An engine that dies costs time alone: its call waits for the next one.
- A sampler that is in flight draws with the newest weights that its model has published so at the time of the request.
- A request that nobody waits for any more ends its calls, and engines give their rows to others. One whose client is
  silent does too, without an answer, and begins again when the client is back.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from busrl.data.chat import LightTokenizer
from busrl.errors import CallUnanswered, RingError
from busrl.ring.calls import AsyncCaller, CallAnswer, ModelCall
from busrl.service.bodies import BadBody, Sample, SamplingParams, read_logged
from busrl.service.desk import Desk
from busrl.service.folders import ServiceFolders
from busrl.service.registry import Sampler, session_of
from busrl.service.requests import Answer
from busrl.service.wire import CompressedRows, SampledSequence, write_sample_result
from busrl.states import Finish
from busrl.topology.sizes import PER_TOKEN

AGAIN = ("late", "lost", "cancelled")  # ends of a call after which it is asked again
MALFORMED, TRIES = "malformed", 2  # which a damaged answer is, and each of weights whose numbers are not finite
HOLD_S = 3600.0
PLACES = 16  # adapters that an engine has in use at once
MORE_IDS = 4  # beyond the bytes of a text: so many ids of an answer's end are looked at for it
NO_TOKEN = -99999.0  # the log-probability of an empty cell
# Tensors of the places that a call asks for: (n,), twice (n, likeliest tokens), (n, targets).
SCORES = ("prompt_logprobs", "prompt_top_ids", "prompt_top_logprobs", "prompt_target_logprobs")
Array = npt.NDArray[Any]
Top = tuple[Array, Array]  # ids and log-probabilities, (places, k) each


class Source(NamedTuple):
    """The number of the snapshot that a request draws with, 0 for the base, and the request's place in the queue."""

    weights: int
    order: int


class Places(msgspec.Struct, frozen=True):
    """Places of its prompt that a call asks about, from `first`, at least 1, to before `end`: the log-probability of
    each id there, the `top` likeliest tokens, and the log-probabilities of `targets`, int32 of (end - first, k) as
    bytes, in which -1 asks for nothing."""

    first: int
    end: int
    top: int = 0
    targets: bytes = b""

    def target_ids(self) -> npt.NDArray[np.int32]:
        return np.frombuffer(self.targets, np.int32).reshape(self.end - self.first, -1)

    def extra(self) -> dict[str, Any]:
        gives = (SCORES[0], *(SCORES[1:3] if self.top else ()), *(SCORES[3:] if self.targets else ()))
        return {"score": msgspec.to_builtins(self, builtin_types=(bytes,)), "gives": gives}


class Scores(NamedTuple):
    """Scores of a prompt of n tokens, None where not asked for: log-probabilities (n,), NaN where none, the likeliest
    tokens of its places, log-probabilities of targets (n - 1, k), in the layout in which they were asked for."""

    logprobs: Array | None = None
    top: Top | None = None
    targets: Array | CompressedRows | None = None


class SampleFault(Exception):
    """A fault of a request for samples, with which its future fails."""


class Samples:
    """The requests for samples under way. `text` is the tokenizer, for stops that are texts; `context` the most ids of
    prompt and answer, `longest` those of an answer. `failed` gets an exception that is a fault of busrl's code."""

    def __init__(self, desk: Desk, where: ServiceFolders, caller: AsyncCaller, text: LightTokenizer | None,
                 context: int, longest: int, patience_s: float, failed: Callable[[BaseException], None]) -> None:
        self._desk, self._where, self._caller, self._text = desk, where, caller, text
        self._context, self._longest, self._patience_s, self._failed = context, longest, patience_s, failed
        self._tasks: dict[tuple[str, int], asyncio.Task[None]] = {}
        self._begun = 0

    @property
    def under_way(self) -> int:
        return len(self._tasks)

    def begin(self, sampler: Sampler, seq: int, weights: int = 0) -> None:
        """Begin to answer a logged request. `weights`: the number of its snapshot, where that is known."""
        self._begun += 1
        task = asyncio.ensure_future(self._answer(sampler, seq, weights, self._begun))
        self._tasks[sampler.id, seq] = task
        task.add_done_callback(lambda done: self._ended((sampler.id, seq), done))

    def stop(self, name: tuple[str, int]) -> None:
        """Give a request up: its client does not want the answer any more."""
        self._give_up(name, "cancelled by its client")

    def stop_session(self, id: str) -> None:
        """Give up all requests of a session that has ended."""
        for name in self._desk.under_way:
            if session_of(name[0]) == id:
                self.stop(name)

    def follow_clients(self, silent_s: float, keep_s: float) -> None:
        """Set the requests of clients aside that were silent for `silent_s`, and begin those of the ones that are back.
        An answer would have been kept for `keep_s`: after so long a silence a request is given up."""
        under_way, census = self._desk.under_way, self._desk.census
        silences = {session: census.silent_s(session) for session in {session_of(id) for id, _ in under_way}}
        for name in under_way:
            silence = silences[session_of(name[0])]
            if silence > keep_s:
                self._give_up(name, f"its client was silent for {silence:.0f} s (tinker.keep_answers_s)")
            elif silence > silent_s and name not in under_way.aside:
                under_way.set_aside(name)
                self._cancel(name)
            elif silence <= silent_s and name in under_way.aside:
                under_way.bring_back(name)
                self.begin(self._desk.registry.samplers[name[0]], name[1])

    async def close(self) -> None:
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # -- internals -----

    def _give_up(self, name: tuple[str, int], why: str) -> None:
        if name in self._desk.under_way:
            self._log(name, "user", failure(why, "user"))  # first: where that fails, the request goes on
            self._cancel(name)

    def _cancel(self, name: tuple[str, int]) -> None:
        if (task := self._tasks.pop(name, None)) is not None:
            task.cancel()

    def _ended(self, name: tuple[str, int], task: asyncio.Task[None]) -> None:
        if self._tasks.get(name) is task:
            del self._tasks[name]
        if not task.cancelled() and (problem := task.exception()) is not None:
            self._failed(problem)

    def _log(self, name: tuple[str, int], state: str, payload: bytes, weights: int = 0, tokens: int = 0) -> None:
        digest = self._desk.registry.samplers[name[0]].requests[name[1]].digest
        self._desk.answered(
            Answer(*name, digest, state, state == "done", payload, weights=weights, tokens=tokens))

    async def _answer(self, sampler: Sampler, seq: int, weights: int, order: int) -> None:
        name = sampler.id, seq
        try:
            asked = read_logged(Sample, self._desk.request(sampler.requests[seq]).body)
            source = Source(weights or await self._weights(sampler), order)
            drawn = await asyncio.gather(
                *(self._draw(asked, f"{sampler.id}:{seq}", index, source) for index in range(asked.num_samples)))
            scores = await self._prompt_scores(asked, source)
        except (SampleFault, BadBody) as problem:
            self._log(name, "user", failure(str(problem), "user"))
        except (CallUnanswered, RingError) as problem:
            self._log(name, "server", failure(str(problem), "server"))
        else:
            tokens = sum(len(sequence.tokens) for sequence in drawn)
            self._log(name, "done", write_sample_result(drawn, *scores), source.weights, tokens)

    def _stops(self, asked: SamplingParams) -> tuple[tuple[int, ...], tuple[str, ...]]:
        """Stops that are ids, and those that are texts."""
        stops = [asked.stop] if isinstance(asked.stop, str) else asked.stop or []
        ids = tuple(stop for stop in stops if isinstance(stop, int))
        texts = tuple(stop for stop in stops if isinstance(stop, str))
        if texts and self._text is None:
            raise SampleFault("sampling_params.stop: this model has no tokenizer.json; give token ids")
        return ids, texts

    async def _weights(self, sampler: Sampler) -> int:
        """The number of the snapshot that a sampler draws with; 0 for the base."""
        if not sampler.model:
            return 0
        saved = None
        while saved is None:
            saved = await self._desk.answer((sampler.model, sampler.seq), HOLD_S)
        if sampler.inflight:
            published = sorted(self._desk.registry.models[sampler.model].published, reverse=True)
            newer = (self._desk.found((sampler.model, seq)) for seq in published if seq > sampler.seq)
            saved = next((save for save in newer if save is not None and save.state == "done"), saved)
        if saved.state != "done" or not self._where.snapshot(saved.weights).is_dir():
            raise SampleFault(f"{sampler.path or sampler.id}: its weights are gone; save them again")
        return saved.weights

    async def _draw(self, asked: Sample, future: str, index: int, source: Source) -> SampledSequence:
        params, ids = asked.sampling_params, ids_of(asked)
        drawn_by = future if params.seed is None else f"seed {params.seed}"
        stream = int.from_bytes(hashlib.blake2b(f"{drawn_by} {index}".encode(), digest_size=8).digest(), "little") >> 1
        # The look at prompt and answer together is a call of its own, and draws a token: the context has room for it.
        most = min(self._context - len(ids) - (1 if asked.topk_sample_logprobs else 0), self._longest)
        if most < 1:
            raise SampleFault(f"topk_sample_logprobs: a prompt of {len(ids)} tokens leaves no room for it in a context "
                              f"of {self._context}")
        stop_ids, stop_texts = self._stops(params)
        answer = await self._answered(ModelCall(
            ids, min(params.max_tokens or most, most), stream=stream, temperature=params.temperature,
            top_p=params.top_p, stop=stop_ids, admission=source.order,
            extra={"weights": self._folder(source), **drawing(params, stop_texts)},
        ))
        cut = self._text_stop(answer.ids, stop_texts)
        count = cut or len(answer.ids)
        drawn = answer.ids[:count]
        top = await self._sample_top(ids, drawn, asked.topk_sample_logprobs, source)
        stopped = cut > 0 or answer.finish == Finish.EOS
        return SampledSequence(stopped, drawn, answer.logprobs[:count], top)

    def _folder(self, source: Source) -> str:
        return str(self._where.snapshot(source.weights)) if source.weights else ""

    async def _prompt_scores(self, asked: Sample, source: Source) -> Scores:
        ids, k = ids_of(asked), asked.topk_prompt_logprobs or 0
        targets = None if asked.target_prompt_logprobs is None else asked.target_prompt_logprobs.ids()
        scored = asked.prompt_logprobs or k > 0
        places = len(ids) - 1
        kept = min(asked.prompt_logprobs_last_n or places, places) if scored else 0
        if targets is not None:  # places before the first one that has a target are not scored for it
            wanted = np.flatnonzero((targets >= 0).any(1))
            needed = max(kept, places - int(wanted[0]) if wanted.size else 0)
        else:
            needed = kept
        scores = await self._scores(ids, Places(len(ids) - needed, len(ids), k), targets, source) if needed else {}
        logprobs = np.full(len(ids), np.nan, np.float32)
        top = np.zeros((len(ids), k), np.int32), np.full((len(ids), k), NO_TOKEN, np.float32)
        if kept:
            logprobs[-kept:] = scores[SCORES[0]][-kept:]
            for cells, name in zip(top if k else (), SCORES[1:]):
                likeliest = scores[name][-kept:]
                cells[-kept:, : likeliest.shape[1]] = likeliest
        told = None if targets is None else self._target_scores(asked, targets, scores.get(SCORES[3]))
        return Scores(logprobs if asked.prompt_logprobs else None, top if k else None, told)

    def _target_scores(self, asked: Sample, targets: Array, scores: Array | None) -> Array | CompressedRows:
        """Log-probabilities of all targets, 0 where nothing is asked for. `scores`: of the last places."""
        layout, told = asked.target_prompt_logprobs, np.zeros(targets.shape, np.float32)
        assert layout is not None
        if scores is not None and len(scores):
            told[-len(scores):] = np.where(targets[-len(scores):] < 0, np.float32(0), scores)
        if not layout.is_sparse:
            return told
        rows, columns = layout.compressed()
        return CompressedRows(told[np.repeat(np.arange(len(told)), np.diff(rows)), columns], rows, columns, told.shape)

    async def _sample_top(self, prompt: Array, drawn: Array, k: int | None, source: Source) -> Top | None:
        """The likeliest tokens at the places of a sample, from a look at prompt and sample together."""
        if not k:
            return None
        ids = np.concatenate([prompt, drawn])
        scores = await self._scores(ids, Places(len(prompt), len(ids), k), None, source)
        return scores[SCORES[1]], scores[SCORES[2]]

    async def _scores(self, ids: Array, asked: Places, targets: Array | None, source: Source) -> dict[str, Array]:
        """The tensors of all these places, by as many calls as their slots need. `targets`: of all places of `ids`."""
        weights = {"weights": self._folder(source)}
        answers = await asyncio.gather(*(
            self._answered(ModelCall(ids, 1, admission=source.order, temperature=0.0, extra=weights | part.extra()))
            for part in self._in_slots(asked, targets)
        ))
        return {name: np.concatenate([answer.extra[name] for answer in answers]) for name in answers[0].extra}

    def _in_slots(self, asked: Places, targets: Array | None) -> Iterator[Places]:
        """Parts of these places whose tensors have room in a slot, which was made for the longest answer."""
        width = 4 + 8 * asked.top + (8 * targets.shape[1] if targets is not None else 0)
        count = max(1, PER_TOKEN * self._longest // width)
        for first in range(asked.first, asked.end, count):
            end = min(first + count, asked.end)
            wanted = b"" if targets is None else targets[first - 1 : end - 1].tobytes()
            yield Places(first, end, asked.top, wanted)

    async def _answered(self, call: ModelCall) -> CallAnswer:
        malformed = 0
        while True:
            try:
                return await self._caller.ask(call, self._patience_s)
            except CallUnanswered as problem:
                malformed += problem.code == MALFORMED
                if problem.code not in AGAIN and not 0 < malformed < TRIES:
                    raise

    def _text_stop(self, ids: Array, texts: Sequence[str]) -> int:
        """The number of ids after which the text first has one of the stops; 0 if it never has."""
        tokenizer = self._text
        if not texts or tokenizer is None:
            return 0

        def has(count: int) -> bool:
            text = tokenizer.decode(ids[:count].tolist())
            return any(stop in text for stop in texts)

        if not has(len(ids)):
            return 0
        low, high = 1, len(ids)
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if has(middle) else (middle + 1, high)
        return low


def ids_of(asked: Sample) -> Array:
    return np.array([token for chunk in asked.prompt.chunks for token in chunk.tokens], np.int32)


def drawing(asked: SamplingParams, stop_texts: Sequence[str]) -> dict[str, Any]:
    """Settings that a call has no fields for: how its answer is drawn, and what ends it."""
    extra: dict[str, Any] = {}
    if asked.top_k > 0:
        extra["top_k"] = asked.top_k
    if stop_texts:
        extra["stop_texts"] = list(stop_texts)
    if asked.stop == []:
        extra["ends"] = False
    return extra


def has_a_stop(texts: Sequence[str], count: int, sampled: Callable[[int], Array],
               decode: Callable[[Array, bool], str]) -> bool:
    """Tell whether an answer of `count` ids, `sampled` from a number on, now has one of the texts: its end reads so,
    and the whole too, because the ids of an end alone may read otherwise."""
    last = count - max(len(text.encode()) for text in texts) - MORE_IDS
    return all(any(text in decode(sampled(begin), False) for text in texts) for begin in (max(0, last), 0))


def failure(text: str, category: str) -> bytes:
    return msgspec.json.encode({"error": text, "category": category})
