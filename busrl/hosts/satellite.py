"""The satellite: takes the places of scheduler and learner for the ring of another host, and is a worker of the run.

It takes tasks from the run's keeper through its gateway (`busrl.hosts.gateway`), has them put into slots of the local
ring (`busrl.hosts.holdings`), and sends the answers that local engines commit. Talks to the local ring and bus, and
over TCP to the bus of the run. Knows nothing of engines, weights or groups.

- This process remembers nothing that its next life needs. The keeper here settles the death of an engine here.
- An outcome is sent again when home has answered a later request and not settled it; it counts once.
- A task waits until this host has the version that was published when it was claimed: an engine can then decide whether
  its own weights would make the sample too old.
- Many answers go in one message, and the same message asks for as many new tasks. Where this host has rewards, or
  agents whose episodes judge themselves, the rewards go with the answers.
- An episode goes home as the tensors of its slot, by name; home checks them.
- Samples that no client of a server here asks for any more go back to home, which may give them to others.
- A digest shows home the claims of this host. Only where home's differs twice running, and so not by messages on their
  way alone, all claims are named: that renews those which both have, and finds those which home or this host has lost.
"""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar, Protocol

import msgspec
from msgspec import UNSET

from busrl.bus import Endpoint, tcp_pair
from busrl.errors import BusNotReady, DiskFull, MessageTooLarge, SharedMemoryFull
from busrl.hosts import messages as g
from busrl.hosts.desk import HOST
from busrl.hosts.holdings import COLLECT_AT_ONCE, DROPS, TENSORS, AnswerReader, HeldTask, Holdings, ReadAnswer
from busrl.hosts.membership import SILENT, HostSource, ahead_of
from busrl.paths import RunPaths
from busrl.protocol import messages as m
from busrl.ring import Ring, seq_of
from busrl.roles.actor import Actor, Doorbell, ring_bells
from busrl.roles.answers import DTYPES
from busrl.states import HeaderWord, RunPhase, shown_uid
from busrl.system import files
from busrl.topology import Topology
from busrl.topology.rewards import RETURNED
from busrl.topology.schema import AGENT, SERVE

ANSWERS = ("GATEWAY_WELCOME", "GATEWAY_TASKS", "GATEWAY_ANSWER", "GATEWAY_SETTLED")
CLAIM_S, RESEND_S, PRESENT_S, LOOK_S = 0.25, 2.0, 1.0, 0.05
NAME_AFTER = 2  # digests that differ
ROWS_COUNT_S = 4.0  # for which a worker counts as present after it has sent the number of its rows
UNASKED_S = 5.0  # for which samples that no client of a server asks for stay here
PASS_S = 0.5  # for compressing at a time: heartbeats and claims, which renew leases, wait for its end
OLD_S = 30.0  # at the start of a satellite: the one before has sent older errors
MOST_ERRORS = 20  # lines of errors.jsonl that are sent at once


