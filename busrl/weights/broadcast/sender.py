"""Weights by broadcast, the learner's side: a new group, a new epoch, whenever the members change.

`publish` copies into a SendBuffer and returns; a thread reads the engines' messages from the ControlServer, forms
groups and sends. Knows nothing of the bus or of models; `callbacks` reports the members of each group.
docs/broadcast.md has the states and the deadlines.

- A group is used until something in it fails once, or an engine joins or leaves; then the next epoch begins.
- No phase waits longer than its deadline. A late member is left out, reported with the phase and the seconds, and may
  join again. Nothing waits for a member whose connection has closed (a process that died).
- A member has a version only once it has confirmed it.
"""

from __future__ import annotations

import atexit
import enum
import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from busrl.errors import UserError, first_line
from busrl.system.device import finish_stream, own_stream
from busrl.weights.base import NOTHING, GroupCallbacks, GroupChange, Sender
from busrl.weights.broadcast.group import (
    HOST,
    ControlConnection,
    ControlServer,
    Group,
    GroupSetup,
    Message,
    Rendezvous,
    open_store,
    pieces,
)
from busrl.weights.sparse import Frames, Shadow
from busrl.weights.tensors import Manifest

log = logging.getLogger("busrl")
IDLE_S = 1.0
DEVICE_CONNECT_S = 60.0


# -- versions to send ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Transfer:
    """A version to send: `data` has all values, with their sums, or the frames from version `base` on."""

    version: int
    step: int
    data: torch.Tensor
    base: int = -1  # not sparse
    sums: tuple[int, ...] = ()


@dataclass
class _Block:
    """A version in the sender's memory; `stamp` is NOTHING if it holds none."""

    data: torch.Tensor
    stamp: tuple[int, int] = NOTHING
    ready: int = 0  # bytes that are complete
    shadow: Shadow | None = None


