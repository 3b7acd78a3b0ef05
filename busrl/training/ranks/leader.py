"""Rank 0 of a learner: gathers the other ranks, plans what each of them computes, and tells them.

`Leader` is a trainer whose calls run on all ranks. Talks to each follower over a control stream (`wire`) and, inside of
the trainer, over the process group of `mesh`. Knows nothing of rings, logs or groups.

- Whoever runs a forward, a backward or an update runs it on all ranks: a round is one micro-batch on every rank, an
  empty one where there is no work. A sample is never cut over ranks.
- The first failure ends the team: nothing is repaired inside a living process.
- Before a step every rank proves that it counted the tokens that rank 0 planned for it: a wrong mean would be silent.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from busrl.errors import DiskFull, RankFailed, RankLost, RanksDiffer, Stopped, WriteFailed, cause
from busrl.training import sharded
from busrl.training.batch import Round, Sample, Worth, rounds_of
from busrl.training.checkpoint import Checkpoint
from busrl.training.model import Adapter
from busrl.training.ranks import mesh, wire
from busrl.training.ranks.builder import TeamSettings, TrainerBuilder, digest
from busrl.training.shard_files import Saving, Writing, file_of
from busrl.training.step_stats import RankStats, StepStats, stats_of
from busrl.training.trainer import Given, Trainer, TrainerSettings

T = TypeVar("T")

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

    @classmethod
    def gathered(cls, settings: TeamSettings, stopping: Callable[[], object] = lambda: None) -> Team:
        """Wait for all ranks, form the group. RankLost names who did not come, RanksDiffer what differs. `stopping` is
        called while they are waited for; if it is true those that are there are dismissed: Stopped."""
        team = cls(settings)
        deadline, streams = time.monotonic() + settings.start_s, dict[int, wire.Stream]()
        with _listening(settings.file) as server:
            while len(streams) < settings.ranks - 1:
                if stopping():
                    team.followers = list(streams.values())
                    team.close()
                    raise Stopped("while the other ranks were waited for")
                if time.monotonic() > deadline:
                    missing = sorted(set(range(1, settings.ranks)) - streams.keys())
                    raise RankLost(f"rank {', '.join(map(str, missing))} did not come within {settings.start_s:g} s")
                with contextlib.suppress(TimeoutError):
                    connected, _ = server.accept()
                    team._welcome(wire.Stream(connected, "a rank that connects"), streams)
        team.followers = [streams[rank] for rank in sorted(streams)]
        team._join()
        return team

    def _welcome(self, stream: wire.Stream, streams: dict[int, wire.Stream]) -> None:
        hello = None
        with contextlib.suppress(RankLost):  # whoever it was is gone; the rank that is missing is waited for
            hello = stream.receive(wire.ARRIVES_S)
        if not isinstance(hello, wire.RankHello) or not 0 < hello.rank < self.settings.ranks or hello.rank in streams:
            stream.close()
            return
        stream.name = f"rank {hello.rank} (pid {hello.pid})"
        for name, own in self.settings.facts.items():
            theirs = hello.facts.get(name, "")
            if theirs != own:
                refused = f"{name} is {theirs} on rank {hello.rank} and {own} on rank 0: all ranks need the same"
                stream.send(wire.Join(world=0, port=0, prefix="", refused=refused), wire.ARRIVES_S)
                raise RanksDiffer(refused)
        streams[hello.rank] = stream

    def _join(self) -> None:
        ranks, limit = self.settings.ranks, self.settings.collective_s
        self.store, prefix = mesh.open_store(ranks, limit), secrets.token_hex(8)
        self.tell([wire.Join(world=ranks, port=self.store.port, prefix=prefix) for _ in self.followers])
        with self.together("join"):
            self.meshes = mesh.join(self.store, prefix, 0, ranks, self.settings.device, limit, self.settings.axes)

    def tell(self, messages: Sequence[wire.ControlMessage]) -> None:
        """To each follower its own."""
        self.seq += 1
        for stream, message in zip(self.followers, messages, strict=True):
            message.seq = self.seq
            stream.send(message, self.settings.collective_s)

    def each(self, shares: Sequence[T]) -> list[T]:
        """What each follower has of the shares: ranks of one tensor group have the same."""
        return [shares[rank // self.settings.axes.tensor] for rank in range(1, self.settings.ranks)]

    def answers(self, limit_s: float = 0.0) -> list[Any]:
        """One of each follower to what was told last."""
        return [self._answer(stream, limit_s or self.settings.collective_s) for stream in self.followers]

    def _answer(self, stream: wire.Stream, limit_s: float) -> Any:
        found = stream.receive(limit_s)
        if found is None:
            raise RankLost(f"{stream.name} did not answer within {limit_s:g} s: stopped or stuck")
        if isinstance(found, wire.LastWords):
            raise RankFailed(f"{stream.name} failed: {found.text}", found.uids)
        if found.seq != self.seq:
            raise RankLost(f"{stream.name} answered {found.seq} when {self.seq} was asked")
        return found

    @contextlib.contextmanager
    def together(self, what: str, own: Sequence[int] = ()) -> Iterator[None]:
        """A collective. If it fails, the rank that is the cause is named: it said why, has ended, or is silent; or it
        is this one, with its `own` samples, by uid."""
        begun = time.monotonic()
        try:
            yield
        except RuntimeError as problem:
            took, words, uids = time.monotonic() - begun, list[str](), list[int]()
            if not mesh.of_a_peer(problem):
                raise RankFailed(f"{what}: rank 0 failed: {cause(problem)}", own) from problem
            for text, samples in self._last_words():
                words.append(text)
                uids += samples
            text = f"{what} failed after {took:.1f} s: {'; '.join([*words, cause(problem)])}"
            raise (RankFailed(text, uids) if uids else RankLost(text)) from problem

    def _last_words(self) -> Iterator[tuple[str, list[int]]]:
        """What each follower said, and its samples if it has failed."""
        deadline = time.monotonic() + wire.LAST_WORDS_S
        for stream in self.followers:
            try:
                words = stream.receive(max(0.01, deadline - time.monotonic()))
            except RankLost as lost:
                yield str(lost), []
                continue
            if isinstance(words, wire.LastWords):
                yield f"{stream.name} failed: {words.text}", words.uids
            else:
                yield f"{stream.name} says nothing: it is stopped or stuck", []

    def close(self) -> None:
        """Dismiss the others, if they are still there."""
        for stream in self.followers:
            with contextlib.suppress(RankLost):
                stream.send(wire.Leave(), 1.0)
            stream.close()
        self.followers = []
        mesh.leave()

    def trainer(self, folder: Path, settings: TrainerSettings) -> Leader:
        """A trainer of the model of that folder, on all ranks."""
        self.tell([wire.Build(folder=str(folder)) for _ in self.followers])
        if self.builder is None or self.builder.settings != settings:
            self.builder = TrainerBuilder(settings, self.settings, self.meshes)
        made = self.builder.trainer(folder, lambda *given, **more: Leader(self, *given, **more))
        assert isinstance(made, Leader)
        own = digest(made)
        for stream, answer in zip(self.followers, self._built(), strict=True):
            if answer.digest != own:
                raise RanksDiffer(f"{folder} is the model {answer.digest} by its shapes on {stream.name}, {own} "
                                  "on rank 0: all ranks need the same files")
        return made

    def _built(self) -> list[wire.Done]:
        limit = time.monotonic() + self.settings.start_s
        found = []
        for stream in self.followers:
            answer = stream.receive(max(1.0, limit - time.monotonic()))
            if not isinstance(answer, wire.Done):
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
        server.settimeout(wire.LOOK_S)
        try:
            yield server
        finally:
            file.unlink(missing_ok=True)


class Leader(Trainer):
    """A trainer whose calls run on all ranks; this one is rank 0."""

    def __init__(self, team: Team, model: Any, settings: TrainerSettings, **more: Any) -> None:
        self.team, self._planned = team, [0] * team.settings.axes.shares
        self._cost = _quadratic(model)
        super().__init__(model, settings, **more)

    def _clear(self) -> None:
        super()._clear()
        self._planned = [0] * self.team.settings.axes.shares

    def _rounds(self, samples: Sequence[Sample]) -> list[Round]:
        lengths = [sample.length for sample in samples]
        return rounds_of(lengths, self.team.settings.axes.shares, self.settings.micro_batch_tokens, self._cost)

    def accumulate(
        self, samples: Sequence[Sample], given: Given | Sequence[Worth], version: int | None = None
    ) -> None:
        """Forward and backward of these samples, spread over the ranks, added to the step under way."""
        given = given if isinstance(given, Given) else Given(given)
        self._check(samples, given)
        for shares in self._rounds(samples):
            parts: list[Any] = []
            for number, share in enumerate(shares):
                parts.append(([samples[i] for i in share], given.of(share), version))
                self._planned[number] += sum(one.trained for one in parts[-1][0])
            self.team.tell([wire.Micro(work=wire.work_of(self, *part)) for part in self.team.each(parts)])
            with self.team.together("a micro-batch", [one.uid for one in parts[0][0]]):
                if shares[0]:
                    self.micro_batch(*parts[0])
                else:
                    self.idle()

    def step(self, lr: float, denominator: float = 0.0, scale: float = 1.0) -> StepStats:
        self.team.tell([
            wire.Step(lr=lr, tokens=tokens, denominator=denominator, scale=scale)
            for tokens in self.team.each(self._planned)
        ])
        with self.team.together("the update", self.step_uids):
            own = self.update(lr, denominator, scale)
        every = [own, *(RankStats(**_tuples(answer.stats)) for answer in self.team.answers())]
        return stats_of(_one_of_each(every, self.team.settings.axes.tensor), lr, denominator, scale)

    def _parts(self, samples: Sequence[Sample], by: str = "") -> Iterator[tuple[list[int], Tensor, Tensor]]:
        """The same from all ranks, per share."""
        for shares in self._rounds(samples):
            chosen = [[samples[i] for i in share] for share in shares]
            self.team.tell([wire.Score(work=wire.work_of(self, part), by=by) for part in self.team.each(chosen)])
            with self.team.together("scoring"):
                own = self.at_once(chosen[0], by)
            yield shares[0], *own
            first = self.team.settings.axes.tensor  # those in between computed the same
            for share, answer in zip(shares[1:], self.team.answers()[first - 1 :: first], strict=True):
                yield share, self._placed(answer.logprobs), self._placed(answer.entropies)
            self.on_progress()

    def _placed(self, data: bytes) -> Tensor:
        return torch.from_numpy(np.frombuffer(bytearray(data), np.float32)).to(self._device)

    def named_weights(self) -> Mapping[str, Tensor]:
        """The weights to publish, each gathered when it is asked for; valid until the next step."""
        return Gathered(self.gather_weight, self.published(), self.published_type)

    def adapter_weights(self, adapter: Adapter) -> Mapping[str, Tensor]:
        own = adapter.tensors()
        return Gathered(lambda name: self._gather("adapter", name, lambda: sharded.gathered(own[name])), own)

    def gather_weight(self, name: str) -> Tensor:
        return self._gather("weight", name, lambda: super(Leader, self).gather_weight(name))

    def _gather(self, what: str, name: str, gather: Callable[[], Tensor]) -> Tensor:
        self.team.tell([wire.Gather(what=what, name=name) for _ in self.team.followers])
        with self.team.together("publication"):
            found = gather()
        self.on_progress()
        return found

    def load_adapter(self, adapter: Adapter, folder: Path) -> None:
        self.team.tell([wire.Adopt(folder=str(folder)) for _ in self.team.followers])
        super().load_adapter(adapter, folder)
        self.team.answers()

    def optimizer_state(self) -> dict[str, Any]:
        self.team.tell([wire.Gather(what="state") for _ in self.team.followers])
        with self.team.together("a checkpoint"):
            return self.gather_state(keep=True)

    def restore(self, found: Checkpoint, optimizer: bool = True) -> list[str]:
        self.team.tell([wire.Restore(path=str(found.path), optimizer=optimizer) for _ in self.team.followers])
        changed = super().restore(found, optimizer)
        self.team.answers(self.team.settings.start_s)
        return changed

    def save(self, folder: Path) -> Saving:
        self.team.tell([wire.Save(path=str(folder)) for _ in self.team.followers])
        return TeamSaving(super().save(folder).own, self.team.followers, self.team.seq)


class TeamSaving(Saving):
    """What all ranks write of a checkpoint. `streams`: those to the other ranks, in order, each with the newest answer
    to a Save as `saved`; `seq`: that of the question."""

    def __init__(self, own: Writing, streams: Sequence[Any], seq: int) -> None:
        super().__init__(own)
        self.streams, self.seq = streams, seq

    def ready(self) -> bool:
        """RankFailed if a rank says why it ends, RankLost if it is gone."""
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
        found = super().entries()
        for rank, stream in enumerate(self.streams, 1):
            saved = stream.saved
            assert saved is not None, "not ready"
            if saved.problem:
                raise (DiskFull if saved.full else WriteFailed)(f"{stream.name}: {saved.problem}")
            found[file_of(rank)] = saved.entry
        return found


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


def _quadratic(model: Any) -> float:
    """Layers x width / (3 x parameters): what attention adds to the cost of a token."""
    layers, width = (getattr(model.config, name, 0) or 0 for name in ("num_hidden_layers", "hidden_size"))
    count: int = sum(parameter.numel() for parameter in model.parameters())
    return float(layers * width) / (3 * max(1, count))


def _one_of_each(every: Sequence[RankStats], tensor: int) -> list[RankStats]:
    """One rank's numbers of each share, with the culprits that any rank of it found."""
    groups = (every[at : at + tensor] for at in range(0, len(every), tensor))
    return [replace(group[0], culprits=tuple(dict.fromkeys(name for one in group for name in one.culprits)))
            for group in groups]


def _tuples(stats: dict[str, Any]) -> dict[str, Any]:
    """As JSON-like messages have no tuples."""
    return {name: tuple(value) if isinstance(value, list) else value for name, value in stats.items()}
