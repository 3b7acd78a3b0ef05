"""Upkeep of a service's run directory: drops what no state, no client and no sampler needs any more.

Called by the driver with all that it reads and writes. Talks to the three logs and to the folders of snapshots. Knows
nothing of models in memory, of HTTP or of turns.

- Of the logs, whole segments that have a successor lose what is large in them: the data of requests that are in both
  states of their model, and of samples that were drawn; answers that are older than clients are promised. What is left
  of each record is enough for the audit and for a start.
- Snapshots without a name go when their session has ended; above a bound, the one sampled longest ago goes, but never
  the newest of its model, the newest that its samplers move on to, nor one that is being sampled.
- A snapshot whose name another one has by now goes when no sampler of a session that goes on draws with it.
"""

from __future__ import annotations

import itertools
import shutil
import time
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

import msgspec

from busrl.errors import MachineError
from busrl.service import folders
from busrl.service.folders import STATES_KEPT, ServiceFolders
from busrl.service.registry import SAVES, Registry
from busrl.service.requests import Answer, LogReader, Place, Request, segment_path, segments, strip

KIND = SAVES["save_weights_for_sampler"]
LARGE = ("forward_backward", "asample")  # operations whose bodies are dropped; a start reads the others
Name = tuple[str, int]  # model or sampler, and number


class Snapshot(NamedTuple):
    sampler: str
    bytes: int


