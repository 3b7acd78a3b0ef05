"""The base of roles that play samples as episodes: their passes, their tasks, and the calls of an episode by its seats.

Model calls go through `busrl.agents.players`; samples are those of `busrl.agents.samples`, and their claims, where an
episode has several sides, those of `busrl.agents.sides`. Knows nothing of the code of episodes, of engines, groups or
advantages.

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
from typing import TYPE_CHECKING, Any

import msgspec

from busrl.agents.episode import Call, EngineAnswer, Episode, OwnTime
from busrl.agents.players import Players
from busrl.agents.samples import EpisodeSamples
from busrl.agents.seats import Seat
from busrl.agents.sides import ClaimedSample, Sides
from busrl.data.episodes import EpisodeLimits
from busrl.protocol import messages as m
from busrl.protocol.codec import topic
from busrl.ring import Ring, State
from busrl.ring.calls import RingWatch
from busrl.roles.actor import Actor, ring_bells
from busrl.roles.ledgers import Ledger
from busrl.states import HeaderWord
from busrl.system.files import replace
from busrl.topology import Topology
from busrl.topology.rewards import RETURNED

if TYPE_CHECKING:
    from busrl.agents.http import Card

log = logging.getLogger("busrl")
REQUEST_EVERY_S = 1.0


class EpisodeHolder(Actor):
    """A role has a method `serving`, and claims samples in `work`. An episode starts with `begin`, and ends with one of
    the ends of `samples`: `settle`, `begin_again`, `give_back` or `drop`."""

    failed: BaseException | None = None  # the exception of a task

    def setup(self) -> None:
        self.players = Players(self.topology, self._calls_of, partial(self.warn, self.role, kind="fresh turns"))
        self.player = self.players.lead
        self.renderer, self.limits = self.player.renderer, self.player.limits
        self._learners = {self.topology.tag: self.ring}
        self.seats = self.players.seats
        self.samples = EpisodeSamples(self.ring, lambda: self.topology.agents, partial(self.warn, self.role),
                                      self.write_or_wait, self._sides())
        self.tasks: set[asyncio.Task[None]] = set()
        self._next_request = 0.0
        self._passed = asyncio.Event()  # set at the end of the next pass
        self.loop = asyncio.new_event_loop()

    def _calls_of(self, topology: Topology) -> Ring:
        """The ring of a model's calls, with an entry of this process."""
        calls = Ring.attach(self.topology.paths_of(topology.tag, self.paths).calls_name, calls=True)
        calls.register(self.role, self.name)
        return calls

    def follow(self) -> None:
        self.players.follow(self.topology)

    def _sides(self) -> Sides | None:
        """Claims of samples as sides of episodes; None where each sample is an episode."""
        if sum(seat.trained for seat in self.seats) == 1:
            return None
        trained = [player.topology for player in self.players if not player.topology.frozen]
        return Sides([Ledger.own(self) if own is self.topology else self._attached(own) for own in trained])

    def _attached(self, topology: Topology) -> Ledger:
        """The ledger of a trained model beside the lead, with an entry of this process."""
        ledger = Ledger.attach(topology, self.topology.paths_of(topology.tag, self.paths), self.role, self.name)
        ledger.ring.set_ready()
        self.other_rings.append(ledger.ring)
        self._learners[topology.tag] = ledger.ring
        return ledger

    def _step_of(self, tag: str) -> int:
        """The steps of the learner whose weights a model has: its own, or the one that it follows; 0 if nobody's."""
        followed = {row.tag: row.follow.model for row in self.topology.models}
        ring = self._learners.get(followed.get(tag) or tag)
        return ring.header(HeaderWord.STEP) if ring else 0

    def subscriptions(self) -> list[str]:
        return [*super().subscriptions(), topic(m.CallTokens, self.worker_id)]

    def handle(self, message: m.Message) -> None:
        if isinstance(message, m.CallTokens):
            self.players.tokens(message)

    def run_passes(self) -> None:
        self.loop.run_until_complete(self._passes())

    def teardown(self) -> None:
        samples = self.samples
        samples.give_back_all()
        log.info("episodes by their ends: %s; calls by how they were rendered: %s; requests: %s", dict(samples.ends),
                 dict(self.renderer.counts), dict(samples.counts))
        self.loop.close()
        self.players.close()
        for ring in self.samples.rings:
            if ring is not self.ring:
                ring.close()

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
        watches = [RingWatch(ring, state, self.news.set) for ring in self.samples.rings
                   for state in (State.QUEUED, State.GENERATED)]
        async with self.players.calling(self.bus.send), self.serving():
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

    @property
    def cards(self) -> list[Card]:
        """The models that clients over HTTP may call."""
        from busrl.agents.http import Card  # only here: aiohttp is optional

        return [Card(seat, player.limits.context, player.renderer) for seat, player in self.seats.items()]

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
        first, *others = self.seats
        if not others:
            settings = self.player.settings(sample.line, limits)
            return self.player.episode(sample.number, partial(self._ask, sample), settings, seat=first)
        own = OwnTime(self.topology.agents.parallel)
        sides = {**sample.siblings, sample.seat or first.name: sample}
        more = [self._seated(sample, seat, salt, sides.get(seat.name), own=own) for salt, seat in enumerate(others, 1)]
        return self._seated(sample, first, 0, sides.get(first.name), own=own, others=more)

    def _seated(self, sample: ClaimedSample, seat: Seat, salt: int, side: ClaimedSample | None, **more: Any) -> Episode:
        """A seat of the episode of this sample; `side`: the sample that records it, if there is one."""
        player, partners = self.seats[seat], [other for other in sample.ending() if other is not side]
        line = side.line if side else player.line_of(sample, seat)

        async def ask(call: Call) -> EngineAnswer:
            answer = await player.ask(line, call, side)
            for other in partners:
                other.answered_beside(len(answer.ids), max(0, self._step_of(seat.tag) - answer.step))
            return answer

        settings = player.settings(line, salt=salt)
        return player.episode(sample.number, ask, settings, seat=seat, **more)

    async def _ask(self, sample: ClaimedSample, call: Call) -> EngineAnswer:
        return await self.player.ask(sample.line, call, sample)


def run_key(path: Path) -> str:
    """The key of the run, which the first process that needs it writes, readable by its owner alone."""
    with contextlib.suppress(FileExistsError):
        file_no = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(file_no, "w") as file:
            file.write(secrets.token_hex(16))
    return path.read_text()
