"""The keeper: takes back what dead processes held, completes their half-done drops, and serves remote workers.

Talks to the ring. Any process may reap at any time; the keeper only makes it prompt. It also clears the version pin of
a dead validator. It is the gateway for workers that do not map the ring: requests come from the bus,
`busrl.hosts.gateway` decides, and `remote_ledgers` claims, writes and commits in the workers' names. `gateway.json`
holds the counts that `busrl status` shows, `hosts.jsonl` when other hosts came and went.

- Nothing that arrives can end the keeper: what cannot be read is answered where its sender is known, and counted.
"""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import ClassVar

from busrl.data.vocabulary import token_rows
from busrl.errors import FateRefused, MessageTooLarge
from busrl.hosts import log as host_log
from busrl.hosts import messages as g
from busrl.hosts.episodes import Bounds
from busrl.hosts.gateway import BAD
from busrl.hosts.invitation import claimed_from
from busrl.hosts.ledgers import BothLedgers, CallLedger, RingLedger, desk_of, reserved_names
from busrl.protocol import messages as m
from busrl.protocol.codec import BY_NAME, Fault, Rejected, is_address
from busrl.ring import Ring, State
from busrl.ring.locks import taken_back
from busrl.roles import version_pin
from busrl.roles.actor import Actor, Doorbell
from busrl.roles.answers import SegmentCuts
from busrl.scheduling.admission import Lines
from busrl.states import POISON_DEATHS, Fate, shown_uid
from busrl.system import files
from busrl.system.clocks import Tally

log = logging.getLogger("busrl")
SAVE_EVERY_S = 1.0
MOST_NAMED = 16
CODES = {Fault.WRONG_VERSION: "version", Fault.OVERSIZE: "oversize"}  # for any other fault "malformed"
LOOK_EVERY_S = 0.02  # requests may come by the thousand; the dead are looked for at most so often


