"""Warnings and errors, newest first, each once although the run's file and the bus both tell of it.

Pure. Most processes write a line to errors.jsonl and publish ERROR; a foreign actor publishes only.
"""

from __future__ import annotations

from collections import deque
from itertools import islice
from typing import Final

from busrl.monitor.seen import ErrorSeen

KEPT: Final = 200
SAME_S: Final = 5.0  # the two reports of one event are closer together than this


class Complaints:
    """`count` of all, the newest `KEPT` with their text."""

    def __init__(self) -> None:
        self.count = 0
        self._newest: deque[tuple[ErrorSeen, str]] = deque(maxlen=KEPT)

    def add(self, seen: ErrorSeen, source: str) -> bool:
        """One report by `source` ("file" or "bus"); False if the other source has told of it already."""
        for at, (known, told_by) in enumerate(self._newest):
            if told_by and told_by != source and _same(known, seen):
                self._newest[at] = (known, "")  # both have told: the next report is another event
                return False
        self.count += 1
        self._newest.appendleft((seen, source))
        return True

    def before(self, count: int) -> None:
        """So many more happened earlier, whose text was not read."""
        self.count += count

    def newest(self, limit: int = KEPT) -> list[ErrorSeen]:
        """The newest, newest first."""
        return [seen for seen, _ in islice(self._newest, limit)]


def _same(one: ErrorSeen, other: ErrorSeen) -> bool:
    alike = (one.where, one.text) == (other.where, other.text)
    return alike and address_of(one.process) == address_of(other.process) and abs(one.time - other.time) < SAME_S


def address_of(process: str) -> str:
    """`rollout/0` and `rollout-0` are one process: the name in the table, and as it stands in a topic."""
    return process.replace("/", "-")
