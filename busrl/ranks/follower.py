"""A rank of a learner other than 0: holds a shard of the model, and executes the messages of rank 0 in their order.

Talks to rank 0 over a control stream (`wire`) and, inside of the trainer, over the process group of `mesh`.

- A failure is sent to rank 0 before it is raised, with the samples that were computed, unless another rank is the
  cause: then these samples are no suspects.
- A thread writes the shard of a checkpoint: the answer to a Save comes when the shard is on disk.
"""

from __future__ import annotations

import contextlib
import math
import os
import shutil
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch
from msgspec import UnsetType
from numpy.typing import NDArray

from busrl.algorithms.gae import Valued
from busrl.errors import DiskFull, PeerLost, RankLost, RanksDiffer, Stopped, WriteFailed, cause
from busrl.ranks import meeting, mesh, wire
from busrl.ranks.builder import TeamSettings, TrainerBuilder, digest
from busrl.ranks.meeting import Away
from busrl.training import sharded, value_head
from busrl.training.checkpoint import Checkpoint
from busrl.training.scorer import Advantages, Versions
from busrl.training.settings import TrainerSettings
from busrl.training.shard_files import Saving
from busrl.training.trainer import Hooks, Trainer


class Follower:
    """A rank other than 0: `receive` a message of rank 0, then `act` on it. RankLost when rank 0 is gone."""

    def __init__(
        self, settings: TeamSettings, training: TrainerSettings, rank: int,
        stopping: Callable[[], object] = lambda: None, away: Away | None = None,
        on_progress: Callable[[], None] = lambda: None,
    ) -> None:
        """Connect to rank 0 and join the group. RankLost if rank 0 does not listen in time, RanksDiffer if it refuses;
        Stopped if `stopping`, which is called during the wait, is true, or rank 0 was asked to stop. `away`: on another
        host, where a rank waits as long as the host works for the run. `on_progress` is called after each micro-batch.
        """
        self.settings, self.rank, self.away, self._on_progress = settings, rank, away, on_progress
        self._ages: dict[int, int] = {}  # steps since the versions of the samples that are computed
        self.stream = self._connect(stopping)
        self.trainer: Trainer | None = None
        self._brought = False
        self._saving: Saving | None = None
        limit = settings.collective_s
        host = "" if away is None else away.host
        self.stream.send(wire.RankHello(rank=rank, pid=os.getpid(), facts=dict(settings.facts), host=host), limit)
        join = self._receive_join(stopping)
        self._root = Path(join.root) if away is not None else None
        if join.address:
            meeting.use_network_of(join.address if away is None else self.stream.socket.getsockname()[0])
        store = mesh.find_store(join.port, join.world, limit, join.address or mesh.HOST)
        meshes = mesh.join(store, join.prefix, rank, join.world, settings.device, limit, settings.axes)
        self._builder = TrainerBuilder(training, settings, meshes)

    def _receive_join(self, stopping: Callable[[], object]) -> wire.Join:
        waits_s, begun = self.settings.waits_s, time.monotonic()
        while (join := self.stream.receive(wire.LOOK_S)) is None and time.monotonic() < begun + waits_s:
            if stopping() and self.away is not None:  # at home rank 0 sends Leave
                raise Stopped("while other ranks were waited for")
        if isinstance(join, wire.Leave):
            raise Stopped("rank 0 was asked to stop before all ranks were there")
        if not isinstance(join, wire.Join):
            raise RankLost(f"rank 0 gave no place in the team within {waits_s:g} s")
        if join.refused:
            raise RanksDiffer(join.refused)
        return join

    def _connect(self, stopping: Callable[[], object]) -> wire.Stream:
        deadline = time.monotonic() + (self.settings.start_s if self.away is None else math.inf)
        while True:
            try:
                return wire.Stream(
                    meeting.connect(self.settings.file, self.away, self.settings.collective_s), "rank 0")
            except OSError as problem:
                if stopping():
                    raise Stopped("while rank 0 was waited for") from problem
                if time.monotonic() > deadline:
                    where = f"rank 0 does not listen at {self.settings.file}"
                    raise RankLost(f"{where} after {self.settings.start_s:g} s: {problem.strerror}") from problem
            time.sleep(wire.LOOK_S)

    def receive(self, timeout_s: float) -> wire.ControlMessage | None:
        """Receive the next message of rank 0; None if none comes in this time. Sends Saved once a shard is written."""
        deadline = time.monotonic() + timeout_s
        while True:
            if self._saving is not None and self._saving.ready():
                self.stream.send(_saved(self._saving, self._saving_seq), self.settings.collective_s)
                self._saving = None
            left = max(0.0, deadline - time.monotonic())
            limit = left if self._saving is None else min(left, wire.LOOK_S)
            message: wire.ControlMessage | None = self.stream.receive(limit)
            if message is not None or self._saving is None or not left:
                return message

    def act(self, message: wire.ControlMessage) -> bool:
        """Execute a message and answer it; False if it was Leave. A failure is sent to rank 0 before it is raised."""
        try:
            answer = self._done(message)
        except Exception as problem:
            with contextlib.suppress(RankLost):
                # Not the fault of its samples: another rank, or something else that it waited for.
                of_others = isinstance(problem, PeerLost) or mesh.of_a_peer(problem)
                uids = [] if of_others else self._under_way(message)
                self.stream.send(wire.LastWords(seq=message.seq, text=cause(problem), uids=uids), wire.LAST_WORDS_S)
            raise
        if answer is not None:
            answer.seq = message.seq
            self.stream.send(answer, self.settings.collective_s)
        return not isinstance(message, wire.Leave)

    def _under_way(self, message: wire.ControlMessage) -> list[int]:
        """The samples of the message, or of an update those of its step."""
        if isinstance(message, wire.Step) and self.trainer is not None:
            return self.trainer.tally.uids
        return [sample[0] for sample in getattr(message, "work", wire.NO_WORK).samples]

    def _done(self, message: wire.ControlMessage) -> wire.ControlMessage | None:
        match message:
            case wire.Build():
                if self.settings.lora is not None:  # dropout of the adapter
                    torch.manual_seed(self.settings.lora.seed + self.rank)
                hooks = Hooks(self._on_progress, self._ages_of)
                self.trainer = self._builder.trainer(self._here(message.folder), Trainer, hooks)
                return wire.Done(digest=digest(self.trainer))
            case wire.Leave():
                mesh.leave()
                return None
            case wire.Bring():
                return self._take(message)
        assert self.trainer is not None, f"{type(message).__name__} before a model was built"
        if isinstance(message, wire.Await):
            waits = wire.Waits(seq=message.seq)
            self.trainer.scorer.wait_for(message.uids, lambda: self.stream.send(waits, self.settings.collective_s))
            return wire.Done()
        if isinstance(message, wire.Save):
            self._saving, self._saving_seq = self.trainer.save(Path(message.path)), message.seq
            return None
        if isinstance(message, wire.Micro):
            self._ages = message.work.ages
        elif isinstance(message, wire.Adopt):
            message.folder = str(self._here(message.folder))
        elif isinstance(message, wire.Restore):
            message.path = str(self._here(message.path))
        return _answer(self.trainer, message)

    def _ages_of(self, versions: Versions) -> NDArray[np.int64]:
        return np.array([self._ages[version] for version in versions.tolist()], np.int64)

    def _here(self, path: str) -> Path:
        """The place of a file or folder of home: its path, or this host's copy if it is in the run directory."""
        if self.away is not None and self._root is not None and Path(path).is_relative_to(self._root):
            return self.away.folder / Path(path).relative_to(self._root)
        return Path(path)

    def _take(self, message: wire.Bring) -> wire.Done | None:
        """Write the next bytes of a copy. The first call removes the copies of an earlier attempt."""
        assert self.away is not None, "this rank is at home"
        if not self._brought:
            shutil.rmtree(self.away.folder, ignore_errors=True)
            self._brought = True
        if not message.name:
            return wire.Done()
        target = place_of(self.away.folder, message.name)
        target.parent.mkdir(parents=True, exist_ok=True)
        with open(target, "wb" if message.begins else "ab") as file:
            file.write(message.data)
        return None

    def close(self) -> None:
        self.stream.close()


