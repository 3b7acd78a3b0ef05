"""Faults on purpose: messages that get lost, doubled, late or out of order, and processes that die at a named step.

    topology [faults] -> message_faults (an endpoint's messages), crash_environment (a child's environment)

Used by the roles and by `launch`; off unless a topology asks for it. `topology.schema` has the dataclasses of the
tables, `preflight.process_rules` takes from here the names that may stand in them; the ring's C++ core reads the
environment variable (csrc/include/busrl/crash.hpp) and ends the process with SIGKILL, which leaves what any death
leaves. Knows nothing of what messages mean or of when a process is restarted.

- A process has one crash point at a time: several entries for one process are used one after the other, each for its
  number of lives.
- Every decision about a message comes from a generator seeded with the topology's seed and the endpoint's name, so a
  process that meets the same messages treats them in the same way. The first entry that fits a message decides about
  it. PING is a message like any other, one's own included.
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

from busrl.capabilities import CALLER_ROLES, ROLES
from busrl.protocol.codec import BY_NAME
from busrl.states import CRASH_POINTS

if TYPE_CHECKING:
    from busrl.topology.schema import BusFault, CrashFault, Faults

MESSAGES: Final = tuple(sorted(BY_NAME))
# Not those of another host: there are no faults on purpose there.
_MOVERS: Final = tuple(role.name for role in ROLES.values() if role.moves and role.where != "away")
_HOLDERS: Final = tuple(role for role in _MOVERS if role != "scheduler")  # the keeper for remote workers
_GENERATE: Final = ("rollout", *CALLER_ROLES, "keeper")
# Which of busrl's own programs pass a point; docs/faults.md has the same table.
PASSED_BY: Final = {
    **dict.fromkeys(("register.lock", "register.cas"), ("bus", *_MOVERS)),
    **{point: ("scheduler", "validator") for point in CRASH_POINTS if point.startswith("dispatch.")},
    **dict.fromkeys(("move.cas", "move.hinted"), _MOVERS),
    **dict.fromkeys(("claim.cas", "release.before", "release.after", "drop.cas", "drop.fate"), _HOLDERS),
    "take.claimed": (*_GENERATE, "reward", "validator"),
    **dict.fromkeys(("put.copied", "put.stored"), (*_GENERATE, "reward")),
    **dict.fromkeys(("commit.before", "commit.after"), _GENERATE),
    **dict.fromkeys(("finish.fate", "finish.free"), ("learner", "validator")),
    **dict.fromkeys(("remote.described", "remote.entered", "remote.rested", "expire.before"), ("keeper",)),
    **dict.fromkeys(("reap.before", "reap.cas", "reap.entry"), ("keeper", "scheduler", "validator")),
    **dict.fromkeys(("cut.lowered", "cut.punched", "trim.claimed"), (*_GENERATE, "reward", "scheduler", "validator")),
}
# The broker passes bytes on and has no messages of its own but the pings that prove it alive.
ENDS: Final = (*_MOVERS, "launch")
SENDER = "sender"


def describe(faults: Faults) -> list[str]:
    """A line per fault for a person; empty if there is none."""
    return [_of_bus(fault) for fault in faults.bus] + [of_crash(fault) for fault in faults.crash]


def _of_bus(fault: BusFault) -> str:
    messages = ", ".join(fault.types) or "every message"
    roles = ", ".join(fault.roles) or "everybody but the broker"
    rates = {
        f"{fault.drop:.0%} lost": fault.drop,
        f"{fault.duplicate:.0%} doubled": fault.duplicate,
        f"up to {fault.delay_s:g} s late": fault.delay_s,
        f"{fault.reorder:.0%} overtaken": fault.reorder,
    }
    happens = ", ".join(text for text, rate in rates.items() if rate)
    return f"{messages} {'from' if fault.at == SENDER else 'to'} {roles}: {happens}"


def of_crash(fault: CrashFault) -> str:
    lives = "in every life" if not fault.lives else f"in {fault.lives} {'life' if fault.lives == 1 else 'lives'}"
    return f"{fault.process} is killed when it passes {fault.point} for the {fault.count}. time, {lives}"


# -- crash points -----


VARIABLE = "BUSRL_CRASH_POINT"


def crash_environment(faults: Faults, process: str, life: int) -> dict[str, str]:
    """The variables that the `life`-th start of `process` (from 1) adds to its environment."""
    fault = fault_of(faults, process, life)
    return {VARIABLE: f"{fault.point}:{fault.count}"} if fault else {}


class CrashWatch:
    """Compares planned deaths with those that came: `killed` gets every end by SIGKILL that launch did not cause."""

    def __init__(self, faults: Faults) -> None:
        self._faults = faults
        self._fired: list[CrashFault] = []

    def killed(self, process: str, life: int) -> None:
        fault = fault_of(self._faults, process, life)
        if fault is not None:
            self._fired.append(fault)

    def missing(self) -> list[str]:
        """The planned deaths that never came, in words."""
        return [of_crash(fault) for fault in self._faults.crash if not any(fault is fired for fired in self._fired)]


def fault_of(faults: Faults, process: str, life: int) -> CrashFault | None:
    """The entry that this life dies of, None if it may live."""
    for fault in faults.crash:
        if fault.process == process:
            if not fault.lives or life <= fault.lives:
                return fault
            life -= fault.lives
    return None


# -- messages -----


MAX_HELD: Final = 20_000
OVERTAKEN_S: Final = 0.05  # an overtaken message comes after the next one, or after this time if there is none
Frames = tuple[bytes, ...]
Receive = Callable[[int], list[Frames]]


def message_faults(faults: Faults, role: str, name: str) -> MessageFaults | None:
    """The faults of one endpoint's messages; None if no entry is about its role, so that it costs nothing."""
    entries = [fault for fault in faults.bus if not fault.roles or role in fault.roles]
    return MessageFaults(entries, faults.seed, name) if entries else None


