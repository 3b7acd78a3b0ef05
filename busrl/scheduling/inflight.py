"""What a policy knows of the groups that are open: predicted length, finished lengths, members that still run.

Talks to nothing. Knows nothing of slots or fates: it is told which draws are open and which members finished.

- A hint only: a scheduler that lost it is told the open groups again (`adopt`), and what finished unseen stays unseen.
- Holds the open groups, and for a while the records of ended ones; nothing else.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from busrl.scheduling.predictors import Candidate

RECORDS_KEPT = 4096
WAITS_KEPT = 1024
UNSEEN = -1


@dataclass(frozen=True, slots=True)
class Record:
    """A group that ended: what was predicted, and what came out. Lengths in tokens, `wait` in groups opened.

    `wait` is UNSEEN for a group that an earlier scheduler opened. `actual` is the mean over `members` finished ones.
    """

    draw: int
    wait: int
    predicted: float
    actual: float
    longest: int
    members: int


@dataclass(slots=True)
class Open:
    """An open group."""

    candidate: Candidate
    predicted: float
    wait: int = UNSEEN
    tail: bool = False  # among the longest at its opening
    running: int = 0  # members that run or are still due
    longest: int = 0
    tokens: int = 0
    members: int = 0

    @property
    def estimate(self) -> float:
        """The longest finished sibling if there is one: the best that is known of a group (Seer, arXiv:2511.14617)."""
        return float(self.longest) if self.members else self.predicted


class InFlight:
    """The open groups by draw."""

    def __init__(self) -> None:
        self._open: dict[int, Open] = {}
        self.records: deque[Record] = deque(maxlen=RECORDS_KEPT)
        self.waits: deque[int] = deque(maxlen=WAITS_KEPT)
        self.tail_rows = 0

    def get(self, draw: int) -> Open | None:
        return self._open.get(draw)

    def unknown(self, draws: Iterable[int]) -> list[int]:
        """Open groups of which nothing is known: an earlier scheduler opened them."""
        return [int(draw) for draw in draws if int(draw) not in self._open]

    def opened(self, group: Open, members: int) -> None:
        """A group was opened with so many members."""
        group.running = members
        self._open[group.candidate.draw] = group
        if group.wait != UNSEEN:
            self.waits.append(group.wait)
        if group.tail:
            self.tail_rows += members

    def look(self, draws: Sequence[int], running: Sequence[int]) -> None:
        """All open groups as they are now, in order of draws; those that are not among them have ended."""
        now = dict(zip(draws, running))
        for draw in [draw for draw in self._open if draw not in now]:
            self._end(self._open.pop(draw))
        self.tail_rows = 0
        for draw, group in self._open.items():
            group.running = now[draw]
            self.tail_rows += group.running if group.tail else 0

    def finished(self, draws: Sequence[int], tokens: Sequence[int]) -> list[tuple[Candidate, int]]:
        """Members that finished with so many tokens; those of known groups come back with their candidates."""
        pairs = []
        for draw, length in zip(draws, tokens):
            group = self._open.get(draw)
            if group is not None:
                group.longest = max(group.longest, length)
                group.tokens, group.members = group.tokens + length, group.members + 1
                pairs.append((group.candidate, length))
        return pairs

    def take_records(self) -> list[Record]:
        """The groups that ended since the last call, oldest first."""
        found = list(self.records)
        self.records.clear()
        return found

    def _end(self, group: Open) -> None:
        if group.members:
            mean = group.tokens / group.members
            draw = group.candidate.draw
            self.records.append(Record(draw, group.wait, group.predicted, mean, group.longest, group.members))
