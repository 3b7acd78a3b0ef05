"""The order of dispatch: a policy names the group that is opened next, within a horizon, behind one interface
(`Policy`).

`fifo`, `sjf` and `ljf`, `adaptive`. They talk to a predictor of answer lengths and know nothing of slots, credit,
workers or clocks: a group has waited as long as it was drawn early, in a simulated as in a live run.

- Reordering stays within a horizon of H draws: a draw is opened only less than H beyond the oldest draw that waits.
- Nothing starves: between the moment a draw comes within the horizon and its opening, at most 2H - 2 other groups are
  opened. (They are draws from o to d + H - 1, o being the oldest waiting then, and d <= o + H - 1.) Aging makes
  the wait shorter, the horizon makes it bounded. `adaptive` in rounds of n groups: at most n - 1.
- Same offers, looks and feedback, same order. A new scheduler starts without what the old one had learned.
- Shortest-first makes the first groups of a stream ready earlier; it raises no throughput in a closed loop.
"""

from __future__ import annotations

import heapq
import math
from abc import ABC, abstractmethod
from array import array
from collections import deque
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from busrl.scheduling.groups import Ints, slot_priority
from busrl.scheduling.predictor import Candidate, Predictor

# -- the interface -------------------------------------------------------------------------------------------


class Policy(ABC):
    """Order of the waiting groups. The caller keeps it supplied with the oldest draws that have no fate yet.

    `offer` and `next` are all that an order needs. `look` before them (what is open, what workers can run) and
    `finished` (what came out) make it better informed. The rest does nothing in a policy that does not learn.
    """

    name: str
    learns = False  # False: neither `look` nor `finished` changes anything

    def __init__(self, horizon: int) -> None:
        self.horizon = horizon

    @abstractmethod
    def missing(self, draws: Iterable[int]) -> list[int]:
        """Pick those of `draws` that do not wait here, so that only their prompts need to be read."""

    @abstractmethod
    def offer(self, candidates: Sequence[Candidate]) -> None:
        """Add waiting groups; one that is offered again (its dispatch failed) has lost nothing."""

    @abstractmethod
    def next(self) -> Candidate | None:
        """The group to open now; it leaves the pool. None if the pool is empty."""

    def feedback(self, entropy: float) -> None:
        """The mean entropy of a learner's update, in the order of its steps."""

    def unknown(self, draws: Iterable[int]) -> list[int]:
        """Pick those of these open groups that an earlier scheduler opened, and that should be given to `adopt`."""
        return []

    def adopt(self, candidates: Sequence[Candidate]) -> None:
        """Groups that are open already."""

    def look(self, draws: Sequence[int], running: Sequence[int], rows: int) -> None:
        """All open groups now, how many members of each run or are due, and the rows of all workers (0: unknown)."""

    def finished(self, draws: Sequence[int], tokens: Sequence[int]) -> None:
        """Members of open groups that finished since the last call, for its predictor: draw and tokens of each."""

    def priority(self, draw: int, admission: int) -> int:
        """Priority of a slot with a member of this open group; larger goes first."""
        return slot_priority(admission)

    def take_records(self) -> list[OpenGroup]:
        """Take out the groups that ended since the last call, with predicted and real lengths."""
        return []

    def metrics(self) -> dict[str, float]:
        """Numbers about the policy, for the metrics and for people."""
        return {}


class Fifo(Policy):
    """In the order drawn: without lengths, predictor or memory."""

    name = "fifo"

    def __init__(self, horizon: int) -> None:
        super().__init__(horizon)
        self._waiting: dict[int, Candidate] = {}
        self._present = WaitingDraws()

    def missing(self, draws: Iterable[int]) -> list[int]:
        return self._present.missing(draws)

    def offer(self, candidates: Sequence[Candidate]) -> None:
        for candidate in candidates:
            if candidate.draw not in self._waiting:
                self._waiting[candidate.draw] = candidate
                self._present.set(candidate.draw)

    def next(self) -> Candidate | None:
        if (draw := self._present.oldest()) is None:
            return None
        self._present.clear(draw)
        return self._waiting.pop(draw)


# -- open groups ---------------------------------------------------------------------------------------------

UNSEEN = -1


@dataclass(slots=True)
class OpenGroup:
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


