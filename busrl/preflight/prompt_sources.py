"""The prompt files that are made before a run, and findings about the keys that they are made by: one file of all
[[data.source]], one of each set of validation whose prompts are no JSONL file.

Starts `busrl.data.sources` in a process of its own, since functions of the user run there, and reads its events with a
deadline. Returns the topology with these files as data.train and as the data of the sets; derived.sources has the place
of each source. Knows nothing of run directories: `busrl.launcher.rundir` moves the files there.

- The same settings and files of the same age are converted once: a run directory that has the file is used.
- What is made before a run lies in a temporary folder that ends with this process.
"""

from __future__ import annotations

import atexit
import dataclasses
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import msgspec

from busrl.data import pretrained
from busrl.data.chat import tools_of_chats
from busrl.data.prompts import BLOCK, shares
from busrl.data.sources import Event, Job, Made, Refused, Source, files_of, format_of, parse_where
from busrl.preflight.findings import Finding, by_path
from busrl.preflight.trial import foreign
from busrl.states import TINY
from busrl.system.files import crc
from busrl.topology.prompts import DataSource, MadeSet, Rows, SourceLines
from busrl.topology.recorded import SET, TRAIN, VALIDATION, set_name, with_file
from busrl.topology.schema import Topology

SILENT_S = 120.0  # a row, or an import, may take so long
FORMAT = 1  # of the lines that are made: another number makes them again
PLAIN = dataclasses.asdict(Rows())  # a set of validation that has only these is a file that is used as it stands
HELD_OUT_SEED = 1 << 40  # of tasks, far from any run.seed: items are numbered on from the seed


@dataclasses.dataclass(frozen=True)
class Target:
    """A file of prompts to make: `which` (`TRAIN`, `VALIDATION`, or `SET` and a name), its key, its sources' tables,
    and these tables' key for a path. `split`: of a folder, where none is named."""

    which: str
    key: str
    sources: tuple[DataSource, ...]
    tables: tuple[str, ...]
    seed: int
    path: str = "path"
    split: str = "train"

    @property
    def shown(self) -> str:
        return "[[data.source]]" if self.which == TRAIN else f"[{self.tables[0]}]"


def targets(t: Topology) -> Iterator[Target]:
    """The files of prompts that are made for a topology: of [[data.source]], and of each set whose prompts are not the
    lines of one JSONL file as they stand."""
    if t.data.source:
        tables = tuple(f"data.source.{at}" for at in range(len(t.data.source)))
        yield Target(TRAIN, TRAIN, t.data.source, tables, t.run.seed)
    sections: list[tuple[str, str, Any]] = [(VALIDATION, "validation", t.validation)]
    sections += [(SET + each.name, f"validation.set.{at}", each) for at, each in enumerate(t.validation.set)]
    for which, at, section in sections:
        rows = {name: getattr(section, name) for name in PLAIN}
        is_lines = format_of(section.data) == "jsonl" if section.data else at == "validation"
        if rows != PLAIN or not (is_lines or section.data.startswith(TINY)):
            source = DataSource(path=section.data, **rows)
            yield Target(which, f"{at}.data", (source,), (at,), HELD_OUT_SEED, "data", "test")


def prepare(t: Topology, earlier: Path | None, answers: bool, bad: Collection[str]) -> tuple[Topology, list[Finding]]:
    """The topology with the files that `targets` names, and what is wrong. `earlier`: the directory of a run that may
    have them already; `answers`: every line needs a right answer; `bad`: keys whose tables are left alone."""
    findings: list[Finding] = []
    for target in targets(t):
        sections = {"data", target.key.partition(".")[0]}
        if any(key.partition(".")[0] in sections for key in bad):
            continue
        wrong = list(faults(t, target))
        if not wrong:
            t, wrong = _prepared(t, target, earlier, answers)
        findings += wrong
    return t, findings


