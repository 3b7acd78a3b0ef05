"""Rank 0 of a learner: gathers the other ranks, plans the work of each, and sends it.

`Leader` is a trainer whose calls run on all ranks. Talks to each follower over a control stream (`wire`) and, inside of
the trainer, over the process group of `mesh`. Knows nothing of rings, logs or groups.

- Whoever runs a forward, a backward or an update runs it on all ranks: a round is one micro-batch on every rank, an
  empty one where there is no work. A sample is never cut over ranks.
- The first failure ends the team: nothing is repaired inside a living process.
- Nobody waits for a teacher behind an endpoint in a collective: before a round all ranks have what they asked for.
- Before a step every rank proves that it counted the tokens that rank 0 planned for it: a wrong mean would be silent.
"""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import partial
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np
import torch
from torch import Tensor

from busrl.errors import CannotTrain, DiskFull, RankFailed, RankLost, RanksDiffer, Stopped, WriteFailed, cause
from busrl.paths import RunPaths
from busrl.ranks import meeting, mesh, wire
from busrl.ranks.builder import TeamSettings, TrainerBuilder, digest
from busrl.system import device
from busrl.system.listener import shut
from busrl.topology import Topology
from busrl.training import sharded
from busrl.training.batch import Round, Sample, Worth, rounds_of
from busrl.training.checkpoint import Checkpoint
from busrl.training.model import vocabulary
from busrl.training.scorer import EVERY, Advantages
from busrl.training.settings import TrainerSettings
from busrl.training.shard_files import Saving, Writing, file_of
from busrl.training.step_stats import RankStats, StepStats, stats_of
from busrl.training.trainer import QUIET, Hooks, Trainer
from busrl.weights.tensors import fingerprint

T = TypeVar("T")
SAY_S = 20.0  # after which whoever watches is told which host is waited for
LOOK_EVERY_S = 1.0
PIECE = 1 << 22  # bytes of a file for other hosts
NOT_BROUGHT = ("trained.bin",)  # it is rank 0's alone

# -- the team ---------------------------------------------------------------------------

