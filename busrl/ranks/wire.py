"""The control stream between the ranks of a learner: its messages, and the samples that a micro-batch takes along.

One socket per follower (`meeting`), length-prefixed msgpack.

- A stream may be silent for hours; its end is the death of the rank. Every wait has a deadline, and names the rank that
  misses it.
- An answer carries the number of its message; the answer to a Save comes when the shard is on disk, between others.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
from msgspec import UNSET, UnsetType
from numpy.typing import NDArray

from busrl.errors import RankLost
from busrl.training.batch import Sample, Turns, Worth
from busrl.training.scorer import Advantages, Versions

# -- messages -----------------------------------------------------------------------


class ControlMessage(msgspec.Struct, kw_only=True, tag_field="op", tag=str.lower):
    """`seq` counts the messages of rank 0; an answer has the number of its message."""

    seq: int = 0


class RankHello(ControlMessage):
    """A follower's first message: its identity, and the facts that must be the same on all ranks."""

    rank: int
    pid: int
    facts: dict[str, str]
    host: str = ""  # empty: home


class Join(ControlMessage):
    """Rank 0's answer: the place where the process group is formed; or why this rank is `refused`. `address`: that of
    home, if there are ranks of other hosts; `root`: the run directory there."""

    world: int
    port: int
    prefix: str
    refused: str = ""
    address: str = ""
    root: str = ""


class Bring(ControlMessage):
    """For the first rank of another host: the next bytes of a file of home, by its name in the run directory. A message
    without a name is the last, and answered by Done."""

    name: str = ""
    data: bytes = b""
    begins: bool = False


class Build(ControlMessage):
    """Load the model of a folder and take a shard of it; answered by Done."""

    folder: str


class Restore(ControlMessage):
    """Take a shard of a checkpoint's optimiser state, and of its weights where they are in shards; answered by Done."""

    path: str
    optimizer: bool = True


class Adopt(ControlMessage):
    """Continue with the adapter of a folder; answered by Done."""

    folder: str


SentTurns = tuple[bytes, bytes, bytes]  # the fields of Turns
SentSample = tuple[int, int, int, int, bytes, bytes, bytes, float, float, int, int, SentTurns | None]


class Work(msgspec.Struct, array_like=True):
    """The samples of one rank in one round; a prompt stands once. Arrays are little-endian bytes."""

    prompts: list[bytes]
    samples: list[SentSample]
    advantages: list[float | list[float]]
    weights: list[float | list[float]] | None
    proximal: list[bytes] | None  # float32
    chosen: list[bytes] | None  # a byte per token
    valued: list[tuple[bytes, bytes, bytes]] | None  # float64, the fields of Valued
    version: int | None
    ages: dict[int, int]  # steps since each of the samples' versions was made


class SentRoutes(msgspec.Struct, array_like=True):
    """The routes of the samples of a work; the same ones of a prompt stand once."""

    dtype: str
    shape: tuple[int, int]  # of a row
    prompts: list[bytes]
    rows: list[tuple[int, bytes] | None]  # of each sample: the number of its prompt's (-1: none), and its own


class Worked(ControlMessage):
    work: Work
    routes: SentRoutes | UnsetType = UNSET  # where samples have some


class Micro(Worked):
    """Forward and backward of the work, or of nothing."""


class Expect(ControlMessage):
    """Ask teachers behind endpoints about the samples of the work, which come in micro-batches from now on."""

    work: Work


class Await(ControlMessage):
    """Wait for the answers about these samples, which come in the next micro-batch; Done when they are there, and Waits
    again and again until then."""

    uids: list[int]


class Waits(ControlMessage):
    """Sign of life of a rank that waits for a teacher."""


class Score(Worked):
    """Forward of the work, or of nothing, without gradient; answered by Scored. `by`: the trained model, the
    "reference", or the "value" head, which gives one number per token; or "every" token in the place of each."""

    by: str = ""


class Step(ControlMessage):
    """Norm, decision, update; answered by Done with the numbers of this rank. `tokens`: the number that it must have
    counted. The gradient is divided by `denominator` (0: by the tokens of all ranks) times `scale`."""

    lr: float
    tokens: int
    denominator: float = 0.0
    scale: float = 1.0


