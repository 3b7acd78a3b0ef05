"""Counts what passes on the bus: messages by name, bytes, rates, what was missed, and how far behind we are.

Pure: fed with envelopes and clock values. Knows nothing of sockets.

- The lag is the smallest of the last batch: a listener that is behind is behind with all messages. How late one is, is
  measured against the least age ever seen of its sender, so that a clock that is wrong does not look like a lag.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from busrl.launch.progress import Rate

MAX_NAMES: Final = 64  # names of the protocol are some twenty; what else comes is counted together
MAX_SENDERS: Final = 256
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
    _ticked: float | None = None
    _least_age: dict[str, float] = field(default_factory=dict)

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
            if self._ticked is not None and not flow.rate.points:
                flow.rate.add(0, self._ticked)  # none had come by then
        for one in (flow, self._total):
            one.count += 1
            one.bytes += size

    def late(self, sender: str, age_s: float) -> float:
        """By how much a message of this age is later than its sender's usually are."""
        least = min(age_s, self._least_age.get(sender, age_s))
        if sender in self._least_age or len(self._least_age) < MAX_SENDERS:
            self._least_age[sender] = least
        return age_s - least

    def batch(self, messages: int, least_late_s: float | None, now: float) -> None:
        """The end of one batch; `least_late_s`: of its messages, None where none of them tells."""
        if messages:
            self.last_at = now
        self.lag_s = least_late_s if least_late_s is not None else 0.0

    def tick(self, now: float) -> None:
        """Some times a second: what the rates are worked out from."""
        self._ticked = now
        for flow in (*self.by_name.values(), self._total):
            flow.rate.add(flow.count, now)

    def per_s(self) -> float:
        """Messages per second, all names."""
        return self._total.rate.per_s()
