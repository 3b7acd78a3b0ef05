"""When to ask again after a failure: waits that double, jitter, and what the server itself asks for.

Pure; the client sleeps. Knows nothing of requests.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from datetime import datetime, timezone
from email.utils import parsedate_to_datetime

EXPONENT_MOST = 30  # 2**30 first waits are more than any limit


@dataclass(frozen=True)
class Backoff:
    """Seconds: of the first wait, and of the longest that is not asked for by the server."""

    first_s: float
    most_s: float

    def wait_s(self, failures: int, asked_s: float | None, chance: float) -> float:
        """The wait after so many failures in a row; `chance` in [0, 1) spreads clients over the upper half of it."""
        own = min(self.most_s, self.first_s * 2.0 ** min(failures - 1, EXPONENT_MOST)) * (0.5 + 0.5 * chance)
        return max(own, asked_s or 0.0)


def retry_after_s(header: str | None, now: datetime | None = None) -> float | None:
    """Seconds that a Retry-After header asks for, as a number or as a date; None if it says nothing usable."""
    if not header:
        return None
    try:
        seconds = float(header)
    except ValueError:
        try:
            when = parsedate_to_datetime(header)
        except ValueError:
            return None
        if when.tzinfo is None:
            when = when.replace(tzinfo=timezone.utc)
        seconds = (when - (now or datetime.now(timezone.utc))).total_seconds()
    return max(0.0, seconds) if math.isfinite(seconds) else None
