"""The sides of an episode, one sample for each trained seat: which of them a process may claim, and their claims.

Talks to the rings of ledgers. The decisions are pure functions of a copy of a ring's lines and of the fates that are
read after it. Knows nothing of model calls, rewards or the code of episodes.

- The first side of an episode is its lead. Who claims a lead sample claims each sibling that is QUEUED then, and never
  waits for one. A sibling that comes later is an orphan once its lead sample is past, and is claimed by itself.
- A lead sample is past if it has a final fate, if it is GENERATED or later, or if it has no fate and its group is
  closed; a second try also if it has neither fate nor slot, and its first try is past by something else than an
  accident, after which it would come. Of a first try that stays so.
- A ledger that is finished has no sides. Samples of validation have no siblings.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from busrl.ring import Ring, State
from busrl.roles.ledgers import Ledger
from busrl.scheduling.groups import closing
from busrl.states import (
    ACCIDENTS,
    TERMINAL,
    VALIDATE_BIT,
    Fate,
    SampleClass,
    draw_of,
    episode_of,
    place_of,
    seat_of,
    side_of,
)

LINE_FIELDS = ["uid", "cls", "version", "step", "max_new_tokens", "temperature", "top_p", "priority", "admission",
               "group"]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]
Bytes = npt.NDArray[np.uint8]
_TERMINAL, _ROLLED_ONCE = np.zeros(256, np.bool_), np.zeros(256, np.bool_)
_TERMINAL[list(TERMINAL)] = True
_ROLLED_ONCE[list(TERMINAL - ACCIDENTS)] = True  # of a first try: there will be no second one


@dataclass(eq=False)
class ClaimedSample:
    """A sample of this process: its slot, the state word of the claim, and its line at the claim. Of an episode of
    several seats it is a side: that of `seat`, in `ring`; the first one has those that were claimed with it, by seat,
    as `siblings`."""

    slot: int
    word: int
    line: dict[str, Any]
    ring: Ring | None = None  # None: the one of the process
    seat: str = ""  # "": the only one
    siblings: dict[str, ClaimedSample] = field(default_factory=dict)
    episode: int = -1  # the number that all sides have; -1: the uid
    read: int = 0  # ids that its calls read, in sum
    computed: int = 0  # those of them that no engine had in its prefix cache
    alone: bool = False  # some sides of the episode are not claimed with it
    partner_tokens: int = 0  # ids that the other seats drew,
    partner_age: int = 0  # and the steps that their learners had made since the weights of each, in sum
    switched: int = 0  # calls of the episode that an opponent answered which it had not begun with

    @property
    def uid(self) -> int:
        return int(self.line["uid"])

    @property
    def number(self) -> int:
        """The number of the episode."""
        return self.uid if self.episode < 0 else self.episode

    @property
    def validates(self) -> bool:
        return bool(self.line["cls"] == SampleClass.VALIDATE)

    def answered_beside(self, tokens: int, age: int) -> None:
        """Count ids that another seat drew, with weights so many steps old."""
        self.partner_tokens, self.partner_age = self.partner_tokens + tokens, self.partner_age + age * tokens

    def ending(self) -> list[ClaimedSample]:
        """The sides in the order in which they end: this one last."""
        return [*reversed(self.siblings.values()), self]


class Look:
    """A copy of a ledger's lines, and what it says of training samples."""

    def __init__(self, ledger: Ledger) -> None:
        self.ledger, self.lines = ledger, ledger.ring.lines()
        state, cls = self.lines["state"], self.lines["cls"]
        possible = self.lines["uid"] < VALIDATE_BIT
        live = np.flatnonzero((state >= State.QUEUED) & (cls == SampleClass.TRAIN) & possible)
        uids = self.lines["uid"][live].astype(np.int64)
        order = np.argsort(uids, kind="stable")
        self._slots, self._uids = live[order], uids[order]

    @cached_property
    def queued(self) -> Ints:
        """Slots of QUEUED training samples."""
        slots: Ints = self._slots[self.lines["state"][self._slots] == State.QUEUED]
        return slots

    def slots_of(self, uids: Ints) -> Ints:
        """The slot of each of these samples; -1 for one that has none."""
        if not len(self._uids):
            return np.full(len(uids), -1)
        at = np.minimum(np.searchsorted(self._uids, uids), len(self._uids) - 1)
        return np.where(self._uids[at] == uids, self._slots[at], -1)

    def states_of(self, uids: Ints) -> Bytes:
        """The state of the slot of each of these samples; FREE for one that has none."""
        slots = self.slots_of(uids)
        return np.where(slots >= 0, self.lines["state"][slots], State.FREE).astype(np.uint8)

    def is_queued(self, slot: int) -> bool:
        return slot >= 0 and bool(self.lines["state"][slot] == State.QUEUED)


def past(uids: Ints, states: Bytes, firsts: Bytes, fates: Bytes, size: int) -> Bools:
    """A mask of the lead samples that nobody will claim any more, or not with their siblings. `states`: those of their
    slots; `firsts`: of the slots of their first tries; `fates`: the bytes of all samples, read after the slots."""
    group, attempt, member = place_of(uids, size)
    near = np.zeros((len(uids), 2 * size), np.uint8)  # fates of the sample's group
    at = group[:, None] * 2 * size + np.arange(2 * size)
    there = at < len(fates)
    near[there] = fates[at[there]]
    rows = np.arange(len(uids))
    fate = near[rows, uids - group * 2 * size]
    once = _ROLLED_ONCE[near[rows, member]] | ((firsts >= State.GENERATED) & (firsts < State.DROPPED))
    gone = (fate == Fate.NONE) & (closing(near).any(1) | ((attempt == 1) & (states == State.FREE) & once))
    over: Bools = _TERMINAL[fate] | (states >= State.GENERATED) | gone
    return over


