"""The newest version that an engine has received by broadcast, and how the engine's tensors come up to it.

Used by `weights.broadcast_receiver`, which holds its lock around every call. Knows nothing of groups.

- `stamp` never goes back. The block holds that version whole, or nothing may be taken from it (`usable` is False).
- Tensors that hold an earlier version get the frames since, all others the whole block.

Weights by broadcast, an engine's side: a member of the learner's group, with the newest version at hand.

Used by every process that runs the model, behind `weights.base`. A thread does what the learner says over the control
connection (`weights.door`) and receives into one of two blocks; `fetch` copies from the other, while the engine stands
between two steps. Knows nothing of the bus or of models. docs/membership.md has the states and the deadlines.

- The block that `fetch` reads only ever changes from one complete version to another.
- The newest version stays available while there is no learner. A version is never followed by an older one.
- The thread never waits for the learner without hearing whether it has given the epoch up, but for one bucket, which
  has its own deadline.
"""

from __future__ import annotations

import atexit
import enum
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch

from busrl.device import finish_stream, own_stream
from busrl.errors import WeightsTimeout
from busrl.weights.base import NOTHING, Kind
from busrl.weights.broadcast.group import (
    Bell,
    ControlConnection,
    Forming,
    Group,
    GroupTimeouts,
    Message,
    Place,
    first_line,
    pieces,
    ready,
    secret_of,
)
from busrl.weights.sparse import Frame, Refused, apply, split, unpack
from busrl.weights.tensors import BoundTensors, Manifest, is_plain

# -- The newest version that an engine has received by broadcast, and how the engine's tensors come up to it ----------


log = logging.getLogger("busrl")


class ReceivedVersion:
    """One block, its version, and the frames that led to it."""

    def __init__(self) -> None:
        self.manifest: Manifest | None = None
        self.stamp = NOTHING
        self.usable = False
        self._block = torch.empty(0, dtype=torch.uint8)
        self._sums: list[int] = []
        self._frames: list[Frame] = []
        self._held, self._held_version, self._held_sums = BoundTensors(), -1, [0]

    @property
    def offered(self) -> tuple[int, int]:
        """What `fetch` would give now."""
        return self.stamp if self.usable else NOTHING

    def outdate(self) -> None:
        """The next version is of another layout: nothing may follow this one."""
        self.usable = False

    def replace(
        self, manifest: Manifest, block: torch.Tensor, stamp: tuple[int, int], sums: Sequence[int]
    ) -> torch.Tensor:
        """A whole version has come, with the sums of the changes that the sender has counted into it; none: zeros.

        Returns the block that is not needed any more.
        """
        if stamp[0] < self.stamp[0] or (stamp[0] == self.stamp[0] and self.usable):
            return block  # it is here already, or a newer one is
        # Before anything changes: the block that is read now must never be handed out as the one to receive into.
        spare = self._block if len(self._block) == len(block) else torch.empty_like(block)
        self._block = block
        if self.manifest != manifest:
            self._held_version = -1
        self.manifest, self.stamp, self.usable = manifest, stamp, True
        self._sums, self._frames = list(sums) or [0] * len(manifest.entries), []
        return spare

    def follow(self, frames: Sequence[Frame]) -> None:
        """Changes have come. Refused: the block is of no use any more, a whole version has to come."""
        assert self.manifest is not None
        views = self.manifest.views(self._block)
        for frame in frames:
            if frame.version <= self.stamp[0]:
                continue
            try:
                if not self.usable or frame.base != self.stamp[0]:
                    raise Refused(f"version {frame.version} follows {frame.base}, here is {self.stamp[0]}")
                apply(frame, self.manifest, views, self._sums)
                if frame.whole and self.manifest.digest(views, frame.version, frame.step) != frame.whole:
                    raise Refused(f"the values of version {frame.version} do not match their digest")
            except Refused:
                self.usable = False
                raise
            self.stamp = (frame.version, frame.step)
            self._remember(frame)

    def fetch(self, params: dict[str, torch.Tensor]) -> None:
        """Bring the tensors to this version; it is usable."""
        assert self.manifest is not None
        self.manifest.check(params)
        if not self._catch_up(params):
            self._held_version = -1
            self.manifest.scatter(self._block, params)
            self._held_sums = list(self._sums)
        self._held.take(params)
        self._held_version = self.stamp[0]

    def _catch_up(self, params: dict[str, torch.Tensor]) -> bool:
        """Put the frames since the tensors' version in place; False if that is not possible."""
        if self._held_version < 0 or not self._held.same(params) or self.manifest is None:
            return False
        if self._held_version == self.stamp[0]:
            return True
        first = next((k for k, frame in enumerate(self._frames) if frame.base == self._held_version), None)
        if first is None:
            return False
        self._held_version = -1  # until all is in place
        try:
            for frame in self._frames[first:]:
                apply(frame, self.manifest, params, self._held_sums)
                if frame.whole and all(map(is_plain, params.values())):
                    self._compare(frame, params)
        except Refused as problem:
            log.warning("weights: %s; all values are taken", problem)
            return False
        return True

    def _compare(self, frame: Frame, params: dict[str, torch.Tensor]) -> None:
        assert self.manifest is not None
        if self.manifest.digest(params, frame.version, frame.step) != frame.whole:
            raise Refused(f"the values of version {frame.version} do not match their digest")

    def _remember(self, frame: Frame) -> None:
        """Keep frames as long as they are less than half of the block."""
        self._frames.append(frame)
        size = sum(len(part.indices) + len(part.values) for one in self._frames for part in one.parts)
        while size > len(self._block) // 2:
            gone = self._frames.pop(0)
            size -= sum(len(part.indices) + len(part.values) for part in gone.parts)


