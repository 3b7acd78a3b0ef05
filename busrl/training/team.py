"""The ranks of a learner: rank 0 plans and tells, the others hold a shard and do as they are told.

`Leader` is a trainer whose calls run on all ranks; `Follower` is a rank other than 0. Talks over one Unix socket per
follower (length-prefixed msgpack) and, inside of the trainer, over the process group of `sharding`. Knows nothing of
rings, logs or groups; of a topology, the settings of a team.

- Whoever runs a forward, a backward or an update runs it on all ranks: a round is one micro-batch on every rank, an
  empty one where there is no work. A sample is never cut over ranks.
- A stream may be silent for hours; its end is the death of the rank. What is waited for has a deadline, and the rank
  that missed it is named.
- The first failure ends the team: nothing is repaired inside a living process.
- Before a step every rank proves that it counted the tokens that rank 0 planned for it: a wrong mean would be silent.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
import socket
import struct
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from busrl.algorithms.values import Valued
from busrl.errors import DiskFull, RankFailed, RankLost, RanksDiffer, WriteFailed, cause
from busrl.training import sharding
from busrl.training.batch import Round, Sample, rounds_of
from busrl.training.checkpoint import Checkpoint
from busrl.training.loading import Parts
from busrl.training.model import Adapter, LoraSettings
from busrl.training.resume import TeamSaving
from busrl.training.shards import Saving
from busrl.training.trainer import (
    Floats,
    Given,
    Share,
    StepStats,
    Trainer,
    TrainerSettings,
    stats_of,
)

# -- rounds ------------------------------------------------------------------------


def _quadratic(model: Any) -> float:
    """Layers x width / (3 x parameters): what attention adds to the cost of a token."""
    layers, width = (getattr(model.config, name, 0) or 0 for name in ("num_hidden_layers", "hidden_size"))
    count: int = sum(parameter.numel() for parameter in model.parameters())
    return float(layers * width) / (3 * max(1, count))


# -- messages -----------------------------------------------------------------------


class Message(msgspec.Struct, kw_only=True, tag_field="op", tag=str.lower):
    """`seq` counts what rank 0 said; an answer has that of its question."""

    seq: int = 0


class Hello(Message):
    """A follower's first words: who it is, and what has to be the same on all ranks."""

    rank: int
    pid: int
    facts: dict[str, str]


class Join(Message):
    """Rank 0's answer: where the process group is formed; or why this rank cannot be one."""

    world: int
    port: int
    prefix: str
    refused: str = ""


class Build(Message):
    """Load the model of a folder and take a shard of it; answered by Done."""

    folder: str


class Restore(Message):
    """Take a shard of a checkpoint's optimiser state, and of its weights where they are in shards; answered by Done."""

    path: str
    optimizer: bool = True


class Adopt(Message):
    """Continue with the adapter of a folder; answered by Done."""

    folder: str


class Work(msgspec.Struct, array_like=True):
    """The samples of one rank in one round; a prompt stands once. Arrays are little-endian bytes."""

    prompts: list[bytes]
    samples: list[tuple[int, int, int, int, bytes, bytes, bytes, float, float, int, int]]
    advantages: list[float]
    weights: list[float] | None
    proximal: list[bytes] | None  # float32
    chosen: list[bytes] | None  # a byte per token
    version: int | None
    ages: dict[int, int]  # steps since each of the samples' versions was made
    skip_mastered: bool


class Micro(Message):
    """Forward and backward of the work, or of nothing."""

    work: Work


class Score(Message):
    """Forward of the work, or of nothing, without gradient, by the reference if it says so; answered by Scored."""

    work: Work
    refer: bool = False


class Step(Message):
    """Norm, decision, update; answered by Done with what this rank did. `tokens` is what it has to have counted, the
    gradient is divided by `denominator` (0: by the tokens of all ranks) times `scale`."""

    lr: float
    tokens: int
    denominator: float = 0.0
    scale: float = 1.0


class Gather(Message):
    """Take part in gathering the weight `name` (in the number type that is published), that of the "adapter", or
    "state" (optimiser)."""

    what: str
    name: str = ""


