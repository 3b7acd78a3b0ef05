"""Pass rates: prompts that the run answers right too often, or too seldom, are left out for a while.

Takes groups that ended and draws that are to be opened. Knows nothing of files, slots, fates or how a draw becomes a
line: places (source, epoch, line) are handed in.

- A decision depends on the groups that ended, on the draw, and on passes for which it was given up; on no clock.
- The order in which groups come in does not matter, as long as each comes once.
- A prompt without a judgement is never left out, and neither is anything while every prompt would be.
"""

from __future__ import annotations

from bisect import insort
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

NEVER = 1 << 62  # an epoch that no run comes to


class Place(Protocol):
    """The place of a draw: its source, how often that was gone through before, its line."""

    @property
    def source(self) -> int: ...
    @property
    def epoch(self) -> int: ...
    @property
    def line(self) -> int: ...


@dataclass(frozen=True)
class Band:
    """The pass rates that are trained: `least <= rate < most` (0: no bound). A prompt is judged by its newest groups
    with together `after` answers (0: by the newest one), and rests for `rest` passes (0: for good)."""

    least: float
    most: float
    after: int
    rest: int

    def holds(self, right: int, answers: int) -> bool:
        rate = right / answers
        return rate >= self.least and not 0 < self.most <= rate


@dataclass
class _Prompt:
    groups: list[tuple[int, int, int, int]]  # draw, epoch, right answers, answers: the newest that a judgement takes
    until: int = 0  # the first epoch in which it is tried again; 0 = it does not rest


class PassRates:
    """The pass rate of every prompt that was answered, and which prompts rest. `sizes`: prompts of each source."""

    def __init__(self, band: Band, sizes: Sequence[int]) -> None:
        self.band, self.sizes = band, tuple(sizes)
        self.groups = 0  # that ended
        self._prompts: dict[int, _Prompt] = {}
        self._resting: list[Counter[int]] = [Counter() for _ in sizes]  # first epoch without rest -> prompts

    def ended(self, draw: int, place: Place, right: int, answers: int) -> None:
        """The group of a draw ended with so many right answers. A group that comes in again counts once."""
        self.groups += 1
        if answers < 1:
            return
        prompt = self._prompts.setdefault(place.line, _Prompt([]))
        prompt.groups = [group for group in prompt.groups if group[0] != draw]
        insort(prompt.groups, (draw, place.epoch, right, answers))
        while len(prompt.groups) > 1 and sum(group[3] for group in prompt.groups[1:]) >= max(1, self.band.after):
            del prompt.groups[0]
        self._judge(prompt, self._resting[place.source])

    def _judge(self, prompt: _Prompt, resting: Counter[int]) -> None:
        right, answers = (sum(group[at] for group in prompt.groups) for at in (2, 3))
        until = 0
        if answers >= self.band.after and not self.band.holds(right, answers):
            until = prompt.groups[-1][1] + 1 + self.band.rest if self.band.rest else NEVER
        resting[prompt.until] -= 1
        resting[until] += 1
        prompt.until = until

    def rests(self, place: Place) -> bool:
        prompt = self._prompts.get(place.line)
        return prompt is not None and place.epoch < prompt.until

    def resting(self, epochs: Sequence[int]) -> list[int]:
        """Prompts of each source that rest, the source being in the epoch of these `epochs`."""
        return [
            sum(count for until, count in resting.items() if until > max(0, epoch))
            for resting, epoch in zip(self._resting, epochs, strict=True)
        ]


class PromptFilter:
    """Decides draw by draw. `place`, `epochs`: those of the stream of prompts.

    Where every prompt of every source rests, nothing is left out for one pass: the next draws, as many as there are
    prompts. `given_up` is the first draw after that pass; a successor takes it over with `resume`.
    """

    def __init__(
        self, rates: PassRates, place: Callable[[int], Place], epochs: Callable[[int], Sequence[int]]
    ) -> None:
        self.rates, self._place, self._epochs = rates, place, epochs
        self.given_up = 0

    def resume(self, given_up: int) -> None:
        """Go on where a predecessor was, or where a decision was that could not be written down."""
        self.given_up = given_up

    def leaves_out(self, draw: int) -> bool:
        if draw < self.given_up or not self.rates.rests(self._place(draw)):
            return False
        epochs = self._epochs(draw)
        drawn = [size if epoch >= 0 else 0 for size, epoch in zip(self.rates.sizes, epochs, strict=True)]
        if all(count >= size for count, size in zip(self.rates.resting(epochs), drawn, strict=True)):
            self.given_up = draw + sum(self.rates.sizes)
            return False
        return True