class Keeper(Actor):
    role = "keeper"
    singleton = True
    calls: Ring | None = None  # the ring of model calls
    subscribe: ClassVar[tuple[type[m.Message], ...]] = (m.Heartbeat, *g.REMOTE)
    tick_s = 0.1

    def setup(self) -> None:
        self._next_look = self._next_save = 0.0
        if self.topology.derived.call_slots:
            self.calls = Ring.attach(self.paths.calls_name, calls=True)
            self.calls.register(self.role, self.name)
        self._named: set[str] = set()
        self._bells: dict[type[m.Message], Doorbell] = {m.DataGenerated: Doorbell(), m.RewardComputed: Doorbell()}
        self.tally = Tally(files.read_map(self.paths.gateway).get("workers"))
        own, vocabulary = self.topology, token_rows(Path(self.topology.model.path)).bound
        self.samples = ledger = RingLedger(
            self.ring, self._announce, SegmentCuts.of(own), own.max_prompt_tokens, vocabulary,
            Bounds.of(own, vocabulary),
        )
        self.ledger = ledger if self.calls is None else BothLedgers(ledger, CallLedger(self.calls, ledger))
        self.desk = desk_of(self.topology, self.ledger, self.tally, claimed_from(self.paths.run_json).hex())
        self.desk.is_paused = lambda: self.paused
        self.bus.on_reject = self._answer_unreadable
        self.hosts = host_log.HostLog(self.topology.host_names)

    def work(self) -> bool:
        self._tend_workers()
        now = time.monotonic()
        if now < self._next_look:
            return False
        self._next_look = now + LOOK_EVERY_S
        return self._look()

    def follow(self) -> None:
        self.desk.reserved = reserved_names(self.topology)

    def teardown(self) -> None:
        self.desk.goodbye()
        if self.tally.workers:
            self._save()

    # -- the ring -------------------------------------------------------------------------------------------------

    def _look(self) -> bool:
        reaped = self.ring.reap()
        if self.calls is not None:  # calls that dead engines had wait again, those of dead callers end
            for text, _ in taken_back(self.calls, self.calls.reap(), "calls"):
                self.warn("keeper", text)
        try:
            self.ring.finish_drops()
        except FateRefused as problem:  # a uid that names no sample costs the slot, not the keeper
            self.warn("keeper", f"a dropped sample cannot be recorded, its slot is out of use: {problem}", "error")
        if version_pin.clear_stale(self.ring):
            self.warn("keeper", "cleared the version pin of a dead process: publication continues")
        lines = self.ring.lines()
        self._drop_poison(lines)
        self.samples.finish_judged(lines)
        for text, uids in taken_back(self.ring, reaped):
            self.warn("keeper", text, uids=uids)
        return bool(reaped)

    def _drop_poison(self, lines: Lines) -> None:
        """Give up a sample that killed two workers which held nothing else; it is re-rolled as any accident."""
        for slot in ((lines["state"] == State.QUEUED) & (lines["alone_deaths"] >= POISON_DEATHS)).nonzero()[0].tolist():
            if self.ring.drop(slot, int(lines["word"][slot]), Fate.POISON):
                uid = int(lines["uid"][slot])
                text = f"sample {shown_uid(uid)} is poison: two workers died on it alone"
                self.warn("keeper", text, "error", uids=[uid])

    # -- remote workers -------------------------------------------------------------------------------------------

    def handle(self, message: m.Message) -> None:
        now = time.monotonic()
        if isinstance(message, g.Remote):
            self.ledger.note_version()
            answers = self.desk.handle(message, now)
            if self.desk.paused:
                text = f"{message.sender} has to send its answers again: {self.desk.paused}"
                self.warn("gateway", text, "error", kind=f"no memory for {self._line_of(message.sender)}")
            done = any(isinstance(answer, g.GatewayAnswer) and answer.code == "done" for answer in answers)
            if isinstance(message, g.RemoteFail) and message.drop and done:
                text = f"task {message.task} was given up by {message.sender}: {message.drop}: {message.text}"
                uid = int(message.task.rpartition(".")[2])
                self.warn("gateway", text, kind=f"{message.drop} {message.sender}", uids=[uid])
            self._send(message.sender, answers)
        elif isinstance(message, m.Heartbeat):
            self.desk.heartbeat(message.sender, now)

    def _tend_workers(self) -> None:
        """Ring for what was committed, end leases that are over, and save the counts now and then."""
        self.ring_bells(*self._bells.values())
        self.ledger.note_version()
        now = time.monotonic()
        for lease in self.desk.tick(now):
            name, uid = lease.worker.name, lease.claim.uid
            text = f"sample {shown_uid(uid)} was taken back from {name}, which did not extend its lease"
            self.warn("gateway", text, kind=f"lease of {name}", uids=[uid])
        host_log.write(self.paths, self.hosts.changes(self.desk.seen()))
        if self.tally.changed and now >= self._next_save:
            self._next_save = now + SAVE_EVERY_S
            self._save()

    def _announce(self, message: m.Message) -> None:
        self._bells[type(message)].add(lambda: message)

    def _answer_unreadable(self, rejected: Rejected, target: bytes) -> None:
        name = target.decode("ascii", "replace").partition("/")[0]
        if issubclass(BY_NAME.get(name, m.Message), g.Remote):
            code = CODES.get(rejected.fault, "malformed")
            self._send(rejected.sender, self.desk.unreadable(rejected.sender, code, name, str(rejected)))

    def _send(self, to: str, answers: list[m.Message]) -> None:
        for answer in answers:
            if isinstance(answer, g.GatewayAnswer) and answer.code in BAD:
                text = f"{to or 'an unnamed sender'}: {answer.text}"
                self.warn("gateway", text, kind=f"{answer.code} {self._line_of(to)}")
            if not is_address(to):
                return  # no topic can hold the name: the request was counted, and an answer would reach no process
            try:
                self.bus.send(answer, to)
            except MessageTooLarge as problem:
                self.tally.add(to, "too_large", text=str(problem))

    def _line_of(self, name: str) -> str:
        """The first refused names have lines of their own in errors.jsonl; all others share one."""
        if len(self._named) < MOST_NAMED:
            self._named.add(name)
        return name if name in self._named else "(others)"

    def _save(self) -> None:
        self.tally.changed = False
        files.show(self.paths.gateway, {"workers": self.tally.plain()})