class Save(Message):
    """Begin to write a shard of the state into that folder; answered by Saved as soon as it is on disk, whatever is
    said and answered meanwhile."""

    path: str


class Stop(Message):
    """Leave."""


class Done(Message):
    share: dict[str, Any] = {}
    digest: str = ""


class Scored(Message):
    logprobs: bytes  # float32, in flat order
    entropies: bytes


class Saved(Message):
    """Size and CRC-32 of a shard, or what went wrong; `full`: for want of space."""

    entry: list[int] = []
    problem: str = ""
    full: bool = False


class Failed(Message):
    """The follower's last words, and the samples that it was computing."""

    text: str
    uids: list[int] = []


Words = (
    Hello | Join | Build | Restore | Adopt | Micro | Score | Step | Gather | Save | Stop | Done | Scored | Saved
    | Failed
)
_LENGTH = struct.Struct("<Q")
LONGEST = 1 << 34
PIECE = 1 << 20


class Stream:
    """A connection between rank 0 and one other. Raises RankLost with the name of the other side."""

    def __init__(self, connected: socket.socket, name: str) -> None:
        self.socket, self.name = connected, name
        self._encoder, self._decoder = msgspec.msgpack.Encoder(), msgspec.msgpack.Decoder(Words)
        self.saved: Saved | None = None  # the newest, which comes when it comes

    def send(self, message: Message, timeout_s: float) -> None:
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
        while isinstance(found := self._receive(timeout_s), Saved):
            self.saved = found
        return found

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
        found = bytearray()
        while len(found) < count:
            try:
                piece = self.socket.recv(min(PIECE, count - len(found)))
            except OSError as problem:
                raise RankLost(f"{self.name} stopped in the middle of a message: {problem}") from problem
            if not piece:
                raise RankLost(f"{self.name} has ended")
            found += piece
        return bytes(found)

    def close(self) -> None:
        self.socket.close()


LOOK_S = 0.1  # for rank 0, or for a rank that is still to come
ARRIVES_S = 60.0  # the rest of a message that has begun
LAST_WORDS_S = 3.0  # that followers have to say why after a collective failed
TRANSPORTS = ("gloo", "nccl", "hccl")  # one of them stands in an error that another rank is the cause of


def _of_a_peer(problem: RuntimeError) -> bool:
    """Whether a collective failed because of another rank, not this one's own computation."""
    text = str(problem).lower()
    distributed: Any = torch.distributed
    return isinstance(problem, distributed.DistError) or any(name in text for name in TRANSPORTS)


NOTHING_GIVEN = Given(())
NO_WORK = Work([], [], [], None, None, None, None, {}, False)


def work_of(
    trainer: Trainer, samples: Sequence[Sample], given: Given = NOTHING_GIVEN, version: int | None = None
) -> Work:
    """What a follower needs to compute these samples as this trainer would."""
    prompts: dict[bytes, int] = {}
    rows = [
        (s.uid, s.group, s.member, prompts.setdefault(s.prompt_ids.tobytes(), len(prompts)), s.token_ids.tobytes(),
         s.behaviour_logprobs.tobytes(), s.policy_versions.tobytes(), s.reward, s.temperature, s.finish, s.context)
        for s in samples
    ]
    versions = np.unique(np.concatenate([s.policy_versions for s in samples])) if samples else np.zeros(0, np.uint32)
    ages = dict(zip(versions.tolist(), trainer.ages_of(versions).tolist(), strict=True))
    weights = None if given.weights is None else list(given.weights)
    before, chosen = (
        None if values is None else [row.tobytes() for row in values] for values in (given.proximal, given.chosen)
    )
    return Work(
        list(prompts), rows, list(given.advantages), weights, before, chosen, version, ages, trainer.skip_mastered
    )


def samples_of(work: Work) -> list[Sample]:
    """The samples that went into it."""
    prompts = [np.frombuffer(prompt, np.int32) for prompt in work.prompts]
    return [
        Sample(
            uid, group, member, prompts[prompt], np.frombuffer(tokens, np.int32), np.frombuffer(logprobs, np.float32),
            np.frombuffer(versions, np.uint32), reward, temperature, finish, context,
        )
        for uid, group, member, prompt, tokens, logprobs, versions, reward, temperature, finish, context in work.samples
    ]


