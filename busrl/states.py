"""Facts that parts of busrl share: states of slots and fates, uids, ends of answers, words of the header.

Talks to nothing and imports nothing of busrl, so that every part may import it. The C++ core has its own copy of what
it stores (`csrc/include/busrl`), which a test compares with this one; `busrl.ledger.audit` has a third on purpose.

- Numbers and letters here stand in shared memory and in files of runs: they never change their meaning.
"""

from __future__ import annotations

import re
from enum import Enum, IntEnum
from typing import TYPE_CHECKING, Final, TypeVar

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

Uids = TypeVar("Uids", int, "npt.NDArray[np.int64]", "npt.NDArray[np.uint64]")
VALIDATE_BIT: Final = 1 << 62  # of a uid: the sample belongs to a validation round and to `fates.validate.bin`
POISON_DEATHS: Final = 2  # of workers that held one slot and no other: nobody else is given it
PAUSE_STARTING: Final = 1  # bit of the header word `generation_pause`: the learner is not ready yet
PAUSED: Final = 2  # the next one: nobody draws tokens; launch's, which writes the word while bit 0 is clear

# -- names -----

HOST_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,38}")  # and of workers from outside: 39 bytes in the ring
TINY: Final = "tiny:"  # model.path and data.* may name one of the quickstart's own tasks instead of a file
TINY_POSITIONS: Final = 128  # tokens that the models of those tasks take
ENVIRONMENT: Final = re.compile(r"(gymnasium|textarena|openenv|verifiers):(.+)")  # what an agent may play, by library


class State(IntEnum):
    """State of a slot; a working state (*) has an owner.

    FREE -> RESERVED* -> QUEUED -> GENERATING* -> GENERATED -> REWARDING* -> REWARDED -> TRAINING* -> FREE
    GENERATING* -> QUEUED: one more committed segment, or back. REWARDING* -> GENERATED, TRAINING* -> REWARDED: back.
    any state but FREE and RESERVED* -> DROPPED -> FREE. Owner dead: RESERVED* -> QUEUED or FREE,
    GENERATING* -> QUEUED, REWARDING* -> GENERATED, TRAINING* -> REWARDED.
    """

    FREE = 0
    RESERVED = 1
    QUEUED = 2
    GENERATING = 3
    GENERATED = 4
    REWARDING = 5
    REWARDED = 6
    TRAINING = 7
    DROPPED = 8


WORKING: Final = (State.RESERVED, State.GENERATING, State.REWARDING, State.TRAINING)


class SampleClass(IntEnum):
    """The purpose of a sample; workers take both, the learner takes TRAIN and the validator VALIDATE."""

    TRAIN = 0
    VALIDATE = 1


class Fate(IntEnum):
    """The fate of a sample: one ASCII byte of a fate table.

    NONE -> DISPATCHED -> TRAINED | VALIDATED | a reason by rule (small letter) | an accident (capital letter).
    A put-back at start is the only way from DISPATCHED to NONE. A reason is stored only over DISPATCHED, TRAINED over
    anything, so any process may repeat any store late. An accident of try 0 is rolled again once as try 1; a sample set
    aside by rule never is.
    """

    NONE = 0, "none"
    DISPATCHED = ord("D"), "dispatched"
    TRAINED = ord("T"), "trained"
    VALIDATED = ord("V"), "validated"
    FLAT = ord("f"), "flat group"
    OLD = ord("o"), "too old"
    INCOMPLETE = ord("i"), "incomplete group"
    ENDED = ord("e"), "run ended"
    LONG = ord("l"), "prompt too long"
    SKIPPED = ord("s"), "left out by pass rate"
    UNUSED = ord("u"), "seat not used"  # made no call in an episode that ended well; the group goes on without it
    POISON = ord("P"), "poison"
    REWARD_RAISED = ord("R"), "reward raised"
    REWARD_HUNG = ord("H"), "reward hung"
    MALFORMED = ord("M"), "malformed"
    UNRENDERED = ord("X"), "prompt not rendered"

    words: str

    def __new__(cls, code: int, words: str) -> Fate:
        fate = int.__new__(cls, code)
        fate._value_, fate.words = code, words
        return fate

    @property
    def letter(self) -> str:
        """The code as the ring's calls, records and messages hold it; empty for NONE."""
        return chr(self.value) if self.value else ""


