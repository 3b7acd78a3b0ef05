"""What the broker says of those whom its TCP side turned away: who at once, then once a minute how often.

Talks to a writer of lines; knows nothing of sockets. A flood of strangers must not fill the disk, so an address has one
line a minute, and no refusal is missing from the counts.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from busrl.bus import Refusal
from busrl.ledger.throttle import Throttle

EVERY_S = 60.0
log = logging.getLogger("busrl")


class Refusals:
    """`add` for each; `tell` from time to time for what was held back."""

    def __init__(self, write: Callable[[str], None]) -> None:
        self._write, self._throttle, self._total = write, Throttle(EVERY_S), 0

    def add(self, refusal: Refusal) -> None:
        self._total += refusal.count
        text = f"{refusal} ({self._total} refused in all)"
        if self._throttle.admit(refusal.address, (text,), time.monotonic()):
            self._tell(text)

    def tell(self) -> None:
        for count, (text,), _ in self._throttle.due(time.monotonic()):
            self._tell(f"{count} more like this, the latest: {text}")

    def _tell(self, text: str) -> None:
        log.warning(text)
        self._write(text)
