"""The process in which a reward function runs: `python -m busrl.rewards.child PARENT_PID`.

Talks to its parent over stdin and stdout only (frames of `busrl.rewards.pool`). What the user's code prints goes to
stderr. It may raise, hang, crash or call exit: the parent sees that and continues. Knows nothing of rings or groups.

- Items are judged in their order, and each answer is written before the next item begins: when the process dies, the
  first item without an answer is the one that it was judging.
- It dies with its parent, also in the middle of user code.

`python -m busrl.rewards.child trial` loads and tries a reward before a run: it reads one JSON line from stdin (the
settings, a record, the answers to try) and writes one line per event to stdout: loaded, then a result for each answer.
The parent (`busrl.config.trial`) has the deadlines and kills it.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import time
import traceback
from types import SimpleNamespace
from typing import Any, BinaryIO

import msgspec

from busrl.errors import cause
from busrl.rewards.base import MalformedReward, RewardFunction, build, settle
from busrl.rewards.pool import PREFIX, READY, Answer, Request, Setup, frame

PR_SET_PDEATHSIG = 1
TEXT_LIMIT = 2000
_encoder = msgspec.msgpack.Encoder()
_batches = msgspec.msgpack.Decoder(list[Request])


def main() -> int:
    if sys.argv[1] == "trial":
        return trial()
    die_with_parent(int(sys.argv[1]))
    requests, answers = private_pipes()
    first = read_frame(requests)
    if first is None:
        return 0
    setup = msgspec.msgpack.decode(first, type=Setup)
    try:
        function = build(setup, setup.base_dir)
    except BaseException as problem:
        text = str(problem) or type(problem).__name__
        write(answers, Answer(READY, 0.0, {}, "not_loaded", text))
        return 1
    write(answers, Answer(READY, 0.0, {}, "", ""))
    serve(function, requests, answers)
    return 0


def trial() -> int:
    """Load a reward and try it; exit code 1 if the function cannot be loaded."""
    requests, answers = private_pipes()
    asked: dict[str, Any] = json.loads(requests.readline())
    die_with_parent(asked["parent"])

    def report(event: dict[str, Any]) -> None:
        os.write(answers, json.dumps(event).encode() + b"\n")

    try:
        function = build(SimpleNamespace(**asked["reward"]))
    except BaseException as problem:
        report({"not_loaded": str(problem) or type(problem).__name__})
        return 1
    report({"not_loaded": ""})
    for number, (completion, token_ids) in enumerate(asked["answers"]):
        request = Request(seq=number, record_line=asked["record"].encode(), completion=completion, token_ids=token_ids)
        found = judge(function, request)
        report({"value": found.value, "parts": found.parts, "error": found.error, "text": found.text})
    return 0


def serve(function: RewardFunction, requests: BinaryIO, answers: int) -> None:
    """Judge batches until the parent closes the pipe."""
    while (body := read_frame(requests)) is not None:
        for request in _batches.decode(body):
            begun = time.monotonic()
            answer = judge(function, request)
            answer.seconds = time.monotonic() - begun
            write(answers, answer)


def judge(function: RewardFunction, request: Request) -> Answer:
    """The answer to one request; user code may raise anything, SystemExit included."""
    try:
        record: dict[str, Any] = msgspec.json.decode(request.record_line)
        value, parts = settle(function(record, request.completion, request.token_ids))
    except (MalformedReward, msgspec.DecodeError) as problem:
        return Answer(request.seq, 0.0, {}, "malformed", str(problem)[-TEXT_LIMIT:])
    except BaseException as problem:
        # The cause stands first: messages that show one line show that.
        trace = traceback.format_exc()[-TEXT_LIMIT:]
        return Answer(request.seq, 0.0, {}, "raised", f"{cause(problem)[:TEXT_LIMIT]}\n{trace}")
    return Answer(request.seq, value, parts, "", "")


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


def read_frame(stream: BinaryIO) -> bytes | None:
    """The next body, None when the parent has closed its end."""
    head = stream.read(PREFIX.size)
    if len(head) < PREFIX.size:
        return None
    size = PREFIX.unpack(head)[0]
    body = stream.read(size)
    return body if len(body) == size else None


def write(fd: int, answer: Answer) -> None:
    """One frame, complete; a parent that is gone ends this process."""
    data = memoryview(frame(_encoder, answer))
    try:
        while data:
            data = data[os.write(fd, data) :]
    except BrokenPipeError:
        os._exit(0)


if __name__ == "__main__":
    sys.exit(main())
