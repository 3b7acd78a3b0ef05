"""A rollout for several models of one base: one vLLM that has the adapters of all.

A `ModelRollout` is the rollout of one model: it has the calls, the probes and the versions of that model, and a share
of the engine (`shared_engine`). Knows nothing of samples or of what an engine does.

- Members take turns at the free rows. A call that may kill the engine runs when nothing of any model is in it.
- Nobody waits for another's version: one that finds no place is looked for again in the next turn.
- While there is nothing to do the process waits for a call in any of its rings.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import cast

from busrl.engines import Engine
from busrl.protocol import messages as m
from busrl.protocol.codec import topic
from busrl.ring import Ring, State
from busrl.roles import answers
from busrl.roles.intake import CallIntake
from busrl.roles.rollout import Rollout, import_all
from busrl.several.shared_engine import Share, make
from busrl.several.together import Part, Together
from busrl.topology import Topology

LOOK_S = 0.5  # a thread that watches a ring ends within it


class SharedCalls(CallIntake):
    """The calls of one of the models. One that may kill the engine is taken when no model has anything in it."""

    def claim(self, room: int) -> tuple[list[tuple[int, int]], bool]:
        idle = not self.claimed and cast(Share, self.engine).is_idle
        return answers.claim_queued(self.ring, None, room, idle)


class ModelRollout(Part, Rollout):
    """The rollout of one of the models."""

    intake_of_calls = SharedCalls

    def __init__(self, process: Together, topology: Topology, share: Share) -> None:
        super().__init__(process, topology)
        self.share = share

    def _make_engine(self) -> Engine:
        return self.share

    def update_weights(self, wait: bool = False) -> None:
        if wait or self.share.has_room:
            super().update_weights(wait)

    @property
    def runs_alone(self) -> bool:
        """True while a call runs that nothing may run beside."""
        return self.intake.alone and bool(self.intake.claimed)

    def pause_of(self, waited_s: float) -> None:
        """Note that the process had nothing to do for so long."""
        self.pace.row.idle_s += waited_s
        self.pace.write_when_due()


class SharedRollout(Together):
    """An engine with one base and the adapters of several models."""

    role = "rollout"
    warm = staticmethod(import_all)

    def setup(self) -> None:
        topologies = [self.whole.of(tag) for tag in self.whole.models_of(self.name)]
        self.engine = make(topologies)
        members = [ModelRollout(self, *each) for each in zip(topologies, self.engine.shares)]
        self._turns = deque(members)
        self.set_up(members)
        self.queued = QueuedCalls([member.intake.ring for member in members])

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
        if self.paused or not self.engine.active:
            begun = time.monotonic()
            self.queued.wait(timeout_s)
            for member in self._turns:
                member.pause_of(time.monotonic() - begun)

    def _deal(self, member: ModelRollout) -> None:
        member.share.take_turn(closed=any(other.runs_alone for other in self._turns))

    def teardown(self) -> None:
        self.queued.close()
        for member in self.members:
            member.teardown()
        self.engine.close()
        self.close_rings()


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
