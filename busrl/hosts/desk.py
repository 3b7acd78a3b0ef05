"""The rules for workers that do not map the ring: take a request, move the ledger, return the answers.

Pure: `Desk` decides, moves the ledger through a `RemoteLedger` (`hosts/ledgers.py` has it on a ring, tests in
memory), and gets the time with each call. Imports the protocol and NumPy; knows nothing of sockets, rings or files.

**The wire is the bus itself**: a remote worker needs it anyway (HELLO, HEARTBEAT, STOP, doorbells), broker and keeper
may be killed without a session to set up again, and the keys of the bus protect these messages too. PUB/SUB loses
messages: so every request may be sent again, and every answer is a function of the ledger, not of a conversation.

Invariants, held by `tests/hosts` under loss, doubling, reordering and death of the keeper:
- A claim has one name for ever: (slot, seq, uid). Only the worker that holds it can settle it, and only once. A copy
  that comes later is answered "already" (from the recent tasks, or from `last_commit_seq` by a later keeper), and
  nothing is done again.
- The ledger holds a worker's claims. `Desk` remembers only clocks and conveniences, so a keeper that is killed loses
  nothing: its successor finds entries and slots and grants every lease in full.
- Claims are idempotent without a memory of requests: a worker names its claims, and gets those that it did not name.
- Leases are renewed claim by claim: by name, or all of a worker's by a digest, which is equal only if the worker has
  each of these claims and no other. A digest that differs renews nothing; else the lease of a task that was lost on
  its way would never end.
- A lease that ends gives its slot back with one attempt counted; a result that comes after that is answered "late".
- A newer life of a name replaces the older one: the claims of the older life go back, and it is asked to exit.
- A life that names the ring of its claims joins no other: a new ring gives the same names of claims again.
- An answer for which there is no memory gets no reply: the claim stays, and the worker sends the answer again.
- An answer is checked (types, shapes, finite numbers, lengths) before anything of it is written. A refusal names the
  value, the rule and the place, and leaves the claim where it was.
"""

from __future__ import annotations

import hashlib
import math
import re
import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, NamedTuple, Protocol

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import UNSET

from busrl.data.routing import Routing, first_fault
from busrl.hosts import messages as g
from busrl.protocol import messages as m
from busrl.states import HOST_NAME, REWARD_FATES, Fate, Finish
from busrl.system.clocks import FairClock, Tally

Result = g.RemoteGenerated | g.RemoteRewarded | g.RemoteFail
FAST = 1  # level of zlib
CLOSE_TO_ZERO = 1e-4  # a log-probability may be this much above 0 from rounding
TICK_S = 0.5
FORGOTTEN_LEASES = 2.0  # a worker that is silent for so many leases and holds nothing is removed
MOST_HELD, RECENT = 4096, 8192
TASK_OVERHEAD = 512
DIGESTS = 1 << 64
HOST = "host"  # the role of another host of the run: it generates whole answers, and may judge them too
_GENERATING = {"prompt": Fate.UNRENDERED, "too_long": Fate.LONG, "malformed": Fate.MALFORMED, "poison": Fate.POISON}
FATES = {"rollout": _GENERATING, "reward": REWARD_FATES, HOST: _GENERATING | REWARD_FATES}
_TASK = re.compile(r"([0-9]{1,20})\.([0-9]{1,20})\.([0-9]{1,20})")


class Refused(Exception):
    """A request breaks a rule, or the ledger has no room. `code` goes into the answer; the text says what to change."""

    def __init__(self, text: str, code: str = "refused") -> None:
        super().__init__(text)
        self.code = code


class NoMemory(Exception):
    """The ledger has no memory for an answer now; nothing was committed, and the same request may succeed later."""


class ClaimGone(Exception):
    """The slot's word is no longer that of the claim. Only the keeper moves the slot, so this is not expected."""


# -- the ledger, as the desk needs it -----


class ClaimedTask(NamedTuple):
    """A claim: the slot, the word that owns it, and the two numbers that name it for ever."""

    slot: int
    word: int
    seq: int
    uid: int
    alone: bool = False

    @property
    def task(self) -> str:
        return f"{self.slot}.{self.seq}.{self.uid}"


class AnswerLimits(NamedTuple):
    """Limits of the answer to a claim: at most `tokens` tokens in segment number `segment`, ids below `vocabulary` (0:
    unknown), versions up to `newest`. `prompt_tokens`: the most that the prompt may have which comes with it; 0: it
    comes with none. `version` and `step` are those of the sample's admission. `routing`: of the routes that come with
    it; `prompt_rows`: so many of its prompt, None for none, OF_PROMPT: those of the prompt that comes with it."""

    tokens: int
    segment: int
    prompt_tokens: int
    vocabulary: int = 0
    newest: int = 0
    version: int = 0
    step: int = 0
    routing: Routing | None = None
    prompt_rows: int | None = None


