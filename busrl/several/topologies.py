"""Reads `[[model]]`: the topology of a tag is the file with that row as its [model], loaded and checked as any other.

Splits the source of a file by tags, has the core load each part, and puts the results into one topology, the lead's.
Knows nothing of what a key means but for those that make a tag.

- Every rule of a run with one model holds for each tag by itself, and its place in the file is right: lines go along.
- Beside the lead a tag has no prompts, rewards or validation of its own; one that only serves has no learner either.
- All problems of all tags come in one TopologyError, each once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from busrl.capabilities import CALLER_ROLES, MODEL_ROLES, ROLES
from busrl.errors import Problem, TopologyError
from busrl.preflight.load import of_one_model, problem_of
from busrl.several.rules import ENGINE_OF_SEVERAL, MOST_TAGS, Shared, findings_of_run, findings_of_shared
from busrl.several.seat_rules import NAME, NAME_RULE
from busrl.topology.declare import items
from busrl.topology.models import ONLY_SEAT
from busrl.topology.reader import SECTIONS, KeyPath, Reader, Source, show
from busrl.topology.schema import Own, Tag, Topology
from busrl.topology.sizes import call_ring, sized

OVERRIDDEN = ("learner", "lora", "weights", "generation", "vllm")  # tables that a row may have for its tag alone
OF_TRAINING = ("learner", "lora", "weights")
OF_ROW = ("tag", "trained", "max_steps", "follow")
# Tables of the lead, or of what only a trained tag does.
OF_LEAD = ("validation", "sinks", "simulate", "faults", "experiments")
NOT_SERVING = (*OF_LEAD, *OF_TRAINING, "reward", "scheduler", "segments")
SMALLEST = 256  # bytes of the one slot of a tag that only serves


def topology(
    source: Source, overrides: Sequence[str], *, simulated: bool = False, run_dir: Path | None = None
) -> Topology:
    """The lead's topology with those of the other tags in `models`, or a TopologyError with every problem."""
    rows, problems = _rows(source)
    if problems:
        raise TopologyError(sorted(problems, key=source.order))
    lead = next(row for row in rows if row.tag.trained)
    shared, loaded = _tags_of_shared(source, rows, lead), dict[str, Topology]()
    for row in (lead, *(row for row in rows if row is not lead)):
        part = _part(source, row, lead, loaded.get(lead.tag.tag))
        try:
            mine = of_one_model(part, overrides, simulated=simulated, run_dir=run_dir)
            loaded[row.tag.tag] = _with_shared(mine, row.tag.tag, _processes(source, row, lead)[1], shared)
        except TopologyError as error:
            problems += error.problems
        if simulated:
            break
    if not problems:
        whole = _whole(rows, lead, loaded)
        listed = _shared_entries(source, shared)
        together = [] if simulated else [*findings_of_run(whole), *findings_of_shared(whole, listed)]
        placed = [(finding, problem_of(source, whole, finding)) for finding in together]
        problems += [problem for finding, problem in placed if not finding.warning]
        warned = [str(problem) for finding, problem in placed if finding.warning]
    if problems:
        once = {(problem.place, problem.rule): problem for problem in reversed(problems)}
        raise TopologyError(sorted(once.values(), key=source.order))
    warnings = dict.fromkeys((*(text for each in loaded.values() for text in each.derived.warnings), *warned))
    return dataclasses.replace(whole, derived=dataclasses.replace(whole.derived, warnings=tuple(warnings)))


# -- rows -----


@dataclass(frozen=True)
class Row:
    """A [[model]]: its place among them, and its keys that make a tag."""

    at: int
    tag: Tag


def _rows(source: Source) -> tuple[list[Row], list[Problem]]:
    """The rows of a file, and what is wrong with them as tags."""
    reader, rows = Reader(source), list[Row]()
    for at, data in enumerate(source.data["model"]):
        picked = {key: data[key] for key in OF_ROW if key in data} if isinstance(data, dict) else data
        rows.append(Row(at, reader.table(Tag, picked, ("model", at))))
        follows = rows[-1].tag.follow.model
        if follows:
            rows[-1] = Row(at, dataclasses.replace(rows[-1].tag, trained=False))
    return rows, [*reader.problems, *_faults(source, rows), *_faults_of_processes(source, rows)]


