"""A rollout or reward worker that notes why it looked each time that it took slots, and how old the doorbell was then.

Started by `faults` as the command of a [[process]]; it is the product's own role with a stopwatch around `take`.

causes: "bell"  a doorbell came since the last look: a bus message (reward), a change of the ring's futex word (rollout)
        "room"  none came since the last look, and no timer ended: it looked between two pieces of work
        "timer" it was waiting, nothing came, and its tick ended
"""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from os import environ
from pathlib import Path
from typing import Any

from busrl.protocol import messages as m
from busrl.ring import State
from busrl.roles.reward import Reward
from busrl.roles.rollout import Rollout

TIMER_S = 0.015  # every timer of the two roles is longer; a wake-up by the judge's answer is usually sooner


class Stopwatch:
    """Wraps a ring's `take` and `wait`; everything else goes through."""

    def __init__(self, ring: Any, state: State) -> None:
        self._ring, self._state = ring, state
        self._seen = ring.transitions(state)
        self.messages: list[int] = []  # when the doorbells since the last look were sent, ns of the wall clock
        self.waited = False
        self.slots: Counter[str] = Counter()
        self.looks: Counter[str] = Counter()
        self.bell_ms: list[float] = []  # oldest message since the last look, sent until claim
        self.rest_ms: list[float] = []  # oldest slot of a look: at rest until claimed by a worker that waited

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ring, name)

    def wait(self, state: int, seen: int, timeout_s: float) -> int:
        self.waited = True
        return int(self._ring.wait(state, seen, timeout_s))

    def take(self, frm: int, to: int, **how: Any) -> list[tuple[int, int]]:
        before, now_word = self._ring.lines()["changed_ns"], self._ring.transitions(self._state)
        taken: list[tuple[int, int]] = self._ring.take(frm, to, **how)
        if taken:
            self._note(taken, before, rung=now_word != self._seen)
        self._seen, self.messages, self.waited = now_word, [], False
        return taken

    def _note(self, taken: list[tuple[int, int]], before: Any, rung: bool) -> None:
        heard = bool(self.messages) if self._state == State.GENERATED else rung
        cause = "bell" if heard else "timer" if self.waited else "room"
        self.slots[cause] += len(taken)
        self.looks[cause] += 1
        if self.messages:
            self.bell_ms.append((time.time_ns() - min(self.messages)) / 1e6)
        if self.waited:
            now = time.monotonic_ns()
            self.rest_ms.append((now - min(int(before[slot]) for slot, _ in taken)) / 1e6)

    def told(self) -> dict[str, Any]:
        return {"slots": self.slots, "looks": self.looks, "bell_ms": self.bell_ms, "rest_ms": self.rest_ms}


def measured(role: Any, state: State) -> Any:
    """The role with a stopwatch."""

    class Measured(role):  # type: ignore[misc]
        def setup(self) -> None:
            self.ring = Stopwatch(self.ring, state)
            super().setup()

        def handle(self, message: m.Message) -> None:
            if isinstance(message, (m.DataGenerated, m.NewTask)):
                self.ring.messages.append(message.time_ns)
            super().handle(message)

        def idle(self, timeout_s: float) -> None:
            begun = time.monotonic()
            super().idle(timeout_s)
            self.ring.waited = self.ring.waited or time.monotonic() - begun >= TIMER_S

        def teardown(self) -> None:
            path = Path(environ["BUSRL_RUN_DIR"]) / f"measured-{self.role}.json"
            path.write_text(json.dumps(self.ring.told()))
            super().teardown()

    return Measured


if __name__ == "__main__":
    name = environ["BUSRL_NAME"]
    role = measured(Reward, State.GENERATED) if name.startswith("reward") else measured(Rollout, State.QUEUED)
    sys.exit(role(environ["BUSRL_RUN_DIR"], name).main())
