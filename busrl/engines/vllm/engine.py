"""One request inside vLLM: what it asks for, the tokens that came, and which weights made them.

Used by `vllm_engine`: its loop thread adds, the caller's thread reads under the engine's lock. Turns what vLLM gives
into `Finished` and `Event`. Imports vLLM inside functions only.

- A sample's random stream hangs on (seed, uid, segment, tokens so far). vLLM draws with it from logits whose last bits
  depend on what is batched with what, so equal requests give equal tokens nearly always, not by contract.
- Versions come from vLLM where it notes them for every token, else from the counts at each update.

What vLLM's own scheduler tells after every step, kept as a few numbers for `Engine.statistics`.

Handed to AsyncLLM as a logger of statistics. Imports vLLM inside a function only; where a version tells nothing, the
numbers stay 0.

vLLM behind the interface of all engines: AsyncLLM in this process, its engine core and workers in their own.

The rollout role drives it through `busrl.engines.base.Engine`; `vllm_core` holds vLLM's life, `vllm_updates` brings
new weights in. Knows nothing of slots, the bus or rewards.

- vLLM decodes on its own; `step` hands over what ended since. `drawing` gathers, so that every token is counted once.
- A request has its tokens here as they come: it survives a restart of vLLM, which then goes on behind them.
- A dead, stuck or silent engine is an EngineLost from the next call, within `rpc_s` or `silent_s`, with all of its
  processes killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import math
import struct
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from busrl.config.machine import vocabulary_size
from busrl.engines.base import ABORTED, EOS, LENGTH, Event, Finished, Pause, Request, Statistics
from busrl.engines.vllm.process import Core, Start
from busrl.engines.vllm.weights import Adapter, Updates

if TYPE_CHECKING:
    from busrl.config import Topology
    from busrl.config.schema import Vllm
    from busrl.data import Prompt
    from busrl.weights.base import Receiver
    from busrl.weights.factory import Settings



# -- One request inside vLLM: what it asks for, the tokens that came, and which weights made them ---------------------


ENDS = {"stop": EOS, "length": LENGTH, "abort": ABORTED}


@dataclass
class Running:
    """A request from `submit` to its end; `limit` is how many tokens it may have."""

    request: Request
    limit: int
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    finish: int | None = None
    told: int = 0  # tokens that `events` has handed over,
    told_end: bool = False  # and whether it told the end
    counted: int = 0  # tokens that `drawing` has counted
    started_with: int = 0  # tokens that it had when it was last handed to vLLM
    again: int = 0  # how often it was cut by a restart of the engine
    task: Any = None  # what follows it in the loop
    adapter: Any = None  # the adapter (`vllm_updates.Adapter`) that makes its tokens

    @property
    def known(self) -> list[int]:
        """All tokens that there are, in order."""
        parts = (self.request.prompt_ids, self.request.prefix_ids)
        return [int(i) for part in parts for i in part] + self.tokens

    @property
    def id(self) -> str:
        return f"{self.request.key}.{self.request.uid}.{self.request.segment}.{self.again}"

    def add(self, output: Any, version: int) -> None:
        """Take what vLLM sent: new tokens with their log-probabilities, and perhaps the end."""
        one = output.outputs[0]
        new = [int(token) for token in one.token_ids]
        if new:
            self.tokens += new
            self.logprobs += [float(place[token].logprob) for place, token in zip(one.logprobs, new)]
            self.versions += [version] * len(new)
        if one.finish_reason is None:
            return
        self.finish = ENDS.get(one.finish_reason, ABORTED)
        if self.adapter is None:
            self._correct(getattr(one, "weight_versions", None))

    def _correct(self, spans: Iterable[Any] | None) -> None:
        """vLLM's own note of the weights of every token, which counts from the request's last start."""
        for span in spans or ():
            if span.version.isdigit():
                at = slice(self.started_with + span.start, self.started_with + span.end)
                self.versions[at] = [int(span.version)] * len(self.versions[at])

    def finished(self) -> Finished:
        assert self.finish is not None
        return Finished(self.request.key, *self._arrays(0), self.finish)

    def event(self) -> Event | None:
        """What is new since the last event; None if nothing is."""
        finish = self.finish if not self.told_end else None
        if self.told == len(self.tokens) and finish is None:
            return None
        arrays = self._arrays(self.told)
        self.told, self.told_end = len(self.tokens), finish is not None
        return Event(self.request.key, *arrays, finish)

    def _arrays(
        self, begin: int
    ) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float32], npt.NDArray[np.uint32]]:
        logprobs = np.minimum(np.array(self.logprobs[begin:], np.float32), np.float32(0.0))
        if self.request.temperature == 0:  # a distribution with one point
            logprobs[~np.isnan(logprobs)] = 0.0
        return np.array(self.tokens[begin:], np.int32), logprobs, np.array(self.versions[begin:], np.uint32)


def empty(request: Request) -> Finished:
    """The end of a request that has no room for a token."""
    nothing = np.empty(0, np.int32)
    return Finished(request.key, nothing, nothing.astype(np.float32), nothing.astype(np.uint32), LENGTH)


def settings_of(running: Running, stops: list[int], seeded: bool) -> Any:
    """vLLM's sampling settings of a request."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    request = running.request
    return SamplingParams(
        temperature=request.temperature,
        top_p=request.top_p,
        max_tokens=running.limit - len(running.tokens),
        seed=seed_of(request, len(running.tokens)) if seeded and request.temperature > 0 else None,
        stop_token_ids=stops,
        ignore_eos=True,  # the ids above are all of them
        logprobs=0,  # the drawn token's alone
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
    )


