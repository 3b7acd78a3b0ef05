"""The gateway: a tender of the keeper that works on the ring for workers which do not map it.

Requests come from the bus, `hosts/desk.py` decides, and `hosts/ledgers.py` claims, writes and commits in the workers'
names. Writes the counts that `busrl status` shows into `gateway.json`, and when other hosts came and went into
`hosts.jsonl`. Knows nothing of dead processes on this host: the keeper looks after them.

- Nothing that arrives can end the keeper. A request that cannot be read is counted, and answered if its sender can.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from msgspec import UNSET

from busrl.data.routing import Routed
from busrl.data.vocabulary import token_rows
from busrl.errors import MessageTooLarge
from busrl.hosts import messages as g
from busrl.hosts.desk import Desk
from busrl.hosts.ledgers import BothLedgers, CallLedger, EpisodeBounds, RingLedger
from busrl.hosts.membership import Roster, claimed_from, write_lines
from busrl.protocol import messages as m
from busrl.protocol.codec import BY_NAME, Fault, Rejected, address, is_address
from busrl.roles.actor import Doorbell, ring_bells
from busrl.roles.answers import SegmentCuts
from busrl.scheduling.admission import Lines
from busrl.states import shown_uid
from busrl.system import files
from busrl.system.clocks import Tally
from busrl.topology import Topology
from busrl.topology.sizes import RESERVE_PROCESSES

if TYPE_CHECKING:
    from busrl.roles.keeper import Keeper

SAVE_EVERY_S = 1.0
MOST_NAMED = 16
CODES = {Fault.WRONG_VERSION: "version", Fault.OVERSIZE: "oversize"}  # for any other fault "malformed"


class Gateway:
    """The `Tender` of workers from outside, other hosts among them."""

    subscribe: ClassVar[tuple[type[m.Message], ...]] = (m.Heartbeat, *g.REMOTE)

    def __init__(self, keeper: Keeper) -> None:
        self.keeper, topology = keeper, keeper.topology
        self._next_save = 0.0
        self._kinds = NamedLines(MOST_NAMED)
        self._bells: dict[type[m.Message], Doorbell] = {m.DataGenerated: Doorbell(), m.RewardComputed: Doorbell()}
        self.tally = Tally(files.read_map(keeper.paths.gateway).get("workers"))
        vocabulary = token_rows(Path(topology.model.path)).bound
        self.samples = RingLedger(
            keeper.ring, self._announce, SegmentCuts.of(topology), topology.max_prompt_tokens, vocabulary,
            EpisodeBounds.of(topology, vocabulary), Routed.of(topology),
        )
        self.ledger: RingLedger | BothLedgers = self.samples
        if keeper.calls is not None:
            self.ledger = BothLedgers(self.samples, CallLedger(keeper.calls, self.samples))
        ring = claimed_from(keeper.paths.run_json).hex()
        self.desk = desk_of(topology, self.ledger, self.tally, ring, lambda: keeper.paused)
        self.roster = Roster(topology.host_names)

    def handle(self, message: m.Message, now: float) -> None:
        if isinstance(message, g.Remote):
            self.ledger.note_version()
            answers = self.desk.handle(message, now)
            if self.desk.paused:
                text = f"{message.sender} has to send its answers again: {self.desk.paused}"
                self._warn(text, f"no memory for {self._kinds.name(message.sender)}", severity="error")
            done = any(isinstance(answer, g.GatewayAnswer) and answer.code == "done" for answer in answers)
            if isinstance(message, g.RemoteFail) and message.drop and done:
                text = f"task {message.task} was given up by {message.sender}: {message.drop}: {message.text}"
                self._warn(text, f"{message.drop} {message.sender}", [int(message.task.rpartition(".")[2])])
            self._send(message.sender, answers)
        else:
            self.desk.heartbeat(message.sender, now)

    def unreadable(self, rejected: Rejected, name: str) -> None:
        if issubclass(BY_NAME.get(name, m.Message), g.Remote):
            code = CODES.get(rejected.fault, "malformed")
            self._send(rejected.sender, self.desk.unreadable(rejected.sender, code, name, str(rejected)))

    def tend(self, now: float) -> None:
        """Ring for what was committed, end leases that are over, and save the counts now and then."""
        ring_bells(self.keeper.bus, *self._bells.values())
        self.ledger.note_version()
        for lease in self.desk.tick(now):
            name, uid = lease.worker.name, lease.claim.uid
            text = f"sample {shown_uid(uid)} was taken back from {name}, which did not extend its lease"
            self._warn(text, f"lease of {name}", [uid])
        write_lines(self.keeper.paths, self.roster.changes(self.desk.leases.presence()))
        if self.tally.changed and now >= self._next_save:
            self._next_save = now + SAVE_EVERY_S
            self._save()

    def look(self, lines: Lines) -> None:
        self.samples.finish_judged(lines)

    def follow(self) -> None:
        self.desk.reserve(reserved_names(self.keeper.topology))

    def teardown(self) -> None:
        self.desk.goodbye()
        if self.tally.workers:
            self._save()

    def _announce(self, message: m.Message) -> None:
        self._bells[type(message)].add(lambda: message)

    def _send(self, to: str, answers: list[m.Message]) -> None:
        for answer in answers:
            if isinstance(answer, g.GatewayAnswer) and answer.code in g.REFUSALS:
                self._warn(f"{to or 'an unnamed sender'}: {answer.text}", f"{answer.code} {self._kinds.name(to)}")
            if not is_address(to):
                return  # no topic can hold the name: the request is counted, and an answer would reach no process
            try:
                self.keeper.bus.send(answer, to)
            except MessageTooLarge as problem:
                self.tally.add(to, "too_large", text=str(problem))

    def _warn(self, text: str, kind: str, uids: list[int] | None = None, severity: str = "warning") -> None:
        self.keeper.warn("gateway", text, severity, kind=kind, uids=uids or ())

    def _save(self) -> None:
        self.tally.changed = False
        files.show(self.keeper.paths.gateway, {"workers": self.tally.plain()})


class NamedLines:
    """Gives the first `most` names that are refused lines of their own in errors.jsonl; all others share a line."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._names: set[str] = set()

    def name(self, sender: str) -> str:
        if len(self._names) < self._most:
            self._names.add(sender)
        return sender if sender in self._names else "(others)"


def reserved_names(topology: Topology) -> frozenset[str]:
    """Names that no worker from outside may have."""
    return frozenset(address(process.name) for process in topology.processes() if not process.spec.command) | {"launch"}


def desk_of(
    topology: Topology, ledger: RingLedger | BothLedgers, tally: Tally, ring: str, is_paused: Callable[[], bool]
) -> Desk:
    """The desk of a run. Workers from outside never take the entries that the run's own processes may need."""
    data, processes, routing = topology.data, topology.processes(), topology.derived.routing
    welcome = g.GatewayWelcome(
        life=0, lease_s=topology.limits.lease_s, max_message_bytes=topology.bus.max_message_bytes,
        max_prompt_tokens=topology.max_prompt_tokens, seed=topology.run.seed, model=topology.model.path,
        prompt_key=data.prompt_key, answer_key=topology.reward.answer_key or data.answer_key, template=data.template,
        routes=UNSET if routing is None else [*routing.shape, routing.experts],
    )
    return Desk(
        ledger, tally, time.monotonic(), welcome=welcome, biggest=topology.task_message_bytes,
        most_members=max(0, topology.ring.processes - len(processes) - RESERVE_PROCESSES),
        reserved=reserved_names(topology), ring=ring, is_paused=is_paused,
    )