class Upkeep:
    """`note...` take what the driver reads and writes; `run` drops at most one segment of each log at a time."""

    def __init__(
        self, where: ServiceFolders, registry: Registry, keep_answers_s: float, snapshot_bytes: int
    ) -> None:
        self._where, self._registry = where, registry
        self._keep_answers_s, self._snapshot_bytes = keep_answers_s, snapshot_bytes
        self._large = set[int]()  # segments of requests with something to drop
        self._trained: defaultdict[int, dict[str, int]] = defaultdict(dict)  # by segment: the last number of each model
        self._drawn: defaultdict[int, set[Name]] = defaultdict(set)  # by segment: samples that were not answered
        self._open: dict[Name, int] = {}  # segments of those
        self._answers, self._samples = set[int](), set[int]()  # segments with payloads
        self._sample_log, self._sampled = LogReader(where.samples), list[Name]()
        self._snapshots: dict[int, Snapshot] = {}
        self._named: dict[Path, int] = {}  # by the folder of a client's name
        self._replaced: dict[int, Name] = {}  # by the request that saved it
        self._count = itertools.count()
        self._used: dict[str, int] = {}  # samplers: the higher, the later they were used
        for number in where.numbers_of_snapshots():
            self.note_snapshot(number)

    # -- what there is -----

    def note(self, request: Request, place: Place) -> None:
        if request.kind in ("training", "refused"):
            numbers = self._trained[place.segment]
            numbers[request.id] = max(request.seq, numbers.get(request.id, 0))
        elif request.kind == "sample":
            self._used[request.id] = next(self._count)
            if request.body:
                self._drawn[place.segment].add((request.id, request.seq))
                self._open[request.id, request.seq] = place.segment
        if request.op in LARGE and request.body:
            self._large.add(place.segment)

    def note_answer(self, place: Place) -> None:
        self._answers.add(place.segment)

    def note_snapshot(self, number: int) -> None:
        path = self._where.snapshot(number)
        described = folders.about(path) or {}
        if sampler := described.get("sampler", ""):
            self._snapshots[number] = Snapshot(sampler, folders.bytes_of(path))
            self._used[sampler] = next(self._count)
        elif name := described.get("name"):
            model = described["by"].rpartition(":")[0]
            self._note_named(number, self._where.saved_as(model, KIND, name))

    def _note_named(self, number: int, folder: Path) -> None:
        """Note which snapshot has a name now, and which one had it: a save that was not done yet has none."""
        if not (now := (folders.about(folder) or {}).get("weights", 0)):
            return
        for other in {number, self._named.get(folder, number)}:
            if other < now and (described := folders.about(self._where.snapshot(other))):
                model, _, seq = described["by"].rpartition(":")
                self._replaced[other] = model, int(seq)
        self._named[folder] = now

    def _follow_samples(self) -> None:
        """Take over the samples that were answered by the last call: by now their requests were noted."""
        for name in self._sampled:
            if (segment := self._open.pop(name, None)) is not None:
                self._drawn[segment].discard(name)
        self._sampled.clear()
        decode = msgspec.msgpack.Decoder(Answer).decode
        for payload, place in self._sample_log.read():
            answer = decode(payload)
            self._sampled.append((answer.id, answer.seq))
            if answer.payload:
                self._samples.add(place.segment)

    # -- what goes -----

    def run(self) -> None:
        """Drop what is due. A disk without room for what is left of a segment keeps it whole."""
        self._follow_samples()
        self._drop_snapshots()
        self._drop_replaced()
        try:
            self._strip_requests()
            self._strip_answers(self._where.answers, self._answers)
            self._strip_answers(self._where.samples, self._samples)
        except MachineError:
            return

    def _strip_requests(self) -> None:
        for segment in sorted(self._large & set(segments(self._where.requests)[:-1])):
            # Records behind a dropped body change their place, so none of them may be wanted.
            trained = self._trained.get(segment, {})
            if not self._drawn.get(segment) and all(seq <= self._in_states(model) for model, seq in trained.items()):
                strip(self._where.requests, segment, Request, without_data)
                self._large.discard(segment)
                return

    def _in_states(self, model: str) -> int:
        """The number up to which no request of a model is ever run again; -1 if there is none."""
        numbers = [number for number, _ in self._where.states_of(model)]
        ended = self._registry.sessions[self._registry.models[model].session].ended
        kept = 1 if ended else STATES_KEPT
        return numbers[-kept] if len(numbers) >= kept else -1

    def _strip_answers(self, log: Path, with_payloads: set[int]) -> None:
        for segment in sorted(with_payloads & set(segments(log)[:-1])):
            if time.time() - segment_path(log, segment).stat().st_mtime > self._keep_answers_s:
                strip(log, segment, Answer, without_payload)
                with_payloads.discard(segment)
                return

    def _drop_snapshots(self) -> None:
        for number, snapshot in list(self._snapshots.items()):
            session = self._registry.sessions.get(snapshot.sampler.partition(":")[0])
            if session is not None and session.ended:
                self._drop_snapshot(number)
        beyond = sum(snapshot.bytes for snapshot in self._snapshots.values()) - self._snapshot_bytes
        for number in self._droppable() if beyond > 0 else ():
            beyond -= self._snapshots[number].bytes
            self._drop_snapshot(number)
            if beyond <= 0:
                return

    def _drop_replaced(self) -> None:
        """Drop snapshots without their name that no sampler of a session that goes on draws with."""
        samplers = self._registry.samplers.values() if self._replaced else ()
        used = {(each.model, each.seq) for each in samplers if not self._registry.session_of(each.id).ended}
        for number, saved_by in list(self._replaced.items()):
            if saved_by not in used:
                shutil.rmtree(self._where.snapshot(number), ignore_errors=True)
                del self._replaced[number]

    def _droppable(self) -> list[int]:
        """Snapshots that may go, the one used longest ago first."""
        sampling = {sampler for sampler, _ in self._open}
        newest = {self._line_of(snapshot): number for number, snapshot in sorted(self._snapshots.items())}
        free = (number for number, snapshot in self._snapshots.items() if snapshot.sampler not in sampling
                and (newest[self._line_of(snapshot)] != number or not self._line_of(snapshot)[0]))
        return sorted(free, key=lambda number: self._used[self._snapshots[number].sampler])

    def _line_of(self, snapshot: Snapshot) -> tuple[str, bool]:
        """The model, and whether samplers that were made before move on to this snapshot; no model where a power cut
        took the request that made its sampler."""
        sampler = self._registry.samplers.get(snapshot.sampler)
        return (sampler.model, sampler.inflight) if sampler else ("", False)

    def _drop_snapshot(self, number: int) -> None:
        shutil.rmtree(self._where.snapshot(number), ignore_errors=True)
        del self._snapshots[number]


def without_data(request: Request) -> Request:
    return msgspec.structs.replace(request, body=b"") if request.op in LARGE else request


def is_stripped(request: Request) -> bool:
    """True for a request whose data was dropped."""
    return request.op in LARGE and request.kind != "refused" and not request.body


def without_payload(answer: Answer) -> Answer:
    return msgspec.structs.replace(answer, payload=b"")
