"""The versions that a broadcasting learner has to send: two blocks, and the frames of changes that lead to the newest.

Used by `weights.broadcast`: the learner's thread puts versions in, the sending thread takes them out. Knows nothing of
members or groups.

- `put` returns when the tensors may change again; a version may be sent while it is still being copied.
- The block that is being sent is not written to; a version that was overtaken before its turn is never sent.
- Frames follow each other without a gap up to the newest version, or there are none.

Weights by broadcast, the learner's side: a group that is formed anew, as a new epoch, whenever its members change.

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
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from busrl.device import finish_stream, own_stream
from busrl.errors import UserError
from busrl.weights.base import NOTHING, Copies, GroupChange, Hook, News
from busrl.weights.broadcast.group import (
    ControlConnection,
    ControlServer,
    Forming,
    Group,
    GroupTimeouts,
    Message,
    Place,
    first_line,
    open_store,
    pieces,
)
from busrl.weights.sparse import Shadow
from busrl.weights.tensors import Manifest

# -- The versions that a broadcasting learner has to send: two blocks, and the frames of changes that lead to ... -----


@dataclass(frozen=True)
class Parcel:
    """What is to be sent: all values in `data`, with the sums that the next frames go on from, or frames from version
    `base` on."""

    version: int
    step: int
    data: torch.Tensor
    base: int = -1  # not sparse
    sums: tuple[int, ...] = ()


@dataclass
class _Block:
    data: torch.Tensor
    stamp: tuple[int, int] = NOTHING
    ready: int = 0  # bytes that are there
    shadow: Shadow | None = None


@dataclass(frozen=True)
class Sparse:
    """`weights.sparse`; threshold 0: never."""

    threshold: float = 0.0
    key_every: int = 32


@dataclass
class _Chain:
    """Frames, each (version before it, bytes), that end at the newest version."""

    frames: list[tuple[int, bytes]] = field(default_factory=list)
    nbytes: int = 0

    def add(self, base: int, frame: bytes, most: int) -> None:
        self.frames.append((base, frame))
        self.nbytes += len(frame)
        while self.nbytes > most:
            self.nbytes -= len(self.frames.pop(0)[1])

    def clear(self) -> None:
        self.frames, self.nbytes = [], 0

    def since(self, version: int) -> bytes | None:
        """The frames that lead from that version to the newest."""
        for k, (base, _) in enumerate(self.frames):
            if base == version:
                return b"".join(frame for _, frame in self.frames[k:])
        return None


class Outbox:
    """Between the two threads. `bell` is called when there is something new."""

    def __init__(
        self,
        bell: Callable[[], None],
        *,
        bucket_bytes: int,
        sparse: Sparse | None = None,
        checksum: bool = False,
        device: str = "cpu",
    ) -> None:
        self.manifest: Manifest | None = None
        self.change = threading.Condition()
        self._bell, self._bucket, self._checksum, self._device = bell, bucket_bytes, checksum, device
        self._sparse = sparse or Sparse()
        self._blocks: list[_Block] = []
        self._sending: _Block | None = None
        self._chain = _Chain()

    def newest(self) -> tuple[int, int]:
        with self.change:
            return max((block.stamp for block in self._blocks), default=NOTHING)

    def put(self, version: int, step: int, named: Mapping[str, torch.Tensor]) -> None:
        """Take a version over."""
        newest = self.newest()[0]
        if version <= newest:
            raise UserError(f"version {version} is not above {newest}, which is published; versions grow")
        self._prepare(named)
        if not self._put_changes(version, step, named):
            self._put_all(version, step, named)

    def take(self, common: int | None) -> Parcel:
        """The newest version, as frames if the members all have version `common` and frames lead on from it."""
        with self.change:
            block = max(self._blocks, key=lambda one: one.stamp)
            frames = None if common is None else self._chain.since(common)
            if frames is not None and common is not None:
                return Parcel(*block.stamp, torch.from_numpy(np.frombuffer(bytearray(frames), np.uint8)), common)
            self._sending = block
            sums = () if block.shadow is None or block.ready < len(block.data) else tuple(block.shadow.sums)
            return Parcel(*block.stamp, block.data, sums=sums)

    def wait_for(self, parcel: Parcel, end: int, timeout_s: float) -> None:
        """Until the bytes before `end` are there; RuntimeError if they do not come."""
        block = self._sending
        if parcel.base >= 0 or block is None:
            return
        with self.change:
            there = self.change.wait_for(lambda: block.ready >= end or block.stamp == NOTHING, timeout_s)
            if not there or block.stamp == NOTHING:
                raise RuntimeError(f"the learner did not copy version {parcel.version} within {timeout_s:.1f} s")

    def digest(self, parcel: Parcel) -> int:
        """Of all values of a parcel that is not sparse; 0 if none is wanted."""
        if not self._checksum or self.manifest is None:
            return 0
        return self.manifest.digest(self.manifest.views(parcel.data.cpu()), parcel.version, parcel.step)

    def sent(self) -> None:
        """The parcel taken last is not needed any more."""
        with self.change:
            self._sending = None
            self.change.notify_all()

    def _prepare(self, named: Mapping[str, torch.Tensor]) -> None:
        if self.manifest is None:
            self.manifest = Manifest.of(dict(named))
            size = self.manifest.nbytes
            self._blocks = [_Block(torch.empty(size, dtype=torch.uint8, device=self._device)) for _ in range(2)]
            for block in self._blocks if self._device == "cpu" else []:
                block.data.zero_()  # a page that is touched for the first time in a copy costs more than its bytes
        self.manifest.check(named)

    def _put_changes(self, version: int, step: int, named: Mapping[str, torch.Tensor]) -> bool:
        """Make a frame of what changed and carry the newest block on; False if all values shall be copied."""
        with self.change:
            block = max(self._blocks, key=lambda one: one.stamp)
            if block.shadow is None or block is self._sending or block.stamp == NOTHING:
                return False
            if block.shadow.since_key + 1 >= self._sparse.key_every:
                return False
            base = block.stamp[0]
            frame = block.shadow.frame(named, base, version, step, len(block.data))
            if frame is None:
                return False
            self._chain.add(base, frame, len(block.data) // 2)
            block.stamp = (version, step)
            self.change.notify_all()
        self._bell()
        return True

    def _put_all(self, version: int, step: int, named: Mapping[str, torch.Tensor]) -> None:
        assert self.manifest is not None
        with self.change:
            block = min((one for one in self._blocks if one is not self._sending), key=lambda one: one.stamp)
            block.stamp, block.ready = (version, step), 0
            if block.shadow is not None:
                block.shadow.full()
            self._chain.clear()
        self._bell()
        try:
            for ready in self.manifest.gather_pieces(named, block.data, self._bucket):
                finish_stream(self._device)  # the sending thread has a stream of its own
                with self.change:
                    block.ready = ready
                    self.change.notify_all()
        except BaseException:
            with self.change:
                block.stamp = NOTHING
                self.change.notify_all()
            raise
        self._start_shadow(block)

    def _start_shadow(self, block: _Block) -> None:
        assert self.manifest is not None
        if not self._sparse.threshold or self._device != "cpu" or not Shadow.fits(self.manifest):
            return
        if block.shadow is None:
            block.shadow = Shadow(self.manifest, block.data, self._sparse.threshold, self._checksum)


# -- Weights by broadcast, the learner's side: a group that is formed anew, as a new epoch, whenever its members ... --


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
    wire: ControlConnection
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
        self._limits, self._bucket = GroupTimeouts(timeout_s), bucket_bytes
        self._backend, self._device = backend, device
        self._news = news or News(lambda change: None, lambda name, text: None)
        self._door = ControlServer(self.file)
        self._outbox = Outbox(
            self._door.bell.ring, bucket_bytes=bucket_bytes, sparse=sparse, checksum=checksum, device=device
        )
        self._members: dict[str, Member] = {}
        self._by_wire: dict[ControlConnection, Member] = {}
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

    def _take_in(self, wire: ControlConnection, message: Message) -> None:
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
                        "backend": self._backend})
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
        }

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
