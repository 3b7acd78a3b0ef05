"""The satellite: on another host it is to the local ring what scheduler and learner are at home, and to home a worker.

It takes tasks from the run's keeper through its gateway (`busrl.gateway`), puts each into a slot of the local ring, and
sends the answers that local engines commit. Talks to the local ring and bus, and over TCP to the bus of the run. Knows
nothing of engines, weights or groups.

- A local slot is the record of a claim: its line holds the task's slot, seq and uid at home. So this process remembers
  nothing that its next life needs, and an engine's death is settled on this host.
- An answer stays in its slot, TRAINING, until home has said what became of it; sent again it counts once.
- What home has given to others is dropped here: at once if no engine has it, else when the engine lets go.
- Local fates say only that a sample is here; home's alone count.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np

from busrl.bus import Endpoint, tcp_pair
from busrl.config import HostSource
from busrl.config.hosts import SILENT, ahead_of
from busrl.errors import BusNotReady, MessageTooLarge
from busrl.gateway import FATES, tensor
from busrl.protocol import gateway as g
from busrl.protocol import messages as m
from busrl.ring import Fates, State, segments_of, seq_of
from busrl.roles.actor import Actor, Doorbell
from busrl.roles.answers import UNREADABLE, read_generated, read_prompt_ids, read_text
from busrl.roles.host_news import HostErrors
from busrl.states import VALIDATE_BIT, Fate, HeaderWord, RunPhase

log = logging.getLogger("busrl")
ANSWERS = ("GATEWAY_WELCOME", "GATEWAY_TASKS", "GATEWAY_ANSWER")
CLAIM_S, RESEND_S, PRESENT_S = 0.25, 2.0, 1.0
CLAIM_FREED = 8  # answers after which more is claimed at once
ROWS_COUNT_S = 4.0  # for which an engine that told of its rows is taken to be there
COLLECT_AT_ONCE = 256
REMEMBERED = 8192
DROPS = {fate: word for word, fate in FATES["rollout"].items()}


@dataclass
class Held:
    """A task of this host. States: waiting (slot -1, no room in the ring yet) -> in a slot -> answered -> gone."""

    task: str
    uid: int
    slot: int = -1
    word: int = 0  # the word that owns the slot, once its answer is ready
    result: g.Remote | None = None
    sent_at: float = 0.0
    lost: bool = False  # home has given it to others


class Satellite(Actor):
    role = "satellite"
    singleton = True
    subscribe: ClassVar[tuple[type[m.Message], ...]] = (m.TaskRequest, m.DataGenerated)
    tick_s = 0.02

    def setup(self) -> None:
        self.source = HostSource.read(self.paths.host_source)
        frontend, backend = tcp_pair(self.source.endpoint)
        own, name = self.topology.bus, self.source.name
        self.home = Endpoint(
            name, frontend, backend, subscribe=[f"{kind}/{name}/" for kind in ANSWERS], hwm=own.hwm,
            max_bytes=own.max_message_bytes, keys=self.source.client, report=lambda text: self.warn("home", text),
        )
        # Above those of an earlier life of this process, whose copies the keeper tells by their smaller numbers.
        self.joined, self.request = False, time.time_ns() // 1_000_000
        self.rows: dict[str, tuple[int, float]] = {}  # of the engines here: how many, and when they said so
        self.waiting: dict[str, g.Task] = {}
        self.over: dict[str, None] = {}  # claims that have ended, oldest first: a late copy of one is no task
        self.bell = Doorbell()
        self.errors, self._heard_at = HostErrors(self.paths), 0.0
        self._next_claim = self._next_presence = 0.0
        self._claimed = self._freed = 0  # the last claim's request until it is answered; answers since that claim
        self.held = {one.task: one for one in self._adopted()}
        try:
            self.home.ready(self.topology.limits.ready_s / 2)
        except BusNotReady as problem:  # home may be away: what is here goes on
            self.warn("home", str(problem), kind="no home")

    def _adopted(self) -> Iterable[Held]:
        """What the ring says is here: tasks of an earlier life of this process."""
        lines = self.ring.lines()
        for slot in (lines["state"] != State.FREE).nonzero()[0].tolist():
            yield Held(_task_of(lines[slot]), int(lines["uid"][slot]), slot)

    def work(self) -> bool:
        if self.ring.header(HeaderWord.RUN_STATE) == RunPhase.FINISHING:
            self.stop("the run has reached its goal")
            return True
        heard = self._hear()
        did = self._dispatch() + self._collect() + self._report_dropped()
        self._tell()
        self.ring_bells(self.bell)
        return bool(heard or did)

    def idle(self, timeout_s: float) -> None:
        """Home's messages and the local bus are looked at in turn: neither wait is long."""
        message = self.home.recv(timeout_s / 2)
        if message is not None:
            self._heard(message)
        super().idle(timeout_s / 2)

    def handle(self, message: m.Message) -> None:
        if isinstance(message, m.TaskRequest):
            self.rows[message.worker_id] = (message.rows, time.monotonic())

    def teardown(self) -> None:
        """Answers that are ready are sent once more; the rest goes back to the run at once."""
        self._collect()
        for one in self.held.values():
            if one.result is not None:
                self._send(one)
        self._ask(g.RemoteLeave(life=self.source.life, reason=self.stopping))
        self.home.send(m.Goodbye(reason=self.stopping))
        self.home.close()

    # -- what home says -----

    def _hear(self) -> int:
        messages = self.home.drain()
        for message in messages:
            self._heard(message)
        return len(messages)

    def _heard(self, message: m.Message) -> None:
        self._heard_at = time.monotonic()
        if getattr(message, "life", 0) not in (self.source.life, 0):
            return  # to an earlier life of this name
        if isinstance(message, g.GatewayWelcome):
            self.joined, self._next_claim = True, 0.0
        elif isinstance(message, g.GatewayTasks):
            if message.req >= self._claimed:
                self._claimed = 0
            for task in message.tasks:
                if task.task not in self.held and task.task not in self.over:
                    self.held[task.task] = Held(task.task, task.uid)
                    self.waiting[task.task] = task
        elif isinstance(message, g.GatewayAnswer):
            self._answered(message)

    def _answered(self, answer: g.GatewayAnswer) -> None:
        if answer.code == "unknown":
            self.joined = False  # a new keeper, or this host was silent for too long
        elif answer.code == "replaced":
            self._replaced()
        for task in answer.lost:
            self._lose(task)
        if answer.code == "refused" and answer.task in self.held:
            self._refused(self.held[answer.task], answer.text)
        elif answer.task in self.held:
            if answer.code != "unknown":
                self._settled(self.held[answer.task])
        elif answer.code in ("refused", "full", "too_large", "malformed", "version"):
            self.warn("home", f"{answer.about}: {answer.code}: {answer.text}", "error", kind=answer.code)

    def _refused(self, one: Held, why: str) -> None:
        """Home cannot use its answer, and would not use the next one: the sample is given up."""
        self.warn("home", f"sample {one.uid} is refused: {why}", "error", uids=[one.uid])
        if isinstance(one.result, g.RemoteGenerated):
            one.result = g.RemoteFail(life=self.source.life, task=one.task, drop="malformed", text=why)
            self._send(one)

    def _replaced(self) -> None:
        """Two hosts of one name would take each other's place for ever: the older one ends."""
        self.warn("satellite", f"another host has joined as {self.source.name}: this one ends", "error")
        replace(self.source, replaced=True).write(self.paths.host_source)
        self.ring.set_header(HeaderWord.RUN_STATE, RunPhase.STOPPING)
        self.stop("replaced")

    def _settled(self, one: Held) -> None:
        """Home needs nothing more of it."""
        if one.word:
            self.ring.finish(one.slot, one.word, Fate.TRAINED)
            self._forget(one)
        else:
            self._lose(one.task)

    def _lose(self, task: str) -> None:
        """It is somebody else's now."""
        one = self.held.get(task)
        if one is None:
            return
        one.lost = True
        line = None if one.slot < 0 else self.ring.line(one.slot)
        if line is None or line["state"] == State.FREE or int(line["uid"]) != one.uid:
            self._forget(one)
        elif line["state"] == State.QUEUED:
            self.ring.drop(one.slot, int(line["word"]), Fate.OLD)  # unless an engine takes it this moment

    def _forget(self, one: Held) -> None:
        self.held.pop(one.task, None)
        self.waiting.pop(one.task, None)
        self.over[one.task] = None
        if len(self.over) > REMEMBERED:
            del self.over[next(iter(self.over))]

    # -- the local ring -----

    def _dispatch(self) -> int:
        """Put tasks that wait into free slots, the most urgent first; a uid that is still here from before waits."""
        here = {one.uid for one in self.held.values() if one.slot >= 0} if self.waiting else set()
        done = 0
        for task in sorted(self.waiting.values(), key=lambda one: (-one.priority, one.admission, one.uid)):
            if task.uid in here:
                continue
            self._reset_fate(task.uid)
            found = self.ring.dispatch(**_dispatched(task, self.ring.header(HeaderWord.VERSION),
                                                     self.ring.header(HeaderWord.VERSION_STEP)))
            if not found:
                break
            slot, word = found[0]
            self.held[task.task].slot = slot
            del self.waiting[task.task]
            self._announce(slot, word, task.uid)
            done += 1
        return done

    def _announce(self, slot: int, word: int, uid: int) -> None:
        self.bell.add(lambda: m.NewTask(worker_id="", slot_id=slot, seq=seq_of(word), uid=uid))

    def _reset_fate(self, uid: int) -> None:
        """The sample may have been here before, under an earlier claim; only this process dispatches here."""
        table, index = self._place(uid)
        table.reserve(index + 1)
        if table.get(index):
            with open(table.path, "r+b", buffering=0) as file:
                os.pwrite(file.fileno(), b"\0", index)

    def _collect(self) -> int:
        """Own each answer that is ready, and send it."""
        for slot, word in self.ring.take(State.GENERATED, State.REWARDING, cls=None, limit=COLLECT_AT_ONCE):
            self.ring.release(slot, word, State.REWARDED)
        taken = self.ring.take(State.REWARDED, State.TRAINING, cls=None, limit=COLLECT_AT_ONCE)
        for slot, word in taken:
            self._send_answer(slot, word)
        return len(taken)

    def _send_answer(self, slot: int, word: int) -> None:
        line = self.ring.line(slot)
        one = self.held.get(_task_of(line))
        if one is None or one.lost:
            self.ring.finish(slot, word, Fate.TRAINED)
            if one is not None:
                self._forget(one)
            return
        one.slot, one.word = slot, word
        try:
            one.result = self._answer_of(one, int(line["finish"]), segments_of(word))
        except UNREADABLE as problem:
            self.warn("satellite", f"sample {one.uid} cannot be read: {problem}", "error", uids=[one.uid])
            one.result = g.RemoteFail(life=self.source.life, task=one.task)
        self._send(one)

    def _answer_of(self, one: Held, finish: int, segments: int) -> g.RemoteGenerated:
        slot = one.slot
        tokens, logprobs, versions = (
            tensor(np.asarray(read_generated(self.ring, slot, name, segments)))
            for name in ("tokens", "logprobs", "versions")
        )
        return g.RemoteGenerated(
            life=self.source.life, task=one.task, tokens=tokens, logprobs=logprobs, versions=versions,
            text=read_text(self.ring, slot, segments), prompt_ids=tensor(np.asarray(read_prompt_ids(self.ring, slot))),
            finish=finish, done=True,
        )

    def _report_dropped(self) -> int:
        """Tell home of samples that engines or the keeper of this host gave up."""
        placed = [one for one in self.held.values() if one.slot >= 0 and not one.word and one.result is None]
        if not placed:
            return 0
        lines, count = self.ring.lines(), 0
        for one in placed:
            line = lines[one.slot]
            if line["state"] != State.FREE and int(line["uid"]) == one.uid:
                if one.lost and line["state"] == State.QUEUED:  # the engine that had it is gone
                    self.ring.drop(one.slot, int(line["word"]), Fate.OLD)
                continue
            if one.lost:
                self._forget(one)
                continue
            table, index = self._place(one.uid)
            fate = next((known for known in DROPS if known == table.get(index)), Fate.NONE)
            one.result = g.RemoteFail(life=self.source.life, task=one.task, drop=DROPS.get(fate, ""), text=fate.words)
            self._send(one)
            count += 1
        return count

    def _place(self, uid: int) -> tuple[Fates, int]:
        """The table that has the fate of a sample, and where."""
        return (self.validate_fates, uid & ~VALIDATE_BIT) if uid & VALIDATE_BIT else (self.fates, uid)

    # -- what home is told -----

    def _tell(self) -> None:
        now = time.monotonic()
        if now >= self._next_presence:
            self._next_presence = now + PRESENT_S
            self.home.heartbeat("rollout", f"host, holds {len(self.held)}")
            if self.joined and (holding := self._living()):
                self._ask(g.RemoteExtend(life=self.source.life, holding=holding))  # its answer names what is lost
            if now - self._heard_at < 2 * PRESENT_S:  # while home is away its errors wait
                for error in self.errors.new():
                    self.home.send(error)
        # Engines that answer faster than claims are due would run dry; a claim under way must not be doubled by it.
        if now >= self._next_claim or (self._freed >= CLAIM_FREED and not self._claimed):
            self._next_claim = now + CLAIM_S
            self._claim(now)
        if self.joined:
            for one in self.held.values():
                if one.result is not None and now - one.sent_at > RESEND_S:
                    self._send(one)

    def _claim(self, now: float) -> None:
        """Ask for as many tasks as the engines here will want soon; to name those that are held renews their leases."""
        life = self.source.life
        if not self.joined:
            self.home.send(m.Hello(role="rollout", pid=os.getpid(), host=os.uname().nodename))
            self._ask(g.RemoteJoin(life=life, role="rollout", ring=self.source.ring_hex))
            return
        relays = (one for one in self.ring.processes() if one.role == "relay" and one.state == "ready")
        hears = any(one.activity != SILENT for one in relays)
        # Without a relay nobody here knows how old its weights are.
        rows = sum(count for count, at in self.rows.values() if now - at < ROWS_COUNT_S) if hears else 0
        wanted = rows + ahead_of(self.topology, rows) if rows else 0
        unfinished = sum(one.result is None for one in self.held.values())
        room = min(max(0, wanted - unfinished), self.ring.n_slots - len(self.held))
        living = self._living()
        self._ask(g.RemoteClaim(life=life, capacity=len(living) + max(0, room), holding=living))
        self._claimed, self._freed = self.request, 0

    def _living(self) -> list[str]:
        """The claims of this host that home has given to nobody else, as far as it knows."""
        return [task for task, one in self.held.items() if not one.lost][:m.MAX_MAP]

    def _send(self, one: Held) -> None:
        assert one.result is not None
        self._freed += not one.sent_at
        one.sent_at = time.monotonic()
        try:
            self._ask(one.result)
        except MessageTooLarge as problem:
            self.warn("satellite", f"sample {one.uid} cannot be sent: {problem}", "error", uids=[one.uid])
            one.result = g.RemoteFail(life=self.source.life, task=one.task, drop="malformed", text="too large to send")
            self._ask(one.result)

    def _ask(self, message: g.Remote) -> None:
        self.request += 1
        message.req = self.request
        self.home.send(message)


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