class Strength:
    """Departure of a policy from the order drawn: 0 (as drawn) to 1 (by length), as the learner's entropy asks for.

    High entropy (against its reference) takes the strength to 1: answers are wanted early. Low takes it to 0. In the
    first updates, without a reference, it is 1. It moves in steps of 1 / LEVELS, so an order is rarely sorted again.
    """

    def __init__(self) -> None:
        self.value = 1.0
        self._first: list[float] = []  # entropies of the first updates
        self._smooth = 0.0

    def feed(self, entropy: float) -> bool:
        """Take the entropy of one update; True if the strength is another now."""
        if len(self._first) < REFERENCE_UPDATES:
            self._first.append(entropy)
            self._smooth = sum(self._first) / len(self._first)
            return False
        self._smooth = EMA * self._smooth + (1 - EMA) * entropy
        reference = sum(self._first) / len(self._first)
        if reference <= 0:
            return False
        wanted = round(min(1.0, max(0.0, (self._smooth / reference - LOW) / (HIGH - LOW))) * LEVELS) / LEVELS
        changed, self.value = wanted != self.value, wanted
        return changed


# -- slot priorities -----------------------------------------------------------------------------------------

LEVELS_PER_OCTAVE = 16
TOP = 255  # the highest level of a length: 1 to 65,536 tokens, 16 levels to each doubling
BLOCKS = 1 << 22  # block numbers wrap here; far apart ones are never in the ring together