@dataclass
class Team:
    """The followers of rank 0, and its process group with them."""

    settings: TeamSettings
    followers: list[wire.Stream] = field(default_factory=list)  # of rank 1, 2, ...
    meshes: Any = None
    seq: int = 0
    store: Any = None
    builder: TrainerBuilder | None = None
    on_progress: Callable[[], None] = lambda: None
    _brought: set[Path] = field(default_factory=set)
    _next_look: float = 0.0

    @classmethod
    def gathered(
        cls, settings: TeamSettings, stopping: Callable[[], object] = lambda: None,
        report: Callable[[str], None] = lambda _: None, on_progress: Callable[[], None] = lambda: None,
    ) -> Team:
        """Wait for all ranks, and form the group. RankLost names missing ranks, CannotTrain a host that stays away,
        RanksDiffer a difference between ranks. `stopping` is called during the wait; if it is true, connected ranks are
        dismissed: Stopped. `report` gets a text once, if hosts let the learner wait. `on_progress` is called after each
        part of a file that other hosts get."""
        team = cls(settings, on_progress=on_progress)
        begun, streams = time.monotonic(), dict[int, wire.Stream]()
        with meeting.door(settings.file, settings.note, settings.address, settings.collective_s) as door:
            while missing := sorted(set(range(1, settings.ranks)) - streams.keys()):
                if stopping():
                    team.followers = list(streams.values())
                    team.close()
                    raise Stopped("while the other ranks were waited for")
                waited = time.monotonic() - begun
                team._overdue(missing, waited)
                if settings.hosts and waited > SAY_S:
                    report(f"the learner waits for {team._ranks_by_host(missing)}")
                    report = lambda _: None  # noqa: E731
                if (connected := door.accept(wire.LOOK_S)) is not None:
                    team._welcome(wire.Stream(connected, "a rank that connects"), streams)
        team.followers = [streams[rank] for rank in sorted(streams)]
        team._join()
        return team

    def _overdue(self, missing: list[int], waited: float) -> None:
        settings = self.settings
        here = [rank for rank in missing if not settings.host_of(rank)]
        if here and waited > settings.start_s:
            raise RankLost(f"{self._ranks_by_host(here)} did not come within {settings.start_s:g} s")
        away = [rank for rank in missing if settings.host_of(rank)]
        if away and waited > settings.hosts_s:
            raise CannotTrain(
                f"{self._ranks_by_host(away)} did not come within {settings.hosts_s:g} s "
                "(learner.parallel.host_timeout_s): start `busrl host` there, or under that name elsewhere, and the "
                "run again: it goes on where it was"
            )

    def _ranks_by_host(self, ranks: Sequence[int]) -> str:
        """Ranks by number, with their hosts."""
        hosts: dict[str, list[str]] = {}
        for rank in ranks:
            hosts.setdefault(self.settings.host_of(rank), []).append(str(rank))
        return " and ".join(
            f"rank {', '.join(numbers)}{f' on {host}' if host else ''}" for host, numbers in hosts.items()
        )

    def _welcome(self, stream: wire.Stream, streams: dict[int, wire.Stream]) -> None:
        hello = None
        with contextlib.suppress(RankLost):  # the visitor is gone; the missing rank may still come
            hello = stream.receive(wire.ARRIVES_S)
        if not isinstance(hello, wire.RankHello) or not self._is_of(hello) or not _is_free(streams, hello.rank):
            stream.close()
            return
        stream.name = f"{self._ranks_by_host([hello.rank])} (pid {hello.pid})"
        for name, ours in self.settings.facts.items():
            theirs = hello.facts.get(name, "")
            if theirs != ours:
                refused = f"{name} is {theirs} on rank {hello.rank} and {ours} on rank 0: all ranks need the same"
                stream.send(wire.Join(world=0, port=0, prefix="", refused=refused), wire.ARRIVES_S)
                raise RanksDiffer(refused)
        streams[hello.rank] = stream

    def _is_of(self, hello: wire.RankHello) -> bool:
        return 0 < hello.rank < self.settings.ranks and hello.host == self.settings.host_of(hello.rank)

    def _join(self) -> None:
        ranks, limit, address = self.settings.ranks, self.settings.collective_s, self.settings.address
        if address:
            meeting.use_network_of(address)
        self.store, listening = mesh.open_store(ranks, limit, address or mesh.HOST)
        prefix = secrets.token_hex(8)
        self.send([
            wire.Join(world=ranks, port=self.store.port, prefix=prefix, address=address, root=str(self.settings.root))
            for _ in self.followers
        ])
        with listening, self.together("join"):
            self.meshes = mesh.join(self.store, prefix, 0, ranks, self.settings.device, limit, self.settings.axes)
            if self.settings.device.type == "cpu":  # NCCL may connect once more
                shut(listening)

    def send(self, messages: Sequence[wire.ControlMessage]) -> None:
        self.seq += 1
        for stream, message in zip(self.followers, messages, strict=True):
            message.seq = self.seq
            stream.send(message, self.settings.collective_s)

    def look(self) -> None:
        """RankLost if a rank has ended, or its host is out of reach, while nobody waited for it."""
        if (now := time.monotonic()) >= self._next_look:
            self._next_look = now + LOOK_EVERY_S
            if end := next(filter(None, (stream.end for stream in self.followers)), ""):
                raise RankLost(end)

    def bring(self, folder: Path) -> None:
        """Send other hosts the files of a folder that only home has, without those that they got in this attempt."""
        settings = self.settings
        firsts = [settings.ranks * at // (1 + len(settings.hosts)) for at in range(1, 1 + len(settings.hosts))]
        if not firsts or not folder.is_relative_to(settings.root):
            return
        streams, self.seq = [self.followers[rank - 1] for rank in firsts], self.seq + 1
        for path in sorted(set(folder.rglob("*")) - self._brought):
            if path.is_file() and path.name not in NOT_BROUGHT:
                self._brought.add(path)
                for piece in _pieces(path, str(path.relative_to(settings.root)), self.seq):
                    for stream in streams:
                        stream.send(piece, settings.collective_s)
                    self.on_progress()
        for stream in streams:
            stream.send(wire.Bring(seq=self.seq), settings.collective_s)
        for stream in streams:
            self._answer(stream, settings.collective_s)

    def each(self, shares: Sequence[T]) -> list[T]:
        """The share of each follower: all ranks of a tensor group have the same share."""
        return [shares[rank // self.settings.axes.tensor] for rank in range(1, self.settings.ranks)]

    def answers(self, limit_s: float = 0.0) -> list[Any]:
        """Answers of all followers to the last message."""
        return [self._answer(stream, limit_s or self.settings.collective_s) for stream in self.followers]

    def _answer(self, stream: wire.Stream, limit_s: float) -> Any:
        answer = stream.receive(limit_s)
        if answer is None:
            raise RankLost(f"{stream.name} did not answer within {limit_s:g} s: stopped or stuck")
        if isinstance(answer, wire.LastWords):
            raise RankFailed(f"{stream.name} failed: {answer.text}", answer.uids)
        if answer.seq != self.seq:
            raise RankLost(f"{stream.name} answered {answer.seq} when {self.seq} was asked")
        return answer

    def wait_for_teachers(
        self, own: Callable[[Callable[[], None]], None], on_progress: Callable[[], None]
    ) -> None:
        """Wait for Done of all followers, each as long as it says that it waits for its teacher. `own`: the wait of
        this rank, which calls what it is given again and again."""
        heard = dict.fromkeys(self.followers, time.monotonic())
        own(lambda: self._hear(heard, 0.0))
        while heard:
            self._hear(heard, LOOK_EVERY_S)
            on_progress()

    def _hear(self, heard: dict[wire.Stream, float], wait_s: float) -> None:
        """Note whom something came from; who is done is heard no more."""
        limit, ready = self.settings.collective_s, wait([stream.socket for stream in heard], wait_s)
        for stream in [stream for stream in heard if stream.socket in ready]:
            if isinstance(self._answer(stream, limit), wire.Waits):
                heard[stream] = time.monotonic()
            else:
                del heard[stream]
        for stream, at in heard.items():
            if time.monotonic() - at > limit:
                raise RankLost(f"{stream.name}, which waited for its teacher, has said nothing for {limit:g} s")

    @contextlib.contextmanager
    def together(self, what: str, suspects: Sequence[int] = ()) -> Iterator[None]:
        """Run a collective. If it fails, the error names the rank that is the cause: one with last words, one that has
        ended, or a silent one; or this rank, with the uids of its samples (`suspects`)."""
        begun = time.monotonic()
        try:
            yield
        except RuntimeError as problem:
            if not mesh.of_a_peer(problem):
                raise RankFailed(f"{what}: rank 0 failed: {cause(problem)}", suspects) from problem
            took = time.monotonic() - begun
            words, uids = self._last_words()
            text = f"{what} failed after {took:.1f} s: {'; '.join([*words, cause(problem)])}"
            raise (RankFailed(text, uids) if uids else RankLost(text)) from problem

    def _last_words(self) -> tuple[list[str], list[int]]:
        """Last words of each follower, and the samples of those that have failed."""
        deadline, texts, uids = time.monotonic() + wire.LAST_WORDS_S, list[str](), list[int]()
        for stream in self.followers:
            try:
                words = stream.receive(max(0.01, deadline - time.monotonic()))
            except RankLost as lost:
                texts.append(str(lost))
                continue
            if isinstance(words, wire.LastWords):
                texts.append(f"{stream.name} failed: {words.text}")
                uids += words.uids
            else:
                texts.append(f"{stream.name} says nothing: it is stopped or stuck")
        return texts, uids

    def close(self) -> None:
        """Dismiss the others, if they are still there."""
        for stream in self.followers:
            with contextlib.suppress(RankLost):
                stream.send(wire.Leave(), 1.0)
            stream.close()
        self.followers = []
        mesh.leave()

    def trainer(self, folder: Path, settings: TrainerSettings, hooks: Hooks = QUIET) -> Leader:
        self.bring(folder)
        self.send([wire.Build(folder=str(folder)) for _ in self.followers])
        if self.builder is None or self.builder.settings != settings:
            self.builder = TrainerBuilder(settings, self.settings, self.meshes)
        leader = self.builder.trainer(folder, lambda *arguments, **more: Leader(self, *arguments, **more), hooks)
        assert isinstance(leader, Leader)
        ours = digest(leader)
        for stream, answer in zip(self.followers, self._built(), strict=True):
            if answer.digest != ours:
                raise RanksDiffer(f"{folder} is the model {answer.digest} by its shapes on {stream.name}, {ours} "
                                  "on rank 0: all ranks need the same files")
        return leader

    def _built(self) -> list[wire.Done]:
        limit = time.monotonic() + self.settings.start_s
        answers = []
        for stream in self.followers:
            answer = stream.receive(max(1.0, limit - time.monotonic()))
            if not isinstance(answer, wire.Done):
                words = getattr(answer, "text", f"no answer within {self.settings.start_s:g} s")
                raise RankLost(f"{stream.name} could not build the model: {words}")
            answers.append(answer)
        return answers


def gather(
    topology: Topology, paths: RunPaths, activity: Callable[[str, float], AbstractContextManager[None]],
    stopping: Callable[[], object], report: Callable[[str], None], on_progress: Callable[[], None],
) -> Team:
    """Wait for the other ranks of a run's learner, and return the team. `activity` declares the wait; the other
    arguments are those of `Team.gathered`."""
    settings = TeamSettings.of(topology, paths, device.choose(topology.device_of("learner")), fingerprint)
    with activity("waits for its ranks", settings.waits_s + topology.limits.ready_s):
        return Team.gathered(settings, stopping, report, on_progress)


def _is_free(streams: dict[int, wire.Stream], rank: int) -> bool:
    """True if that rank has not connected, or has ended since."""
    if rank in streams and streams[rank].end:
        streams.pop(rank).close()
    return rank not in streams


def _pieces(path: Path, name: str, seq: int) -> Iterator[wire.Bring]:
    with open(path, "rb") as file:
        yield wire.Bring(seq=seq, name=name, begins=True)
        while data := file.read(PIECE):
            yield wire.Bring(seq=seq, name=name, data=data)


class Leader(Trainer):
    """A trainer whose calls run on all ranks; this one is rank 0."""

    def __init__(self, team: Team, model: Any, settings: TrainerSettings, **more: Any) -> None:
        self.team, self._planned = team, [0] * team.settings.axes.shares
        self.quadratic = _quadratic(model)
        super().__init__(model, settings, **more)

    def _clear(self) -> None:
        super()._clear()
        self._planned = [0] * self.team.settings.axes.shares

    def _rounds(self, samples: Sequence[Sample]) -> list[Round]:
        lengths = [sample.length for sample in samples]
        return rounds_of(lengths, self.team.settings.axes.shares, self.settings.micro_batch_tokens, self.quadratic)

    def accumulate(
        self, samples: Sequence[Sample], advantages: Advantages | Sequence[Worth], version: int | None = None
    ) -> None:
        """Forward and backward of these samples, spread over the ranks, added to the step under way."""
        advantages, rounds = self._checked(samples, advantages), self._rounds(samples)
        for at, shares in enumerate(rounds):
            if self.scorer.asks_ahead:
                self._teach(samples, rounds, at)
            parts: list[Any] = []
            for number, share in enumerate(shares):
                parts.append(([samples[i] for i in share], advantages.of(share), version))
                self._planned[number] += sum(sample.trained for sample in parts[-1][0])
            self.team.send([
                wire.Micro(work=wire.work_of(self.hooks.ages_of, *part), routes=wire.routes_of(part[0]))
                for part in self.team.each(parts)
            ])
            with self.team.together("a micro-batch", [sample.uid for sample in parts[0][0]]):
                if shares[0]:
                    self.micro_batch(*parts[0])
                else:
                    self.idle(version)

    def _teach(self, samples: Sequence[Sample], rounds: Sequence[Round], at: int) -> None:
        """Let each rank ask teachers behind endpoints about its samples of the next rounds, and wait for what it asked
        about this one."""
        ahead = at + self.scorer.ahead
        coming = rounds[ahead if at else 0 : ahead + 1]  # those before were asked about already
        parts = [[samples[i] for shares in coming for i in shares[number]] for number in range(len(rounds[0]))]
        self.team.send([wire.Expect(work=wire.work_of(self.hooks.ages_of, part)) for part in self.team.each(parts)])
        self.scorer.expect(parts[0])
        uids = [[samples[i].uid for i in share] for share in rounds[at]]
        self.team.send([wire.Await(uids=some) for some in self.team.each(uids)])
        self.team.wait_for_teachers(partial(self.scorer.wait_for, uids[0]), self.hooks.on_progress)

    def step(self, lr: float, denominator: float = 0.0, scale: float = 1.0) -> StepStats:
        self.team.send([
            wire.Step(lr=lr, tokens=tokens, denominator=denominator, scale=scale)
            for tokens in self.team.each(self._planned)
        ])
        with self.team.together("the update", self.tally.uids):
            stats = self.update(lr, denominator, scale)
        every = [stats, *(msgspec.convert(answer.stats, RankStats) for answer in self.team.answers())]
        return stats_of(_one_of_each(every, self.team.settings.axes.tensor), lr, denominator, scale)

    def _parts(self, samples: Sequence[Sample], by: str = "") -> Iterator[tuple[list[int], Tensor, Tensor]]:
        """Scores of all ranks, per share."""
        for shares in self._rounds(samples):
            chosen = [[samples[i] for i in share] for share in shares]
            self.team.send([
                wire.Score(work=wire.work_of(self.hooks.ages_of, part), routes=wire.routes_of(part), by=by)
                for part in self.team.each(chosen)
            ])
            with self.team.together("scoring"):
                scores = self.scorer.at_once(chosen[0], by)
            yield shares[0], *scores
            first = self.team.settings.axes.tensor  # of a share; the other ranks of its group computed the same
            for share, answer in zip(shares[1:], self.team.answers()[first - 1 :: first], strict=True):
                logprobs = self._placed(answer.logprobs)
                if by == EVERY:
                    logprobs = logprobs.reshape(-1, vocabulary(self.model))
                yield share, logprobs, self._placed(answer.entropies)
            self.hooks.on_progress()

    def _placed(self, data: bytes) -> Tensor:
        return torch.from_numpy(np.frombuffer(bytearray(data), np.float32)).to(self._device)

    def named_weights(self) -> Mapping[str, Tensor]:
        """The weights to publish, each gathered at its access; valid until the next step."""
        return Gathered(self.gather_weight, self.published(), self.settings.few_bits)

    def adapter_weights(self) -> Mapping[str, Tensor]:
        parts = super().adapter_weights()
        return Gathered(lambda name: self._gather("adapter", name, lambda: sharded.gathered(parts[name])), parts)

    def gather_weight(self, name: str) -> Tensor:
        return self._gather("weight", name, lambda: super(Leader, self).gather_weight(name))

    def _gather(self, what: str, name: str, gather: Callable[[], Tensor]) -> Tensor:
        self.team.send([wire.Gather(what=what, name=name) for _ in self.team.followers])
        with self.team.together("publication"):
            tensor = gather()
        self.hooks.on_progress()
        return tensor

    def load_adapter(self, folder: Path) -> None:
        self.team.bring(folder)
        self.team.send([wire.Adopt(folder=str(folder)) for _ in self.team.followers])
        super().load_adapter(folder)
        self.team.answers()

    def optimizer_state(self) -> dict[str, Any]:
        self.team.send([wire.Gather(what="state") for _ in self.team.followers])
        with self.team.together("a checkpoint"):
            return self.state.gathered(keep=True)

    def restore(self, checkpoint: Checkpoint, optimizer: bool = True) -> list[str]:
        self.team.bring(checkpoint.path)
        self.team.send([wire.Restore(path=str(checkpoint.path), optimizer=optimizer) for _ in self.team.followers])
        changed = super().restore(checkpoint, optimizer)
        self.team.answers(self.team.settings.start_s)
        return changed

    def save(self, folder: Path) -> Saving:
        self.team.send([wire.Save(path=str(folder)) for _ in self.team.followers])
        return TeamSaving(super().save(folder).writing, self.team.followers, self.team.seq)


class TeamSaving(Saving):
    """The files of a checkpoint that all ranks write. `streams`: to the other ranks, in order, each with the newest
    answer to a Save as `saved`; `seq`: the number of the Save."""

    def __init__(self, writing: Writing, streams: Sequence[Any], seq: int) -> None:
        super().__init__(writing)
        self.streams, self.seq = streams, seq

    def ready(self) -> bool:
        """True if all ranks have written. RankFailed if a rank sent last words, RankLost if it is gone."""
        return not self._missing() and super().ready()

    def whose(self) -> str:
        missing = [stream.name for stream in self._missing()]
        return " and ".join(missing) or super().whose()

    def _missing(self) -> list[Any]:
        """The ranks that still write."""
        missing = []
        for stream in self.streams:
            if (stream.saved is None or stream.saved.seq < self.seq) and (words := stream.receive(0)) is not None:
                text = f"{stream.name} failed: {getattr(words, 'text', words)}"
                raise RankFailed(text, getattr(words, "uids", ()))
            if stream.saved is None or stream.saved.seq < self.seq:
                missing.append(stream)
        return missing

    def entries(self) -> dict[str, list[int]]:
        entries = super().entries()
        for rank, stream in enumerate(self.streams, 1):
            saved = stream.saved
            assert saved is not None, "not ready"
            if saved.problem:
                raise (DiskFull if saved.full else WriteFailed)(f"{stream.name}: {saved.problem}")
            entries[file_of(rank)] = saved.entry
        return entries


class Gathered(Mapping[str, Tensor]):
    """The weights of a team by name: an access gathers one on rank 0, in the published type, and nobody keeps it.
    `described` has names, shapes and number types without values."""

    def __init__(
        self, gather: Callable[[str], Tensor], spread: Mapping[str, Tensor], dtype: torch.dtype | None = None
    ) -> None:
        """`spread`: this rank's parts of the weights."""
        self._gather = gather
        self.described: Mapping[str, Tensor] = {
            name: torch.empty(tensor.shape, dtype=dtype or tensor.dtype, device="meta")
            for name, tensor in getattr(spread, "described", spread).items()
        }

    def __getitem__(self, name: str) -> Tensor:
        return self._gather(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self.described)

    def __len__(self) -> int:
        return len(self.described)


def _quadratic(model: Any) -> float:
    """Layers x width / (3 x parameters): the share of attention in the cost of a token, per token of context."""
    layers, width = (getattr(model.config, name, 0) or 0 for name in ("num_hidden_layers", "hidden_size"))
    count: int = sum(parameter.numel() for parameter in model.parameters())
    return float(layers * width) / (3 * max(1, count))


def _one_of_each(every: Sequence[RankStats], tensor: int) -> list[RankStats]:
    """The numbers of one rank of each share, with the culprits of all ranks of the share."""
    groups = (every[at : at + tensor] for at in range(0, len(every), tensor))
    return [replace(group[0], culprits=tuple(dict.fromkeys(name for stats in group for name in stats.culprits)))
            for group in groups]
