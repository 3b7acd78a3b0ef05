"""Judging completions with the user's reward function in child processes: the pool, its children, the frames between.

    frame = length (u32, little endian) | msgpack
    parent -> child: first a Setup, then batches: arrays of Request
    child -> parent: one Answer when set up (seq 0), then one per request, in order, each written before the next begins

Talks to the operating system and to its children. Consumes items, produces outcomes. Knows nothing of slots, fates or
the bus.

- Every item that was submitted comes back exactly once: with a value, or as raised, hung or malformed.
- An item that raises, hangs or crashes its process costs no other item more than time.
- The deadline is per item and counted while this process looks: of a time during which it did not, LATENESS_S counts
  at most, so a stopped parent does not end a child.
- Nothing waits, except `poll` for as long as it is allowed and `close` for the end of a process that it has killed.
- The child leads its own session; killing takes its process group, and with it what user code has started. A child is
  killed only by its pool, and ends with it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import signal
import struct
import subprocess
import sys
import time
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Protocol

import msgspec

from busrl.errors import MachineError, RewardNotLoaded
from busrl.rewards.base import RewardSettings

# -- the frames -------------------------------------------

PREFIX = struct.Struct("<I")
READY = 0  # seq of the answer that says whether the function was loaded


class Setup(msgspec.Struct, frozen=True):
    """Which function a child shall run; the fields of [reward] and where files are looked for."""

    kind: str
    function: str
    extract: str
    answer_key: str
    base_dir: str


class Request(msgspec.Struct, array_like=True, gc=False):
    """One completion to judge."""

    seq: int
    record_line: bytes
    completion: str
    token_ids: list[int]


class Answer(msgspec.Struct, array_like=True, gc=False):
    """What became of a request. `error`: "" | raised | malformed | not_loaded (seq 0 only); `seconds` it took."""

    seq: int
    value: float
    parts: dict[str, float]
    error: str
    text: str
    seconds: float = 0.0


def frame(encoder: msgspec.msgpack.Encoder, message: Any) -> bytes:
    """The bytes of one frame."""
    body = encoder.encode(message)
    return PREFIX.pack(len(body)) + body


class Splitter:
    """Cuts a byte stream into the bodies of frames."""

    def __init__(self) -> None:
        self._rest = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """Bodies that are complete now."""
        self._rest += data
        bodies, at, size = [], 0, len(self._rest)
        while size - at >= PREFIX.size:
            end = at + PREFIX.size + PREFIX.unpack_from(self._rest, at)[0]
            if end > size:
                break
            bodies.append(bytes(self._rest[at + PREFIX.size : end]))
            at = end
        del self._rest[:at]
        return bodies


# -- the process ------------------------------------------


PIPE_BYTES = 1 << 20
READ_BYTES = 1 << 18
END_S = 5.0  # a killed process that does not go within this time is stuck in the kernel
_encoder = msgspec.msgpack.Encoder()
_answers = msgspec.msgpack.Decoder(Answer)


class ChildProcess:
    """States: running -> ended (its pipe is closed) -> closed."""

    def __init__(self, setup: Setup, poller: select.epoll) -> None:
        # From the main thread: the child is tied to the life of the thread that starts it.
        self._process = subprocess.Popen(
            [sys.executable, "-m", "busrl.rewards.child", str(os.getpid())],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0, start_new_session=True,
        )
        self._poller = poller
        self._in, self._out = _pipe(self._process.stdin), _pipe(self._process.stdout)
        self._pending = bytearray()
        self._splitter = Splitter()
        self._writing = False
        self.ended = False
        poller.register(self._out, select.EPOLLIN)
        self.send(setup)

    @property
    def pid(self) -> int:
        return self._process.pid

    def send(self, message: object) -> None:
        """Queue one frame and write what the pipe takes."""
        self._pending += frame(_encoder, message)
        self.flush()

    def flush(self) -> None:
        """Write what is queued; the poller wakes up when there is room for the rest."""
        try:
            while self._pending:
                del self._pending[: os.write(self._in, self._pending)]
        except BlockingIOError:
            pass
        except BrokenPipeError:
            self._pending.clear()  # it is dead; the end of its output says so too
        self._want_write(bool(self._pending))

    def read(self) -> list[Answer]:
        """Every answer that is complete; sets `ended` when the process has closed its end."""
        bodies: list[bytes] = []
        while not self.ended:
            try:
                data = os.read(self._out, READ_BYTES)
            except BlockingIOError:
                break
            if data:
                bodies += self._splitter.feed(data)
            else:
                self.ended = True
        return [_answers.decode(body) for body in bodies]

    def stop(self) -> None:
        """Let it end by itself after what it is doing: it sees the end of its input."""
        self._want_write(False)
        if self._in >= 0:
            os.close(self._in)
            self._in = -1

    def close(self, grace_s: float = 0.0) -> str:
        """End it and its children, and say how it ended. `grace_s`: time to end by itself first."""
        self.stop()
        if grace_s:
            with contextlib.suppress(OSError):
                _wait_unreaped(self._process.pid, grace_s)
        # Before it is reaped: its process id, and so its group's, belongs to no other process yet.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        try:
            status = self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            raise MachineError(f"reward child {self.pid} does not end {END_S:g} s after SIGKILL") from None
        if self._out >= 0:
            self._poller.unregister(self._out)
            os.close(self._out)
            self._out = -1
        return f"killed by {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"

    def _want_write(self, wanted: bool) -> None:
        if wanted != self._writing and self._in >= 0:
            self._writing = wanted
            if wanted:
                self._poller.register(self._in, select.EPOLLOUT)
            else:
                self._poller.unregister(self._in)


def _pipe(stream: IO[bytes] | None) -> int:
    """Our end of a pipe as a bare non-blocking descriptor, larger than the default."""
    assert stream is not None
    fd = os.dup(stream.fileno())
    stream.close()
    os.set_blocking(fd, False)
    with contextlib.suppress(OSError):  # a limit on pipe memory costs speed only
        fcntl.fcntl(fd, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
    return fd


def _wait_unreaped(pid: int, timeout_s: float) -> None:
    """Wait for the end of a process without collecting it."""
    fd = os.pidfd_open(pid)
    poller = select.poll()
    poller.register(fd, select.POLLIN)
    try:
        poller.poll(timeout_s * 1000)
    finally:
        os.close(fd)


# -- its samples ------------------------------------------


MAX_FAILURES = 3


class Phase(Enum):
    """STARTING -> SERVING -> (died, killed) -> STARTING with a new child."""

    STARTING = "starting"
    SERVING = "serving"


class Lane:
    """One child and the samples given to it. `elapsed_s`: how long the child has been judging the head of `sent`, or
    starting, as far as this process saw it.

    - Every sample comes out exactly once, as an outcome, whatever the child does.
    - The child judges the head of `sent`: answers come in order, each before the next sample begins.
    - Over the deadline: the head is `hung`, at once. The child died: the head is judged again, alone; if the child dies
      on it again the head is `raised`. All others are sent to the next child.
    - A child that ends before it has judged anything, MAX_FAILURES times in a row, ends the pool with an error.
    """

    def __init__(self, setup: Setup, poller: select.epoll, timeout_s: float, ready_s: float, now: float) -> None:
        self._setup, self._poller = setup, poller
        self.timeout_s, self.ready_s = timeout_s, ready_s
        self.waiting: deque[Request] = deque()
        self.sent: deque[Request] = deque()
        self._suspect: Request | None = None
        self._failures = 0
        self.restarts = 0
        self.phase = Phase.STARTING
        self.elapsed_s, self._seen = 0.0, now
        self._judged_s = 0.0  # spent in the function for samples that came out
        self._child = ChildProcess(setup, poller)

    def __len__(self) -> int:
        """Samples without an outcome."""
        return len(self.waiting) + len(self.sent)

    @property
    def pid(self) -> int:
        return self._child.pid

    @property
    def serving(self) -> bool:
        return self.phase is Phase.SERVING

    @property
    def busy_s(self) -> float:
        """Seconds in the function: those of the answers, and of the present sample as far as seen. It may decrease a
        little when that one is answered."""
        return self._judged_s + (self.elapsed_s if self.serving and self.sent else 0.0)

    def remaining_s(self) -> float:
        """Time until the child is overdue, inf while it has nothing to do."""
        if self.phase is Phase.STARTING:
            return max(0.0, self.ready_s - self.elapsed_s)
        return max(0.0, self.timeout_s - self.elapsed_s) if self.sent else float("inf")

    def submit(self, requests: Sequence[Request], now: float) -> None:
        self.waiting.extend(requests)
        self._send(now)

    def collect(self, now: float, at_most_s: float) -> list[Answer]:
        """Outcomes that have come up; at most `at_most_s` of the time since the last call counts. Never waits."""
        self._child.flush()
        answers = self._child.read()
        outcomes = self._settle(answers)
        self._judged_s += sum(answer.seconds for answer in answers)
        self.elapsed_s = 0.0 if answers else self.elapsed_s + min(now - self._seen, at_most_s)
        self._seen = now
        if self._child.ended:
            outcomes += self._died()
        elif self.remaining_s() <= 0:
            outcomes += self._overdue()
        self._send(now)
        return outcomes

    def close(self) -> None:
        """End the child: at once if it is judging, else it may end by itself."""
        self._child.close(0.0 if self.sent or not self.serving else 0.5)

    def _restart(self) -> None:
        """Put everything unanswered back in front and start a new child."""
        self.waiting.extendleft(reversed(self.sent))
        self.sent.clear()
        self.phase, self.elapsed_s = Phase.STARTING, 0.0
        self.restarts += 1
        self._child = ChildProcess(self._setup, self._poller)

    def _send(self, now: float) -> None:
        """Give the child all that waits; a suspect is alone with it."""
        if not self.serving or not self.waiting or (self._suspect and self.sent):
            return
        if not self.sent:
            self.elapsed_s, self._seen = 0.0, now
        count = 1 if self._suspect else len(self.waiting)
        batch = [self.waiting.popleft() for _ in range(count)]
        self.sent.extend(batch)
        self._child.send(batch)

    def _settle(self, answers: list[Answer]) -> list[Answer]:
        outcomes = []
        for answer in answers:
            if answer.seq == READY:
                self._ready(answer)
                continue
            if self.sent.popleft().seq != answer.seq:
                raise RuntimeError(f"reward child {self.pid} answered {answer.seq} out of order")
            self._suspect, self._failures = None, 0
            outcomes.append(answer)
        return outcomes

    def _ready(self, answer: Answer) -> None:
        if answer.error:
            raise RewardNotLoaded(answer.text)
        self.phase = Phase.SERVING

    def _died(self) -> list[Answer]:
        how = self._child.close()
        if not self.sent:
            self._failed(f"ended before it judged anything ({how})")
            self._restart()
            return []
        head = self.sent[0]
        if self._suspect is not head:
            self._suspect = head
            self._restart()
            return []
        return self._blame("raised", f"the reward process died on this sample twice ({how})")

    def _overdue(self) -> list[Answer]:
        self._child.close()
        if self.phase is Phase.STARTING:
            self._failed(f"was not ready after {self.ready_s:g} s; it was importing the reward function")
            self._restart()
            return []
        return self._blame("hung", f"no result after {self.timeout_s:g} s (reward.timeout_s)")

    def _blame(self, error: str, text: str) -> list[Answer]:
        head = self.sent.popleft()
        self._judged_s += self.elapsed_s
        self._suspect, self._failures = None, 0
        self._restart()
        return [Answer(head.seq, 0.0, {}, error, text)]

    def _failed(self, what: str) -> None:
        self._failures += 1
        if self._failures >= MAX_FAILURES:
            what_runs = self._setup.function or self._setup.kind
            raise RewardNotLoaded(
                f"reward {what_runs}: its process {what}, {self._failures} times in a row; see its log"
            )


# -- the pool ---------------------------------------------

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