# -- a trainer on each rank -------------------------------------------------------------


@dataclass(frozen=True)
class TeamSettings:
    """`ranks` ranks that meet at the socket `file`. `facts`: what has to be the same on all of them."""

    ranks: int
    file: Path
    facts: Mapping[str, str]
    device: torch.device
    reshard: bool = True
    start_s: float = 300.0
    collective_s: float = 120.0
    lora: LoraSettings | None = None
    refers: bool = False  # to a reference, for a KL term
    reference: Path | None = None  # its folder; None: the model as the run began with it

    @classmethod
    def of(cls, topology: Any, file: Path, device: torch.device) -> TeamSettings:
        """From a topology's [[process]] and [learner.parallel]."""
        own = topology.learner.parallel
        return cls(
            topology.ranks, file, facts(topology.to_json()), device, own.reshard, topology.limits.ready_s,
            own.collective_timeout_s, LoraSettings.of(topology), topology.learner.kl != "none",
            Path(topology.model.reference) if topology.model.reference else None,
        )


def facts(topology: str) -> dict[str, str]:
    """What has to be the same on all ranks, besides the model."""
    import transformers

    import busrl

    return {
        "topology": hashlib.sha256(topology.encode()).hexdigest()[:16], "busrl": busrl.__version__,
        "torch": str(torch.__version__), "transformers": transformers.__version__,
    }


def digest(trainer: Trainer) -> str:
    """Of names, shapes and number types of the parameters, and of how they compute."""
    named = [f"{name} {tuple(one.shape)} {one.dtype}" for name, one in trainer.model.named_parameters()]
    text = "\n".join([trainer.forward.name, *named])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


# -- rank 0 -----------------------------------------------------------------------------


