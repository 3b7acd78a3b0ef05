"""Weights by broadcast, the learner's side: a group that is formed anew, as a new epoch, whenever its members change.

Used by the learner behind `weights.base`. `publish` copies into the outbox and returns; a thread hears the engines
through the door (`weights.door`), forms groups (`weights.group`) and sends. Knows nothing of the bus or of models;
`news` hears who is in each group. docs/membership.md has the states and the deadlines.

- A group is used until something in it fails once, or somebody joins or leaves; then the next epoch begins.
- No phase waits longer than its deadline. Who is late is left out, named with the phase and the seconds; it may come
  back. Who closes its connection (a process that died) is not waited for at all.
- A member has a version when it said so; before that the version counts as not sent.
"""

from __future__ import annotations

import atexit
import enum
import logging
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from busrl.device import own_stream
from busrl.weights.base import NOTHING, Copies, GroupChange, Hook, News
from busrl.weights.door import Door, Message, Wire
from busrl.weights.group import Forming, Group, Limits, Place, first_line, open_store, pieces
from busrl.weights.outbox import Outbox, Parcel, Sparse

log = logging.getLogger("busrl")
IDLE_S = 1.0


class Phase(enum.Enum):
    """What the sending thread is at. WAITING -> ROLL_CALL -> CONNECTING -> WAITING: an epoch was formed.
    WAITING -> SENDING -> COMMITTING -> WAITING: a version went out. Any -> WAITING: it failed, or members changed."""

    WAITING = "waiting"
    ROLL_CALL = "roll call"
    CONNECTING = "connecting"
    SENDING = "sending"
    COMMITTING = "commit"


@dataclass
class Member:
    """An engine that came in: its connection, the epoch that it has answered to, the version that it has."""

    name: str
    pid: int
    wire: Wire
    answered: int = 0
    have: int = -1
    told: bool = False  # the manifest


