"""The keeper's side of the gateway: requests from the bus to the desk, its answers and doorbells back to the bus.

Talks to the bus, to the ring through `RemoteBook`, and to `gateway.json`, which `busrl status` shows. All decisions are
made by `busrl.gateway`, whose module `desk` says why the wire is the bus and what holds under loss and death. Knows
nothing of the keeper's other work.

- Nothing that arrives can end the keeper: what can not be read is answered by name where there is one, and counted.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from busrl.bus import Endpoint
from busrl.errors import MessageTooLarge
from busrl.gateway import BAD, Desk, Limits, Settings, Tally, VersionSteps
from busrl.ledger.files import show_whole
from busrl.paths import RunPaths
from busrl.protocol import Fault, Rejected, address, is_address, kind_of
from busrl.protocol import gateway as g
from busrl.protocol import messages as m
from busrl.ring import Ring
from busrl.roles.actor import Doorbell
from busrl.roles.remote_book import RemoteBook
from busrl.roles.segment_cuts import SegmentCuts
from busrl.topology import Topology
from busrl.topology.machine import model_facts
from busrl.topology.rules import RESERVE_PROCESSES

SAVE_EVERY_S = 1.0
MOST_NAMED = 16
CODES = {
    Fault.MALFORMED: "malformed",
    Fault.UNKNOWN_TYPE: "malformed",
    Fault.WRONG_VERSION: "version",
    Fault.OVERSIZE: "oversize",
}
Tell = Callable[[str, str, str, str, Sequence[int]], None]  # where, text, severity, kind, samples


class Gateway:
    """`hear` every message of a subscribed kind, `tick` in every pass, `close` at an orderly end."""

    def __init__(self, ring: Ring, bus: Endpoint, paths: RunPaths, topology: Topology, tell: Tell) -> None:
        self.ring, self.bus, self.paths, self.tell = ring, bus, paths, tell
        self.steps = VersionSteps()
        self.tally = Tally(read_counts(paths.gateway))
        self._bells: dict[type[m.Message], Doorbell] = {m.DataGenerated: Doorbell(), m.RewardComputed: Doorbell()}
        book = RemoteBook(ring, self.steps, self._announce, SegmentCuts.of(topology))
        self.desk = Desk(book, settings_of(topology), self.tally, time.monotonic())
        self._prompt_tokens = topology.max_prompt_tokens
        self._vocabulary = model_facts(Path(topology.model.path), 0).vocabulary
        self._next_save = 0.0
        self._named: set[str] = set()
        self._look_at_version()
        bus.on_reject = self._unreadable

    def hear(self, message: m.Message) -> None:
        """A request, or any worker's sign of life."""
        now = time.monotonic()
        if isinstance(message, g.Remote):
            self._look_at_version()
            answers = self.desk.handle(message, now)
            self._tell_drop(message, answers)
            self._send(message.sender, answers)
        elif isinstance(message, m.Heartbeat):
            self.desk.heartbeat(message.sender, now)

    def tick(self) -> None:
        """Ring for what was committed, end leases that are over, and save the counts now and then."""
        self._ring_bells()
        now = time.monotonic()
        self._look_at_version()
        for lease in self.desk.tick(now):
            text = f"sample {lease.held.uid} was taken back from {lease.name}, which did not extend its lease"
            self.tell("gateway", text, "warning", f"lease of {lease.name}", [lease.held.uid])
        if self.tally.changed and now >= self._next_save:
            self._next_save = now + SAVE_EVERY_S
            self._save()

    def close(self) -> None:
        """Nobody holds anything after an orderly end."""
        self.desk.goodbye()
        if self.tally.workers:
            self._save()

    def _announce(self, message: m.Message) -> None:
        self._bells[type(message)].add(lambda: message)

    def _ring_bells(self) -> None:
        """What was committed in this pass, as one doorbell of each kind."""
        for bell in self._bells.values():
            message = bell.take()
            if message is not None:
                self.bus.send(message)

    def _tell_drop(self, message: g.Remote, answers: list[m.Message]) -> None:
        """A sample that was given up is an accident that a person should read about."""
        if isinstance(message, g.RemoteFail) and message.drop:
            for answer in answers:
                if isinstance(answer, g.GatewayAnswer) and answer.code == "done":
                    text = f"task {message.task} was given up by {message.sender}: {message.drop}: {message.text}"
                    self.tell("gateway", text, "warning", f"{message.drop} {message.sender}", uids_of(message.task))

    def _look_at_version(self) -> None:
        step, version = self.ring.header("version_step"), self.ring.header("version")
        self.steps.note(version, step)
        self.desk.limits = Limits(self._prompt_tokens, self._vocabulary, version)

    def _unreadable(self, rejected: Rejected, target: bytes) -> None:
        about = target.decode("ascii", "replace")
        name = about.partition("/")[0]
        try:
            asked = issubclass(kind_of(f"{name}/"), g.Remote)
        except ValueError:
            return
        if asked:
            code = CODES[rejected.fault]
            self._send(rejected.sender, self.desk.unreadable(rejected.sender, code, name, str(rejected)))

    def _send(self, to: str, answers: list[m.Message]) -> None:
        for answer in answers:
            if isinstance(answer, g.GatewayAnswer) and answer.code in BAD:
                text = f"{to or 'an unnamed sender'}: {answer.text}"
                self.tell("gateway", text, "warning", f"{answer.code} {self._told_apart(to)}", ())
            if not is_address(to):
                return  # a name that no topic can hold: it was counted, and nobody can hear the answer
            try:
                self.bus.send(answer, to)
            except MessageTooLarge as problem:
                self.tally.add(to, "too_large", text=str(problem))

    def _told_apart(self, name: str) -> str:
        """The first names that were refused something have lines of their own in errors.jsonl; all others share one."""
        if len(self._named) < MOST_NAMED:
            self._named.add(name)
        return name if name in self._named else "(others)"

    def _save(self) -> None:
        self.tally.changed = False
        show_whole(self.paths.gateway, {"workers": self.tally.plain()})


def settings_of(topology: Topology) -> Settings:
    """What the desk needs of a topology. Workers from outside never take the entries that the run itself may need."""
    data = topology.data
    return Settings(
        lease_s=topology.limits.lease_s,
        max_message_bytes=topology.bus.max_message_bytes,
        biggest=topology.task_message_bytes,
        most_members=max(0, topology.ring.processes - len(topology.processes()) - RESERVE_PROCESSES),
        reserved=frozenset(address(p.name) for p in topology.processes() if not p.spec.command) | {"launch"},
        welcome=g.GatewayWelcome(
            life=0,
            max_prompt_tokens=topology.max_prompt_tokens,
            seed=topology.run.seed,
            model=topology.model.path,
            prompt_key=data.prompt_key,
            answer_key=topology.reward.answer_key or data.answer_key,
            template=data.template,
        ),
    )


def uids_of(task: str) -> list[int]:
    """The sample of a claim, from its name `slot.seq.uid`; none if it is no such name."""
    digits = task.rpartition(".")[2]
    return [int(digits)] if digits.isascii() and digits.isdigit() else []


def read_counts(path: Path) -> dict[str, Any]:
    """The counts in gateway.json by worker; empty where there are none."""
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    workers = found.get("workers") if isinstance(found, dict) else None
    return workers if isinstance(workers, dict) else {}