@dataclass
class Team:
    """The followers of rank 0, and its process group with them."""

    settings: TeamSettings
    followers: list[Stream] = field(default_factory=list)  # of rank 1, 2, ...
    mesh: Any = None
    seq: int = 0
    store: Any = None
    parts: Parts | None = None

    @classmethod
    def gathered(cls, settings: TeamSettings, waits: Callable[[], object] = lambda: None) -> Team:
        """Wait for all ranks, form the group. RankLost names who did not come, RanksDiffer what differs. `waits` is
        called while they are waited for, and ends that if it is true."""
        team = cls(settings)
        deadline, streams = time.monotonic() + settings.start_s, dict[int, Stream]()
        with _listening(settings.file) as server:
            while len(streams) < settings.ranks - 1:
                if waits():
                    raise RankLost("asked to stop while the ranks were waited for")
                if time.monotonic() > deadline:
                    missing = sorted(set(range(1, settings.ranks)) - streams.keys())
                    raise RankLost(f"rank {', '.join(map(str, missing))} did not come within {settings.start_s:g} s")
                with contextlib.suppress(TimeoutError):
                    connected, _ = server.accept()
                    team._welcome(Stream(connected, "a rank that connects"), streams)
        team.followers = [streams[rank] for rank in sorted(streams)]
        team._join()
        return team

    def _welcome(self, stream: Stream, streams: dict[int, Stream]) -> None:
        hello = None
        with contextlib.suppress(RankLost):  # whoever it was is gone; the rank that is missing is waited for
            hello = stream.receive(ARRIVES_S)
        if not isinstance(hello, Hello) or not 0 < hello.rank < self.settings.ranks or hello.rank in streams:
            stream.close()
            return
        stream.name = f"rank {hello.rank} (pid {hello.pid})"
        for name, own in self.settings.facts.items():
            theirs = hello.facts.get(name, "")
            if theirs != own:
                refused = f"{name} is {theirs} on rank {hello.rank} and {own} on rank 0: all ranks need the same"
                stream.send(Join(world=0, port=0, prefix="", refused=refused), ARRIVES_S)
                raise RanksDiffer(refused)
        streams[hello.rank] = stream

    def _join(self) -> None:
        ranks, limit = self.settings.ranks, self.settings.collective_s
        self.store, prefix = sharding.open_store(ranks, limit), secrets.token_hex(8)
        self.tell([Join(world=ranks, port=self.store.port, prefix=prefix) for _ in self.followers])
        with self.together("join"):
            self.mesh = sharding.join(self.store, prefix, 0, ranks, self.settings.device, limit)

    def tell(self, messages: Sequence[Message]) -> None:
        """To each follower its own."""
        self.seq += 1
        for stream, message in zip(self.followers, messages, strict=True):
            message.seq = self.seq
            stream.send(message, self.settings.collective_s)

    def answers(self, limit_s: float = 0.0) -> list[Any]:
        """One of each follower to what was told last."""
        return [self._answer(stream, limit_s or self.settings.collective_s) for stream in self.followers]

    def _answer(self, stream: Stream, limit_s: float) -> Any:
        found = stream.receive(limit_s)
        if found is None:
            raise RankLost(f"{stream.name} did not answer within {limit_s:g} s: stopped or stuck")
        if isinstance(found, Failed):
            raise RankFailed(f"{stream.name} failed: {found.text}", found.uids)
        if found.seq != self.seq:
            raise RankLost(f"{stream.name} answered {found.seq} when {self.seq} was asked")
        return found

    @contextlib.contextmanager
    def together(self, what: str, own: Sequence[Sample] = ()) -> Iterator[None]:
        """A collective. If it fails, the rank that is the cause is named: it said why, has ended, or is silent; or it
        is this one, with its `own` samples."""
        begun = time.monotonic()
        try:
            yield
        except RuntimeError as problem:
            took, words, uids = time.monotonic() - begun, list[str](), list[int]()
            if not _of_a_peer(problem):
                raise RankFailed(f"{what}: rank 0 failed: {cause(problem)}", [one.uid for one in own]) from problem
            for text, samples in self._last_words():
                words.append(text)
                uids += samples
            text = f"{what} failed after {took:.1f} s: {'; '.join([*words, cause(problem)])}"
            raise (RankFailed(text, uids) if uids else RankLost(text)) from problem

    def _last_words(self) -> Iterator[tuple[str, list[int]]]:
        """What each follower said, and its samples if it has failed."""
        deadline = time.monotonic() + LAST_WORDS_S
        for stream in self.followers:
            try:
                words = stream.receive(max(0.01, deadline - time.monotonic()))
            except RankLost as lost:
                yield str(lost), []
                continue
            if isinstance(words, Failed):
                yield f"{stream.name} failed: {words.text}", words.uids
            else:
                yield f"{stream.name} says nothing: it is stopped or stuck", []

    def close(self) -> None:
        """Dismiss the others, if they are still there."""
        for stream in self.followers:
            with contextlib.suppress(RankLost):
                stream.send(Stop(), 1.0)
            stream.close()
        self.followers = []
        sharding.leave()

    def trainer(self, folder: Path, settings: TrainerSettings) -> Leader:
        """A trainer of the model of that folder, on all ranks."""
        self.tell([Build(folder=str(folder)) for _ in self.followers])
        if self.parts is None or self.parts.settings != settings:
            self.parts = Parts(settings, self.settings, self.mesh)
        made = self.parts.trainer(folder, lambda *given, **more: Leader(self, *given, **more))
        assert isinstance(made, Leader)
        own = digest(made)
        for stream, answer in zip(self.followers, self._built(), strict=True):
            if answer.digest != own:
                raise RanksDiffer(f"{folder} is the model {answer.digest} by its shapes on {stream.name}, {own} "
                                  "on rank 0: all ranks need the same files")
        return made

    def _built(self) -> list[Done]:
        limit = time.monotonic() + self.settings.start_s
        found = []
        for stream in self.followers:
            answer = stream.receive(max(1.0, limit - time.monotonic()))
            if not isinstance(answer, Done):
                words = getattr(answer, "text", f"no answer within {self.settings.start_s:g} s")
                raise RankLost(f"{stream.name} could not build the model: {words}")
            found.append(answer)
        return found


@contextlib.contextmanager
def _listening(file: Path) -> Iterator[socket.socket]:
    """A socket that only this user can open."""
    file.unlink(missing_ok=True)
    with socket.socket(socket.AF_UNIX) as server:
        before = os.umask(0o177)
        try:
            server.bind(str(file))
        finally:
            os.umask(before)
        server.listen()
        server.settimeout(LOOK_S)
        try:
            yield server
        finally:
            file.unlink(missing_ok=True)