# -- Weights by broadcast, an engine's side: a member of the learner's group, with the newest version at hand ---------


LISTEN_S = 1.0
AGAIN_S = 0.1


class ReceiveState(enum.Enum):
    """LOOKING -> OUTSIDE (connected, asked to be let in) -> ROLL_CALL -> CONNECTING -> MEMBER; MEMBER -> RECEIVING ->
    MEMBER. A new epoch: any of these -> ROLL_CALL. Something fails: -> OUTSIDE. The connection ends: -> LOOKING.
    REPLACED is the end: another process has taken the name."""

    LOOKING = "looking for the learner's address"
    OUTSIDE = "waiting to be taken into the learner's group"
    ROLL_CALL = "in the roll call"
    CONNECTING = "connecting with the other members"
    MEMBER = "a member of the group"
    RECEIVING = "receiving"
    REPLACED = "another process has taken its name"


class BroadcastReceiver:
    """A member called `name`, which takes versions into memory of `device`: a CPU's with gloo, else its own."""

    kind: Kind = "tensors"

    def __init__(self, file: str | Path, name: str, *, timeout_s: float = 10.0, device: str = "cpu") -> None:
        self.file = Path(file)
        self.name = name
        self.hook: Callable[[str], None] | None = None  # called with "<phase> <n>"; for fault tests
        self.state = ReceiveState.LOOKING
        self._limits, self._device = GroupTimeouts(timeout_s), device
        self._problem = ""
        self._epoch = 0
        self._rank = self._size = 0
        self._group: Group | None = None
        self._forming: Forming | None = None
        self._manifest: Manifest | None = None
        self._front = ReceivedVersion()
        self._back = torch.empty(0, dtype=torch.uint8)
        self._arrived = threading.Condition()
        self._heard: deque[Message] = deque()
        self._bell = Bell()
        self._stopping = False
        self._thread = threading.Thread(target=self._serve, name="weights", daemon=True)
        self._thread.start()
        atexit.register(self.close)  # a thread of Gloo that outlives the interpreter would abort the process

    # -- the engine's thread ------------------------------------------------------------------------------------

    def newest(self) -> tuple[int, int]:
        return self._front.offered

    def wait_for(self, version: int, timeout_s: float) -> tuple[int, int]:
        with self._arrived:
            if not self._arrived.wait_for(lambda: self._front.offered[0] >= version, timeout_s):
                newest = self._front.offered[0]
                raise WeightsTimeout(
                    f"{self.name}: no version {version} after {timeout_s:g} s, newest {newest}; {self._where()}"
                )
            return self._front.offered

    def fetch(self, params: dict[str, torch.Tensor]) -> tuple[int, int]:
        with self._arrived:
            if self._front.stamp == NOTHING:
                raise WeightsTimeout(f"{self.name}: no version has arrived; {self._where()}")
            # Changes that did not fit took the version away that `newest` has just named; a whole one is on its way.
            if not self._arrived.wait_for(lambda: self._front.usable, self._limits.timeout_s):
                raise WeightsTimeout(f"{self.name}: no whole version for {self._limits.timeout_s:g} s; {self._where()}")
            self._front.fetch(params)
            finish_stream(self._device)  # what it was read from may be received into after the next version
            return self._front.stamp

    def close(self) -> None:
        """Leave; a bucket in progress ends by its own deadline at the latest."""
        atexit.unregister(self.close)
        self._stopping = True
        self._bell.ring()
        self._thread.join(self._limits.timeout_s)
        if not self._thread.is_alive():
            self._bell.close()

    def _where(self) -> str:
        text = f"{self.state.value} (epoch {self._epoch})" if self._epoch else self.state.value
        return f"{text}; {self._problem}" if self._problem else text

    # -- the receiving thread -----------------------------------------------------------------------------------

    def _serve(self) -> None:
        own_stream(self._device)
        while not self._stopping and self.state is not ReceiveState.REPLACED:
            self.state = ReceiveState.LOOKING
            try:
                self._follow(self.file.read_text())
            except (OSError, ValueError) as problem:  # no file yet, or a learner that is gone
                log.debug("weights: %s: %s", self.name, problem)
            except Exception as problem:  # must not end the thread
                self._problem = f"{type(problem).__name__}: {first_line(problem)}"
                log.warning("weights: %s: %s", self.name, self._problem)
            self._drop_group()
            if not self._stopping and self.state is not ReceiveState.REPLACED:
                self._pause(AGAIN_S)

    def _follow(self, address: str) -> None:
        """Do what the learner says until it is gone (OSError), we stop, or our name is taken."""
        wire = ControlConnection.to(address, self._limits.phase_s)
        self._heard.clear()
        try:
            wire.send({"say": "join", "secret": secret_of(address), "name": self.name, "pid": os.getpid(),
                       "have": -1})
            self.state, self._epoch = ReceiveState.OUTSIDE, 0
            self._manifest = None
            while not self._stopping and self.state is not ReceiveState.REPLACED:
                message = self._next(wire)
                if message is not None:
                    self._act(wire, message)
            if self._stopping:
                wire.send({"say": "leave"})
        finally:
            wire.close()

    def _next(self, wire: ControlConnection) -> Message | None:
        """The next line, or None after a while or when a group has been formed."""
        if not self._heard:
            heard = ready([wire, self._bell], LISTEN_S)
            if self._bell in heard:
                self._bell.still()
            if wire in heard:
                self._heard.extend(wire.read())
        self._look_at_forming(wire)
        return self._heard.popleft() if self._heard else None

    def _act(self, wire: ControlConnection, message: Message) -> None:
        say = message.get("say")
        if say == "replaced":
            self.state = ReceiveState.REPLACED
        elif say == "epoch":
            self._answer(wire, message)
        elif message.get("epoch") != self._epoch:
            return  # of an epoch that is over
        elif say == "connect":
            self._connect(message)
        elif say == "send":
            self._receive(wire, message)

    def _answer(self, wire: ControlConnection, message: Message) -> None:
        """The roll call of a new epoch."""
        self._drop_group()
        self._epoch, self._rank, self._size = int(message["epoch"]), int(message["rank"]), int(message["size"])
        self.state = ReceiveState.ROLL_CALL
        self._call_hook(f"roll call {self._epoch}")
        if "manifest" in message:
            self._call_hook("manifest")
            self._manifest = Manifest.from_json(message["manifest"].encode())
            if self._front.manifest != self._manifest:
                self._front.outdate()
            size = self._manifest.nbytes
            if len(self._back) != size:
                self._back = torch.zeros(size, dtype=torch.uint8, device=self._device)
        wire.send({"say": "here", "epoch": self._epoch, "have": self._have()})

    def _have(self) -> int:
        """The version that frames may follow."""
        return self._front.stamp[0] if self._front.usable else -1

    def _connect(self, message: Message) -> None:
        self.state = ReceiveState.CONNECTING
        self._call_hook(f"connect {self._epoch}")
        place = Place(
            self._epoch, self._rank, self._size, str(message["store"]), float(message["timeout_s"]),
            str(message["backend"]), self._device,
        )
        self._forming = Forming(place, self._bell.ring)

    def _look_at_forming(self, wire: ControlConnection) -> None:
        """Take the group over that a thread has formed, if this is the epoch still."""
        forming = self._forming
        if forming is None or not forming.ended.is_set():
            return
        self._forming = None
        if forming.place.epoch != self._epoch:
            return
        if forming.group is None:
            self._complain(wire, "connecting", forming.problem)
            return
        self._group, self.state, self._problem = forming.group, ReceiveState.MEMBER, ""

    def _receive(self, wire: ControlConnection, message: Message) -> None:
        """Take a version into the block behind the front, then make it the front."""
        if self._forming is not None:  # the others were quicker than our thread
            self._forming.ended.wait(self._limits.phase_s)
            self._look_at_forming(wire)
        if self._group is None or self._manifest is None:
            return
        self.state = ReceiveState.RECEIVING
        point, begun = "bucket 0", time.monotonic()
        try:
            whole = int(message["base"]) < 0
            data = self._back if whole else torch.empty(int(message["nbytes"]), dtype=torch.uint8)
            for n, (start, end) in enumerate(pieces(int(message["nbytes"]), int(message["bucket"]))):
                point = f"bucket {n}"
                self._call_hook(point)
                self._group.broadcast(data[start:end])
            self._group.finish()
            point = "commit"
            self._call_hook(point)
            self._commit(message, data, self._await_commit(wire, message))
        except (RuntimeError, Refused) as problem:
            seconds = time.monotonic() - begun
            self._complain(wire, f"{point} of version {message['version']}", f"{first_line(problem)} ({seconds:.1f} s)")
            return
        wire.send({"say": "got", "epoch": self._epoch, "version": message["version"]})
        self.state = ReceiveState.MEMBER

    def _await_commit(self, wire: ControlConnection, message: Message) -> int:
        """The digest that the learner names when it has sent all; RuntimeError if it does not."""
        deadline = time.monotonic() + self._limits.phase_s
        while time.monotonic() < deadline and not self._stopping:
            while self._heard:
                said = self._heard.popleft()
                if said.get("say") == "commit" and said.get("epoch") == self._epoch:
                    return int(said["digest"])
                if said.get("say") in ("epoch", "replaced"):
                    self._heard.appendleft(said)
                    raise RuntimeError("the learner has given the epoch up")
            heard = ready([wire, self._bell], deadline - time.monotonic())
            if self._bell in heard:
                self._bell.still()
            if wire in heard:
                self._heard.extend(wire.read())
        raise RuntimeError(f"no word from the learner that version {message['version']} is complete")

    def _commit(self, message: Message, data: torch.Tensor, digest: int) -> None:
        manifest, stamp = self._manifest, (int(message["version"]), int(message["step"]))
        assert manifest is not None
        if int(message["base"]) >= 0:
            frames = [unpack(one) for one in split(np.asarray(data.numpy()))]
            with self._arrived:
                self._front.follow(frames)
                self._arrived.notify_all()
            return
        if digest and manifest.digest(manifest.views(data.cpu()), *stamp) != digest:
            raise Refused(f"the values of version {stamp[0]} do not match their digest")
        with self._arrived:
            self._back = self._front.replace(manifest, data, stamp, [int(one) for one in message["sums"]])
            self._arrived.notify_all()

    def _complain(self, wire: ControlConnection, phase: str, why: str) -> None:
        """Say that the epoch has failed for us; the learner begins another."""
        self._drop_group()
        self.state, self._problem = ReceiveState.OUTSIDE, f"epoch {self._epoch} broke in {phase}: {why}"
        log.info("weights: %s: %s", self.name, self._problem)
        wire.send({"say": "broken", "epoch": self._epoch, "phase": phase, "why": why[:300], "have": self._have()})

    def _drop_group(self) -> None:
        if self._group is not None:
            self._group.abandon()
            self._group = None
        if self._forming is not None:
            self._forming.give_up()
            self._forming = None

    def _pause(self, seconds: float) -> None:
        if ready([self._bell], seconds):
            self._bell.still()

    def _call_hook(self, point: str) -> None:
        if self.hook is not None:
            self.hook(point)