class Sides:
    """Claims episodes whose sides are in these ledgers, that of the lead first."""

    def __init__(self, ledgers: Sequence[Ledger]) -> None:
        self._ledgers = ledgers

    @property
    def rings(self) -> list[Ring]:
        return [ledger.ring for ledger in self._ledgers]

    def take(self, most: int) -> list[ClaimedSample]:
        """Claim up to `most` episodes, best first; of each the sample of the first of its sides, with the others."""
        home, *others = self._ledgers  # samples of validation are in the first one, finished or not
        first = Look(home)
        playing = [*([first] if home.running else []), *(Look(other) for other in others if other.running)]
        taken: list[ClaimedSample] = []
        for look, slot in self._best(first, playing):
            if len(taken) >= most:
                break
            if (sample := _claimed(look, slot)) is not None:
                self._join(sample, look, playing)
                taken.append(sample)
        return taken

    def _best(self, home: Look, playing: Sequence[Look]) -> Iterator[tuple[Look, int]]:
        """The slots that may be claimed, the best first: validation, then in the order of admission."""
        validation = (home.lines["state"] == State.QUEUED) & (home.lines["cls"] == SampleClass.VALIDATE)
        yield from ((home, slot) for slot in np.flatnonzero(validation).tolist())
        if playing:
            found = [claimable(look, playing[0]) for look in playing]
            admissions, episodes, slots = (np.concatenate(column) for column in zip(*found))
            looks = np.repeat(np.arange(len(playing)), [len(of_look[0]) for of_look in found])
            yield from ((playing[looks[at]], int(slots[at])) for at in np.lexsort((episodes, admissions)))

    def _join(self, sample: ClaimedSample, of: Look, playing: Sequence[Look]) -> None:
        """Claim the siblings of a lead sample; one that the copy does not show as QUEUED is looked for once more."""
        if sample.validates:
            return
        ledger = of.ledger
        sample.episode = int(episode_of(sample.uid, ledger.size, ledger.seats))
        sides = [(look, seat) for look in playing for seat in look.ledger.names]
        if (of, sample.seat) == sides[0]:
            for look, seat in sides[1:]:
                if (sibling := _sibling(look, seat, sample.episode)) is not None:
                    sample.siblings[seat] = sibling
        if len(sample.siblings) < len(sides) - 1:
            for side in sample.ending():
                side.alone = True


def claimable(look: Look, first: Look) -> tuple[Ints, Ints, Ints]:
    """The admission of the draw, the number of the episode and the slot of each QUEUED sample that may be claimed as
    the first of its episode: leads, which are in `first`, and orphans."""
    ledger, slots, lead = look.ledger, look.queued, first.ledger
    uids, count = look.lines["uid"][slots].astype(np.int64), ledger.seats
    episodes: Ints = episode_of(uids, ledger.size, count)
    free = seat_of(place_of(uids, ledger.size)[0], count) == 0 if look is first else np.zeros(len(uids), np.bool_)
    followers = np.flatnonzero(~free)
    leads = side_of(episodes[followers], 0, lead.size, lead.seats)
    states = first.states_of(leads)
    doubtful = (states != State.QUEUED) & (states != State.GENERATING)  # a sample that waits or is played has no fate
    if doubtful.any():
        free[followers[doubtful]] = _past(first, leads[doubtful], states[doubtful])
    admissions = draw_of(look.lines["admission"][slots].astype(np.int64), count)
    return admissions[free], episodes[free], slots[free]


def _past(first: Look, leads: Ints, states: Bytes) -> Bools:
    """A mask of the lead samples, with slots in these states, that are past."""
    size = first.ledger.size
    _, attempt, _ = place_of(leads, size)
    return past(leads, states, first.states_of(leads - attempt * size), first.ledger.fates.view(), size)


def _sibling(look: Look, seat: str, episode: int) -> ClaimedSample | None:
    """Claim the sample of a seat of an episode, if it is QUEUED now."""
    ledger = look.ledger
    uid = np.array([side_of(episode, ledger.names.index(seat), ledger.size, ledger.seats)])
    for copy in _now(look):
        slot = int(copy.slots_of(uid)[0])
        if copy.is_queued(slot) and (sample := _claimed(copy, slot)) is not None:
            sample.episode = episode
            return sample
    return None


def _now(look: Look) -> Iterator[Look]:
    yield look
    yield Look(look.ledger)


def _claimed(look: Look, slot: int) -> ClaimedSample | None:
    """Claim a slot as a copy of its line shows it; None if another process was faster."""
    ring, ledger = look.ledger.ring, look.ledger
    if not (word := ring.claim(slot, int(look.lines["word"][slot]), State.GENERATING)):
        return None
    line = dict(zip(LINE_FIELDS, look.lines[LINE_FIELDS][slot].tolist()))
    sample = ClaimedSample(slot, word, line, ring, ledger.names[0])
    if not sample.validates:
        sample.seat = ledger.names[seat_of(place_of(sample.uid, ledger.size)[0], ledger.seats)]
    return sample