def place_of(folder: Path, name: str) -> Path:
    """The place of the copy of a file of that name; RanksDiffer if the name leads out of the folder."""
    place = folder / name
    if ".." in place.parts or not place.is_relative_to(folder):  # a name may be absolute
        raise RanksDiffer(f"rank 0 brings {name!r}, which is no name below its run directory")
    return place


def _saved(saving: Saving, seq: int) -> wire.Saved:
    """The message about the end of the writing of a shard."""
    try:
        (entry,) = saving.entries().values()
    except (DiskFull, WriteFailed) as problem:
        return wire.Saved(seq=seq, problem=str(problem), full=isinstance(problem, DiskFull))
    return wire.Saved(seq=seq, entry=entry)


def _answer(trainer: Trainer, message: wire.ControlMessage) -> wire.ControlMessage | None:
    match message:
        case wire.Expect(work=work):
            trainer.scorer.expect(wire.samples_of(work))
        case wire.Micro(work=work, routes=routes):
            _micro(trainer, work, routes)
        case wire.Score(work=work, routes=routes, by=by):
            scores = trainer.scorer.at_once(wire.samples_of(work, routes), by)
            logprobs, entropies = (tensor.float().cpu().numpy().tobytes() for tensor in scores)
            return wire.Scored(logprobs=logprobs, entropies=entropies)
        case wire.Step():
            if (counted := trainer.tally.tokens) != message.tokens:
                raise RanksDiffer(f"counted {counted} tokens for this step, rank 0 planned {message.tokens}")
            return wire.Done(stats=asdict(trainer.update(message.lr, message.denominator, message.scale)))
        case wire.Gather(what="weight", name=name):
            trainer.gather_weight(name)
        case wire.Gather(what="adapter", name=name):
            sharded.gathered(trainer.adapter_weights()[name])
        case wire.Adopt(folder=folder):
            trainer.load_adapter(Path(folder))
            return wire.Done()
        case wire.Gather():
            trainer.state.gathered(keep=False)
        case wire.Restore(path=path, optimizer=optimizer):
            trainer.restore(Checkpoint(Path(path), 0, {}), optimizer)
            if trainer.value_head is not None and (head := Path(path) / value_head.FOLDER).is_dir():
                trainer.value_head.load(head, optimizer)
            return wire.Done()
    return None


def _micro(trainer: Trainer, work: wire.Work, routes: wire.SentRoutes | UnsetType) -> None:
    if not work.samples:
        trainer.idle(work.version)
        return
    before = None if work.proximal is None else [np.frombuffer(row, np.float32) for row in work.proximal]
    chosen = None if work.chosen is None else [np.frombuffer(row, np.bool_) for row in work.chosen]
    valued = None if work.valued is None else [
        Valued(*(np.frombuffer(field, np.float64) for field in row)) for row in work.valued
    ]
    samples = wire.samples_of(work, routes)
    trainer.micro_batch(samples, Advantages(work.advantages, work.weights, before, chosen, valued), work.version)
