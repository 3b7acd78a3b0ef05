"""The figures of a service for people, as its processes tell them: of models by the tuner, of clients by the door.

The driver tells `Course` what it executed, the desk tells `Census` what was asked and answered. Each shows its figures
in a file of RUN_DIR/service, which `overview` reads. Knows nothing of HTTP or tensors.

- A step has one line in metrics.jsonl, before any state has the step: a tuner that runs requests again finds the line.
- The two files are for people: they change once a second at most, and a full disk leaves the old ones.
- They list the newest things and count the others: their size has a bound, however long a service has run.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from busrl.errors import MachineError
from busrl.service.folders import ServiceFolders
from busrl.service.registry import Registry
from busrl.service.requests import Answer, Request
from busrl.system import files

KIND = "model"  # of a line of metrics.jsonl: it is no step of the run
SHOW_S = 1.0
LISTED = 256  # sessions, models and samplers in a file
Figures = Mapping[str, float]


class Shown:
    """A file for people, replaced when `due`."""

    def __init__(self, path: Path) -> None:
        self._path, self._next, self._changed = path, 0.0, True

    def change(self) -> None:
        """Note that there is something new to show."""
        self._changed = True

    @property
    def due(self) -> bool:
        return self._changed and time.monotonic() >= self._next

    def show(self, value: Mapping[str, Any]) -> None:
        files.show(self._path, {"time": time.time(), **value})
        self._changed, self._next = False, time.monotonic() + SHOW_S


# -- the tuner: what was executed -----


class ModelCourse(msgspec.Struct):
    """Figures of a model: its steps so far, the sums since the newest one, and that step's own."""

    applied: int = 0
    steps: int = 0
    tokens: int = 0  # of all steps
    loss: float | None = None  # the sum over the newest step's data, as the interface has losses
    norm: float | None = None
    line: int = 0  # the number of the newest step that has a line
    new_tokens: int = 0
    new_loss: float = 0.0
    new_seconds: float = 0.0
    request_seconds: float = 0.0  # of a request that is not executed to its end

    def begin_step(self) -> None:
        self.new_tokens, self.new_loss, self.new_seconds = 0, 0.0, 0.0


class Standing(NamedTuple):
    """The last request that a model has applied, whether the model is in memory, or parked, and how many of its
    requests were answered before and are run again."""

    applied: int
    in_memory: bool
    replays: int = 0


class ModelLine(msgspec.Struct):
    """A line of metrics.jsonl: a step of a model. `number`: of its optim_step; `seconds`: of execution, without
    waits; `tokens_in_all`: of all steps up to this one."""

    model: str
    number: int
    model_step: int
    time: float
    tokens: int
    loss: float
    norm: float | None
    seconds: float
    tokens_in_all: int
    kind: str = KIND


class Course:
    """Figures of all models. `keep`: the most bytes of metrics.jsonl, 0 for no bound; `warn` takes lines for people."""

    def __init__(self, metrics: Path, where: ServiceFolders, warn: Callable[[str], None], keep: int = 0) -> None:
        self._models: dict[str, ModelCourse] = {}
        self._lines, self._warn = files.LineFile(metrics, keep=keep), warn
        self._shown = Shown(where.models_shown)
        for row in files.json_lines(metrics):
            if row.get("kind") == KIND:
                with suppress(msgspec.ValidationError):  # another program's
                    self._read(msgspec.convert(row, ModelLine))

    def took(self, name: str, seconds: float) -> None:
        """Note that a model's newest request, or a part of it, was executed for so long."""
        self._models.setdefault(name, ModelCourse()).request_seconds += seconds

    def executed(self, request: Request, done: bool, figures: Figures) -> None:
        """Take over a request that was executed, also if it was run again. `figures`: of its answer."""
        self._shown.change()
        model = self._models.setdefault(request.id, ModelCourse())
        if request.seq != model.applied + 1:  # from a state on, which stands behind a step
            model.begin_step()
        model.applied = request.seq
        model.new_seconds, model.request_seconds = model.new_seconds + model.request_seconds, 0.0
        model.new_tokens += int(figures.get("tokens", 0))
        model.new_loss += figures.get("loss:sum", 0.0)
        if request.op == "optim_step" and done and request.seq > model.line:
            self._stepped(request, model, figures.get("unclipped_grad_l2:mean"))
        if request.op in ("optim_step", "load_weights"):
            model.begin_step()

    @property
    def due(self) -> bool:
        return self._shown.due

    def show(self, standing: Mapping[str, Standing]) -> None:
        """Show the figures. `standing`: of all models."""
        newest = sorted(standing, key=lambda name: self._models.get(name, ModelCourse()).line)[-LISTED:]
        models = {name: self._figures(name, standing[name]) for name in newest}
        self._shown.show({"replays": sum(model.replays for model in standing.values()), "models": models})

    def close(self) -> None:
        self._lines.close()

    def _read(self, line: ModelLine) -> None:
        model = self._models.setdefault(line.model, ModelCourse())
        model.line, model.steps, model.tokens = line.number, line.model_step, line.tokens_in_all
        model.loss, model.norm = line.loss, line.norm

    def _stepped(self, request: Request, model: ModelCourse, norm: float | None) -> None:
        line = ModelLine(
            request.id, request.seq, model.steps + 1, time.time(), model.new_tokens, model.new_loss, norm,
            round(model.new_seconds, 6), model.tokens + model.new_tokens)
        try:
            self._lines.append(msgspec.json.encode(line))
        except MachineError as problem:  # the step is made all the same
            self._warn(f"{request.id}: no line of its step {line.model_step} in metrics.jsonl: {problem}")
        self._read(line)

    def _figures(self, name: str, standing: Standing) -> dict[str, Any]:
        model = self._models.get(name, ModelCourse())
        figures = {key: getattr(model, key) for key in ("steps", "tokens", "loss", "norm")}
        return {"applied": standing.applied, **figures, "parked": standing.applied > 0 and not standing.in_memory}


