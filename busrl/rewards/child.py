"""The process in which a reward function runs: `python -m busrl.rewards.child PARENT_PID`.

Talks to its parent over `busrl.system.pipes` only (lines as `busrl.rewards.pool` describes them): the pool, or the
trial before a run (`busrl.preflight.trial`). The user's code may raise, hang, crash or call exit: the parent detects
that and continues. Knows nothing of rings or groups. A library of a kind of reward is imported for that kind alone.

- Outcomes are written in the order of the items. With a function that judges one item at a time, each outcome is
  written before the next item begins: when the process dies, it was judging the first item without an outcome.
- With a function that judges many items at a time, as lists or as coroutines, READY carries that fact.
- When the machine runs out of memory, the kernel ends this process first.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import os
import resource
import sys
from collections import deque
from collections.abc import Sequence
from traceback import format_exc
from typing import Any

import msgspec

from busrl.errors import cause
from busrl.rewards.base import READY, Item, MalformedReward, Outcome, RewardFunction, Setup, settle
from busrl.system import imports, parent, pipes
from busrl.system.imports import IMPORTING, ImportClock

TEXT_LIMIT = 2000
AT_ONCE = 64  # answers that a function of lists gets, or calls of a coroutine at the same time
_batches = msgspec.json.Decoder(list[Item])


def main() -> int:
    parent.die_with(int(sys.argv[1]))
    requests, answers = pipes.private_pipes()
    while not (rows := requests.read()):
        if requests.over:
            return 0
    try:
        setup = msgspec.json.decode(rows.pop(0), type=Setup)
        keep_apart(setup)
        function = build(setup)
        way = way_of(function, setup)
    except BaseException as problem:
        write(answers, Outcome(READY, error="not_loaded", text=str(problem) or type(problem).__name__))
        return 1
    clock = imports.ImportClock(lambda begins: tell_import(answers, begins))
    own_s = getattr(function, "longest_s", setup.timeout_s) if way == "async" else 0.0
    write(answers, Outcome(READY, text=way, seconds=own_s))
    if way == "async":
        asyncio.run(Concurrent(function, answers, own_s, clock).serve(requests, rows))
        return 0
    work = by_lists if way == "batch" else one_by_one
    while rows or not requests.over:
        work(function, [item for row in rows for item in _batches.decode(row)], answers, clock)
        rows = requests.read()
    return 0


def build(setup: Setup) -> RewardFunction:
    function: RewardFunction = imports.of_busrl(setup.maker)(setup)
    return function


def way_of(function: RewardFunction, setup: Setup) -> str:
    """The way to call a function: many calls at the same time (async), lists of items (batch), or one item after the
    other ("")."""
    if inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__):
        return "async"
    return "batch" if setup.batch or getattr(function, "takes_lists", False) else ""


def one_by_one(function: RewardFunction, items: Sequence[Item], answers: int, clock: ImportClock) -> None:
    for item in items:
        begun = clock.now()
        outcome = judge(function, item)
        outcome.seconds = clock.now() - begun
        write(answers, outcome)


def judge(function: RewardFunction, item: Item) -> Outcome:
    """Judge an item; user code may raise anything, SystemExit included."""
    try:
        return settled(item, called(function, item))
    except BaseException as problem:
        return failed(item, problem)


def called(function: RewardFunction, item: Item) -> Any:
    record: dict[str, Any] = msgspec.json.decode(item.record_line)
    return function(record, item.completion, item.token_ids, **episode_of(function, item.episode))


def episode_of(function: RewardFunction, episode: Any) -> dict[str, Any]:
    """The argument `episode`, if the function has it; each function is inspected once."""
    if id(function) not in _takes:
        try:
            _takes[id(function)] = "episode" in inspect.signature(function).parameters
        except (TypeError, ValueError):  # of a builtin
            _takes[id(function)] = False
    return {"episode": episode} if _takes[id(function)] else {}


_takes: dict[int, bool] = {}  # by function: whether it has an argument `episode`


def settled(item: Item, result: Any) -> Outcome:
    return Outcome(item.key, *settle(result))


def failed(item: Item, problem: BaseException) -> Outcome:
    """The outcome of an item whose judgement raised; only for use in the handler of that exception."""
    if isinstance(problem, (MalformedReward, msgspec.DecodeError)):
        return Outcome(item.key, error="malformed", text=str(problem)[-TEXT_LIMIT:])
    # The cause stands first: messages that show one line show that.
    traceback = format_exc()[-TEXT_LIMIT:]
    return Outcome(item.key, error="raised", text=f"{cause(problem)[:TEXT_LIMIT]}\n{traceback}")


# -- functions that judge many at a time ------------------


def by_lists(function: Any, items: Sequence[Item], answers: int, clock: ImportClock) -> None:
    """Call the function with at most AT_ONCE answers at a time. When a call raises, each of its answers is judged by a
    call of its own."""
    for begin in range(0, len(items), AT_ONCE):
        some, begun = items[begin : begin + AT_ONCE], clock.now()
        outcomes = of_list(function, some)
        if len(some) > 1 and all(outcome.error for outcome in outcomes):
            outcomes = [outcome for item in some for outcome in of_list(function, [item])]
        spent = clock.now() - begun
        for outcome in outcomes:
            outcome.seconds = spent / len(some)
            write(answers, outcome)


def of_list(function: Any, items: Sequence[Item]) -> list[Outcome]:
    try:
        records = [msgspec.json.decode(item.record_line) for item in items]
        more = episode_of(function, [item.episode for item in items])
        completions, token_ids = [item.completion for item in items], [item.token_ids for item in items]
        results = list(function(records, completions, token_ids, **more))
        if len(results) != len(items):
            raise MalformedReward(f"the function returned {len(results)} rewards for {len(items)} answers")
    except BaseException as problem:
        return [failed(item, problem) for item in items]
    outcomes = []
    for item, result in zip(items, results):
        try:
            outcomes.append(settled(item, result))
        except MalformedReward as problem:
            outcomes.append(failed(item, problem))
    return outcomes


class Concurrent:
    """Calls of a coroutine function: at most `at_once` (its attribute, or AT_ONCE) at the same time, each for at most
    `longest_s`. Items begin in their order, and outcomes are written in that order."""

    def __init__(self, function: Any, answers: int, longest_s: float, clock: ImportClock) -> None:
        self.function, self.answers, self.longest_s, self.clock = function, answers, longest_s, clock
        self.room = asyncio.Semaphore(getattr(function, "at_once", AT_ONCE))
        self.tasks: deque[asyncio.Task[Outcome]] = deque()
        self.arrived = asyncio.Event()

    async def serve(self, requests: pipes.Requests, rows: Sequence[bytes]) -> None:
        """Judge the items of `rows`, and those that arrive, until the parent closes the pipe."""
        os.set_blocking(requests.fd, False)
        loop, last = asyncio.get_running_loop(), self.clock.now()
        self._take(rows)
        loop.add_reader(requests.fd, self._read, requests)
        while self.tasks or not requests.over:
            if not self.tasks:
                self.arrived.clear()
                await self.arrived.wait()
                last = self.clock.now()
                continue
            outcome = await self.tasks[0]
            self.tasks.popleft()
            outcome.seconds, last = self.clock.now() - last, self.clock.now()  # of the wait, not of each call
            write(self.answers, outcome)
        if closes := getattr(self.function, "close", None):
            await closes()

    def _read(self, requests: pipes.Requests) -> None:
        with contextlib.suppress(BlockingIOError):
            self._take(requests.read())
        if requests.over:
            asyncio.get_running_loop().remove_reader(requests.fd)
        self.arrived.set()

    def _take(self, rows: Sequence[bytes]) -> None:
        items = (item for row in rows for item in _batches.decode(row))
        self.tasks.extend(asyncio.ensure_future(self._judge(item)) for item in items)

    async def _judge(self, item: Item) -> Outcome:
        async with self.room:
            try:
                call, ends = asyncio.ensure_future(called(self.function, item)), self.clock.now() + self.longest_s
                while not call.done() and (left := ends - self.clock.now()) > 0:
                    await asyncio.wait({call}, timeout=left)
                if not call.done():
                    call.cancel()
                    return Outcome(item.key, error="hung", text=f"no result after {self.longest_s:g} s (timeout_s)")
                return settled(item, call.result())
            except BaseException as problem:
                return failed(item, problem)


def keep_apart(setup: Setup) -> None:
    """Let the kernel end this process first when memory runs out; `memory_mb` limits its address space."""
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")
    if setup.memory_mb:
        resource.setrlimit(resource.RLIMIT_AS, (setup.memory_mb << 20,) * 2)


def tell_import(fd: int, begins: bool) -> None:
    """Report the begin or end of an import: the deadline of a call is stopped meanwhile."""
    pipes.write(fd, pipes.line_of(Outcome(IMPORTING, text="begins" if begins else "")))


def write(fd: int, outcome: Outcome) -> None:
    pipes.printed.begin()
    pipes.write(fd, pipes.line_of(outcome))


if __name__ == "__main__":
    sys.exit(main())
