"""The keeper reclaims what dead processes held and completes drops that they left half done, promptly.

Talks to the ring; in this it publishes nothing that anybody needs, and any process may do the same at any time: the
keeper only makes it prompt. Knows nothing of prompts or tokens. It clears the validation hold of a dead validator, and
says on the bus and in errors.jsonl what was reclaimed and from whom.

It is also the one gateway for workers that do not map the ring (`busrl.roles.gateway`): it claims, writes and commits
in their names. Those claims are not its own: they stand in REMOTE entries, which its death does not touch.
"""

from __future__ import annotations

import time
from typing import ClassVar

from busrl.protocol import gateway as g
from busrl.protocol import messages as m
from busrl.ring import FateRefused, State
from busrl.ring.takeovers import taken_back
from busrl.roles import hold
from busrl.roles.actor import Actor
from busrl.roles.gateway import Gateway

POISON_DEATHS = 2
LOOK_EVERY_S = 0.02  # requests may come by the thousand; the dead are looked for at most so often


class Keeper(Actor):
    role = "keeper"
    singleton = True
    subscribe: ClassVar[tuple[type[m.Message], ...]] = (m.Heartbeat, *g.REMOTE)
    tick_s: ClassVar[float] = 0.1

    def setup(self) -> None:
        self._next_look = 0.0
        self.gateway = Gateway(self.ring, self.bus, self.paths, self.topology, self.warn)

    def handle(self, message: m.Message) -> None:
        self.gateway.hear(message)

    def teardown(self) -> None:
        self.gateway.close()

    def step(self) -> bool:
        self.gateway.tick()
        now = time.monotonic()
        if now < self._next_look:
            return False
        self._next_look = now + LOOK_EVERY_S
        return self._look()

    def _look(self) -> bool:
        reaped = self.ring.reap()
        self._finish_drops()
        self._clear_hold()
        self._drop_poison()
        for text, uids in taken_back(self.ring, reaped):
            self.warn("keeper", text, uids=uids)
        return bool(reaped)

    def _finish_drops(self) -> None:
        """A slot whose uid names no sample can not be settled: that costs the slot, not the keeper."""
        try:
            self.ring.finish_drops()
        except FateRefused as problem:
            self.warn("keeper", f"a dropped sample can not be recorded, its slot is out of use: {problem}", "error")

    def _drop_poison(self) -> None:
        """A prompt that killed two workers which held nothing else is given up; it is re-rolled as any accident."""
        lines = self.ring.lines()
        for slot in ((lines["state"] == State.QUEUED) & (lines["alone_deaths"] >= POISON_DEATHS)).nonzero()[0].tolist():
            if self.ring.drop(slot, int(lines["word"][slot]), "P"):
                uid = int(lines["uid"][slot])
                self.warn("keeper", f"sample {uid} is poison: two workers died on it alone", "error", uids=[uid])

    def _clear_hold(self) -> None:
        if hold.clear_stale(self.ring):
            self.warn("keeper", "cleared the validation hold of a dead process: publication goes on")


def main(run_dir: str, name: str) -> int:
    return Keeper(run_dir, name).main()