def _faults(source: Source, rows: Sequence[Row]) -> Iterator[Problem]:
    trained = {row.tag.tag for row in rows if row.tag.trained}
    for row in rows:
        yield from _faults_of_name(source, rows, row)
        yield from _faults_of_tables(source, row)
        yield from _faults_of_serving(source, row)
        if (follows := row.tag.follow.model) and follows not in trained:
            rule = "a model cannot follow itself" if follows == row.tag.tag else "it follows a trained [[model]]"
            others = ", ".join(sorted(trained)) or "none"
            yield _fault(source, row, "follow.model", rule, f"there are {others}")
    place = source.place(("model", 0))
    if not trained:
        yield Problem(place, "", "no [[model]] is trained", "leave trained = false out of one of them")
    if len(rows) > MOST_TAGS:
        yield Problem(place, f"{len(rows)} models", f"at most {MOST_TAGS} in one run", "start another run for others")


def _fault(source: Source, row: Row, key: str, rule: str, remedy: str) -> Problem:
    value = source.data["model"][row.at]
    for part in key.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return Problem(source.place(("model", row.at, *key.split("."))), f"{key} = {show(value)}", rule, remedy)


def _faults_of_name(source: Source, rows: Sequence[Row], row: Row) -> Iterator[Problem]:
    tag, tags = row.tag.tag, [other.tag.tag for other in rows]
    if tag and not NAME.fullmatch(tag):
        yield _fault(source, row, "tag", f"expected {NAME_RULE}", "it is the name of a folder and of processes")
    elif tag in ROLES or tag == ONLY_SEAT:
        what = "a role" if tag in ROLES else "the seat of a plain [model]"
        yield _fault(source, row, "tag", f"this is the name of {what}", "choose another")
    elif tag and tags.index(tag) != row.at:
        yield _fault(source, row, "tag", "two models of one name", "name each once")


def _faults_of_tables(source: Source, row: Row) -> Iterator[Problem]:
    data = source.data["model"][row.at]
    for name in data if isinstance(data, dict) else ():
        if name in SECTIONS and name not in (*OVERRIDDEN, "model"):
            yield _fault(source, row, name, f"[{name}] is the run's, the same for all models", f"write [{name}]")
        elif name in OF_TRAINING and not row.tag.trained:
            yield _fault(source, row, name, "a model that only serves has no learner", f"remove [model.{name}]")


def _faults_of_serving(source: Source, row: Row) -> Iterator[Problem]:
    """Report keys of a row that would do nothing."""
    data = source.data["model"][row.at]
    written = data if isinstance(data, dict) else {}
    if "max_steps" in written and not row.tag.trained:
        yield _fault(source, row, "max_steps", "a model that only serves makes no steps", "remove it")
    if written.get("trained") is True and row.tag.follow.model:
        yield _fault(source, row, "trained", "a model that follows another is not trained", "remove this, or follow")
    if isinstance(written.get("follow"), dict) and not row.tag.follow.model:
        yield _fault(source, row, "follow", "it names no model to follow", 'follow = { model = "TAG" }, or remove it')


def _faults_of_processes(source: Source, rows: Sequence[Row]) -> Iterator[Problem]:
    """Report entries of [[process]] whose `model` is none, or that cannot have one."""
    tags, frozen = [row.tag.tag for row in rows], {row.tag.tag for row in rows if not row.tag.trained}
    for at, entry in enumerate(_entries(source)):
        if not isinstance(entry, dict) or (tag := entry.get("model", "")) == "":
            continue
        place, shown = source.place(("process", at, "model")), f"process.{at}.model = {show(tag)}"
        if isinstance(tag, list):
            yield from _faults_of_shared(entry, tags, frozen, Problem(place, shown, "", ""))
        elif tag not in tags:
            yield Problem(place, shown, "no [[model]] has this tag", f"there are {', '.join(tags)}")
        elif entry.get("role") not in MODEL_ROLES:
            yield Problem(place, shown, f"only {' and '.join(MODEL_ROLES)} are of one model", "remove it")
        elif entry.get("role") == "learner" and tag in frozen:
            yield Problem(place, shown, "a model that only serves has no learner", "remove this entry")