def priority_by_length(window: int, direction: int, admission: int, estimate: float) -> int:
    """Priority of a QUEUED slot: workers take the largest first. The ring serves unfinished segments before that.

    `window`: the learner's W. `direction`: 1 shortest first, -1 longest first. Of a member of the group with this
    admission index and this estimated length in tokens. Blocks of `window` admission indices are served one after the
    other; only inside a block does length decide. So a group is overtaken only by groups that lie in the learner's
    window while it holds that window: overtaking never makes a finished group wait for the anchor. In `sync` a block is
    a round. All numbers are < 0, so that a class with positive priorities (validation) goes first.
    """
    if window == 1:
        return slot_priority(admission)
    level = min(TOP, int(LEVELS_PER_OCTAVE * math.log2(max(1.0, estimate))))
    return -1 - (admission // window % BLOCKS * (TOP + 1) + (level if direction > 0 else TOP - level))


# -- the groups that wait ------------------------------------------------------------------------------------

SPARE = 1024


class Pool:
    """The groups that wait to be opened, in the order of a key, within a horizon of draws.

    key = per_token x predicted + per_draw x draw, 0 until `rekey`; the smallest is `first`, equal keys go by draw. A
    key is fixed when a group comes within the horizon and stays until `rekey`, so taking and adding cost O(log n).
    Only a draw below `limit(oldest waiting draw)` is ever taken. `way`: 1 or -1, the sign by which predictions alone
    would order them, the smallest being `best`.
    """

    def __init__(self, limit: Callable[[int], int], way: int) -> None:
        self._limit, self._way = limit, way
        self._per_token = self._per_draw = 0.0
        self.opened = 0  # groups taken so far
        self._near_sum = 0.0  # of the predictions of the groups within the horizon
        self._reached = 0  # the limit at the last `near`
        self.waiting: dict[int, Candidate] = {}  # by draw
        self.since: dict[int, int] = {}  # draws within the horizon: groups opened when each came there
        self._present = WaitingDraws()
        self.missing, self.predicted = self._present.missing, self._present.predicted
        self._added: list[int] = []  # draws below `_reached` that came since the last `near`
        self._near, self._best = KeyedDraws(), KeyedDraws()  # draws that left the horizon among them

    def add(self, candidate: Candidate, predicted: float) -> None:
        """A group begins to wait; one that waits already stays as it is."""
        draw = candidate.draw
        if draw in self.waiting:
            return
        self.waiting[draw] = candidate
        self._present.set(draw, predicted)
        if draw < self._reached:
            self._added.append(draw)

    @property
    def mean(self) -> float:
        """Mean prediction of the groups within the horizon."""
        return self._near_sum / max(1, len(self.since))

    def predict(self, predictions: Iterable[tuple[Candidate, float]]) -> None:
        """Other predictions for waiting groups; their keys are those of the old ones until `rekey`."""
        for candidate, predicted in predictions:
            self._present.set(candidate.draw, predicted)

    def near(self) -> bool:
        """Let exactly the draws below the limit be within the horizon. False if nothing waits."""
        oldest = self._present.oldest()
        if oldest is None:
            return False
        limit, reached = self._limit(oldest), self._reached
        if limit == reached and not self._added:
            return True
        if limit < reached:  # an older draw came back: what lies behind waits beyond the horizon again
            for draw in [draw for draw in self.since if draw >= limit]:
                self._leave(draw)
        for draw in (*sorted(self._added), *self._present.between(reached, limit)[0].tolist()):
            if draw < limit:
                self._approach(draw)
        self._reached = limit
        self._added.clear()
        return True

    def first(self) -> int | None:
        """The draw with the smallest key within the horizon, as it was at the last `near`."""
        return self._near.first(self.since)

    def best(self) -> int | None:
        """The draw within the horizon that would be taken by length alone."""
        return self._best.first(self.since)

    def take(self, draw: int) -> tuple[Candidate, int]:
        """Remove a draw; its group, and the number of groups that were opened since it came within the horizon."""
        wait = self.opened - self._leave(draw)
        self._present.clear(draw)
        self.opened += 1
        return self.waiting.pop(draw), wait

    def rekey(self, per_token: float, per_draw: float) -> None:
        """Order by another key, and by the predictions as they are now. O(n log n) of the groups within the horizon."""
        self._per_token, self._per_draw = per_token, per_draw
        self.near()
        draws, predicted = self._present.between(0, self._reached)
        self._near_sum = float(predicted.sum())
        self._near.sort(per_token * predicted + per_draw * draws, draws)
        self._best.sort(self._way * predicted, draws)

    def _approach(self, draw: int) -> None:
        """A waiting group comes within the horizon."""
        predicted, self.since[draw] = self.predicted(draw), self.opened
        self._near_sum += predicted
        self._near.push(self._per_token * predicted + self._per_draw * draw, draw)
        self._best.push(self._way * predicted, draw)

    def _leave(self, draw: int) -> int:
        """A group is no more within the horizon; the groups opened when it came there."""
        since = self.since.pop(draw)
        self._near_sum = self._near_sum - self.predicted(draw) if self.since else 0.0
        return since


class KeyedDraws:
    """Draws by their keys, the smallest first, equal keys by draw: a run that was sorted at once, and a heap of what
    was pushed since. The run is plain numbers: pairs of a whole pool would be looked through for cycles."""

    def __init__(self) -> None:
        self._keys: list[float] = []  # of the run, which ends with the first draw
        self._draws: list[int] = []
        self._pushed: list[tuple[float, int]] = []

    def sort(self, keys: npt.NDArray[np.float64], draws: Ints) -> None:
        """Hold these draws, which ascend, and no others."""
        order = np.argsort(keys, kind="stable")[::-1]
        self._keys, self._draws, self._pushed = keys[order].tolist(), draws[order].tolist(), []

    def push(self, key: float, draw: int) -> None:
        heapq.heappush(self._pushed, (key, draw))

    def first(self, near: Container[int]) -> int | None:
        """The first draw of those that are near; what lies before it goes. None if there is none."""
        keys, draws, pushed = self._keys, self._draws, self._pushed
        while pushed or draws:
            if pushed and (not draws or pushed[0] < (keys[-1], draws[-1])):
                if pushed[0][1] in near:
                    return pushed[0][1]
                heapq.heappop(pushed)
            elif draws[-1] in near:
                return draws[-1]
            else:
                del keys[-1], draws[-1]
        return None


class WaitingDraws:
    """The draws that wait, as a string of flags, so that a hundred thousand draws can be asked for at once, and a
    prediction beside each flag.

    The first flag and the last are never set: they stand for all draws that lie beyond. None before `_first` is set.
    """

    def __init__(self) -> None:
        self._base, self._flags, self._first = -1, bytearray(SPARE), 0
        self._predicted = array("d", bytes(8 * SPARE))

    def set(self, draw: int, predicted: float = 0.0) -> None:
        if not 0 < draw - self._base < len(self._flags) - 1:
            self._make_room(draw)
        place = draw - self._base
        self._flags[place], self._predicted[place] = 1, predicted
        self._first = min(self._first, place)

    def clear(self, draw: int) -> None:
        self._flags[draw - self._base] = 0

    def predicted(self, draw: int) -> float:
        return self._predicted[draw - self._base]

    def oldest(self) -> int | None:
        """The first draw that waits."""
        place = self._flags.find(1, self._first)
        self._first = place if place >= 0 else len(self._flags)
        return self._base + place if place >= 0 else None

    def between(self, low: int, high: int) -> tuple[Ints, npt.NDArray[np.float64]]:
        """The waiting draws from `low` to below `high`, in order, and their predictions."""
        begin, end = max(0, low - self._base), max(0, high - self._base)
        places = begin + np.flatnonzero(np.frombuffer(self._flags, np.bool_)[begin:end])
        return self._base + places, np.frombuffer(self._predicted)[places]

    def missing(self, draws: Iterable[int]) -> list[int]:
        draws = draws if isinstance(draws, np.ndarray) else np.fromiter(draws, np.int64)
        waits = np.frombuffer(self._flags, np.bool_).take(draws - self._base, mode="clip")
        absent: list[int] = draws[~waits].tolist()
        return absent

    def _make_room(self, draw: int) -> None:
        """Let the flags reach from the oldest draw that waits to `draw`, with room for as many again."""
        here, predicted = self.between(self._base, self._base + len(self._flags))
        low, high = (min(draw, int(here[0])), max(draw, int(here[-1]))) if len(here) else (draw, draw)
        flags, numbers = (np.zeros(2 * (high + 1 - low) + SPARE, kind) for kind in (np.uint8, np.float64))
        flags[here + 1 - low], numbers[here + 1 - low] = 1, predicted
        self._base, self._flags, self._first = low - 1, bytearray(flags), 1
        self._predicted = array("d", numbers.tobytes())


# -- by predicted length -------------------------------------------------------------------------------------

DRIFT = 0.25  # the mean may move by this much before the keys are recomputed
REFRESH = 4  # predictions are repeated after this many finished members for each waiting group,
REFRESH_AT_LEAST = 256  # and not before so many
RECENT = 0.99  # memory of the promoted share
RECORDS_KEPT, WAITS_KEPT = 4096, 1024


class Ordered(Policy):
    """By predicted length: `sjf` shortest first (direction 1: the first groups of a stream are ready earlier), `ljf`
    longest first (-1: a round ends soon after its last start). `window`: the learner's W, for slot priorities.

    key = strength x (+-) predicted / mean + aging x 2 x draw / H; the smallest is next, ties go by draw. Aging is
    linear in the draw, so it never changes which of two waiting groups goes first: keys stay as they are until the
    strength, the mean (by a quarter) or the predictions change. A group is overtaken by at most min(H - 1, spread x H
    / (2 x aging)) groups drawn after it, spread being the largest difference of two predictions over their mean.

    With aging 0.5, having been drawn H groups earlier is worth one mean length. The record of open groups is a hint: a
    new scheduler hands them in again (`adopt`).
    """

    learns = True

    def __init__(
        self, name: str, horizon: int, predictor: Predictor, aging: float, direction: int, window: int, group_size: int
    ) -> None:
        super().__init__(horizon)
        self.name, self.way, self.window = name, direction, window
        self.predictor, self.aging, self.group_size = predictor, aging, group_size
        self.strength = Strength()
        self.pool = Pool(self._limit, direction)
        self.promoted = 0.0  # share of the groups opened lately that length alone would have put later
        self.tail_rows = 0  # members of long groups that run or are due
        self._open: dict[int, OpenGroup] = {}
        self._records: deque[OpenGroup] = deque(maxlen=RECORDS_KEPT)
        self._waits: deque[int] = deque(maxlen=WAITS_KEPT)
        self._mean = 0.0
        self._observed = 0

    # -- waiting groups -------------------------------------------------------------------------------------------

    def missing(self, draws: Iterable[int]) -> list[int]:
        return self.pool.missing(draws)

    def offer(self, candidates: Sequence[Candidate]) -> None:
        for candidate, predicted in self._predicted(candidates):
            self.pool.add(candidate, predicted)

    def next(self) -> Candidate | None:
        if not self.pool.near():
            return None
        if abs(self.pool.mean - self._mean) > DRIFT * self._mean:
            self._rekey()
        draw, best = self._choose(), self.pool.best()
        predicted = self.pool.predicted(draw)
        jumped = best is not None and self.way * predicted > self.way * self.pool.predicted(best)
        self.promoted = RECENT * self.promoted + (1 - RECENT) * jumped
        candidate, wait = self.pool.take(draw)
        self._waits.append(wait)
        self._opened(OpenGroup(candidate, predicted, wait, running=self.group_size))
        return candidate

    def feedback(self, entropy: float) -> None:
        if self.strength.feed(entropy):
            self._rekey()

    # -- open groups ----------------------------------------------------------------------------------------------

    def unknown(self, draws: Iterable[int]) -> list[int]:
        return [int(draw) for draw in draws if int(draw) not in self._open]

    def adopt(self, candidates: Sequence[Candidate]) -> None:
        for candidate, predicted in self._predicted(candidates):
            self._opened(OpenGroup(candidate, predicted))

    def look(self, draws: Sequence[int], running: Sequence[int], rows: int) -> None:
        now = dict(zip(draws, running))
        ended = [self._open.pop(draw) for draw in [draw for draw in self._open if draw not in now]]
        self._records += [group for group in ended if group.members]
        for draw, group in self._open.items():
            group.running = now[draw]
        self.tail_rows = sum(group.running for group in self._open.values() if group.tail)

    def finished(self, draws: Sequence[int], tokens: Sequence[int]) -> None:
        pairs = []
        for draw, length in zip(draws, tokens):
            group = self._open.get(draw)
            if group is not None:
                group.longest = max(group.longest, length)
                group.tokens, group.members = group.tokens + length, group.members + 1
                pairs.append((group.candidate, length))
        if pairs:
            self.predictor.observe(pairs)
            self._observed += len(pairs)
            if self._observed >= max(REFRESH_AT_LEAST, REFRESH * len(self.pool.waiting)):
                self._refresh()

    def priority(self, draw: int, admission: int) -> int:
        group = self._open.get(draw)
        estimate = group.estimate if group else 1.0
        return priority_by_length(self.window, self.way, admission, estimate)

    def take_records(self) -> list[OpenGroup]:
        records = list(self._records)
        self._records.clear()
        return records

    def metrics(self) -> dict[str, float]:
        waits = self._waits
        return {
            "strength": self.strength.value,
            "promoted": round(self.promoted, 4),
            "wait_mean": round(sum(waits) / len(waits), 2) if waits else 0.0,
            "wait_max": float(max(waits, default=0)),
            "wait_bound": 2.0 * self.horizon - 2,
        }

    # -- inside ---------------------------------------------------------------------------------------------------

    def _predicted(self, candidates: Sequence[Candidate]) -> Iterable[tuple[Candidate, float]]:
        return zip(candidates, self.predictor.predict(candidates).tolist()) if candidates else ()

    def _opened(self, group: OpenGroup) -> None:
        group.tail = self._is_tail(group.predicted)
        self._open[group.draw] = group
        self.tail_rows += group.running if group.tail else 0

    def _limit(self, oldest: int) -> int:
        return oldest + self.horizon

    def _choose(self) -> int:
        draw = self.pool.first()
        assert draw is not None, "within the horizon there is always the oldest draw"
        return draw

    def _is_tail(self, predicted: float) -> bool:
        return False

    def _rekey(self) -> None:
        self._mean = max(1e-9, self.pool.mean)
        self.pool.rekey(*self._scale())

    def _scale(self) -> tuple[float, float]:
        """Shares of a predicted token and of a draw in a key."""
        return self.strength.value * self.way / self._mean, 2.0 * self.aging / self.horizon

    def _refresh(self) -> None:
        """Predict the waiting groups again, after the predictor has seen what others came to."""
        self._observed = 0
        self.pool.predict(self._predicted(list(self.pool.waiting.values())))
        if self.pool.waiting:
            self._rekey()


# -- adaptive ------------------------------------------------------------------------------------------------

TAIL = 0.75
OFFERS_KEPT = 1024
QUANTILE_EVERY = 64  # the quantile is recomputed after so many offers


class Adaptive(Ordered):
    """Short first while feeding a stream, long first when closing a synchronous round, rows kept for the long tail.

    `tail_share`: 0 to 0.9 of the rows; `round_groups`: groups of a synchronous round, 0 in a stream. A round is the
    next `round_groups` draws, longest first: what is trained together is what would have been without a policy, only
    its order is another. In a stream `tail_share` of the rows belong to long groups: while fewer work on them and one
    waits, the oldest long one is opened next. A group is long when its prediction lies above the `TAIL` quantile of
    those offered lately. The reserve is accounting, not a partition: rows are never kept empty for it.
    """

    def __init__(
        self, horizon: int, predictor: Predictor, aging: float, tail_share: float, round_groups: int, window: int,
        group_size: int,
    ) -> None:
        self.tail_share, self.round_groups = tail_share, round_groups
        self.rows = 0
        self._offered: deque[float] = deque(maxlen=OFFERS_KEPT)
        self._fresh = 0
        self._long = np.inf  # predictions above are long
        self._tail: list[int] = []  # heap of long draws, stale ones among them
        super().__init__("adaptive", horizon, predictor, aging, -1 if round_groups else 1, window, group_size)

    def offer(self, candidates: Sequence[Candidate]) -> None:
        super().offer(candidates)
        if self.tail_share and not self.round_groups:
            self._learn_tail([candidate.draw for candidate in candidates])

    def look(self, draws: Sequence[int], running: Sequence[int], rows: int) -> None:
        super().look(draws, running, rows)
        self.rows = rows

    def metrics(self) -> dict[str, float]:
        metrics = super().metrics()
        if self.round_groups:
            return metrics | {"wait_bound": float(self.round_groups - 1)}
        return metrics | {"tail_rows": float(self.tail_rows), "tail_reserved": self.tail_share * self.rows}

    def _limit(self, oldest: int) -> int:
        if self.round_groups:
            return (oldest // self.round_groups + 1) * self.round_groups
        return super()._limit(oldest)

    def _scale(self) -> tuple[float, float]:
        # The order inside a round changes when it ends, not what is learned from it: no aging, always full strength.
        return (-1.0, 0.0) if self.round_groups else super()._scale()

    def _choose(self) -> int:
        if self.tail_rows + self.group_size <= self.tail_share * self.rows:
            draw = self._oldest_long()
            if draw is not None:
                return draw
        return super()._choose()

    def _oldest_long(self) -> int | None:
        while self._tail and self._tail[0] not in self.pool.waiting:
            heapq.heappop(self._tail)
        return self._tail[0] if self._tail and self._tail[0] in self.pool.since else None

    def _is_tail(self, predicted: float) -> bool:
        return predicted > self._long

    def _learn_tail(self, draws: Sequence[int]) -> None:
        """Take the predictions of these draws into the quantile, and the long ones into the heap."""
        predicted = [self.pool.predicted(draw) for draw in draws]
        self._offered.extend(predicted)
        self._fresh += len(draws)
        if self._fresh and (self._fresh >= QUANTILE_EVERY or len(self._offered) < QUANTILE_EVERY):
            self._fresh = 0
            offered, above = np.fromiter(self._offered, np.float64), int(TAIL * (len(self._offered) - 1))
            self._long = float(np.partition(offered, above)[above])
        for draw, tokens in zip(draws, predicted):
            if self._is_tail(tokens):
                heapq.heappush(self._tail, draw)


def make_policy(
    name: str, horizon: int, predictor: Predictor, aging: float = 0.5, *, tail_share: float = 0.25,
    round_groups: int = 0, window: int = 1, group_size: int = 1,
) -> Policy:
    """The policy that `scheduler.policy` names, one of `POLICIES` of `busrl.topology.kinds`.

    `round_groups`: groups of a synchronous round, 0 in a stream; `window`: the learner's W; `group_size`: G.
    """
    makers: dict[str, Callable[[], Policy]] = {
        "fifo": lambda: Fifo(horizon),
        "sjf": lambda: Ordered(name, horizon, predictor, aging, 1, window, group_size),
        "ljf": lambda: Ordered(name, horizon, predictor, aging, -1, window, group_size),
        "adaptive": lambda: Adaptive(horizon, predictor, aging, tail_share, round_groups, window, group_size),
    }
    return makers[name]()
