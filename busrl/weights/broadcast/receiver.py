"""Weights by broadcast, an engine's side: a member of the learner's group, with the newest version in memory.

Used by every process that runs the model. A thread follows the learner's control messages and receives into one of two
blocks; `fetch` copies from the other while the engine is between two steps. Knows nothing of the bus or of models.
docs/broadcast.md has the states and the deadlines.

- The block that `fetch` reads changes only from one complete version to another, and never back to an older one.
- The newest version stays available while there is no learner.
- The thread never waits for the learner without reading its messages, except for one bucket, which has a deadline.
"""

from __future__ import annotations

import atexit
import enum
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from busrl.errors import WeightsTimeout, first_line
from busrl.system.device import finish_stream, own_stream
from busrl.weights.base import NOTHING, TensorReceiver
from busrl.weights.broadcast.group import (
    ControlConnection,
    Group,
    GroupSetup,
    Message,
    Rendezvous,
    Waker,
    pieces,
    ready,
)
from busrl.weights.sparse import Follower, Frame, FrameError, Frames, compare, split, unpack
from busrl.weights.tensors import Manifest

log = logging.getLogger("busrl")
READ_S = 1.0
RETRY_S = 0.1


class ReceivedVersion:
    """The newest version that has arrived: a block, its (version, step), and the frames that led to it. Not
    thread-safe: BroadcastReceiver holds its lock around every call. `stamp` never goes back; nothing may be copied from
    the block while `usable` is False."""

    def __init__(self) -> None:
        self.manifest: Manifest | None = None
        self.stamp = NOTHING
        self.usable = False  # False also while the next version has another layout: no frame may follow this one
        self._block = torch.empty(0, dtype=torch.uint8)
        self._here, self._model, self._model_version = Follower(), Follower(), -1
        self._frames: Frames[Frame] = Frames()

    @property
    def offered(self) -> tuple[int, int]:
        """The version that `fetch` would copy now."""
        return self.stamp if self.usable else NOTHING

    def expect(self, manifest: Manifest) -> None:
        """Versions of this layout come next: no frame of them may follow a version of another layout."""
        if self.manifest != manifest:
            self.usable = False

    def replace(
        self, manifest: Manifest, block: torch.Tensor, stamp: tuple[int, int], sums: Sequence[int]
    ) -> torch.Tensor:
        """Take a whole version, with the sums of the changes that the sender has counted into it (none: zeros). Returns
        the block that is free to receive the next version into."""
        if stamp[0] < self.stamp[0] or (stamp[0] == self.stamp[0] and self.usable):
            return block  # this version, or a newer one, is here already
        # This comes first: the block that `fetch` reads must never be the block to receive into.
        spare = self._block if len(self._block) == len(block) else torch.empty_like(block)
        self._block = block
        if self.manifest != manifest:
            self._model.forget()
        self.manifest, self.stamp, self.usable = manifest, stamp, True
        self._here.start(manifest, manifest.views(block), sums)
        self._frames.clear()
        return spare

    def follow(self, frames: Sequence[Frame]) -> None:
        """Apply frames. After FrameError the block is useless until a whole version comes."""
        for frame in frames:
            if frame.version <= self.stamp[0]:
                continue
            try:
                if not self.usable or frame.base != self.stamp[0]:
                    raise FrameError(f"version {frame.version} follows {frame.base}, this engine has {self.stamp[0]}")
                self._here.follow([frame])
            except FrameError:
                self.usable = False
                raise
            self.stamp = (frame.version, frame.step)
            self._frames.add(frame.base, frame, frame.nbytes, len(self._block) // 2)

    def fetch(self, params: dict[str, torch.Tensor]) -> None:
        """Bring the tensors to this version, which must be usable."""
        assert self.manifest is not None
        self.manifest.check(params)
        if not self._catch_up(params):
            self._model.forget()
            self.manifest.scatter(self._block, params)
            self._model.start(self.manifest, params, self._here.sums)
        self._model_version = self.stamp[0]

    def _catch_up(self, params: dict[str, torch.Tensor]) -> bool:
        """Apply the frames since the tensors' version; False if that is not possible."""
        if not self._model.holds(params):
            return False
        frames = [] if self._model_version == self.stamp[0] else self._frames.since(self._model_version)
        if frames is None:
            return False
        try:
            self._model.follow(frames)
        except FrameError as problem:
            log.warning("weights: %s; all values are copied", problem)
            return False
        return True


class ReceiveState(enum.Enum):
    """States of a receiver. LOOKING -> OUTSIDE (connected, asked to join) -> ROLL_CALL -> CONNECTING -> MEMBER;
    MEMBER -> RECEIVING -> MEMBER. A new epoch: any of these -> ROLL_CALL. A failure: -> OUTSIDE. The end of the
    connection: -> LOOKING. REPLACED is the end: another process has taken the name."""

    LOOKING = "looking for the learner"
    OUTSIDE = "waiting to join the learner's group"
    ROLL_CALL = "in the roll call"
    CONNECTING = "connecting with the other members"
    MEMBER = "a member of the group"
    RECEIVING = "receiving"
    REPLACED = "another process has taken its name"


class BroadcastReceiver(TensorReceiver):
    """A member called `name`, which receives versions into memory of `device`: the CPU's with gloo, else its own."""

    def __init__(self, file: str | Path, name: str, *, timeout_s: float = 10.0, device: str = "cpu") -> None:
        self.file = Path(file)
        self.name = name
        self.state = ReceiveState.LOOKING
        self._timeout_s, self._phase_s, self._device = timeout_s, timeout_s / 3, device
        self._problem = ""
        self._epoch = 0
        self._rank = self._size = 0
        self._group: Group | None = None
        self._setup: GroupSetup | None = None
        self._manifest: Manifest | None = None
        self._received = ReceivedVersion()
        self._spare = torch.empty(0, dtype=torch.uint8)
        self._arrived = threading.Condition()
        self._messages: deque[Message] = deque()
        self._waker = Waker()
        self._stopping = False
        self._thread = threading.Thread(target=self._serve, name="weights", daemon=True)
        self._thread.start()
        atexit.register(self.close)  # a thread of Gloo that outlives the interpreter would abort the process

    # -- the engine's thread ------------------------------------------------------------------------------------

    def newest(self) -> tuple[int, int]:
        return self._received.offered

    def wait_for(self, version: int, timeout_s: float) -> tuple[int, int]:
        with self._arrived:
            if not self._arrived.wait_for(lambda: self._received.offered[0] >= version, timeout_s):
                newest = self._received.offered[0]
                raise WeightsTimeout(
                    f"{self.name}: no version {version} after {timeout_s:g} s, newest {newest}; {self._where()}"
                )
            return self._received.offered

    def fetch(self, params: dict[str, torch.Tensor]) -> tuple[int, int]:
        with self._arrived:
            if self._received.stamp == NOTHING:
                raise WeightsTimeout(f"{self.name}: no version has arrived; {self._where()}")
            # A frame that did not fit may have made the version of `newest` unusable; a whole version will come.
            if not self._arrived.wait_for(lambda: self._received.usable, self._timeout_s):
                raise WeightsTimeout(f"{self.name}: no whole version for {self._timeout_s:g} s; {self._where()}")
            self._received.fetch(params)
            finish_stream(self._device)  # the block that was read may receive a later version
            return self._received.stamp

    def close(self) -> None:
        """Leave; a bucket in progress ends by its own deadline at the latest."""
        atexit.unregister(self.close)
        self._stopping = True
        self._waker.wake()
        self._thread.join(self._timeout_s)
        if not self._thread.is_alive():
            self._waker.close()

    def _where(self) -> str:
        text = f"{self.state.value} (epoch {self._epoch})" if self._epoch else self.state.value
        return f"{text}; {self._problem}" if self._problem else text

    # -- the receiving thread -----------------------------------------------------------------------------------

    def _serve(self) -> None:
        own_stream(self._device)
        while not self._stopping and self.state is not ReceiveState.REPLACED:
            self.state = ReceiveState.LOOKING
            try:
                self._follow()
            except (OSError, ValueError) as problem:  # no file yet, or the learner is gone
                log.debug("weights: %s: %s", self.name, problem)
            except Exception as problem:  # no error may end the thread
                self._problem = f"{type(problem).__name__}: {first_line(str(problem))}"
                log.warning("weights: %s: %s", self.name, self._problem)
            self._drop_group()
            if self.state is not ReceiveState.REPLACED and ready([self._waker], 0.0 if self._stopping else RETRY_S):
                self._waker.clear()

    def _follow(self) -> None:
        """Follow the learner until it is gone (OSError), this receiver stops, or another process takes its name."""
        connection = ControlConnection.to(self.file)
        self._messages.clear()
        try:
            connection.send({"say": "join", "name": self.name, "pid": os.getpid(), "have": -1})
            self.state, self._epoch = ReceiveState.OUTSIDE, 0
            self._manifest = None
            while not self._stopping and self.state is not ReceiveState.REPLACED:
                if not self._messages:
                    self._read(connection, READ_S)
                self._adopt_group(connection)
                if self._messages:
                    self._act(connection, self._messages.popleft())
            if self._stopping:
                connection.send({"say": "leave"})
        finally:
            connection.close()

    def _act(self, connection: ControlConnection, message: Message) -> None:
        say = message.get("say")
        if say == "replaced":
            self.state = ReceiveState.REPLACED
        elif say == "epoch":
            self._answer(connection, message)
        elif message.get("epoch") != self._epoch:
            return  # of an epoch that is over
        elif say == "connect":
            self._connect(message)
        elif say == "send":
            self._receive(connection, message)

    def _answer(self, connection: ControlConnection, message: Message) -> None:
        """Answer the roll call of a new epoch."""
        self._drop_group()
        self._epoch, self._rank, self._size = int(message["epoch"]), int(message["rank"]), int(message["size"])
        self.state = ReceiveState.ROLL_CALL
        self._reached(f"roll call {self._epoch}")
        if "manifest" in message:
            self._reached("manifest")
            self._manifest = Manifest.from_json(message["manifest"].encode())
            self._received.expect(self._manifest)
            size = self._manifest.nbytes
            if len(self._spare) != size:
                self._spare = torch.zeros(size, dtype=torch.uint8, device=self._device)
        connection.send({"say": "here", "epoch": self._epoch, "have": self._received.offered[0]})

    def _connect(self, message: Message) -> None:
        self.state = ReceiveState.CONNECTING
        self._reached(f"connect {self._epoch}")
        rendezvous = Rendezvous(
            self._epoch, self._rank, self._size, str(message["store"]), float(message["timeout_s"]),
            str(message["backend"]), self._device,
        )
        self._setup = GroupSetup(rendezvous, self._waker.wake)

    def _adopt_group(self, connection: ControlConnection) -> None:
        """Use the group that a thread has formed, if its epoch is still the current one."""
        setup = self._setup
        if setup is None or not setup.ended.is_set():
            return
        self._setup = None
        if setup.rendezvous.epoch != self._epoch:
            return
        if setup.group is None:
            self._report_broken(connection, "connecting", setup.problem)
            return
        self._group, self.state, self._problem = setup.group, ReceiveState.MEMBER, ""

    def _receive(self, connection: ControlConnection, message: Message) -> None:
        """Receive a version into the spare block, then make it the newest."""
        if self._setup is not None:  # the other members connected faster than our thread
            self._setup.ended.wait(self._phase_s)
            self._adopt_group(connection)
        if self._group is None or self._manifest is None:
            return
        self.state = ReceiveState.RECEIVING
        point, begun = "bucket 0", time.monotonic()
        try:
            full = int(message["base"]) < 0
            data = self._spare if full else torch.empty(int(message["nbytes"]), dtype=torch.uint8)
            for n, (start, end) in enumerate(pieces(int(message["nbytes"]), int(message["bucket"]))):
                point = f"bucket {n}"
                self._reached(point)
                self._group.broadcast(data[start:end])
            self._group.finish()
            point = "commit"
            self._reached(point)
            self._commit(message, data, self._await_commit(connection, message))
        except (RuntimeError, FrameError) as problem:
            why = f"{first_line(str(problem))} ({time.monotonic() - begun:.1f} s)"
            self._report_broken(connection, f"{point} of version {message['version']}", why)
            return
        connection.send({"say": "got", "epoch": self._epoch, "version": message["version"]})
        self.state = ReceiveState.MEMBER

    def _await_commit(self, connection: ControlConnection, message: Message) -> int:
        """Wait for the digest that the learner sends at the end; RuntimeError if none comes."""
        deadline = time.monotonic() + self._phase_s
        while time.monotonic() < deadline and not self._stopping:
            while self._messages:
                other = self._messages.popleft()
                if other.get("say") == "commit" and other.get("epoch") == self._epoch:
                    return int(other["digest"])
                if other.get("say") in ("epoch", "replaced"):
                    self._messages.appendleft(other)
                    raise RuntimeError("the learner has given the epoch up")
            self._read(connection, deadline - time.monotonic())
        raise RuntimeError(f"the learner did not confirm that version {message['version']} is complete")

    def _read(self, connection: ControlConnection, timeout_s: float) -> None:
        readable = ready([connection, self._waker], timeout_s)
        if self._waker in readable:
            self._waker.clear()
        if connection in readable:
            self._messages.extend(connection.read())

    def _commit(self, message: Message, data: torch.Tensor, digest: int) -> None:
        manifest, stamp = self._manifest, (int(message["version"]), int(message["step"]))
        assert manifest is not None
        if int(message["base"]) >= 0:
            frames = [unpack(frame) for frame in split(np.asarray(data.numpy()))]
            with self._arrived:
                self._received.follow(frames)
                self._arrived.notify_all()
            return
        if digest:
            compare(manifest, manifest.views(data.cpu()), stamp, digest)
        with self._arrived:
            self._spare = self._received.replace(manifest, data, stamp, [int(part_sum) for part_sum in message["sums"]])
            self._arrived.notify_all()

    def _report_broken(self, connection: ControlConnection, phase: str, why: str) -> None:
        """Report that the epoch has failed here; the learner begins another."""
        self._drop_group()
        self.state, self._problem = ReceiveState.OUTSIDE, f"epoch {self._epoch} broke in {phase}: {why}"
        log.info("weights: %s: %s", self.name, self._problem)
        have = self._received.offered[0]
        connection.send({"say": "broken", "epoch": self._epoch, "phase": phase, "why": why[:300], "have": have})

    def _drop_group(self) -> None:
        if self._group is not None:
            self._group.abandon()
            self._group = None
        if self._setup is not None:
            self._setup.cancel()
            self._setup = None
