"""The satellite: on another host it is to the local ring what scheduler and learner are at home, and to home a worker.

It takes tasks from the run's keeper through its gateway (`busrl.hosts.gateway`), puts each into a slot of the local
ring, and sends the answers that local engines commit. Talks to the local ring and bus, and over TCP to the bus of the
run. Knows nothing of engines, weights or groups.

- A local slot is the record of a claim: its line holds the task's slot, seq and uid at home. So this process remembers
  nothing that its next life needs, and an engine's death is settled on this host.
- An answer stays in its slot, TRAINING, until home has said what became of it. It is sent again when home has answered
  what was sent after it, and counts once.
- A task waits until this host knows of the version that was published when it was claimed: an engine then knows whether
  its own weights would make the sample too old.
- Many answers go in one message, and the same message asks for as many new tasks. Where this host has rewards, or
  agents whose episodes judge themselves, its answers go with theirs.
- An episode goes home as the tensors of its slot, by name; home checks them.
- What clients of a server here no longer ask for goes back to home, which may give it to others.
- Home hears what is held here as a digest. Only where its own differs twice running, and so not by messages on their
  way alone, all claims are named: that renews what both have, and finds what home or this host has lost.
- What home has given to others is dropped here: at once if no engine has it, else when the engine lets go.
- Local fates say only that a sample is here; home's alone count.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import msgspec
import numpy as np

from busrl.bus import Endpoint, tcp_pair
from busrl.errors import BusNotReady, DiskFull, MessageTooLarge, SharedMemoryFull
from busrl.hosts import messages as g
from busrl.hosts.desk import FATES, HOST
from busrl.hosts.episodes import tensors_of
from busrl.hosts.invitation import SILENT, HostSource, ahead_of
from busrl.paths import RunPaths
from busrl.protocol import messages as m
from busrl.ring import UID_NONE, Fates, State, segments_of, seq_of
from busrl.roles.actor import Actor, Doorbell
from busrl.roles.answers import DTYPES, UNREADABLE, read_copies, read_generated, read_parts, text_of
from busrl.states import VALIDATE_BIT, Fate, HeaderWord, RunPhase, shown_uid
from busrl.system import files
from busrl.topology.schema import AGENT, SERVE

log = logging.getLogger("busrl")
ANSWERS = ("GATEWAY_WELCOME", "GATEWAY_TASKS", "GATEWAY_ANSWER", "GATEWAY_SETTLED")
CLAIM_S, RESEND_S, PRESENT_S, LOOK_S = 0.25, 2.0, 1.0, 0.05
NAME_AFTER = 2  # digests that differ
TENSORS = ("tokens", "logprobs", "versions", "prompt_ids")
BESIDE, OF_TENSOR = 512, 64  # bytes of an answer in a message beside its tensors and its text; of an episode's tensor
ROWS_COUNT_S = 4.0  # for which an engine, or who plays episodes, is taken to be there after it told of its rows
UNASKED_S = 5.0  # for which samples that no client of a server asks for stay here
COLLECT_AT_ONCE = 256
OLD_S = 30.0  # at the start of a satellite: the one before has sent what is older
MOST_ERRORS = 20  # lines of errors.jsonl that are sent at once
REMEMBERED = 8192
DROPS = {fate: word for word, fate in FATES[HOST].items()}


@dataclass
class Held:
    """A task of this host. States: waiting (slot -1, no room in the ring yet) -> in a slot -> answered -> gone."""

    task: str
    uid: int
    slot: int = -1
    word: int = 0  # the word that owns the slot, once its answer is ready
    failed: g.RemoteFail | None = None
    sent_at: float = 0.0
    request: int = 0  # the number of the newest request when its outcome was sent
    lost: bool = False  # home has given it to others
    digest: int = 0

    def __post_init__(self) -> None:
        self.digest = g.digest_of(self.task)

    @property
    def ended(self) -> bool:
        """Whether its outcome is on the way home."""
        return bool(self.word) or self.failed is not None


@dataclass
class Answer:
    """What is read of a slot for home; the slot keeps it until home has it."""

    one: Held
    text: str
    finish: int
    reward: float
    parts: dict[str, float]
    tensors: dict[str, bytes]
    step: int  # of the oldest weights that drew it
    episode: dict[str, g.Tensor]  # instead of the tensors

    @property
    def size(self) -> int:
        own = sum(OF_TENSOR + len(one.data) for one in self.episode.values())
        return BESIDE + 4 * len(self.text) + sum(map(len, self.tensors.values())) + own


class HostErrors:
    """The new lines of errors.jsonl on this host, as home can file them under the host's name."""

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
        own, name = self.topology.bus, self.source.name
        self.home = Endpoint(
            name, frontend, backend, subscribe=[f"{kind}/{name}/" for kind in ANSWERS], hwm=own.hwm,
            max_bytes=own.max_message_bytes, keys=self.source.client, report=lambda text: self.warn("home", text),
        )
        self.begin()
        try:
            self.home.ready(self.topology.limits.ready_s / 2)
        except BusNotReady as problem:  # home may be away: what is here goes on
            self.warn("home", str(problem), kind="no home")

    def begin(self) -> None:
        """What is remembered between passes; the tasks that are here are those of the ring."""
        # Above those of an earlier life of this process, whose copies the keeper tells by their smaller numbers.
        self.joined, self.request = False, time.monotonic_ns() // 1000  # of this boot, as its ring
        here = {one.role for one in self.topology.processes()}
        self.plays = self.topology.has_callers
        self.judges = "reward" in here or (self.plays and self.topology.reward.kind == AGENT)
        self.on_demand = SERVE in here and AGENT not in here  # samples leave the queue as clients ask for them
        self._asked_at = time.monotonic()  # when there was last no sample here that nobody asks for
        self.rows: dict[str, tuple[int, float]] = {}  # of who works on tasks: how many, and when they said so
        self.wanted = 0  # tasks that are to be here and not ended
        self.waiting: dict[str, g.Task] = {}
        self.over: dict[str, None] = {}  # claims that have ended, oldest first: a late copy of one is no task
        self.bell, self.rung = Doorbell(), True
        self.errors, self._heard_at = HostErrors(self.paths), 0.0
        self._next_claim = self._next_presence = self._next_look = self._next_collect = 0.0
        self.differing = NAME_AFTER  # digests in a row that were not home's
        self.digested = 0  # the number of the request with the newest, until it is answered
        self.replied = 0  # the newest request that home has answered with tasks
        self.held: dict[str, Held] = {}
        self.lost: dict[str, Held] = {}  # of these, those that home has given to others
        self.uids = np.full(self.ring.n_slots, UID_NONE, np.uint64)  # of each slot with a task that has not ended
        self._adopt()

    def _adopt(self) -> None:
        """What the ring says is here: tasks of an earlier life of this process."""
        lines = self.ring.lines()
        for slot in (lines["state"] != State.FREE).nonzero()[0].tolist():
            one = Held(_task_of(lines[slot]), int(lines["uid"][slot]), slot)
            self.held[one.task] = one
            self.uids[slot] = one.uid

    def work(self) -> bool:
        if self.ring.header(HeaderWord.RUN_STATE) == RunPhase.FINISHING:
            self.stop("the run has reached its goal")
            return True
        for message in (heard := self.home.drain()):
            self._heard(message)
        did = self._dispatch() + self._collect()
        if (now := time.monotonic()) >= self._next_look:
            self._next_look = now + LOOK_S
            if self.on_demand:
                self._let_go_of_unasked(now)
            did += self._report_dropped()
        self._tell()
        self.ring_bells(self.bell)
        return bool(heard or did)

    def idle(self, timeout_s: float) -> None:
        if (message := self.home.take()) is not None:
            self._heard(message)
        elif (message := self.bus.take()) is not None:
            self._receive(message)
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
        self._send([one for one in self.held.values() if one.ended])
        self._ask(g.RemoteLeave(life=self.source.life, reason=self.stopping))
        self.home.send(m.Goodbye(reason=self.stopping))
        self.home.close()

    # -- what home says -----

    def _heard(self, message: m.Message) -> None:
        self._heard_at = time.monotonic()
        if getattr(message, "life", 0) not in (self.source.life, 0):
            return  # to an earlier life of this name
        if isinstance(message, g.GatewayWelcome):
            self.joined, self._next_claim, self.differing = True, 0.0, NAME_AFTER
        elif isinstance(message, g.GatewayTasks):
            self.replied = max(self.replied, message.req)
            if message.req == self.digested:
                self.digested, self.differing = 0, self.differing + 1 if message.differs else 0
            for task in message.tasks:
                if task.task not in self.held and task.task not in self.over:
                    self.held[task.task] = Held(task.task, task.uid)
                    self.waiting[task.task] = task
        elif isinstance(message, g.GatewaySettled):
            for name in (*message.done, *message.late):
                self._settle(name)
            for one in message.refused:
                self._refused(one.task, one.code, one.text)
        elif isinstance(message, g.GatewayAnswer):
            self._answered(message)

    def _answered(self, answer: g.GatewayAnswer) -> None:
        if answer.code == "unknown":
            self.joined = False  # a new keeper, or this host was silent for too long
        elif answer.code == "replaced":
            self._replaced()
        for task in answer.lost:
            self._settle(task)
        if answer.task and answer.code not in ("unknown", "refused"):
            self._settle(answer.task)
        elif answer.code in ("refused", "full", "too_large", "malformed", "version"):
            self.warn("home", f"{answer.about}: {answer.code}: {answer.text}", "error", kind=answer.code)

    def _refused(self, task: str, code: str, why: str) -> None:
        """Home cannot use this answer, and would not use the next one: the sample is given up."""
        if code != "refused":
            self._settle(task)
        elif (one := self.held.get(task)) is not None:
            self.warn("home", f"sample {shown_uid(one.uid)} is refused: {why}", "error", uids=[one.uid])
            self._fail(one, "malformed", why)

    def _replaced(self) -> None:
        """Two hosts of one name would take each other's place for ever: the older one ends."""
        self.warn("satellite", f"another host has joined as {self.source.name}: this one ends", "error")
        replace(self.source, replaced=True).write(self.paths.host_source)
        self.ring.set_header(HeaderWord.RUN_STATE, RunPhase.STOPPING)
        self.stop("replaced")

    def _settle(self, task: str) -> None:
        """Home needs nothing more of it: it is done, or somebody else's now."""
        one = self.held.get(task)
        if one is None:
            return
        if one.word:  # an answer that home has, or will not take any more
            self.ring.finish(one.slot, one.word, Fate.TRAINED)
            self._forget(one)
            return
        one.lost, self.lost[task] = True, one
        line = None if one.slot < 0 else self.ring.line(one.slot)
        if line is None or line["state"] == State.FREE or int(line["uid"]) != one.uid:
            self._forget(one)
        elif line["state"] == State.QUEUED:
            self.ring.drop(one.slot, int(line["word"]), Fate.OLD)  # unless an engine takes it this moment

    def _forget(self, one: Held) -> None:
        for tasks in (self.held, self.waiting, self.lost):
            tasks.pop(one.task, None)
        if one.slot >= 0 and self.uids[one.slot] == one.uid:
            self.uids[one.slot] = UID_NONE
        self.over[one.task] = None
        if len(self.over) > REMEMBERED:
            del self.over[next(iter(self.over))]

    # -- the local ring -----

    def _dispatch(self) -> int:
        """Put tasks that wait into free slots, the most urgent first; a uid that is still here from before waits, and
        so does a task of a version that the relay of this host has not told of."""
        known = self.ring.header(HeaderWord.VERSION)
        here = {one.uid for one in self.held.values() if one.slot >= 0} if self.waiting else set()
        done = 0
        for task in sorted(self.waiting.values(), key=lambda one: (-one.priority, one.admission, one.uid)):
            if task.uid in here or task.version > known:
                continue
            here.add(task.uid)
            try:
                self._reset_fate(task.uid)
                step = self.ring.header(HeaderWord.VERSION_STEP)  # before the version: never newer than what is drawn
                found = self.ring.dispatch(**_dispatched(task, self.ring.header(HeaderWord.VERSION), step))
            except (DiskFull, SharedMemoryFull) as problem:
                self.warn("satellite", f"tasks wait for room on this host: {problem}", "error", kind="no room")
                break
            if not found:
                break
            slot, word = found[0]
            if self.uids[slot] != UID_NONE:  # of a task that was dropped here a moment ago
                self._report_one(next(one for one in self.held.values() if one.slot == slot and not one.ended))
            self.held[task.task].slot, self.uids[slot] = slot, task.uid
            del self.waiting[task.task]
            self.bell.add(partial(m.NewTask, worker_id="", slot_id=slot, seq=seq_of(word), uid=task.uid))
            done += 1
        return done

    def _reset_fate(self, uid: int) -> None:
        """The sample may have been here before, under an earlier claim; only this process dispatches here."""
        table, index = self._place(uid)
        table.reserve(index + 1)
        if table.get(index):
            with open(table.path, "r+b", buffering=0) as file:
                os.pwrite(file.fileno(), b"\0", index)

    def _collect(self) -> int:
        """Own the answers that are ready, and send them together."""
        now = time.monotonic()
        if not self.rung and now < self._next_collect:
            return 0
        self.rung, self._next_collect = False, now + LOOK_S
        if not self.judges:
            for slot, word in self.ring.take(State.GENERATED, State.REWARDING, cls=None, limit=COLLECT_AT_ONCE):
                self.ring.release(slot, word, State.REWARDED)
        taken = self.ring.take(State.REWARDED, State.TRAINING, cls=None, limit=COLLECT_AT_ONCE)
        self.rung = len(taken) == COLLECT_AT_ONCE
        lines, ready = self.ring.lines([slot for slot, _ in taken]), []
        for (slot, word), line in zip(taken, lines):
            one = self.held.get(_task_of(line))
            if one is None or one.lost:
                self.ring.finish(slot, word, Fate.TRAINED)
                if one is not None:
                    self._forget(one)
                continue
            one.slot, one.word, self.uids[slot] = slot, word, UID_NONE
            ready.append(one)
        self._send(ready, claim=True)
        return len(taken)

    def _read(self, ready: list[Held]) -> Iterator[Answer]:
        """What home needs of each; one that cannot be read is handed back."""
        try:
            yield from self._read_all(ready)
        except UNREADABLE:  # one by one, to find which of them
            for one in ready:
                try:
                    yield from self._read_all([one])
                except UNREADABLE as problem:
                    text = f"sample {shown_uid(one.uid)} cannot be read: {problem}"
                    self.warn("satellite", text, "error", uids=[one.uid])
                    self._fail(one)

    def _read_all(self, ready: list[Held]) -> list[Answer]:
        held = [(one.slot, one.word) for one in ready]
        lines = self.ring.lines([one.slot for one in ready])
        columns = {} if self.plays else {name: self._columns(held, name) for name in TENSORS}
        texts = map(text_of, read_copies(self.ring, held, "text"))
        return [
            Answer(
                one, text, int(line["finish"]), float(line["reward"]),
                read_parts(self.ring, one.slot) if self.judges else {},
                {name: column[at] for name, column in columns.items()}, int(line["step"]),
                tensors_of(self.ring, one.slot) if self.plays else {},
            )
            for at, (one, text, line) in enumerate(zip(ready, texts, lines))
        ]

    def _columns(self, held: list[tuple[int, int]], name: str) -> list[bytes]:
        """One tensor of each slot, of all its segments."""
        if name == "prompt_ids" or all(segments_of(word) == 1 for _, word in held):
            return read_copies(self.ring, held, name)
        return [read_generated(self.ring, slot, name, segments_of(word)).tobytes() for slot, word in held]

    def _let_go_of_unasked(self, now: float) -> None:
        """Samples above those that clients here want leave the queue, and so go back to home."""
        excess = sum(not one.ended for one in self.held.values()) - self.wanted
        if excess <= 0:
            self._asked_at = now
        elif now - self._asked_at > UNASKED_S:
            lines = self.ring.lines()
            for slot in (lines["state"] == State.QUEUED).nonzero()[0][:excess].tolist():
                self.ring.drop(slot, int(lines["word"][slot]), Fate.OLD)

    def _report_dropped(self) -> int:
        """Tell home of samples that engines, rewards or the keeper of this host gave up."""
        lines = self.ring.lines()
        for one in list(self.lost.values()):  # the engine that had it is gone
            if lines["state"][one.slot] == State.QUEUED and int(lines["uid"][one.slot]) == one.uid:
                self.ring.drop(one.slot, int(lines["word"][one.slot]), Fate.OLD)
        gone = (self.uids != UID_NONE) & ((lines["state"] == State.FREE) | (lines["uid"] != self.uids))
        if not gone.any():
            return 0
        dropped = [one for one in self.held.values() if one.slot >= 0 and not one.ended and gone[one.slot]]
        for one in dropped:
            self._report_one(one)
        return len(dropped)

    def _report_one(self, one: Held) -> None:
        """It has left its slot without an answer."""
        self.uids[one.slot] = UID_NONE
        if one.lost:
            self._forget(one)
            return
        table, index = self._place(one.uid)
        fate = next((known for known in DROPS if known == table.get(index)), Fate.NONE)
        self._fail(one, DROPS.get(fate, ""), fate.words)

    def _place(self, uid: int) -> tuple[Fates, int]:
        """The table that has the fate of a sample, and where."""
        return (self.validate_fates, uid & ~VALIDATE_BIT) if uid & VALIDATE_BIT else (self.fates, uid)

    # -- what home is told -----

    def _tell(self) -> None:
        now = time.monotonic()
        if now >= self._next_presence:
            self._next_presence = now + PRESENT_S
            self.home.heartbeat(HOST, f"host, holds {len(self.held)}")
            if self.joined:
                if self.differing >= NAME_AFTER:
                    self._name_all()
                self._send(self._unheard(now))
            if now - self._heard_at < 2 * PRESENT_S:  # while home is away its errors wait
                for error in self.errors.new():
                    self.home.send(error)
        if now >= self._next_claim:
            self._next_claim = now + CLAIM_S
            self._claim(now)

    def _unheard(self, now: float) -> list[Held]:
        """Outcomes that home has not settled though it has answered what was sent after them: they were lost."""
        ended = (one for one in self.held.values() if one.ended)
        return [one for one in ended if one.request < self.replied and now - one.sent_at > RESEND_S]

    def _name_all(self) -> None:
        """The answers say what home has given to others, and bring what is not here."""
        life, living = self.source.life, self._living()
        self.digested = self.differing = 0
        self._ask(g.RemoteExtend(life=life, holding=living))
        self._ask(g.RemoteClaim(life=life, capacity=0, holding=living))

    def _claim(self, now: float) -> None:
        """Ask for as many tasks as the engines here will want soon; the digest of those that are held renews them."""
        life = self.source.life
        if not self.joined:
            self.home.send(m.Hello(role=HOST, pid=os.getpid(), host=os.uname().nodename))
            self._ask(g.RemoteJoin(life=life, role=HOST, ring=self.source.ring_hex))
            return
        relays = (one for one in self.ring.processes() if one.role == "relay" and one.state == "ready")
        hears = any(one.activity != SILENT for one in relays)
        # Without a relay nobody here knows how old its weights are.
        rows = sum(count for count, at in self.rows.values() if now - at < ROWS_COUNT_S) if hears else 0
        self.wanted = rows + (0 if self.on_demand else ahead_of(self.topology, rows)) if rows else 0
        # Home settles an answer before it reads what is sent after it.
        digest = sum(one.digest for one in self.held.values() if not (one.lost or one.ended)) % g.DIGESTS
        capacity = len(self.held) - len(self.lost) + self._room()
        self.digested = self.request + 1
        self._ask(g.RemoteClaim(life=life, capacity=capacity, digest=digest))

    def _room(self) -> int:
        """Tasks more that this host could use."""
        unfinished = sum(not one.ended for one in self.held.values())
        return max(0, min(self.wanted - unfinished, self.ring.n_slots - len(self.held)))

    def _living(self) -> list[str]:
        """The claims of this host that home has given to nobody else, as far as it knows."""
        return [task for task, one in self.held.items() if not one.lost][:m.MAX_MAP]

    def _fail(self, one: Held, drop: str = "", text: str = "") -> None:
        """Give it up, or hand it back."""
        one.failed = g.RemoteFail(life=self.source.life, task=one.task, drop=drop, text=text)
        self._send([one])

    def _send(self, ended: list[Held], claim: bool = False) -> None:
        """Outcomes, answers in as few messages as their size allows; the last one may `claim` in the place of each."""
        now = time.monotonic()
        for one in ended:
            one.sent_at = now
            if one.failed is not None:
                self._ask(one.failed)
        packs: list[list[Answer]] = [[]]
        size, most = 0, self.topology.bus.max_message_bytes // 2
        answered = [one for one in ended if one.failed is None]
        for answer in self._read(answered) if answered else ():
            if packs[-1] and size + answer.size > most:
                packs.append([])
                size = 0
            packs[-1].append(answer)
            size += answer.size
        for number, pack in enumerate(packs, 1):
            if pack:
                capacity = len(self.held) - len(self.lost) - len(answered) + self._room() if number == len(packs) else 0
                self._send_answers(pack, capacity if claim else 0)
        for one in ended:
            one.request = self.request

    def _send_answers(self, pack: list[Answer], capacity: int) -> None:
        lengths, prompt_lengths = (
            [len(answer.tensors.get(name, b"")) // 4 for answer in pack] for name in ("tokens", "prompt_ids")
        )
        columns = [_joined([answer.tensors.get(name, b"") for answer in pack], name) for name in TENSORS]
        try:
            self._ask(g.RemoteBatch(
                life=self.source.life, tasks=[answer.one.task for answer in pack], lengths=lengths,
                prompt_lengths=prompt_lengths, finishes=[answer.finish for answer in pack],
                texts=[answer.text for answer in pack], capacity=capacity,
                rewards=[answer.reward for answer in pack] if self.judges else [],
                parts=[answer.parts for answer in pack] if any(answer.parts for answer in pack) else [],
                tokens=columns[0], logprobs=columns[1], versions=columns[2], prompt_ids=columns[3],
                steps=[answer.step for answer in pack],
                episodes=[answer.episode for answer in pack] if self.plays else [],
            ))
        except MessageTooLarge as problem:  # it is alone: a pack of several is half as large as it may be
            one = pack[0].one
            self.warn("satellite", f"sample {shown_uid(one.uid)} cannot be sent: {problem}", "error", uids=[one.uid])
            self._fail(one, "malformed", "too large to send")

    def _ask(self, message: g.Remote) -> None:
        self.request += 1
        message.req = self.request
        self.home.send(message)


def _joined(parts: list[bytes], name: str) -> g.Tensor:
    data = b"".join(parts)
    return g.Tensor(DTYPES[name].name, [len(data) // DTYPES[name].itemsize], data)


def _task_of(line: np.void) -> str:
    """The name of the task at home, as `_dispatched` wrote it into the line of the local slot."""
    return f"{int(line['prompt_crc'])}.{int(line['group'])}.{int(line['uid'])}"


def _dispatched(task: g.Task, version: int, step: int) -> dict[str, Any]:
    """The local slot of a task. Nobody here groups samples or keeps prompts, so that group and prompt_crc have seq and
    slot of the claim."""
    return {
        "uid": task.uid, "group": task.seq, "prompt_crc": task.slot_id, "admission": task.admission, "member": 0,
        "group_size": 1, "cls": task.cls, "task": task.record.encode(), "priority": task.priority,
        "max_new_tokens": task.max_new_tokens, "temperature": task.temperature, "top_p": task.top_p,
        "version": version, "step": step,
    }