# -- the door: what was asked and answered -----


class Waiting(NamedTuple):
    since: float
    size: int


class Census:
    """Sessions, models and samplers of a door: when each was heard, how far it is, what waits."""

    def __init__(self, where: ServiceFolders) -> None:
        shown = files.read_map(where.clients_shown)
        before = files.as_map(shown.get("sessions"))
        self._heard: dict[str, float] = {name: session["heard"] for name, session in before.items()}
        ended = shown.get("time", 0.0)  # of the process before this one
        self._silent_s = {name: ended - heard for name, heard in self._heard.items()}  # at that time
        self._heard_here: dict[str, float] = {}  # by the clock that nobody sets
        self._begun = time.monotonic()
        self._there: Counter[str] = Counter()  # clients that wait for an answer, by session
        self._logged: Counter[str] = Counter()  # of a model the highest number, of a sampler how many
        self._answered: Counter[str] = Counter()
        self._weights: dict[str, int] = {}  # of a sampler: the snapshot of its newest answer
        self._open: dict[tuple[str, int], Waiting] = {}
        self._shown = Shown(where.clients_shown)

    def heard(self, session: str) -> None:
        """Note that a client is there."""
        self._heard[session], self._heard_here[session] = time.time(), time.monotonic()
        self._shown.change()

    @contextmanager
    def there(self, session: str) -> Iterator[None]:
        """Note that a client waits for an answer meanwhile."""
        self.heard(session)
        self._there[session] += 1
        try:
            yield
        finally:
            self._there[session] -= 1
            self.heard(session)

    def silent_s(self, session: str, most_before_s: float = float("inf")) -> float:
        """For how long no client of the session was there, to this process: before it none could be. One that had been
        silent for `most_before_s` when the process before it ended has been so ever since."""
        if self._there[session]:
            return 0.0
        before_s = self._silent_s.get(session, 0.0) if session not in self._heard_here else 0.0
        silence = time.monotonic() - self._heard_here.get(session, self._begun)
        return silence if before_s < most_before_s else silence + before_s

    def logged(self, request: Request) -> None:
        if request.kind not in ("training", "refused", "sample"):
            return
        self._count(self._logged, request.kind == "sample", request.id, request.seq)
        self._open[request.id, request.seq] = Waiting(time.time(), len(request.body))

    def answered(self, answer: Answer) -> None:
        waited, samples = self._open.pop((answer.id, answer.seq), None), ":sample:" in answer.id
        if waited is not None or not samples:
            self._count(self._answered, samples, answer.id, answer.seq)
            self._weights[answer.id] = answer.weights

    @property
    def due(self) -> bool:
        return self._shown.due

    def show(self, registry: Registry, aside: Collection[tuple[str, int]] = ()) -> None:
        """Show the figures of what the registry has. `aside`: requests for samples that wait for their clients."""
        waits = {True: self._waits(registry.samplers, aside), False: self._waits(registry.models)}
        open_sessions = [name for name, session in registry.sessions.items() if not session.ended]
        newest = sorted(open_sessions, key=lambda name: self._heard.get(name, 0.0))[-LISTED:]
        self._shown.show({
            "sessions": {name: {"heard": self._heard.get(name, 0.0), "owner": registry.sessions[name].owner}
                         for name in newest},
            "models": {name: self._row(name, waits[False]) | {"owner": registry.models[name].owner}
                       for name in list(registry.models)[-LISTED:]},
            "samplers": {name: self._row(name, waits[True]) | {"path": registry.samplers[name].path,
                         "weights": self._weights.get(name, 0)} for name in list(registry.samplers)[-LISTED:]},
            "counts": {"sessions": len(open_sessions), "models": len(registry.models),
                       "samplers": len(registry.samplers)},
            "queue": total(waits[False].values()), "samples": total(waits[True].values()), "aside": len(aside),
        })

    # -- internals -----

    def _count(self, counts: Counter[str], samples: bool, name: str, seq: int) -> None:
        self._shown.change()
        counts[name] = counts[name] + 1 if samples else max(counts[name], seq)

    def _waits(self, names: Mapping[str, Any], aside: Collection[tuple[str, int]] = ()) -> dict[str, dict[str, Any]]:
        """Sum up for each model or sampler what waits: requests, bytes, and since when the first does."""
        waits: dict[str, dict[str, Any]] = {}
        for (name, seq), waiting in self._open.items():
            if name in names and (name, seq) not in aside:
                row = waits.setdefault(name, {"waiting": 0, "bytes": 0, "since": waiting.since})
                row["waiting"] += 1
                row["bytes"] += waiting.size
        return waits

    def _row(self, name: str, waits: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
        return {"logged": self._logged[name], "answered": self._answered[name],
                **waits.get(name, {"waiting": 0, "bytes": 0, "since": None})}


def total(rows: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    rows = list(rows)
    return {"waiting": sum(row["waiting"] for row in rows), "bytes": sum(row["bytes"] for row in rows),
            "since": min((row["since"] for row in rows), default=None)}