class RemoteAnswer(NamedTuple):
    """A generated segment that was checked: arrays of one length, and text and end of the completion."""

    token_ids: npt.NDArray[np.int32]
    logprobs: npt.NDArray[np.float32]
    versions: npt.NDArray[np.uint32]
    prompt_ids: npt.NDArray[np.int32] | None
    text: str
    finish: int
    done: bool
    step: int = 0  # that made the oldest weights which drew it, by the worker's account
    episode: dict[str, g.Tensor] | None = None  # in place of the arrays; the ledger checks it
    routes: npt.NDArray[Any] | None = None
    prompt_routes: npt.NDArray[Any] | None = None


_NONE = np.zeros(0, np.int32)
_OF_EPISODE = RemoteAnswer(_NONE, _NONE.astype(np.float32), _NONE.astype(np.uint32), None, "", Finish.EOS, True)


class Judged(NamedTuple):
    """The reward of an answer that its host has judged too."""

    reward: float
    parts: dict[str, float]


class RemoteLedger(Protocol):
    """The ledger as the desk moves it for remote workers. `index` is that of a worker's REMOTE entry; each call that
    changes a slot is one compare-and-swap in the name of that entry. `Refused`: a rule forbids it, and nothing was
    committed. `NoMemory`: not now. `ClaimGone`: the slot has moved."""

    def members(self) -> list[tuple[int, str, str, int]]: ...  # index, role, name and life of all REMOTE entries
    def claims(self) -> list[tuple[int, ClaimedTask]]: ...  # all slots in a working state that such an entry owns
    def enter(self, role: str, name: str, life: int) -> int: ...  # the index of a new entry
    def leave(self, index: int) -> None: ...  # frees an entry that holds nothing
    def show(self, index: int, tasks: int) -> None: ...  # in the process table: it lives and holds so many tasks
    def take(self, index: int, role: str, limit: int, idle: bool) -> list[ClaimedTask]: ...  # a suspect if `idle`
    def tasks(self, index: int, claims: list[ClaimedTask]) -> list[g.Task | None]: ...  # None: unreadable, so dropped
    def limits(self, claims: list[ClaimedTask]) -> list[AnswerLimits]: ...
    def commit_answer(
        self, index: int, claim: ClaimedTask, answer: RemoteAnswer, limits: AnswerLimits, judged: Judged | None = None
    ) -> None: ...  # with `judged` the sample needs no other reward
    def commit_reward(self, index: int, claim: ClaimedTask, reward: float, parts: dict[str, float]) -> None: ...
    def give_back(self, index: int, claim: ClaimedTask) -> None: ...  # to rest, as if it had never been claimed
    def expire(self, index: int, claim: ClaimedTask) -> bool: ...  # to rest, an attempt counted; True: dropped
    def drop(self, index: int, claim: ClaimedTask, fate: Fate) -> None: ...
    def committed(self, slot: int, seq: int, uid: int) -> bool: ...  # whether the slot's last commit was of this claim


# -- what an answer must be -----

OF_PROMPT = -1


def checked_answer(message: g.RemoteGenerated, limits: AnswerLimits) -> RemoteAnswer:
    """The arrays of an answer; `Refused` if it breaks a rule."""
    tokens = _array(message.tokens, "tokens", np.int32, limits.tokens)
    logprobs = _array(message.logprobs, "logprobs", np.float32, limits.tokens)
    versions = _array(message.versions, "versions", np.uint32, limits.tokens)
    if not len(tokens) == len(logprobs) == len(versions):
        raise Refused(
            f"{len(tokens)} tokens, {len(logprobs)} logprobs, {len(versions)} versions: there must be as many of each"
        )
    _check_ids("tokens", tokens, limits.vocabulary)
    if not bool(np.isfinite(logprobs).all()):
        raise Refused("logprobs has a value that is not finite")
    if float(logprobs.max()) > CLOSE_TO_ZERO:
        raise Refused(f"logprobs has {float(logprobs.max()):g}: a log-probability is at most 0")
    if int(versions.max()) > limits.newest:
        raise Refused(f"versions has {int(versions.max())}: the newest version that was published is {limits.newest}")
    if message.finish not in (Finish.EOS, Finish.LENGTH):
        allowed = f"{Finish.EOS:d} (ended by itself) or {Finish.LENGTH:d} (cut by a limit)"
        raise Refused(f"finish = {message.finish}: it must be {allowed}")
    if message.finish == Finish.EOS and not message.done:
        text = "an answer that ended by itself has no further segment"
        raise Refused(f"finish = {Finish.EOS:d} and done = false: {text}")
    prompt_ids = None
    if limits.segment == 0 and limits.prompt_tokens > 0:
        if message.prompt_ids is None:
            raise Refused("prompt_ids is missing: the first segment brings the token ids of its prompt")
        prompt_ids = _array(message.prompt_ids, "prompt_ids", np.int32, limits.prompt_tokens)
        _check_ids("prompt_ids", prompt_ids, limits.vocabulary)
    return RemoteAnswer(tokens, logprobs, versions, prompt_ids, message.text, message.finish, message.done)


