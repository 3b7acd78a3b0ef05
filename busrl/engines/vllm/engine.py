"""vLLM behind the interface of all engines: AsyncLLM in this process, its engine core and workers in their own.

The rollout role drives it through `busrl.engines.base.Engine`. `process` starts, calls and ends vLLM; `weights` loads
new weights. Knows nothing of slots, the bus or rewards; imports vLLM inside functions only.

- vLLM decodes by itself; `step` returns the answers that ended since. `decoding` gathers the tokens that have arrived,
  so that each is counted once.
- A sample's random stream depends on (seed, uid, segment, tokens so far). vLLM draws with it from logits whose last
  bits depend on the other requests of a batch, so equal requests nearly always give equal tokens, but need not.
- If the engine is dead, stuck or silent, the next call raises EngineLost, within `rpc_s` or `silent_s`, and all of its
  processes are killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from busrl.data.vocabulary import token_rows, vocabulary_size
from busrl.engines.base import Engine, Finished, PartialAnswer, Request, Statistics, seed_of
from busrl.engines.tokens import NO_IDS, tokens_of
from busrl.engines.vllm.process import Core, Start, on_a_cpu, skips_routes
from busrl.engines.vllm.routes import Routes
from busrl.engines.vllm.weights import LoadedAdapter, Updates
from busrl.errors import UserError
from busrl.states import Finish

if TYPE_CHECKING:
    from busrl.topology import Topology
    from busrl.weights.base import Receiver
    from busrl.weights.factory import TransportSettings

log = logging.getLogger("busrl")
ENDS = {"stop": Finish.EOS, "length": Finish.LENGTH, "abort": Finish.ABORTED}
STEP_WAIT_S = 0.02
DEATH_S = 1.0  # a failed request may be the first sign of a death, and the error of the death tells more
CALM_TURNS = 4  # turns of the loop in which everything that vLLM has sent passes through its tasks to ours


@dataclass
class Running(PartialAnswer):
    """A request inside vLLM. The loop's thread adds to it, the caller's thread reads it under the engine's lock. Each
    token gets the engine's version at its arrival; vLLM's own versions replace these where it reports them."""

    finish: int | None = None
    over: bool = False  # the caller's thread may take it
    name: str = ""
    routed: Any = None  # vLLM's own array of routes, which comes with the end
    task: Any = None  # follows it in the loop
    adapter: LoadedAdapter | None = None  # draws its tokens

    @classmethod
    def of(cls, request: Request, adapter: LoadedAdapter | None) -> Running:
        """`adapter`: of the engine's newest version, where versions are adapters."""
        return cls(request, adapter=adapter)

    @staticmethod
    async def for_check(
        engine: VllmEngine, core: Core, count: int, first: bool = False
    ) -> tuple[list[int], list[float], int]:
        """A short answer to a made-up prompt: all ids, log-probabilities of the drawn ones, length of the prompt. The
        `first` of a vLLM proves that it gives routes, too."""
        prompt_length = max(1, min(8, engine.max_length - count))
        prompt = np.arange(1, prompt_length + 1, dtype=np.int32) % vocabulary_size(Path(engine.start.model))
        limit = min(count, engine.max_length - prompt_length)
        running = Running(Request(-1, 0, 0, prompt, NO_IDS, limit, engine.temperature, 1.0, 0), name="check")
        routes = engine.routes if first else None
        if routes:
            routes.begin(running)
        salted = {"prompt_token_ids": running.known_ids, "cache_salt": "check"}
        async for output in core.engine.generate(salted, running.sampling([], True), running.id):
            running.take(output, engine.version)
        if routes:
            await routes.prove(running)
        return running.known_ids, running.logprobs, prompt_length

    @property
    def id(self) -> str:
        return self.name or f"{self.request.key}.{self.request.uid}.{self.request.segment}"

    def take(self, output: Any, version: int) -> None:
        """Take an output of vLLM: new tokens with their log-probabilities, and perhaps the end."""
        completion = output.outputs[0]
        new = [int(token) for token in completion.token_ids]
        if new:
            logprobs = (float(place[token].logprob) for place, token in zip(completion.logprobs, new))
            self.add(new, logprobs, [version] * len(new))
        if completion.finish_reason is None:
            return
        self.finish = ENDS.get(completion.finish_reason, Finish.ABORTED)
        self.routed = getattr(completion, "routed_experts", None)
        if self.adapter is None:
            self._correct(getattr(completion, "weight_versions", None))

    def _correct(self, spans: Iterable[Any] | None) -> None:
        """Replace versions by those that vLLM reports for spans of tokens."""
        for span in spans or ():
            if span.version.isdigit():
                at = slice(span.start, span.end)
                self.versions[at] = [int(span.version)] * len(self.versions[at])

    def forget(self) -> None:
        """Go back to the state without a token."""
        self.token_ids, self.logprobs, self.versions = [], [], []

    async def drawn_by(self, engine: VllmEngine) -> None:
        """Follow vLLM from the request's first token to its end."""
        more = engine.routes.settings(self) if engine.routes else {}
        core, settings = engine.core, self.sampling(engine.stops, engine.settings.seeded, **more)
        async with self.outputs(engine, self.known_ids, settings, self.id) as outputs:
            async for output in outputs:
                if core.over:
                    return
                engine.take(self, output)

    def outputs(self, engine: VllmEngine, ids: list[int], settings: Any, name: str) -> Any:
        """vLLM's outputs for these ids by the request's weights. Closed by who asks: left to the collector they may
        outlive the loop that has to close them."""
        prompt = {"prompt_token_ids": ids, "cache_salt": str(engine.version)}
        more = {"lora_request": self.adapter.request} if self.adapter and self.adapter.request else {}
        return contextlib.aclosing(engine.core.engine.generate(prompt, settings, name, **more))

    def sampling(self, stops: list[int], seeded: bool, **more: Any) -> Any:
        """vLLM's sampling settings for the request, `more` among them."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        request = self.request
        return SamplingParams(
            temperature=request.temperature,
            top_p=request.top_p,
            max_tokens=request.max_new_tokens,
            seed=seed_of(request, 0) if seeded and request.temperature > 0 else None,
            stop_token_ids=[*stops, *request.stop_ids],
            ignore_eos=True,  # `stops` has all end tokens
            logprobs=0,  # of the drawn token alone
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
            **more,
        )


class VllmEngine(Engine):
    """vLLM with the arguments of `start`; `make` takes them from a topology."""

    kind = Running

    def __init__(
        self, start: Start, *, chat: bool = False, on_update: str = "recompute", temperature: float = 1.0
    ) -> None:
        """`temperature`: of the trained samples, at which new weights are checked."""
        text = tokens_of(start.model, chat)
        super().__init__(text, start.capacity, start.max_length)
        self.start, self.settings, self.temperature = start, start.settings, temperature
        self._known = token_rows(Path(start.model))  # folders of later versions have no tokenizer
        self.stops = sorted(text.eos_ids)
        self._lock = threading.Lock()
        self._running: dict[int, Running] = {}
        self._ended: list[Running] = []  # written by the loop, until gathered
        self._wake = threading.Event()  # a request has ended, or the engine has died
        self._failure = ""
        self.moved_at = time.monotonic()  # the last token, start or resumption
        self._looked = False
        self._arrived = 0  # tokens that came since they were last gathered, counted by the loop
        self._counted = 0  # tokens of the steps so far
        self._usage = 0.0
        self.routes: Routes | None = None  # of this life of vLLM, where the run carries routes
        self.core = self._start_core()
        self._updates = Updates(self, on_update)

    # -- the interface -----

    @property
    def decoding(self) -> int:
        """Tokens that have arrived: the next `step` adds them, and waits for no others."""
        self._gather()
        self._looked = True
        return self._counts.tokens - self._counted

    def _begin(self, requests: list[Request]) -> None:
        self.check()
        self.moved_at = time.monotonic()
        starting = [self.kind.of(request, self.adapter_for(request)) for request in requests]
        for running in starting:
            if self.routes:
                self.routes.begin(running)
            self._running[running.request.key] = running
            running.computed = len(running.known_ids)
            self._counts.prefill_tokens += running.computed

        def create() -> None:
            for running in starting:
                running.task = task = asyncio.ensure_future(self._follow(running))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)

        self.core.loop.call_soon_threadsafe(create)

    def step(self) -> list[Finished]:
        if not self._looked:
            self._gather()
        self._looked, self._counted = False, self._counts.tokens
        if not self._done and self._running:
            self._wake.wait(STEP_WAIT_S)
        self.check()
        return self._take_done()

    def _end_now(self, keys: list[int]) -> None:
        self.core.call("abort", lambda: self._cut([self._running[key] for key in keys]))
        self._gather()

    def resume(self) -> None:
        if self.paused:
            self._updates.refuse_if_dirty()
            self.core.call("resume", self.core.engine.resume_generation)
            super().resume()
            self.moved_at = time.monotonic()

    def receiver(self, settings: TransportSettings, name: str) -> Receiver | None:
        return self._updates.receiver(settings, name)

    def _update(self, receiver: Receiver) -> tuple[int, int]:
        return self._updates.take(receiver)

    def statistics(self) -> Statistics:
        cache = self.core.cache_capacity()
        with self._lock:
            waiting = sum(not running.token_ids for running in self._running.values())
            return replace(
                super().statistics(), waiting=waiting, cache_tokens=round(self._usage * cache), cache_capacity=cache
            )

    def close(self) -> None:
        self._updates.close()
        self.core.close()

    # -- called by the updates -----

    def use_version(self, version: int) -> None:
        """Tokens that arrive from now on, and new requests, are of this version."""
        self.version = version

    def adapter_for(self, request: Request) -> LoadedAdapter | None:
        """The adapter that draws a request which begins now; None where versions are no adapters."""
        return self._updates.adapter

    @property
    def running(self) -> list[Running]:
        """Requests without an end, in the order in which they came."""
        return list(self._running.values())

    def check(self) -> None:
        """EngineLost if vLLM is dead, has failed a request, or is silent at work."""
        self.core.check()
        if self._failure:
            raise self.core.lose(self._failure)
        silent = time.monotonic() - self.moved_at
        if self._running and not self.paused and silent > self.settings.silent_s and not self._ended:
            text = f"vLLM's engine made no token for {silent:.0f} s with {len(self._running)} requests"
            raise self.core.lose(f"{text}; {self.core.describe()}")

    def hold(self) -> None:
        """Stop between two steps, sequences and their cache kept; returns when every token sent is here."""
        self.check()
        if not self.paused:
            self.core.call("pause", self._pause_now)
            super().hold()
        self._gather()

    def wait_until(self, done: Callable[[], bool], limit_s: float) -> bool:
        """Take what ends until `done`; False after the limit. EngineLost from a silent engine."""
        deadline = time.monotonic() + limit_s
        while True:
            self._gather()
            self.check()
            if done():
                return True
            if time.monotonic() > deadline:
                return False
            self._wake.wait(STEP_WAIT_S)

    def restart(self, start: Start) -> None:
        """End vLLM and start it again as `start` says; it has no requests."""
        super().hold()
        self.core.close()
        self.start = start
        self.core = self._start_core()
        super().resume()

    # -- in the loop -----

    def _start_core(self) -> Core:
        self._tasks: set[asyncio.Task[None]] = set()
        core = Core(self.start, self._record)
        core.on_death = self._wake.set
        if self._known.without:
            core.rpc("busrl_leave_out", self._known.end, list(self._known.holes))
        routing = self.start.routing
        try:
            self.routes = Routes(core, routing, native=not on_a_cpu(), skips=skips_routes()) if routing else None
            # It is up when it has made a token: what a version still compiles then belongs to the start.
            what, limit = "its first token", self.settings.start_s
            core.call(what, lambda: self.kind.for_check(self, core, 1, first=True), limit)
        except UserError:
            core.close()
            raise
        return core

    def _record(self, usage: float) -> None:
        """After a step, with the share of the key-value cache in use."""
        self._counts.steps += 1
        self._usage = usage

    async def _follow(self, running: Running) -> None:
        """Follow a request from its start to its end."""
        core = self.core
        try:
            await running.drawn_by(self)
            if self.routes and running.finish is not None:
                await self.routes.join([running], self._end)
        except asyncio.CancelledError:
            raise
        except Exception as problem:
            if not core.over and not await core.dies(DEATH_S) and not core.over:
                self._failure = f"vLLM failed request {running.id}: {type(problem).__name__}: {problem}"
                self._wake.set()

    def take(self, running: Running, output: Any) -> None:
        with self._lock:
            if running.finish is not None:
                return
            before = len(running.token_ids)
            running.take(output, self.version if running.adapter is None else running.adapter.version)
            self.moved_at = time.monotonic()
            if running.token_ids and not before:
                cached = int(getattr(output, "num_cached_tokens", 0) or 0)
                running.computed -= cached
                self._counts.prefill_tokens -= cached
                self._counts.prefix_tokens += cached
            self._arrived += len(running.token_ids) - before
        if running.finish is not None and self.routes is None:
            self._end([running])

    def _end(self, ended: list[Running]) -> None:
        """Have the caller's thread find these, whose answers are whole; each is found once."""
        with self._lock:
            self._ended += [running for running in ended if not running.over]
            for running in ended:
                running.over = True
        self._wake.set()

    async def _pause_now(self) -> None:
        core, abilities = self.core.engine.engine_core, self.core.abilities
        if abilities.bare_pause:
            await core.pause_scheduler_async(mode="keep", clear_cache=False)
        else:
            await self.core.engine.pause_generation(mode="keep", clear_cache=False)
        await settle(self.core, self.capacity)

    async def _cut(self, ending: list[Running]) -> None:
        await self.core.engine.abort([running.id for running in ending])
        await settle(self.core, self.capacity)
        with self._lock:
            for running in ending:  # one that vLLM did not know yet, or whose last output is still on its way
                if running.finish is None:
                    running.task.cancel()
                    running.finish = Finish.ABORTED
        if self.routes is None:
            self._end(ending)
        else:
            await self.routes.join(ending, self._end)

    # -- in the caller's thread -----

    def _gather(self) -> None:
        with self._lock:
            ended, self._ended = self._ended, []
            self._counts.tokens += self._arrived
            self._arrived = 0
            self._wake.clear()
        for running in ended:
            assert running.finish is not None
            self._done.append(self._running.pop(running.request.key).finished(running.finish))


async def settle(core: Core, capacity: int) -> None:
    """Let everything that vLLM has sent arrive here: its answer to a call may overtake tokens."""
    queue = getattr(core.engine.engine_core, "outputs_queue", None)
    if queue is None:
        await asyncio.sleep(0.05)
        return
    calm, wanted = 0, CALM_TURNS + 2 * (capacity // 128)  # long answers pass in pieces of 128 rows
    while calm < wanted:
        await asyncio.sleep(0)
        calm = calm + 1 if queue.empty() else 0


def make(topology: Topology, process: str) -> VllmEngine:
    return VllmEngine(
        Start.of(topology), chat=topology.data.template == "chat", on_update=topology.generation.on_update,
        temperature=topology.generation.temperature,
    )