class Leader(Trainer):
    """A trainer whose calls run on all ranks; this one is rank 0."""

    def __init__(self, team: Team, model: Any, settings: TrainerSettings, **more: Any) -> None:
        self.team, self._planned = team, [0] * team.settings.ranks
        self._cost = _quadratic(model)
        super().__init__(model, settings, **more)

    def _clear(self) -> None:
        super()._clear()
        self._planned = [0] * self.team.settings.ranks

    def _rounds(self, samples: Sequence[Sample]) -> list[Round]:
        lengths = [sample.length for sample in samples]
        return rounds_of(lengths, self.team.settings.ranks, self.settings.micro_batch_tokens, self._cost)

    def accumulate(
        self, samples: Sequence[Sample], advantages: Sequence[float], proximal: Sequence[Floats] | None = None,
        version: int | None = None, *, weights: Sequence[float] | None = None,
        chosen: Sequence[NDArray[np.bool_]] | None = None, valued: Sequence[Valued] | None = None,
    ) -> None:
        """Forward and backward of these samples, spread over the ranks, added to the step under way."""
        assert valued is None, "a value head is trained by one process"
        given = Given(advantages, weights, proximal, chosen)
        self._check(samples, given)
        for shares in self._rounds(samples):
            parts: list[Any] = []
            for rank, share in enumerate(shares):
                parts.append(([samples[i] for i in share], given.of(share), version))
                self._planned[rank] += sum(len(one.token_ids) - one.context for one in parts[-1][0])
            self.team.tell([Micro(work=work_of(self, *part)) for part in parts[1:]])
            with self.team.together("a micro-batch", parts[0][0]):
                if shares[0]:
                    self.micro_batch(*parts[0])
                else:
                    self.idle()

    def step(self, lr: float, denominator: float = 0.0, scale: float = 1.0) -> StepStats:
        self.team.tell([
            Step(lr=lr, tokens=tokens, denominator=denominator, scale=scale) for tokens in self._planned[1:]
        ])
        with self.team.together("the update"):
            own = self.update(lr, denominator, scale)
        others = [Share(**_tuples(answer.share)) for answer in self.team.answers()]
        return stats_of([own, *others], lr, denominator, scale)

    def _referred_parts(self, samples: Sequence[Sample]) -> Iterator[tuple[list[int], Any]]:
        for part, found, _ in self._on_all(samples, True, lambda own: (self.referred(own),) * 2):
            yield part, found

    def _scored(self, samples: Sequence[Sample]) -> Iterator[tuple[list[int], Tensor, Tensor]]:
        yield from self._on_all(samples, False, self.scored)

    def _on_all(
        self, samples: Sequence[Sample], refer: bool, compute: Callable[[Sequence[Sample]], tuple[Tensor, Tensor]]
    ) -> Iterator[tuple[list[int], Tensor, Tensor]]:
        """Two numbers of each token, from all ranks: per share the positions of its samples and the numbers."""
        for shares in self._rounds(samples):
            chosen = [[samples[i] for i in share] for share in shares]
            self.team.tell([Score(work=work_of(self, part), refer=refer) for part in chosen[1:]])
            with self.team.together("scoring"):
                own = compute(chosen[0])
            yield shares[0], *own
            for share, answer in zip(shares[1:], self.team.answers(), strict=True):
                yield share, self._placed(answer.logprobs), self._placed(answer.entropies)
            self.moved()

    def _placed(self, data: bytes) -> Tensor:
        return torch.from_numpy(np.frombuffer(bytearray(data), np.float32)).to(self._device)

    def named_weights(self) -> Mapping[str, Tensor]:
        """The weights to publish, each gathered when it is asked for; valid until the next step."""
        return Gathered(self.gather_weight, self.published(), self.published_type)

    def adapter_weights(self, adapter: Adapter) -> Mapping[str, Tensor]:
        own = adapter.tensors()
        return Gathered(lambda name: self._gather("adapter", name, lambda: sharding.gathered(own[name])), own)

    def gather_weight(self, name: str) -> Tensor:
        return self._gather("weight", name, lambda: super(Leader, self).gather_weight(name))

    def _gather(self, what: str, name: str, gather: Callable[[], Tensor]) -> Tensor:
        self.team.tell([Gather(what=what, name=name) for _ in self.team.followers])
        with self.team.together("publication"):
            found = gather()
        self.moved()
        return found

    def load_adapter(self, adapter: Adapter, folder: Path) -> None:
        self.team.tell([Adopt(folder=str(folder)) for _ in self.team.followers])
        super().load_adapter(adapter, folder)
        self.team.answers()

    def optimizer_state(self) -> dict[str, Any]:
        self.team.tell([Gather(what="state") for _ in self.team.followers])
        with self.team.together("a checkpoint"):
            return self.gather_state(keep=True)

    def restore(self, found: Checkpoint, optimizer: bool = True) -> list[str]:
        self.team.tell([Restore(path=str(found.path), optimizer=optimizer) for _ in self.team.followers])
        changed = super().restore(found, optimizer)
        self.team.answers(self.team.settings.start_s)
        return changed

    def save(self, folder: Path) -> Saving:
        self.team.tell([Save(path=str(folder)) for _ in self.team.followers])
        return TeamSaving(super().save(folder).own, self.team.followers, self.team.seq)


