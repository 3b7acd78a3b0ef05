"""The process in which a reward function runs: `python -m busrl.rewards.child PARENT_PID`.

Talks to its parent over stdin and stdout only (lines as `busrl.rewards.pool` describes them): the pool, or the trial
before a run (`busrl.config.trial`). What the user's code prints goes to stderr. It may raise, hang, crash or call exit:
the parent sees that and continues. Knows nothing of rings or groups.

- Items are judged in their order, and each outcome is written before the next item begins: when the process dies, the
  first item without one is the one that it was judging.
- It dies with its parent, also in the middle of user code.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
import traceback
from typing import Any, BinaryIO

import msgspec

from busrl.errors import cause
from busrl.rewards.base import MalformedReward, RewardFunction, Setup, build, settle
from busrl.rewards.pool import READY, Item, Outcome

PR_SET_PDEATHSIG = 1
TEXT_LIMIT = 2000
_batches = msgspec.json.Decoder(list[Item])


def main() -> int:
    die_with_parent(int(sys.argv[1]))
    requests, answers = private_pipes()
    if not (first := requests.readline()):
        return 0
    try:
        function = build(msgspec.json.decode(first, type=Setup))
    except BaseException as problem:
        write(answers, Outcome(READY, error="not_loaded", text=str(problem) or type(problem).__name__))
        return 1
    write(answers, Outcome(READY))
    for batch in requests:  # until the parent closes the pipe
        for item in _batches.decode(batch):
            begun = time.monotonic()
            outcome = judge(function, item)
            outcome.seconds = time.monotonic() - begun
            write(answers, outcome)
    return 0


def judge(function: RewardFunction, item: Item) -> Outcome:
    """What becomes of an item; user code may raise anything, SystemExit included."""
    try:
        record: dict[str, Any] = msgspec.json.decode(item.record_line)
        value, parts = settle(function(record, item.completion, item.token_ids))
    except (MalformedReward, msgspec.DecodeError) as problem:
        return Outcome(item.key, error="malformed", text=str(problem)[-TEXT_LIMIT:])
    except BaseException as problem:
        # The cause stands first: messages that show one line show that.
        trace = traceback.format_exc()[-TEXT_LIMIT:]
        return Outcome(item.key, error="raised", text=f"{cause(problem)[:TEXT_LIMIT]}\n{trace}")
    return Outcome(item.key, value, parts)


def private_pipes() -> tuple[BinaryIO, int]:
    """Move the two pipes away from descriptors 0 and 1, so that user code can neither read nor write them."""
    requests = os.fdopen(os.dup(0), "rb", buffering=1 << 16)
    answers = os.dup(1)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(2, 1)
    os.close(nothing)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115 - lives as long as the process
    sys.stdout = sys.stderr
    return requests, answers


def die_with_parent(parent: int) -> None:
    """Ask the kernel for SIGKILL when the parent's main thread ends; it may have ended already."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def write(fd: int, outcome: Outcome) -> None:
    """One line, complete; a parent that is gone ends this process."""
    data = memoryview(msgspec.json.encode(outcome) + b"\n")
    try:
        while data:
            data = data[os.write(fd, data) :]
    except BrokenPipeError:
        os._exit(0)


if __name__ == "__main__":
    sys.exit(main())