def with_routes(answer: RemoteAnswer, pieces: Mapping[str, g.Tensor], limits: AnswerLimits) -> RemoteAnswer:
    """The answer with its routes, of these tensors; `Refused` where one is missing, or breaks a rule."""
    if limits.routing is None or answer.episode is not None:
        return answer
    routes = _routes(pieces, "routes", len(answer.token_ids), limits.routing)
    if (rows := limits.prompt_rows) is None:
        return answer._replace(routes=routes)
    if rows == OF_PROMPT:
        rows = len(answer.prompt_ids) - 1 if answer.prompt_ids is not None else 0
    return answer._replace(routes=routes, prompt_routes=_routes(pieces, "prompt_routes", rows, limits.routing))


def _routes(pieces: Mapping[str, g.Tensor], name: str, rows: int, routing: Routing) -> npt.NDArray[Any]:
    if not rows:
        return np.zeros((0, *routing.shape), routing.dtype)
    if name not in pieces:
        raise Refused(f"{name} is missing: {g.ROUTES_RULE}")
    piece = unzipped(pieces[name], name, rows * routing.bytes_per_token)
    array = read_tensor(piece, name, routing.dtype, 3)
    if fault := first_fault(array, rows, routing):
        raise Refused(f"{name}: {fault}")
    return array


class BatchAnswers:
    """The answers of a REMOTE_BATCH. Rules are checked on whole columns; where a column breaks one, `checked_answer`
    finds the answer. `Refused`: the columns do not fit together."""

    def __init__(self, message: g.RemoteBatch) -> None:
        self._message, count = message, len(message.tasks)
        needed = (message.lengths, message.prompt_lengths, message.finishes, message.texts)
        optional = (message.rewards, message.parts, message.steps, message.episodes, message.routes or [])
        columns = [*needed, *(column for column in optional if column)]
        if any(len(column) != count for column in columns):
            lengths = [len(column) for column in columns]
            raise Refused(f"{count} tasks, and lists of {lengths}: there must be one item for each")
        if message.episodes and any((*message.lengths, *message.prompt_lengths)):
            raise Refused("lengths and prompt_lengths: an episode has tensors of its own, so all of them must be 0")
        self._steps, self._parts = message.steps or [0] * count, message.parts or [{}] * count
        self._pieces: list[dict[str, g.Tensor]] = message.routes or [{}] * count
        self._sampled, self._read = (_slices(lengths) for lengths in (message.lengths, message.prompt_lengths))
        sampled, read = sum(message.lengths), sum(message.prompt_lengths)
        self._tokens = _column(message.tokens, "tokens", np.int32, sampled)
        self._logprobs = _column(message.logprobs, "logprobs", np.float32, sampled)
        self._versions = _column(message.versions, "versions", np.uint32, sampled)
        self._prompts = _column(message.prompt_ids, "prompt_ids", np.int32, read)
        self._probable = bool((self._logprobs <= CLOSE_TO_ZERO).all() and np.isfinite(self._logprobs).all())
        self._lowest = min(int(ids.min(initial=0)) for ids in (self._tokens, self._prompts))
        self._highest = max(int(ids.max(initial=0)) for ids in (self._tokens, self._prompts))
        self._newest = int(self._versions.max(initial=0))

    def answer(self, at: int, limits: AnswerLimits) -> RemoteAnswer:
        """Answer number `at`; `Refused` if it breaks a rule. The ledger checks episodes."""
        return with_routes(self._answer(at, limits), self._pieces[at], limits)

    def _answer(self, at: int, limits: AnswerLimits) -> RemoteAnswer:
        message, step = self._message, self._steps[at]
        if message.episodes:
            return _OF_EPISODE._replace(text=message.texts[at], step=step, episode=message.episodes[at])
        sound = (
            self._probable and self._newest <= limits.newest and self._lowest >= 0
            and (self._highest < limits.vocabulary or not limits.vocabulary) and not limits.segment
            and 1 <= message.lengths[at] <= limits.tokens and 1 <= message.prompt_lengths[at] <= limits.prompt_tokens
            and message.finishes[at] in (Finish.EOS, Finish.LENGTH)
        )
        sampled, prompt = self._sampled[at], self._prompts[self._read[at]]
        arrays = (self._tokens[sampled], self._logprobs[sampled], self._versions[sampled])
        if sound:
            return RemoteAnswer(*arrays, prompt, message.texts[at], message.finishes[at], True, step)
        tokens, logprobs, versions = map(tensor, arrays)
        alone = g.RemoteGenerated(
            life=0, task=message.tasks[at], tokens=tokens, logprobs=logprobs, versions=versions,
            text=message.texts[at], prompt_ids=tensor(prompt), finish=message.finishes[at],
        )
        return checked_answer(alone, limits)._replace(step=step)

    def judged(self, at: int) -> Judged | None:
        """The reward of number `at`; None if this host has given none."""
        if not self._message.rewards:
            return None
        return Judged(finite(self._message.rewards[at], self._parts[at]), self._parts[at])


