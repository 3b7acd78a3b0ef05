"""The door's memory: logs what is asked before it is answered, and finds the answers.

Talks to the three logs of a service. Knows nothing of HTTP or bodies.

- A request is in the log, and durable where the run says so, before its client hears of it.
- An answer is in a log before a client can get it: a door that dies finds all of them again.
- A sampler's completions are listed in the order of the log, so a place in that list stays valid.
- An answer is forgotten some time after a client had it, and later where no client asked, and its request with it: what
  is left is that the number is past. The answer to a save stays: samplers find their weights by it.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from bisect import bisect_right
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator

import msgspec

from busrl.service.figures import Census
from busrl.service.folders import ServiceFolders
from busrl.service.registry import Numbered, Registry
from busrl.service.requests import Answer, LogReader, LogWriter, Place, Request

CLONE = 10**9  # numbers of a sampler's clone begin at its own multiple of this
KEEP_S, KEEP_FETCHED_S = 86_400.0, 600.0  # answers that no client had, and those that one had
DAY_S = 86_400
EXECUTED = ("training", "refused")  # kinds of requests that the tuner answers
Name = tuple[str, int]  # model or sampler, and number


class Found(msgspec.Struct, frozen=True):
    """An answer: its state and size, and where it stands in which log."""

    state: str
    proto: bool
    size: int
    weights: int
    log: LogReader
    place: Place

    def payload(self) -> bytes:
        """The answer itself; b"" if it is older than answers are kept."""
        record = self.log.payload(self.place)
        return msgspec.msgpack.decode(record, type=Answer).payload if record else b""


class UnderWay:
    """Requests for samples without an answer. `of`: how many samples each owner has under way; those that are set aside
    until their client is back count for nobody."""

    def __init__(self) -> None:
        self.of: Counter[str] = Counter()
        self.aside: set[Name] = set()
        self._open: dict[Name, tuple[str, int]] = {}  # owner, and number of samples

    def __contains__(self, name: Name) -> bool:
        return name in self._open

    def __iter__(self) -> Iterator[Name]:
        return iter(list(self._open))

    def add(self, name: Name, owner: str, samples: int) -> None:
        self._open[name] = owner, samples
        self.of[owner] += samples

    def remove(self, name: Name) -> None:
        self.bring_back(name)
        owner, samples = self._open.pop(name, ("", 0))
        self.of[owner] -= samples

    def set_aside(self, name: Name) -> None:
        owner, samples = self._open[name]
        self.of[owner] -= samples
        self.aside.add(name)

    def bring_back(self, name: Name) -> None:
        if name in self.aside:
            owner, samples = self._open[name]
            self.of[owner] += samples
            self.aside.remove(name)


class Spans:
    """Whole numbers, as the spans that they fill: a client counts, so there are few."""

    def __init__(self) -> None:
        self._begins: list[int] = []
        self._ends: list[int] = []  # of each span, behind its last number

    def __contains__(self, number: int) -> bool:
        at = bisect_right(self._begins, number) - 1
        return at >= 0 and number < self._ends[at]

    def __len__(self) -> int:
        return len(self._begins)

    def add(self, number: int) -> None:
        """Take a number that is not there."""
        at = bisect_right(self._begins, number)
        before, behind = at > 0 and self._ends[at - 1] == number, self._begins[at : at + 1] == [number + 1]
        if before and behind:
            self._ends[at - 1] = self._ends.pop(at)
            del self._begins[at]
        elif before:
            self._ends[at - 1] += 1
        elif behind:
            self._begins[at] -= 1
        else:
            self._begins.insert(at, number)
            self._ends.insert(at, number + 1)


class Completed:
    """The requests of a sampler's clone in the order in which they were answered; the first `gone` are left out."""

    def __init__(self) -> None:
        self._names: deque[Name] = deque()
        self._gone = 0

    @property
    def end(self) -> int:
        return self._gone + len(self._names)

    def add(self, name: Name) -> None:
        self._names.append(name)

    def since(self, cursor: int) -> list[Name]:
        return list(itertools.islice(self._names, max(0, cursor - self._gone), None))

    def drop_while(self, forgotten: Callable[[Name], bool]) -> None:
        while self._names and forgotten(self._names[0]):
            self._names.popleft()
            self._gone += 1


