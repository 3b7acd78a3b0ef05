"""What an endpoint counted, frozen for whoever looks: the monitor, the log, a test.

Knows nothing of sockets. The numbers are what the code itself counts; nothing is estimated except `missed`, which comes
from gaps in the senders' own numbering.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class EndpointStats:
    """One endpoint's life so far. `sent_by` is per topic that is remembered, `received_by` per message name; `wire` is
    `wire.KIND`."""

    name: str
    wire: str
    sent: int
    received: int
    missed: int
    repeated: int
    malformed: int
    unknown_types: int
    wrong_version: int
    oversize: int
    sent_by: dict[str, int]
    received_by: dict[str, int]
    missed_by: dict[tuple[str, str], int]

    @property
    def dropped(self) -> int:
        """Messages that arrived and were thrown away."""
        return self.malformed + self.unknown_types + self.wrong_version + self.oversize
