"""`load`: a topology file and its overrides, checked from the bytes to the files it names, as one frozen Topology.

Reads and types (`reader`), makes prompts of sources (`sources`), looks at files (`named_files`), computes (`derive`),
compares keys (`..._rules`). `load_for_simulation` asks for nothing that a simulation does without: no model, engine,
reward, prompts or devices. `materialise` replaces `tiny:` names by the paths of what they stand for.

- All problems of a file come in one TopologyError, in the order of the file.
- A key with a wrong value is reported once, for that; rules that depend on it are not looked at.
- Sizes are derived before a task is made, so a run's first start equals the later ones.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from busrl import capabilities
from busrl.algorithms import catalog
from busrl.data import pretrained
from busrl.errors import Problem, TopologyError
from busrl.preflight import (
    engine_rules,
    host_rules,
    learner_rules,
    learning_rates,
    named_files,
    process_rules,
    prompt_rules,
    reward_rules,
    sources,
)
from busrl.preflight.derive import resolve
from busrl.preflight.findings import Check, Finding, lookup
from busrl.scheduling.admission import derive
from busrl.states import ENVIRONMENT, ROLES, TINY
from busrl.system import device
from busrl.topology import schema
from busrl.topology.prompts import DataSource
from busrl.topology.reader import KeyPath, Reader, Source, read, show
from busrl.topology.schema import AGENT, Derived, Generation, Process, RewardPart, Topology, has_model

UNRESOLVED = Derived(
    limits=derive("sync", 0, 0, 0), horizon=0, slots=0, train_slots=0, val_reserve=0,
    slot_bytes=0, task_bytes=0, train_prompts=0, validation_prompts=0, ring_bytes=0, val_samples=0,
)

# What belongs to a machine, a model or a program: a simulation neither looks at these nor obeys rules about them.
REAL_FILES = frozenset({
    "model.path", "data.train", "validation.data", "validation.set", "reward.function", "bus.endpoint", "lora.rank",
    "process",
})
REAL_SECTIONS = frozenset({"model", "reward", "bus", "lora", "vllm", "openai", "validation", "faults"})
REAL_KEYS = frozenset({"ring.processes", "ring.slot_bytes", "weights.transport", "weights.backend"})
CHECKS: tuple[Check, ...] = (
    *learner_rules.CHECKS, *prompt_rules.CHECKS, *process_rules.CHECKS, *reward_rules.CHECKS, *engine_rules.CHECKS,
    *host_rules.CHECKS, learning_rates.rate_findings,
)
PLAYED_OF_PROCESS = ("role", "count")


def load(path: str | Path, overrides: Sequence[str] = (), run_dir: Path | None = None) -> Topology:
    """The checked topology; a TopologyError with every problem otherwise. `run_dir`: where a run of it may have made
    its prompts already."""
    return _load(read(Path(path), overrides), overrides, run_dir=run_dir)


def load_for_simulation(path: str | Path, overrides: Sequence[str] = ()) -> tuple[Topology, frozenset[str]]:
    """Load without the rules about machine, model and engines, and without a look at the files of a real run; and
    the dotted keys that the file or an override gives."""
    source = read(Path(path), overrides)
    topology = _load(source, overrides, simulated=True)
    return topology, frozenset(".".join(map(str, key)) for key in (*source.lines, *source.overridden))


def _load(
    source: Source, overrides: Sequence[str], *, simulated: bool = False, run_dir: Path | None = None
) -> Topology:
    """All that is wrong is told at once; `bad` has the keys that are wrong already: no rule is asked about them."""
    reader = Reader(source)
    draft = _draft(reader, source, overrides)
    capabilities.refuse(draft)
    problems, bad = [_with_advice(problem, draft) for problem in reader.problems], reader.bad
    if not simulated:
        draft, unmade = sources.prepare(draft, run_dir, named_files.compares(draft), bad)
        problems.extend(_problem(source, draft, finding) for finding in unmade)
        bad |= set(_unmade_keys(draft, unmade))
    facts, broken = named_files.inspect(draft, bad | REAL_FILES if simulated else bad)
    problems.extend(_problem(source, draft, finding) for finding in broken)
    bad |= {finding.keys[0] for finding in broken}
    draft = dataclasses.replace(draft, derived=dataclasses.replace(draft.derived, prompt_tokens=facts.prompt_tokens))
    derived, sums = resolve(draft, facts)
    every = [*(finding for check in CHECKS for finding in check(draft)), *_idle(draft, source), *sums]
    asked = [one for one in every if not (simulated and any(map(_real, one.keys)))]
    found = [one for one in asked if not _depends((*one.keys, *one.depends), bad)]  # one cause is told once
    problems.extend(_problem(source, draft, finding) for finding in found if not finding.warning)
    problems.extend([] if simulated else _too_long(draft, sums))
    if problems:
        raise TopologyError(sorted(problems, key=source.order))
    warned = (finding for finding in found if finding.warning and any(_decided(source, key) for key in finding.keys))
    warnings = tuple(str(_problem(source, draft, finding)) for finding in warned)
    return dataclasses.replace(draft, derived=dataclasses.replace(derived, warnings=warnings))


def _decided(source: Source, key: str) -> bool:
    """Tell whether somebody wrote that key: nobody is warned of a default."""
    parts = key.split(".")
    return parts[0] == "process" or any(map(str.isdigit, parts)) or _written(source, *parts)


def _unmade_keys(draft: Topology, unmade: Sequence[Finding]) -> Iterator[str]:
    """Keys of prompts that could not be made, since something about their sources is wrong."""
    wrong = {key for finding in unmade for key in finding.keys}
    for target in sources.targets(draft) if unmade else ():
        if any(key.startswith((target.key, *target.tables)) for key in wrong):
            yield target.key


def _idle(draft: Topology, source: Source) -> Iterator[Finding]:
    """Keys that are written down and that nothing reads in this mode, where their default is not zero."""
    if draft.weights.mode == "sync" and _written(source, "weights", "max_staleness") and draft.weights.max_staleness:
        rule = "a synchronous round is made by the weights that it trains: nothing in it is stale"
        keys = ("weights.max_staleness", "weights.mode")
        yield Finding(keys, rule, 'remove it, or mode = "batch-async"', warning=True)


def _with_advice(problem: Problem, draft: Topology) -> Problem:
    """The one key that no default can stand for gets advice for the model that is there."""
    if problem.rule != "learner.lr is missing":
        return problem
    return dataclasses.replace(problem, remedy=f"add lr = ... to [learner]: {learning_rates.rate_advice(draft)}")


def _real(key: str) -> bool:
    """Tell whether a key means something in a real run only."""
    section, _, rest = key.partition(".")
    if section == "process" and rest:
        return rest.rpartition(".")[2] not in PLAYED_OF_PROCESS
    return section in REAL_SECTIONS or key in REAL_KEYS


def _draft(reader: Reader, source: Source, overrides: Sequence[str]) -> Topology:
    sections: dict[str, Any] = reader.sections()
    given = Topology(**sections, derived=UNRESOLVED, source=os.path.abspath(source.file), overrides=tuple(overrides))
    draft = _with_algorithm(given, source)
    function = _function_path(draft.reward.function, source, ("reward", "function"))
    kind = draft.reward.kind
    if not _written(source, "reward", "kind") and (function or (draft.has_callers and not draft.reward.part)):
        kind = "python" if function else AGENT
    reward = dataclasses.replace(
        draft.reward, kind=kind, answer_key=named_files.answer_key(draft), function=function, part=_parts(draft, source)
    )
    here = os.path.abspath(source.folder)
    entries = (
        dataclasses.replace(
            entry, command=tuple(part.replace("{here}", here) for part in entry.command),
            program=tuple(part.replace("{here}", here) for part in entry.program),
            function=_function_path(entry.function, source, ("process",)),
            python=os.path.join(entry.python, "bin", "python") if os.path.isdir(entry.python) else entry.python,
        )
        for entry in (*draft.process, *_implied(draft, kind))
    )
    named: dict[str, Any] = {name: _function_path(getattr(draft.learner, name), source, ("learner", name))
                             for name in ("loss", "advantage", "optimizer")}
    metrics = tuple(_function_path(path, source, ("learner", "metrics")) for path in draft.learner.metrics)
    learner = dataclasses.replace(draft.learner, **named, metrics=metrics)
    draft = _with_origins(draft, source)
    tools = _function_path(draft.agents.tools, source, ("agents", "tools"))
    sinks = tuple(_function_path(one, source, ("sinks", "to")) for one in draft.sinks.to)
    draft = dataclasses.replace(
        draft, agents=dataclasses.replace(draft.agents, tools=tools), sinks=dataclasses.replace(draft.sinks, to=sinks)
    )
    made = dataclasses.replace(
        draft, learner=learner, reward=reward, process=tuple(entries), generation=_generation(draft, source)
    )
    model = dataclasses.replace(made.model, dtype=_dtype(made), path=named_files.model_folder(made.model.path))
    return dataclasses.replace(made, model=model)


def _with_origins(draft: Topology, source: Source) -> Topology:
    """The functions that rows come from, or are filtered by, as absolute paths."""
    def placed(one: Any, *at: str) -> Any:
        named = {name: _function_path(getattr(one, name), source, at) for name in ("function", "filter")}
        return dataclasses.replace(one, **named)

    data = draft.data
    if ENVIRONMENT.fullmatch(data.train) and not data.source:
        data = dataclasses.replace(data, train="", source=(DataSource(path=data.train),))
    origins = tuple(placed(one, "data", "source") for one in data.source)
    own = placed(draft.validation, "validation")
    own = dataclasses.replace(own, set=tuple(placed(one, "validation", "set") for one in own.set))
    return dataclasses.replace(draft, data=dataclasses.replace(data, source=origins), validation=own)


def _parts(draft: Topology, source: Source) -> tuple[RewardPart, ...]:
    own, key = draft.reward, named_files.answer_key(draft)
    return tuple(
        dataclasses.replace(
            part, name=part.name or part.kind, answer_key=part.answer_key or key,
            timeout_s=part.timeout_s or _timeout_of(part.kind) or own.timeout_s,
            function=_function_path(part.function, source, ("reward", "part", index, "function")),
        )
        for index, part in enumerate(own.part)
    )


def _timeout_of(kind: str) -> float:
    return schema.PART_KINDS[kind].timeout_s if kind in schema.PART_KINDS else 0.0  # of a wrong kind nothing is known


def _with_algorithm(draft: Topology, source: Source) -> Topology:
    """The keys that recipe and loss set where they are left out; `derived.algorithm` tells which they are."""
    told: list[str] = []
    recipe = f'recipe "{draft.learner.recipe}"'
    for key, value in catalog.RECIPES.get(draft.learner.recipe, {}).items():
        draft = _set_unless_written(draft, source, key, value, recipe, told)
    facts = catalog.LOSSES.get(draft.learner.loss)
    for key, value in () if facts is None else facts.settings.items():
        draft = _set_unless_written(draft, source, key, value, f'loss "{draft.learner.loss}"', told)
    if draft.learner.aggregation == "seq-mean-token-sum-norm" and not draft.learner.length_norm:
        draft = _set_unless_written(draft, source, "learner.length_norm", catalog.OfLimit(1), "the aggregation", told)
    return dataclasses.replace(draft, derived=dataclasses.replace(draft.derived, algorithm=tuple(told)))


def _set_unless_written(
    draft: Topology, source: Source, key: str, value: object, why: str, told: list[str]
) -> Topology:
    section, _, name = key.rpartition(".")
    table: Any = lookup(draft, section)
    auto = isinstance(value, catalog.OfLimit)  # 0 asks for it
    if isinstance(value, catalog.OfLimit):
        value = _generation(draft, source).max_new_tokens // value.parts
    if _written(source, *key.split(".")) and not (auto and getattr(table, name) == 0):
        if getattr(table, name) != value:
            told.append(f"{key} = {show(getattr(table, name))} is the file's; {why} would set {show(value)}")
        return draft
    if getattr(table, name) != value:
        told.append(f"{key} = {show(value)} by {why}")
    made: Topology = replaced(draft, key.split("."), value)
    return made


def replaced(table: Any, names: Sequence[str], value: object) -> Any:
    """A copy of nested tables with another value under these names."""
    first, *rest = names
    return dataclasses.replace(table, **{first: replaced(getattr(table, first), rest, value) if rest else value})


def _implied(draft: Topology, reward: str) -> Iterator[Process]:
    """Add a process of each role that this run has and no entry names."""
    wanted = {"validator": draft.validation.names_prompts, "reward": reward != AGENT}
    for role in (one.name for one in ROLES.values() if one.default):
        if wanted.get(role, True) and all(entry.role != role for entry in draft.process):
            yield Process(role)


def _dtype(draft: Topology) -> str:
    """The number type, decided once for all processes: bfloat16 where each of them works on a device that has it."""
    if draft.model.dtype != "auto":
        return draft.model.dtype
    kinds = {device.expected(draft.device_of(process.name)) for process in draft.processes() if has_model(process.spec)}
    return "bfloat16" if kinds and all(map(device.has_bfloat16, kinds)) else "float32"


def _generation(draft: Topology, source: Source) -> Generation:
    """An answer has one limit: that of [segments] stands for max_new_tokens where the latter is not written."""
    limit = draft.segments.global_max_length
    if not (limit and draft.segments.on) or _written(source, "generation", "max_new_tokens"):
        return draft.generation
    return dataclasses.replace(draft.generation, max_new_tokens=limit)


def _written(source: Source, *key: str) -> bool:
    return key in source.lines or key in source.overridden


def _function_path(function: str, source: Source, key: KeyPath) -> str:
    """file.py:name with the file made absolute, as other paths are; package.module:name as it stands."""
    file, colon, name = function.rpartition(":")
    if not colon or not file.endswith(".py"):
        return function
    typed_here = source.raw_text(key) is not None
    return os.path.normpath((Path.cwd() if typed_here else source.folder) / Path(file).expanduser()) + f":{name}"


def _depends(keys: Iterable[str], bad: set[str]) -> bool:
    """Tell whether a rule looks at a key that is wrong, or at the processes while one of them is."""
    wrong = bad | {name.partition(".")[0] for name in bad if name.startswith("process")}
    return not wrong.isdisjoint(keys)


def _problem(source: Source, draft: Topology, finding: Finding) -> Problem:
    """The finding with a place: its own, or that of the first of its keys that is written down."""
    rule, remedy = sources.named(finding.rule), sources.named(finding.remedy)
    if finding.place:
        return Problem(sources.named(finding.place), sources.named(finding.value), rule, remedy)
    written = (key for key in finding.keys if _path(key) in source.lines or _path(key) in source.overridden)
    place = source.place(_path(next(written, finding.keys[0])))
    return Problem(place, sources.named(finding.shown(draft)), rule, remedy)


def _path(key: str) -> KeyPath:
    return tuple(int(part) if part.isdigit() else part for part in key.split("."))


def _too_long(draft: Topology, found: Iterable[Finding]) -> list[Problem]:
    """An explicit slot that is too small for a prompt alone: name the line as well."""
    given = draft.ring.slot_bytes
    if not isinstance(given, int) or not any("ring.slot_bytes" in finding.keys for finding in found):
        return []
    problems = []
    sets = (one.data for one in draft.validation.set)
    for path in dict.fromkeys((draft.data.train, draft.validation.data, *sets)):
        if path and not path.startswith(TINY) and os.path.isfile(path):
            number, size = named_files.longest_line(path)
            if size > given:
                rule = f"longer than its slot: ring.slot_bytes = {given}"
                problems.append(Problem(f"{path}:{number}", f"{size} bytes", rule, "shorten it or enlarge the slot"))
    return problems


def materialise(topology: Topology) -> Topology:
    """The topology with every `tiny:` name replaced by the path of what it stands for."""
    def made(table: Any, key: str, part: str) -> Any:
        name = getattr(table, key)
        if not name.startswith(TINY):
            return table
        return dataclasses.replace(table, **{key: str(getattr(pretrained.maker().ensure(name), part))})

    validation = made(topology.validation, "data", "validation")
    named, asked = (tuple(made(one, "data", "validation") for one in sets)
                    for sets in (validation.set, topology.derived.sets))
    return dataclasses.replace(
        topology, model=made(topology.model, "path", "model"), data=made(topology.data, "train", "train"),
        validation=dataclasses.replace(validation, set=named),
        derived=dataclasses.replace(topology.derived, sets=asked),
    )
