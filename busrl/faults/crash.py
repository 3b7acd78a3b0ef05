"""Which crash point a process gets in which of its lives.

Pure: the topology's entries and a life's number in, an environment variable out. The ring's C++ core reads it
(csrc/include/busrl/crash.hpp) and ends the process with SIGKILL, which leaves what any death leaves.

- A process has one point at a time: several entries for one process are used one after the other, each for its lives.
"""

from __future__ import annotations

from busrl.faults.plan import CrashFault, Faults, of_crash

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
