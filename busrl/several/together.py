"""A process that works for several models: a rollout whose one engine has the adapters of all.

It has one actor per model, each with the ring, the calls, the weights and the topology of its model, and gives them
turns. Talks to the rings of its models and to one engine (`shared_engine`). Knows nothing of what a turn does.

- A model's actor is the one of a process of its own: what it does, it does here.
- The process belongs to its first model, by whose ring launch judges it: long work for another is declared there too.
- Nothing waits for one model alone once the process is ready: where there is no place for a version, it is looked for
  again in the next turn.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import cast

from busrl.engines import Engine
from busrl.protocol import messages as m
from busrl.protocol.codec import topic
from busrl.ring import Ring, State
from busrl.roles import answers
from busrl.roles.actor import Actor, Parts, Shown
from busrl.roles.intake import CallIntake
from busrl.roles.rollout import Rollout, import_all
from busrl.several.ledgers import Ledger
from busrl.several.shared_engine import Share, make
from busrl.topology import Topology

LOOK_S = 0.5  # a thread that watches a ring ends within it


class DeclaredTwice(Shown):
    """What the part of a process for one model shows in that model's ring. Its long work, and that it goes on, shows in
    the ring of the process too."""

    def __init__(self, ring: Ring, of_process: Shown) -> None:
        super().__init__(ring)
        self._of_process = of_process

    def progress(self) -> None:
        self._of_process.progress()
        super().progress()

    @contextlib.contextmanager
    def activity(self, name: str, deadline_s: float) -> Iterator[None]:
        with self._of_process.activity(name, deadline_s), super().activity(name, deadline_s):
            yield


class SharedCalls(CallIntake):
    """The calls of one of the models. One that may kill the engine is taken when no model has anything in it."""

    def claim(self, room: int) -> tuple[list[tuple[int, int]], bool]:
        idle = not self.claimed and cast(Share, self.engine).is_idle
        return answers.claim_queued(self.ring, None, room, idle)


class Member(Rollout):
    """The rollout of one of the models."""

    intake_of_calls = SharedCalls

    def __init__(self, run_dir: Path, name: str, parts: Parts, shown: Shown, share: Share) -> None:
        super().__init__(run_dir, name, parts)
        self.shown, self.share = shown, share

    def _make_engine(self) -> Engine:
        return self.share

    def update_weights(self, wait: bool = False) -> None:
        if wait or self.share.has_room:
            super().update_weights(wait)

    def warn(
        self, where: str, text: str, severity: str = "warning", kind: str = "", uids: Sequence[int] = (),
        traceback: str = "",
    ) -> None:
        super().warn(where, f"{self.topology.tag}: {text}", severity, kind, uids, traceback)

    @property
    def runs_alone(self) -> bool:
        """True while a call runs that nothing may run beside."""
        return self.intake.alone and bool(self.intake.claimed)

    def pause_of(self, waited_s: float) -> None:
        """Note that the process had nothing to do for so long."""
        self.pace.row.idle_s += waited_s
        self.pace.write_when_due()


class SharedRollout(Actor):
    """One engine, one base, and the adapters of several models."""

    role = "rollout"
    warm = staticmethod(import_all)
    members: Sequence[Member] = ()

    def setup(self) -> None:
        topologies = [self.whole.of(tag) for tag in self.whole.models_of(self.name)]
        self.engine = make(topologies)
        self.members = [self._member(*each) for each in zip(topologies, self.engine.shares)]
        self._turns = deque(self.members)
        for member in self.members:
            member.setup()
        self.queued = QueuedCalls([member.intake.ring for member in self.members])
        for ring in self.other_rings:
            ring.set_ready()

    def _member(self, topology: Topology, share: Share) -> Member:
        parts, shown = self._own_parts(topology), self.shown
        if topology.tag != self.topology.tag:
            parts = self._other_parts(topology)
            shown = DeclaredTwice(parts.ring, self.shown)
            self.other_rings.append(parts.ring)
        return Member(self._run.root, self.name, parts, shown, share)

    def _own_parts(self, topology: Topology) -> Parts:
        fates = (None, None) if topology.frozen else (self.fates, self.validate_fates)
        return Parts(topology, self.ring, self.bus, *fates, beside=topology.beside)

    def _other_parts(self, topology: Topology) -> Parts:
        """What is attached of another model, with an entry for this process in its ring."""
        paths = self._run.of_tag(topology.beside)
        if topology.frozen:
            ring = Ring.attach(paths.ring_name)
            ring.register(self.role, self.name)
            return Parts(topology, ring, self.bus, None, None, beside=topology.beside)
        ledger = Ledger.attach(topology, paths, self.role, self.name)
        return Parts(topology, ledger.ring, self.bus, ledger.fates, ledger.validate_fates, beside=topology.beside)

    def subscriptions(self) -> list[str]:
        return [*super().subscriptions(), topic(m.CallCancel, self.worker_id)]

    def work(self) -> bool:
        worked = False
        self._turns.rotate(1)  # whoever comes first has the first choice of free rows
        for member in self._turns:
            self._deal(member)
            worked = member.work() or worked
            if member.stopping:
                self.stop(member.stopping)
        return worked

    def idle(self, timeout_s: float) -> None:
        for member in self._turns:
            self._deal(member)
            member.idle(0.0)
        if not self.engine.active:
            begun = time.monotonic()
            self.queued.wait(timeout_s)
            for member in self.members:
                member.pause_of(time.monotonic() - begun)

    def _deal(self, member: Member) -> None:
        member.share.take_turn(closed=any(other.runs_alone for other in self.members))

    def handle(self, message: m.Message) -> None:
        for member in self.members:
            if member.beside == m.model_of(message):
                member.handle(message)

    def stop(self, reason: str) -> None:
        super().stop(reason)
        for member in self.members:
            member.stop(reason)

    def look_around(self) -> None:
        super().look_around()
        for member in self.members:
            member.reports.publish_repeats(time.monotonic())

    def follow(self) -> None:
        self.whole = Topology.from_json(self._run.topology.read_text())
        for member in self.members:
            member.topology = self.whole.of(member.topology.tag)
            member.follow()

    def teardown(self) -> None:
        self.queued.close()
        for member in self.members:
            member.teardown()
        self.engine.close()
        for ring in self.other_rings:
            ring.close()


class QueuedCalls:
    """Waits until a call is queued in any of several rings: a thread for each."""

    def __init__(self, rings: Sequence[Ring]) -> None:
        self._came, self._over = threading.Event(), False
        self._threads = [threading.Thread(target=self._watch, args=(ring,), daemon=True) for ring in rings]
        for thread in self._threads:
            thread.start()

    def wait(self, timeout_s: float) -> None:
        """Return once a call was queued since the last wait, or after the time."""
        self._came.wait(timeout_s)
        self._came.clear()

    def close(self) -> None:
        """End the threads, before their rings are closed."""
        self._over = True
        for thread in self._threads:
            thread.join()

    def _watch(self, ring: Ring) -> None:
        seen = ring.transitions(State.QUEUED)
        while not self._over:
            now = ring.wait(State.QUEUED, seen, LOOK_S)
            if now != seen:
                seen = now
                self._came.set()
