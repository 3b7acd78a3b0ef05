"""Chapter of a service in the page of `busrl report`: models and owners, their steps and losses, samples and waits.

Reads metrics.jsonl and the logs of requests and answers, without their bodies; writes nothing. Knows nothing of the
page: a chapter is titles, numbers and texts, which the page draws and escapes.

- During a run too: what is half written is not read yet. A log that is damaged says so, and the rest stands.
- A wait is a client's: from the moment its request was logged to its answer, for a step to the end of its execution.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import msgspec
import numpy as np

from busrl.errors import MachineError
from busrl.service.figures import KIND, ModelLine
from busrl.service.folders import ServiceFolders
from busrl.service.overview import short_name
from busrl.service.registry import RUN, session_of
from busrl.service.requests import LogReader
from busrl.status.words import duration, short
from busrl.system import files

DRAWN, LISTED = 6, 40  # models in a drawing; rows of a table
BINS = 60  # of the time of a service, for sums over it
SAVES = {"save_weights": "weights", "save_weights_for_sampler": "sampler weights", "save_weights_external": "peft"}
Name = tuple[str, int]  # model or sampler, and number
Kind = TypeVar("Kind", bound=msgspec.Struct)
Series = tuple[Sequence[float], Sequence[float]]  # across, and up


class Drawing(NamedTuple):
    title: str
    note: str
    across: str
    lines: dict[str, Series]


class Table(NamedTuple):
    """`kinds`: a letter per column, n for numbers and w for long text."""

    head: list[str]
    rows: list[list[str]]
    kinds: str


class Chapter(NamedTuple):
    title: str
    facts: dict[str, str]
    drawings: list[Drawing]
    tables: list[Table]


class Asked(msgspec.Struct):
    """A request without its body."""

    kind: str
    id: str
    seq: int = 0
    op: str = ""
    about: dict[str, Any] = {}
    at: float = 0.0
    tokens: int = 0


class Told(msgspec.Struct):
    """An answer without its payload."""

    id: str
    seq: int
    state: str
    at: float = 0.0
    tokens: int = 0


@dataclass
class OfModel:
    """Figures of a model. `parts`: its rank, and what it changes of the base."""

    owner: str
    parts: str
    lines: list[ModelLine] = field(default_factory=list)
    requests: int = 0
    failed: int = 0
    saves: Counter[str] = field(default_factory=Counter)


@dataclass
class OfOwner:
    """Figures of all that was made under a key. `waits`: for steps and for samples, in seconds, with their ends."""

    sessions: int = 0
    models: int = 0
    steps: int = 0
    trained: int = 0
    samples: int = 0
    drawn: int = 0
    failed: int = 0
    step_waits: list[tuple[float, float]] = field(default_factory=list)
    sample_waits: list[tuple[float, float]] = field(default_factory=list)


class Account:
    """Sums over the files of a service. `faults` of those that cannot be read."""

    def __init__(self, run_dir: Path) -> None:
        where = ServiceFolders(run_dir)
        self.faults: list[str] = []
        self.models: dict[str, OfModel] = {}
        self.owners: defaultdict[str, OfOwner] = defaultdict(OfOwner)
        self.operations: Counter[str] = Counter()
        self.samplers = 0
        self.drawn: list[tuple[float, int]] = []  # tokens of answers, by the time at which they were there
        self._owner_of: dict[str, str] = {}  # by session
        self._asked: dict[Name, float] = {}  # when it was logged, until it is answered
        self._steps: dict[Name, float] = {}  # when each optim_step was logged
        for asked in self._records(where.requests, Asked):
            self._ask(asked)
        for told in self._records(where.answers, Told):
            self._answer(told)
        for told in self._records(where.samples, Told):
            self._sample(told)
        for line in _lines(run_dir / "metrics.jsonl"):
            self._step(line)

    @property
    def open(self) -> int:
        """Requests without an answer."""
        return len(self._asked)

    # -- records -----

    def _records(self, log: Path, kind: type[Kind]) -> Iterator[Kind]:
        decode = msgspec.msgpack.Decoder(kind).decode
        try:
            for payload, _ in LogReader(log).read():
                yield decode(payload)
        except (MachineError, msgspec.MsgspecError, OSError) as problem:
            self.faults.append(f"{log.name}: {problem}")

    def _ask(self, asked: Asked) -> None:
        owner = self._owner_of.get(session_of(asked.id), RUN)
        if asked.kind == "session":
            self._owner_of[asked.id] = owner = asked.about.get("owner", RUN)
            self.owners[owner].sessions += 1
        elif asked.kind == "model":
            self.models[asked.id] = OfModel(owner, _parts(asked.about.get("adapter") or {}))
            self.owners[owner].models += 1
        elif asked.kind == "sampler" or asked.op == "save_weights_for_sampler":
            self.samplers += 1
        if asked.kind in ("training", "refused", "sample"):
            self._asked[asked.id, asked.seq] = asked.at
            self.operations[asked.op] += 1
            if asked.op == "optim_step":
                self._steps[asked.id, asked.seq] = asked.at
            if asked.kind == "sample":
                self.owners[owner].samples += asked.about.get("samples", 1)
            elif (model := self.models.get(asked.id)) is not None:
                model.requests += 1
                model.saves[SAVES.get(asked.op, "")] += asked.op in SAVES

    def _answer(self, told: Told) -> None:
        self._asked.pop((told.id, told.seq), None)
        if told.state != "done" and (model := self.models.get(told.id)) is not None:
            model.failed += 1
            self.owners[model.owner].failed += 1

    def _sample(self, told: Told) -> None:
        begun = self._asked.pop((told.id, told.seq), None)
        if begun is None:
            return
        owner = self.owners[self._owner_of.get(session_of(told.id), RUN)]
        owner.failed += told.state != "done"
        owner.drawn += told.tokens
        owner.sample_waits.append((told.at, told.at - begun))
        self.drawn.append((told.at, told.tokens))

    def _step(self, line: ModelLine) -> None:
        model = self.models.get(line.model)
        if model is None:
            return
        model.lines.append(line)
        owner = self.owners[model.owner]
        owner.steps, owner.trained = owner.steps + 1, owner.trained + line.tokens
        if begun := self._steps.get((line.model, line.number)):
            owner.step_waits.append((line.time, line.time - begun))


def _lines(metrics: Path) -> Iterator[ModelLine]:
    for row in files.json_lines(metrics):
        if row.get("kind") == KIND:
            with suppress(msgspec.ValidationError):  # another program's
                yield msgspec.convert(row, ModelLine)


def _parts(adapter: dict[str, Any]) -> str:
    named = [name for name in ("attn", "mlp", "unembed") if adapter.get(name)]
    return f"rank {adapter.get('rank', '?')}, {' '.join(named) or 'nothing'}"


# -- the chapter -----

def chapter(run_dir: str | Path) -> Chapter | None:
    """Tell what the service in a run directory did; None if no service ran there."""
    if not ServiceFolders(Path(run_dir)).root.is_dir():
        return None
    account = Account(Path(run_dir))
    return Chapter("Service", _facts(account), [*_drawings(account)], [_models(account), _owners(account)])


def _facts(account: Account) -> dict[str, str]:
    owners = account.owners.values()
    steps, samples = (_waits(waits) for waits in _all_waits(account))
    sessions = sum(owner.sessions for owner in owners)
    facts = {
        "made": f"{sessions} sessions, {len(account.models)} models, {account.samplers} samplers",
        "requests": ", ".join(f"{count} {op}" for op, count in sorted(account.operations.items())) or "none",
        "failed, open": f"{sum(owner.failed for owner in owners)}, {account.open}",
        "steps": f"{sum(owner.steps for owner in owners)}, of {short(sum(owner.trained for owner in owners))} tokens",
        "drawn": f"{sum(owner.samples for owner in owners)} samples were asked for; "
                 f"{short(sum(owner.drawn for owner in owners))} tokens",
        "wait for a step": steps, "wait for samples": samples,
    }
    return facts | ({"could not be read": "; ".join(account.faults)} if account.faults else {})


def _all_waits(account: Account) -> tuple[list[tuple[float, float]], list[tuple[float, float]]]:
    owners = account.owners.values()
    return ([wait for owner in owners for wait in owner.step_waits],
            [wait for owner in owners for wait in owner.sample_waits])


def _waits(waits: Sequence[tuple[float, float]]) -> str:
    """The median, the 95th of a hundred and the longest of some waits."""
    if not waits:
        return "–"
    median, late, longest = np.quantile([wait for _, wait in waits], (0.5, 0.95, 1.0)).tolist()
    return f"{_seconds(median)}; 95 of 100 within {_seconds(late)}; the longest {_seconds(longest)}"


def _seconds(wait: float) -> str:
    return f"{wait:.2g} s" if wait < 10 else duration(wait)


def _drawings(account: Account) -> Iterator[Drawing]:
    named = sorted(account.models.items(), key=lambda item: -sum(line.tokens for line in item[1].lines))[:DRAWN]
    lines = {short_name(name): model.lines for name, model in named if model.lines}

    def across_steps(title: str, note: str, of: Any) -> Drawing:
        return Drawing(title, note, "step of the model", {
            name: ([line.model_step for line in own], [of(line) for line in own]) for name, own in lines.items()})

    yield across_steps("Loss", "of a step, divided by its tokens", lambda line: line.loss / max(1, line.tokens))
    yield across_steps("Gradient norm", "before clipping", lambda line: np.nan if line.norm is None else line.norm)
    yield across_steps("Time of a step", "seconds of execution, without waits", lambda line: line.seconds)
    steps, samples = _all_waits(account)
    times = [at for at, _ in (*steps, *samples)]
    if not times:
        return
    begin, size = min(times), max(1.0, (max(times) - min(times)) / BINS)
    waits = {name: _binned(rows, begin, size) for name, rows in (("steps", steps), ("samples", samples)) if rows}
    yield Drawing("Waits of clients", "seconds, mean of all that ended", "minutes", {
        name: (minutes, means) for name, (minutes, _, means) in waits.items()})
    tokens = {"drawn": account.drawn, "trained": _trained(account)}
    rates = {name: _binned(rows, begin, size) for name, rows in tokens.items() if rows}
    yield Drawing("Tokens", "per second", "minutes", {
        name: (minutes, [total / size for total in totals]) for name, (minutes, totals, _) in rates.items()})


def _trained(account: Account) -> list[tuple[float, int]]:
    return [(line.time, line.tokens) for model in account.models.values() for line in model.lines]


def _binned(rows: Iterable[tuple[float, float]], begin: float, size: float) -> tuple[list[float], ...]:
    """Parts of a time of this size that have rows: their middles in minutes, sums and means of the rows' values."""
    bins: defaultdict[int, list[float]] = defaultdict(list)
    for at, value in rows:
        bins[int((at - begin) / size)].append(value)
    ordered = sorted(bins.items())
    return ([(number + 0.5) * size / 60 for number, _ in ordered], [sum(values) for _, values in ordered],
            [sum(values) / len(values) for _, values in ordered])


