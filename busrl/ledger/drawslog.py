"""`draws.log`: the samples that a start found dispatched but in no slot, and put back to be generated again.

Talks to one file of JSON lines. Knows nothing of fates or of the ring; the caller resets the fate afterwards.

- A line is durable before `put_back` returns, so a uid is on record here before it can be dispatched again.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from pathlib import Path

import msgspec

from busrl.ledger.files import LineFile


class PutBack(msgspec.Struct, kw_only=True):
    """One batch of put-backs and why they were made."""

    time_ns: int
    why: str
    uids: list[int]


class DrawsLog:
    """Appends put-backs; one process at a time (the start holds the run's lock)."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._lines = LineFile(path, sync=True)

    def put_back(self, uids: Iterable[int], why: str) -> None:
        """Record that these uids go back to "none" and may be dispatched again."""
        entry = PutBack(time_ns=time.time_ns(), why=why, uids=sorted(uids))
        if entry.uids:
            self._lines.append(msgspec.json.encode(entry))

    def close(self) -> None:
        self._lines.close()


def read_draws(path: str | os.PathLike[str]) -> list[PutBack]:
    """All put-backs in order; none if there is no file. Half a last line was never acted upon and is left out."""
    file = Path(path)
    if not file.exists():
        return []
    whole, _, _ = file.read_bytes().rpartition(b"\n")
    return [msgspec.json.decode(line, type=PutBack) for line in whole.splitlines() if line]
