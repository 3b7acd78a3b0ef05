"""The pool of child processes that judge completions with the user's reward function.

    parent -> child, lines of JSON: first a Setup, then batches: arrays of Item
    child -> parent, lines of JSON: one Outcome when set up (key READY; `text`: async or batch where the child judges
                                    many items at a time, `seconds`: the child's own deadline, 0 for none), then one
                                    per item, in order; between them those with the key IMPORTING: a call begins to
                                    import modules (`text`), or ends it ("")

Each part of a reward has children of its own, so that a part that hangs or dies is named, and costs the others nothing.
Talks to the operating system and to its children. Knows nothing of slots, fates or the bus.

- Every submitted item comes back exactly once: with a value, or as raised, hung or malformed.
- An item that raises, hangs or crashes its process costs no other item more than time.
- The deadline is per item. The time in which the child imports modules does not count; it has a limit of its own, that
  of the start.
- Time counts only while this process polls: of a longer gap at most LATENESS_S, so a stopped parent ends no child.
- Nothing waits, except `poll` for as long as it is allowed and `close` for the end of a process that it has killed.
- The child leads its own session; killing takes its process group, and with it what user code has started. A child is
  killed only by its pool, and ends with it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import math
import os
import select
import signal
import subprocess
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from busrl.errors import MachineError, RewardNotLoaded
from busrl.rewards.base import READY, Item, Outcome, Setup
from busrl.system import proxies
from busrl.system.guardian import halted
from busrl.system.imports import IMPORTING, interpreter
from busrl.topology.rewards import REWARD_KINDS, Reward

PIPE_BYTES, READ_BYTES = 1 << 20, 1 << 18
MAX_FAILURES, LATENESS_S = 3, 1.0
OWN_GRACE_S = 5.0  # beyond the deadline of a child that has its own
END_S = 5.0  # a killed process that does not go within this time is stuck in the kernel


_outcomes = msgspec.json.Decoder(Outcome)


class ChildProcess:
    """States: running -> ended (its pipe is closed) -> closed."""

    def __init__(self, setup: Setup, poller: select.epoll) -> None:
        # From the main thread: the child is tied to the life of the thread that starts it.
        self._process = subprocess.Popen(
            [*interpreter(), "busrl.rewards.child", str(os.getpid())], env=proxies.environment(),
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0, start_new_session=True,
        )
        assert self._process.stdin and self._process.stdout
        self._poller, self._in, self._out = poller, self._process.stdin, self._process.stdout
        for pipe in (self._in, self._out):
            os.set_blocking(pipe.fileno(), False)
            with contextlib.suppress(OSError):  # a limit on pipe memory costs speed only
                fcntl.fcntl(pipe, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
        self._pending = bytearray()
        self._rest = b""  # the beginning of a line of which the child has not written the end yet
        self._writing = False
        self.ended, self.fault = False, ""
        poller.register(self._out, select.EPOLLIN)
        self.send(setup)

    @property
    def pid(self) -> int:
        return self._process.pid

    def send(self, message: object) -> None:
        """Queue one line and write what the pipe takes."""
        self._pending += msgspec.json.encode(message) + b"\n"
        self.flush()

    def flush(self) -> None:
        """Write what is queued; the poller wakes up when there is room for the rest."""
        try:
            while self._pending:
                del self._pending[: os.write(self._in.fileno(), self._pending)]
        except BlockingIOError:
            pass
        except BrokenPipeError:
            self._pending.clear()  # it is dead; the end of its output says so too
        self._want_write(bool(self._pending))

    def read(self) -> list[Outcome]:
        """Every outcome that is complete; sets `ended` when the process has closed its end."""
        with contextlib.suppress(BlockingIOError):
            while not self.ended:
                data = os.read(self._out.fileno(), READ_BYTES)
                self._rest += data
                self.ended = not data
        *lines, self._rest = self._rest.split(b"\n")
        outcomes: list[Outcome] = []
        try:
            for line in lines:
                outcomes.append(_outcomes.decode(line))
        except msgspec.MsgspecError:
            self.spoilt("it wrote to the pipe of its answers")
        return outcomes

    def spoilt(self, fault: str) -> None:
        """Treat the child as ended, for this fault: nothing that it writes from now on can be trusted."""
        self.ended, self.fault = True, fault

    def close(self, grace_s: float = 0.0) -> str:
        """End the child and what it started, and return how it ended. `grace_s`: time for the child to end by itself at
        the end of its input."""
        self._want_write(False)
        self._in.close()
        if grace_s:
            with contextlib.suppress(OSError), open(os.pidfd_open(self.pid), "rb", buffering=0) as end:
                poller = select.poll()
                poller.register(end, select.POLLIN)
                poller.poll(grace_s * 1000)
        # Before it is reaped: its process id, and so its group's, belongs to no other process yet.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        try:
            status = self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            raise MachineError(f"reward child {self.pid} does not end {END_S:g} s after SIGKILL") from None
        if not self._out.closed:
            self._poller.unregister(self._out)
            self._out.close()
        how = f"killed by {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"
        return self.fault or how

    def _want_write(self, wanted: bool) -> None:
        if wanted != self._writing:
            self._writing = wanted
            if wanted:
                self._poller.register(self._in, select.EPOLLOUT)
            else:
                self._poller.unregister(self._in)


class JudgeProcess:
    """A child with its items. `elapsed_s`: the time that the child has spent on the head of `sent`, or on its start
    (until it is `serving`), as far as this process has polled.

    - Every item comes out exactly once, as an outcome, whatever the child does.
    - The child judges the head of `sent`: outcomes come in order, each before the next item begins, unless it judges
      many at a time (`together`).
    - When the deadline passes, the head is `hung`, at once. When the child dies, the head is judged again, alone; if
      the child dies again, the head is `raised`. All other items go to the next child.
    - Of items that are judged together none can be blamed: each of them is judged again, alone.
    - A child that ends before it has judged anything, MAX_FAILURES times in a row, ends the pool with an error.
    """

    def __init__(self, setup: Setup, poller: select.epoll, ready_s: float, now: float) -> None:
        self._setup, self._poller = setup, poller
        self.timeout_s, self.ready_s = setup.timeout_s, ready_s
        self.waiting: deque[Item] = deque()
        self.sent: deque[Item] = deque()
        self.serving = False
        self.restarts = 0
        self.elapsed_s, self._seen = 0.0, now
        self.importing, self._imported_s = False, 0.0  # now, and how long in this call
        self.together = False
        self._suspects = 0  # items at the head that are judged one by one, as one of them ended a child
        self._failures = 0
        self._judged_s = 0.0  # spent in the function for items that came out
        self._child = ChildProcess(setup, poller)

    def __len__(self) -> int:
        """Items without an outcome."""
        return len(self.waiting) + len(self.sent)

    @property
    def pid(self) -> int:
        return self._child.pid

    @property
    def busy_s(self) -> float:
        """Seconds in the function. It may decrease a little when the present item is judged."""
        return self._judged_s + (self.elapsed_s if self.serving and self.sent else 0.0)

    def remaining_s(self) -> float:
        """Time until the child is overdue; inf while it has no item."""
        if not self.serving:
            return max(0.0, self.ready_s - self.elapsed_s)
        if self.importing:
            return max(0.0, self.ready_s - self._imported_s)
        return max(0.0, self.timeout_s - self.elapsed_s) if self.sent else float("inf")

    def submit(self, items: Sequence[Item], now: float) -> None:
        self.waiting.extend(items)
        self._send(now)

    def collect(self, now: float, at_most_s: float) -> list[Outcome]:
        """New outcomes; at most `at_most_s` of the time since the last call counts. Never waits."""
        self._child.flush()
        answers = self._child.read()
        self._count(min(now - self._seen, at_most_s))
        outcomes = self._settle(answers)
        self._judged_s += sum(answer.seconds for answer in answers)
        self._seen = now
        if self._child.ended:
            outcomes += self._died()
        elif self.remaining_s() <= 0:
            outcomes += self._overdue()
        self._send(now)
        return outcomes

    def _count(self, passed_s: float) -> None:
        if self.importing:
            self._imported_s += passed_s
        else:
            self.elapsed_s += passed_s

    def close(self) -> None:
        """End the child: at once if it is judging, otherwise with time to end by itself."""
        self._child.close(0.0 if self.sent or not self.serving else 0.5)

    def _restart(self) -> None:
        """Put all items without an outcome back in front, and start a new child."""
        self.waiting.extendleft(reversed(self.sent))
        self.sent.clear()
        self.serving, self.elapsed_s, self.importing, self._imported_s = False, 0.0, False, 0.0
        self.restarts += 1
        self._child = ChildProcess(self._setup, self._poller)

    def _send(self, now: float) -> None:
        """Send all waiting items to the child; a suspect alone."""
        if not self.serving or not self.waiting or (self._suspects and self.sent):
            return
        if not self.sent:
            self.elapsed_s, self._seen = 0.0, now
        count = 1 if self._suspects else len(self.waiting)
        batch = [self.waiting.popleft() for _ in range(count)]
        self.sent.extend(batch)
        self._child.send(batch)

    def _settle(self, answers: list[Outcome]) -> list[Outcome]:
        outcomes = []
        for answer in answers:
            if answer.key == IMPORTING:
                self.importing = bool(answer.text)
                continue
            self.elapsed_s = self._imported_s = 0.0
            if answer.key == READY:
                if answer.error:
                    raise RewardNotLoaded(answer.text)
                self.serving, self.together = True, bool(answer.text)
                if answer.seconds:
                    self.timeout_s = answer.seconds + OWN_GRACE_S
                continue
            if not self.sent or self.sent[0].key != answer.key:
                self._child.spoilt(f"it answered {answer.key}, which was not its turn")
                break
            self.sent.popleft()
            self._suspects, self._failures = max(0, self._suspects - 1), 0
            outcomes.append(answer)
        return outcomes

    def _died(self) -> list[Outcome]:
        how = self._child.close()
        if not self.sent:
            self._failed(f"ended before it judged anything ({how})")
        elif self._suspects:
            return self._blame("raised", f"the reward process died on this sample twice ({how})")
        else:
            self._suspects = len(self.sent) if self.together else 1
        self._restart()
        return []

    def _overdue(self) -> list[Outcome]:
        how = halted(self.pid)
        state = f"; its process was {how}" if how else ""
        self._child.close()
        if self.serving and self.together and len(self.sent) > 1:
            self._suspects = len(self.sent)
            self._restart()
            return []
        if self.serving:
            key = f"{self._setup.place}.timeout_s" if self._setup.place == "reward" else "its timeout_s"
            if self.importing:
                return self._blame("hung", f"it imports modules for {self.ready_s:g} s and more{state}")
            return self._blame("hung", f"no result after {self.timeout_s:g} s ({key}){state}")
        self._failed(f"was not ready after {self.ready_s:g} s; it was importing the reward function{state}")
        self._restart()
        return []

    def _blame(self, error: str, text: str) -> list[Outcome]:
        head = self.sent.popleft()
        self._judged_s += self.elapsed_s
        self._suspects, self._failures = max(0, self._suspects - 1), 0
        self._restart()
        return [Outcome(head.key, error=error, text=text)]

    def _failed(self, what: str) -> None:
        self._failures += 1
        if self._failures >= MAX_FAILURES:
            runs, times = self._setup.function or self._setup.kind, f"{self._failures} times in a row"
            raise RewardNotLoaded(f"{self._setup.place} {runs}: its process {what}, {times}; see its log")


class Stage:
    """The children of one part of a reward: `name` "" and weight 1 where the reward has no parts."""

    def __init__(self, setup: Setup, name: str, weight: float) -> None:
        self.name, self.weight = name, weight
        self.processes: list[JudgeProcess] = []
        self._ids = REWARD_KINDS[setup.kind].with_ids

    def submit(self, items: Sequence[Item], now: float) -> None:
        """Hand items to the children, fewest waiting first."""
        if not self._ids:
            items = [Item(item.key, item.record_line, item.completion, []) for item in items]
        share = -(-len(items) // len(self.processes))
        for number, process in enumerate(sorted(self.processes, key=len)):
            process.submit(items[number * share : (number + 1) * share], now)

    @property
    def busy_s(self) -> float:
        return sum(process.busy_s for process in self.processes) / max(1, len(self.processes))


def weighted_sum(outcomes: Sequence[tuple[Stage, Outcome]]) -> Outcome:
    """The outcome of an item from the outcomes of all parts, in their order: the first that fails decides. The values
    of the parts are unweighted; numbers that a part's function named get the name PART/NAME."""
    key, seconds = outcomes[0][1].key, max(outcome.seconds for _, outcome in outcomes)
    for stage, outcome in outcomes:
        if outcome.error:
            return Outcome(key, error=outcome.error, text=f"part {stage.name}: {outcome.text}", seconds=seconds)
    value = sum(stage.weight * outcome.value for stage, outcome in outcomes)
    if not math.isfinite(value):
        text = f"the sum of the weighted parts is {value}: must be finite"
        return Outcome(key, error="malformed", text=text, seconds=seconds)
    parts: dict[str, float] = {}
    for stage, outcome in outcomes:
        parts[stage.name] = outcome.value
        parts |= {f"{stage.name}/{inner}": number for inner, number in outcome.parts.items()}
    return Outcome(key, value, parts, seconds=seconds)