class Gathered(Mapping[str, Tensor]):
    """The weights of a team by name: asking for one gathers it on rank 0, in the type that is published, and nobody
    keeps it. `described` has their names, shapes and number types without any of their values."""

    def __init__(
        self, gather: Callable[[str], Tensor], spread: Mapping[str, Tensor], dtype: torch.dtype | None = None
    ) -> None:
        """`spread`: what this rank has of them."""
        self._gather = gather
        self.described: Mapping[str, Tensor] = {
            name: torch.empty(one.shape, dtype=dtype or one.dtype, device="meta")
            for name, one in getattr(spread, "described", spread).items()
        }

    def __getitem__(self, name: str) -> Tensor:
        return self._gather(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self.described)

    def __len__(self) -> int:
        return len(self.described)


def _tuples(share: dict[str, Any]) -> dict[str, Any]:
    """As JSON-like messages have no tuples."""
    return {name: tuple(value) if isinstance(value, list) else value for name, value in share.items()}


# -- the others -----------------------------------------------------------------------------


class Follower:
    """A rank other than 0. `hear` does what rank 0 says next; RankLost when rank 0 is gone."""

    def __init__(
        self, settings: TeamSettings, training: TrainerSettings, rank: int, waits: Callable[[], object] = lambda: None
    ) -> None:
        """Connects to rank 0 and joins the group; RankLost if rank 0 is not there in time, RanksDiffer if it refuses.
        `waits` is called while rank 0 is waited for, and ends that if it is true."""
        self.settings, self.rank = settings, rank
        self.moved: Callable[[], None] = lambda: None  # called after each micro-batch
        self.stream = self._connect(waits)
        self.trainer: Trainer | None = None
        self._saving: Saving | None = None
        limit = settings.collective_s
        self.stream.send(Hello(rank=rank, pid=os.getpid(), facts=dict(settings.facts)), limit)
        join = self.stream.receive(settings.start_s)
        if not isinstance(join, Join):
            raise RankLost(f"rank 0 gave no place in the team within {settings.start_s:g} s")
        if join.refused:
            raise RanksDiffer(join.refused)
        store = sharding.find_store(join.port, join.world, limit)
        mesh = sharding.join(store, join.prefix, rank, join.world, settings.device, limit)
        self._parts = Parts(training, settings, mesh)

    def _connect(self, waits: Callable[[], object]) -> Stream:
        deadline = time.monotonic() + self.settings.start_s
        while True:
            connected = socket.socket(socket.AF_UNIX)
            try:
                connected.connect(str(self.settings.file))
                return Stream(connected, "rank 0")
            except OSError as problem:
                connected.close()
                if waits() or time.monotonic() > deadline:
                    where = f"rank 0 does not listen at {self.settings.file}"
                    raise RankLost(f"{where} after {self.settings.start_s:g} s: {problem.strerror}") from problem
            time.sleep(LOOK_S)

    def hear(self, timeout_s: float) -> Message | None:
        """What rank 0 says next; None if it says nothing for so long. Tells it of a shard that is written by now."""
        deadline = time.monotonic() + timeout_s
        while True:
            if self._saving is not None and self._saving.ready():
                self.stream.send(_told(self._saving, self._saving_seq), self.settings.collective_s)
                self._saving = None
            left = max(0.0, deadline - time.monotonic())
            found: Message | None = self.stream.receive(left if self._saving is None else min(left, LOOK_S))
            if found is not None or self._saving is None or not left:
                return found

    def act(self, message: Message) -> bool:
        """Do it and answer; False if it was the end. What goes wrong is told to rank 0 before it is raised."""
        try:
            answer = self._done(message)
        except Exception as problem:
            with contextlib.suppress(RankLost):
                uids = [sample[0] for sample in getattr(message, "work", NO_WORK).samples]
                self.stream.send(Failed(seq=message.seq, text=cause(problem), uids=uids), LAST_WORDS_S)
            raise
        if answer is not None:
            answer.seq = message.seq
            self.stream.send(answer, self.settings.collective_s)
        return not isinstance(message, Stop)

    def _done(self, message: Message) -> Message | None:
        match message:
            case Build():
                if self.settings.lora is not None:  # dropout of the adapter
                    torch.manual_seed(self.settings.lora.seed + self.rank)
                self.trainer = self._parts.trainer(Path(message.folder), Trainer)
                self.trainer.moved = lambda: self.moved()
                return Done(digest=digest(self.trainer))
            case Stop():
                sharding.leave()
                return None
        assert self.trainer is not None, f"{type(message).__name__} before a model was built"
        if isinstance(message, Save):
            self._saving, self._saving_seq = self.trainer.save(Path(message.path)), message.seq
            return None
        return _answer(self.trainer, message)

    def close(self) -> None:
        self.stream.close()


