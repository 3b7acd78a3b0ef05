"""The teachers of a run, made of its topology: each sample is asked of the teacher of its prompt's tag.

Called by the trainer of a learner, and by that of each of its ranks. Talks to the prompts of the run, whose tags it
reads, and to the teachers. Knows nothing of losses.

- The tag of a sample follows from the number of its draw and the prompts alone: a step that is trained again is taught
  by the same teachers.
- Endpoints are asked first, and answer while the models of this process compute.
- With several ranks each model of a teacher computes on all of them in every micro-batch, also for no sample: its
  layers are gathered from all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from busrl.data.figures import tag_of
from busrl.data.prompts import training_stream
from busrl.data.vocabulary import token_rows
from busrl.errors import UserError
from busrl.paths import RunPaths
from busrl.states import draw_of
from busrl.teachers.base import Best, InLearner, Pending, Taught, Teacher
from busrl.teachers.endpoint import Endpoint
from busrl.teachers.of_groups import Posted
from busrl.teachers.posted import Store
from busrl.topology import Topology
from busrl.topology.learner import TeacherRow
from busrl.training.batch import Flat, Sample
from busrl.training.scorer import NOTHING

TAGS_KEPT = 65536
AHEAD = 8  # micro-batches that endpoints are asked about early
TagOf = Callable[[int], str]  # of the group of a sample


class Teachers:
    """The function that the trainer calls: ids and log-probabilities for each generated token of some samples."""

    def __init__(
        self, rows: Sequence[tuple[str, Teacher]], tag_of_group: TagOf, chosen: Best | None, together: bool
    ) -> None:
        """`rows`: teachers by tag, which `tag_of_group` gives; "" for all other tags. `chosen`: gives the ids that they
        are asked about; None: each takes its own. `together`: all ranks compute each in every micro-batch."""
        self._rows, self._tag_of, self._chosen, self._together = dict(rows), tag_of_group, chosen, together

    def __call__(self, samples: Sequence[Sample], flat: Flat) -> Taught:
        ids = None if self._chosen is None else self._chosen(samples, flat)[0]
        parts = self._parts(samples)
        device, counts = flat.targets.device, [sample.generated for sample in samples]
        places = _places(counts)
        pending: list[tuple[Tensor, Pending]] = []
        for tag, teacher in sorted(self._rows.items(), key=lambda row: isinstance(row[1], InLearner)):
            part = parts.get(tag, [])
            rows = torch.cat([places[at] for at in part]) if part else torch.zeros(0, dtype=torch.int64)
            if part:
                asked = None if ids is None else ids[rows.to(device)]
                pending.append((rows, teacher.ask([samples[at] for at in part], asked)))
            elif self._together and isinstance(teacher, InLearner):
                pending.append((rows, teacher.ask([NOTHING], None if ids is None else ids[:1] * 0)))
        return _gathered([(rows, *answer()) for rows, answer in pending], sum(counts), device)

    @property
    def asks_ahead(self) -> bool:
        """True if any teacher answers from elsewhere, so that asking early saves time."""
        return any(isinstance(teacher, Endpoint) for teacher in self._rows.values())

    @property
    def ahead(self) -> int:
        """Number of micro-batches that are asked about early: none where answers have a number for every token."""
        return AHEAD if self._chosen is None else 0

    def wait_for(self, uids: Sequence[int], on_wait: Callable[[], None]) -> None:
        """Wait until endpoints have answered about samples that were expected; calls `on_wait` meanwhile."""
        for endpoint in self._rows.values():
            if isinstance(endpoint, Endpoint):
                endpoint.wait_for(uids, on_wait)

    def expect(self, samples: Sequence[Sample]) -> None:
        """Ask endpoints about samples that come soon, while others are trained."""
        for tag, part in self._parts(samples).items():
            if isinstance(endpoint := self._rows[tag], Endpoint):
                endpoint.expect([samples[at] for at in part])

    def _parts(self, samples: Sequence[Sample]) -> dict[str, list[int]]:
        """The positions of the samples of each teacher, by its tag. UserError for a tag without one."""
        parts: dict[str, list[int]] = {}
        for at, sample in enumerate(samples):
            tag = self._tag_of(sample.group) if set(self._rows) != {""} and sample is not NOTHING else ""
            name = tag if tag in self._rows else ""
            if name not in self._rows:
                if sample is NOTHING:
                    name = next(iter(self._rows))
                else:
                    raise UserError(
                        f"learner.teacher: the prompt of group {sample.group} has the tag {tag!r}, and no teacher has "
                        f'it; there are {", ".join(sorted(self._rows))}; add one with that tag, or with tag = "" for '
                        "all others"
                    )
            parts.setdefault(name, []).append(at)
        return parts


def _places(counts: Sequence[int]) -> list[Tensor]:
    """The rows of each sample in the flat order."""
    return list(torch.split(torch.arange(sum(counts)), list(counts)))


def _gathered(parts: Sequence[tuple[Tensor, Tensor, Tensor]], count: int, device: torch.device) -> Taught:
    """The rows of all teachers in the flat order."""
    width = min(ids.shape[1] for rows, ids, _ in parts if len(rows))
    ids = torch.zeros((count, width), dtype=torch.int64, device=device)
    logprobs = torch.zeros((count, width), dtype=torch.float32, device=device)
    for rows, some, measured in parts:
        if len(rows):
            ids[rows.to(device)] = some[:, :width].to(device)
            logprobs[rows.to(device)] = measured[:, :width].to(device, torch.float32)
    return ids, logprobs


# -- made of a topology -----


class TeacherMaker:
    """Makes the teachers of a topology, again for each trainer that a learner makes; endpoints are found once."""

    def __init__(self, topology: Topology, root: Path) -> None:
        """`root`: the run directory."""
        self._topology, self._root = topology, root
        self._endpoints: dict[int, Endpoint] = {}

    def __call__(
        self, read: Callable[[Path], Any], trained: Any, words: int, on_progress: Callable[[], None],
        together: bool = False,
    ) -> Teachers:
        """`read` gives the Forward of a folder's model, which is not trained; `trained` is that of the trained model,
        which takes `words` tokens."""
        topology, learner = self._topology, self._topology.learner
        rows = learner.teacher or (TeacherRow(path=topology.model.teacher),)
        count = min(learner.teacher_k, words, token_rows(Path(topology.model.path)).tokens)
        chosen = _best_of(trained, count, words) if learner.teacher_top == "student" else None

        def made(number: int, row: TeacherRow) -> Teacher:
            if row.posted:
                return Posted(Store(RunPaths.of(self._root).taught), count)
            if row.base_url:
                return self._endpoint(number, row, count, words, on_progress)
            way = read(Path(row.path))
            return InLearner(
                _best_of(way, count, words), lambda samples, flat: way.score(samples, flat)[0], trained.device)

        return Teachers([(row.tag, made(n, row)) for n, row in enumerate(rows)], _tags(topology), chosen, together)

    def _endpoint(
        self, number: int, row: TeacherRow, count: int, words: int, on_progress: Callable[[], None]
    ) -> Endpoint:
        if number not in self._endpoints:
            row = replace(row, concurrency=max(1, row.concurrency // self._topology.ranks))  # each rank asks for itself
            every = self._topology.learner.teacher_top == "student"
            self._endpoints[number] = Endpoint(row, self._topology.model.path, count, words, on_progress, every)
        return self._endpoints[number]


def _best_of(way: Any, count: int, words: int) -> Best:
    """The function that gives the most probable tokens of a Forward."""
    return lambda samples, flat: way.best(samples, flat, count, words)


def _tags(topology: Topology) -> TagOf:
    """The tag of the prompt of a group; the prompts are opened when the first is asked for."""
    @lru_cache(1)
    def opened() -> Any:
        return training_stream(topology)

    @lru_cache(TAGS_KEPT)
    def tag(group: int) -> str:
        stream = opened()
        record = stream.record(stream.item(draw_of(group, len(topology.seats))))
        return tag_of(record, topology.validation.tag_key)

    return tag
