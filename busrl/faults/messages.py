"""Messages that get lost, doubled, late or out of order: what stands between an endpoint and its sockets.

Talks to the endpoint's own receive call and to nothing else. Every decision comes from a generator seeded with the
topology's seed and the endpoint's name, so a process that meets the same messages treats them in the same way. Knows
nothing of what messages mean; a topic's name is all that it looks at.

- The first entry that fits a message decides about it. PING is a message like any other, one's own included.
- At the receiver each endpoint loses its own; at the sender a message is lost for all. Numbers (`msg_seq`) are given
  before, so that the listeners' counts of missed messages stay true.
- At most MAX_HELD messages are held back; what does not fit is lost and counted, as in a queue of libzmq.
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final

from busrl.faults.plan import SENDER

if TYPE_CHECKING:
    from busrl.config.schema import BusFault, Faults

MAX_HELD: Final = 20_000
OVERTAKEN_S: Final = 0.05  # an overtaken message comes after the next one, or after this time if there is none
Frames = tuple[bytes, ...]
Receive = Callable[[int], list[Frames]]


def message_faults(faults: Faults, role: str, name: str) -> MessageFaults | None:
    """Those of one endpoint; None if no entry is about its role, so that it costs nothing."""
    entries = [one for one in faults.bus if not one.roles or role in one.roles]
    return MessageFaults(entries, faults.seed, name) if entries else None


class MessageFaults:
    """Of one endpoint. `counts`: unsent, lost, doubled, late, overtaken, and passed (what came out of it)."""

    def __init__(
        self, entries: Sequence[BusFault], seed: int, name: str, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._in = [one for one in entries if one.at != SENDER]
        self._out = [one for one in entries if one.at == SENDER]
        self._random = random.Random(f"{seed} {name}")
        self._clock = clock
        self._held: list[tuple[float, int, Frames]] = []  # a heap: when it is due, its number, the message
        self._overtaken: tuple[float, Frames] | None = None  # when it is due in any case
        self._number = itertools.count()
        self.counts: Counter[str] = Counter()

    def __str__(self) -> str:
        return ", ".join(f"{self.counts[what]} {what}" for what in sorted(self.counts)) or "no message came by"

    # sending

    def lets_out(self, topic: str) -> bool:
        """Whether a message to this topic is sent at all."""
        fault = _fitting(self._out, topic.partition("/")[0])
        if fault is None or self._random.random() >= fault.drop:
            return True
        self.counts["unsent"] += 1
        return False

    # receiving

    def around(self, receive: Receive) -> Receive:
        """The receive call to use instead: nothing when nothing is there or due, else one message at a time."""

        def faulty(flags: int) -> list[Frames]:
            while (frames := self._due()) is None:
                if not (came := receive(flags)):
                    return []
                for one in came:
                    self._judge(one)
            self.counts["passed"] += 1
            return [frames]

        return faulty

    def due_s(self) -> float:
        """Seconds until a message that is held back is due; inf if none is."""
        times = [self._held[0][0]] if self._held else []
        times += [self._overtaken[0]] if self._overtaken else []
        return max(0.0, min(times) - self._clock()) if times else math.inf

    def _due(self) -> Frames | None:
        now = self._clock()
        if self._overtaken and self._overtaken[0] <= now:  # nothing came that could overtake it
            self._release(self._overtaken[0])
        if not self._held or self._held[0][0] > now:
            return None
        return heapq.heappop(self._held)[2]

    def _judge(self, frames: Frames) -> None:
        fault = _fitting(self._in, frames[0].partition(b"/")[0].decode(errors="replace"))
        now, chance = self._clock(), self._random.random
        if fault is None:
            self._hold(now, frames)
        elif chance() < fault.drop:
            self.counts["lost"] += 1
        else:
            if chance() < fault.duplicate:
                self.counts["doubled"] += 1
                self._hold(self._when(fault, now), frames)
            if chance() < fault.reorder and self._overtaken is None:
                self.counts["overtaken"] += 1
                self._overtaken = (now + OVERTAKEN_S, frames)
            else:
                self._hold(self._when(fault, now), frames)

    def _when(self, fault: BusFault, now: float) -> float:
        """When a message is to come out."""
        if not fault.delay_s:
            return now
        self.counts["late"] += 1
        return now + self._random.random() * fault.delay_s

    def _hold(self, due: float, frames: Frames) -> None:
        if len(self._held) >= MAX_HELD:
            self.counts["lost"] += 1
            return
        heapq.heappush(self._held, (due, next(self._number), frames))
        self._release(due)

    def _release(self, due: float) -> None:
        """The overtaken message comes out behind the one that is due then."""
        if self._overtaken:
            frames, self._overtaken = self._overtaken[1], None
            self._hold(due, frames)


def _fitting(entries: Sequence[BusFault], name: str) -> BusFault | None:
    return next((one for one in entries if not one.types or name in one.types), None)
