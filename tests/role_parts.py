"""Parts for a role under test: `parts(ring=...)` gives it what the test needs, the rest stands still; and a round that
holds a version.

    role = Scheduler(tmp_path, "scheduler", parts(topology=topology, ring=ring))
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

from busrl.paths import RunPaths
from busrl.ring import Ring
from busrl.roles import version_pin
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
    topology = topology or SimpleNamespace(tags=("",), tag="")
    return Parts(topology, ring or SimpleNamespace(), bus or StillBus(), fates, validate)


@contextmanager
def held(paths: RunPaths) -> Iterator[Ring]:
    """A validator, which is this process, holds the version of a model, as in a round; its entry's ring."""
    ring = Ring.attach(paths.ring_name)
    try:
        ring.register("validator", "validator")
        assert version_pin.pin(ring)
        yield ring
        version_pin.unpin(ring)
    finally:
        ring.close()
