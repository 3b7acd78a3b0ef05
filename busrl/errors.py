"""Every exception of busrl, sorted by who has to act, the exit codes of processes, and any exception in one line.

`UserError` is for the person at the keyboard, `PeerLost` for another process, `MachineError` for the host (disk,
shared memory), `BugError` for us. The command line prints the first three as one message without a traceback.
Knows nothing of the rest of busrl.

- A message holds the value, the rule it broke, the remedy, and the place (file:line, key, process, slot).
- A class that a module raises is named here, so this page is the whole list.
"""

from __future__ import annotations

import math
import os
import re
import time
from collections.abc import Iterable
from dataclasses import dataclass
from traceback import walk_tb
from typing import Any, ClassVar


class BusrlError(Exception):
    """Base of all; `exit_code` is what the command line ends with."""

    exit_code: ClassVar[int] = 2


class Stopped(BusrlError):
    """The process was asked to stop before it was ready: no failure, and not reported as one."""


# -- yours to fix -----


class UserError(BusrlError):
    """Something that was asked for cannot be done as asked: a file, a key, a command line, a state of a run."""


@dataclass(frozen=True)
class Problem:
    """A finding: where, what is there, the rule that it breaks, and what to do about it."""

    place: str
    value: str
    rule: str
    remedy: str = ""

    def __str__(self) -> str:
        text = f"{self.place}: {self.value}: {self.rule}" if self.value else f"{self.place}: {self.rule}"
        return escaped(f"{text}; {self.remedy}" if self.remedy else text)


class TopologyError(UserError):
    """A topology that cannot be run; holds all of its problems, in the order of the file."""

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(str(problem) for problem in self.problems))


class DataError(UserError):
    """A prompt file that cannot be used; the message starts with file:line."""


class RewardNotLoaded(UserError):
    """A reward function that cannot be imported or called; the message holds the import path and the cause."""


class FunctionRefused(UserError):
    """A loss, an advantage estimator or a metric of the user's that cannot be imported, raises, or breaks its contract;
    the message holds the key, the import path, and the cause."""


class AgentNotLoaded(UserError):
    """The code of episodes cannot be imported or set up; the message holds the import path and the cause."""


class CallRefused(UserError):
    """A model call of an agent that gets no answer: its messages cannot be used, or a budget of its episode is used
    up. `code`: invalid, unsupported or context_length_exceeded, as clients know them, or ended: the
    episode is over; `param`: the field."""

    def __init__(self, code: str, text: str, param: str = "") -> None:
        self.code, self.param = code, param
        super().__init__(text)


class CannotTrain(UserError):
    """Nothing more may be trained in this run: an engine's log-probabilities are not those of a plain forward pass, no
    group that ends can be trained, or the fate table has no place for another sample."""


class ModelNotLoaded(UserError):
    """A model folder that cannot be loaded or trained; the message holds the path, the cause and the remedy."""


class RanksDiffer(UserError):
    """The ranks of the learner do not run the same thing; the message has both values."""


class WeightsRefused(UserError):
    """A published version that cannot be used here: torn, changed, for another model, or of another shape."""


class RunInUse(UserError):
    """Another living process holds the lock of this run directory or of its bus; the message names its pid."""


class RunFinished(UserError):
    """A run that reached its goal was started again: nothing is left to do, which is no failure."""

    exit_code = 0


class RunFailed(UserError):
    """A run that was waited for has failed, or its launch was killed; the message holds the directory and why."""

    exit_code = 1


class NoSuchRun(UserError):
    """A directory that is not a run directory, or one whose run has ended."""


class BadEndpoint(UserError):
    """A bus address that cannot be used, or that would be open to others."""


class InsecureDirectory(UserError):
    """A directory that must be private is not: whose it is or what others may do there, and how to mend it."""


class BadKeys(UserError):
    """CURVE keys that are missing, broken, or open to others; the message names the file and the remedy."""


# -- another process is gone -----


class PeerLost(BusrlError):
    """A process that something waited for is gone or silent; the message names it, its state, and for how long."""


class BusNotReady(PeerLost):
    """No round trip through the broker before the deadline; the message names the endpoint."""


class PeerTimeout(PeerLost):
    """A peer is there but did not do what was waited for before the deadline."""


class WeightsTimeout(PeerTimeout):
    """A weight version did not arrive, or a member of a weight group did not join, before the deadline."""


