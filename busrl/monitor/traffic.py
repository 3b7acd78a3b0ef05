"""Counts what passes on the bus: messages by name, bytes, rates, what was missed, and how far behind we are.

Pure: fed with envelopes and clock values. Knows nothing of sockets.

- The lag is the smallest age of any message of the last batch: a listener that is behind is behind with all of them,
  while one sender whose clock is wrong is only one.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from busrl.launch.progress import Rate

MAX_NAMES: Final = 64  # names of the protocol are some twenty; what else comes is counted together
OTHERS: Final = "(others)"


@dataclass
class Flow:
    """Of one name: how many messages and bytes so far, and how fast they come."""

    count: int = 0
    bytes: int = 0
    rate: Rate = field(default_factory=Rate)


@dataclass
class Traffic:
    """The bus as its tap shows it. `missed` and `malformed` are the tap's own counts."""

    by_name: dict[str, Flow] = field(default_factory=dict)
    missed: int = 0
    malformed: int = 0
    resyncs: int = 0
    lag_s: float = 0.0
    last_at: float | None = None
    _total: Flow = field(default_factory=Flow)

    @property
    def count(self) -> int:
        return self._total.count

    @property
    def bytes(self) -> int:
        return self._total.bytes

    def heard(self, name: str, size: int) -> None:
        """One message of so many bytes."""
        flow = self.by_name.get(name)
        if flow is None:
            if len(self.by_name) >= MAX_NAMES:
                name = OTHERS
            flow = self.by_name.setdefault(name, Flow())
        for one in (flow, self._total):
            one.count += 1
            one.bytes += size

    def batch(self, youngest_s: float | None, now: float) -> None:
        """The end of one batch; `youngest_s`: the age of its youngest message, None if there was none."""
        if youngest_s is not None:
            self.last_at = now
        self.lag_s = max(0.0, youngest_s) if youngest_s is not None else 0.0

    def tick(self, now: float) -> None:
        """Some times a second: what the rates are worked out from."""
        for flow in (*self.by_name.values(), self._total):
            flow.rate.add(flow.count, now)

    def per_s(self) -> float:
        """Messages per second, all names."""
        return self._total.rate.per_s()
