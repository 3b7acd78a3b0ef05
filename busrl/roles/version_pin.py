"""The validation hold: one word of the ring's header by which a validator pins the published policy version.

Used by the validator (pins and unpins), the learner (waits) and the keeper (clears the hold of a dead one). Talks to
the ring only. A module of its own because three roles share it.

- The word names one life of one process: index in the process table and its epoch there. Indexes are used again, so an
  index alone would let a hold outlive its holder.
"""

from __future__ import annotations

from busrl.ring import Ring
from busrl.states import HeaderWord

INDEX_BITS = 16


def token(ring: Ring) -> int:
    """The word while this process holds; never 0."""
    epoch = next(entry.epoch for entry in ring.processes() if entry.index == ring.index)
    return epoch << INDEX_BITS | ring.index


def pin(ring: Ring) -> bool:
    """Take the hold if no living process has it."""
    seen = ring.header(HeaderWord.HOLD)
    return (not seen or is_stale(ring, seen)) and ring.cas_header(HeaderWord.HOLD, seen, token(ring))


def unpin(ring: Ring) -> None:
    """Give up the hold if this process has it."""
    ring.cas_header(HeaderWord.HOLD, token(ring), 0)


def pinned_by(ring: Ring) -> int:
    """The word of a living holder, 0 if there is none."""
    seen = ring.header(HeaderWord.HOLD)
    return 0 if not seen or is_stale(ring, seen) else seen


def clear_stale(ring: Ring) -> bool:
    """Clear the hold of a dead process; True if there was one."""
    seen = ring.header(HeaderWord.HOLD)
    return bool(seen) and is_stale(ring, seen) and ring.cas_header(HeaderWord.HOLD, seen, 0)


def is_stale(ring: Ring, seen: int) -> bool:
    """Whether the life that this word names is over."""
    lives = {entry.epoch << INDEX_BITS | entry.index for entry in ring.processes()}
    return seen not in lives or ring.is_dead(seen & ((1 << INDEX_BITS) - 1))


def name_of(ring: Ring, seen: int) -> str:
    index = seen & ((1 << INDEX_BITS) - 1)
    return next((f"{one.label} (pid {one.pid})" for one in ring.processes() if one.index == index), f"process {index}")
