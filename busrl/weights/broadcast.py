"""Weights by broadcast, the learner's side: a Gloo group that is formed anew whenever its members change.

Used by the learner behind `weights.base`. `publish` copies into a block of its own and returns; a thread forms the
groups and sends. Talks to the receivers through `weights.group`. Knows nothing of the bus or of models.

The thread: waits for a version, a join or a failure -> forms an epoch (announce, roll call, connect) -> sends the
newest version to it. A version that was overtaken before its turn is not sent.

- A group is used until a broadcast in it fails once; then it is dropped and the next epoch begins.
- A member that does not answer the roll call in `Limits.ready_s` is left out and named; it may join again.
- A member that joins is in the next epoch, whose first transfer is the newest version.
"""

from __future__ import annotations

import atexit
import logging
import threading
from collections.abc import Callable
from pathlib import Path

import torch

from busrl.errors import UserError
from busrl.weights.base import NOTHING
from busrl.weights.group import Event, Group, Limits, Plane, Ticker, buckets, deadline_in, first_line, past
from busrl.weights.manifest import Manifest

log = logging.getLogger("busrl")
CONNECT_ATTEMPTS = 3
LOOK_EVERY_S = 0.05


class BroadcastSender:
    """Rank 0 of every epoch. `on_missing(name, why)` hears of members that are left out."""

    def __init__(
        self,
        file: str | Path,
        *,
        timeout_s: float = 10.0,
        host: str = "127.0.0.1",
        on_missing: Callable[[str, str], None] | None = None,
    ) -> None:
        self.file = Path(file)
        self.epoch = 0
        self._limits = Limits(timeout_s)
        self._on_missing = on_missing
        self._plane = Plane.host(self.file, host, timeout_s)
        self._wanted: dict[str, str] = {}  # name -> id of all that shall be in the group
        self._joins_seen = 0
        self._broken = True  # there is no group, or it must be formed anew
        self._group: Group | None = None
        self._sent = -1  # version that every member of the group has
        self._change = threading.Condition()
        self._forgotten: set[str] = set()
        self._manifest: Manifest | None = None
        self._blocks: list[torch.Tensor] = []
        self._stamps = [NOTHING, NOTHING]
        self._sending: int | None = None
        self._ticker = Ticker()
        self._thread = threading.Thread(target=self._serve, name="weights", daemon=True)
        self._thread.start()
        atexit.register(self.close)  # a thread of Gloo that outlives the interpreter would abort the process

    # -- the learner's thread -----------------------------------------------------------------------------------

    @property
    def members(self) -> list[str]:
        """Names in the group as it stands."""
        with self._change:
            return sorted(self._wanted) if self._group is not None else []

    def newest(self) -> tuple[int, int]:
        with self._change:
            return max(self._stamps)

    def publish(self, version: int, step: int, named: dict[str, torch.Tensor]) -> None:
        with self._change:
            if version <= max(self._stamps)[0]:
                raise UserError(f"version {version} is not above {max(self._stamps)[0]}, which is published")
            self._prepare(named)
            assert self._manifest is not None
            k = self._block_to_write()
            self._manifest.gather(named, self._blocks[k])
            self._stamps[k] = (version, step)
            self._change.notify_all()

    def forget(self, member: str) -> None:
        with self._change:
            self._forgotten.add(member)
            self._change.notify_all()

    def flush(self, timeout_s: float) -> bool:
        """Wait until the newest version has been sent to all members; False after the deadline."""
        with self._change:
            return self._change.wait_for(lambda: self._sent == max(self._stamps)[0] or not self._wanted, timeout_s)

    def close(self) -> None:
        """End the thread; a transfer in progress ends by its own timeout at the latest."""
        atexit.unregister(self.close)
        self._ticker.stop()
        with self._change:
            self._change.notify_all()
        self._thread.join(self._limits.timeout_s)
        self._drop_group()
        self.file.unlink(missing_ok=True)

    def _prepare(self, named: dict[str, torch.Tensor]) -> None:
        if self._manifest is None:
            self._manifest = Manifest.of(named)
            self._blocks = [torch.empty(self._manifest.nbytes, dtype=torch.uint8) for _ in range(2)]
            self._plane.set_manifest(self._manifest.to_json())

    def _block_to_write(self) -> int:
        """The block that is not being sent; if none is, the older one."""
        if self._sending is not None:
            return 1 - self._sending
        return self._stamps.index(min(self._stamps))

    # -- the sending thread -------------------------------------------------------------------------------------

    def _serve(self) -> None:
        while not self._ticker.stopped:
            try:
                self._look()
                if self._broken and self._wanted and self.newest() != NOTHING:
                    self._form()
                if self._group is not None and self.newest()[0] > self._sent:
                    self._send(self._group)
            except Exception as problem:  # a store error must not end the thread: say so, and form the group anew
                log.warning("weights: epoch %d failed (%s); it is formed anew", self.epoch, first_line(problem))
                self._drop_group()
            with self._change:
                if self._group is None or self.newest()[0] <= self._sent:
                    self._change.wait(LOOK_EVERY_S)

    def _look(self) -> None:
        """Read who wants in, and who is known to be dead."""
        joins = self._plane.joins(self._joins_seen)
        self._joins_seen += len(joins)
        with self._change:
            for name in self._forgotten & self._wanted.keys():
                del self._wanted[name]
                self._broken = True
            self._forgotten.clear()
            for join in joins:
                if self._wanted.get(join.name) != join.id or join.failed == self.epoch:
                    self._wanted[join.name] = join.id
                    self._broken = True

    def _form(self) -> None:
        """Announce an epoch, call the roll, connect; without those who do not answer."""
        self._drop_group()
        for _ in range(CONNECT_ATTEMPTS):
            self._roll_call()
            if not self._wanted or self._ticker.stopped:
                return
            self._plane.set_go(self.epoch)
            try:
                group = self._plane.form(self.epoch, 0, len(self._wanted) + 1, self._limits.transfer_s)
            except RuntimeError as problem:
                log.warning("weights: epoch %d did not connect: %s", self.epoch, first_line(problem))
                continue
            with self._change:
                self._group, self._broken, self._sent = group, False, -1
            return

    def _roll_call(self) -> None:
        """Begin epochs until all members of one have seen it."""
        while self._wanted and not self._ticker.stopped:
            self.epoch += 1
            members = sorted(self._wanted.items())
            self._plane.write_event(Event("epoch", self.epoch, tuple(members)))
            missing = self._missing(members)
            if not missing:
                return
            for name in missing:
                late = f"did not answer in epoch {self.epoch} within {self._limits.ready_s:g} s"
                self._leave_out(name, "is dead" if name in self._forgotten else late)

    def _missing(self, members: list[tuple[str, str]]) -> list[str]:
        """Who has not answered the roll call at the deadline; a member known to be dead is not waited for."""
        deadline = deadline_in(self._limits.ready_s)
        while True:
            late = [name for name, identity in members if not self._plane.ready(self.epoch, identity)]
            dead = [name for name in late if name in self._forgotten]
            if not late or dead or past(deadline) or self._ticker.stopped:
                return dead or late
            self._ticker.pause()

    def _leave_out(self, name: str, why: str) -> None:
        log.warning("weights: %s %s; going on without it", name, why)
        with self._change:
            self._wanted.pop(name, None)
            self._forgotten.discard(name)
            self._change.notify_all()
        if self._on_missing is not None:
            self._on_missing(name, why)

    def _send(self, group: Group) -> None:
        """Send the newest version to the group; a failure drops the group."""
        with self._change:
            k = self._stamps.index(max(self._stamps))
            self._sending, (version, step) = k, self._stamps[k]
        try:
            self._plane.write_event(Event("send", group.epoch, version=version, step=step))
            for bucket in buckets(self._blocks[k]):
                group.broadcast(bucket)
            with self._change:
                self._sent = version
        finally:
            with self._change:
                self._sending = None
                self._change.notify_all()

    def _drop_group(self) -> None:
        """Closing our connections makes the other members' broadcasts fail at once instead of at their timeout."""
        with self._change:
            self._group, self._broken, self._sent = None, True, -1
