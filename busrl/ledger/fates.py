"""The fate codes: one ASCII byte per sample says what became of it, and whether that was a rule or an accident.

Talks to nothing; the ring stores these bytes in `fates.bin`, the scheduler and the audit read them. Knows nothing of
slots or files.

- NONE -> DISPATCHED -> one terminal code; a put-back at start is the only way from DISPATCHED to NONE.
- A reason is stored only over DISPATCHED, TRAINED over anything, so any process may repeat any store late.
- An accident of try 0 is re-rolled once as try 1; a rule never is.
"""

from __future__ import annotations

from enum import IntEnum

import numpy as np
import numpy.typing as npt

BLOCK = 1 << 20


class Fate(IntEnum):
    """NONE -> DISPATCHED -> TRAINED | VALIDATED | a reason by rule (small letter) | an accident (capital letter)."""

    NONE = 0
    DISPATCHED = ord("D")
    TRAINED = ord("T")
    VALIDATED = ord("V")
    FLAT = ord("f")
    OLD = ord("o")
    INCOMPLETE = ord("i")
    ENDED = ord("e")
    LONG = ord("l")
    POISON = ord("P")
    REWARD_RAISED = ord("R")
    REWARD_HUNG = ord("H")
    MALFORMED = ord("M")
    UNRENDERED = ord("X")

    @property
    def char(self) -> str:
        """The one-letter code that the ring's calls take; empty for NONE."""
        return chr(self.value) if self.value else ""


NAMES: dict[int, str] = {
    Fate.NONE: "none",
    Fate.DISPATCHED: "dispatched",
    Fate.TRAINED: "trained",
    Fate.VALIDATED: "validated",
    Fate.FLAT: "flat group",
    Fate.OLD: "too old",
    Fate.INCOMPLETE: "incomplete group",
    Fate.ENDED: "run ended",
    Fate.LONG: "prompt too long",
    Fate.POISON: "poison",
    Fate.REWARD_RAISED: "reward raised",
    Fate.REWARD_HUNG: "reward hung",
    Fate.MALFORMED: "malformed",
    Fate.UNRENDERED: "prompt not rendered",
}

RULES: frozenset[int] = frozenset({Fate.FLAT, Fate.OLD, Fate.INCOMPLETE, Fate.ENDED, Fate.LONG})
ACCIDENTS: frozenset[int] = frozenset(
    {Fate.POISON, Fate.REWARD_RAISED, Fate.REWARD_HUNG, Fate.MALFORMED, Fate.UNRENDERED}
)
TERMINAL: frozenset[int] = RULES | ACCIDENTS | {Fate.TRAINED, Fate.VALIDATED}


def code_of(fate: int | str) -> int:
    """The byte of a fate given as a byte or as its letter ("" is none)."""
    if isinstance(fate, str):
        return ord(fate) if fate else 0
    return int(fate)


def is_accident(fate: int | str) -> bool:
    """Something broke: the member is re-rolled once."""
    return code_of(fate) in ACCIDENTS


def is_rule(fate: int | str) -> bool:
    """Set aside on purpose: never re-rolled."""
    return code_of(fate) in RULES


def name_of(fate: int | str) -> str:
    """The fate in words; an unknown byte is shown as such and never raises."""
    code = code_of(fate)
    return NAMES.get(code, f"unknown code {code}")


def histogram(codes: npt.NDArray[np.uint8]) -> dict[str, int]:
    """How many samples have each fate, by name, without "none"; unknown codes have their own entries."""
    counts = np.zeros(256, np.int64)
    for start in range(0, codes.size, BLOCK):  # bincount makes eight bytes of each
        counts += np.bincount(codes[start : start + BLOCK], minlength=256)
    return {name_of(code): int(counts[code]) for code in range(1, 256) if counts[code]}
