"""Which crash point a process gets in which of its lives.

Pure: the topology's entries and a life's number in, an environment variable out. The ring's C++ core reads it
(csrc/include/busrl/crash.hpp) and ends the process with SIGKILL, which leaves what any death leaves.

- A process has one point at a time: several entries for one process are used one after the other, each for its lives.
"""

from __future__ import annotations

from busrl.faults.plan import CrashFault, Faults

VARIABLE = "BUSRL_CRASH_POINT"


def crash_environment(faults: Faults, process: str, life: int) -> dict[str, str]:
    """What to add to the environment of `process` when it is started for the `life`-th time (from 1)."""
    fault = fault_of(faults, process, life)
    return {VARIABLE: f"{fault.point}:{fault.count}"} if fault else {}


def fault_of(faults: Faults, process: str, life: int) -> CrashFault | None:
    """The entry that this life dies of, None if it may live."""
    for fault in faults.crash:
        if fault.process == process:
            if not fault.lives or life <= fault.lives:
                return fault
            life -= fault.lives
    return None