class Gather(ControlMessage):
    """Take part in gathering the "weight" or the part of the "adapter" of that name, or the optimiser's "state"."""

    what: str
    name: str = ""


class Save(ControlMessage):
    """Begin to write a shard of the state into that folder; answered by Saved when it is on disk."""

    path: str


class Leave(ControlMessage):
    """Leave."""


class Done(ControlMessage):
    stats: dict[str, Any] = {}  # RankStats
    digest: str = ""


class Scored(ControlMessage):
    logprobs: bytes  # float32, in flat order
    entropies: bytes


class Saved(ControlMessage):
    """Size and CRC-32 of a shard, or the problem; `full`: there was no space."""

    entry: list[int] = []
    problem: str = ""
    full: bool = False


class LastWords(ControlMessage):
    """A follower's last message: its error, and the samples that it was computing."""

    text: str
    uids: list[int] = []


ControlMessages = (
    RankHello | Join | Bring | Build | Restore | Adopt | Expect | Await | Micro | Score | Step | Gather | Save | Leave
    | Done | Waits | Scored | Saved | LastWords
)
_LENGTH = struct.Struct("<Q")
LONGEST = 1 << 34
PIECE = 1 << 20


class Stream:
    """A connection between rank 0 and one other. Raises RankLost with the name of the other side."""

    def __init__(self, connected: socket.socket, name: str) -> None:
        self.socket, self.name = connected, name
        self._encoder, self._decoder = msgspec.msgpack.Encoder(), msgspec.msgpack.Decoder(ControlMessages)
        self.saved: Saved | None = None  # the newest, which comes when it comes

    def send(self, message: ControlMessage, timeout_s: float) -> None:
        data = self._encoder.encode(message)
        self.socket.settimeout(timeout_s)
        try:
            self.socket.sendall(_LENGTH.pack(len(data)) + data)
        except TimeoutError:
            raise RankLost(f"{self.name} has read nothing for {timeout_s:g} s: it is stopped or stuck") from None
        except OSError as problem:
            raise RankLost(f"{self.name} is gone: {problem.strerror or problem}") from problem

    def receive(self, timeout_s: float) -> Any | None:
        """The next message but Saved; None if nothing began to arrive in time."""
        while isinstance(message := self._receive(timeout_s), Saved):
            self.saved = message
        return message

    def _receive(self, timeout_s: float) -> Any | None:
        self.socket.settimeout(timeout_s or 1e-6)
        try:
            head = self.socket.recv(_LENGTH.size)
        except (TimeoutError, BlockingIOError):
            return None
        except OSError as problem:
            raise RankLost(f"{self.name} is gone: {problem.strerror or problem}") from problem
        self.socket.settimeout(ARRIVES_S)
        head += self._exactly(_LENGTH.size - len(head)) if head else self._exactly(1)
        (length,) = _LENGTH.unpack(head)
        if length > LONGEST:
            raise RankLost(f"{self.name} sent {length} bytes as the length of a message: it is no rank of this busrl")
        try:
            return self._decoder.decode(self._exactly(length))
        except msgspec.DecodeError as problem:
            raise RankLost(f"{self.name} sent what is no message of this busrl: {problem}") from problem

    def _exactly(self, count: int) -> bytes:
        received = bytearray()
        while len(received) < count:
            try:
                piece = self.socket.recv(min(PIECE, count - len(received)))
            except OSError as problem:
                raise RankLost(f"{self.name} stopped in the middle of a message: {problem}") from problem
            if not piece:
                raise RankLost(f"{self.name} has ended")
            received += piece
        return bytes(received)

    @property
    def end(self) -> str:
        """Text that says how the other side has ended, where that shows; nothing is read."""
        self.socket.setblocking(False)
        try:
            return "" if self.socket.recv(1, socket.MSG_PEEK) else f"{self.name} has ended"
        except BlockingIOError:
            return ""
        except OSError as problem:
            return f"{self.name} is gone: {problem.strerror or problem}"

    def close(self) -> None:
        self.socket.close()


LOOK_S = 0.1  # for rank 0, or for a rank that is still to come
ARRIVES_S = 60.0  # the rest of a message that has begun
LAST_WORDS_S = 3.0  # that followers have for last words after a collective failed

