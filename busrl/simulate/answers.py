"""Answers to the draws of a simulated run: their lengths and rewards, from a trace, a recorded run, or a generator.

The same arguments give the same answers. Knows nothing of time, slots or policies.

- A draw's answers do not depend on the time of the draw, except those of a recorded run, which follow the learner's
  step: a policy that learns gives shorter answers and more groups without a signal.
- A length is at least 1 and at most the limit of the topology.
"""

from __future__ import annotations

import bisect
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from busrl.data.trace import TracedPrompt, Turns
from busrl.topology import Topology

WINDOW_STEPS = 5  # a recorded group is used for steps within this distance of its own


@dataclass(frozen=True)
class Answer:
    """All members of one group: tokens and reward of each, and its calls where it is an episode."""

    lengths: tuple[int, ...]
    rewards: tuple[float, ...]
    turns: tuple[Turns, ...] = ()


class TraceAnswers:
    """The lines of a trace in the order in which a run would draw them. `endless`: again and again, each draw at the
    time of `arrival` (None: at once); otherwise once, at the times of the lines."""

    def __init__(
        self, tasks: Sequence[TracedPrompt], group_size: int, limit: int, *, order: Callable[[int], int] | None = None,
        flat_share: float = 0.0, seed: int = 0, endless: bool = True,
        arrival: Callable[[int], float | None] | None = None, name: str = "trace",
    ) -> None:
        self.tasks, self.size, self.limit, self.name = tasks, group_size, limit, name
        self.order = order or (lambda draw: draw % len(tasks))
        self.arrival = arrival
        self.flat_share, self.seed, self.endless = flat_share, seed, endless
        self._answers: dict[int, Answer] = {}  # task -> its answers, with rewards as if the group were not flat

    def prompt(self, draw: int) -> TracedPrompt | None:
        """Prompt, tag and arrival of a draw; None after the last one."""
        if not self.endless and draw >= len(self.tasks):
            return None
        task = self.tasks[self.order(draw)]
        if self.endless:  # the times of the lines hold for the first epoch at most
            time = None if self.arrival is None else self.arrival(draw)
            return task if time == task.arrival_s else replace(task, arrival_s=time)
        return task

    def answer(self, draw: int, step: int) -> Answer:
        """Lengths and rewards of the group of a draw that is opened after `step` optimiser steps."""
        index = self.order(draw)
        answer = self._answers.get(index) or self._answers.setdefault(index, self._make(self.tasks[index]))
        if self.tasks[index].rewards or chance(self.seed, draw) >= self.flat_share:
            return answer
        return replace(answer, rewards=(1.0,) * self.size)

    def _make(self, task: TracedPrompt) -> Answer:
        members = range(self.size)
        turns = tuple(tuple((min(n, self.limit), s) for n, s in task.turns_of(m)) for m in members if task.turns)
        calls = [[n for n, _ in episode] for episode in turns] or [[min(task.length(m), self.limit)] for m in members]
        lengths = tuple(map(sum, calls))
        rewards = (task.reward(m) or 0.0 for m in members) if task.rewards else (float(m % 2) for m in members)
        return Answer(lengths, tuple(rewards), turns)


def chance(seed: int, draw: int) -> float:
    """A number in [0, 1) from seed and draw alone; a generator for each draw would cost as much as all the rest."""
    return zlib.crc32(b"%d %d" % (draw, seed)) / 2**32


@dataclass
class Recorded:
    """A group of a recorded run, from groups.jsonl. `step`: of the weights at its admission."""

    step: int
    line: int
    lengths: tuple[int, ...]
    rewards: tuple[float, ...]


class RecordedAnswers:
    """The groups of a recorded run. A draw gets a group of the same prompt from about the same step, or else any group
    from about that step: lengths and rewards change with training as they did in that run."""

    name = "recorded run"

    def __init__(
        self, groups: Sequence[Recorded], topology: Topology, seed: int, line_of: Callable[[int], int],
        text_of: Callable[[int], TracedPrompt],
    ) -> None:
        self.size, self.limit = topology.groups.size, topology.generation.max_new_tokens
        self.seed, self.line_of, self.text_of = seed, line_of, text_of
        self.groups = sorted(groups, key=lambda group: group.step)
        self._steps = [group.step for group in self.groups]
        self._by_line: dict[int, list[int]] = {}
        for i, group in enumerate(self.groups):
            self._by_line.setdefault(group.line, []).append(i)

    def prompt(self, draw: int) -> TracedPrompt | None:
        return self.text_of(draw)

    def answer(self, draw: int, step: int) -> Answer:
        wanted = min(step, self._steps[-1])
        same = min(self._by_line.get(self.line_of(draw), ()), key=lambda i: abs(self._steps[i] - wanted), default=-1)
        if same < 0 or abs(self._steps[same] - wanted) > WINDOW_STEPS:
            low = bisect.bisect_left(self._steps, wanted - WINDOW_STEPS // 2)
            high = max(low + 1, bisect.bisect_right(self._steps, wanted + WINDOW_STEPS // 2))
            low = min(low, len(self._steps) - 1)
            same = low + int(chance(self.seed, draw) * (min(high, len(self._steps)) - low))
        group = self.groups[same]
        members = range(self.size)
        return Answer(
            tuple(min(group.lengths[m % len(group.lengths)], self.limit) for m in members),
            tuple(group.rewards[m % len(group.rewards)] for m in members),
        )


Answers = TraceAnswers | RecordedAnswers
