"""One child and the samples given to it: who is being judged, since when, and who is to blame when it dies.

Talks to its child (`process`). Time comes from the caller. Knows nothing of other lanes or of where samples come from.

- Every sample taken in comes out exactly once, as an outcome, whatever the child does.
- The sample at the head is the one the child is at: answers come in order, each before the next sample begins.
- Over the deadline: the head is `hung`, at once. The child died: the head is judged again, alone; if the child dies on
  it again the head is `raised`. All others are sent to the next child.
- A child that ends before it has judged anything, MAX_FAILURES times in a row, ends the pool with an error.
"""

from __future__ import annotations

import select
from collections import deque
from collections.abc import Sequence
from enum import Enum

from busrl.errors import RewardNotLoaded
from busrl.rewards.frames import READY, Answer, Request, Setup
from busrl.rewards.process import ChildProcess

MAX_FAILURES = 3


class Phase(Enum):
    """STARTING -> SERVING -> (died, killed) -> STARTING with a new child."""

    STARTING = "starting"
    SERVING = "serving"


class Lane:
    """`elapsed_s`: how long the child has been at the head of `sent`, or at starting, as far as we saw it."""

    def __init__(
        self, setup: Setup, poller: select.epoll, timeout_s: float, ready_s: float, pass_fds: Sequence[int], now: float
    ) -> None:
        self._setup, self._poller, self._pass_fds = setup, poller, pass_fds
        self.timeout_s, self.ready_s = timeout_s, ready_s
        self.waiting: deque[Request] = deque()
        self.sent: deque[Request] = deque()
        self._suspect: Request | None = None
        self._failures = 0
        self.restarts = 0
        self.phase = Phase.STARTING
        self.elapsed_s, self._seen = 0.0, now
        self._judged_s = 0.0  # spent in the function for samples that came out
        self._child = ChildProcess(setup, poller, pass_fds)

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
        """Seconds in the function: what answers say they took, and how long the child is at the present one, as far as
        that is seen. It may go back a little when that one is answered."""
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
        """End the child: at once if it is at something, else it may end by itself."""
        self._child.close(0.0 if self.sent or not self.serving else 0.5)

    def _restart(self) -> None:
        """Put everything unanswered back in front and begin with a new child."""
        self.waiting.extendleft(reversed(self.sent))
        self.sent.clear()
        self.phase, self.elapsed_s = Phase.STARTING, 0.0
        self.restarts += 1
        self._child = ChildProcess(self._setup, self._poller, self._pass_fds)

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
