"""The door's memory: logs what is asked before it is answered, and finds the answers.

Talks to the three logs of a service. Knows nothing of HTTP or bodies.

- A request is in the log, and durable where the run says so, before its client hears of it.
- An answer is in a log before a client can get it: a door that dies finds all of them again.
- A sampler's completions are listed in the order of the log, so a place in that list stays valid.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Iterator

import msgspec

from busrl.service.figures import Census
from busrl.service.folders import ServiceFolders
from busrl.service.registry import Numbered, Registry
from busrl.service.requests import Answer, LogReader, LogWriter, Place, Request

CLONE = 10**9  # numbers of a sampler's clone begin at its own multiple of this


class Found(msgspec.Struct, frozen=True):
    """An answer: its state and size, and where it stands in which log."""

    state: str
    proto: bool
    size: int
    weights: int
    log: LogReader
    place: Place

    def payload(self) -> bytes:
        return msgspec.msgpack.decode(self.log.payload(self.place), type=Answer).payload


class Desk:
    def __init__(self, where: ServiceFolders, sync: bool) -> None:
        self.registry, self.census = Registry(), Census(where)
        self._requests, self._samples = LogWriter(where.requests), LogWriter(where.samples)
        self._request_log, self._sync = LogReader(where.requests), sync
        self._answer_logs = [LogReader(where.answers), LogReader(where.samples)]
        self._answers: dict[tuple[str, int], Found] = {}
        self._waiters: defaultdict[tuple[str, int], list[asyncio.Event]] = defaultdict(list)
        self.completed: defaultdict[tuple[str, int], list[tuple[str, int]]] = defaultdict(list)  # by sampler and clone
        self.waiting_bytes: defaultdict[str, int] = defaultdict(int)  # of requests without an answer, by model
        self._decode_request = msgspec.msgpack.Decoder(Request).decode
        self._decode_answer = msgspec.msgpack.Decoder(Answer).decode
        self._syncing: asyncio.Future[None] | None = None
        for payload, place in self._request_log.read():
            self._add(self._decode_request(payload), place)
        self.follow()

    # -- requests -----

    def log(self, request: Request) -> None:
        """Append a request. DiskFull, WriteFailed: nothing was logged."""
        self._add(request, self._requests.write(request))

    async def durable(self) -> None:
        """Wait until all that was logged is durable; calls at the same time share one look at the disk."""
        if not self._sync:
            return
        while (running := self._syncing) is not None:  # it may have begun before our record
            await asyncio.shield(running)
            if self._syncing is not running and self._syncing is not None:
                continue
            break
        if self._syncing is None:
            self._syncing = asyncio.ensure_future(asyncio.to_thread(self._requests.sync))
            self._syncing.add_done_callback(lambda _: setattr(self, "_syncing", None))
        await asyncio.shield(self._syncing)

    def request(self, numbered: Numbered) -> Request:
        """The whole record of a request."""
        return self._decode_request(self._request_log.payload(numbered.place))

    def open_samples(self) -> Iterator[tuple[str, int]]:
        """Sampler and number of each request for samples without an answer."""
        for sampler in self.registry.samplers.values():
            yield from ((sampler.id, seq) for seq in sampler.requests if (sampler.id, seq) not in self._answers)

    def _add(self, request: Request, place: Place) -> None:
        self.registry.add(request, place)
        self.census.logged(request)
        if request.kind == "training" and (request.id, request.seq) not in self._answers:
            self.waiting_bytes[request.id] += len(request.body)

    # -- answers -----

    def follow(self) -> None:
        """Take over the answers that were logged since the last call, and wake those that wait for them."""
        for log in self._answer_logs:
            for payload, place in log.read():
                answer = self._decode_answer(payload)
                name = answer.id, answer.seq
                if name in self._answers:
                    continue
                self._answers[name] = Found(
                    answer.state, answer.proto, len(answer.payload), answer.weights, log, place)
                if answer.id in self.registry.samplers:
                    self.completed[answer.id, answer.seq // CLONE].append(name)
                elif (model := self.registry.models.get(answer.id)) and (numbered := model.requests.get(answer.seq)):
                    self.waiting_bytes[answer.id] -= min(numbered.place.size, self.waiting_bytes[answer.id])
                self.census.answered(answer)
                self._wake(name)
                self._wake((answer.id, -1 - answer.seq // CLONE))

    def answered(self, sampled: Answer) -> None:
        """Log the answer to a request for samples."""
        self._samples.write(sampled)
        self.follow()

    def found(self, name: tuple[str, int]) -> Found | None:
        return self._answers.get(name)

    async def answer(self, name: tuple[str, int], hold_s: float) -> Found | None:
        """The answer to a request of a model or sampler; None if there is none within the time."""
        if name not in self._answers:
            await self._news(name, hold_s)
        return self._answers.get(name)

    async def completions(self, sampler: str, clone: int, cursor: int, hold_s: float) -> list[tuple[str, int]]:
        """The requests of a sampler's clone that were answered beyond the first `cursor`, waiting for one."""
        completed = self.completed[sampler, clone]
        if len(completed) <= cursor:
            await self._news((sampler, -1 - clone), hold_s)
        return completed[cursor:]

    async def _news(self, name: tuple[str, int], hold_s: float) -> None:
        waiter = asyncio.Event()
        self._waiters[name].append(waiter)
        try:
            await asyncio.wait_for(waiter.wait(), hold_s)
        except asyncio.TimeoutError:
            pass
        finally:
            waiters = self._waiters[name]
            waiters.remove(waiter)
            if not waiters:
                del self._waiters[name]

    def _wake(self, name: tuple[str, int]) -> None:
        for waiter in self._waiters.get(name, ()):
            waiter.set()

    def close(self) -> None:
        self._requests.close()
        self._samples.close()