NONE_COMPLETED = Completed()


class Desk:
    """`ring` is called when a request was logged that the tuner is to execute."""

    def __init__(self, where: ServiceFolders, sync: bool, keep_s: float = KEEP_S,
                 ring: Callable[[], None] = lambda: None) -> None:
        self.registry, self.census = Registry(), Census(where)
        self._keep_s, self._ring = keep_s, ring
        self._requests, self._samples = LogWriter(where.requests), LogWriter(where.samples)
        self._request_log, self._sync = LogReader(where.requests), sync
        self._answer_logs = [LogReader(where.answers), LogReader(where.samples)]
        self._answers: dict[Name, Found] = {}
        self._kept: deque[tuple[float, Name]] = deque()  # answers by the time at which they were taken over
        self._fetched: dict[Name, float] = {}  # when a client first had an answer
        self._forgotten: dict[str, int] = {}  # the highest number of a model whose answer was forgotten
        self._waiters: defaultdict[Name, list[asyncio.Event]] = defaultdict(list)
        self._past: defaultdict[str, Spans] = defaultdict(Spans)  # by sampler: numbers whose answers were forgotten
        self._completed: dict[Name, Completed] = {}  # by sampler and clone that has an answer
        self.waiting: Counter[str] = Counter()  # requests without an answer, by model
        self.waiting_bytes: Counter[str] = Counter()  # of their records
        self.under_way = UnderWay()
        self._tokens: Counter[tuple[str, int]] = Counter()  # by owner, and day since 1970
        self._decode_request = msgspec.msgpack.Decoder(Request).decode
        self._decode_answer = msgspec.msgpack.Decoder(Answer).decode
        self._syncing: asyncio.Future[None] | None = None
        self._logged = self._durable = 0  # records of this process
        for payload, place in self._request_log.read():
            self._add(self._decode_request(payload), place)
        self.follow()

    # -- requests -----

    def log(self, request: Request) -> None:
        """Append a request. DiskFull, WriteFailed: nothing was logged."""
        request.at = round(time.time(), 3)
        self._add(request, self._requests.write(request))
        self._logged += 1
        if request.kind in EXECUTED:
            self._ring()
        elif request.kind == "session":
            self.census.heard(request.id)

    async def durable(self) -> None:
        """Wait until all that was logged is durable: for a look at the disk that began after it, and that all who wait
        then share."""
        logged = self._logged
        while self._sync and self._durable < logged:
            if self._syncing is None:
                self._syncing = asyncio.ensure_future(self._sync_once())
            await asyncio.shield(self._syncing)

    async def _sync_once(self) -> None:
        logged = self._logged
        try:
            await asyncio.to_thread(self._requests.sync)
            self._durable = logged
        finally:
            self._syncing = None

    def request(self, numbered: Numbered) -> Request:
        """The whole record of a request."""
        return self._decode_request(self._request_log.payload(numbered.place))

    def tokens_today(self, owner: str) -> int:
        """Tokens that an owner has sent and drawn since midnight UTC."""
        return self._tokens[owner, int(time.time() // DAY_S)]

    def goes_on(self, session: str, within_s: float) -> bool:
        """Tell whether a session has not ended, and was heard of within that time: of this process's, and of that of
        the one before it."""
        return not self.registry.sessions[session].ended and self.census.silent_s(session, within_s) < within_s

    def _add(self, request: Request, place: Place) -> None:
        self.registry.add(request, place)
        self.census.logged(request)
        name = request.id, request.seq
        if request.kind in EXECUTED and name not in self._answers:
            self._count_waiting(request.id, 1, place.size)
        elif request.kind == "sample":
            self.under_way.add(name, self._owner(request.id), request.about.get("samples", 1))
        if request.tokens:
            self._tokens[self._owner(request.id), int(request.at // DAY_S)] += request.tokens

    def _count_waiting(self, model: str, requests: int, size: int) -> None:
        self.waiting[model] += requests
        self.waiting_bytes[model] += size

    def _owner(self, id: str) -> str:
        return (self.registry.models.get(id) or self.registry.samplers[id]).owner

    # -- answers -----

    def follow(self) -> None:
        """Take over the answers that were logged since the last call, and wake those that wait for them."""
        for log in self._answer_logs:
            for payload, place in log.read():
                answer = self._decode_answer(payload)
                if (answer.id, answer.seq) not in self._answers:
                    self._take(answer, Found(
                        answer.state, answer.proto, len(answer.payload), answer.weights, log, place))

    def _take(self, answer: Answer, found: Found) -> None:
        name = answer.id, answer.seq
        self._answers[name] = found
        self._kept.append((time.monotonic(), name))
        if (sampler := self.registry.samplers.get(answer.id)) is not None:
            self._completed.setdefault((answer.id, answer.seq // CLONE), Completed()).add(name)
            self.under_way.remove(name)
            if answer.tokens:
                self._tokens[sampler.owner, int(answer.at // DAY_S)] += answer.tokens
        elif (model := self.registry.models.get(answer.id)) and (numbered := model.requests.get(answer.seq)):
            self._count_waiting(answer.id, -1, -numbered.place.size)
        self.census.answered(answer)
        self._wake(name)
        self._wake((answer.id, -1 - answer.seq // CLONE))

    def answered(self, sampled: Answer) -> None:
        """Log the answer to a request for samples."""
        sampled.at = round(time.time(), 3)
        self._samples.write(sampled)
        self.follow()

    def fetched(self, name: Name) -> None:
        """Note that a client had the answer: it is kept a while, since the client may not have read it to its end."""
        self._fetched.setdefault(name, time.monotonic())

    def expire(self, now: float) -> None:
        """Forget the answers whose time is over at `now` (monotonic)."""
        while self._fetched and next(iter(self._fetched.values())) <= now - KEEP_FETCHED_S:
            name = next(iter(self._fetched))
            del self._fetched[name]
            self._forget(name)
        while self._kept and self._kept[0][0] <= now - self._keep_s:
            _, name = self._kept.popleft()
            if name not in self._fetched:
                self._forget(name)

    def _forget(self, name: Name) -> None:
        found = self._answers.get(name)
        if found is None or (found.weights and name[0] in self.registry.models):
            return
        del self._answers[name]
        if (model := self.registry.models.get(name[0])) is not None:
            self._forgotten[name[0]] = max(self._forgotten.get(name[0], 0), name[1])
            model.requests.pop(name[1], None)
        elif (sampler := self.registry.samplers.get(name[0])) is not None and name[1] in sampler.requests:
            del sampler.requests[name[1]]
            self._past[name[0]].add(name[1])
            self._completed[name[0], name[1] // CLONE].drop_while(lambda other: other not in self._answers)

    def is_answered(self, name: Name) -> bool:
        """Tell whether a model's request was ever answered, which happens in the order of their numbers."""
        return name in self._answers or name[1] <= self._forgotten.get(name[0], -1)

    def is_forgotten(self, name: Name) -> bool:
        """Tell whether the answer to a request of a model or sampler was there, and is not any more."""
        if name in self._answers:
            return False
        if name[0] in self.registry.models:
            return name[1] <= self._forgotten.get(name[0], -1)
        return name[1] in self._past[name[0]] if name[0] in self._past else False

    def found(self, name: Name) -> Found | None:
        return self._answers.get(name)

    async def answer(self, name: Name, hold_s: float) -> Found | None:
        """The answer to a request of a model or sampler; None if there is none within the time."""
        if name not in self._answers:
            await self._news(name, hold_s)
        return self._answers.get(name)

    async def completions(self, sampler: str, clone: int, cursor: int, hold_s: float) -> tuple[list[Name], int]:
        """The requests of a sampler's clone that were answered beyond the first `cursor`, waiting for one; and how many
        were answered in all."""
        if (completed := self._completed.get((sampler, clone))) is None or completed.end <= cursor:
            await self._news((sampler, -1 - clone), hold_s)
        completed = self._completed.get((sampler, clone), NONE_COMPLETED)
        return completed.since(cursor), max(cursor, completed.end)

    async def _news(self, name: Name, hold_s: float) -> None:
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

    def _wake(self, name: Name) -> None:
        for waiter in self._waiters.get(name, ()):
            waiter.set()

    def close(self) -> None:
        self._requests.close()
        self._samples.close()