FATE_NAMES: Final[dict[int, str]] = {fate: fate.words for fate in Fate}
RULES: Final[frozenset[int]] = frozenset({
    Fate.FLAT, Fate.OLD, Fate.INCOMPLETE, Fate.ENDED, Fate.LONG, Fate.SKIPPED, Fate.UNUSED,
})
ACCIDENTS: Final[frozenset[int]] = frozenset(
    {Fate.POISON, Fate.REWARD_RAISED, Fate.REWARD_HUNG, Fate.MALFORMED, Fate.UNRENDERED}
)
TERMINAL: Final[frozenset[int]] = RULES | ACCIDENTS | {Fate.TRAINED, Fate.VALIDATED}
REWARD_FATES: Final = {"raised": Fate.REWARD_RAISED, "hung": Fate.REWARD_HUNG, "malformed": Fate.MALFORMED}


def fate_name(fate: int | str) -> str:
    """The fate in words, given as its byte or its letter; an unknown byte is shown as such and never raises."""
    code = int(fate) if not isinstance(fate, str) else ord(fate) if fate else 0
    return FATE_NAMES.get(code, f"unknown code {code}")


class Finish(IntEnum):
    """The reason why a sample's newest segment has no more tokens; a slot holds 0 while another segment follows."""

    EOS = 1  # its last token ends the sequence
    LENGTH = 2  # a limit cut it
    ABORTED = 3  # the caller ended it: generated again, so neither a slot nor a log holds this code


# A model has a group for each of its seats in an episode: group = draw x seats + seat. With one seat they are draws.


def uid_of(group: int, attempt: int, member: int, group_size: int) -> int:
    """The number of a sample for training; one for validation counts the samples of all rounds, plus VALIDATE_BIT."""
    return (group * 2 + attempt) * group_size + member


def shown_uid(uid: int) -> str:
    """For people, as `busrl ring inspect --uid` takes it: v7 is the seventh sample of validation, from 0 on."""
    return f"v{uid & ~VALIDATE_BIT}" if uid & VALIDATE_BIT else str(uid)


def place_of(uid: Uids, group_size: int) -> tuple[Uids, Uids, Uids]:
    """The other way: (group, attempt, member) of a training sample, or of an array of them."""
    tried, member = uid // group_size, uid % group_size
    return tried // 2, tried % 2, member


def draw_of(group: Uids, seats: int) -> Uids:
    """The draw whose prompt a group answers, of a group or of an array of them."""
    return group // seats


def seat_of(group: Uids, seats: int) -> Uids:
    """The seat that a group belongs to, in the order of the model's seats."""
    return group % seats


def episode_of(uid: Uids, group_size: int, seats: int) -> Uids:
    """The number of the episode that a sample is a side of: the same for all of them, and with one seat the uid."""
    group, attempt, member = place_of(uid, group_size)
    return (draw_of(group, seats) * 2 + attempt) * group_size + member


def side_of(episode: Uids, seat: int, group_size: int, seats: int) -> Uids:
    """The uid of a seat's sample of an episode."""
    draw, attempt, member = place_of(episode, group_size)
    return ((draw * seats + seat) * 2 + attempt) * group_size + member


class RunPhase(IntEnum):
    """Header word `run_state`: RUNNING -> FINISHING (the goal is reached) | STOPPING (asked to stop)."""

    RUNNING = 0
    FINISHING = 1
    STOPPING = 2

    @classmethod
    def _missing_(cls, value: object) -> RunPhase:
        """A number of a later busrl is shown as a run that runs."""
        return cls.RUNNING


class HeaderWord(str, Enum):
    """The words of the run in the ring's header, in their order there."""

    VERSION = "version"
    VERSION_STEP = "version_step"
    NEXT_ADMISSION = "next_admission"
    UNPUBLISHED_GROUPS = "unpublished_groups"
    HOLD = "hold"
    STEP = "step"
    RUN_STATE = "run_state"
    GENERATION_PAUSE = "generation_pause"


CRASH_POINTS: Final = (
    "register.lock", "register.cas", "dispatch.claimed", "dispatch.reserved", "dispatch.written", "dispatch.uid",
    "dispatch.fate", "dispatch.queued", "move.cas", "move.hinted", "claim.cas", "take.claimed", "put.copied",
    "put.stored", "commit.before", "commit.after", "release.before", "release.after", "finish.fate", "finish.free",
    "drop.cas", "drop.fate", "reap.before", "reap.cas", "reap.entry", "remote.described", "remote.entered",
    "remote.rested", "expire.before", "cut.lowered", "cut.punched", "trim.claimed",
)