def seed_of(request: Request, produced: int) -> int:
    """63 bits that are the sample's own."""
    mask = (1 << 64) - 1
    text = struct.pack("<QQQQ", request.seed & mask, request.uid & mask, request.segment, produced)
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1


# -- What vLLM's own scheduler tells after every step, kept as a few numbers for `Engine.statistics` ------------------


class Meter:
    """Counts of one engine, over its restarts."""

    def __init__(self) -> None:
        self.steps = 0
        self.usage = 0.0  # share of the key-value cache in use

    def factory(self) -> Any:
        """What AsyncLLM makes a logger with."""

        def made(config: Any, engine_index: int = 0) -> Any:
            from vllm.v1.metrics.loggers import StatLoggerBase

            meter = self

            class Told(StatLoggerBase):  # type: ignore[misc, unused-ignore]
                def __init__(self, config: Any, engine_index: int = 0) -> None: ...

                def record(self, scheduler_stats: Any = None, *args: Any, **more: Any) -> None:
                    if scheduler_stats is not None:
                        meter.steps += 1
                        meter.usage = float(getattr(scheduler_stats, "kv_cache_usage", 0.0) or 0.0)

                def log_engine_initialized(self) -> None: ...

            return Told(config, engine_index)

        return made


# -- vLLM behind the interface of all engines: AsyncLLM in this process, its engine core and workers in their own -----


log = logging.getLogger("busrl")
STEP_WAIT_S = 0.02
DEATH_S = 1.0  # a failed request may be the first that is heard of a death, whose own error says more
CALM_TURNS = 4  # of the loop, in which everything that vLLM has sent passes through its tasks to ours


