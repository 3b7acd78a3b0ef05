"""Claims of a worker: the ring's own best, or in rounds of segments those that this wave allows.

Talks to the ring, for the rollout role and for the keeper's stand-ins. Knows nothing of what is generated.
"""

from __future__ import annotations

from busrl.ring import Ring, State
from busrl.scheduling.limits import Limits
from busrl.scheduling.waves import Waves


def waves_of(limits: Limits) -> Waves | None:
    """The waves of a run whose rounds are made of segments; None for any other."""
    return Waves(limits.n_min) if limits.waves else None


def take_queued(ring: Ring, waves: Waves | None, limit: int, most_attempts: int) -> list[tuple[int, int]]:
    """Claim up to `limit` QUEUED slots for generation: (slot, word) of each."""
    if waves is None:
        return list(ring.take(State.QUEUED, State.GENERATING, cls=None, limit=limit, max_attempt=most_attempts))
    next_admission = ring.header("next_admission")  # before the lines: a slot looks less far than it is
    lines = ring.lines()
    taken = []
    for slot in waves.best(lines, next_admission, limit, most_attempts):
        word = ring.claim(slot, int(lines["word"][slot]), State.GENERATING)
        if word:
            taken.append((slot, word))
    return taken
