"""`load`: a topology file and its overrides, checked from the bytes to the files it names, as one frozen Topology.

Reads and types (`reader`), makes prompts of sources (`prompt_sources`), looks at files (`named_files`), computes
(`derive`), compares keys (`..._rules`). `load_for_simulation` asks for nothing that a simulation does without: no
model, engine, reward, prompts or devices. `materialise` replaces `tiny:` names by the paths of what they stand for.

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
from busrl.capabilities import ROLES
from busrl.data import pretrained
from busrl.errors import Problem, TopologyError
from busrl.pages import shipped
from busrl.preflight import (
    engine_rules,
    host_rules,
    learner_rules,
    learning_rates,
    named_files,
    process_rules,
    prompt_files,
    prompt_rules,
    prompt_sources,
    reward_rules,
)
from busrl.preflight.derive import resolve
from busrl.preflight.findings import Check, Finding, lookup
from busrl.preflight.model_folders import model_folder
from busrl.scheduling.admission import derive
from busrl.states import ENVIRONMENT, TINY
from busrl.system import device
from busrl.topology.prompts import DataSource
from busrl.topology.reader import KeyPath, Reader, Source, read, show
from busrl.topology.rewards import PYTHON, RETURNED, REWARD_KINDS, RewardPart
from busrl.topology.schema import Derived, Generation, Process, Topology, has_model

UNRESOLVED = Derived(
    limits=derive("sync", 0, 0, 0), horizon=0, slots=0, train_slots=0, val_reserve=0,
    slot_bytes=0, task_bytes=0, train_prompts=0, validation_prompts=0, ring_bytes=0, val_samples=0,
)

# Keys of a machine, a model or a program: a simulation reads no such file and skips the rules about these keys.
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
    """The checked topology, or a TopologyError with every problem. `run_dir`: a run there may have made the prompts of
    sources already."""
    return _of_source(read(shipped(Path(path)), overrides), overrides, run_dir=run_dir)


def load_for_simulation(path: str | Path, overrides: Sequence[str] = ()) -> tuple[Topology, frozenset[str]]:
    """The topology, checked without rules about machine, model and engines and without the files of a real run; and
    the dotted keys that the file or an override sets."""
    source = read(shipped(Path(path)), overrides)
    topology = _of_source(source, overrides, simulated=True)
    return topology, frozenset(".".join(map(str, key)) for key in (*source.lines, *source.overridden))


def _of_source(
    source: Source, overrides: Sequence[str], *, simulated: bool = False, run_dir: Path | None = None
) -> Topology:
    """The topology of one model, or of several where `[[model]]` is written."""
    several = isinstance(source.data.get("model"), list)
    make = capabilities.plug("several", "topology", "[[model]]") if several else of_one_model
    topology: Topology = make(source, overrides, simulated=simulated, run_dir=run_dir)
    return topology


def of_one_model(
    source: Source, overrides: Sequence[str], *, simulated: bool = False, run_dir: Path | None = None
) -> Topology:
    """Report all problems at once; `bad` holds the keys that have one already: no rule about them applies."""
    for complete in capabilities.plugs("defaults"):
        complete(source.data)
    reader = Reader(source)
    draft = _draft(reader, source, overrides)
    capabilities.refuse(draft)
    problems, bad = [_with_advice(problem, draft) for problem in reader.problems], reader.bad
    if not simulated:
        draft, unmade = prompt_sources.prepare(draft, run_dir, prompt_files.compares(draft), bad)
        problems.extend(problem_of(source, draft, finding) for finding in unmade)
        bad |= set(_unmade_keys(draft, unmade))
    facts, broken = named_files.inspect(draft, bad | REAL_FILES if simulated else bad)
    problems.extend(problem_of(source, draft, finding) for finding in broken)
    bad |= {finding.keys[0] for finding in broken}
    draft = dataclasses.replace(draft, derived=dataclasses.replace(draft.derived, prompt_tokens=facts.prompt_tokens))
    draft = draft if simulated else _with_routes(draft)
    derived, sums = resolve(draft, facts)
    every = [*compared(draft), *_idle(draft, source), *sums]
    applying = [finding for finding in every if not (simulated and any(map(_real, finding.keys)))]
    # One cause is reported once.
    findings = [finding for finding in applying if not _depends((*finding.keys, *finding.depends), bad)]
    problems.extend(problem_of(source, draft, finding) for finding in findings if not finding.warning)
    problems.extend([] if simulated else _too_long(draft, sums))
    if problems:
        raise TopologyError(sorted(problems, key=source.order))
    warned = (finding for finding in findings if finding.warning and any(_decided(source, key) for key in finding.keys))
    warnings = tuple(str(problem_of(source, draft, finding)) for finding in warned)
    return dataclasses.replace(draft, derived=dataclasses.replace(derived, warnings=warnings))


def compared(topology: Topology) -> Iterator[Finding]:
    """The findings of all rules, those of optional parts too."""
    checks = (*CHECKS, *(check for of_part in capabilities.plugs("checks") for check in of_part))
    return (finding for check in checks for finding in check(topology))


def _decided(source: Source, key: str) -> bool:
    """Tell whether the user wrote that key: a default gets no warning."""
    parts = key.split(".")
    return parts[0] == "process" or any(map(str.isdigit, parts)) or _written(source, *parts)


def _unmade_keys(draft: Topology, unmade: Sequence[Finding]) -> Iterator[str]:
    """Keys of the prompts that could not be made, because their sources have findings."""
    wrong = {key for finding in unmade for key in finding.keys}
    for target in prompt_sources.targets(draft) if unmade else ():
        if any(key.startswith((target.key, *target.tables)) for key in wrong):
            yield target.key


def _idle(draft: Topology, source: Source) -> Iterator[Finding]:
    """Warn of written keys that nothing reads in this mode, and whose default is not zero."""
    if draft.weights.mode == "sync" and _written(source, "weights", "max_staleness") and draft.weights.max_staleness:
        rule = "a synchronous round is made by the weights that it trains: nothing in it is stale"
        keys = ("weights.max_staleness", "weights.mode")
        yield Finding(keys, rule, 'remove it, or mode = "batch-async"', warning=True)


def _with_advice(problem: Problem, draft: Topology) -> Problem:
    """Advise on learner.lr, the one key without a usable default, by the size of the model."""
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
    """The tables of a source: keys that are left out take what others imply, and every path is absolute."""
    sections: dict[str, Any] = reader.sections()
    file = os.path.abspath(source.file)
    draft = Topology(**sections, derived=UNRESOLVED, source=file, overrides=tuple(overrides))
    for settled in (_with_algorithm, _with_reward, _with_processes, _with_functions, _with_origins):
        draft = settled(draft, source)
    draft = dataclasses.replace(draft, generation=_generation(draft, source))
    model = dataclasses.replace(draft.model, dtype=_dtype(draft), path=model_folder(draft.model.path))
    return dataclasses.replace(draft, model=model)


def _with_reward(draft: Topology, source: Source) -> Topology:
    function = _function_path(draft.reward.function, source, ("reward", "function"))
    kind = draft.reward.kind
    if not _written(source, "reward", "kind") and (function or (draft.has_callers and not draft.reward.part)):
        kind = PYTHON if function else RETURNED
    key = prompt_files.answer_key(draft)
    reward = dataclasses.replace(
        draft.reward, kind=kind, answer_key=key, function=function, part=_parts(draft, source)
    )
    return dataclasses.replace(draft, reward=reward)


def _with_processes(draft: Topology, source: Source) -> Topology:
    here = os.path.abspath(source.folder)
    entries = (
        dataclasses.replace(
            entry, command=tuple(part.replace("{here}", here) for part in entry.command),
            program=tuple(part.replace("{here}", here) for part in entry.program),
            function=_function_path(entry.function, source, ("process",)),
            python=os.path.join(entry.python, "bin", "python") if os.path.isdir(entry.python) else entry.python,
        )
        for entry in (*draft.process, *_implied(draft))
    )
    return dataclasses.replace(draft, process=tuple(entries))


def _with_functions(draft: Topology, source: Source) -> Topology:
    """The functions of the learner, the parser of tools and the sinks as absolute paths."""
    functions: dict[str, Any] = {name: _function_path(getattr(draft.learner, name), source, ("learner", name))
                                 for name in ("loss", "advantage", "optimizer")}
    metrics = tuple(_function_path(path, source, ("learner", "metrics")) for path in draft.learner.metrics)
    tools = _function_path(draft.agents.tools, source, ("agents", "tools"))
    sinks = tuple(_function_path(sink, source, ("sinks", "to")) for sink in draft.sinks.to)
    return dataclasses.replace(
        draft, learner=dataclasses.replace(draft.learner, **functions, metrics=metrics),
        agents=dataclasses.replace(draft.agents, tools=tools), sinks=dataclasses.replace(draft.sinks, to=sinks),
    )


def _with_origins(draft: Topology, source: Source) -> Topology:
    """The functions that rows come from, or are filtered by, as absolute paths."""
    def placed(table: Any, *at: str) -> Any:
        functions = {name: _function_path(getattr(table, name), source, at) for name in ("function", "filter")}
        return dataclasses.replace(table, **functions)

    data = draft.data
    if ENVIRONMENT.fullmatch(data.train) and not data.source:
        data = dataclasses.replace(data, train="", source=(DataSource(path=data.train),))
    origins = tuple(placed(origin, "data", "source") for origin in data.source)
    validation = placed(draft.validation, "validation")
    sets = tuple(placed(named_set, "validation", "set") for named_set in validation.set)
    validation = dataclasses.replace(validation, set=sets)
    return dataclasses.replace(draft, data=dataclasses.replace(data, source=origins), validation=validation)


def _parts(draft: Topology, source: Source) -> tuple[RewardPart, ...]:
    reward, key = draft.reward, prompt_files.answer_key(draft)
    return tuple(
        dataclasses.replace(
            part, name=part.name or part.kind, answer_key=part.answer_key or key,
            timeout_s=part.timeout_s or _timeout_of(part.kind) or reward.timeout_s,
            function=_function_path(part.function, source, ("reward", "part", index, "function")),
        )
        for index, part in enumerate(reward.part)
    )


def _timeout_of(kind: str) -> float:
    return REWARD_KINDS[kind].timeout_s if kind in REWARD_KINDS else 0.0  # a wrong kind has none


def _with_algorithm(draft: Topology, source: Source) -> Topology:
    """Set the keys of recipe and loss that the file leaves out; `derived.algorithm` lists them."""
    notes: list[str] = []
    recipe = f'recipe "{draft.learner.recipe}"'
    for key, value in catalog.RECIPES.get(draft.learner.recipe, {}).items():
        draft = _set_unless_written(draft, source, key, value, recipe, notes)
    facts = catalog.LOSS_FACTS.get(draft.learner.loss)
    for key, value in () if facts is None else facts.settings.items():
        draft = _set_unless_written(draft, source, key, value, f'loss "{draft.learner.loss}"', notes)
    if draft.learner.aggregation == "seq-mean-token-sum-norm" and not draft.learner.length_norm:
        draft = _set_unless_written(draft, source, "learner.length_norm", catalog.OfLimit(1), "the aggregation", notes)
    return dataclasses.replace(draft, derived=dataclasses.replace(draft.derived, algorithm=tuple(notes)))


def _set_unless_written(
    draft: Topology, source: Source, key: str, value: object, why: str, notes: list[str]
) -> Topology:
    section, _, name = key.rpartition(".")
    table: Any = lookup(draft, section)
    auto = isinstance(value, catalog.OfLimit)  # 0 asks for it
    if isinstance(value, catalog.OfLimit):
        value = _generation(draft, source).max_new_tokens // value.parts
    if _written(source, *key.split(".")) and not (auto and getattr(table, name) == 0):
        if getattr(table, name) != value:
            notes.append(f"{key} = {show(getattr(table, name))} is the file's; {why} would set {show(value)}")
        return draft
    if getattr(table, name) != value:
        notes.append(f"{key} = {show(value)} by {why}")
    changed: Topology = replaced(draft, key.split("."), value)
    return changed


def replaced(table: Any, names: Sequence[str], value: object) -> Any:
    """A copy of nested tables with another value under these names."""
    first, *rest = names
    return dataclasses.replace(table, **{first: replaced(getattr(table, first), rest, value) if rest else value})


def _implied(draft: Topology) -> Iterator[Process]:
    """Add a process of each role that this run has and no entry names."""
    wanted = {"validator": draft.validation.names_prompts, "reward": draft.reward.kind != RETURNED}
    for name, role in ROLES.items():
        if role.default and wanted.get(name, True) and all(entry.role != name for entry in draft.process):
            yield Process(name)


def _with_routes(draft: Topology) -> Topology:
    """The routes that samples carry, where the model is a mixture of experts."""
    for routing in capabilities.plugs("routing"):
        shape, line = routing(draft)
        explain = (*draft.derived.explain, *([line] if line else []))
        draft = dataclasses.replace(draft, derived=dataclasses.replace(draft.derived, routing=shape, explain=explain))
    return draft


def _dtype(draft: Topology) -> str:
    """The number type, decided once for all processes: bfloat16 where each of them works on a device that has it."""
    if draft.model.dtype != "auto":
        return draft.model.dtype
    kinds = {device.expected(draft.device_of(process.name)) for process in draft.processes() if has_model(process.spec)}
    return "bfloat16" if kinds and all(map(device.has_bfloat16, kinds)) else "float32"


def _generation(draft: Topology, source: Source) -> Generation:
    """The table with one limit of an answer: that of [segments] where max_new_tokens is not written."""
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


def problem_of(source: Source, draft: Topology, finding: Finding) -> Problem:
    """The finding with a place: its own, or that of the first of its keys that is written down."""
    rule, remedy = prompt_sources.named(finding.rule), prompt_sources.named(finding.remedy)
    if finding.place:
        return Problem(prompt_sources.named(finding.place), prompt_sources.named(finding.value), rule, remedy)
    written = (key for key in finding.keys if _path(key) in source.lines or _path(key) in source.overridden)
    place = source.place(_path(next(written, finding.keys[0])))
    return Problem(place, prompt_sources.named(finding.shown(draft)), rule, remedy)


def _path(key: str) -> KeyPath:
    return tuple(int(part) if part.isdigit() else part for part in key.split("."))


def _too_long(draft: Topology, findings: Iterable[Finding]) -> list[Problem]:
    """Name the line too, where an explicit slot is too small for a prompt alone."""
    slot_bytes = draft.ring.slot_bytes
    if not isinstance(slot_bytes, int) or not any("ring.slot_bytes" in finding.keys for finding in findings):
        return []
    problems = []
    sets = (named_set.data for named_set in draft.validation.set)
    for path in dict.fromkeys((draft.data.train, draft.validation.data, *sets)):
        if path and not path.startswith(TINY) and os.path.isfile(path):
            number, size = prompt_files.longest_line(path)
            if size > slot_bytes:
                rule = f"longer than its slot: ring.slot_bytes = {slot_bytes}"
                problems.append(Problem(f"{path}:{number}", f"{size} bytes", rule, "shorten it or enlarge the slot"))
    return problems


def _with_path(table: Any, key: str, part: str) -> Any:
    """The table with the path of a quickstart's model or prompts in the place of its `tiny:` name."""
    name = getattr(table, key)
    if not name.startswith(TINY):
        return table
    return dataclasses.replace(table, **{key: str(getattr(pretrained.maker().ensure(name), part))})


def materialise(topology: Topology) -> Topology:
    """The topology with every `tiny:` name replaced by the path of what it stands for."""
    validation = _with_path(topology.validation, "data", "validation")
    validation_sets, asked_sets = (
        tuple(_with_path(prompts, "data", "validation") for prompts in sets)
        for sets in (validation.set, topology.derived.sets)
    )
    models = tuple(
        dataclasses.replace(row, own=tuple(
            dataclasses.replace(own, model=_with_path(own.model, "path", "model")) for own in row.own
        )) for row in topology.models
    )
    return dataclasses.replace(
        topology, models=models, model=_with_path(topology.model, "path", "model"),
        data=_with_path(topology.data, "train", "train"),
        validation=dataclasses.replace(validation, set=validation_sets),
        derived=dataclasses.replace(topology.derived, sets=asked_sets),
    )