# -- the work of a micro-batch ----------------------------------------------------------

NOTHING_GIVEN = Advantages(())
NO_WORK = Work([], [], [], None, None, None, None, None, {})


def work_of(
    ages_of: Callable[[Versions], NDArray[np.int64]], samples: Sequence[Sample], advantages: Advantages = NOTHING_GIVEN,
    version: int | None = None,
) -> Work:
    """Work from which a follower computes these samples as rank 0 would. `ages_of`: as in the trainer's hooks."""
    prompts: dict[bytes, int] = {}
    rows = [
        (s.uid, s.group, s.member, prompts.setdefault(s.prompt_ids.tobytes(), len(prompts)), s.token_ids.tobytes(),
         s.behaviour_logprobs.tobytes(), s.policy_versions.tobytes(), s.reward, s.temperature, s.finish, s.context,
         None if s.turns is None else (s.turns.seqs.tobytes(), s.turns.rows.tobytes(), s.turns.skipped.tobytes()))
        for s in samples
    ]
    versions = np.unique(np.concatenate([s.policy_versions for s in samples])) if samples else np.zeros(0, np.uint32)
    ages = dict(zip(versions.tolist(), ages_of(versions).tolist(), strict=True))
    worth, weights = (None if rows is None else [_plain(row) for row in rows]
                      for rows in (advantages.per_sample, advantages.weights))
    before, chosen = (
        None if values is None else [row.tobytes() for row in values]
        for values in (advantages.proximal, advantages.chosen)
    )
    valued = None if advantages.valued is None else [
        (valued.advantages.tobytes(), valued.returns.tobytes(), valued.values.tobytes()) for valued in advantages.valued
    ]
    return Work(list(prompts), rows, worth or [], weights, before, chosen, valued, version, ages)


def routes_of(samples: Sequence[Sample]) -> SentRoutes | UnsetType:
    """Routes that go with the work of these samples."""
    routed = [sample.routes for sample in samples if sample.routes is not None]
    if not routed:
        return UNSET
    prompts: dict[bytes, int] = {}
    rows = [
        None if sample.routes is None else (
            -1 if sample.prompt_routes is None else prompts.setdefault(sample.prompt_routes.tobytes(), len(prompts)),
            sample.routes.tobytes())
        for sample in samples
    ]
    return SentRoutes(routed[0].dtype.str, (routed[0].shape[1], routed[0].shape[2]), list(prompts), rows)


def samples_of(work: Work, routes: SentRoutes | UnsetType = UNSET) -> list[Sample]:
    """The samples that went into it."""
    samples = _samples_of(work)
    if isinstance(routes, UnsetType):
        return samples

    def rows(data: bytes) -> NDArray[Any]:
        return np.frombuffer(data, routes.dtype).reshape(-1, *routes.shape)

    prompts = [rows(data) for data in routes.prompts]
    return [
        sample if sent is None else
        replace(sample, routes=rows(sent[1]), prompt_routes=None if sent[0] < 0 else prompts[sent[0]])
        for sample, sent in zip(samples, routes.rows, strict=True)
    ]


def _samples_of(work: Work) -> list[Sample]:
    prompts = [np.frombuffer(prompt, np.int32) for prompt in work.prompts]
    return [
        Sample(
            uid, group, member, prompts[prompt], np.frombuffer(tokens, np.int32), np.frombuffer(logprobs, np.float32),
            np.frombuffer(versions, np.uint32), reward, temperature, finish, context, _turns(turns),
        )
        for (uid, group, member, prompt, tokens, logprobs, versions, reward, temperature, finish, context,
             turns) in work.samples
    ]


def _turns(sent: SentTurns | None) -> Turns | None:
    if sent is None:
        return None
    seqs, rows, skipped = sent
    return Turns(np.frombuffer(seqs, np.int64), np.frombuffer(rows, np.int64).reshape(-1, 3),
                 np.frombuffer(skipped, np.bool_))


def _plain(worth: Worth) -> float | list[float]:
    return worth if isinstance(worth, (int, float)) else [float(value) for value in worth]
