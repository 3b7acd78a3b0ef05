"""What dispatch policies are made of: waiting groups, open groups, strength, slot priorities, finished answers.

Used by `dispatch` and the scheduler role. Nothing here talks to anything: draws, lines and learner states are handed
in. Knows nothing of fates, credit or clocks.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from busrl.scheduling.groups import FREE, GENERATED, TRAINING, Ints, Lines, slot_priority
from busrl.scheduling.lengths import Candidate
from busrl.states import VALIDATE_BIT, SampleClass

# -- waiting groups ------------------------------------------------------------------------------------------

BEYOND = -1
SPARE = 1024


class Entry:
    """One waiting group. `since`: groups opened when it came within the horizon, BEYOND until then."""

    __slots__ = ("candidate", "predicted", "since")

    def __init__(self, candidate: Candidate, predicted: float) -> None:
        self.candidate, self.predicted, self.since = candidate, predicted, BEYOND


class Pool:
    """The groups that wait to be opened, in the order of a key, within a horizon of draws.

    key = per_token x predicted + per_draw x draw, 0 until `rekey`; the smallest is `first`, equal keys go by draw. A
    key is fixed when a group comes within the horizon and stays until `rekey`, so taking and adding cost O(log n).
    Only a draw below `limit(oldest waiting draw)` is ever taken; one that is added again has lost nothing.

    `way`: 1 or -1, the sign by which predictions alone would order them, the smallest being `best`.
    """

    def __init__(self, limit: Callable[[int], int], way: int) -> None:
        self._limit, self._way = limit, way
        self._per_token = self._per_draw = 0.0
        self.opened = 0  # groups taken so far
        self.near_sum = 0.0  # of the predictions of the groups within the horizon
        self.near_count = 0
        self._reached = 0  # the limit at the last `near`
        self._waiting: dict[int, Entry] = {}
        self._present = Present()
        # Heaps with stale entries: one counts only while its draw waits, within the horizon.
        self._draws: list[int] = []
        self._beyond: list[int] = []
        self._near: list[tuple[float, int]] = []
        self._best: list[tuple[float, int]] = []

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[Entry]:
        return iter(self._waiting.values())

    def missing(self, draws: Iterable[int]) -> list[int]:
        """Those of `draws` that do not wait here."""
        return self._present.missing(draws)

    def add(self, candidate: Candidate, predicted: float) -> None:
        """A group begins to wait; one that waits already stays as it is."""
        draw = candidate.draw
        if draw in self._waiting:
            return
        self._waiting[draw] = Entry(candidate, predicted)
        self._present.set(draw)
        heapq.heappush(self._draws, draw)
        heapq.heappush(self._beyond, draw)

    def oldest(self) -> int | None:
        """The smallest draw that waits."""
        while self._draws and self._draws[0] not in self._waiting:
            heapq.heappop(self._draws)
        return self._draws[0] if self._draws else None

    def near(self) -> bool:
        """Let exactly the draws below the limit be within the horizon. False if nothing waits."""
        oldest = self.oldest()
        if oldest is None:
            return False
        limit = self._limit(oldest)
        if limit < self._reached:  # an older draw came back
            self._withdraw(limit)
        self._reached = limit
        while self._beyond and self._beyond[0] < limit:
            entry = self._waiting.get(heapq.heappop(self._beyond))
            if entry is not None and entry.since == BEYOND:
                entry.since = self.opened
                self.near_sum, self.near_count = self.near_sum + entry.predicted, self.near_count + 1
                self._push(entry)
        return True

    def first(self) -> Entry | None:
        """The entry with the smallest key within the horizon, as it was at the last `near`."""
        return self._peek(self._near)

    def best(self) -> Entry | None:
        """The entry within the horizon that would be taken by length alone."""
        return self._peek(self._best)

    def entry(self, draw: int) -> Entry | None:
        """The entry of a draw if it waits."""
        return self._waiting.get(draw)

    def take(self, entry: Entry) -> int:
        """Remove an entry; the number of groups that were opened since it came within the horizon."""
        draw = entry.candidate.draw
        del self._waiting[draw]
        self._present.clear(draw)
        self._leave(entry)
        self.opened += 1
        return self.opened - 1 - entry.since

    def rekey(self, per_token: float, per_draw: float) -> None:
        """Order by another key, and by the predictions as they are now. O(n log n): for when they have changed."""
        self._per_token, self._per_draw = per_token, per_draw
        near = [entry for entry in self._waiting.values() if entry.since != BEYOND]
        draws = np.fromiter((entry.candidate.draw for entry in near), np.int64, len(near))
        predicted = np.fromiter((entry.predicted for entry in near), np.float64, len(near))
        self.near_sum, self.near_count = float(predicted.sum()), len(near)
        self._near = _sorted(per_token * predicted + per_draw * draws, draws)
        self._best = _sorted(self._way * predicted, draws)

    def _push(self, entry: Entry) -> None:
        draw, predicted = entry.candidate.draw, entry.predicted
        heapq.heappush(self._near, (self._per_token * predicted + self._per_draw * draw, draw))
        heapq.heappush(self._best, (self._way * predicted, draw))

    def _leave(self, entry: Entry) -> None:
        self.near_count -= 1
        self.near_sum = self.near_sum - entry.predicted if self.near_count else 0.0

    def _withdraw(self, limit: int) -> None:
        """What came within the horizon and is not below the limit any more waits beyond it again."""
        for draw, entry in self._waiting.items():
            if draw >= limit and entry.since != BEYOND:
                self._leave(entry)
                entry.since = BEYOND
                heapq.heappush(self._beyond, draw)

    def _peek(self, heap: list[tuple[float, int]]) -> Entry | None:
        while heap:
            entry = self._waiting.get(heap[0][1])
            if entry is not None and entry.since != BEYOND:
                return entry
            heapq.heappop(heap)
        return None


def _sorted(keys: npt.NDArray[np.float64], draws: Ints) -> list[tuple[float, int]]:
    """Pairs in order, which is a heap."""
    order = np.lexsort((draws, keys))
    return list(zip(keys[order].tolist(), draws[order].tolist()))


class Present:
    """Which draws wait, as a string of flags, so that a hundred thousand draws can be asked for at once."""

    def __init__(self) -> None:
        self._base = 0
        self._flags = bytearray(SPARE)

    def set(self, draw: int) -> None:
        at = draw - self._base
        if not 0 <= at < len(self._flags):
            at = self._make_room(draw)
        self._flags[at] = 1

    def clear(self, draw: int) -> None:
        self._flags[draw - self._base] = 0

    def missing(self, draws: Iterable[int]) -> list[int]:
        draws = draws if isinstance(draws, np.ndarray) else np.fromiter(draws, np.int64)
        if not len(draws):
            return []
        flags = np.frombuffer(self._flags, np.uint8)
        at = draws - self._base
        if at.min() >= 0 and at.max() < len(flags):  # as nearly always: half as long as what follows
            here = flags.take(at)
        else:
            inside = (at >= 0) & (at < len(flags))
            here = np.zeros(len(draws), np.uint8)
            here[inside] = flags[at[inside]]
        found: list[int] = draws[here == 0].tolist()
        return found

    def _make_room(self, draw: int) -> int:
        """Let the flags reach from the oldest draw that waits to `draw`, with room for as many again."""
        here = self._base + np.flatnonzero(np.frombuffer(self._flags, np.uint8))
        low, high = (min(draw, int(here[0])), max(draw, int(here[-1]))) if len(here) else (draw, draw)
        flags = np.zeros(2 * (high + 1 - low) + SPARE, np.uint8)
        flags[here - low] = 1
        self._base, self._flags = low, bytearray(flags)
        return draw - low


# -- open groups ---------------------------------------------------------------------------------------------

UNSEEN = -1


@dataclass(slots=True)
class Open:
    """An open group: what was predicted, and what came out. Lengths in tokens.

    `wait`: groups opened while it waited, UNSEEN if an earlier scheduler opened it; `members`: those that finished.
    """

    candidate: Candidate
    predicted: float
    wait: int = UNSEEN
    tail: bool = False  # among the longest at its opening
    running: int = 0  # members that run or are still due
    longest: int = 0
    tokens: int = 0
    members: int = 0

    @property
    def draw(self) -> int:
        return self.candidate.draw

    @property
    def actual(self) -> float:
        return self.tokens / max(1, self.members)

    @property
    def estimate(self) -> float:
        """The longest finished sibling if there is one: the best that is known of a group (Seer, arXiv:2511.14617)."""
        return float(self.longest) if self.members else self.predicted


# -- strength ------------------------------------------------------------------------------------------------

REFERENCE_UPDATES = 20  # updates whose mean entropy is the reference
EMA = 0.9
HIGH, LOW = 1.3, 0.6  # entropy over reference at which the preference for a length is full, or gone
LEVELS = 16


@dataclass(frozen=True)
class LearnerState:
    """What the learner reports about itself; the part of LEARNER_STATE_UPDATE that policies use."""

    step: int
    entropy: float


class Strength:
    """How far a policy departs from the order drawn: 0 (as drawn) to 1 (by length), as the learner's entropy asks for.

    High entropy (against its reference) takes the strength to 1: answers are wanted early. Low takes it to 0. In the
    first updates, without a reference, it is 1. It moves in steps of 1 / LEVELS, so an order is rarely sorted again.
    """

    def __init__(self) -> None:
        self.value = 1.0
        self._first: list[float] = []  # entropies of the first updates
        self._smooth = 0.0

    def feed(self, state: LearnerState) -> bool:
        """Take one learner state; True if the strength is another now."""
        if len(self._first) < REFERENCE_UPDATES:
            self._first.append(state.entropy)
            self._smooth = sum(self._first) / len(self._first)
            return False
        self._smooth = EMA * self._smooth + (1 - EMA) * state.entropy
        reference = sum(self._first) / len(self._first)
        if reference <= 0:
            return False
        wanted = round(min(1.0, max(0.0, (self._smooth / reference - LOW) / (HIGH - LOW))) * LEVELS) / LEVELS
        changed, self.value = wanted != self.value, wanted
        return changed


# -- slot priorities -----------------------------------------------------------------------------------------

LEVELS_PER_OCTAVE = 16
TOP = 255  # levels of a length: 1 to 65,536 tokens
PROBE = 0  # priority of a probe sample
BLOCKS = 1 << 22  # block numbers wrap here; far apart ones are never in the ring together


class SlotOrder:
    """In which order workers take what is QUEUED, larger first. The ring serves unfinished segments before that.

    `window`: the learner's W. `direction`: 1 shortest first, -1 longest first, 0 as admitted. Blocks of `window`
    admission indices are served one after the other; only inside a block does length decide. So a group is overtaken
    only by groups that lie in the learner's window while it holds that window: overtaking never makes a finished group
    wait for the anchor. In `sync` a block is a round. Probes go before everything else of training: few rows, and they
    tell the order of the rest. All numbers are <= 0, so that a class with positive priorities (validation) goes first.
    """

    def __init__(self, window: int, direction: int) -> None:
        if window < 1 or direction not in (-1, 0, 1):
            raise ValueError(f"window = {window}, direction = {direction}: must be >= 1 and one of -1, 0, 1")
        self.window, self.direction = window, direction

    def sample(self, admission: int, estimate: float) -> int:
        """Of a member of the group with this admission index and this estimated length in tokens."""
        if self.direction == 0 or self.window == 1:
            return slot_priority(admission)
        rank = level(estimate) if self.direction > 0 else TOP - level(estimate)
        return -1 - (admission // self.window % BLOCKS * (TOP + 1) + rank)


def level(tokens: float) -> int:
    """A length on a scale of 256 steps, 16 to each doubling."""
    return min(TOP, int(LEVELS_PER_OCTAVE * math.log2(max(1.0, tokens))))


# -- finished answers ----------------------------------------------------------------------------------------

NO_UID = (1 << 64) - 1


class FinishedAnswers:
    """Answers that were finished since the last look, from the ring's lines; each is given once.

    A slot that came free still shows its last sample until it is used again, so an answer that was judged and trained
    between two looks is seen too, unless its slot was used twice. A new scheduler is given those that the ring shows.
    """

    def __init__(self) -> None:
        self._given = np.empty(0, np.uint64)

    def look(self, lines: Lines) -> tuple[Ints, Ints]:
        """Uids, and lengths in tokens, of what is new in a copy of the ring's lines."""
        uids, state = lines["uid"], lines["state"]
        if len(self._given) != len(lines):
            self._given = np.full(len(lines), NO_UID, np.uint64)
        ended = ((state >= GENERATED) & (state <= TRAINING)) | (state == FREE)
        fresh = np.flatnonzero(ended & (uids != self._given) & (uids < VALIDATE_BIT))
        # Field by field, and only of what is new: most slots are not.
        fresh = fresh[(lines["finish"][fresh] > 0) & (lines["cls"][fresh] == SampleClass.TRAIN)]
        self._given[fresh] = uids[fresh]
        return uids[fresh].astype(np.int64), lines["response_tokens"][fresh].astype(np.int64)
