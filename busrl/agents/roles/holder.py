"""The base of roles that play samples as episodes: their passes, their tasks, and the way of a model call to an engine.

Talks to the ring of model calls (`busrl.ring.calls`); samples are those of `busrl.agents.samples`. Knows nothing of the
code of episodes, of engines, groups or advantages.

- If this process dies its samples go back to QUEUED, and begin again with new trees; the keeper frees its calls.
- Episodes run as tasks on the loop of the passes. An exception of a task, which is a fault of busrl's code, ends this
  process.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import time
from abc import abstractmethod
from collections.abc import Coroutine, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from busrl.agents.episode import Call, EngineAnswer, Episode, Settings
from busrl.agents.parsers import MessageMaker, parser_of
from busrl.agents.renderer import Renderer, report
from busrl.agents.samples import ClaimedSample, EpisodeSamples
from busrl.data.chat import LightTokenizer, template_of
from busrl.data.episodes import EpisodeLimits
from busrl.data.vocabulary import end_ids
from busrl.errors import AgentNotLoaded, BugError
from busrl.protocol import messages as m
from busrl.protocol.codec import topic
from busrl.ring import Ring, State
from busrl.ring.calls import AsyncCaller, CallAnswer, ModelCall, RingWatch
from busrl.roles.actor import Actor, ring_bells
from busrl.system.files import replace
from busrl.topology.rewards import RETURNED

log = logging.getLogger("busrl")
REQUEST_EVERY_S = 1.0


class EpisodeHolder(Actor):
    """A role has a method `serving`, and claims samples in `work`. An episode starts with `begin`, and ends with one of
    the ends of `samples`: `settle`, `begin_again`, `give_back` or `drop`."""

    failed: BaseException | None = None  # the exception of a task

    def setup(self) -> None:
        self._understand(Path(self.topology.model.path))
        self.calls = Ring.attach(self.paths.calls_name, calls=True)
        self.calls.register(self.role, self.name)
        self.samples = EpisodeSamples(self.ring, lambda: self.topology.agents, partial(self.warn, self.role),
                                      self.write_or_wait)
        self.tasks: set[asyncio.Task[None]] = set()
        self._next_request = 0.0
        self._passed = asyncio.Event()  # set at the end of the next pass
        self.loop = asyncio.new_event_loop()
        self.follow()

    def follow(self) -> None:
        self._keeps_prefixes = self.topology.keeps_prefixes

    def _understand(self, folder: Path) -> None:
        """Load the renderer, the parser of messages, and the limits of an episode."""
        agents, text = self.topology.agents, LightTokenizer.of(folder)
        if text is None:
            raise AgentNotLoaded(f"{folder}: no tokenizer.json that can be read; episodes need one, and the packages "
                                 "tokenizers and jinja2")
        self.renderer = Renderer(text, end_ids(folder), "template" if agents.history == "template" else "extend")
        source = template_of(folder, True) or ""
        if source:
            *kinds, last = report(self.renderer.probes)
            log.info("turns are continued as the chat template allows:\n%s", "\n".join([*kinds, last]))
            if any(probe.how == "fresh" for probe in self.renderer.probes):
                self.warn(self.role, last, kind="fresh turns")
        self.maker = MessageMaker(parser_of(agents.tools, source, self.topology.base_dir), agents.reasoning)
        self.limits = EpisodeLimits.of(self.topology)

    def subscriptions(self) -> list[str]:
        return [*super().subscriptions(), topic(m.CallTokens, self.worker_id)]

    def handle(self, message: m.Message) -> None:
        if isinstance(message, m.CallTokens):
            self.caller.tokens(message)

    def run_passes(self) -> None:
        self.loop.run_until_complete(self._passes())

    def teardown(self) -> None:
        samples = self.samples
        samples.give_back_all()
        log.info("episodes by their ends: %s; calls by how they were rendered: %s; requests: %s", dict(samples.ends),
                 dict(self.renderer.counts), dict(samples.counts))
        self.loop.close()
        self.calls.close()

    @abstractmethod
    def serving(self) -> contextlib.AbstractAsyncContextManager[Any]:
        """A context that is open while passes are made."""

    def work(self) -> bool:
        self._request_tasks()
        judged = self.samples.commit_rewards() if self.topology.reward.kind == RETURNED else 0
        ring_bells(self.bus, self.samples.bell, self.samples.reward_bell)
        return bool(judged)

    @property
    def rows(self) -> int:
        """The number of samples that this process can play at once; on another host so many are fetched."""
        return self.topology.agents.episodes

    # -- the loop -----

    async def _passes(self) -> None:
        self.news = asyncio.Event()
        watches = [RingWatch(self.ring, state, self.news.set) for state in (State.QUEUED, State.GENERATED)]
        async with AsyncCaller(self.calls, self.bus.send) as self.caller, self.serving():
            for watch in watches:
                watch.start()
            try:
                await self._until_stopped()
            finally:
                await asyncio.gather(*(watch.stop() for watch in watches))
            for task in self.tasks:
                task.cancel()
            await asyncio.gather(*self.tasks, return_exceptions=True)

    async def _until_stopped(self) -> None:
        while not self.stopping:
            self.look_around()
            self.work()
            self._passed.set()  # wakes those that wait for a sample
            self._passed = asyncio.Event()
            self.news.clear()  # set when an episode ends, or a slot becomes QUEUED or GENERATED
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self.news.wait(), self.tick_s)
            if self.failed is not None:
                raise self.failed

    async def next_pass(self, timeout_s: float) -> bool:
        """Wait for the end of a pass; False at once if this process is stopping."""
        if self.stopping:
            return False
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._passed.wait(), timeout_s)
        return True

    @contextlib.contextmanager
    def announced(self, **about: str) -> Iterator[None]:
        """While open, a file that its owner alone can read tells where this process listens."""
        file, about = self.paths.served(self.worker_id), {**about, "key": str(self.paths.serve_key)}
        replace(file, msgspec.json.encode({**about, "pid": os.getpid()}))
        try:
            yield
        finally:
            file.unlink(missing_ok=True)

    def strangers(self, text: str) -> None:
        """Warn of connections without a key."""
        self.warn(self.role, text, kind="strangers")

    def start(self, work: Coroutine[Any, Any, None]) -> None:
        """Run a coroutine as a task; an exception of it ends this process."""
        task = asyncio.ensure_future(work)
        self.tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self.tasks.discard(task)
        self.news.set()
        if not task.cancelled():
            self.failed = self.failed or task.exception()

    def _request_tasks(self) -> None:
        if (now := time.monotonic()) >= self._next_request:
            self._next_request = now + REQUEST_EVERY_S
            self.bus.send(m.TaskRequest(worker_id=self.worker_id, capacity=self.samples.room, rows=self.rows))

    # -- model calls -----

    def begin(self, sample: ClaimedSample, limits: EpisodeLimits | None = None) -> Episode:
        """The calls of an attempt at this sample."""
        settings = Settings(int(sample.line["max_new_tokens"]), limits or self.limits, self.topology.agents.parallel)
        return Episode(sample.uid, lambda call: self._ask(sample, call), self.renderer, self.maker, settings)

    async def _ask(self, sample: ClaimedSample, call: Call) -> EngineAnswer:
        line, topology = sample.line, self.topology
        model_call = ModelCall(
            call.prompt, call.max_new_tokens, uid=call.uid, stream=call.stream, temperature=line["temperature"],
            top_p=line["top_p"], priority=line["priority"], admission=line["admission"], cls=line["cls"],
            engine=max(0, call.near) if self._keeps_prefixes else 0, affinity_s=topology.agents.affinity_ms / 1e3,
        )
        answer = await self._answered(model_call, call)
        sample.read, sample.computed = sample.read + len(call.prompt), sample.computed + answer.computed
        waited_ms, generated_ms = int(1e3 * answer.waited_s), int(1e3 * answer.generated_s)
        return EngineAnswer(answer.ids, answer.logprobs, answer.versions, answer.finish, answer.engine, waited_ms,
                            generated_ms, answer.step)

    async def _answered(self, model_call: ModelCall, call: Call) -> CallAnswer:
        limit_s = self.topology.limits.work_s
        if call.on_ids is None:
            return await self.caller.ask(model_call, limit_s)
        async for news in self.caller.stream(model_call, limit_s):
            if isinstance(news, CallAnswer):
                return news
            call.on_ids(news)
        raise BugError("a stream of ids ended without the answer")


def run_key(path: Path) -> str:
    """The key of the run, which the first process that needs it writes, readable by its owner alone."""
    with contextlib.suppress(FileExistsError):
        file_no = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(file_no, "w") as file:
            file.write(secrets.token_hex(16))
    return path.read_text()