def setups(settings: Reward, base_dir: str, prompt_key: str, device: str) -> list[tuple[Setup, str, float]]:
    """The setup of each part's children, with name and weight; of a reward without parts, its own."""
    common: dict[str, Any] = {"base_dir": base_dir, "prompt_key": prompt_key, "device": device}
    if not settings.part:
        fields = {name: getattr(settings, name) for name in Setup.__struct_fields__ if hasattr(settings, name)}
        return [(Setup(maker=REWARD_KINDS[settings.kind].maker, **fields, **common), "", 1.0)]
    setups_of_parts = []
    for part in settings.part:
        fields, kind = dataclasses.asdict(part) | common, REWARD_KINDS[part.kind]
        name, weight = fields.pop("name"), fields.pop("weight")
        fields["memory_mb"] = 0 if kind.has_model else settings.memory_mb
        setups_of_parts.append((Setup(maker=kind.maker, place=f"reward.part {name!r}", **fields), name, weight))
    return setups_of_parts


class RewardPool:
    """The children of all parts. Make it in the main thread: the children die with the thread that made them.
    `counts`: outcomes by `error`."""

    def __init__(
        self, settings: Reward, *, base_dir: str | Path, ready_s: float = 120.0, prompt_key: str = "prompt",
        device: str = "auto",
    ) -> None:
        self.counts: Counter[str] = Counter()
        self.stages: list[Stage] = []
        self._poller = select.epoll()
        self._outcomes: list[Outcome] = []
        self._open: dict[int, dict[str, Outcome]] = {}  # by item without a total: the outcomes so far, by part
        try:
            for setup, name, weight in setups(settings, str(Path(base_dir).resolve()), prompt_key, device):
                self.stages.append(Stage(setup, name, weight))
                for _ in range(1 if REWARD_KINDS[setup.kind].one_child else settings.workers):
                    self.stages[-1].processes.append(JudgeProcess(setup, self._poller, ready_s, time.monotonic()))
        except BaseException:
            self.close()
            raise

    def __len__(self) -> int:
        return len(self._open)

    @property
    def processes(self) -> list[JudgeProcess]:
        return [process for stage in self.stages for process in stage.processes]

    def fileno(self) -> int:
        """Readable when `poll` may have something; poll now and then in any case, for children that are overdue."""
        return self._poller.fileno()

    def submit(self, items: Sequence[Item]) -> None:
        """Hand items to the children of every part. Never waits."""
        now = time.monotonic()
        self._open.update((item.key, {}) for item in items)
        for stage in self.stages:
            stage.submit(items, now)

    def poll(self, timeout_s: float = 0.0) -> list[Outcome]:
        """Outcomes since the last call; waits at most `timeout_s` for the first, and not at all without pending items.
        `RewardNotLoaded` if the function cannot be imported."""
        self._collect_until(lambda: bool(self._outcomes) or not len(self), timeout_s)
        outcomes, self._outcomes = self._outcomes, []
        return outcomes

    def wait_ready(self, timeout_s: float) -> bool:
        """Wait until every child has loaded the function; `RewardNotLoaded` if one cannot."""
        return self._collect_until(lambda: all(process.serving for process in self.processes), timeout_s)

    @property
    def restarts(self) -> int:
        return sum(process.restarts for process in self.processes)

    @property
    def busy_s(self) -> float:
        """Seconds in the function, per child, of the busiest part."""
        return max((stage.busy_s for stage in self.stages), default=0.0)

    def longest(self) -> tuple[str, float]:
        """The longest call under way, in words, and its seconds; "" and 0 where all children are idle."""
        waits = (
            ((f"part {stage.name}" if stage.name else "the function") if process.serving else "the start of a child",
             process.elapsed_s)
            for stage in self.stages for process in stage.processes if process.sent or not process.serving
        )
        return max(waits, key=lambda wait: wait[1], default=("", 0.0))

    def close(self) -> None:
        """End the children; items without an outcome are forgotten. A second call does nothing."""
        for process in self.processes:
            process.close()
        self.stages = []
        self._outcomes.clear()
        self._open.clear()
        self._poller.close()

    def __enter__(self) -> RewardPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _collect_until(self, done: Callable[[], bool], timeout_s: float) -> bool:
        """Sleep until a child answers or is overdue, and again until `done`. Of each sleep at most the intended time
        counts for deadlines."""
        now = self._collect(LATENESS_S)
        ends = now + timeout_s
        while not done() and now < ends:
            wait = min([ends - now, *(process.remaining_s() for process in self.processes)])
            self._poller.poll(wait)
            now = self._collect(wait)
        return done()

    def _collect(self, at_most_s: float) -> float:
        """Collect new outcomes; returns the clock value of that."""

        now = time.monotonic()
        for stage in self.stages:
            for process in stage.processes:
                for outcome in process.collect(now, at_most_s):
                    self._answered(stage, outcome)
        return now

    def _answered(self, stage: Stage, outcome: Outcome) -> None:
        by_part = self._open[outcome.key]
        by_part[stage.name] = outcome
        if len(by_part) == len(self.stages):
            del self._open[outcome.key]
            total = weighted_sum([(part, by_part[part.name]) for part in self.stages]) if stage.name else outcome
            self.counts[total.error] += 1
            self._outcomes.append(total)