def _slices(lengths: list[int]) -> list[slice]:
    """The places of pieces of these lengths in a column."""
    return [slice(end - length, end) for length, end in zip(lengths, accumulate(lengths))]


def finite(reward: float, parts: dict[str, float]) -> float:
    """The reward; `Refused` unless it and all its parts are finite."""
    for name, value in {"reward": reward, **parts}.items():
        if not math.isfinite(value):
            raise Refused(f"{name} = {value}: a reward must be finite")
    return float(reward)


def tensor(array: npt.NDArray[Any]) -> g.Tensor:
    """The array as a message carries it."""
    return g.Tensor(array.dtype.name, list(array.shape), np.ascontiguousarray(array).tobytes())


def zipped(piece: g.Tensor) -> g.Tensor:
    """The tensor compressed, where that makes it smaller."""
    data = zlib.compress(piece.data, FAST)
    return g.Tensor(piece.dtype + g.ZIPPED, piece.shape, data) if len(data) < len(piece.data) else piece


def unzipped(piece: g.Tensor, what: str, most: int) -> g.Tensor:
    """The tensor as it was before `zipped`; `Refused` where it has more than `most` bytes, or cannot be read."""
    if not piece.dtype.endswith(g.ZIPPED):
        return piece
    stream = zlib.decompressobj()
    try:
        data = stream.decompress(piece.data, most + 1)
    except zlib.error as problem:
        raise Refused(f"{what} cannot be decompressed: {problem}") from None
    if len(data) > most or not stream.eof:
        fault = f"has more than {most} bytes" if len(data) > most else "is cut"
        raise Refused(f"{what} {fault}, decompressed")
    if stream.unused_data:
        raise Refused(f"{what} has {len(stream.unused_data)} bytes behind the end of what was compressed")
    return g.Tensor(piece.dtype.removesuffix(g.ZIPPED), piece.shape, data)


def _array(piece: g.Tensor, what: str, dtype: Any, most: int) -> npt.NDArray[Any]:
    array = read_tensor(piece, what, dtype)
    if not 1 <= len(array) <= most:
        raise Refused(f"{what} has {len(array)} elements: there must be 1 to {most}")
    return array


def _column(piece: g.Tensor, what: str, dtype: Any, total: int) -> npt.NDArray[Any]:
    array = read_tensor(piece, what, dtype)
    if len(array) != total:
        raise Refused(f"{what} has {len(array)} elements, and the lengths of the answers come to {total}")
    return array


def read_tensor(piece: g.Tensor, what: str, dtype: Any, dimensions: int = 1) -> npt.NDArray[Any]:
    """A copy of the array in a message; `Refused` if its type or shape is another."""
    wanted = np.dtype(dtype)
    if piece.dtype != wanted.name:
        raise Refused(f"{what} has dtype {piece.dtype!r}: it must be {wanted.name}")
    if len(piece.shape) != dimensions:
        rule = "one dimension" if dimensions == 1 else f"{dimensions} dimensions"
        raise Refused(f"{what} has shape {piece.shape}: it must have {rule}")
    if math.prod(piece.shape) * wanted.itemsize != len(piece.data) or (dimensions > 1 and not piece.data):
        raise Refused(f"{what} says shape {piece.shape} of {wanted.name}, and has {len(piece.data)} bytes")
    return np.frombuffer(piece.data, wanted.newbyteorder("<")).astype(wanted).reshape(piece.shape)