class VllmEngine:
    """`start` says what vLLM is given, `own` is the [vllm] section; `of` makes both from a topology."""

    def __init__(self, start: Start, own: Vllm, *, chat: bool = False, on_update: str = "recompute",
                 on_restart: str = "continue", temperature: float = 1.0) -> None:
        """`temperature`: that of the samples that are trained, at which new weights are checked."""
        self.start, self.own, self.temperature = start, own, temperature
        self.version = 0
        from busrl.engines.tokens import tokens_of  # brings transformers

        self._text = tokens_of(start.model, chat)
        self._stops = sorted(self._text.eos_ids)
        self._vocabulary = vocabulary_size(Path(start.model))
        self._lock = threading.Lock()
        self._running: dict[int, Running] = {}
        self._ended: list[Running] = []  # in the loop's hands until gathered
        self._ready: list[Finished] = []
        self._streams: dict[int, Running] = {}
        self._some = threading.Event()
        self._failure = ""
        self._moved_at = time.monotonic()  # the last token, start or resumption
        self._looked = self._paused = False
        self._arrived = self._arrived_in_loop = self._counted = self._prefill = 0
        self._pause_s = self._paused_at = 0.0
        self.meter = Meter()
        self.core = self._start_core()
        self._updates = Updates(self, on_update, on_restart)

    @classmethod
    def of(cls, topology: Topology) -> VllmEngine:
        """The engine of a topology's rollout processes."""
        return cls(
            Start.of(topology),
            topology.vllm,
            chat=topology.data.template == "chat",
            on_update=topology.generation.on_update,
            on_restart=topology.weights.on_restart,
            temperature=topology.generation.temperature,
        )

    # -- the protocol ---------------------------------------------------------------------------------------------

    @property
    def capacity(self) -> int:
        return self.start.capacity

    @property
    def active(self) -> int:
        return len(self._running) + len(self._ready)

    @property
    def drawing(self) -> int:
        """Tokens that came since they were last gathered: the next `step` adds them, having waited for none."""
        self._gather()
        self._looked = True
        return self._arrived - self._counted

    @property
    def max_length(self) -> int:
        return self.start.max_length

    def submit(self, requests: Sequence[Request]) -> None:
        if self.active + len(requests) > self.capacity:
            raise ValueError(f"{len(requests)} requests for {self.capacity - self.active} free rows; look at capacity")
        self.check()
        starting = []
        for request in requests:
            room = self.max_length - len(request.prompt_ids) - len(request.prefix_ids)
            running = Running(request, min(request.max_new_tokens, room), adapter=self._updates.adapter)
            if running.limit <= 0:
                self._ready.append(empty(request))
                continue
            self._running[request.key] = running
            if request.stream:
                self._streams[request.key] = running
            starting.append(running)
        self.begin(starting)

    def step(self) -> list[Finished]:
        if not self._looked:
            self._gather()
        self._looked, self._counted = False, self._arrived
        if not self._ready and self._running:
            self._some.wait(STEP_WAIT_S)
        self.check()
        finished, self._ready = self._ready, []
        return finished

    def abort(self, key: int) -> Finished | None:
        running = self._running.get(key)
        if running is None:
            waiting = [one for one in self._ready if one.key == key]
            self._ready = [one for one in self._ready if one.key != key]
            return waiting[0] if waiting else None
        self.core.call("abort", lambda: self._end_now([running]))
        self._gather()
        found = next(one for one in self._ready if one.key == key)
        self._ready.remove(found)
        return found

    def events(self) -> list[Event]:
        self.check()
        with self._lock:
            found = [event for running in self._streams.values() if (event := running.event()) is not None]
            for key in [key for key, running in self._streams.items() if running.told_end]:
                del self._streams[key]
        return found

    def pause(self, how: Pause) -> list[Finished]:
        self.check()
        if how == "wait":
            self.finish_all()
        self.hold_still()
        if how == "abort":
            self.core.call("abort", lambda: self._end_now(list(self._running.values())))
        self._gather()
        finished, self._ready = self._ready, []
        return finished

    def resume(self) -> None:
        if self._paused:
            self._updates.refuse_if_dirty()
            self.core.call("resume", self.core.engine.resume_generation)
            self._pause_s += time.monotonic() - self._paused_at
            self._paused, self._moved_at = False, time.monotonic()

    def receiver(self, settings: Settings, name: str) -> Receiver | None:
        return self._updates.receiver(settings, name)

    def update_weights(self, receiver: Receiver) -> tuple[int, int]:
        return self._updates.take(receiver)

    def statistics(self) -> Statistics:
        with self._lock:
            waiting = sum(not running.tokens for running in self._running.values())
            return Statistics(
                active=self.active, waiting=waiting, paused=self._paused, version=self.version,
                steps=self.meter.steps, tokens=self._arrived, prefill_tokens=self._prefill,
                cache_tokens=round(self.meter.usage * self.cache_capacity), cache_capacity=self.cache_capacity,
                updates=self._updates.count, update_s=self._updates.seconds, pause_s=self._pause_s,
            )

    def encode(self, prompt: Prompt) -> list[int]:
        return self._text.encode(prompt)

    def decode(self, ids: Sequence[int] | npt.NDArray[np.int32], ended: bool = True) -> str:
        return self._text.decode(ids, ended)

    def close(self) -> None:
        self._updates.close()
        self.core.close()

    # -- for the updates ------------------------------------------------------------------------------------------

    @property
    def cache_capacity(self) -> int:
        """Positions of vLLM's key-value cache; 0 if it does not say."""
        cache = getattr(getattr(self.core.engine, "vllm_config", None), "cache_config", None)
        return int((getattr(cache, "num_gpu_blocks", 0) or 0) * (getattr(cache, "block_size", 0) or 0))

    @property
    def running(self) -> list[Running]:
        """Requests without an end, in the order of their keys' coming."""
        return list(self._running.values())

    @property
    def paused(self) -> bool:
        return self._paused

    def check(self) -> None:
        """EngineLost if vLLM is dead, has failed a request, or is silent at work."""
        self.core.check()
        if self._failure:
            raise self.core.lose(self._failure)
        silent = time.monotonic() - self._moved_at
        if self._running and not self._paused and silent > self.own.silent_s and not self._ended:
            text = f"vLLM's engine made no token for {silent:.0f} s with {len(self._running)} requests"
            raise self.core.lose(f"{text}; {self.core.describe()}")

    def begin(self, starting: list[Running]) -> None:
        """Hand requests to vLLM; what they have of tokens is part of their prompts."""
        self._moved_at = time.monotonic()
        for running in starting:
            running.started_with = len(running.tokens)
            self._prefill += len(running.request.prompt_ids) + len(running.request.prefix_ids) + len(running.tokens)

        def create() -> None:
            for running in starting:
                running.task = task = asyncio.ensure_future(self._follow(running))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)

        self.core.loop.call_soon_threadsafe(create)

    def hold_still(self) -> None:
        """Stop decoding between two steps, sequences and their cache kept; returns when every token sent is here."""
        if self._paused:
            return
        self.core.call("pause", self._pause_now)
        self._paused, self._paused_at = True, time.monotonic()

    def finish_all(self) -> None:
        """Wait until nothing runs; vLLM's own pause would wait without a word of who is silent."""
        self.wait_until(lambda: not self._running)

    def wait_until(self, done: Callable[[], bool], limit_s: float = math.inf) -> bool:
        """Take what ends until `done`; False if it is not after the limit. EngineLost from a silent engine."""
        deadline = time.monotonic() + limit_s
        while True:
            self._gather()
            self.check()
            if done():
                return True
            if time.monotonic() > deadline:
                return False
            self._some.wait(STEP_WAIT_S)

    def swap_core(self, start: Start) -> None:
        """End vLLM and start it again as `start` says. Requests stay here, to `go_on` behind the tokens they have."""
        self.hold_still()
        self.core.close()
        self._gather()
        self.start = start
        self.core = self._start_core()

    def go_on(self, adapter: Adapter | None) -> None:
        """Hand every request to the vLLM that was started anew, from here on with that adapter."""
        self._pause_s += time.monotonic() - self._paused_at
        self._paused = False
        for running in self._running.values():
            running.again += 1
            running.adapter = adapter
        self.begin(self.running)

    async def sample_for_check(self, core: Core, count: int) -> tuple[list[int], list[float], int]:
        """A short answer to a made-up prompt: all ids, log-probabilities of the drawn ones, length of the prompt."""
        known = max(1, min(8, self.max_length - count))
        prompt = np.arange(1, known + 1, dtype=np.int32) % self._vocabulary
        request = Request(-1, 0, 0, prompt, prompt[:0], min(count, self.max_length - known), self.temperature,
                          1.0, 0)
        running = Running(request, request.max_new_tokens)
        settings = settings_of(running, [], True)
        salted = {"prompt_token_ids": running.known, "cache_salt": "check"}
        async for output in core.engine.generate(salted, settings, "check"):
            running.add(output, self.version)
        return running.known, running.logprobs, known

    # -- in the loop ----------------------------------------------------------------------------------------------

    def _start_core(self) -> Core:
        own = self.own
        self._tasks: set[asyncio.Task[None]] = set()
        limits = {"start_s": own.start_s, "rpc_s": own.rpc_s, "stop_s": own.stop_s}
        core = Core(self.start, **limits, stat_logger=self.meter.factory())
        core.on_death = self._some.set
        # It is up when it has made a token: what a version still compiles then belongs to the start.
        core.call("its first token", lambda: self.sample_for_check(core, 1), own.start_s)
        return core

    async def _follow(self, running: Running) -> None:
        """One request from its start to its end."""
        core = self.core
        try:
            prompt = {"prompt_token_ids": running.known, "cache_salt": str(self.version)}
            settings = settings_of(running, self._stops, self.own.seeded)
            more = {"lora_request": running.adapter.request} if running.adapter and running.adapter.request else {}
            # Closed here: left to the collector it may outlive the loop that has to close it.
            async with contextlib.aclosing(core.engine.generate(prompt, settings, running.id, **more)) as outputs:
                async for output in outputs:
                    if core.over:  # its requests are handed to its successor
                        return
                    self._take(running, output)
        except asyncio.CancelledError:
            raise
        except Exception as problem:
            if not core.over and not await core.dies(DEATH_S) and not core.over:
                self._failure = f"vLLM failed request {running.id}: {type(problem).__name__}: {problem}"
                self._some.set()

    def _take(self, running: Running, output: Any) -> None:
        with self._lock:
            if running.finish is not None:
                return
            before = len(running.tokens)
            running.add(output, self.version if running.adapter is None else running.adapter.version)
            self._moved_at = time.monotonic()
            if len(running.tokens) > before and before == running.started_with:
                self._prefill -= int(getattr(output, "num_cached_tokens", 0) or 0)
            self._arrived_in_loop += len(running.tokens) - before
            if running.finish is not None:
                self._ended.append(running)
                self._some.set()

    async def _pause_now(self) -> None:
        core, abilities = self.core.engine.engine_core, self.core.abilities
        if abilities.bare_pause:
            await core.pause_scheduler_async(mode="keep", clear_cache=False)
        else:
            await self.core.engine.pause_generation(mode="keep", clear_cache=False)
        await self._settle()

    async def _settle(self) -> None:
        """Let everything that vLLM has sent reach us: its answer to a call may overtake tokens on their last steps."""
        queue = getattr(self.core.engine.engine_core, "outputs_queue", None)
        if queue is None:
            await asyncio.sleep(0.05)
            return
        calm, wanted = 0, CALM_TURNS + 2 * (self.capacity // 128)  # long answers pass in pieces of 128 rows
        while calm < wanted:
            await asyncio.sleep(0)
            calm = calm + 1 if queue.empty() else 0

    async def _end_now(self, ending: list[Running]) -> None:
        await self.core.engine.abort([running.id for running in ending])
        await self._settle()
        with self._lock:
            for running in ending:  # one that vLLM did not know yet, or whose last word is still on its way
                if running.finish is None:
                    running.task.cancel()
                    running.finish = ABORTED
                    self._ended.append(running)

    # -- in the caller's thread ---------------------------------------------------------------------------------

    def _gather(self) -> None:
        """Take what ended from the loop's hands."""
        with self._lock:
            ended, self._ended = self._ended, []
            self._arrived = self._arrived_in_loop
            self._some.clear()
        for running in ended:
            del self._running[running.request.key]
            self._ready.append(running.finished())