def _prepared(t: Topology, target: Target, earlier: Path | None, answers: bool) -> tuple[Topology, list[Finding]]:
    key, weights = _fingerprint(t, target, answers), shares([source.weight for source in target.sources])
    origins = (os.path.basename(each.path) or each.function or ", ".join(each.tasks) for each in target.sources)
    origin = " + ".join(origins)
    if (before := _made_before(earlier, target.which, key, weights)) is not None:
        _MADE_OF[before[0]] = origin
        return _with_made(t, target.which, key, *before), []
    folder = tempfile.mkdtemp(prefix="busrl-data-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    event, findings = _convert(t, target, _job(t, target, os.path.join(folder, "lines"), answers))
    if findings:
        return t, findings
    path = os.path.join(folder, f"{event.crc:08x}.jsonl")
    os.rename(os.path.join(folder, "lines"), path)
    _MADE_OF[path] = origin
    rows = tuple(_lines_of(result, share) for result, share in zip(event.made, weights))
    return _with_made(t, target.which, key, path, rows), []


_MADE_OF: dict[str, str] = {}  # of each file that was made here, the names of its sources


def named(text: str) -> str:
    """The text with the names of a made file's sources in the place of its temporary path."""
    for path, origin in _MADE_OF.items():
        text = text.replace(path, f"{origin} (converted)")
    return text


def _with_made(t: Topology, which: str, key: str, path: str, rows: tuple[SourceLines, ...]) -> Topology:
    """The topology with a file that was made by these settings, and what it has of each source."""
    t, derived = with_file(t, which, path), t.derived
    if which == TRAIN:
        return dataclasses.replace(t, derived=dataclasses.replace(derived, sources=rows, sources_key=key))
    made_set = MadeSet(set_name(which), key, f"{rows[0].name}: {rows[0].text}")
    return dataclasses.replace(t, derived=dataclasses.replace(derived, made=(*derived.made, made_set)))


def _lines_of(result: Made, share: int) -> SourceLines:
    """The place of a source's lines, and how many of its rows were left out, and why."""
    parts = [f"{result.count} of {result.read} rows"]
    parts += [f"{count} left out {reason if reason.startswith(('by', 'as')) else f'as {reason}'}"
              for reason, count in result.left_out.items()]
    parts += [f"{result.shortened} shortened"] if result.shortened else []
    return SourceLines(result.name, result.start, result.count, share, ", ".join(parts))


# -- what is wrong with the keys -----


GIVES = {"function": "function", "reasoning_gym": "tasks"}  # the key that says where rows come from; else path


def faults(t: Topology, target: Target) -> Iterator[Finding]:
    """Findings about the keys of a target, before any row is read."""
    if target.which == TRAIN:
        yield from _train_faults(t)
    for table, source in zip(target.tables, target.sources):
        yield from _source_faults(source, table, target, t.source)


def _train_faults(t: Topology) -> Iterator[Finding]:
    if t.data.train:
        rule = "prompts come from one file, or from sources"
        yield Finding(("data.train",), rule, "remove it, or every [[data.source]]: a file is a source with path")
    if t.data.arrivals:
        rule = "an open stream is one file, in its order"
        yield Finding(("data.arrivals",), rule, "set it to false, or give the file as data.train")
    for at, share in enumerate(shares([source.weight for source in t.data.source])):
        if not share:
            rule = f"its share of the draws is less than 1 in {BLOCK}: no prompt of it would be drawn"
            yield Finding((f"data.source.{at}.weight",), rule, "raise it, or remove the source")


def _source_faults(source: DataSource, at: str, target: Target, topology: str) -> Iterator[Finding]:
    kind, path = format_of(source.path, source.format, source.function, source.tasks), target.path
    origins = [name for name in ("path", "function", "tasks") if getattr(source, name)]
    needed = GIVES.get(kind, "path")  # the only one of them that this format reads
    if origins != [needed]:
        words = {"path": path, "function": "function", "tasks": "tasks"}
        have = f"has {' and '.join(words[name] for name in origins)}"
        have = have if origins else f"has neither {path}, function nor tasks"
        yield Finding((f"{at}.{words[needed]}",), f"a source of format {kind} has {words[needed]}, and this one {have}",
                      f"give {words[needed]} and no other")
        return
    yield from _origin_faults(source, at, target, topology)
    yield from _row_faults(source, at)


def _origin_faults(source: DataSource, at: str, target: Target, topology: str) -> Iterator[Finding]:
    """Findings about the place that rows come from: a file, a folder's split, tasks or a function."""
    kind, path = format_of(source.path, source.format, source.function, source.tasks), target.path
    from_files = bool(source.path) and kind != "environment"
    if from_files and not Path(source.path).exists():
        hub = pretrained.of_hub(topology, source.path, pretrained.DATA_SET)
        remedy = hub or "give a path relative to this topology"
        yield Finding((f"{at}.{path}",), "no such file or folder", remedy)
    if kind == "hf" and Path(source.path).is_dir():
        try:
            files_of(Path(source.path), source.split or target.split)
        except Refused as refused:
            yield Finding((f"{at}.split", f"{at}.{path}"), refused.problem.rule, refused.problem.remedy)
    if kind == "reasoning_gym" and not source.size:
        yield Finding((f"{at}.size",), "tasks are made: say how many", "for example size = 10000")
    for name in sorted(source.task_options.keys() - source.tasks.keys()):
        yield Finding((f"{at}.task_options",), f"{name!r} is no task of this source", f"name it in {at}.tasks too")


def _row_faults(source: DataSource, at: str) -> Iterator[Finding]:
    """Findings about the functions of a source, and about the keys that choose its rows."""
    for name in ("function", "filter"):
        if text := getattr(source, name):
            yield from by_path((f"{at}.{name}",), text, f'for example {name} = "prompts.py:{name}"')
    try:
        parse_where(source.where)
    except ValueError as problem:
        yield Finding((f"{at}.where",), str(problem), "a filter = \"file.py:function\" can decide anything else")
    if source.too_long != "drop" and not source.max_prompt_tokens:
        yield Finding((f"{at}.too_long",), "nothing is too long without max_prompt_tokens", "set it too")
    if 0 < source.max_prompt_tokens < source.min_prompt_tokens:
        yield Finding((f"{at}.max_prompt_tokens",), f"below min_prompt_tokens = {source.min_prompt_tokens}", "raise it")


# -- converting -----


def _name(source: DataSource) -> str:
    origin = Path(source.path).stem if source.path else source.function.rpartition(":")[2]
    return source.tag or origin or "+".join(source.tasks)


def _job(t: Topology, target: Target, out: str, answers: bool) -> Job:
    data, folder = t.data, pretrained.model_at(t.model.path)
    # Items of tasks that were made by another seed may be those of training.
    tasks = target.which != TRAIN and any(source.tasks for source in target.sources)
    sources = [
        Source(
            **{name: value for name, value in dataclasses.asdict(source).items() if name != "weight"} | {
                "name": _name(source), "format": format_of(source.path, source.format, source.function, source.tasks),
                "prompt_key": source.prompt_key or data.prompt_key,
                "tag": source.tag or ("" if source.tasks else _name(source)),
                "answer_key": source.answer_key or t.reward.answer_key or data.answer_key,
                "split": source.split or target.split,
            }
        )
        for source in target.sources
    ]
    return Job(
        sources=sources, out=out, seed=target.seed, model=str(folder or ""), prompt_key=data.prompt_key,
        answer_key=t.reward.answer_key or data.answer_key, answers=answers, template=data.template, system=data.system,
        tools_key=data.tools_key, template_arguments=data.template_arguments, base_dir=t.base_dir,
        without=data.train if tasks and not data.train.startswith(TINY) else "",
    )


def _convert(t: Topology, target: Target, job: Job) -> tuple[Event, list[Finding]]:
    """The last event of the converting process, and its problems by the keys of the sources."""
    last = Event(at="starting")
    with foreign(t, "reward", "busrl.data.sources") as child:
        child.send(job)
        while not (last.made or last.problems):
            if (message := child.next(SILENT_S)) is None:
                rule = f"no row for {SILENT_S:g} s at {last.at}: it hangs"
                rule = f"converting it died at {last.at}: {child.last_words()}" if child.ended else rule
                remedy = "see what is read, or called, there"
                return last, [Finding(target.tables[:1], rule, remedy, value=target.shown)]
            last = msgspec.convert(message, Event)
    return last, [_finding(target, job, *problem) for problem in last.problems]


def _finding(target: Target, job: Job, at: int, place: str, value: str, rule: str, remedy: str) -> Finding:
    of_source = place == job.sources[at].name  # a problem of the whole source stands at the line of its key
    value = value or (place if of_source else "")
    return Finding((target.tables[at],), rule, remedy, value=value, place="" if of_source else place)


# -- what a run has made before -----


def _fingerprint(t: Topology, target: Target, answers: bool) -> str:
    """Settings, and age and size of every file, as one number."""
    stats = [_age(path) for source in target.sources for path in _read(source, target.split)]
    settings = msgspec.structs.asdict(_job(t, target, "", answers))
    del settings["base_dir"]  # `stats` has the files of functions
    settings["sources"] = [msgspec.structs.asdict(source) for source in settings["sources"]]
    if settings["without"]:
        file = Path(settings["without"])
        stats.append([file.name] if t.derived.sources else _age(file))  # a made file's name is its content's CRC
        settings["without"] = ""
    tokenizer = _age(Path(settings["model"]) / "tokenizer.json") if settings["model"] else []
    text = json.dumps([FORMAT, settings, stats, tokenizer, tools_of_chats(t.openai)], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _read(source: DataSource, split: str) -> list[Path]:
    if format_of(source.path, source.format, source.function, source.tasks) == "hf":
        return [path for path, _ in files_of(Path(source.path), source.split or split)]
    functions = [text.rpartition(":")[0] for text in (source.function, source.filter)]
    return [Path(path) for path in (source.path, *functions) if path and Path(path).is_file()]


def _age(path: Path) -> list[Any]:
    try:
        stat = path.stat()
    except OSError:
        return [str(path)]
    return [str(path), stat.st_size, stat.st_mtime_ns]


def _made_before(
    run_dir: Path | None, which: str, key: str, weights: list[int]
) -> tuple[str, tuple[SourceLines, ...]] | None:
    """The file of an earlier start in that directory, if its bytes are those that it was made with; and its lines."""
    if run_dir is None:
        return None
    recorded, name = pretrained.read_config(run_dir, "topology.json"), set_name(which)
    try:
        derived = recorded.get("derived", {})
        if which == TRAIN:
            fingerprint, file = derived.get("sources_key"), recorded["data"]["train"]
            rows = tuple(SourceLines(**{**row, "share": share}) for row, share in zip(derived["sources"], weights))
        else:
            (made_set,) = (entry for entry in derived.get("made", []) if entry["name"] == name)
            section = recorded["validation"]
            if name:
                (section,) = (entry for entry in section["set"] if entry["name"] == name)
            fingerprint, file = made_set["key"], section["data"]
            source, _, text = made_set["text"].partition(": ")
            rows = (SourceLines(source, 0, 0, BLOCK, text),)
        path = run_dir / "data" / Path(file).name
        return (str(path.resolve()), rows) if fingerprint == key and f"{crc(path):08x}" == path.stem else None
    except (KeyError, TypeError, ValueError, OSError):
        return None