class SendBuffer:
    """The learner's thread puts versions in, the sending thread takes them out; `wake` is called for a new version.

    - `put` returns when the tensors may change again; a version may be sent while it is still being copied.
    - The block that is being sent is not written to. A version that a newer one overtakes before its turn is never
      sent.
    - With a `threshold` above 0 a version with few changes becomes a frame; every `key_every`th version is full.
    """

    def __init__(
        self, wake: Callable[[], None], *, bucket_bytes: int, threshold: float = 0.0, key_every: int = 32,
        checksum: bool = False, device: str = "cpu",
    ) -> None:
        self.manifest: Manifest | None = None
        self.change = threading.Condition()
        self._wake, self._bucket, self._checksum, self._device = wake, bucket_bytes, checksum, device
        self._threshold, self._key_every = threshold, key_every
        self._blocks: list[_Block] = []
        self._sending: _Block | None = None
        self._frames: Frames[bytes] = Frames()

    def newest(self) -> tuple[int, int]:
        with self.change:
            return max((block.stamp for block in self._blocks), default=NOTHING)

    def put(self, version: int, step: int, tensors: Mapping[str, torch.Tensor]) -> None:
        newest = self.newest()[0]
        if version <= newest:
            raise UserError(f"version {version} is not above {newest}, which is published; versions grow")
        self._prepare(tensors)
        if not self._put_changes(version, step, tensors):
            self._put_all(version, step, tensors)

    def take(self, common: int | None) -> Transfer:
        """The newest version; as frames if all members have version `common` and frames lead from it to the newest."""
        with self.change:
            block = max(self._blocks, key=_stamp_of)
            frames = None if common is None else self._frames.since(common)
            if frames is not None and common is not None:
                return Transfer(*block.stamp, torch.frombuffer(bytearray().join(frames), dtype=torch.uint8), common)
            self._sending = block
            sums = () if block.shadow is None or block.ready < len(block.data) else tuple(block.shadow.sums)
            return Transfer(*block.stamp, block.data, sums=sums)

    def wait_for(self, transfer: Transfer, end: int, timeout_s: float) -> None:
        """Wait until the bytes before `end` are complete; RuntimeError after the timeout."""
        block = self._sending
        if transfer.base >= 0 or block is None:
            return
        with self.change:
            complete = self.change.wait_for(lambda: block.ready >= end or block.stamp == NOTHING, timeout_s)
            if not complete or block.stamp == NOTHING:
                raise RuntimeError(f"the learner did not copy version {transfer.version} within {timeout_s:.1f} s")

    def digest(self, transfer: Transfer) -> int:
        """The digest of all values; 0 if checksums are off or the transfer is sparse."""
        if not self._checksum or self.manifest is None or transfer.base >= 0:
            return 0
        return self.manifest.digest(self.manifest.views(transfer.data.cpu()), transfer.version, transfer.step)

    def sent(self) -> None:
        """Release the last transfer that was taken."""
        with self.change:
            self._sending = None
            self.change.notify_all()

    def _prepare(self, tensors: Mapping[str, torch.Tensor]) -> None:
        if self.manifest is None:
            self.manifest = Manifest.of(dict(tensors))
            size = self.manifest.nbytes
            self._blocks = [_Block(torch.empty(size, dtype=torch.uint8, device=self._device)) for _ in range(2)]
            if self._device == "cpu":
                for block in self._blocks:
                    block.data.zero_()  # the first touch of a page in a copy costs more than its bytes
        self.manifest.check(tensors)

    def _put_changes(self, version: int, step: int, tensors: Mapping[str, torch.Tensor]) -> bool:
        """Make a frame of what changed and update the newest block; False if all values have to be copied."""
        with self.change:
            block = max(self._blocks, key=_stamp_of)
            if block.shadow is None or block is self._sending or block.stamp == NOTHING:
                return False
            base = block.stamp[0]
            frame = block.shadow.frame(tensors, base, version, step, len(block.data))
            if frame is None:
                return False
            self._frames.add(base, frame, len(frame), len(block.data) // 2)
            block.stamp = (version, step)
            self.change.notify_all()
        self._wake()
        return True

    def _put_all(self, version: int, step: int, tensors: Mapping[str, torch.Tensor]) -> None:
        assert self.manifest is not None
        with self.change:
            block = min((block for block in self._blocks if block is not self._sending), key=_stamp_of)
            block.stamp, block.ready = (version, step), 0
            if block.shadow is not None:
                block.shadow.full()
            self._frames.clear()
        self._wake()
        try:
            for ready in self.manifest.gather_pieces(tensors, block.data, self._bucket):
                finish_stream(self._device)  # the sending thread has a stream of its own
                with self.change:
                    block.ready = ready
                    self.change.notify_all()
        except BaseException:
            with self.change:
                block.stamp = NOTHING
                self.change.notify_all()
            raise
        sparse = self._threshold and self._device == "cpu" and Shadow.fits(self.manifest)
        if sparse and block.shadow is None:
            block.shadow = Shadow(self.manifest, block.data, self._threshold, self._key_every, self._checksum)


def _stamp_of(block: _Block) -> tuple[int, int]:
    return block.stamp


# -- sending ---------------------------------------------------------------------------------------------------


class Phase(enum.Enum):
    """Phases of the sending thread. WAITING -> ROLL_CALL -> CONNECTING -> WAITING: an epoch was formed.
    WAITING -> SENDING -> COMMITTING -> WAITING: a version was sent. Any -> WAITING: a failure, or a change of members.
    """

    WAITING = "waiting"
    ROLL_CALL = "roll call"
    CONNECTING = "connecting"
    SENDING = "sending"
    COMMITTING = "commit"


@dataclass
class Member:
    """An engine that has joined: its connection, the last epoch whose roll call it answered, the version it has."""

    name: str
    pid: int
    connection: ControlConnection
    answered: int = 0
    have: int = -1
    has_manifest: bool = False


class BroadcastSender(Sender):
    """Rank 0 of every epoch. A `backend` other than gloo sends from memory of `device`, to the same kind of device.
    `hook` is called with the name of each phase and with "bucket <n>"."""

    def __init__(
        self, file: str | Path, *, timeout_s: float = 10.0, bucket_bytes: int = 16 << 20, checksum: bool = False,
        threshold: float = 0.0, key_every: int = 32, device: str = "cpu", backend: str = "gloo",
        callbacks: GroupCallbacks | None = None,
    ) -> None:
        self.file = Path(file)
        self.epoch = 0
        self.phase = Phase.WAITING
        self._timeout_s, self._phase_s, self._bucket = timeout_s, timeout_s / 3, bucket_bytes
        self._backend, self._device = backend, device
        self._callbacks = callbacks or GroupCallbacks()
        self._server = ControlServer(self.file)
        self._buffer = SendBuffer(
            self._server.waker.wake,
            bucket_bytes=bucket_bytes, threshold=threshold, key_every=key_every, checksum=checksum, device=device,
        )
        self._members: dict[str, Member] = {}
        self._by_connection: dict[ControlConnection, Member] = {}
        self._broken = False  # the group has failed or its members have changed: form another
        self._group: Group | None = None
        self._reasons: list[str] = []
        self._failure = ""
        self._stopping = False
        self._thread = threading.Thread(target=self._serve, name="weights", daemon=True)
        self._thread.start()
        atexit.register(self.close)  # a thread of Gloo that outlives the interpreter would abort the process

    # -- the learner's thread -----------------------------------------------------------------------------------

    def newest(self) -> tuple[int, int]:
        return self._buffer.newest()


    @property
    def group_members(self) -> list[str]:
        """The names of the engines in the group; none while there is no group."""
        return sorted(self._members) if self._group is not None else []

    def publish(self, version: int, step: int, tensors: Mapping[str, torch.Tensor]) -> None:
        self._buffer.put(version, step, tensors)

    def close(self) -> None:
        """End the thread; a transfer in progress ends by its own timeout at the latest."""
        atexit.unregister(self.close)
        self._stopping = True
        self._server.waker.wake()
        self._thread.join(self._timeout_s)
        self._drop_group()
        self._server.close()

    # -- the sending thread: members --------------------------------------------------------------------------

    def _serve(self) -> None:
        own_stream(self._device)
        while not self._stopping:
            try:
                self._turn()
            except Exception as problem:  # no error may end the thread: report it and form another group
                self._give_up_group(f"epoch {self.epoch} failed in the {self.phase.value}: {first_line(str(problem))}")
            self._enter(Phase.WAITING)

    def _turn(self) -> None:
        self._read_messages(0.0 if self.due() else IDLE_S)
        if self.due() is Phase.ROLL_CALL:
            self._form()
        if self._group is not None and self.due() is Phase.SENDING:
            self._send_version(self._group)

    def due(self) -> Phase | None:
        """The phase to begin: a roll call for a new epoch, SENDING if a member lacks the newest version, or None."""
        newest = self.newest()[0]
        if not self._members or newest < 0:
            return None
        if self._group is None or self._broken:
            return Phase.ROLL_CALL
        return Phase.SENDING if any(member.have < newest for member in self._members.values()) else None

    def _read_messages(self, timeout_s: float) -> None:
        """Read and handle the engines' messages, for at most that long."""
        for connection, message in self._server.poll(timeout_s):
            if message is None:
                self._lose(self._by_connection.get(connection), "its connection closed")
            elif message.get("say") == "join":
                self._join(connection, message)
            elif connection in self._by_connection:
                self._handle(self._by_connection[connection], message)

    def _join(self, connection: ControlConnection, message: Message) -> None:
        name = str(message["name"])
        if (before := self._members.get(name)) is not None:
            self._send_to(before, {"say": "replaced"})
            self._remove(before)
        member = Member(name, int(message["pid"]), connection, have=int(message["have"]))
        self._members[name] = self._by_connection[connection] = member
        self._broken = True
        self._reasons.append(f"{name} joined")

    def _handle(self, member: Member, message: Message) -> None:
        epoch, say = message.get("epoch"), message.get("say")
        if say == "here":
            member.answered, member.have = int(message["epoch"]), int(message["have"])
        elif say == "got" and epoch == self.epoch:
            member.have = int(message["version"])
        elif say == "broken" and epoch == self.epoch:
            member.have = int(message["have"])
            self._broken = True
            self._failure = f"epoch {epoch} broke at {member.name} in {message['phase']}: {message['why']}"
            log.info("weights: %s", self._failure)
        elif say == "leave":
            self._lose(member, "left")

    def _lose(self, member: Member | None, why: str) -> None:
        """Remove a member whose connection has ended, or that asked to leave."""
        if member is not None:
            idle = self.phase is Phase.WAITING
            self._leave_out(member, why, "" if idle else f" in the {self.phase.value} of epoch {self.epoch}")

    def _leave_out(self, member: Member, why: str, where: str) -> None:
        cause = f"; {self._failure}" if self._failure else ""
        self._reasons.append(f"{member.name} {why}{cause}")
        self._remove(member)
        if why != "left":
            self._callbacks.missing(member.name, f"{member.name} (pid {member.pid}): {why}{where}{cause}")

    def _remove(self, member: Member) -> None:
        self._members.pop(member.name, None)
        self._by_connection.pop(member.connection, None)
        self._broken = True
        self._server.disconnect(member.connection)

    def _send_to(self, member: Member, message: Message) -> None:
        try:
            member.connection.send(message)
        except OSError as problem:
            self._lose(member, f"does not read its messages ({problem})")

    def _send_all(self, say: str, **more: object) -> None:
        for member in list(self._members.values()):
            self._send_to(member, {"say": say, "epoch": self.epoch, **more})

    # -- the sending thread: an epoch -------------------------------------------------------------------------

    def _form(self) -> None:
        """Try to form an epoch; afterwards `_broken` is True if another epoch is needed."""
        self._drop_group()
        self.epoch += 1
        self._broken = False
        members = [self._members[name] for name in sorted(self._members)]
        self._enter(Phase.ROLL_CALL)
        if not self._call_the_roll(members):
            return
        self._enter(Phase.CONNECTING)
        setup = self._connect(len(members) + 1)
        if setup.group is None or self._broken:
            setup.cancel()
            self._broken = True
            if setup.problem:
                self._failure = f"epoch {self.epoch} did not connect: {setup.problem}"
                log.warning("weights: %s", self._failure)
            return
        self._group = setup.group
        why = "; ".join(self._reasons[-8:]) or self._failure
        self._callbacks.formed(GroupChange(self.epoch, tuple(sorted(self._members)), why))
        self._reasons, self._failure = [], ""

    def _call_the_roll(self, members: list[Member]) -> bool:
        """Call all members; False if one did not answer, which is left out."""
        begun, size = time.monotonic(), len(members) + 1
        for rank, member in enumerate(members, 1):
            call: Message = {"say": "epoch", "epoch": self.epoch, "rank": rank, "size": size}
            if not member.has_manifest and self._buffer.manifest is not None:
                call["manifest"] = self._buffer.manifest.to_json().decode()
                member.has_manifest = True
            self._send_to(member, call)
        return self._all_in_time(begun, lambda: [member for member in members if member.answered != self.epoch])

    def _all_in_time(self, begun: float, missing: Callable[[], list[Member]]) -> bool:
        """Handle messages until no member is `missing`; at the end of the phase's time leave out those that are."""
        deadline = begun + self._phase_s
        while not self._broken and not self._stopping:
            late = missing()
            if not late:
                return True
            if time.monotonic() >= deadline:
                roll_call = self.phase is Phase.ROLL_CALL
                why = "has not answered the roll call" if roll_call else "has not confirmed its version"
                for member in late:  # which may be alive
                    self._leave_out(member, why, f" of epoch {self.epoch} for {time.monotonic() - begun:.1f} s")
                return False
            self._read_messages(deadline - time.monotonic())
        return False

    def _connect(self, size: int) -> GroupSetup:
        """Form the group; returns early if a member is lost meanwhile."""
        store, where, listening = open_store(HOST, self._phase_s)
        rendezvous = Rendezvous(self.epoch, 0, size, where, self._phase_s, self._backend, self._device)
        self._send_all("connect", store=where, timeout_s=self._phase_s, backend=self._backend)
        setup = GroupSetup(rendezvous, self._server.waker.wake, store, listening)
        limit_s = 1.5 * self._phase_s
        # The first group between devices makes their contexts too.
        limit_s = limit_s if self._backend == "gloo" else max(limit_s, DEVICE_CONNECT_S)
        deadline = time.monotonic() + limit_s
        while not setup.ended.is_set() and not self._broken and not self._stopping and time.monotonic() < deadline:
            self._read_messages(0.25)
        if not setup.ended.is_set() and time.monotonic() >= deadline:
            setup.problem = f"still connecting after {limit_s:.1f} s"
        return setup

    # -- the sending thread: a version ------------------------------------------------------------------------

    def _send_version(self, group: Group) -> None:
        common = {member.have for member in self._members.values()}
        transfer = self._buffer.take(common.pop() if len(common) == 1 else None)
        begun = time.monotonic()
        self._enter(Phase.SENDING)
        spans, n = pieces(len(transfer.data), self._bucket), 0
        try:
            self._send_all(
                "send", version=transfer.version, step=transfer.step, base=transfer.base, nbytes=len(transfer.data),
                bucket=self._bucket, sums=list(transfer.sums),
            )
            for n, (start, end) in enumerate(spans):
                self._buffer.wait_for(transfer, end, self._phase_s)
                self._reached(f"bucket {n}")
                group.broadcast(transfer.data[start:end])
            group.finish()
            digest = self._buffer.digest(transfer)
        except RuntimeError as problem:
            where = f"bucket {n} of {len(spans)} of version {transfer.version} after {time.monotonic() - begun:.1f} s"
            self._give_up_group(f"epoch {self.epoch} broke in {where}: {first_line(str(problem))}")
            return
        finally:
            self._buffer.sent()
        self._commit(transfer, digest)

    def _commit(self, transfer: Transfer, digest: int) -> None:
        self._enter(Phase.COMMITTING)
        self._send_all("commit", version=transfer.version, digest=digest)
        self._all_in_time(
            time.monotonic(), lambda: [member for member in self._members.values() if member.have < transfer.version]
        )

    def _give_up_group(self, why: str) -> None:
        log.warning("weights: %s; the learner forms another group", why)
        self._failure = why
        self._drop_group()

    def _drop_group(self) -> None:
        """Closing our connections makes the other members' broadcasts fail at once instead of at their timeout."""
        group, self._group, self._broken = self._group, None, True
        if group is not None:
            group.abandon()

    def _enter(self, phase: Phase) -> None:
        self.phase = phase
        if phase is not Phase.WAITING:
            self._reached(phase.value)
