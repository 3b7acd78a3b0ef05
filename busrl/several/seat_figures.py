"""The figures of each seat of a model that plays several: rewards, groups, flat ones, and episodes without it.

An observer of the learner's steps, and nothing where a model has one seat. Reads the fates, as an unused seat leaves no
other trace. Knows nothing of how a step is made.

- A count is of what ended since the line of the step before; the first one of a process begins with its start.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from itertools import groupby
from typing import Any

import numpy as np
import numpy.typing as npt

from busrl.ring import Fates
from busrl.roles.learner.observers import ComingStep, LearnerParts, RestingGroup, StepObserver
from busrl.states import Fate


class UnusedSeats:
    """Counts the samples with fate `u` of each seat; `low`: the first group that may still get one."""

    def __init__(self, fates: Fates, group_size: int, seats: int) -> None:
        self._fates, self._width, self._seats = fates, 2 * group_size, seats
        self._low, self._seen = 0, self._count(0)

    def _count(self, low: int) -> npt.NDArray[np.int64]:
        """By seat, in all groups from `low` on."""
        samples = len(self._fates)  # others make the table longer, and this maps what they added
        codes = self._fates.view()[low * self._width : samples]
        groups = low + np.flatnonzero(codes == Fate.UNUSED.value) // self._width
        return np.bincount(groups % self._seats, minlength=self._seats)

    def more(self, low: int) -> list[int]:
        """By seat, how many there are more than at the last call; all groups below `low` have ended."""
        new = self._count(self._low) - self._seen
        self._low, self._seen = low, self._count(low)
        return [int(count) for count in new]


class SeatFigures(StepObserver):
    """`seat/NAME/reward`, `/groups`, `/flat_share` and `/unused` of each step's line."""

    def __init__(self, parts: LearnerParts) -> None:
        self._seats = parts.topology.seats
        fates = Fates(str(parts.paths.fates), read_only=True)
        self._unused = UnusedSeats(fates, parts.topology.groups.size, len(self._seats))
        self._figures: dict[str, float] = {}
        self._begin()

    def _begin(self) -> None:
        self._groups, self._flat, self._samples = Counter[int](), Counter[int](), Counter[int]()
        self._rewards = defaultdict[int, float](float)  # their sum

    def _add(self, group: int, rewards: list[float]) -> None:
        seat = group % len(self._seats)
        self._groups[seat] += 1
        self._samples[seat] += len(rewards)
        self._rewards[seat] += sum(rewards)

    def set_aside(self, group: RestingGroup) -> None:
        self._add(group.draw, group.lines["reward"].tolist())
        self._flat[group.draw % len(self._seats)] += group.fate == Fate.FLAT.letter

    def before(self, step: ComingStep) -> None:
        for group, samples in groupby(step.record.samples, key=lambda sample: sample.group):
            self._add(group, [sample.reward for sample in samples])
        view = step.view
        self._figures = self._row(self._unused.more(int(view.draws.min()) if len(view) else view.end))
        self._begin()

    def _row(self, unused: list[int]) -> dict[str, float]:
        row: dict[str, float] = {}
        for seat, name in enumerate(self._seats):
            groups, samples = self._groups[seat], self._samples[seat]
            row |= {f"seat/{name}/groups": groups, f"seat/{name}/unused": unused[seat]}
            if groups:
                row[f"seat/{name}/flat_share"] = self._flat[seat] / groups
            if samples:
                row[f"seat/{name}/reward"] = self._rewards[seat] / samples
        return row

    def numbers(self) -> Mapping[str, Any]:
        return self._figures


def observers(parts: LearnerParts) -> list[StepObserver]:
    """The observer of a model of several seats."""
    return [SeatFigures(parts)] if len(parts.topology.seats) > 1 else []