class MessageFaults:
    """Faults of one endpoint. `counts`: unsent, lost, doubled, late, overtaken, and passed (what came out of it)."""

    def __init__(
        self, entries: Sequence[BusFault], seed: int, name: str, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._in = [fault for fault in entries if fault.at != SENDER]
        self._out = [fault for fault in entries if fault.at == SENDER]
        self._random = random.Random(f"{seed} {name}")
        self._clock = clock
        self._delayed: list[tuple[float, int, Frames]] = []  # a heap: when it is due, its number, the message
        self._overtaken: tuple[float, Frames] | None = None  # when it is due in any case
        self._number = itertools.count()
        self.counts: Counter[str] = Counter()

    def __str__(self) -> str:
        return ", ".join(f"{self.counts[what]} {what}" for what in sorted(self.counts)) or "no message came by"

    # sending

    def lets_out(self, topic: str) -> bool:
        fault = _fitting(self._out, topic.partition("/")[0])
        if fault is None or self._random.random() >= fault.drop:
            return True
        self.counts["unsent"] += 1
        return False

    # receiving

    def around(self, receive: Receive) -> Receive:
        """The receive call to use instead: it gives one message at a time, and none while none is here or due."""

        def faulty(flags: int) -> list[Frames]:
            while (frames := self._due()) is None:
                if not (came := receive(flags)):
                    return []
                for message in came:
                    self._judge(message)
            self.counts["passed"] += 1
            return [frames]

        return faulty

    def due_s(self) -> float:
        """Seconds until a message that is held back is due; inf if none is."""
        times = [self._delayed[0][0]] if self._delayed else []
        times += [self._overtaken[0]] if self._overtaken else []
        return max(0.0, min(times) - self._clock()) if times else math.inf

    def _due(self) -> Frames | None:
        now = self._clock()
        if self._overtaken and self._overtaken[0] <= now:  # nothing came that could overtake it
            self._release(self._overtaken[0])
        if not self._delayed or self._delayed[0][0] > now:
            return None
        return heapq.heappop(self._delayed)[2]

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
        if not fault.delay_s:
            return now
        self.counts["late"] += 1
        return now + self._random.random() * fault.delay_s

    def _hold(self, due: float, frames: Frames) -> None:
        if len(self._delayed) >= MAX_HELD:
            self.counts["lost"] += 1
            return
        heapq.heappush(self._delayed, (due, next(self._number), frames))
        self._release(due)

    def _release(self, due: float) -> None:
        """Put the overtaken message behind the one that is due then."""
        if self._overtaken:
            frames, self._overtaken = self._overtaken[1], None
            self._hold(due, frames)


def _fitting(entries: Sequence[BusFault], name: str) -> BusFault | None:
    return next((fault for fault in entries if not fault.types or name in fault.types), None)
