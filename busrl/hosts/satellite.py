"""The satellite: on another host it is to the local ring what scheduler and learner are at home, and to home a worker.

It takes tasks from the run's keeper through its gateway (`busrl.hosts.gateway`), has them put into slots of the local
ring (`busrl.hosts.holdings`), and sends the answers that local engines commit. Talks to the local ring and bus, and
over TCP to the bus of the run. Knows nothing of engines, weights or groups.

- This process remembers nothing that its next life needs, and an engine's death is settled on this host.
- An answer is sent again when home has answered what was sent after it, and counts once.
- A task waits until this host knows of the version that was published when it was claimed: an engine then knows whether
  its own weights would make the sample too old.
- Many answers go in one message, and the same message asks for as many new tasks. Where this host has rewards, or
  agents whose episodes judge themselves, its answers go with theirs.
- An episode goes home as the tensors of its slot, by name; home checks them.
- What clients of a server here no longer ask for goes back to home, which may give it to others.
- A digest says to home what is held here. Only where its own differs twice running, and so not by messages on their
  way alone, all claims are named: that renews what both have, and finds what home or this host has lost.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

import msgspec

from busrl.bus import Endpoint, tcp_pair
from busrl.errors import BusNotReady, DiskFull, MessageTooLarge, SharedMemoryFull
from busrl.hosts import messages as g
from busrl.hosts.desk import HOST
from busrl.hosts.holdings import COLLECT_AT_ONCE, DROPS, TENSORS, AnswerReader, HeldTask, Holdings, ReadAnswer
from busrl.hosts.invitation import SILENT, HostSource, ahead_of
from busrl.paths import RunPaths
from busrl.protocol import messages as m
from busrl.ring import seq_of
from busrl.roles.actor import Actor, Doorbell, ring_bells
from busrl.roles.answers import DTYPES
from busrl.states import HeaderWord, RunPhase, shown_uid
from busrl.system import files
from busrl.topology.schema import AGENT, SERVE

log = logging.getLogger("busrl")
ANSWERS = ("GATEWAY_WELCOME", "GATEWAY_TASKS", "GATEWAY_ANSWER", "GATEWAY_SETTLED")
CLAIM_S, RESEND_S, PRESENT_S, LOOK_S = 0.25, 2.0, 1.0, 0.05
NAME_AFTER = 2  # digests that differ
ROWS_COUNT_S = 4.0  # for which whoever works on tasks is taken to be there after it said how many rows it has
UNASKED_S = 5.0  # for which samples that no client of a server asks for stay here
OLD_S = 30.0  # at the start of a satellite: the one before has sent what is older
MOST_ERRORS = 20  # lines of errors.jsonl that are sent at once


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


class Satellite(Actor):
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
        self.begin()
        try:
            self.home.ready(self.topology.limits.ready_s / 2)
        except BusNotReady as problem:  # home may be away: what is here goes on
            self.warn("home", str(problem), kind="no home")

    def begin(self) -> None:
        """Make what is remembered between passes; the tasks that are here are those of the ring."""
        # Above those of an earlier life of this process, whose copies the keeper knows by their smaller numbers.
        self.joined, self.request = False, time.monotonic_ns() // 1000  # of this boot, as its ring
        roles = {process.role for process in self.topology.processes()}
        plays = self.topology.has_callers
        judges = "reward" in roles or (plays and self.topology.reward.kind == AGENT)
        self.tasks = Holdings(self.ring, self.fates, self.validate_fates)
        self.reader = AnswerReader(self.ring, plays, judges)
        self.on_demand = SERVE in roles and AGENT not in roles  # samples leave the queue as clients ask for them
        self._asked_at = time.monotonic()  # when there was last no sample here that nobody asks for
        self.rows: dict[str, tuple[int, float]] = {}  # by process that works on tasks: how many, and when it said so
        self.wanted = 0  # tasks that are to be here and not ended
        self.bell, self.rung = Doorbell(), True
        self.errors, self._home_at = HostErrors(self.paths), 0.0  # when home last sent something
        self._next_claim = self._next_presence = self._next_look = self._next_collect = 0.0
        self.differing = NAME_AFTER  # digests in a row that were not home's
        self.digested = 0  # the number of the request with the newest, until it is answered
        self.replied = 0  # the newest request that home has answered with tasks

    def work(self) -> bool:
        if self.ring.header(HeaderWord.RUN_STATE) == RunPhase.FINISHING:
            self.stop("the run has reached its goal")
            return True
        for message in (messages := self.home.drain()):
            self._from_home(message)
        moved = self._dispatch() + self._collect()
        if (now := time.monotonic()) >= self._next_look:
            self._next_look = now + LOOK_S
            if self.on_demand:
                self._let_go_of_unasked(now)
            moved += self._report_dropped()
        self._send_due()
        ring_bells(self.bus, self.bell)
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
            if self.on_demand and message.rows > self.rows.get(message.worker_id, (0, 0.0))[0]:
                self._next_claim = 0.0  # a client waits
            self.rows[message.worker_id] = (message.rows, time.monotonic())
        elif isinstance(message, m.ProbeDrawn):
            name = f"{self.source.name}/{message.worker_id}"[: m.MAX_NAME]
            self.home.send(msgspec.structs.replace(message, worker_id=name))
        else:
            self.rung = True

    def teardown(self) -> None:
        """Answers that are ready are sent once more; the rest goes back to the run at once."""
        self._next_collect = 0.0
        self._collect()
        self._send([task for task in self.tasks.held.values() if task.ended])
        self._ask(g.RemoteLeave(life=self.source.life, reason=self.stopping))
        self.home.send(m.Goodbye(reason=self.stopping))
        self.home.close()

    # -- messages from home -----

    def _from_home(self, message: m.Message) -> None:
        self._home_at = time.monotonic()
        if getattr(message, "life", 0) not in (self.source.life, 0):
            return  # to an earlier life of this name
        if isinstance(message, g.GatewayWelcome):
            self.joined, self._next_claim, self.differing = True, 0.0, NAME_AFTER
        elif isinstance(message, g.GatewayTasks):
            self.replied = max(self.replied, message.req)
            if message.req == self.digested:
                self.digested, self.differing = 0, self.differing + 1 if message.differs else 0
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
            self.warn("home", f"{answer.about}: {answer.code}: {answer.text}", "error", kind=answer.code)

    def _refused(self, name: str, code: str, why: str) -> None:
        """Home cannot use this answer, and would not use the next one: the sample is given up."""
        if code != "refused":
            self.tasks.settle(name)
        elif (task := self.tasks.held.get(name)) is not None:
            self.warn("home", f"sample {shown_uid(task.uid)} is refused: {why}", "error", uids=[task.uid])
            self._fail(task, "malformed", why)

    def _replaced(self) -> None:
        """Two hosts of one name would take each other's place for ever: the older one ends."""
        self.warn("satellite", f"another host has joined as {self.source.name}: this one ends", "error")
        replace(self.source, replaced=True).write(self.paths.host_source)
        self.ring.set_header(HeaderWord.RUN_STATE, RunPhase.STOPPING)
        self.stop("replaced")

    # -- the local ring -----

    def _dispatch(self) -> int:
        """Give tasks that wait to the engines here; how many found a slot."""
        count = 0
        try:
            for task, slot, word in self.tasks.dispatch(self._left_slot):
                self.bell.add(partial(m.NewTask, worker_id="", slot_id=slot, seq=seq_of(word), uid=task.uid))
                count += 1
        except (DiskFull, SharedMemoryFull) as problem:
            self.warn("satellite", f"tasks wait for room on this host: {problem}", "error", kind="no room")
        return count

    def _collect(self) -> int:
        """Own the answers that are ready, and send them together."""
        now = time.monotonic()
        if not self.rung and now < self._next_collect:
            return 0
        self._next_collect = now + LOOK_S
        ready, taken = self.tasks.answered(self.reader.judges)
        self.rung = taken == COLLECT_AT_ONCE
        self._send(ready, claim=True)
        return taken

    def _let_go_of_unasked(self, now: float) -> None:
        """Samples above those that clients here want leave the queue, and so go back to home."""
        excess = self.tasks.unfinished - self.wanted
        if excess <= 0:
            self._asked_at = now
        elif now - self._asked_at > UNASKED_S:
            self.tasks.let_go(excess)

    def _report_dropped(self) -> int:
        """Send home what became of samples that engines, rewards or the keeper of this host gave up."""
        dropped = self.tasks.dropped()
        for task in dropped:
            self._left_slot(task)
        return len(dropped)

    def _left_slot(self, task: HeldTask) -> None:
        """Report a task that has left its slot without an answer."""
        if (fate := self.tasks.leave_slot(task)) is not None:
            self._fail(task, DROPS.get(fate, ""), fate.words)

    # -- messages to home -----

    def _send_due(self) -> None:
        """Presence, claims, outcomes that were lost, errors: each at its time."""
        now = time.monotonic()
        if now >= self._next_presence:
            self._next_presence = now + PRESENT_S
            self.home.heartbeat(HOST, f"host, holds {len(self.tasks.held)}")
            if self.joined:
                if self.differing >= NAME_AFTER:
                    self._name_all()
                self._send(self._unsettled(now))
            if now - self._home_at < 2 * PRESENT_S:  # while home is away its errors wait
                for error in self.errors.new():
                    self.home.send(error)
        if now >= self._next_claim:
            self._next_claim = now + CLAIM_S
            self._claim(now)

    def _unsettled(self, now: float) -> list[HeldTask]:
        """Outcomes that home has not settled though it has answered what was sent after them: they were lost."""
        ended = (task for task in self.tasks.held.values() if task.ended)
        return [task for task in ended if task.request < self.replied and now - task.sent_at > RESEND_S]

    def _name_all(self) -> None:
        """The answers say what home has given to others, and bring what is not here."""
        life, names = self.source.life, self.tasks.names()
        self.digested = self.differing = 0
        self._ask(g.RemoteExtend(life=life, holding=names))
        self._ask(g.RemoteClaim(life=life, capacity=0, holding=names))

    def _claim(self, now: float) -> None:
        """Ask for as many tasks as the engines here will want soon; the digest of those that are held renews them."""
        life = self.source.life
        if not self.joined:
            self.home.send(m.Hello(role=HOST, pid=os.getpid(), host=os.uname().nodename))
            self._ask(g.RemoteJoin(life=life, role=HOST, ring=self.source.ring_hex))
            return
        relays = (entry for entry in self.ring.processes() if entry.role == "relay" and entry.state == "ready")
        connected = any(entry.activity != SILENT for entry in relays)
        # Without a relay nobody here knows how old its weights are.
        rows = sum(count for count, at in self.rows.values() if now - at < ROWS_COUNT_S) if connected else 0
        self.wanted = rows + (0 if self.on_demand else ahead_of(self.topology, rows)) if rows else 0
        self.digested = self.request + 1
        self._ask(g.RemoteClaim(
            life=life, capacity=self.tasks.claimed + self._room(), digest=self.tasks.digest()
        ))

    def _room(self) -> int:
        """Tasks more that this host could use."""
        return max(0, min(self.wanted - self.tasks.unfinished, self.ring.n_slots - len(self.tasks.held)))

    def _fail(self, task: HeldTask, drop: str = "", text: str = "") -> None:
        """Give it up, or hand it back."""
        task.failed = g.RemoteFail(life=self.source.life, task=task.task, drop=drop, text=text)
        self._send([task])

    def _unreadable(self, task: HeldTask, problem: Exception) -> None:
        self.warn("satellite", f"sample {shown_uid(task.uid)} cannot be read: {problem}", "error", uids=[task.uid])
        self._fail(task)

    def _send(self, ended: list[HeldTask], claim: bool = False) -> None:
        """Outcomes, answers in as few messages as their size allows; the last one may `claim` in the place of each."""
        now = time.monotonic()
        for task in ended:
            task.sent_at = now
            if task.failed is not None:
                self._ask(task.failed)
        packs: list[list[ReadAnswer]] = [[]]
        size, most = 0, self.topology.bus.max_message_bytes // 2
        answered = [task for task in ended if task.failed is None]
        for answer in self.reader.read(answered, self._unreadable) if answered else ():
            if packs[-1] and size + answer.size > most:
                packs.append([])
                size = 0
            packs[-1].append(answer)
            size += answer.size
        for number, pack in enumerate(packs, 1):
            if pack:
                capacity = self.tasks.claimed - len(answered) + self._room() if number == len(packs) else 0
                self._send_answers(pack, capacity if claim else 0)
        for task in ended:
            task.request = self.request

    def _send_answers(self, pack: list[ReadAnswer], capacity: int) -> None:
        lengths, prompt_lengths = (
            [len(answer.tensors.get(name, b"")) // 4 for answer in pack] for name in ("tokens", "prompt_ids")
        )
        columns = [_joined([answer.tensors.get(name, b"") for answer in pack], name) for name in TENSORS]
        try:
            self._ask(g.RemoteBatch(
                life=self.source.life, tasks=[answer.held.task for answer in pack], lengths=lengths,
                prompt_lengths=prompt_lengths, finishes=[answer.finish for answer in pack],
                texts=[answer.text for answer in pack], capacity=capacity,
                rewards=[answer.reward for answer in pack] if self.reader.judges else [],
                parts=[answer.parts for answer in pack] if any(answer.parts for answer in pack) else [],
                tokens=columns[0], logprobs=columns[1], versions=columns[2], prompt_ids=columns[3],
                steps=[answer.step for answer in pack],
                episodes=[answer.episode for answer in pack] if self.reader.plays else [],
            ))
        except MessageTooLarge as problem:  # it is alone: a pack of several is half as large as it may be
            task = pack[0].held
            self.warn("satellite", f"sample {shown_uid(task.uid)} cannot be sent: {problem}", "error", uids=[task.uid])
            self._fail(task, "malformed", "too large to send")

    def _ask(self, message: g.Remote) -> None:
        self.request += 1
        message.req = self.request
        self.home.send(message)


def _joined(parts: list[bytes], name: str) -> g.Tensor:
    data = b"".join(parts)
    return g.Tensor(DTYPES[name].name, [len(data) // DTYPES[name].itemsize], data)
