"""The gateway: a tender of the keeper that works on the ring for workers which do not map it.

Requests come from the bus, `hosts/desk.py` decides, and `hosts/ledgers.py` claims, writes and commits in the workers'
names. `gateway.json` holds the counts that `busrl status` shows, `hosts.jsonl` when other hosts came and went. Knows
nothing of what is dead on this host: that is the keeper's.

- Nothing that arrives can end the keeper: a request that cannot be read is answered where its sender is known, and
  counted.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from busrl.data.vocabulary import token_rows
from busrl.errors import MessageTooLarge
from busrl.hosts import messages as g
from busrl.hosts.episodes import Bounds
from busrl.hosts.invitation import claimed_from
from busrl.hosts.ledgers import BothLedgers, CallLedger, RingLedger, desk_of, reserved_names
from busrl.hosts.roster import Roster, write
from busrl.protocol import messages as m
from busrl.protocol.codec import BY_NAME, Fault, Rejected, is_address
from busrl.roles.actor import Doorbell, ring_bells
from busrl.roles.answers import SegmentCuts
from busrl.scheduling.admission import Lines
from busrl.states import shown_uid
from busrl.system import files
from busrl.system.clocks import Tally

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
            Bounds.of(topology, vocabulary),
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
        write(self.keeper.paths, self.roster.changes(self.desk.leases.presence()))
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
                return  # no topic can hold the name: the request was counted, and an answer would reach no process
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
    """The first `most` names that are refused have lines of their own in errors.jsonl; all others share one."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._names: set[str] = set()

    def name(self, sender: str) -> str:
        if len(self._names) < self._most:
            self._names.add(sender)
        return sender if sender in self._names else "(others)"
