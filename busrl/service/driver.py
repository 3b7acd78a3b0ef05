"""Executes the numbered requests of all models, each model's in their order, and answers each once.

Talks to the request log, the answer log, and to models and folders through `Operations`. Knows nothing of HTTP, of the
bus or of engines.

- A model's state is its newest whole folder and the requests behind that, run again in order. So a model whose memory
  is wanted for others, or that nobody asks anything, is parked: its state is written, and it begins from there.
- An answer is written once: one that was written stays, whatever running the request again gives. It is written before
  any state that holds its request; but that of a load after the state, since what it loaded may be another's soon.
- A save or a load that failed is not run again: what it lacked may be there by then. A request that succeeded and then
  fails costs its model: the weights are not those of which clients were told.
- A state is written after a step or a load alone, so never with half of the gradients.
- A request that two processes died of in a row is answered as a fault of the server, and not run again.
- Data of requests under way lie in memory: an owner begins no other request while its own hold `MOST_HELD_BYTES`.
- A turn is a request with its answer, or a part of one: the forward of a micro-batch, or its backward. It goes to the
  owner that was served least, and to that one's model that was served least, in seconds. Where one model has room
  alone, the one made first is served to its last request.
- What a forward keeps for its backward lies in memory: between the two come small steps alone, undivided, of models
  that are in memory, and only while the next one in the order is such a step. Where no other model is in memory, the
  two are one turn. Both count as one: an owner who waited through the forward is not owed less for the backward.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from busrl.errors import DiskFull
from busrl.service import folders
from busrl.service.figures import Course, Standing
from busrl.service.folders import ServiceFolders
from busrl.service.models import Models
from busrl.service.operations import Operations, Progress, Result, changes_weights, failure, named
from busrl.service.registry import SAVES, Model, Registry
from busrl.service.requests import Answer, LogReader, LogWriter, Place, Request
from busrl.service.upkeep import Upkeep, is_stripped
from busrl.system import files

BY_FOLDERS = (*SAVES, "load_weights")  # operations whose end depends on what others saved
DEATHS = 2  # of processes, in a row, after which a request is not run again
CREDIT_S = 2.0  # by which an owner may be behind the others: for so long the small steps of one go before large ones
MOST_HELD_BYTES = 1 << 29  # of bodies and data of an owner's requests under way
SMALL_TOKEN_BYTES = 64  # of a token of a small step, in the log
NOTE_BYTES = 1024  # of the file that names the request that is executed


@dataclass(frozen=True)
class Limits:
    """`sync`: an answer is durable before it is read; `resident_bytes`: of models in memory, but for a single one;
    `alone`: there is room for a single one, whatever its size."""

    sync: bool = True
    state_every_s: float = 60.0
    session_s: float = 1800.0
    resident_bytes: int = 1 << 62
    keep_answers_s: float = 86400.0
    snapshot_bytes: int = 1 << 62
    alone: bool = False
    small_tokens: int = 0  # of the data of a small step


@dataclass
class Line:
    """The requests of a model. `applied` is the last one executed in memory or in the newest state, `answered` the last
    one with an answer; `waiting` are the numbers beyond `applied`, `answers` those since the older state."""

    model: Model
    applied: int
    answered: int
    answers: dict[int, Answer]  # without their payloads
    state_at: int  # the number of its newest state; the one before its first request if there is none
    waiting: dict[int, Place] = field(default_factory=dict)
    chain: bytes = b""
    at: Progress = field(default_factory=Progress)
    request: Request | None = None  # of which a part was executed
    fresh: bool = True  # nothing was answered since it came into memory
    lost: str = ""  # why it cannot go on
    past: int = -1  # the number of its older state: up to it no request is run again
    memory_bytes: int = 0
    used_at: float = 0.0
    state_due: float = 0.0

    @property
    def ready(self) -> bool:
        """True if something that was not answered can be executed, after what is to be run again."""
        return self.answered + 1 in self.waiting and self.applied + 1 in self.waiting

    def take(self, number: int, place: Place) -> bool:
        """Take over a numbered request; True if it waits, to be run for the first time or again."""
        if number > self.applied:
            self.waiting[number] = place
        elif number <= self.past:
            del self.model.requests[number]
        return number > self.applied

    def is_small(self, most_tokens: int) -> bool:
        """True if its next request is a step, or a part of one of so few tokens and few targets of each."""
        asked = self.model.requests[self.applied + 1]
        if asked.op == "forward_backward":
            return 0 < asked.tokens <= most_tokens and asked.place.size <= most_tokens * SMALL_TOKEN_BYTES
        return asked.op == "optim_step"

    def go_back(self, number: int) -> None:
        """Continue behind that request: what was executed since waits to be run again."""
        requests = self.model.requests
        self.waiting |= {seq: requests[seq].place for seq in range(number + 1, self.applied + 1)}
        self.applied, self.state_at, self.request, self.fresh = number, number, None, True
        self.chain = self._chain_of(number)

    def forget_before(self, number: int) -> None:
        """Forget requests that are never run again, and the answers before the last one of these."""
        self.past = number
        self.answers = {seq: answer for seq, answer in self.answers.items() if seq >= number}
        self.model.forget_to(number)

    def give_up(self, why: str) -> None:
        """Answer nothing any more but why."""
        for seq in range(self.applied + 1, self.answered + 1):
            self.waiting.pop(seq, None)
        self.applied = self.state_at = self.answered
        self.chain, self.lost = self._chain_of(self.answered), why

    def _chain_of(self, number: int) -> bytes:
        return self.answers[number].chain if number >= self.model.first else b""


def may_hold(line: Line, loaded: Iterable[Line]) -> bool:
    """False for a model whose next request is not begun, while those of its owner hold as much as they may: they go on
    first."""
    others = (other for other in loaded if other.request and other.model.owner == line.model.owner)
    return line.request is not None or sum(other.at.held_bytes for other in others) < MOST_HELD_BYTES


class Turns:
    """The seconds for which owners were served, and each owner's models. Who comes new begins where the others are. Who
    comes back is owed what the others were served since, up to `CREDIT_S`: a step of a few turns waits for the turn
    under way alone, if there was none for a while."""

    def __init__(self) -> None:
        self._served: dict[tuple[str, str], float] = {}
        self._newest: defaultdict[str, float] = defaultdict(float)  # of a group: `served` as its last turn began

    def place(self, owner: str, model: str) -> tuple[float, float]:
        """The place in the order of turns: the least is next."""
        return self._at("", owner), self._at(owner, model)

    def took(self, owner: str, model: str, seconds: float) -> None:
        for group, name in (("", owner), (owner, model)):
            begin = self._at(group, name)
            self._newest[group] = max(self._newest[group], begin)
            self._served[group, name] = begin + seconds

    def took_more(self, owner: str, model: str, seconds: float) -> None:
        """Count more of the newest turn of a model: none begins by it."""
        for group, name in (("", owner), (owner, model)):
            self._served[group, name] = self._at(group, name) + seconds

    def _at(self, group: str, name: str) -> float:
        newest = self._newest[group]
        return max(self._served.get((group, name), newest), newest - CREDIT_S)


class Suspects:
    """The file that names the request that is executed, and how many processes in a row died of it. It is always as
    long: a full disk has room for it."""

    def __init__(self, path: Path) -> None:
        told = files.read_map(path)
        self._suspect = (told["id"], told["seq"]) if told else ("", 0)
        self._deaths = told["deaths"] + 1 if told else 0
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._note(told)

    def begin(self, request: Request) -> bool:
        """Note that a request is executed; False if so many processes died of it that it must not be."""
        deaths = self._deaths if self._suspect == (request.id, request.seq) else 0
        if deaths < DEATHS:
            self._note({"id": request.id, "seq": request.seq, "op": request.op, "deaths": deaths})
        return deaths < DEATHS

    def end(self) -> None:
        self._note({})

    def close(self) -> None:
        os.close(self._file)

    def _note(self, executed: dict[str, Any]) -> None:
        os.pwrite(self._file, json.dumps(executed).encode().ljust(NOTE_BYTES), 0)


class AnswerLog:
    """The log of answers, in which the newest one may not be yet. `note` is told where each was written; `written`: how
    many were."""

    def __init__(self, log: LogWriter, sync: bool, note: Callable[[Place], None]) -> None:
        self._log, self._sync, self._note = log, sync, note
        self.unwritten: Answer | None = None
        self.written = 0
        self.close = log.close

    def put(self, answer: Answer) -> None:
        """Take an answer, the ones before which are written."""
        self.unwritten = answer

    def write(self) -> None:
        """Write the newest answer, if it is not there. DiskFull: try again."""
        if self.unwritten is not None:
            self._note(self._log.write(self.unwritten))
            self.unwritten = None
            if self._sync:
                self._log.sync()
            self.written += 1


def answers_in(where: ServiceFolders) -> Iterator[tuple[Answer, Place]]:
    """The answers that the log has so far."""
    decode = msgspec.msgpack.Decoder(Answer).decode
    return ((decode(payload), place) for payload, place in LogReader(where.answers).read())


class Driver:
    """`advance` executes a turn. `course` is told of each request; `warn` takes lines for people."""

    def __init__(
        self, models: Models[Any], where: ServiceFolders, course: Course, warn: Callable[[str], None],
        limits: Limits = Limits(),
    ) -> None:
        self._where, self._course, self._warn, self._limits = where, course, warn, limits
        self.lines: dict[str, Line] = {}
        self._registry, self._turns = Registry(samples=False), Turns()
        self._asked: dict[str, Line] = {}  # models with a request that was not answered
        self._loaded: dict[str, Line] = {}
        self._read: defaultdict[str, dict[int, Answer]] = defaultdict(dict)  # answers of models without a line so far
        self._upkeep = Upkeep(where, self._registry, limits.keep_answers_s, limits.snapshot_bytes)
        snapshots = self._read_answers()
        self._operations = Operations(models, where, warn, snapshots)
        self.answers = AnswerLog(LogWriter(where.answers), limits.sync, self._upkeep.note_answer)
        self._log = LogReader(where.requests)
        self._decode_request = msgspec.msgpack.Decoder(Request).decode
        self._suspects = Suspects(where.executing)

    def follow(self) -> bool:
        """Take over what was logged since the last call; True if something was."""
        news = False
        for payload, place in self._log.read():
            news = True
            request = self._decode_request(payload)
            self._registry.add(request, place)
            self._upkeep.note(request, place)
            if request.kind == "model":
                self.lines[request.id] = self._line(self._registry.models[request.id])
            elif request.kind in ("training", "refused"):
                line = self.lines[request.id]
                if line.take(request.seq, place):
                    self._asked[request.id] = line
        return news

    @property
    def ready(self) -> list[Line]:
        """Models that `advance` can go on with."""
        return [line for line in self._asked.values() if line.ready]

    def advance(self) -> bool:
        """Execute a turn; False if nothing can be executed. DiskFull: the newest answer is not written yet."""
        self.flush()
        begun = time.monotonic()  # what makes room for a model is of its turn
        if (line := self._next()) is None:
            return False
        took = self._turns.took_more if line.at.halfway else self._turns.took
        self._turn(line)
        line.used_at = time.monotonic()
        took(line.model.owner, line.model.id, line.used_at - begun)
        return True

    def flush(self) -> None:
        """Write the newest answer, if it is not in the log yet, at the cost of its model. DiskFull: try again."""
        if (answer := self.answers.unwritten) is not None:
            begun, model = time.monotonic(), self.lines[answer.id].model
            self.answers.write()
            self._turns.took_more(model.owner, model.id, time.monotonic() - begun)

    def tend(self) -> None:
        """Park models that nobody asked anything for long, and drop what nobody needs. Cheap where nothing is due."""
        now = time.monotonic()
        for line in list(self._loaded.values()):
            ended = self._registry.sessions[line.model.session].ended
            if not line.ready and (ended or now - line.used_at > self._limits.session_s):
                self._park(line)
        self._upkeep.run()

    @property
    def standing(self) -> dict[str, Standing]:
        """Tell of each model how far it is, whether it is in memory, and what is run again as soon as there is time."""
        return {name: Standing(line.applied, name in self._loaded, line.answered - line.applied if line.ready else 0)
                for name, line in self.lines.items()}

    def write_states(self) -> None:
        """Write the state of each model that has changed and whose gradients are used up."""
        for line in self._loaded.values():
            self._write_state(line)

    def close(self) -> None:
        self.answers.close()
        self._suspects.close()

    # -- a start -----

    def _read_answers(self) -> int:
        """Read what was answered so far; returns the highest number of a snapshot."""
        snapshots = 0
        for answer, place in answers_in(self._where):
            if answer.payload:
                self._upkeep.note_answer(place)
            self._read[answer.id][answer.seq] = msgspec.structs.replace(answer, payload=b"")
            snapshots = max(snapshots, answer.weights)
        return snapshots

    def _line(self, model: Model) -> Line:
        """The line of a model from its newest state on."""
        answers, first = self._read.pop(model.id, {}), model.first - 1
        answered = max(answers, default=first)
        states = self._where.states_of(model.id)
        while states and states[-1][0] > answered:
            last, state = states.pop()
            aside = folders.set_aside(state)
            if last == answered + 1:  # of a load whose process died before the answer: it is run again
                shutil.rmtree(aside, ignore_errors=True)
                continue
            self._warn(f"{model.id}: a state holds what was not answered; it lies in {aside} now")
        line = Line(model, first, answered, answers, state_at=first)
        if states:
            line.applied = states[-1][0]
            line.go_back(line.applied)
            line.forget_before(states[0][0])
        return line

    # -- memory -----

    def _next(self) -> Line | None:
        """The model whose turn it is; one that is not in memory has room there."""
        if self._limits.alone:
            order = [line for line in self.lines.values() if line.ready]
        else:
            order = sorted(self.ready, key=lambda line: self._turns.place(line.model.owner, line.model.id))
        if halfway := next((line for line in self._loaded.values() if line.at.halfway), None):
            first = order[0]
            there = first.model.id in self._loaded and may_hold(first, self._loaded.values())
            return first if there and first.is_small(self._limits.small_tokens) else halfway
        return next((line for line in order if may_hold(line, self._loaded.values()) and self._has_room(line)), None)

    def _has_room(self, line: Line) -> bool:
        """Make room for a model; False if those in memory have to answer something first, so that all get on."""
        if line.model.id in self._loaded:
            return True
        line.memory_bytes = line.memory_bytes or self._operations.bytes_of(line.model)
        room = self._limits.resident_bytes - line.memory_bytes if not self._limits.alone else -1
        while self._loaded and sum(other.memory_bytes for other in self._loaded.values()) > room:
            idle = [other for other in self._loaded.values() if not other.ready or not (other.fresh or other.request)]
            if not idle:
                return False
            self._park(min(idle, key=lambda other: (other.ready, not other.at.whole, other.used_at)))
        return True

    def _park(self, line: Line) -> None:
        """Write a model's state and give up its memory; what is in no state is run again when it is wanted."""
        self._write_state(line)
        self._forget(line)

    def _forget(self, line: Line) -> None:
        self._operations.forget(line.model)
        if not line.lost:
            line.go_back(line.state_at)
        del self._loaded[line.model.id]

    def _choose_state(self, line: Line) -> None:
        """Begin a model from its newest whole state; damaged ones are set aside."""
        self._loaded[line.model.id] = line
        if line.lost:
            return
        model, damaged = line.model, False
        states = self._where.states_of(model.id)
        while states and (fault := folders.fault_of(states[-1][1])):
            last, folder = states.pop()
            aside, damaged = folders.set_aside(folder), True
            self._warn(f"{model.id}: its state after request {last} is damaged ({fault}), and lies in {aside} now; "
                       "it begins from the one before")
        if damaged:
            every = (answer for answer, _ in answers_in(self._where) if answer.id == model.id)
            line.answers = {answer.seq: msgspec.structs.replace(answer, payload=b"") for answer in every}
            logged = LogReader(self._where.requests).read()
            self._registry.recall(model, ((self._decode_request(payload), place) for payload, place in logged))
        line.go_back(states[-1][0] if states else model.first - 1)
        line.at = Progress(states[-1][1] if states else None)
        line.state_due = time.monotonic() + self._limits.state_every_s

    def _write_state(self, line: Line) -> None:
        line.state_due = time.monotonic() + self._limits.state_every_s
        unfinished = not line.at.whole or line.at.broken
        if unfinished or line.applied <= line.state_at or not self._operations.has(line.model):
            return
        try:
            self.answers.write()  # the answers that a state holds are in the log before it
            self._store(line)
        except DiskFull as problem:  # a death costs more time until there is room again
            self._warn(f"{line.model.id}: no state after request {line.applied}: {problem}")

    def _store(self, line: Line) -> None:
        """Write a state, whether the newest answer is written or not. DiskFull."""
        self._operations.write_state(line.model, line.applied, line.chain)
        line.state_at = line.applied
        line.forget_before(self._where.states_of(line.model.id)[0][0])

    # -- one request -----

    def _turn(self, line: Line) -> None:
        if line.model.id not in self._loaded:
            self._choose_state(line)
        request = line.request or self._next_request(line)
        earlier = line.answers.get(request.seq)
        if named(request) and request.seq > line.answered:
            self._write_state(line)
        begun = time.monotonic()
        result = self._result(line, request, earlier)
        self._course.took(request.id, time.monotonic() - begun)
        self._suspects.end()
        line.request = request if result is None else None
        if result is not None:
            self._end(line, request, result, earlier)

    def _next_request(self, line: Line) -> Request:
        record = self._log.payload(line.waiting[line.applied + 1])
        if not record or is_stripped(self._decode_request(record)):
            self._lose(line, "its states are damaged, and the data of requests before them was dropped")
            record = self._log.payload(line.waiting[line.applied + 1])
        return self._decode_request(record)

    def _result(self, line: Line, request: Request, earlier: Answer | None) -> Result | None:
        """Execute a request, or a part of it; None if there is more of it."""
        if line.lost:
            return failure("server", line.lost)
        fails_again = ("server", "user") if request.op in BY_FOLDERS else ("server",)
        if earlier is not None and earlier.state in fails_again:
            return self._operations.not_run(line.model, line.at, request, "failed before", earlier.state)
        if not self._suspects.begin(request):
            why = "killed the process that trains, twice"
            self._warn(f"{request.id}: request {request.seq} ({request.op}) {why}; it is not run again, and the "
                       "gradients of its step are dropped")
            return self._operations.not_run(line.model, line.at, request, why)
        done = earlier if earlier is not None and earlier.state == "done" else None
        others = [other for other in self._loaded.values() if other is not line]
        in_one = not others or any(other.at.halfway for other in others)
        return self._operations.run(line.model, line.at, request, done, in_one)

    def _lose(self, line: Line, why: str) -> None:
        line.give_up(f"{line.model.id} cannot go on: {why}; load saved weights into a new model")
        self._warn(line.lost)
        self._operations.forget(line.model)

    def _end(self, line: Line, request: Request, result: Result, earlier: Answer | None) -> None:
        """Take over the result of a whole request: as its answer, unless it has one."""
        line.chain = hashlib.blake2b(line.chain + request.digest + request.op.encode(), digest_size=16).digest()
        line.applied = request.seq
        del line.waiting[request.seq]
        self._course.executed(request, result.state == "done", result.figures)  # before a state has it
        if result.weights:
            self._upkeep.note_snapshot(result.weights)
        if request.seq > line.answered:
            stored = self._stored(line, request, result)
            self._answer(line, request, stored)
            if stored is not result:
                self._forget(line)
        elif earlier is not None and (earlier.chain != line.chain or earlier.state != result.state):
            differs = (f"request {request.seq} ({request.op}), run again, is {result.state}; the answer that clients "
                       f"have says {earlier.state}")
            if earlier.state == "done" != result.state and changes_weights(request):
                self._lose(line, differs)
            else:
                self._warn(f"{request.id}: {differs}")
        if request.op == "optim_step" and time.monotonic() >= line.state_due:
            self._write_state(line)

    def _stored(self, line: Line, request: Request, result: Result) -> Result:
        """The result of a request; that of a load when its state is written, or says that there is no room for it."""
        if request.op == "load_weights" and result.state == "done":
            try:
                self._store(line)
            except DiskFull as problem:
                self._warn(f"{request.id}: request {request.seq} ({request.op}) failed: {problem}")
                return failure("server", str(problem))
        return result

    def _answer(self, line: Line, request: Request, result: Result) -> None:
        answer = Answer(request.id, request.seq, request.digest, result.state, result.proto, result.payload, line.chain,
                        result.weights)
        line.answers[request.seq] = msgspec.structs.replace(answer, payload=b"")
        line.answered, line.fresh = request.seq, False
        self.answers.put(answer)
        if request.seq + 1 not in line.waiting:
            self._asked.pop(request.id, None)
