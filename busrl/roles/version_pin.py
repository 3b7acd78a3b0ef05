"""The version pin: the header word `hold`, by which a validator keeps the published policy version for its round.

Used by the validator (pins and unpins), the learner (waits) and the keeper (clears the pin of a dead one). Talks to
the ring only. A module of its own because three roles share it.

- The word names one life of one process: index in the process table and its epoch there. Indexes are used again, so an
  index alone would let a pin outlive its process.
"""

from __future__ import annotations

from busrl.ring import Process, Ring
from busrl.states import HeaderWord

INDEX_BITS = 16
HELD = "held by validation"  # what a learner shows while it keeps a version back


def token(ring: Ring) -> int:
    """The word while this process pins the version; never 0."""
    epoch = next(entry.epoch for entry in ring.processes() if entry.index == ring.index)
    return epoch << INDEX_BITS | ring.index


def pin(ring: Ring) -> bool:
    """Pin the version if no living process does; False if one does."""
    seen = ring.header(HeaderWord.HOLD)
    return (not seen or is_stale(ring, seen)) and ring.cas_header(HeaderWord.HOLD, seen, token(ring))


def unpin(ring: Ring) -> None:
    """End the pin if it is of this process."""
    ring.cas_header(HeaderWord.HOLD, token(ring), 0)


def pinned_by(ring: Ring) -> int:
    """The word of the living process that pins the version, 0 if there is none."""
    seen = ring.header(HeaderWord.HOLD)
    return 0 if not seen or is_stale(ring, seen) else seen


def clear_stale(ring: Ring) -> bool:
    """Clear the pin of a dead process; True if there was one."""
    seen = ring.header(HeaderWord.HOLD)
    return bool(seen) and is_stale(ring, seen) and ring.cas_header(HeaderWord.HOLD, seen, 0)


def is_stale(ring: Ring, seen: int) -> bool:
    """True if the life of the process that this word names is over."""
    lives = {entry.epoch << INDEX_BITS | entry.index for entry in ring.processes()}
    return seen not in lives or ring.is_dead(_index(seen))


def keeps_back(ring: Ring) -> bool:
    """True while a learner shows that it keeps a version back for a hold."""
    return any(entry.activity == HELD for entry in ring.processes())


def name_of(ring: Ring, seen: int) -> str:
    process = _holder(ring, seen)
    return f"process {_index(seen)}" if process is None else f"{process.label} (pid {process.pid})"


def results_of(ring: Ring, seen: int) -> int:
    """The results that the holder has counted in its entry: those of a round whose samples are in another model's ring.
    """
    process = _holder(ring, seen)
    return 0 if process is None else process.samples


def _index(seen: int) -> int:
    return seen & ((1 << INDEX_BITS) - 1)


def _holder(ring: Ring, seen: int) -> Process | None:
    return next((process for process in ring.processes() if process.index == _index(seen)), None)