def _models(account: Account) -> Table:
    newest = [*account.models.items()][-LISTED:]
    rows = [
        [short_name(name), model.owner, model.parts, f"{len(model.lines)}",
         short(sum(line.tokens for line in model.lines)), _course(model.lines), f"{model.requests}",
         f"{model.failed}", ", ".join(f"{count} {kind}" for kind, count in model.saves.items() if count)]
        for name, model in newest
    ]
    rows += [[f"and {len(account.models) - LISTED} older ones", *[""] * 8]] if len(account.models) > LISTED else []
    head = ["model", "of", "adapter", "steps", "tokens", "loss of a token", "requests", "failed", "saved"]
    return Table(head, rows, "-wwnnwnnw")


def _course(lines: Sequence[ModelLine]) -> str:
    """The first and the newest loss of a token."""
    losses = [line.loss / max(1, line.tokens) for line in lines]
    return " → ".join(f"{loss:.3g}" for loss in (*losses[:1], *losses[1:][-1:]))


def _owners(account: Account) -> Table:
    rows = [
        [name, *map(str, (owner.sessions, owner.models, owner.steps)), short(owner.trained), f"{owner.samples}",
         short(owner.drawn), f"{owner.failed}", _waits(owner.step_waits), _waits(owner.sample_waits)]
        for name, owner in account.owners.items()
    ]
    head = ["key", "sessions", "models", "steps", "tokens trained", "samples", "tokens drawn", "failed",
            "wait for a step", "wait for samples"]
    return Table(head, rows, "-nnnnnnnww")
