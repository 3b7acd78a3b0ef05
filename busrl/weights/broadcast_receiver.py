"""Weights by broadcast, an engine's side: joins the learner's group and keeps the newest version at hand.

Used by every process that runs the model, behind `weights.base`. A thread follows the event log of `weights.group`
and receives into one of two blocks; `fetch` copies from the other. Knows nothing of the bus or of models.

The thread: address file -> connect -> join -> (epoch: answer the roll call, connect; send: receive)* -> whenever
something breaks: join again, or look for a new address if the store is gone (the learner was restarted).

- The block that `fetch` reads is only ever replaced by a complete version.
- The newest version stays available while there is no learner.
"""

from __future__ import annotations

import atexit
import logging
import threading
import uuid
from collections.abc import Callable
from pathlib import Path

import torch

from busrl.errors import WeightsTimeout
from busrl.weights.base import NOTHING, Kind, StepTable
from busrl.weights.group import Event, Group, Join, Limits, Plane, Ticker, buckets, deadline_in, first_line, past
from busrl.weights.manifest import Manifest

log = logging.getLogger("busrl")
IDLE_POLL_S = 0.01
AGAIN_S = 0.1


class BroadcastReceiver:
    """A member called `name`. `announce` may tell it the store's address where the file can not be read."""

    kind: Kind = "tensors"

    def __init__(self, file: str | Path, name: str, *, timeout_s: float = 10.0) -> None:
        self.file = Path(file)
        self.name = name
        self.hook: Callable[[str], None] | None = None  # called with "<event> <n>"; for fault tests
        self._id = uuid.uuid4().hex
        self._limits = Limits(timeout_s)
        self._address = ""
        self._state = "looking for the learner's address"
        self._group: Group | None = None
        self._manifest: Manifest | None = None
        self._front = torch.empty(0, dtype=torch.uint8)
        self._back = torch.empty(0, dtype=torch.uint8)
        self._stamp = NOTHING
        self._arrived = threading.Condition()
        self._steps = StepTable()
        self._ticker = Ticker()
        self._thread = threading.Thread(target=self._serve, name="weights", daemon=True)
        self._thread.start()
        atexit.register(self.close)  # a thread of Gloo that outlives the interpreter would abort the process

    # -- the engine's thread ------------------------------------------------------------------------------------

    def newest(self) -> tuple[int, int]:
        return self._stamp

    def wait_for(self, version: int, timeout_s: float) -> tuple[int, int]:
        with self._arrived:
            if not self._arrived.wait_for(lambda: self._stamp[0] >= version, timeout_s):
                raise WeightsTimeout(
                    f"{self.name}: no version {version} after {timeout_s:g} s, newest {self._stamp[0]}; {self._state}"
                )
            return self._stamp

    def fetch(self, params: dict[str, torch.Tensor]) -> tuple[int, int]:
        with self._arrived:
            if self._manifest is None or self._stamp == NOTHING:
                raise WeightsTimeout(f"{self.name}: no version has arrived; {self._state}")
            self._manifest.scatter(self._front, params)
            self._steps.add(*self._stamp)
            return self._stamp

    def step_of(self, version: int) -> int:
        return self._steps.step_of(version)

    def announce(self, address: str) -> None:
        """The store's address, as the sender's file has it."""
        self._address = address

    def close(self) -> None:
        atexit.unregister(self.close)
        self._ticker.stop()
        self._thread.join(self._limits.timeout_s)

    # -- the receiving thread -----------------------------------------------------------------------------------

    def _serve(self) -> None:
        while not self._ticker.stopped:
            address = self._find()
            try:
                if address:
                    self._follow(Plane.connect(address, self._limits.timeout_s))
            except (RuntimeError, OSError, ValueError) as problem:  # the store is gone, or was never there
                self._state = f"the learner's store at {address.partition('/')[0]} is gone"
                log.debug("weights: %s: %s (%s)", self.name, self._state, first_line(problem))
            self._group = None
            self._ticker.pause(AGAIN_S)

    def _find(self) -> str:
        try:
            return self.file.read_text()
        except OSError:
            return self._address

    def _follow(self, plane: Plane) -> None:
        """Act on the event log until stopped; raises when the store is gone."""
        index = plane.head()
        failed = self._join(plane, 0)
        while not self._ticker.stopped:
            event = plane.read_event(index + 1)
            if event is None:
                index = self._catch_up(plane, index)
                continue
            index += 1
            try:
                failed = self._act(plane, event, index)
            except RuntimeError as problem:
                plane.head()  # tells a broken group (go on) from a lost store (raises)
                log.info("weights: %s: epoch %d broke: %s", self.name, event.epoch, first_line(problem))
                self._group = None
                failed = True
            if failed:
                self._join(plane, event.epoch)

    def _catch_up(self, plane: Plane, index: int) -> int:
        """Pause; a member that was away for longer than the log is kept starts again at its end."""
        head = plane.head()
        if head > index and plane.read_event(index + 1) is None:
            self._group = None
            self._join(plane, 0)
            return head
        self._ticker.pause(IDLE_POLL_S)
        return index

    def _join(self, plane: Plane, failed: int) -> bool:
        self._state = "waiting to be taken into the learner's group"
        plane.join(Join(self.name, self._id, failed))
        return False

    def _act(self, plane: Plane, event: Event, index: int) -> bool:
        """True if we are outside of the group now and should ask to be let in."""
        if event.kind == "epoch":
            self._group = None
            mine = (self.name, self._id)
            if mine not in event.members:
                return all(name != self.name for name, _ in event.members)  # another process has our name: leave it
            return self._enter(plane, event, event.members.index(mine) + 1, index)
        if self._group is not None and self._group.epoch == event.epoch:
            self._receive(plane, self._group, event)
        return False

    def _enter(self, plane: Plane, event: Event, rank: int, index: int) -> bool:
        """Answer the roll call and connect when all have; a newer event means that this epoch was given up."""
        self._call_hook(f"epoch {event.epoch}")
        self._state = f"in the roll call of epoch {event.epoch}"
        plane.set_ready(event.epoch, self._id)
        deadline = deadline_in(self._limits.timeout_s)
        while not plane.may_go(event.epoch):
            if plane.head() > index or self._ticker.stopped:
                return False
            if past(deadline):
                return True
            self._ticker.pause()
        self._group = plane.form(event.epoch, rank, len(event.members) + 1, self._limits.transfer_s)
        self._state = f"a member of epoch {event.epoch}"
        return False

    def _receive(self, plane: Plane, group: Group, event: Event) -> None:
        manifest = Manifest.from_json(plane.manifest())
        if len(self._back) != manifest.nbytes:
            self._back = torch.empty(manifest.nbytes, dtype=torch.uint8)
        for n, bucket in enumerate(buckets(self._back)):
            self._call_hook(f"bucket {n}")
            group.broadcast(bucket)
        with self._arrived:
            self._front, self._back = self._back, self._front
            self._manifest, self._stamp = manifest, (event.version, event.step)
            self._arrived.notify_all()

    def _call_hook(self, point: str) -> None:
        if self.hook is not None:
            self.hook(point)
