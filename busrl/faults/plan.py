"""The names that may stand in a topology's [faults], the plan in words, and which process it kills when.

Pure. `config.schema` has the dataclasses of the tables; the ring's C++ core reads the environment variable
(csrc/include/busrl/crash.hpp) and ends the process with SIGKILL, which leaves what any death leaves. Knows nothing of
sockets or processes.

- A process has one crash point at a time: several entries for one process are used one after the other, each for its
  number of lives.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from busrl.protocol.codec import BY_NAME
from busrl.states import CALLER_ROLES, CRASH_POINTS, ROLES

if TYPE_CHECKING:
    from busrl.config.schema import BusFault, CrashFault, Faults

MESSAGES: Final = tuple(sorted(BY_NAME))
# Not those of another host: there are no faults on purpose there.
_MOVERS: Final = tuple(one.name for one in ROLES.values() if one.moves and one.where != "away")
_HOLDERS: Final = tuple(one for one in _MOVERS if one != "scheduler")  # the keeper for remote workers
_GENERATE: Final = ("rollout", *CALLER_ROLES, "keeper")
# Which of busrl's own programs pass a point; docs/faults.md has the same table.
PASSED_BY: Final = {
    **dict.fromkeys(("register.lock", "register.cas"), ("bus", *_MOVERS)),
    **{one: ("scheduler", "validator") for one in CRASH_POINTS if one.startswith("dispatch.")},
    **dict.fromkeys(("move.cas", "move.hinted"), _MOVERS),
    **dict.fromkeys(("claim.cas", "release.before", "release.after", "drop.cas", "drop.fate"), _HOLDERS),
    "take.claimed": (*_GENERATE, "reward", "validator"),
    **dict.fromkeys(("put.copied", "put.stored"), (*_GENERATE, "reward")),
    **dict.fromkeys(("commit.before", "commit.after"), _GENERATE),
    **dict.fromkeys(("finish.fate", "finish.free"), ("learner", "validator")),
    **dict.fromkeys(("remote.described", "remote.entered", "remote.rested", "expire.before"), ("keeper",)),
    **dict.fromkeys(("reap.before", "reap.cas", "reap.entry"), ("keeper", "scheduler", "validator")),
    **dict.fromkeys(("trim.claimed", "trim.punched"), _MOVERS),
}
# The broker passes bytes on and has no messages of its own but the pings that prove it alive.
ENDS: Final = (*_MOVERS, "launch")
SENDER = "sender"


def describe(faults: Faults) -> list[str]:
    """One line per fault for a person; empty if there is none."""
    return [_of_bus(one) for one in faults.bus] + [of_crash(one) for one in faults.crash]


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
    """A planned death in words."""
    lives = "in every life" if not fault.lives else f"in {fault.lives} {'life' if fault.lives == 1 else 'lives'}"
    return f"{fault.process} is killed when it passes {fault.point} for the {fault.count}. time, {lives}"


# -- crash points -----


VARIABLE = "BUSRL_CRASH_POINT"


def crash_environment(faults: Faults, process: str, life: int) -> dict[str, str]:
    """What to add to the environment of `process` when it is started for the `life`-th time (from 1)."""
    fault = fault_of(faults, process, life)
    return {VARIABLE: f"{fault.point}:{fault.count}"} if fault else {}


class CrashWatch:
    """Which planned deaths came: fed with every end by SIGKILL that the watcher did not cause itself."""

    def __init__(self, faults: Faults) -> None:
        self._faults = faults
        self._fired: list[CrashFault] = []

    def killed(self, process: str, life: int) -> None:
        """This life of a process ended by SIGKILL."""
        fault = fault_of(self._faults, process, life)
        if fault is not None:
            self._fired.append(fault)

    def missing(self) -> list[str]:
        """The planned deaths that never came, in words."""
        return [of_crash(one) for one in self._faults.crash if not any(one is fired for fired in self._fired)]


def fault_of(faults: Faults, process: str, life: int) -> CrashFault | None:
    """The entry that this life dies of, None if it may live."""
    for fault in faults.crash:
        if fault.process == process:
            if not fault.lives or life <= fault.lives:
                return fault
            life -= fault.lives
    return None
