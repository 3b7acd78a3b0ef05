"""Choice of the groups that are opened next, by what each ledger has of the draws, and what a lead sample waits for.

A ledger is the ring and the fates of one trained model; a draw has a group in it for each of the model's seats. Pure:
takes what the views of the ledgers say. Knows nothing of rings, prompts or admission.

- A draw is new while no ledger has anything of it; then it is opened in all of them, or in none.
- A draw that some ledger has and another lacks (a ring was lost, a scheduler died) is opened where it is lacking: if it
  is open anywhere, as its samples may wait for those, or is among the newest. So a model that had made its steps and is
  given more is not asked for all that was played meanwhile.
- The lead side, the first seat of the first ledger, comes last: a sample of it may be queued only when each other side
  of the same member and try has a fate, or will have none: its group takes no member any more, or, of a second try, its
  first one has not ended by accident.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import reduce
from typing import NamedTuple

import numpy as np

from busrl.scheduling.groups import Bools, Bytes, Ints, closing
from busrl.states import ACCIDENTS, Fate

_ACCIDENTS = [*ACCIDENTS]


class Had(NamedTuple):
    """The groups that a ledger has: of `seats` in each draw, all below `end` but the `missing` ones (ascending), and
    those that are `open`. `reach`: so many of the newest draws may have been in flight."""

    seats: int
    end: int
    missing: Ints
    open: Ints
    reach: int

    def lacking(self, draws: int) -> Ints:
        """The groups of the first `draws` draws that it does not have."""
        return np.concatenate((self.missing, np.arange(self.end, draws * self.seats, dtype=np.int64)))


class Plan(NamedTuple):
    """`new`: draws below `top` that no ledger has anything of; all from `top` on are new too. `mends`: by ledger, the
    groups that it lacks of other draws, and is to have."""

    new: tuple[int, ...]
    top: int
    mends: tuple[tuple[int, ...], ...]

    def draws(self, count: int, below: int) -> Iterator[int]:
        """The next `count` new draws, those that have arrived (below `below`)."""
        first = [*self.new[:count], *range(self.top, self.top + count)][:count]
        return (draw for draw in first if draw < below)


def plan_of(ledgers: Sequence[Had]) -> Plan:
    """Choose what is to be opened, in which ledger."""
    top = max(-(-one.end // one.seats) for one in ledgers)
    lacking = [one.lacking(top) for one in ledgers]
    if not any(len(groups) for groups in lacking):
        return Plan((), top, ((),) * len(ledgers))
    new = reduce(np.intersect1d, (_untouched(groups, one.seats) for groups, one in zip(lacking, ledgers)))
    is_open = np.concatenate([one.open // one.seats for one in ledgers])
    mends = []
    for groups, one in zip(lacking, ledgers):
        draws = groups // one.seats
        wanted = ~np.isin(draws, new) & (np.isin(draws, is_open) | (draws >= top - one.reach))
        mends.append(tuple(groups[wanted].tolist()))
    return Plan(tuple(new.tolist()), top, tuple(mends))


def _untouched(lacking: Ints, seats: int) -> Ints:
    """The draws of which all groups are lacking."""
    draws, counts = np.unique(lacking // seats, return_counts=True)
    whole: Ints = draws[counts == seats]
    return whole


def last_first(groups: Iterable[int], seats: int) -> list[int]:
    """Groups in the order in which they are opened: draw by draw, in each the seats from the last to the first."""
    return sorted(groups, key=lambda group: (group // seats, -(group % seats)))


def is_closed(codes: Bytes) -> bool:
    """Tell whether a group with these fates, of both tries, takes no member any more."""
    return bool(closing(codes).any())


def stands(codes: Bytes, size: int, attempt: int = 0) -> Bools:
    """By member: the sample of this try has a fate, or there is none to come. `codes`: as for `is_closed`."""
    there: Bools = codes[attempt * size :][:size] != Fate.NONE.value
    if attempt:
        there = there | ~np.isin(codes[:size], _ACCIDENTS)
    return there | is_closed(codes)