class WeightsOwnerLost(PeerLost):
    """The engine whose memory holds the weights is gone, and the memory with it; a restart maps its successor's."""


class RankLost(PeerLost):
    """A rank of the learner is gone, stopped or has failed; the message names it. The team starts again."""


class RankFailed(RankLost):
    """A rank of the learner reported why it ends; `uids` are the samples that it was computing."""

    def __init__(self, text: str, uids: Iterable[int] = ()) -> None:
        self.uids = tuple(uids)
        super().__init__(text)


class EngineLost(PeerLost):
    """An inference engine in another process died, or did not answer in time; pid, call and seconds are named."""


# -- the machine -----


class MachineError(BusrlError):
    """The host cannot give what the run needs; the message has how much was needed and how much there is."""


class DiskFull(MachineError):
    """No space for a file that must not be lost (fates, log, checkpoint)."""


class SharedMemoryFull(MachineError):
    """/dev/shm cannot hold the ring or the weights."""


class DeviceMissing(MachineError):
    """The device that was asked for cannot be used here; the message names it, the cause and the remedy."""


class FileCorrupt(MachineError):
    """A file of the run whose bytes do not match their own checksum; the message names file, offset and remedy."""


class WriteFailed(MachineError):
    """A write or sync that must not fail failed, and not for a full disk; what reached the file is unknown."""


# -- the ring -----


class RingError(BusrlError):
    """Base of what the ring raises; every subclass is in one of the families as well."""


class RingNotFound(RingError, UserError):
    """No ring of that name; the run has ended, or it runs on another host."""


class RingMismatch(RingError, UserError):
    """The file is no ring, or one of another layout version, boot, uuid or size; never adopted."""


class RingFull(RingError, MachineError):
    """No entry is left in the process table (`ring.processes`)."""


class SlotTooSmall(RingError, UserError):
    """A payload does not fit its slot; `needed` and `free` are bytes, the message names the key that changes it."""

    needed: int = 0
    free: int = 0


class RingExists(RingError, UserError):
    """The name of a new ring is taken; attach to adopt the run, or clean it."""


class ShmTooSmall(RingError, SharedMemoryFull):
    """The ring does not fit into /dev/shm; `needed` and `free` are bytes."""

    needed: int = 0
    free: int = 0


class NotOwner(RingError):
    """A write into a slot that the caller does not own (any more); the claim must be looked at again."""


class NoSuchTransition(RingError):
    """A step that the state machine does not have; the message names both states."""


class NoSuchTensor(RingError):
    """A slot has no tensor of that name and segment that the reader may see."""


class BadTensor(RingError):
    """A descriptor or payload of one slot contradicts itself; costs that sample (fate M), never the process."""


class NotRegistered(RingError):
    """A call that needs an entry in the process table, before `register`."""


class RingClosed(RingError):
    """A ring handle was used after it was closed, or in a forked child of the process that opened it."""


class RingReadOnly(RingError):
    """A write through a handle that was attached read-only."""


class CallUnanswered(RingError):
    """A model call that came to nothing. `code`: refused (by the engine, with its reason), malformed, poison (two
    engines died of it alone), late (no answer in time; the text says who had it), lost, or cancelled."""

    def __init__(self, code: str, text: str) -> None:
        self.code = code
        super().__init__(text)


class FateRefused(RingError):
    """No fate table is bound, or the sample's fate forbids the step."""


class LockTimeout(PeerTimeout):
    """A role lock stayed with another process until the deadline; the message names its pid."""


# -- our bugs -----


class BugError(BusrlError):
    """A rule of busrl's own was broken; please report it with the traceback and the run directory."""

    exit_code = 70


class LedgerError(BugError):
    """The ledger contradicts itself: a sample lost, or trained twice."""


class MessageTooLarge(BugError):
    """A message over the topology's limit was to be sent; the message names its topic and both sizes."""


class BusClosed(BugError):
    """A bus endpoint was used after it was closed, or in a child of the process that opened it."""


# -- exit codes -----

