"""The prompts that the scheduler leaves out by their pass rates ([data.skip]): what it knows, and what it wrote down.

Talks to `groups.jsonl`, which the learner writes, to `skips.jsonl`, and to the table of fates. `busrl.scheduling`
decides. Used by the scheduler alone; knows nothing of policies, slots or admission.

- A line of skips.jsonl first, then the fates that it is about: a scheduler that is killed in between leaves a line by
  which its successor stores them, so a draw that was left out stays left out.
- The first sample of a draw that is left out gets the fate `s`, the others none: the draw is over, and was never open.
- A group that cannot be read (a full disk, a damaged line) is not judged by: that leaves a prompt in, never out.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from busrl.config import Topology
from busrl.data import JsonlStream
from busrl.errors import MachineError
from busrl.files import LineFile, LineFollower
from busrl.ledger.skips import SkipLine, newest_skips, skip_lines
from busrl.paths import RunPaths
from busrl.ring import Fates
from busrl.scheduling.lengths import Candidate
from busrl.scheduling.pass_rates import Band, PassRates, PromptFilter
from busrl.states import Fate, uid_of

ALL = 1 << 62  # bytes


class _Groups(msgspec.Struct):
    """What is read of a line of groups.jsonl."""

    draws: list[int]
    rewards: list[list[float]]


class SkippedPrompts:
    """What is left out of the stream. `warn` gets what people should know; without [data.skip] nothing happens."""

    def __init__(
        self, topology: Topology, paths: RunPaths, stream: JsonlStream, fates: Fates, warn: Callable[[str], None]
    ) -> None:
        skip, sources = topology.data.skip, topology.derived.sources
        self.on, self._solved, self._warn = skip.on, topology.validation.solved, warn
        self._stream, self._fates, self._size = stream, fates, topology.groups.size
        mixed = len(sources) > 1
        self._names = [one.name for one in sources] if mixed else [Path(topology.data.train).stem]
        sizes = [one.count for one in sources] if mixed else [len(stream)]
        rates = PassRates(Band(skip.min_pass_rate, skip.max_pass_rate, skip.after, skip.rest), sizes)
        self.filter = PromptFilter(rates, stream.place, stream.epochs)
        self.left_out = [0 for _ in sizes]
        self._newest = 0  # draw
        if self.on:
            self._groups = LineFollower(paths.groups, ALL)
            self._restore(paths.skips)
            self._file = LineFile(paths.skips)

    def _restore(self, path: Path) -> None:
        """Take over what predecessors left out: their fates, their counts, a pass for which they had given up."""
        last = newest_skips(path)
        for line in skip_lines(path):
            self.filter.given_up = max(self.filter.given_up, line.given_up)
            self._newest = max([self._newest, *line.draws])
            self._end(line.draws)
        if last is not None:
            self.left_out = [last.left_out.get(name, 0) for name in self._names]

    def look(self) -> None:
        """Learn of the groups that ended since the last look."""
        for text in self._groups.new() if self.on else ():
            try:
                line = msgspec.json.decode(text, type=_Groups)
            except (msgspec.DecodeError, UnicodeDecodeError):
                continue
            for draw, rewards in zip(line.draws, line.rewards):
                right = sum(reward >= self._solved for reward in rewards)
                self.filter.rates.ended(draw, self._stream.place(draw), right, len(rewards))

    def take(self, following: Callable[[], Candidate | None], groups: int) -> tuple[list[Candidate], bool]:
        """At most `groups` of the candidates that follow, without those that are left out; and whether one was."""
        wanted: list[Candidate] = []
        out: list[int] = []
        given_up = self.filter.given_up
        while len(wanted) < groups and (candidate := following()) is not None:
            if self.on and self.filter.leaves_out(candidate.draw):
                out.append(candidate.draw)
            else:
                wanted.append(candidate)
        if out or given_up != self.filter.given_up:
            self._leave_out(out, given_up)
        return wanted, bool(out)

    def _leave_out(self, draws: list[int], given_up: int) -> None:
        counts = list(self.left_out)
        for draw in draws:
            counts[self._stream.place(draw).source] += 1
        self._newest = max([self._newest, *draws])
        now = self.filter.given_up if self.filter.given_up != given_up else 0
        line = SkipLine(
            time=round(time.time(), 3), told=self.filter.rates.told, draws=draws, given_up=now,
            left_out=dict(zip(self._names, counts)), resting=self._resting(),
            prompts=dict(zip(self._names, self.filter.rates.sizes)),
        )
        try:
            self._file.append(msgspec.json.encode(line))
        except MachineError:
            self.filter.given_up = given_up  # decided again, as the draws are
            raise
        self.left_out = counts
        self._end(draws)
        if now:
            self._warn(
                f"every prompt is out of the band of data.skip: none is left out for one pass, up to draw {now}; the "
                "task is learned or out of reach, so end the run, give other prompts, or widen the band"
            )

    def _end(self, draws: list[int]) -> None:
        """Store that these draws were left out, over no fate or over what a predecessor had half stored."""
        for draw in draws:
            uid = uid_of(draw, 0, 0, self._size)
            self._fates.store(uid, Fate.DISPATCHED.letter)
            self._fates.store(uid, Fate.SKIPPED.letter)

    def _resting(self) -> dict[str, int]:
        return dict(zip(self._names, self.filter.rates.resting(self._stream.epochs(self._newest))))

    def metrics(self) -> dict[str, float]:
        """Numbers for SCHEDULER_STATE, in all and by source where there are several."""
        if not self.on:
            return {}
        resting = self._resting()
        values = {"left_out": float(sum(self.left_out)), "resting": float(sum(resting.values()))}
        if len(self._names) > 1:
            values |= {f"left_out/{name}": float(count) for name, count in zip(self._names, self.left_out)}
            values |= {f"resting/{name}": float(count) for name, count in resting.items()}
        return values

    def close(self) -> None:
        if self.on:
            self._file.close()
