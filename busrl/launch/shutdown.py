"""In which order the processes of a run end, and when patience with one of them is over.

Pure: told who is alive and what time it is, it answers whom to ask and whom to kill. Knows nothing of processes.

- Producers end before consumers, so that nothing new arrives at a process that is ending; the bus is last.
- A process is asked once (SIGTERM, beside STOP on the bus) and killed by name after its time.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

ORDER = ("scheduler", "rollout", "reward", "validator", "learner", "keeper", "bus")


@dataclass(frozen=True)
class Ask:
    """Send SIGTERM."""

    name: str


@dataclass(frozen=True)
class Force:
    """Send SIGKILL; `why` names the process and how long it was waited for."""

    name: str
    why: str


@dataclass
class Shutdown:
    """One orderly stop. `stop_s` is the patience with each stage."""

    stop_s: float
    _stage: int = 0
    _since: float | None = None
    _asked: set[str] = field(default_factory=set)
    _forced: set[str] = field(default_factory=set)

    def step(self, alive: Collection[str], now: float) -> list[Ask | Force]:
        """What to do now, given the names of the processes that still run."""
        while self._stage < len(ORDER):
            here = [name for name in alive if stage_of(name) == self._stage]
            if here:
                return self._press(here, now)
            self._stage, self._since = self._stage + 1, None
        return []

    def _press(self, here: list[str], now: float) -> list[Ask | Force]:
        if self._since is None:
            self._since = now
        waited = now - self._since
        actions: list[Ask | Force] = [Ask(name) for name in here if name not in self._asked]
        self._asked.update(here)
        if waited > self.stop_s:
            late = [name for name in here if name not in self._forced]
            self._forced.update(late)
            actions += [Force(name, f"{name} did not end within {waited:.1f} s of SIGTERM: killed") for name in late]
        return actions


def stage_of(name: str) -> int:
    """Place of a process in the order; names that are none of ours go with the rollouts."""
    role = name.partition("/")[0]
    return ORDER.index(role) if role in ORDER else 1
