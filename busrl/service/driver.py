"""Executes the numbered requests of all models, each model's in their order, and answers each once.

Talks to the request log, the answer log, saved folders, and the models as `Tenants`. Knows nothing of HTTP, of the bus
or of engines.

- A model's state is its newest whole folder and the requests behind that, run again in order.
- An answer is written once: one that a predecessor has written stays, whatever running the request again gives.
- A state is written after a step or a load alone, so never with half of the gradients.
- A step behind a part that failed is refused, and the other parts are dropped: half a gradient is never applied.
- A request that two processes died of in a row is answered as a fault of the server, and not run again.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from busrl.errors import DiskFull
from busrl.service import bodies, folders
from busrl.service.adapters import Adapter
from busrl.service.bodies import BadBody, LoadWeights, OptimStep, SaveWeights, SaveWeightsForSampler, read_body
from busrl.service.figures import Course
from busrl.service.folders import ServiceFolders
from busrl.service.registry import SAVES, Model, Registry, saved
from busrl.service.requests import Answer, LogReader, LogWriter, Place, Request
from busrl.service.sums import UserFault
from busrl.service.tenants import Adam, Tenants
from busrl.service.wire import read_forward_backward, write_forward_backward_result
from busrl.training.checkpoint import whole_directory

DEATHS = 2  # of processes, in a row, after which a request is not run again
NO_STATE = -1


@dataclass
class Line:
    """The requests of a model. `applied` is the last one executed; `waiting` are the numbers beyond it."""

    model: Model
    applied: int
    chain: bytes = b""
    waiting: dict[int, Place] = field(default_factory=dict)
    loaded: bool = False
    broken: str = ""  # why the next step is refused
    whole: bool = True  # there are no gradients since the last step
    state_at: int = NO_STATE  # the number of its newest state
    state_due: float = 0.0
    served_s: float = 0.0  # its turns: the model with the least is next

    @property
    def next_place(self) -> Place | None:
        return self.waiting.get(self.applied + 1)


@dataclass(frozen=True)
class Result:
    state: str
    payload: bytes
    proto: bool = False
    weights: int = 0
    figures: Mapping[str, float] = field(default_factory=dict)  # for the model's course


class Driver:
    """`advance` executes one request. `course` is told of each; `warn` takes lines for people."""

    def __init__(self, tenants: Tenants, where: ServiceFolders, course: Course, warn: Callable[[str], None],
                 sync: bool = True, state_every_s: float = 60.0) -> None:
        self._tenants, self._where, self._course = tenants, where, course
        self._warn, self._sync = warn, sync
        self._state_every_s = state_every_s
        self._registry, self.lines = Registry(), dict[str, Line]()
        self._answers, self._log = LogWriter(where.answers), LogReader(where.requests)
        self._answered: dict[tuple[str, int], Answer] = {}  # of a predecessor, without their payloads
        self._snapshots = 0  # the highest number
        self._turn_s = 0.0  # `served_s` at which the newest turn began
        self._decode_request = msgspec.msgpack.Decoder(Request).decode
        self._suspect, self._deaths = ("", 0), 0
        self._read_answers()
        self._read_executing()
        self._executing = os.open(where.executing, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def follow(self) -> bool:
        """Take over what was logged since the last call; True if something was."""
        news = False
        for payload, place in self._log.read():
            news = True
            request = self._decode_request(payload)
            self._registry.add(request, place)
            if request.kind == "model":
                self.lines[request.id] = self._line(self._registry.models[request.id])
            elif request.kind in ("training", "refused") and request.seq > self.lines[request.id].applied:
                self.lines[request.id].waiting[request.seq] = place
        return news

    @property
    def next_line(self) -> Line | None:
        """The model that was served least of those with a request that can be executed; None if there is none."""
        ready = (line for line in self.lines.values() if line.next_place is not None)
        return min(ready, key=lambda line: line.served_s, default=None)

    def advance(self) -> bool:
        """Execute the next request of the model that was served least; False if none can be."""
        if (line := self.next_line) is None:
            return False
        # A model that comes new, or comes back, begins where the others are: it owns no time that they were served.
        self._turn_s = line.served_s = max(line.served_s, self._turn_s)
        begun = time.monotonic()
        self._execute(line)
        line.served_s += time.monotonic() - begun
        return True

    @property
    def replays(self) -> int:
        """Requests that were answered before and still are to be run again."""
        waiting = ((line.model.id, number) for line in self.lines.values() for number in line.waiting)
        return sum(name in self._answered for name in waiting)

    def write_states(self) -> None:
        """Write the state of each model that has changed and whose gradients are used up."""
        for line in self.lines.values():
            self._write_state(line)

    def close(self) -> None:
        self._answers.close()
        os.close(self._executing)

    # -- a start -----

    def _read_answers(self) -> None:
        decode = msgspec.msgpack.Decoder(Answer).decode
        for payload, _ in LogReader(self._where.answers).read():
            answer = decode(payload)
            self._answered[answer.id, answer.seq] = msgspec.structs.replace(answer, payload=b"")
            self._snapshots = max(self._snapshots, answer.weights)

    def _read_executing(self) -> None:
        """Note what a predecessor was at when it died: it may have died of it."""
        try:
            found = json.loads(self._where.executing.read_bytes() or b"{}")
        except (FileNotFoundError, ValueError):
            return
        if found:
            self._suspect, self._deaths = (found["id"], found["seq"]), found["deaths"] + 1

    def _line(self, model: Model) -> Line:
        """The line of a model from its newest whole state on."""
        states = self._where.states_of(model.id)
        number, path = states[-1] if states else (model.first - 1, None)
        described = folders.about(path) if path else None
        chain = bytes.fromhex(described["chain"]) if described else b""
        return Line(model, number, chain, state_at=number if described else NO_STATE)

    def _load(self, line: Line) -> None:
        """Make the model, and bring it into its newest state."""
        self._tenants.create(line.model.id, Adapter(**msgspec.structs.asdict(line.model.adapter)))
        if line.state_at != NO_STATE:
            self._tenants.load_state(line.model.id, self._where.state(line.model.id, line.state_at), True)
        line.loaded, line.state_due = True, time.monotonic() + self._state_every_s

    # -- one request -----

    def _execute(self, line: Line) -> None:
        number, place = line.applied + 1, line.next_place
        assert place is not None
        request = self._decode_request(self._log.payload(place))
        begun = time.monotonic()
        earlier = self._answered.get((request.id, number))
        if (earlier is not None and earlier.state == "server") or self._killed_twice(request):
            result = self._given_up(line, request)
        else:
            result = self._tried(line, request)
        line.chain = hashlib.blake2b(line.chain + request.digest + request.op.encode(), digest_size=16).digest()
        self._write(request, result, line.chain, earlier)
        self._course.took(request.id, time.monotonic() - begun)
        self._course.executed(request, result.state == "done", result.figures)
        os.ftruncate(self._executing, 0)
        line.applied = number
        del line.waiting[number]
        # A path that was loaded from may be another's soon: that request must not be run again.
        due = time.monotonic() >= line.state_due or request.op == "load_weights"
        if due and line.whole and request.op in ("optim_step", "load_weights"):
            self._write_state(line)

    def _killed_twice(self, request: Request) -> bool:
        """Note that this request is begun; True if so many processes died of it that it must not be."""
        deaths = self._deaths if self._suspect == (request.id, request.seq) else 0
        if deaths < DEATHS:
            text = json.dumps({"id": request.id, "seq": request.seq, "op": request.op, "deaths": deaths}).encode()
            os.pwrite(self._executing, text, 0)
            os.ftruncate(self._executing, len(text))
        return deaths >= DEATHS

    def _given_up(self, line: Line, request: Request) -> Result:
        text = f"request {request.seq} ({request.op}) killed the process that trains, twice"
        self._warn(f"{request.id}: {text}; it is not run again, and the gradients of its step are dropped")
        self._break(line, text)
        if line.loaded:
            self._tenants.drop_gradients(request.id)
        return failure("server", text)

    def _tried(self, line: Line, request: Request) -> Result:
        """Run a request; no exception of one model ends the process."""
        try:
            if not line.loaded:
                self._load(line)
            if request.kind == "refused":
                raise UserFault(request.about["why"])
            result: Result = getattr(self, f"_{request.op}")(line, request)
            return result
        except (UserFault, BadBody) as problem:
            fault = failure("user", str(problem))
        except MemoryError as problem:
            fault = failure("server", f"out of memory: {problem}")
        except DiskFull as problem:
            self._warn(f"{request.id}: request {request.seq} ({request.op}) failed: {problem}")
            fault = failure("server", str(problem))
        except RuntimeError as problem:  # torch: a device without memory, a shape that nobody foresaw
            self._warn(f"{request.id}: request {request.seq} ({request.op}) failed: {problem}")
            fault = failure("server", f"{type(problem).__name__}: {problem}")
        if request.op == "forward_backward":
            self._break(line, f"request {request.seq} of this step failed: {json.loads(fault.payload)['error']}")
        return fault

    def _break(self, line: Line, why: str) -> None:
        line.broken = line.broken or why

    def _write(self, request: Request, result: Result, chain: bytes, earlier: Answer | None) -> None:
        """Append the answer, unless a predecessor did."""
        if earlier is not None:
            del self._answered[request.id, request.seq]
            if earlier.chain != chain or earlier.state != result.state:
                self._warn(f"{request.id}: request {request.seq} ({request.op}), run again, is {result.state}; the "
                           f"answer that clients have says {earlier.state}")
            return
        self._answers.write(Answer(request.id, request.seq, request.digest, result.state, result.proto, result.payload,
                                   chain, result.weights))
        if self._sync:
            self._answers.sync()

    def _write_state(self, line: Line) -> None:
        line.state_due = time.monotonic() + self._state_every_s
        if not line.loaded or not line.whole or line.broken or line.applied <= line.state_at:
            return
        model = line.model.id
        described = {"applied": line.applied, "chain": line.chain.hex()}
        try:
            write_folder(self._where.state(model, line.applied), described,
                         lambda folder: self._tenants.save_state(model, folder))
        except DiskFull as problem:  # a death costs more time until there is room again
            self._warn(f"{model}: no state after request {line.applied}: {problem}")
            return
        line.state_at = line.applied
        self._where.drop_old_states(model)

    def _earlier(self, request: Request) -> Answer | None:
        """The answer that a predecessor has written to this request, if it was done."""
        answer = self._answered.get((request.id, request.seq))
        return answer if answer is not None and answer.state == "done" else None

    # -- operations -----

    def _forward_backward(self, line: Line, request: Request) -> Result:
        asked = read_forward_backward(request.body)
        line.whole = line.whole and asked.forward_only
        outputs, metrics = self._tenants.forward_backward(
            request.id, asked.data, asked.loss_fn, asked.config, asked.forward_only)
        tokens = sum(len(output["logprobs"]) for output in outputs)
        figures = {} if asked.forward_only else {**metrics, "tokens": tokens}
        return Result("done", write_forward_backward_result(outputs, metrics), proto=True, figures=figures)

    def _optim_step(self, line: Line, request: Request) -> Result:
        line.whole = True
        if line.broken:
            why, line.broken = line.broken, ""
            if line.loaded:
                self._tenants.drop_gradients(request.id)
            raise UserFault(f"{why}; its gradients were dropped, nothing was changed")
        asked = read_body(OptimStep, request.body).adam_params
        assert asked is not None  # the door looked
        metrics = self._tenants.optim_step(request.id, Adam(**msgspec.structs.asdict(asked)))
        return Result("done", msgspec.json.encode({"metrics": metrics, "type": "optim_step"}), figures=metrics)

    def _save_weights(self, line: Line, request: Request) -> Result:
        def fill(folder: Any) -> None:
            self._tenants.save_state(request.id, folder)

        asked = read_body(SaveWeights, request.body)
        return self._saved(line, request, asked.path, asked.overwrite, 0, fill)

    def _save_weights_for_sampler(self, line: Line, request: Request) -> Result:
        asked = read_body(SaveWeightsForSampler, request.body)
        earlier = self._earlier(request)
        number = earlier.weights if earlier is not None else self._snapshots + 1
        if number and not (earlier and self._where.snapshot(number).exists()):
            write_folder(self._where.snapshot(number), {"by": by(request)},
                         lambda folder: self._tenants.snapshot(request.id, folder))
        self._snapshots = max(self._snapshots, number)
        if asked.path:
            return self._saved(line, request, asked.path, asked.overwrite, number, lambda folder: None)
        path = f"tinker://{request.id}/sampler_weights/ephemeral-{request.seq}"
        sampler = f"{line.model.session}:sample:{asked.sampling_session_seq_id}"
        told = {"path": path, "sampling_session_id": sampler, "type": request.op}
        return Result("done", msgspec.json.encode(told), weights=number)

    def _save_weights_external(self, line: Line, request: Request) -> Result:
        asked = read_body(bodies.SaveWeightsExternal, request.body)
        return self._saved(line, request, asked.path, False, 0,
                           lambda folder: self._tenants.snapshot(request.id, folder))

    def _saved(self, line: Line, request: Request, name: str, overwrite: bool, number: int,
               fill: Callable[[Any], None]) -> Result:
        """Save under a client's name; the same request run again finds its own."""
        path = f"tinker://{request.id}/{SAVES[request.op]}/{name}"
        folder, earlier = self._where.saved_as(request.id, SAVES[request.op], name), self._earlier(request)
        there = folders.about(folder)
        taken = earlier is None and there is not None and there["by"] != by(request)
        if taken and not overwrite:
            raise UserFault(f"{path} exists, and overwrite was not asked for")
        if earlier is None or there is None:  # else the folder may be of a later request
            adapter = msgspec.structs.asdict(line.model.adapter)
            write_folder(folder, {"by": by(request), "weights": number, "adapter": adapter}, fill)
        return Result("done", msgspec.json.encode({"path": path, "type": request.op}), weights=number)

    def _load_weights(self, line: Line, request: Request) -> Result:
        asked = read_body(LoadWeights, request.body)
        found = saved(asked.path)
        there = folders.about(self._where.saved_as(*found)) if found and found[1] == "weights" else None
        if there is None or found is None:
            raise UserFault(f"{asked.path} does not exist")
        self._tenants.drop_gradients(request.id)
        self._tenants.load_state(request.id, self._where.saved_as(*found), asked.optimizer)
        line.whole, line.broken = True, ""
        told = {"path": asked.path, "model_id": request.id, "type": request.op}
        return Result("done", msgspec.json.encode(told))


def write_folder(path: Path, about: dict[str, Any], fill: Callable[[Path], None]) -> None:
    """Make a folder with what `fill` puts there and a description, in the place of an older one. DiskFull."""
    with whole_directory(path) as folder:
        fill(folder)
        (folder / folders.META).write_text(json.dumps(about))


def by(request: Request) -> str:
    return f"{request.id}:{request.seq}"


def failure(state: str, text: str) -> Result:
    return Result(state, msgspec.json.encode({"error": text, "category": state}))