def _faults_of_shared(
    entry: Mapping[str, Any], tags: Sequence[str], frozen: Container[str], at: Problem
) -> Iterator[Problem]:
    """Report what is wrong with the list of tags of a process; `at` has its place."""
    named, role = entry["model"], entry.get("role")
    if wrong := [tag for tag in named if tag not in tags]:
        rule, remedy = f"no [[model]] has the tag {show(wrong[0])}", f"there are {', '.join(tags)}"
    elif len({*named}) < max(2, len(named)):
        rule, remedy = "a list has two tags or more, each once", "a single tag is written without brackets"
    elif role not in MODEL_ROLES:
        rule, remedy = f"only {' and '.join(MODEL_ROLES)} are of one model", "remove it"
    elif role == "learner" and (served := [tag for tag in named if tag in frozen]):
        rule, remedy = f"{served[0]} only serves, and has no learner", "leave it out"
    elif role == "rollout" and (engine := entry.get("engine", "torch")) != ENGINE_OF_SEVERAL:
        rule = f"engine = {show(engine)} has one model"
        remedy = f'engine = "{ENGINE_OF_SEVERAL}", or an entry for each tag'
    else:
        return
    yield dataclasses.replace(at, rule=rule, remedy=remedy)


def _entries(source: Source) -> list[Any]:
    entries = source.data.get("process", [])
    return entries if isinstance(entries, list) else []


# -- the file of one tag -----


def _part(source: Source, row: Row, lead: Row, led: Topology | None) -> Source:
    """The source as that of a run of this model alone. `led`: the lead's topology, which has its prompts already."""
    own = source.data["model"][row.at]
    data = {name: table for name, table in source.data.items() if name not in ("model", "process")}
    dropped = () if row is lead else OF_LEAD if row.tag.trained else NOT_SERVING
    data = {name: table for name, table in data.items() if name not in dropped}
    if not row.tag.trained:
        data["learner"] = {"lr": 1.0}
    if row is not lead and led is not None and led.data.source and isinstance(data.get("data"), dict):
        data["data"] = {**data["data"], "train": led.data.train}
        del data["data"]["source"]
    for name in OVERRIDDEN:
        if name in own:
            data[name] = _merged(data.get(name, {}), own[name])
    data["model"] = {key: value for key, value in own.items() if key not in (*OF_ROW, *OVERRIDDEN)}
    if "path" not in data["model"] and (path := _followed_path(source, row)):
        data["model"]["path"] = path
    data["process"], numbers = _processes(source, row, lead)
    return dataclasses.replace(
        source, data=data, lines=_of_row(source.lines, row, numbers),
        overridden=_of_row(source.overridden, row, numbers),
    )


def _followed_path(source: Source, row: Row) -> Any:
    """The model folder of the tag that this one follows, with which it begins; None if it follows none."""
    rows = source.data["model"]
    follows = row.tag.follow.model
    return next((other.get("path") for other in rows if follows and other.get("tag") == follows), None)


def _merged(below: Any, above: Any) -> Any:
    if not isinstance(below, dict) or not isinstance(above, dict):
        return above
    return {**below, **{name: _merged(below[name], value) if name in below else value for name, value in above.items()}}


def _processes(source: Source, row: Row, lead: Row) -> tuple[list[Any], dict[int, int]]:
    """The entries of this tag, and the numbers that they have by those in the file. Beside the lead those that play
    episodes are one entry, which says that there are some: what they play is looked at once."""
    kept, numbers, players = list[Any](), dict[int, int](), 0
    for at, entry in enumerate(_entries(source)):
        plain = isinstance(entry, dict)
        role, model = (entry.get("role"), entry.get("model") or lead.tag.tag) if plain else ("", lead.tag.tag)
        if row.tag.tag in (model if isinstance(model, list) else [model]) if role in MODEL_ROLES else row is lead:
            numbers[at] = len(kept)
            kept.append({key: value for key, value in entry.items() if key != "model"} if plain else entry)
        elif role in CALLER_ROLES:
            players += entry.get("count", 1) if isinstance(entry.get("count", 1), int) else 1
    return [*kept, *([{"role": "serve", "count": players}] if players else [])], numbers