class Satellite(Actor):
    """The process: connects `Exchange` to the bus of the run, the local bus and the local ring."""

    role = "satellite"
    singleton = True
    subscribe: ClassVar[tuple[type[m.Message], ...]] = (
        m.TaskRequest, m.DataGenerated, m.RewardComputed, m.ProbeDrawn,
    )

    def setup(self) -> None:
        self.source = HostSource.read(self.paths.host_source)
        frontend, backend = tcp_pair(self.source.endpoint)
        bus, name = self.topology.bus, self.source.name
        self.home = Endpoint(
            name, frontend, backend, subscribe=[f"{kind}/{name}/" for kind in ANSWERS], hwm=bus.hwm,
            max_bytes=bus.max_message_bytes, keys=self.source.client, report=lambda text: self.warn("home", text),
        )
        tasks = Holdings(self.ring, self.fates, self.validate_fates)
        self.exchange = Exchange(
            self.topology, self.source, tasks, reader_for(self.topology, self.ring), self.home, self.warn,
            self._replaced,
        )
        self.errors, self._home_at = HostErrors(self.paths), 0.0  # when home last sent something
        self._next_presence = self._next_look = 0.0
        try:
            self.home.ready(self.topology.limits.ready_s / 2)
        except BusNotReady as problem:  # home may be away: the samples that are here go on
            self.warn("home", str(problem), kind="no home")

    def work(self) -> bool:
        if self.ring.header(HeaderWord.RUN_STATE) == RunPhase.FINISHING:
            self.stop("the run has reached its goal")
            return True
        for message in (messages := self.home.drain()):
            self._from_home(message)
        moved = self.exchange.dispatch() + self.exchange.collect()
        if (now := time.monotonic()) >= self._next_look:
            self._next_look = now + LOOK_S
            self.exchange.return_unasked()
            moved += self.exchange.report_dropped()
        self._show(now)
        self.exchange.send_due()
        ring_bells(self.bus, self.exchange.bell)
        return bool(messages or moved)

    def idle(self, timeout_s: float) -> None:
        if (message := self.home.take()) is not None:
            self._from_home(message)
        elif (message := self.bus.take()) is not None:
            self.receive(message)
        else:
            self.bus.wait(timeout_s, self.home.fileno())

    def handle(self, message: m.Message) -> None:
        if isinstance(message, m.TaskRequest):
            self.exchange.note_rows(message.worker_id, message.rows)
        elif isinstance(message, m.ProbeDrawn):
            name = f"{self.source.name}/{message.worker_id}"[: m.MAX_NAME]
            self.home.send(msgspec.structs.replace(message, worker_id=name))
        else:
            self.exchange.note_answer()

    def teardown(self) -> None:
        self.exchange.leave(self.stopping)
        self.home.send(m.Goodbye(reason=self.stopping))
        self.home.close()

    def _from_home(self, message: m.Message) -> None:
        self._home_at = time.monotonic()
        self.exchange.receive(message)

    def _show(self, now: float) -> None:
        """Send home a heartbeat, and the errors of this host; while home is away these wait."""
        if now < self._next_presence:
            return
        self._next_presence = now + PRESENT_S
        self.home.heartbeat(HOST, f"host, holds {len(self.exchange.tasks.by_name)}")
        if now - self._home_at < 2 * PRESENT_S:
            for error in self.errors.new():
                self.home.send(error)

    def _replaced(self) -> None:
        """End this start of the host. Two of one name would otherwise take each other's place for ever."""
        self.warn("satellite", f"another host has joined as {self.source.name}: this one ends", "error")
        replace(self.source, replaced=True).write(self.paths.host_source)
        self.ring.set_header(HeaderWord.RUN_STATE, RunPhase.STOPPING)
        self.stop("replaced")


class HostErrors:
    """The new lines of errors.jsonl on this host, which home files under the host's name."""

    def __init__(self, paths: RunPaths) -> None:
        self._lines, self._since = files.LineFollower(paths.errors), time.time() - OLD_S

    def new(self) -> Iterator[m.Error]:
        rows = [row for row in map(_row, self._lines.new()) if row.get("time", 0.0) >= self._since]
        for row in rows[-MOST_ERRORS:]:
            words = {name: str(row.get(name, "")) for name in ("severity", "process", "text", "trace")}
            yield m.Error(severity=words["severity"][: m.MAX_NAME], where=words["process"], text=words["text"],
                          traceback=words["trace"])


def _row(line: bytes) -> dict[str, Any]:
    with contextlib.suppress(msgspec.DecodeError, UnicodeDecodeError):
        return files.as_map(msgspec.json.decode(line))
    return {}


# -- tasks from home, outcomes to home -----


class HomeBus(Protocol):
    """The sending half of the bus of the run."""

    def send(self, message: m.Message) -> None: ...


class Warn(Protocol):
    """Reports an event that a person should see (`Actor.warn`)."""

    def __call__(
        self, where: str, text: str, severity: str = ..., kind: str = ..., uids: Sequence[int] = ...
    ) -> None: ...


def reader_for(topology: Topology, ring: Ring) -> AnswerReader:
    """The reader of this host's answers."""
    roles, plays = {process.role for process in topology.processes()}, topology.has_callers
    judges = "reward" in roles or (plays and topology.reward.kind == RETURNED)
    return AnswerReader(ring, plays, judges, topology.derived.routing is not None, topology.hosts.compress)