def _check_ids(what: str, ids: npt.NDArray[np.int32], vocabulary: int) -> None:
    if int(ids.min()) < 0 or (vocabulary and int(ids.max()) >= vocabulary):
        bound = f"0 to {vocabulary - 1}" if vocabulary else "0 or more"
        raise Refused(f"{what} has ids from {int(ids.min())} to {int(ids.max())}: an id is {bound}")


# -- workers and leases -----


def digest_of(task: str) -> int:
    """The share of a claim in the digest of a worker's claims (`RemoteClaim`)."""
    return int.from_bytes(hashlib.blake2b(task.encode(), digest_size=8).digest(), "little")


@dataclass(eq=False)
class Worker:
    """A worker that has joined: its REMOTE entry, the number of its start (`life`), and facts that only this keeper
    remembers."""

    index: int
    role: str
    name: str
    life: int
    seen: float = 0.0
    claim_req: int = 0  # the number of its newest REMOTE_CLAIM
    digest: int = 0  # of the names of its claims
    until: float = 0.0  # the end of the leases that its digest has renewed
    leases: dict[str, Lease] = field(default_factory=dict)  # by task, oldest first


@dataclass(eq=False)
class Lease:
    """A claim of a worker, until the clock says `until`. States: granted -> (settled | expired)."""

    worker: Worker
    claim: ClaimedTask
    named_until: float  # when it was granted, or named

    @property
    def until(self) -> float:
        """The end of the lease. A claim younger than the worker's last equal digest was granted later: for longer."""
        return max(self.named_until, self.worker.until)


class Leases:
    """The workers that have joined and the leases of their claims, by the ledger and a fair clock."""

    def __init__(self, ledger: RemoteLedger, lease_s: float, now: float) -> None:
        self.ledger, self.lease_s, self.clock = ledger, lease_s, FairClock(TICK_S, now)
        self.by_task: dict[str, Lease] = {}  # a slot has at most one
        self._first_end = 0.0  # no lease ends before this time: a look at each of 65,536 takes 20 ms
        entries = {entry[0]: Worker(*entry) for entry in ledger.members()}
        self.workers = {worker.name: worker for worker in entries.values()}
        for index, claim in ledger.claims():  # granted by an earlier keeper: every lease in full
            self.grant(entries[index], claim)

    def enter(self, role: str, name: str, life: int) -> Worker:
        """Add a worker of this name."""
        worker = self.workers[name] = Worker(self.ledger.enter(role, name, life), role, name, life)
        return worker

    def note(self, worker: Worker) -> None:
        """Note a sign of life of the worker."""
        worker.seen = self.clock.time
        self.ledger.show(worker.index, len(worker.leases))

    def remove(self, worker: Worker, end: Callable[[int, ClaimedTask], object]) -> None:
        """Remove a worker that is gone; `end` ends each of its claims in the ledger."""
        for lease in list(worker.leases.values()):
            self.release(lease)
            end(worker.index, lease.claim)
        self.ledger.leave(worker.index)
        del self.workers[worker.name]

    def remove_silent(self) -> None:
        for worker in list(self.workers.values()):
            if self.clock.time - worker.seen > FORGOTTEN_LEASES * self.lease_s and not worker.leases:
                self.remove(worker, self.ledger.give_back)

    def grant(self, worker: Worker, claim: ClaimedTask) -> Lease:
        lease = Lease(worker, claim, self.clock.time + self.lease_s)
        self.by_task[claim.task] = worker.leases[claim.task] = lease
        worker.digest = (worker.digest + digest_of(claim.task)) % DIGESTS
        return lease

    def renew(self, worker: Worker, tasks: Iterable[str]) -> list[str]:
        """Extend the leases of these tasks; returns the tasks that this worker does not hold."""
        for task in worker.leases.keys() & tasks:
            worker.leases[task].named_until = self.clock.time + self.lease_s
        return [task for task in tasks if task not in worker.leases]

    def renew_all(self, worker: Worker) -> None:
        worker.until = self.clock.time + self.lease_s

    def release(self, lease: Lease) -> None:
        task, worker = lease.claim.task, lease.worker
        del self.by_task[task], worker.leases[task]
        worker.digest = (worker.digest - digest_of(task)) % DIGESTS

    def over(self) -> list[Lease]:
        """The leases that are over. A lease that is granted or renewed later ends after all of these."""
        if self.clock.time < self._first_end:
            return []
        now, first, over = self.clock.time, self.clock.time + self.lease_s, []
        for lease in self.by_task.values():
            if (until := lease.until) <= now:
                over.append(lease)
            else:
                first = min(first, until)
        self._first_end = first
        return over

    def presence(self) -> dict[str, tuple[int, float, int]]:
        """By worker: its life, for how long it has been silent, and how many tasks it holds."""
        now = self.clock.time
        return {
            name: (worker.life, now - worker.seen, len(worker.leases)) for name, worker in self.workers.items()
        }


