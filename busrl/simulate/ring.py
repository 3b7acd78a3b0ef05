"""The ring of a simulated run: slots, their states and fates in NumPy arrays.

The live classes of `busrl.scheduling` read its lines as they read those of shared memory. Knows nothing of time.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from busrl.scheduling.groups import DISPATCHED, FREE, GENERATING, QUEUED, REWARDED
from busrl.states import uid_of

LINE = np.dtype("u8, u8, f8, u4, u4, u1, u1", align=True)
LINE.names = ("uid", "admission", "reward", "step", "cls", "state", "segs")
FATES_AT_FIRST = 1 << 16
UNFINISHED = 1 << 40  # more priority for a slot that has segments already


class SimRing:
    """`slots` slots for training, of groups of `group_size`: the lines and fates that the group scanner reads.

    NumPy arrays instead of shared memory, and no owners, since nothing dies here; a fate is stored before its slot is
    freed. `changes` counts every change of a line or a fate, so that a view is made again only when it must be. Slots
    wait by priority: unfinished samples first, then groups in the order of their admission.
    """

    def __init__(self, slots: int, group_size: int) -> None:
        self.lines: npt.NDArray[Any] = np.zeros(slots, LINE)
        self.fates = np.zeros(FATES_AT_FIRST, np.uint8)
        self.size = group_size
        self.state, self.reward, self.segs = self.lines["state"], self.lines["reward"], self.lines["segs"]
        self.uid, self.admission, self.step = self.lines["uid"], self.lines["admission"], self.lines["step"]
        self.free = list(range(slots - 1, -1, -1))
        self.queue: list[tuple[int, int, int]] = []  # (less its priority, when it came, slot)
        self.blocked: list[tuple[int, int, int]] = []  # those that are QUEUED and may not be taken yet
        self.priority = [0] * slots
        self.changes = 0
        self._order = 0

    def dispatch(
        self, draw: int, members: int, admission: int, step: int, priority: int, hold: bool = False
    ) -> list[int]:
        """The first `members` of a group go to QUEUED; their slots. The largest priority is taken first. `hold`: none
        is taken before it is allowed."""
        first = uid_of(draw, 0, 0, self.size)
        self._reserve(first + 2 * self.size)
        slots = [self.free.pop() for _ in range(members)]
        self.fates[first : first + members] = DISPATCHED
        self.uid[slots] = np.arange(first, first + members, dtype=np.uint64)
        self.admission[slots], self.step[slots] = admission, step
        self.segs[slots], self.reward[slots], self.state[slots] = 0, 0.0, QUEUED
        for slot in slots:
            self.priority[slot] = priority
            self._wait(slot, 0, hold)
        self.changes += 1
        return slots

    def take(self, limit: int) -> list[int]:
        """Up to `limit` slots go from QUEUED to GENERATING, the best first."""
        taken = [heapq.heappop(self.queue)[2] for _ in range(min(limit, len(self.queue)))]
        for slot in taken:
            self.move(slot, GENERATING)
        return taken

    def release(self, slot: int, hold: bool = False) -> None:
        """The end of a segment that was not the last: back to QUEUED, before all that have none."""
        self.state[slot] = QUEUED
        self.segs[slot] = min(255, int(self.segs[slot]) + 1)
        self._wait(slot, UNFINISHED, hold)
        self.changes += 1

    def allow(self, slots: npt.NDArray[np.bool_]) -> None:
        """Those of the slots (a mask of all) that are held may be taken from now on."""
        self.queue += [one for one in self.blocked if slots[one[2]]]
        self.blocked = [one for one in self.blocked if not slots[one[2]]]
        heapq.heapify(self.queue)

    def move(self, slots: int | Sequence[int], state: int) -> None:
        """Slots to a state that only their owner may give them: GENERATING, GENERATED, REWARDED, TRAINING."""
        self.state[slots] = state
        self.changes += 1

    def rewarded(self, slots: Sequence[int], rewards: Sequence[float]) -> None:
        self.reward[slots] = rewards
        self.move(slots, REWARDED)

    def end(self, slots: Sequence[int], fate: str) -> None:
        """Store the fate of each, then free the slots."""
        self.fates[self.uid[slots].astype(np.int64)] = ord(fate)
        self.state[slots] = FREE
        self.free.extend(slots)
        self.changes += 1

    def _wait(self, slot: int, ahead: int, hold: bool) -> None:
        self._order += 1
        heapq.heappush(self.blocked if hold else self.queue, (-self.priority[slot] - ahead, self._order, slot))

    def _reserve(self, upto: int) -> None:
        if upto > len(self.fates):
            grown = np.zeros(max(upto, 2 * len(self.fates)), np.uint8)
            grown[: len(self.fates)] = self.fates
            self.fates = grown
