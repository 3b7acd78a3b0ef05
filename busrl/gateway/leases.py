"""Leases on claims of remote workers, on a clock that only counts time in which the keeper could have heard them.

Pure. Knows nothing of messages or rings.

- A step of the clock is at most `MOST_STEP_S`: a keeper that was stopped, or a machine that was suspended, ends no
  lease by waking up.
- A keeper that comes back grants every lease afresh (`Leases.grant` for all that the ledger shows as held).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from busrl.gateway.book import Held

MOST_STEP_S = 1.0


class FairClock:
    """Seconds since it was made, without the time for which its reader was late."""

    def __init__(self, now: float) -> None:
        self._seen = now
        self.time = 0.0

    def advance(self, now: float) -> float:
        self.time += min(max(0.0, now - self._seen), MOST_STEP_S)
        self._seen = now
        return self.time


@dataclass
class Lease:
    """One claim of one worker, until the clock says `until`."""

    name: str
    held: Held
    until: float


class Leases:
    """All leases; a slot has at most one. States of a lease: granted -> (settled | expired)."""

    def __init__(self, lease_s: float) -> None:
        self.lease_s = lease_s
        self._by_task: dict[str, Lease] = {}
        self._by_name: dict[str, dict[str, Lease]] = {}

    def grant(self, name: str, held: Held, now: float) -> Lease:
        lease = Lease(name, held, now + self.lease_s)
        self._by_task[held.task] = lease
        self._by_name.setdefault(name, {})[held.task] = lease
        return lease

    def find(self, task: str) -> Lease | None:
        return self._by_task.get(task)

    def of(self, name: str) -> list[Lease]:
        """What a worker holds, oldest first."""
        return list(self._by_name.get(name, {}).values())

    def renew(self, name: str, tasks: Iterable[str], now: float) -> list[str]:
        """Begin the leases of these tasks anew; returns those that are not held by this worker."""
        mine = self._by_name.get(name, {})
        lost = []
        for task in tasks:
            lease = mine.get(task)
            if lease is None:
                lost.append(task)
            else:
                lease.until = now + self.lease_s
        return lost

    def settle(self, lease: Lease) -> None:
        """The claim has ended, in whatever way."""
        task = lease.held.task
        if self._by_task.pop(task, None) is not None:
            self._by_name[lease.name].pop(task)
            if not self._by_name[lease.name]:
                del self._by_name[lease.name]

    def over(self, now: float) -> list[Lease]:
        """Leases whose time is over."""
        return [lease for lease in self._by_task.values() if lease.until <= now]