RETRY, NEEDS_FIX, RUN_FAILED, NO_SPACE = 1, 2, 3, 4
TEAM_ENDED = 5  # of a learner's rank on another host: its team has ended, for a reason that is elsewhere
NOT_IMPORTED = 6  # a module is missing or broken: the next start would import it no better
# A process of a run writes its exit code to the descriptor in this variable just before it ends. Any other code may
# come from user code or from a library, and is no verdict on the run.
VERDICT = "BUSRL_VERDICT"
SOCKET = "BUSRL_SOCKET"  # the descriptor of the socket at which a process listens in all its lives
LONGEST_VERDICT = 4000  # bytes of the code and the cause: a pipe takes them at once


def process_code(problem: BaseException) -> int:
    """The exit code of a process of a run.

    RETRY: another start may succeed. NEEDS_FIX: a person has to change something first, if the process never became
    ready. RUN_FAILED: nothing more may be trained in this run. NO_SPACE: a start succeeds once there is space again.
    """
    if isinstance(problem, ImportError):
        return NOT_IMPORTED
    if isinstance(problem, (CannotTrain, FileCorrupt)):  # damage does not mend itself, ready or not
        return RUN_FAILED
    if isinstance(problem, (DiskFull, SharedMemoryFull)):
        return NO_SPACE
    passing = (RunInUse, WeightsRefused)  # a predecessor that is about to end, a version that another one follows
    fixed = isinstance(problem, (UserError, DeviceMissing)) and not isinstance(problem, passing)
    return NEEDS_FIX if fixed else RETRY


# -- in one line -----

COMMANDS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def escaped(text: str) -> str:
    """Spell out the characters that a terminal would obey or cannot show: \\x1b for an escape. Lines and tabs stay."""
    return COMMANDS.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


TRACE = "Traceback (most recent call last):"
LIBRARIES = ("<", os.path.dirname(os.__file__), os.path.dirname(__file__))


def cause(problem: BaseException) -> str:
    """An exception in one line: the message of one of busrl's own, else its type and place, the innermost in the
    user's own code if there is one: `KeyError: 'answer' (judge.py:3, in score)`."""
    message = " ".join(str(problem).split())
    if isinstance(problem, BusrlError) and message:
        return message
    name = type(problem).__name__
    return (f"{name}: {message}" if message else name) + _place(problem)


def _place(problem: BaseException) -> str:
    places = [(frame.f_code.co_filename, line, frame.f_code.co_name) for frame, line in walk_tb(problem.__traceback__)]
    of_user = [place for place in places if not place[0].startswith(LIBRARIES) and "site-packages" not in place[0]]
    innermost = (of_user or places)[-1:]
    return "".join(f" ({file}:{line}, in {function})" for file, line, function in innermost)


def may_pass(status: int) -> bool:
    """Check whether the same HTTP request may succeed later: an error of the server, or one of the 4xx that say nothing
    about the request itself (time-out, conflict, too early, too many requests)."""
    return status >= 500 or status in (408, 409, 425, 429)


def retry_after_s(header: str) -> float:
    """Seconds that a reply's Retry-After asks for, as a number or as a date; 0 if it says nothing usable."""
    from email.utils import parsedate_to_datetime  # only here: every process loads this module

    try:
        seconds = float(header)
    except ValueError:
        try:
            seconds = parsedate_to_datetime(header).timestamp() - time.time()
        except ValueError:
            return 0.0
    return max(0.0, seconds) if math.isfinite(seconds) else 0.0


def first_line(text: str, width: int = 1000) -> str:
    """The first line of a text; where a traceback begins there, the line that names the exception instead."""
    head, mark, rest = text.strip().partition(TRACE)
    line = head.strip().split("\n", 1)[0]
    if mark and not head.strip().count("\n"):
        line = f"{line} {_raised(rest)}".strip()
    return line if len(line) <= width else line[: width - 1] + "…"


def _raised(traceback: str) -> str:
    """The line of a traceback that names the exception: the first at the margin, of the last of several chained."""
    lines = [line for line in traceback.rpartition(TRACE)[2].split("\n") if line.strip()]
    return next((line for line in lines if not line.startswith(" ")), lines[-1].strip() if lines else "(cut off)")


# -- output that may fail -----


class Unfailing:
    """A stream on which nothing depends: what cannot be written (a full disk, a closed end) is dropped; sets `lost`."""

    def __init__(self, stream: Any) -> None:
        self._stream, self.lost = stream, False

    def write(self, text: str) -> int:
        try:
            self._stream.write(text)
        except (OSError, ValueError):
            self.lost = True
        return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except (OSError, ValueError):
            self.lost = True

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
