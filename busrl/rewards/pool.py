"""Judging completions with the user's reward function in child processes.

Talks to its children only. Consumes items, produces outcomes; never waits longer than `poll` allows. Knows nothing of
slots, fates or the bus.

- Every item that was submitted comes back exactly once: with a value, or as raised, hung or malformed.
- An item that raises, hangs or crashes its process costs no other item more than time.
- The deadline is per item and counted while this process looks: of a time during which it did not, LATENESS_S counts
  at most, so a stopped parent does not end a child.
- A child is killed only by its pool, and ends with it.
"""

from __future__ import annotations

import select
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Protocol

import msgspec

from busrl.rewards.base import RewardSettings
from busrl.rewards.process import Answer, Lane, Request, Setup

LATENESS_S = 1.0


class PoolSettings(RewardSettings, Protocol):
    """[reward] as a whole."""

    @property
    def timeout_s(self) -> float: ...
    @property
    def workers(self) -> int: ...


class Item(msgspec.Struct, frozen=True, gc=False):
    """A completion to be judged. `key` is the caller's own and comes back with the outcome."""

    key: int
    record_line: bytes
    completion: str
    token_ids: list[int]


class Outcome(msgspec.Struct, frozen=True, gc=False):
    """What became of an item: a finite `value` (and its parts), or `error`: raised | hung | malformed, with `text`."""

    key: int
    value: float
    parts: dict[str, float]
    error: str | None
    text: str


@dataclass(frozen=True)
class PoolStats:
    """Snapshot: items judged by outcome, items waiting, children restarted, seconds in the function per child."""

    judged: int
    raised: int
    hung: int
    malformed: int
    pending: int
    restarts: int
    busy_s: float


class RewardPool:
    """Make it in the main thread: the children die with the thread that made them."""

    def __init__(self, settings: PoolSettings, *, base_dir: str | Path = ".", ready_s: float = 120.0) -> None:
        base = str(Path(base_dir).resolve())
        setup = Setup(settings.kind, settings.function, settings.extract, settings.answer_key, base)
        self._poller = select.epoll()
        self._keys: dict[int, int] = {}
        self._next_seq = 1
        self._counts: Counter[str | None] = Counter()
        self._outcomes: list[Outcome] = []
        self._lanes: list[Lane] = []
        now = time.monotonic()
        try:
            for _ in range(settings.workers):
                self._lanes.append(Lane(setup, self._poller, settings.timeout_s, ready_s, now))
        except BaseException:
            self.close()
            raise

    def __len__(self) -> int:
        """Items without an outcome."""
        return len(self._keys)

    def fileno(self) -> int:
        """Readable when `poll` may have something; poll now and then in any case, for children that are overdue."""
        return self._poller.fileno()

    def submit(self, items: Sequence[Item]) -> None:
        """Hand items to the children, fewest waiting first. Never waits."""
        if not items:
            return
        requests = [Request(self._next_seq + i, m.record_line, m.completion, m.token_ids) for i, m in enumerate(items)]
        self._keys.update((r.seq, m.key) for r, m in zip(requests, items))
        self._next_seq += len(items)
        now = time.monotonic()
        share = -(-len(requests) // len(self._lanes))
        for lane in sorted(self._lanes, key=len):
            lane.submit(requests[:share], now)
            del requests[:share]

    def poll(self, timeout_s: float = 0.0) -> list[Outcome]:
        """Outcomes since the last call; waits at most `timeout_s` for the first one, not at all with nothing pending.

        `RewardNotLoaded` if the function cannot be imported.
        """
        now = self._collect(LATENESS_S)
        ends = now + timeout_s
        while not self._outcomes and self._keys and now < ends:
            now = self._wait(ends - now)
        outcomes, self._outcomes = self._outcomes, []
        return outcomes

    def wait_ready(self, timeout_s: float) -> bool:
        """Wait until every child has loaded the function; `RewardNotLoaded` if one cannot."""
        now = self._collect(LATENESS_S)
        ends = now + timeout_s
        while not all(lane.serving for lane in self._lanes) and now < ends:
            now = self._wait(ends - now)
        return all(lane.serving for lane in self._lanes)

    def stats(self) -> PoolStats:
        return PoolStats(
            judged=self._counts[None],
            raised=self._counts["raised"],
            hung=self._counts["hung"],
            malformed=self._counts["malformed"],
            pending=len(self._keys),
            restarts=sum(lane.restarts for lane in self._lanes),
            busy_s=sum(lane.busy_s for lane in self._lanes) / max(1, len(self._lanes)),
        )

    def pids(self) -> list[int]:
        """Process ids of the children, for display."""
        return [lane.pid for lane in self._lanes]

    def close(self) -> None:
        """End the children; items without an outcome are forgotten. A second call does nothing."""
        for lane in self._lanes:
            lane.close()
        self._lanes = []
        self._keys.clear()
        self._outcomes.clear()
        self._poller.close()

    def __enter__(self) -> RewardPool:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def _wait(self, left_s: float) -> float:
        """Sleep until a child answers or is overdue; the time asked for counts in full, lateness does not."""
        wait = min([left_s, *(lane.remaining_s() for lane in self._lanes)])
        self._poller.poll(wait)
        return self._collect(wait)

    def _collect(self, at_most_s: float) -> float:
        """Gather what has come up; returns the clock value it was done at."""
        now = time.monotonic()
        for lane in self._lanes:
            for answer in lane.collect(now, at_most_s):
                self._outcomes.append(self._outcome(answer))
        return now

    def _outcome(self, answer: Answer) -> Outcome:
        error = answer.error or None
        self._counts[error] += 1
        return Outcome(self._keys.pop(answer.seq), answer.value, answer.parts, error, answer.text)