def _told(saving: Saving, seq: int) -> Saved:
    """How the writing of a shard ended."""
    try:
        (entry,) = saving.entries().values()
    except (DiskFull, WriteFailed) as problem:
        return Saved(seq=seq, problem=str(problem), full=isinstance(problem, DiskFull))
    return Saved(seq=seq, entry=entry)


def _answer(trainer: Trainer, message: Message) -> Message | None:
    match message:
        case Micro(work=work):
            _micro(trainer, work)
        case Score(work=work, refer=refer):
            samples = samples_of(work)
            found = (trainer.referred(samples),) * 2 if refer else trainer.scored(samples)
            logprobs, entropies = (one.float().cpu().numpy().tobytes() for one in found)
            return Scored(logprobs=logprobs, entropies=entropies)
        case Step():
            if trainer.counted != message.tokens:
                raise RanksDiffer(f"counted {trainer.counted} tokens for this step, rank 0 planned {message.tokens}")
            return Done(share=asdict(trainer.update(message.lr, message.denominator, message.scale)))
        case Gather(what="weight", name=name):
            trainer.gather_weight(name)
        case Gather(what="adapter", name=name):
            assert trainer.adapter is not None
            sharding.gathered(trainer.adapter.tensors()[name])
        case Adopt(folder=folder):
            assert trainer.adapter is not None
            trainer.load_adapter(trainer.adapter, Path(folder))
            return Done()
        case Gather():
            trainer.gather_state(keep=False)
        case Restore(path=path, optimizer=optimizer):
            trainer.restore(Checkpoint(Path(path), 0, {}), optimizer)
            return Done()
    return None


def _micro(trainer: Trainer, work: Work) -> None:
    if not work.samples:
        trainer.idle()
        return
    trainer.skip_mastered = work.skip_mastered
    trainer.ages_of = lambda versions: np.array([work.ages[one] for one in versions.tolist()], np.int64)
    before = None if work.proximal is None else [np.frombuffer(row, np.float32) for row in work.proximal]
    chosen = None if work.chosen is None else [np.frombuffer(row, np.bool_) for row in work.chosen]
    trainer.micro_batch(samples_of(work), Given(work.advantages, work.weights, before, chosen), work.version)
