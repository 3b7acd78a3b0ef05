"""The slot ring: each sample under way is in a slot of shared memory, with a state and an owner.

The Python interface of the C++ core `busrl._ring`, whose rules are in `csrc/include/busrl`: rings, fate tables, role
locks. Talks to shared memory and the run directory. Knows nothing of messages, models, groups or the meaning of
tensors.

- Only the process in its control word changes a slot; the word from the claim is the key to every later call.
- Every change of state is one compare-and-swap. A call that returns 0 or False lost it: read the slot again.
- Views are made in place and stay mapped after `close()`; their values are stable only while the slot is held.
"""

from busrl._ring import LAYOUT, MAX_TENSORS, NO_SEGMENT, UID_NONE, Fates, Process, Reaped, Ring, RingStats
from busrl.ring.locks import OfdLock, RingGuard
from busrl.states import WORKING, State


def segments_of(word: int) -> int:
    """Count the committed segments of the slot."""
    return (word >> 36) & 0xFF


def seq_of(word: int) -> int:
    """The claim count of the slot: slot and count identify a claim for ever."""
    return word & ((1 << 36) - 1)


def state_of(word: int) -> State:
    """The state of the slot."""
    return State(word >> 58)


def owner_of(word: int) -> int:
    """The process-table index of the owner; 0 where the state has none."""
    return (word >> 44) & 0x3FFF if state_of(word) in WORKING else 0


__all__ = [
    "LAYOUT", "MAX_TENSORS", "NO_SEGMENT", "UID_NONE", "WORKING", "Fates", "OfdLock", "Process", "Reaped", "Ring",
    "RingGuard", "RingStats", "State", "owner_of", "segments_of", "seq_of", "state_of",
]