class BroadcastSender(Copies):
    """Rank 0 of every epoch. `backend` other than gloo sends from memory of `device`, to the same kind of device."""

    def __init__(
        self,
        file: str | Path,
        *,
        timeout_s: float = 10.0,
        bucket_bytes: int = 16 << 20,
        checksum: bool = False,
        sparse: Sparse | None = None,
        device: str = "cpu",
        backend: str = "gloo",
        news: News | None = None,
    ) -> None:
        self.file = Path(file)
        self.epoch = 0
        self.phase = Phase.WAITING
        self.hook: Hook | None = None  # called with each phase, "bucket <n>" too
        self._limits, self._bucket = Limits(timeout_s), bucket_bytes
        self._backend, self._device = backend, device
        self._news = news or News(lambda change: None, lambda name, text: None)
        self._door = Door(self.file)
        self._outbox = Outbox(
            self._door.bell.ring, bucket_bytes=bucket_bytes, sparse=sparse, checksum=checksum, device=device
        )
        self._members: dict[str, Member] = {}
        self._by_wire: dict[Wire, Member] = {}
        self._broken = False  # the group is not what it should be: form it anew
        self._group: Group | None = None
        self._whys: list[str] = []
        self._trouble = ""
        self._stopping = False
        self._thread = threading.Thread(target=self._serve, name="weights", daemon=True)
        self._thread.start()
        atexit.register(self.close)  # a thread of Gloo that outlives the interpreter would abort the process

    # -- the learner's thread -----------------------------------------------------------------------------------

    def newest(self) -> tuple[int, int]:
        return self._outbox.newest()

    def publish(self, version: int, step: int, named: dict[str, torch.Tensor]) -> None:
        self._outbox.put(version, step, named)

    def close(self) -> None:
        """End the thread; a transfer in progress ends by its own timeout at the latest."""
        atexit.unregister(self.close)
        self._stopping = True
        self._door.bell.ring()
        self._thread.join(self._limits.timeout_s)
        self._drop_group()
        self._door.close()

    # -- the sending thread: who is there -----------------------------------------------------------------------

    def _serve(self) -> None:
        own_stream(self._device)
        while not self._stopping:
            try:
                self._turn()
            except Exception as problem:  # must not end the thread: say so, and form the group anew
                log.warning("weights: epoch %d failed (%s); it is formed anew", self.epoch, first_line(problem))
                self._fell_apart(f"{self.phase.value}: {first_line(problem)}")
            self._enter(Phase.WAITING)

    def _turn(self) -> None:
        idle = not self._wants_epoch() and not self._wants_sending()
        self._listen(IDLE_S if idle else 0.0)
        if self._wants_epoch():
            self._form()
        if self._wants_sending() and self._group is not None:
            self._send(self._group)

    def _wants_epoch(self) -> bool:
        stands = self._group is not None and not self._broken
        return bool(self._members) and not stands and self.newest() != NOTHING

    def _wants_sending(self) -> bool:
        return self._group is not None and not self._broken and not self._all_have_it()

    def _all_have_it(self) -> bool:
        newest = self.newest()[0]
        return all(member.have >= newest for member in self._members.values())

    def _listen(self, timeout_s: float) -> None:
        """Hear what the engines say, for at most that long."""
        for wire, message in self._door.poll(timeout_s):
            if message is None:
                self._lose(self._by_wire.get(wire), "its connection closed")
            elif message.get("say") == "join":
                self._take_in(wire, message)
            elif wire in self._by_wire:
                self._hear(self._by_wire[wire], message)

    def _take_in(self, wire: Wire, message: Message) -> None:
        name = str(message["name"])
        if (before := self._members.get(name)) is not None:
            self._tell(before, {"say": "replaced"})
            self._remove(before)
        member = Member(name, int(message["pid"]), wire, have=int(message["have"]))
        self._members[name] = self._by_wire[wire] = member
        self._broken = True
        self._whys.append(f"{name} joined")

    def _hear(self, member: Member, message: Message) -> None:
        epoch, say = message.get("epoch"), message.get("say")
        if say == "here":
            member.answered, member.have = int(message["epoch"]), int(message["have"])
        elif say == "got" and epoch == self.epoch:
            member.have = int(message["version"])
        elif say == "broken" and epoch == self.epoch:
            member.have = int(message["have"])
            self._broken = True
            self._trouble = f"epoch {epoch} broke at {member.name} in {message['phase']}: {message['why']}"
            log.info("weights: %s", self._trouble)
        elif say == "leave":
            self._lose(member, "left")

    def _lose(self, member: Member | None, why: str) -> None:
        if member is None:
            return
        self._remove(member)
        self._whys.append(f"{member.name} {why}")
        if why == "left":
            return
        where = "" if self.phase is Phase.WAITING else f" in the {self.phase.value} of epoch {self.epoch}"
        self._leave_out(member, f"{why}{where}" + (f"; {self._trouble}" if self._trouble else ""))

    def _leave_out(self, member: Member, why: str) -> None:
        text = f"{member.name} (pid {member.pid}): {why}"
        self._news.missing(member.name, text)

    def _late(self, member: Member, seconds: float) -> None:
        """A member that is alive as far as one knows, but silent."""
        self._remove(member)
        what = "has not answered the roll call" if self.phase is Phase.ROLL_CALL else "has not confirmed its version"
        why = f"{what} of epoch {self.epoch} for {seconds:.1f} s" + (f"; {self._trouble}" if self._trouble else "")
        self._whys.append(f"{member.name} {why}")
        self._leave_out(member, why)

    def _remove(self, member: Member) -> None:
        self._members.pop(member.name, None)
        self._by_wire.pop(member.wire, None)
        self._broken = True
        self._door.shut(member.wire)

    def _tell(self, member: Member, message: Message) -> None:
        try:
            member.wire.send(message)
        except OSError as problem:
            self._lose(member, f"does not listen ({problem})")

    def _tell_all(self, message: Message) -> None:
        for member in list(self._members.values()):
            self._tell(member, message)

    # -- the sending thread: an epoch ---------------------------------------------------------------------------

    def _form(self) -> None:
        """One attempt at an epoch; whatever happens meanwhile, `_broken` says whether it is to be tried again."""
        self._drop_group()
        self.epoch += 1
        self._broken = False
        members = [self._members[name] for name in sorted(self._members)]
        self._enter(Phase.ROLL_CALL)
        if not self._call_the_roll(members):
            return
        self._enter(Phase.CONNECTING)
        forming = self._connect(len(members) + 1)
        if forming.group is None or self._broken:
            forming.give_up()
            self._broken = True
            if forming.problem:
                self._trouble = f"epoch {self.epoch} did not connect: {forming.problem}"
                log.warning("weights: %s", self._trouble)
            return
        self._group = forming.group
        self._announce()

    def _call_the_roll(self, members: list[Member]) -> bool:
        """Whether all members answered; who did not is not one any more."""
        begun, size = time.monotonic(), len(members) + 1
        for rank, member in enumerate(members, 1):
            call: Message = {"say": "epoch", "epoch": self.epoch, "rank": rank, "size": size}
            if not member.told and self._outbox.manifest is not None:
                call["manifest"] = self._outbox.manifest.to_json().decode()
                member.told = True
            self._tell(member, call)
        deadline = begun + self._limits.phase_s
        while not self._broken and not self._stopping:
            late = [member for member in members if member.answered != self.epoch]
            if not late:
                return True
            if time.monotonic() >= deadline:
                for member in late:
                    self._late(member, time.monotonic() - begun)
                return False
            self._listen(deadline - time.monotonic())
        return False

    def _connect(self, size: int) -> Forming:
        """Form the group; ends early when somebody is lost meanwhile."""
        store, where = open_store(self._door.host, self._limits.phase_s)
        place = Place(self.epoch, 0, size, where, self._limits.phase_s, self._backend, self._device)
        self._tell_all({"say": "connect", "epoch": self.epoch, "store": where, "timeout_s": self._limits.phase_s,
                        "backend": self._backend})  # fmt: skip
        forming = Forming(place, self._door.bell.ring, store)
        limit_s = self._limits.connecting_s(self._backend)
        deadline = time.monotonic() + limit_s
        while not forming.ended.is_set() and not self._broken and not self._stopping and time.monotonic() < deadline:
            self._listen(0.25)
        if not forming.ended.is_set() and time.monotonic() >= deadline:
            forming.problem = f"still connecting after {limit_s:.1f} s"
        return forming

    def _announce(self) -> None:
        why = "; ".join(self._whys[-8:]) or self._trouble
        self._news.formed(GroupChange(self.epoch, tuple(sorted(self._members)), why))
        self._whys, self._trouble = [], ""

    # -- the sending thread: a version --------------------------------------------------------------------------

    def _send(self, group: Group) -> None:
        """Send the newest version to the group."""
        common = {member.have for member in self._members.values()}
        parcel = self._outbox.take(common.pop() if len(common) == 1 else None)
        begun = time.monotonic()
        self._enter(Phase.SENDING)
        spans, n = pieces(len(parcel.data), self._bucket), 0
        try:
            self._tell_all(self._letter(parcel, group))
            for n, (start, end) in enumerate(spans):
                self._outbox.wait_for(parcel, end, self._limits.phase_s)
                self._call_hook(f"bucket {n}")
                group.broadcast(parcel.data[start:end])
            group.finish()
            digest = self._outbox.digest(parcel) if parcel.base < 0 else 0
        except RuntimeError as problem:
            seconds = time.monotonic() - begun
            where = f"bucket {n} of {len(spans)} of version {parcel.version}"
            self._fell_apart(f"epoch {group.epoch} broke in {where} after {seconds:.1f} s: {first_line(problem)}")
            return
        finally:
            self._outbox.sent()
        self._commit(parcel, digest)

    def _letter(self, parcel: Parcel, group: Group) -> Message:
        return {
            "say": "send", "epoch": group.epoch, "version": parcel.version, "step": parcel.step, "base": parcel.base,
            "nbytes": len(parcel.data), "bucket": self._bucket, "sums": list(parcel.sums),
        }  # fmt: skip

    def _commit(self, parcel: Parcel, digest: int) -> None:
        """Wait until all members have the version in one piece."""
        self._enter(Phase.COMMITTING)
        self._tell_all({"say": "commit", "epoch": self.epoch, "version": parcel.version, "digest": digest})
        begun = time.monotonic()
        deadline = begun + self._limits.phase_s
        while not self._broken and not self._stopping:
            late = [member for member in self._members.values() if member.have < parcel.version]
            if not late:
                return
            if time.monotonic() >= deadline:
                for member in late:
                    self._late(member, time.monotonic() - begun)
                return
            self._listen(deadline - time.monotonic())

    def _fell_apart(self, why: str) -> None:
        log.warning("weights: %s; the group is formed anew", why)
        self._trouble = why
        self._drop_group()

    def _drop_group(self) -> None:
        """Closing our connections makes the other members' broadcasts fail at once instead of at their timeout."""
        group, self._group, self._broken = self._group, None, True
        if group is not None:
            group.abandon()

    def _enter(self, phase: Phase) -> None:
        self.phase = phase
        if phase is not Phase.WAITING:
            self._call_hook(phase.value)

    def _call_hook(self, point: str) -> None:
        if self.hook is not None:
            self.hook(point)