class Desk:
    """Answers the requests of workers: call `handle` for every request, `tick` at least once a second, `goodbye` at an
    orderly end.

    `welcome`: the fields that are the same for all workers; `biggest`: the most bytes of a task; `most_members`: the
    workers that may join, so that the run's own processes find entries in the process table; `reserved`: the names of
    these processes; `ring`: the id of the ring that claims are of. While `is_paused`, workers that generate get no new
    tasks.
    """

    def __init__(
        self, ledger: RemoteLedger, tally: Tally, now: float, *, welcome: g.GatewayWelcome, biggest: int,
        most_members: int, reserved: frozenset[str], ring: str = "", is_paused: Callable[[], bool] = lambda: False,
    ) -> None:
        self.ledger, self.tally, self.welcome, self.ring = ledger, tally, welcome, ring
        self.leases = Leases(ledger, welcome.lease_s, now)
        self.paused = ""  # why a part of the last request has no answer yet
        self.biggest, self.most_members, self.reserved = biggest, most_members, reserved
        self._is_paused = is_paused
        self.max_bytes = welcome.max_message_bytes
        self._recent: OrderedDict[str, str] = OrderedDict()  # settled task -> the worker that did it

    def handle(self, message: g.Remote, now: float) -> list[m.Message]:
        self.leases.clock.passed(now)
        self.paused = ""
        try:
            return self._handle(message)
        except NoMemory as problem:
            self._pause(message.sender, problem)
            return []
        except Refused as problem:
            self.tally.add(message.sender, problem.code, text=str(problem))
            return [_answer(message, problem.code, f"{message.sender}: {problem}", getattr(message, "task", ""))]

    def _handle(self, message: g.Remote) -> list[m.Message]:
        worker = self.leases.workers.get(message.sender)
        if worker is not None and message.life < worker.life:
            return [_answer(message, "replaced", "a newer life of this name has joined: exit, or take another name")]
        if isinstance(message, g.RemoteJoin):
            if message.ring and message.ring != self.ring:  # there other claims may have the same names
                return [_answer(message, "unknown", "the run has another ring than the one that your claims are of")]
            return [self._join(message, worker)]
        if worker is None or message.life > worker.life:
            # Not counted: every worker with a new keeper or a new name gets this answer.
            return [_answer(message, "unknown", "this keeper does not know you: send REMOTE_JOIN, then this again")]
        self.leases.note(worker)
        if isinstance(message, g.RemoteClaim):
            return self._claim(worker, message)
        if isinstance(message, g.RemoteExtend):
            return [_answer(message, "done", lost=self.leases.renew(worker, message.holding))]
        if isinstance(message, Result):
            code, text = self._settle(worker, message.task, lambda claim: self._commit(worker, claim, message))
            return [_answer(message, code, text, message.task)]
        if isinstance(message, g.RemoteBatch):
            return self._settle_all(worker, message)
        self.leases.remove(worker, self.ledger.give_back)
        return [_answer(message, "done")]

    def heartbeat(self, name: str, now: float) -> None:
        """Note a heartbeat: it keeps the worker's entry, not its leases."""
        self.leases.clock.passed(now)
        if name in self.leases.workers:
            self.leases.note(self.leases.workers[name])

    def unreadable(self, sender: str, code: str, about: str, detail: str) -> list[m.Message]:
        """The answer to bytes that were no message of this protocol; none where no sender could be read."""
        self.tally.add(sender, code, text=f"{about}: {detail}")
        return [g.GatewayAnswer(code=code, about=about[: m.MAX_NAME], text=detail)] if sender else []

    def tick(self, now: float) -> list[Lease]:
        """End the leases that are over and remove silent workers; returns the leases that ended."""
        self.leases.clock.passed(now)
        over = self.leases.over()
        for lease in over:
            self.leases.release(lease)
            dropped = self.ledger.expire(lease.worker.index, lease.claim)
            self.tally.add(lease.worker.name, "dropped" if dropped else "expired")
        self.leases.remove_silent()
        return over

    def reserve(self, names: frozenset[str]) -> None:
        """Let no worker join under these names, those of the run's processes."""
        self.reserved = names

    def goodbye(self) -> None:
        """An orderly end of the run: take every claim back."""
        for worker in list(self.leases.workers.values()):
            self.leases.remove(worker, self.ledger.give_back)

    # -- workers --------------------------------------------------------------------------------------------------

    def _join(self, message: g.RemoteJoin, worker: Worker | None) -> m.Message:
        self._check(message)
        if worker is not None and (message.life > worker.life or message.role != worker.role):
            self.leases.remove(worker, self.ledger.expire)  # its work ended with it, as in any death
            worker = None
        if worker is None:
            if len(self.leases.workers) >= self.most_members:
                entries = f"the process table has {self.most_members} entries for workers from outside"
                raise Refused(f"{entries}; raise ring.processes", "full")
            worker = self.leases.enter(message.role, message.sender, message.life)
            self.tally.add(worker.name, "joined")
        self.leases.note(worker)
        return msgspec.structs.replace(
            self.welcome, life=message.life, req=message.req, index=worker.index, max_capacity=MOST_HELD
        )

    def _check(self, message: g.RemoteJoin) -> None:
        name, biggest = message.sender, self.biggest
        if message.role not in FATES:
            raise Refused(f"role {message.role!r}: it must be rollout, reward or host")
        if self.welcome.routes is not UNSET and message.role == "rollout" and message.routes is not True:
            raise Refused(f"this run carries the routes of a mixture of experts: {g.ROUTES_RULE}")
        if not HOST_NAME.fullmatch(name):
            raise Refused(f"sender {name!r}: a worker's name has 1 to 39 letters, digits, dots, dashes or underscores")
        if name in self.reserved:
            raise Refused(f"{name!r} is a process of this run: choose another name")
        if biggest > self.max_bytes:
            rule = f"a task may have {biggest} bytes, a message {self.max_bytes}"
            raise Refused(f"{rule}: set bus.max_message_bytes to {biggest} or more", "too_large")

    # -- claims ---------------------------------------------------------------------------------------------------

    def _claim(self, worker: Worker, message: g.RemoteClaim) -> list[m.Message]:
        if message.req < worker.claim_req:
            return []  # a late copy: its capacity and its tasks are out of date
        worker.claim_req = message.req
        if message.digest not in (None, worker.digest):  # and so its capacity is not to be trusted either
            self.leases.note(worker)
            return [g.GatewayTasks(life=message.life, req=message.req, differs=True)]
        to_send = []
        if message.digest is None:
            self.leases.renew(worker, message.holding)
            holding = set(message.holding)
            to_send = [lease for task, lease in worker.leases.items() if task not in holding]
        else:
            self.leases.renew_all(worker)
        to_send += self._take(worker, message.capacity)
        self.leases.note(worker)
        return self._tasks(message, worker, to_send)

    def _take(self, worker: Worker, capacity: int) -> list[Lease]:
        """Make new claims until the worker holds `capacity`."""
        room = min(capacity, MOST_HELD) - len(worker.leases)
        paused = worker.role != "reward" and self._is_paused()
        if room <= 0 or paused or any(lease.claim.alone for lease in worker.leases.values()):
            return []
        claims = self.ledger.take(worker.index, worker.role, room, not worker.leases)
        if claims:
            self.tally.add(worker.name, "claimed", len(claims))
        return [self.leases.grant(worker, claim) for claim in claims]

    def _tasks(self, message: g.RemoteClaim | g.RemoteBatch, worker: Worker, leases: list[Lease]) -> list[m.Message]:
        """The tasks of these leases in as few messages as their size allows; at least one message."""
        packs: list[list[g.Task]] = [[]]
        size = 0
        for lease, task in zip(leases, self.ledger.tasks(worker.index, [lease.claim for lease in leases])):
            if task is None:
                self.leases.release(lease)
                continue
            weight = _weight(task)
            if packs[-1] and size + weight > self.max_bytes // 2:
                packs.append([])
                size = 0
            packs[-1].append(task)
            size += weight
        return [g.GatewayTasks(life=message.life, req=message.req, tasks=pack) for pack in packs]

    # -- results --------------------------------------------------------------------------------------------------

    def _settle_all(self, worker: Worker, message: g.RemoteBatch) -> list[m.Message]:
        """Settle each answer by itself; then give new tasks, if the message claims and no later claim has come."""
        if worker.role != HOST:
            raise Refused(f"{worker.name} is a {worker.role} worker: only hosts send batches")
        answers, settled = BatchAnswers(message), g.GatewaySettled(life=message.life, req=message.req)
        claims = [worker.leases[task].claim for task in message.tasks if task in worker.leases]
        limits = dict(zip(claims, self.ledger.limits(claims)))
        for at, task in enumerate(message.tasks):
            def commit(claim: ClaimedTask, at: int = at) -> str:
                answer, judged = answers.answer(at, limits[claim]), answers.judged(at)
                self.ledger.commit_answer(worker.index, claim, answer, limits[claim], judged)
                return "answered" if judged is None else "rewarded"

            try:
                code, _ = self._settle(worker, task, commit)
                (settled.late if code == "late" else settled.done).append(task)
            except NoMemory as problem:
                self._pause(worker.name, problem)
            except Refused as problem:
                self.tally.add(worker.name, problem.code, text=str(problem))
                settled.refused.append(g.Refusal(task, problem.code, str(problem)[: m.MAX_TEXT]))
        if not message.capacity or message.req < worker.claim_req:
            return [settled]
        worker.claim_req = message.req
        return [settled, *self._tasks(message, worker, self._take(worker, message.capacity))]

    def _settle(self, worker: Worker, task: str, commit: Callable[[ClaimedTask], str]) -> tuple[str, str]:
        """End a claim by its worker's result; returns code and text of the answer. `commit` moves the ledger and
        returns the word for the tally."""
        lease = self.leases.by_task.get(task)
        if lease is None:
            return self._settled_before(worker.name, task)
        if lease.worker is not worker:
            raise Refused(f"task {task} is held by {lease.worker.name}", "not_yours")
        try:
            event = commit(lease.claim)
        except ClaimGone:
            self.leases.release(lease)
            return "late", ""
        self.leases.release(lease)
        self._recent[task] = worker.name
        if len(self._recent) > RECENT:
            self._recent.popitem(last=False)
        self.tally.add(worker.name, event)
        return "done", ""

    def _pause(self, name: str, problem: NoMemory) -> None:
        self.paused = str(problem)
        self.tally.add(name, "paused", text=self.paused)

    def _commit(self, worker: Worker, claim: ClaimedTask, message: Result) -> str:
        """Move the ledger by a result; returns the word for the tally."""
        if isinstance(message, g.RemoteFail):
            return self._fail(worker, claim, message)
        if isinstance(message, g.RemoteGenerated):
            if worker.role == "reward":
                raise Refused(f"{worker.name} is a {worker.role} worker: it has no answers to give")
            [limits] = self.ledger.limits([claim])
            pieces = {}
            if isinstance(message, g.RemoteRouted):
                given = {"routes": message.routes, "prompt_routes": message.prompt_routes}
                pieces = {name: piece for name, piece in given.items() if piece is not None}
            answer = with_routes(checked_answer(message, limits), pieces, limits)
            self.ledger.commit_answer(worker.index, claim, answer, limits)
            return "answered"
        if worker.role != "reward":
            raise Refused(f"{worker.name} is a {worker.role} worker: it has no rewards to give")
        reward = finite(message.reward, message.parts)
        self.ledger.commit_reward(worker.index, claim, reward, message.parts)
        return "rewarded"

    def _fail(self, worker: Worker, claim: ClaimedTask, message: g.RemoteFail) -> str:
        if not message.drop:
            self.ledger.give_back(worker.index, claim)
            return "handed_back"
        fates = FATES[worker.role]
        if message.drop not in fates:
            raise Refused(f"drop = {message.drop!r}: a {worker.role} worker drops for {sorted(fates)}")
        self.ledger.drop(worker.index, claim, fates[message.drop])
        return "dropped"

    def _settled_before(self, name: str, task: str) -> tuple[str, str]:
        """Code and text of the answer to a result for a task that no worker holds."""
        worker, claim = self._recent.get(task), _TASK.fullmatch(task)
        if worker is not None and worker != name:
            raise Refused(f"task {task} was {worker}'s", "not_yours")
        if claim is None:
            raise Refused(f"task {task!r}: no claim has such a name (slot.seq.uid)")
        if worker is not None or self.ledger.committed(*map(int, claim.groups())):
            return "already", ""
        self.tally.add(name, "late")
        return "late", "this claim has ended: its lease was over, or it was handed back"


def _answer(message: g.Remote, code: str, text: str = "", task: str = "", lost: list[str] | None = None) -> m.Message:
    return g.GatewayAnswer(
        code=code, life=message.life, req=message.req, about=m.name_of(type(message)), task=task, text=text,
        lost=lost or [],
    )


def _weight(task: g.Task) -> int:
    """An upper bound of a task's bytes on the wire."""
    arrays = sum(len(tensor.data) + 64 for tensor in task.tensors.values())
    return len(task.record.encode()) + len(task.completion.encode()) + arrays + TASK_OVERHEAD