def _tags_of_shared(source: Source, rows: Sequence[Row], lead: Row) -> dict[int, tuple[str, ...]]:
    """The tags of each process that has several, by its place in the file: first the lead, or the first of them, to
    which the process belongs."""
    order = [lead.tag.tag, *(row.tag.tag for row in rows if row is not lead)]
    listed = ((at, entry.get("model")) for at, entry in enumerate(_entries(source)) if isinstance(entry, dict))
    return {at: tuple(sorted(tags, key=order.index)) for at, tags in listed if isinstance(tags, list)}


def _shared_entries(source: Source, shared: Mapping[int, tuple[str, ...]]) -> list[Shared]:
    """Processes of several models as they are in the file."""
    return [Shared(at, _entries(source)[at]) for at in shared]


def _with_shared(
    mine: Topology, tag: str, numbers: Mapping[int, int], shared: Mapping[int, tuple[str, ...]]
) -> Topology:
    """The topology of a tag in which a shared process says whose it is; it is counted where it belongs."""
    entries = list(mine.process)
    for at, tags in shared.items():
        if at in numbers:
            entry = entries[numbers[at]]
            entries[numbers[at]] = dataclasses.replace(entry, model=tags, count=entry.count if tags[0] == tag else 0)
    return dataclasses.replace(mine, process=tuple(entries))


def _of_row(places: Mapping[KeyPath, Any], row: Row, numbers: Mapping[int, int]) -> dict[KeyPath, Any]:
    """Facts about keys, by their paths in the file of one tag; `places` has them by those in the whole file."""
    found: dict[KeyPath, Any] = {}
    for path, what in places.items():
        match path:
            case ("model",):  # the line of the first of them
                pass
            case ("model", int(at), *rest):
                if at == row.at:
                    table = bool(rest) and rest[0] in OVERRIDDEN
                    below: KeyPath = tuple(rest) if table else ("model", *rest)
                    found[below] = what
            case ("process", int(at), *rest):
                if at in numbers:
                    below = ("process", numbers[at], *rest)
                    found[below] = what
            case _:
                found.setdefault(path, what)
    return found


# -- the topology of all -----


def _whole(rows: Sequence[Row], lead: Row, loaded: Mapping[str, Topology]) -> Topology:
    led = loaded[lead.tag.tag]
    models, first = list[Tag](), 1
    for row in rows:
        mine = loaded.get(row.tag.tag, led)
        made = dataclasses.replace(
            row.tag, seats=mine.model.seats or (row.tag.tag,), max_steps=row.tag.max_steps or led.run.max_steps,
        )
        if row is not lead and mine is not led:
            made = dataclasses.replace(made, first=first, own=(_own(mine, row.tag.trained),))
            first += 1
        models.append(made)
    steps = next(made.max_steps for made in models if made.tag == lead.tag.tag)
    run = dataclasses.replace(led.run, max_steps=steps)
    return dataclasses.replace(led, models=tuple(models), tag=lead.tag.tag, run=run)


def _own(mine: Topology, trained: bool) -> Own:
    roles = MODEL_ROLES if trained else ("rollout",)
    process = tuple(entry for entry in mine.process if entry.role in roles)
    derived = dataclasses.replace(mine.derived, warnings=())
    if not trained:
        mine = dataclasses.replace(mine, derived=dataclasses.replace(derived, routing=None))  # nobody trains with them
        _, call_bytes = call_ring(mine) if mine.has_callers else (0, 0)
        derived = sized(mine, dataclasses.replace(
            mine.derived, slots=1, train_slots=1, val_reserve=0, slot_bytes=SMALLEST, task_bytes=0,
            call_slot_bytes=call_bytes,
        ))
    tables = {name: getattr(mine, name) for name in items(Own)}
    return Own(**{**tables, "process": process, "derived": derived})
