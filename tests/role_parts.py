"""Parts for a role under test: `parts(ring=...)` gives it what the test needs, the rest stands still.

    role = Scheduler(tmp_path, "scheduler", parts(topology=topology, ring=ring))
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from busrl.roles.actor import Parts


class StillBus:
    """A bus on which nobody speaks; `sent` keeps what the role sends."""

    def __init__(self) -> None:
        self.sent: list[Any] = []

    def send(self, message: Any, address: str = "") -> None:
        self.sent.append(message)

    def recv(self, timeout_s: float) -> None: ...

    def drain(self) -> list[Any]:
        return []

    def heartbeat(self, *presence: Any) -> None: ...

    def close(self) -> None: ...


def parts(topology: Any = None, ring: Any = None, bus: Any = None, fates: Any = None, validate: Any = None) -> Parts:
    return Parts(topology or SimpleNamespace(), ring or SimpleNamespace(), bus or StillBus(), fates, validate)