class Exchange:
    """Tasks from home into slots of this host, and their outcomes to home.

    `warn` reports problems, `replaced` is called when a later start of this host has joined. `bell` collects the
    doorbells for engines here.
    """

    def __init__(
        self, topology: Topology, source: HostSource, tasks: Holdings, reader: AnswerReader, home: HomeBus, warn: Warn,
        replaced: Callable[[], None], clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.topology, self.source, self.tasks, self.reader = topology, source, tasks, reader
        self.ring = tasks.ring
        self._home, self._warn, self._replaced, self._clock = home, warn, replaced, clock
        roles = {process.role for process in topology.processes()}
        self.on_demand = SERVE in roles and AGENT not in roles  # samples leave the queue as clients ask for them
        self.joined = False
        # Above those of an earlier life of this process, whose copies the keeper recognises by their smaller numbers:
        # the clock counts from the boot of the host, since which its ring is there.
        self.request = time.monotonic_ns() // 1000
        self.wanted = 0  # tasks that should be here and have not ended
        self.bell = Doorbell()
        self._answers_wait = True
        self._at_once = 1  # answers that are taken at a time where they are compressed
        self._rows: dict[str, tuple[int, float]] = {}  # by process that works on tasks: its rows, and when it sent them
        self._asked_at = clock()  # when clients last asked for all samples here
        self._next_claim = self._next_check = self._next_collect = -math.inf
        self._differing = NAME_AFTER  # digests in a row that were not home's
        self._digest_request = 0  # the number of the request with the newest digest, until it is answered
        self._answered_request = 0  # the newest request that home has answered with tasks

    def note_rows(self, worker_id: str, rows: int) -> None:
        """Note how many tasks a process of this host works on at a time."""
        if self.on_demand and rows > self._rows.get(worker_id, (0, 0.0))[0]:
            self._next_claim = -math.inf  # a client waits
        self._rows[worker_id] = (rows, self._clock())

    def note_answer(self) -> None:
        """Note that an answer, or its reward, was committed here."""
        self._answers_wait = True

    def leave(self, reason: str) -> None:
        """Send the answers that are ready once more, and hand all other tasks back. Compresses none: it has to end."""
        self._next_collect = -math.inf
        self.reader.end_compression()
        self.collect()
        self._send([task for task in self.tasks.by_name.values() if task.ended])
        self.ask(g.RemoteLeave(life=self.source.life, reason=reason))

    # -- messages from home -----

    def receive(self, message: m.Message) -> None:
        """Take in a message from home; one to an earlier life of this host's name changes nothing."""
        if getattr(message, "life", 0) not in (self.source.life, 0):
            return
        if isinstance(message, g.GatewayWelcome):
            self.joined, self._next_claim, self._differing = True, -math.inf, NAME_AFTER
        elif isinstance(message, g.GatewayTasks):
            self._answered_request = max(self._answered_request, message.req)
            if message.req == self._digest_request:
                self._digest_request, self._differing = 0, self._differing + 1 if message.differs else 0
            self.tasks.accept(message.tasks)
        elif isinstance(message, g.GatewaySettled):
            for name in (*message.done, *message.late):
                self.tasks.settle(name)
            for refusal in message.refused:
                self._refused(refusal.task, refusal.code, refusal.text)
        elif isinstance(message, g.GatewayAnswer):
            self._answered(message)

    def _answered(self, answer: g.GatewayAnswer) -> None:
        if answer.code == "unknown":
            self.joined = False  # a new keeper, or this host was silent for too long
        elif answer.code == "replaced":
            self._replaced()
        for task in answer.lost:
            self.tasks.settle(task)
        if answer.task and answer.code not in ("unknown", "refused"):
            self.tasks.settle(answer.task)
        elif answer.code in ("refused", "full", "too_large", "malformed", "version"):
            self._warn("home", f"{answer.about}: {answer.code}: {answer.text}", "error", kind=answer.code)

    def _refused(self, name: str, code: str, why: str) -> None:
        """Give up the sample of an answer that home refuses: it would refuse the next one too."""
        if code != "refused":
            self.tasks.settle(name)
        elif (task := self.tasks.by_name.get(name)) is not None:
            self._warn("home", f"sample {shown_uid(task.uid)} is refused: {why}", "error", uids=[task.uid])
            self._fail(task, "malformed", why)

    # -- the local ring -----

    def dispatch(self) -> int:
        """Give waiting tasks to the engines here; returns how many found a slot."""
        count = 0
        try:
            for task, slot, word in self.tasks.dispatch(self._report_left):
                self.bell.add(partial(m.NewTask, worker_id="", slot_id=slot, seq=seq_of(word), uid=task.uid))
                count += 1
        except (DiskFull, SharedMemoryFull) as problem:
            self._warn("satellite", f"tasks wait for room on this host: {problem}", "error", kind="no room")
        return count

    def collect(self) -> int:
        """Take the slots of answers that are ready, and send the answers together; returns how many slots."""
        now = self._clock()
        if not self._answers_wait and now < self._next_collect:
            return 0
        self._next_collect = now + LOOK_S
        most = self._at_once if self.reader.zips else COLLECT_AT_ONCE
        ready, count = self.tasks.answered(self.reader.judges, most)
        self._answers_wait = count == most
        self._send(ready, claim=True)
        if count:
            self._at_once = at_once_next(count, self._clock() - now)
        return count

    def return_unasked(self) -> None:
        """Let samples go back to home that no client of a server here asks for any more."""
        if not self.on_demand:
            return
        now, excess = self._clock(), self.tasks.unfinished - self.wanted
        if excess <= 0:
            self._asked_at = now
        elif now - self._asked_at > UNASKED_S:
            self.tasks.let_go(excess)

    def report_dropped(self) -> int:
        """Report home the samples that engines, rewards or the keeper of this host gave up; returns how many."""
        dropped = self.tasks.dropped()
        for task in dropped:
            self._report_left(task)
        return len(dropped)

    def _report_left(self, task: HeldTask) -> None:
        """Report a task that has left its slot without an answer."""
        if (fate := self.tasks.leave_slot(task)) is not None:
            self._fail(task, DROPS.get(fate, ""), fate.words)

    # -- messages to home -----

    def send_due(self) -> None:
        """Send claims, outcomes that were lost, and the names of all claims: each when it is due."""
        now = self._clock()
        if now >= self._next_check:
            self._next_check = now + PRESENT_S
            if self.joined:
                if self._differing >= NAME_AFTER:
                    self.name_all()
                self._send(self._unsettled(now))
        if now >= self._next_claim:
            self._next_claim = now + CLAIM_S
            self._claim(now)

    def name_all(self) -> None:
        """Name all claims to home. Its answers bring the tasks that are not here, and name those given to others."""
        life, names = self.source.life, self.tasks.names()
        self._digest_request = self._differing = 0
        self.ask(g.RemoteExtend(life=life, holding=names))
        self.ask(g.RemoteClaim(life=life, capacity=0, holding=names))

    def ask(self, message: g.Remote) -> None:
        """Send a request, with the next number."""
        self.request += 1
        message.req = self.request
        self._home.send(message)

    def _unsettled(self, now: float) -> list[HeldTask]:
        """Outcomes that were lost: home has answered a later request, and has not settled them."""
        ended = (task for task in self.tasks.by_name.values() if task.ended)
        return [
            task for task in ended if task.request < self._answered_request and now - task.sent_at > RESEND_S
        ]

    def _claim(self, now: float) -> None:
        """Ask for as many tasks as the engines here will want soon; the digest renews those that are held."""
        life = self.source.life
        if not self.joined:
            self._home.send(m.Hello(role=HOST, pid=os.getpid(), host=os.uname().nodename))
            self.ask(g.RemoteJoin(life=life, role=HOST, ring=self.source.ring_hex))
            return
        relays = (entry for entry in self.ring.processes() if entry.role == "relay" and entry.state == "ready")
        connected = any(entry.activity != SILENT for entry in relays)
        # Without a relay no process here can decide how old its weights are.
        rows = sum(count for count, at in self._rows.values() if now - at < ROWS_COUNT_S) if connected else 0
        self.wanted = rows + (0 if self.on_demand else ahead_of(self.topology, rows)) if rows else 0
        self._digest_request = self.request + 1
        self.ask(g.RemoteClaim(
            life=life, capacity=self.tasks.claimed + self._room(), digest=self.tasks.digest()
        ))

    def _room(self) -> int:
        """The number of tasks more that this host could use."""
        return max(0, min(self.wanted - self.tasks.unfinished, self.ring.n_slots - len(self.tasks.by_name)))

    def _fail(self, task: HeldTask, drop: str = "", text: str = "") -> None:
        """Give up the sample of a task, or hand the task back."""
        task.failed = g.RemoteFail(life=self.source.life, task=task.task, drop=drop, text=text)
        self._send([task])

    def _unreadable(self, task: HeldTask, problem: Exception) -> None:
        self._warn("satellite", f"sample {shown_uid(task.uid)} cannot be read: {problem}", "error", uids=[task.uid])
        self._fail(task)

    def _send(self, ended: list[HeldTask], claim: bool = False) -> None:
        """Send outcomes, answers in as few messages as their size allows. With `claim` the last message asks for as
        many new tasks."""
        now = self._clock()
        for task in ended:
            task.sent_at = now
            if task.failed is not None:
                self.ask(task.failed)
        answered = [task for task in ended if task.failed is None]
        packs = self._packed(answered) if answered else []
        for number, pack in enumerate(packs, 1):
            capacity = self.tasks.claimed - len(answered) + self._room() if number == len(packs) else 0
            self._send_answers(pack, capacity if claim else 0)
        for task in ended:
            task.request = self.request

    def _packed(self, answered: list[HeldTask]) -> list[list[ReadAnswer]]:
        """The answers that can be read, in packs of at most half of what a message may hold."""
        packs: list[list[ReadAnswer]] = []
        size, most = 0, self.topology.bus.max_message_bytes // 2
        for answer in self.reader.read(answered, self._unreadable):
            if not packs or size + answer.size > most:
                packs.append([])
                size = 0
            packs[-1].append(answer)
            size += answer.size
        return packs

    def _send_answers(self, pack: list[ReadAnswer], capacity: int) -> None:
        lengths, prompt_lengths = (
            [len(answer.tensors.get(name, b"")) // 4 for answer in pack] for name in ("tokens", "prompt_ids")
        )
        columns = [_joined([answer.tensors.get(name, b"") for answer in pack], name) for name in TENSORS]
        try:
            self.ask(g.RemoteBatch(
                life=self.source.life, tasks=[answer.task.task for answer in pack], lengths=lengths,
                prompt_lengths=prompt_lengths, finishes=[answer.finish for answer in pack],
                texts=[answer.text for answer in pack], capacity=capacity,
                rewards=[answer.reward for answer in pack] if self.reader.judges else [],
                parts=[answer.parts for answer in pack] if any(answer.parts for answer in pack) else [],
                tokens=columns[0], logprobs=columns[1], versions=columns[2], prompt_ids=columns[3],
                steps=[answer.step for answer in pack],
                episodes=[answer.episode for answer in pack] if self.reader.plays else [],
                routes=[answer.routes for answer in pack] if any(answer.routes for answer in pack) else UNSET,
            ))
        except MessageTooLarge as problem:  # it is alone: a pack of several is half as large as it may be
            task = pack[0].task
            self._warn("satellite", f"sample {shown_uid(task.uid)} cannot be sent: {problem}", "error", uids=[task.uid])
            self._fail(task, "malformed", "too large to send")


def at_once_next(count: int, took_s: float) -> int:
    """The number of answers that may be compressed in a pass of PASS_S, after a pass with so many that took so long; it
    grows slowly, as answers differ in length."""
    return max(1, min(COLLECT_AT_ONCE, 2 * count, int(count * PASS_S / max(took_s, 1e-6))))


def _joined(parts: list[bytes], name: str) -> g.Tensor:
    data = b"".join(parts)
    return g.Tensor(DTYPES[name].name, [len(data) // DTYPES[name].itemsize], data)
