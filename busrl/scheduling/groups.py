"""The open groups and their state: recomputed from the ring's lines and the fate bytes at each scan.

A group is a draw of the loader, or a seat of one where a model has K of them: `draw x K + seat`, and what is called a
draw here is this number. Its members' uids are `(draw x 2 + try) x G + member`, try 1 being the one re-roll of a member
that ended by accident. Knows nothing of policies, triggers or how the two arrays came about.

- Everything is recomputed from ring and fates. A scanner's own numbers (low and high water, admission indices of groups
  whose lines are all gone) are hints: losing them costs time or order, never a sample.
- Take the lines *before* the fates are read (`scan` reads them when called): then a group can look busier than it is,
  never finished when it is not.
- A scan computes only groups with a line or a fate that were not finished at an earlier scan. So it stays cheap when a
  policy leaves holes of a hundred thousand draws.
- A group is resolved when no member is running and none is due; usable with at least g_min survivors and no member
  that was ended by a rule; finished when it is resolved and holds no slot.
- A member whose seat was not used (fate u) took no part: it closes no group, and g_min is that of the others.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from functools import cached_property
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from busrl.states import ACCIDENTS, VALIDATE_BIT, Fate, SampleClass, State, uid_of

Lines = npt.NDArray[Any]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]
Bytes = npt.NDArray[np.uint8]

# Plain numbers: NumPy compares an array with a member of an enum five times slower.
FREE, RESERVED, QUEUED, GENERATING, GENERATED, REWARDING, REWARDED, TRAINING, DROPPED = (state.value for state in State)
NONE, DISPATCHED, UNUSED = Fate.NONE.value, Fate.DISPATCHED.value, Fate.UNUSED.value
FIELDS = ("state", "uid", "admission", "step", "reward")  # of a line, beside its class
NOT_STARTED = np.iinfo(np.int64).max  # oldest_step of a group of which no member is in the ring
UNKNOWN = -1  # admission index of a group that holds no slot and was never seen with one
LOOKAHEAD = 4096  # draws looked at past the last one known, at the start

_IS_ACCIDENT = np.zeros(256, np.bool_)
_IS_ACCIDENT[list(ACCIDENTS)] = True
_CLOSES = np.ones(256, np.bool_)  # trained, or set aside by a rule: the group takes no new member
_CLOSES[[NONE, DISPATCHED, UNUSED, *ACCIDENTS]] = False


def closing(codes: Bytes) -> Bools:
    """Mask of the fates that end a group: it takes no new member."""
    return _CLOSES[codes]


def least_survivors(group_size: int) -> int:
    """g_min: members that must have survived for a group to be trained; at least 2 of several are compared."""
    return min(group_size, max(2, math.ceil(0.75 * group_size)))


class Todo(NamedTuple):
    """A member of an open group that is still to be dispatched; `attempt` 1 is its re-roll."""

    uid: int
    draw: int
    attempt: int
    member: int
    admission: int  # UNKNOWN: the group shares the newest index; a new one would shift the rounds of sync


class GroupView:
    """The open groups (opened, not finished) at one instant, in the order of their draws; one array entry per group.

    `unrecorded`: samples that stand in a slot without a fate, as the table was damaged from outside; `ended_draws`:
    groups that were not seen finished before, `ended_fates` [group, member]: the last fate of each member of them.
    """

    def __init__(self, scanner: GroupScanner, cells: _Cells, counts: Ints) -> None:
        c, self._cells, self.group_size = cells, cells, scanner.group_size
        keep = self._keep = np.flatnonzero(c.opened & ~c.finished)
        self._low, self._high = scanner._low, scanner._high
        self.draws: Ints = scanner._low + c.rows[keep]
        self.admission = scanner._admission_of(self.draws, c.admission[keep])
        self.due: Ints = c.due.sum((0, 1))[keep]  # members still to be dispatched, re-rolls included
        self.running: Ints = c.running.sum(0)[keep]  # members dispatched and not yet rewarded
        self.survivors: Ints = c.survivors[keep]  # members with a reward, still in their slots
        self.training: Ints = c.training[keep]  # of these, in a learner's hands
        self.oldest_step = c.oldest_step[keep]  # learner step at the oldest admission of a member in the ring
        self.resolved: Bools = c.resolved[keep]
        self.usable: Bools = (c.resolved & (c.closed_by == NONE) & (c.survivors >= c.least(scanner.g_min)))[keep]
        self.closed_by = c.closed_by[keep]  # fate of a member that ended the group: trained, set aside by a rule, or 0
        self.free_slots, self.queued, self.generating = (int(counts[state]) for state in (FREE, QUEUED, GENERATING))
        self.unrecorded = c.unrecorded
        ended = c.opened & c.finished & ~c.ended[c.rows]
        self.ended_draws: Ints = scanner._low + c.rows[ended]
        self.ended_fates: Bytes = c.fate[:, ended].T

    @cached_property
    def flat(self) -> Bools:
        """Groups whose survivors all have the same reward. Computed on first use: only a learner needs it."""
        return self._cells.flat()[self._keep]

    @cached_property
    def todo(self) -> tuple[Todo, ...]:
        """Members to dispatch, groups in admission order (new ones last)."""
        if not np.any(self.due):
            return ()
        members = [
            Todo(uid_of(int(self.draws[g]), int(t), int(m), self.group_size), int(self.draws[g]), int(t), int(m),
                 int(self.admission[g]))
            for g, t, m in zip(*np.nonzero(self._cells.due.transpose(2, 0, 1)[self._keep]))
        ]
        return tuple(sorted(members, key=lambda t: (t.admission == UNKNOWN, t.admission, t.uid)))

    @cached_property
    def _slots(self) -> npt.NDArray[np.int32]:
        """[try, member, group] -> slot of a survivor, or -1."""
        return self._cells.survivor_slots()[:, :, self._keep]

    @cached_property
    def _unopened(self) -> Ints:
        """The draws below `_high` that have neither a fate nor a line."""
        return self._low + np.flatnonzero(~self._cells.touched)

    def __len__(self) -> int:
        """Open groups, which is what B limits (together with the groups not yet published)."""
        return len(self.draws)

    def index(self, draw: int) -> int:
        """Position of a draw in the arrays; KeyError if it is not open."""
        i = int(np.searchsorted(self.draws, draw))
        if i == len(self.draws) or self.draws[i] != draw:
            raise KeyError(f"group {draw} is not open")
        return i

    def slots_of(self, draw: int) -> list[int]:
        """Slots of the survivors of an open group, in the order of its members."""
        both = self._slots[:, :, self.index(draw)]
        per_member = both.max(axis=0)  # a member survives by its first try or by its re-roll, never by both
        return [int(slot) for slot in per_member if slot >= 0]

    def oldest_unresolved(self) -> int | None:
        """The draw admitted first among those not resolved: the group that all may wait for."""
        waiting = np.flatnonzero(~self.resolved & (self.admission != UNKNOWN))
        if not len(waiting):
            return None
        return int(self.draws[waiting[np.argmin(self.admission[waiting])]])

    @property
    def end(self) -> int:
        """No draw from here on was opened."""
        return self._high

    @property
    def missing(self) -> Ints:
        """The draws below `end` that were not opened, ascending."""
        return self._unopened

    def unopened(self, count: int) -> Ints:
        """The next `count` draws of the loader that have no fate yet, in order."""
        draws = self._unopened[:count]
        if not len(draws):
            return np.arange(self._high, self._high + count)
        return np.concatenate((draws, np.arange(self._high, self._high + count - len(draws))))


class GroupScanner:
    """Makes views of the training samples of one ring. `fates` is the live byte array of all samples, by uid."""

    def __init__(self, fates: Bytes, group_size: int, *, horizon: int = 64) -> None:
        self.fates = fates.view(np.ndarray)  # a memmap would make every slice slow
        self.group_size = group_size
        self.g_min = least_survivors(group_size)
        self._width = 2 * group_size
        self._low = self._high = 0
        self._ended = np.empty(0, np.bool_)  # groups from _low on that were seen finished
        self._look = max(1, horizon)
        self._admissions: tuple[Ints, Ints] = (np.empty(0, np.int64), np.empty(0, np.int64))
        self._skip_ended()
        self._raise_high(max(LOOKAHEAD, horizon))

    def read_from(self, fates: Bytes) -> None:
        """Read the fates from this array from now on: the array has grown, or has another mapping."""
        self.fates = fates.view(np.ndarray)

    def _skip_ended(self) -> None:
        """Raise low over the groups at the beginning that ended long ago, some at a time: in a long run they are
        millions, and to look at all of them closely takes a gigabyte. One that still has a line comes back by it."""
        while True:
            rows = self.fates[self._low * self._width : (self._low + LOOKAHEAD) * self._width]
            cells = rows[: len(rows) // self._width * self._width].reshape(-1, self._width)
            firsts = cells[:, : self.group_size]
            ended = _CLOSES[firsts].any(1) | (firsts == UNUSED).all(1)
            over = ended & ~(cells == DISPATCHED).any(1)
            past = len(over) if over.all() else int(np.argmin(over))
            self._low = self._high = self._low + past
            if past < LOOKAHEAD:
                return

    def scan(self, lines: Lines) -> GroupView:
        """The view that follows from a copy of the ring's lines and from the fates as they are now."""
        state = np.ascontiguousarray(lines["state"])
        counts = np.bincount(state, minlength=GENERATING + 1)
        # A RESERVED line may still show its last tenant; what counts of it, the fate, is read from the fates.
        # No sample has a uid beyond the fates: a line with one is not busrl's, and must not size these arrays.
        possible = lines["uid"] < min(VALIDATE_BIT, len(self.fates))
        picked = np.flatnonzero((state > RESERVED) & (lines["cls"] == SampleClass.TRAIN) & possible)
        # Field by field: indexing whole structured lines costs as much as all the rest together.
        fields = {name: lines[name][picked] for name in FIELDS}
        uids = fields["uid"].astype(np.int64)
        self._cover(uids)
        cells = _Cells(self, picked, fields, uids)
        view = GroupView(self, cells, counts)
        self._ended = cells.ended
        self._ended[cells.rows[cells.opened & cells.finished]] = True
        past = len(self._ended) if self._ended.all() else int(np.argmin(self._ended))
        self._low, self._ended = self._low + past, self._ended[past:]
        return view

    def _cover(self, uids: Ints) -> None:
        """Make [low, high) hold every draw that has a line or a fate."""
        if len(uids):
            low = min(self._low, int(uids.min()) // self._width)
            self._ended = np.concatenate((np.zeros(self._low - low, np.bool_), self._ended))
            self._low = low
            self._high = max(self._high, int(uids.max()) // self._width + 1)
        self._raise_high(self._look)

    def _raise_high(self, look: int) -> None:
        """Let high lie behind all fates, with `look` draws without any after it."""
        looked = self._high
        while looked < self._high + look:
            ahead = self._fates_of(looked, self._high + look)
            high = looked + int(np.flatnonzero(_any_byte(ahead))[-1]) + 1 if ahead.max() else self._high
            looked, self._high = self._high + look, high

    def _fates_of(self, low: int, high: int) -> Bytes:
        """The fates of these draws as they are now, [draw, sample]: not a copy, but where some lie beyond the table."""
        fates = self.fates[low * self._width : high * self._width]
        if missing := (high - low) * self._width - len(fates):
            fates = np.pad(fates, (0, missing))
        return fates.reshape(-1, self._width)

    def _admission_of(self, draws: Ints, seen: Ints) -> Ints:
        """Indices read from lines; for a group without lines the one it was last seen with."""
        if UNKNOWN in seen:
            before = dict(zip(*(a.tolist() for a in self._admissions)))
            filled = [a if a != UNKNOWN else before.get(d, UNKNOWN) for d, a in zip(draws.tolist(), seen.tolist())]
            seen = np.array(filled, np.int64)
        self._admissions = draws, seen
        return seen


class _Cells:
    """Cells, one per (try, member, group), of the groups of the window [low, high) that may be open, and what follows
    from them.

    `rows` are these groups, counted from low; `touched` is a mask of the window's groups that were opened.

    Groups are the last axis of every array: NumPy reduces the first ones ten times faster than a last one of eight.
    """

    def __init__(self, scanner: GroupScanner, picked: Ints, fields: dict[str, npt.NDArray[Any]], uids: Ints) -> None:
        size, width, low, high = scanner.group_size, scanner._width, scanner._low, scanner._high
        self.fields, self.picked = fields, picked
        groups = uids // width - low
        # Other processes store fates meanwhile: each group of `rows` is read again, whole, and later than the lines.
        window = scanner._fates_of(low, high)
        self.ended = np.concatenate((scanner._ended, np.zeros(high - low - len(scanner._ended), np.bool_)))
        self.touched = _any_byte(window)
        self.touched[groups] = True
        wanted = self.touched & ~self.ended
        wanted[groups] = True
        self.rows: Ints = np.flatnonzero(wanted)
        place = np.empty(high - low, np.int32)
        place[self.rows] = np.arange(len(self.rows))
        self.groups: npt.NDArray[np.int32] = place[groups]
        self.at = (uids - (groups + low) * width) * len(self.rows) + self.groups
        self.shape = (2, size, len(self.rows))
        fates = np.ascontiguousarray(window[self.rows].T)
        # D is stored before a slot leaves RESERVED, and the lines were copied before this.
        self.unrecorded = int(np.count_nonzero(fates.reshape(-1)[self.at] == NONE))
        self._derive(fates.reshape(self.shape))

    def _derive(self, fates: Bytes) -> None:
        state = self._spread(self.fields["state"], 0, np.uint8)
        rerolled = _IS_ACCIDENT[fates[0]]
        self.fate = np.where(rerolled, fates[1], fates[0])
        now = np.where(rerolled, state[1], state[0])
        dispatched = self.fate == DISPATCHED
        self.rewarded = dispatched & ((now == REWARDED) | (now == TRAINING))
        self.running = dispatched & ~self.rewarded
        self.closed_by: Bytes = np.where(_CLOSES[self.fate], self.fate, 0).max(0, initial=0)
        live = (state != FREE).any((0, 1))
        self.opened = (fates != NONE).any((0, 1)) | live
        wanted = (self.fate == NONE) & self.opened & (self.closed_by == NONE)
        self.due = np.stack((wanted & ~rerolled, wanted & rerolled))
        self.resolved = self.opened & ~self.running.any(0) & ~wanted.any(0)
        self.finished = self.resolved & ~live
        self.survivors = self.rewarded.sum(0)
        self.training = (self.rewarded & (now == TRAINING)).sum(0)
        self.rerolled = rerolled
        lines = self.fields["state"]
        aging = (lines >= QUEUED) & (lines <= TRAINING)  # age counts from admission, so a queued member counts too
        self.oldest_step = self._least(self.groups[aging], self.fields["step"][aging])
        self.admission = self._least(self.groups, self.fields["admission"])
        self.admission[self.admission == NOT_STARTED] = UNKNOWN

    def _spread(self, values: npt.NDArray[Any], fill: float, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        """A value per line, laid out by (try, member, group)."""
        out = np.full(self.shape, fill, dtype)
        out.reshape(-1)[self.at] = values
        return out

    def _least(self, groups: npt.NDArray[np.int32], values: npt.NDArray[Any]) -> Ints:
        """The smallest value over the lines of each group, NOT_STARTED where it has none."""
        least = np.full(self.shape[-1], NOT_STARTED, np.int64)
        np.minimum.at(least, groups, values.astype(np.int64))
        return least

    def least(self, g_min: int) -> Ints | int:
        """Survivors that each group needs: `g_min`, fewer where seats were not used, and two of several anyway."""
        unused = self.fate == UNUSED
        if not unused.any():
            return g_min
        size = self.shape[1]
        needed = [max(least_survivors(size - absent), min(2, size)) for absent in range(size + 1)]
        least: Ints = np.array(needed)[unused.sum(0)]
        return least

    def flat(self) -> Bools:
        both = self._spread(self.fields["reward"], 0.0, np.float64)
        reward = np.where(self.rerolled, both[1], both[0])
        most = np.where(self.rewarded, reward, -np.inf).max(0)
        least = np.where(self.rewarded, reward, np.inf).min(0)
        same: Bools = (self.survivors > 0) & (most == least)
        return same

    def survivor_slots(self) -> npt.NDArray[np.int32]:
        slots = self._spread(self.picked, -1, np.int32)
        slots[0][~self.rewarded | self.rerolled] = -1
        slots[1][~self.rewarded | ~self.rerolled] = -1
        return slots


def _any_byte(rows: Bytes) -> Bools:
    """Mask of the rows that have a byte that is not zero. Eight, four or two bytes of all rows at a time become one, as
    long as there are such."""
    while width := next((bytes_ for bytes_ in (8, 4, 2) if rows.shape[1] % bytes_ == 0), None):
        rows = (rows.view(f"u{width}") != 0).view(np.uint8)
    nonzero: Bools = rows[:, 0] != 0
    for column in range(1, rows.shape[1]):
        nonzero |= rows[:, column] != 0
    return nonzero


def in_a_row(todo: Iterable[Todo]) -> Iterator[tuple[Todo, int]]:
    """Members whose uids follow each other, as the first of them and how many: what one dispatch can put."""
    runs = groupby(enumerate(todo), lambda pair: (pair[1].uid - pair[0], pair[1].draw, pair[1].attempt))
    for _, run in runs:
        first, *rest = (member for _, member in run)
        yield first, 1 + len(rest)


def slot_priority(admission: int) -> int:
    """Priority number of a group's slots, larger first: groups admitted earlier first, re-rolls with their group.

    At most 0, so that a class with positive priorities (validation) goes before training.
    """
    return -(admission % (1 << 31))


# -- finished answers ----------------------------------------------------------------------------------------

NO_UID = (1 << 64) - 1


class FinishedAnswers:
    """Answers that were finished since the last look, from the ring's lines; each comes once.

    A slot that came free still shows its last sample until it is used again, so an answer that was judged and trained
    between two looks is seen too, unless its slot was used twice. A new scheduler gets those that the ring shows.
    """

    def __init__(self) -> None:
        self._seen = np.empty(0, np.uint64)  # by slot: the uid of the answer that was returned last

    def look(self, lines: Lines) -> tuple[Ints, Ints]:
        """Uids, and lengths in tokens, of what is new in a copy of the ring's lines."""
        uids, state = lines["uid"], lines["state"]
        if len(self._seen) != len(lines):
            self._seen = np.full(len(lines), NO_UID, np.uint64)
        ended = ((state >= GENERATED) & (state <= TRAINING)) | (state == FREE)
        fresh = np.flatnonzero(ended & (uids != self._seen) & (uids < VALIDATE_BIT))
        # Field by field, and only of what is new: most slots are not.
        fresh = fresh[(lines["finish"][fresh] > 0) & (lines["cls"][fresh] == SampleClass.TRAIN)]
        self._seen[fresh] = uids[fresh]
        return uids[fresh].astype(np.int64), lines["response_tokens"][fresh].astype(np.int64)
