"""[[data.source]] before a run: what is wrong with the keys, and the one file of prompt lines that they are made into.

Starts `busrl.data.convert` in a process of its own, since functions of the user run there, and listens to it with a
deadline. Gives the topology back with that file as data.train and the place of each source in it as derived.sources.
Knows nothing of run directories: `busrl.launch.rundir` gives the file its place there.

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
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from busrl.config import machine
from busrl.config.rules import Finding
from busrl.config.schema import DataSource, SourceLines, Topology
from busrl.config.trial import Events, foreign, last_words, tools_of_chats
from busrl.config.values import FUNCTION
from busrl.data.convert import Event, Job, Made, Source
from busrl.data.prompts import BLOCK, shares
from busrl.data.sources import Refused, files_of, format_of, parse_where

ALL = "[[data.source]]"
SILENT_S = 120.0  # a row, or an import, may take so long
FORMAT = 1  # of the lines that are made: another number makes them anew


def prepare(t: Topology, earlier: Path | None, answers: bool) -> tuple[Topology, list[Finding]]:
    """The topology with data.train made of its sources, and what is wrong. `earlier`: the directory of a run that may
    have the file already; `answers`: every line needs a right answer."""
    if found := list(faults(t)):
        return t, found
    key, weights = _fingerprint(t, answers), shares([one.weight for one in t.data.source])
    if (before := _made_before(earlier, key, weights)) is not None:
        return before.of(t), []
    folder = tempfile.mkdtemp(prefix="busrl-data-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    event, found = _convert(t, _job(t, os.path.join(folder, "lines"), answers))
    if found:
        return t, found
    path = os.path.join(folder, f"{event.crc:08x}.jsonl")
    os.rename(os.path.join(folder, "lines"), path)
    rows = tuple(_lines_of(made, share) for made, share in zip(event.made, weights))
    return _Prepared(path, rows, key).of(t), []


@dataclasses.dataclass(frozen=True)
class _Prepared:
    path: str
    rows: tuple[SourceLines, ...]
    key: str

    def of(self, t: Topology) -> Topology:
        derived = dataclasses.replace(t.derived, sources=self.rows, sources_key=self.key)
        return dataclasses.replace(t, data=dataclasses.replace(t.data, train=self.path), derived=derived)


def _lines_of(made: Made, share: int) -> SourceLines:
    """What became of a source, for people too."""
    parts = [f"{made.count} of {made.read} rows"]
    parts += [f"{count} left out {reason if reason.startswith(('by', 'as')) else f'as {reason}'}"
              for reason, count in made.left_out.items()]
    parts += [f"{made.shortened} shortened"] if made.shortened else []
    return SourceLines(made.name, made.start, made.count, share, ", ".join(parts))


# -- what is wrong with the keys -----


GIVES = {"function": "function", "reasoning_gym": "tasks"}  # the key that says where rows come from; else path


def faults(t: Topology) -> Iterator[Finding]:
    """Problems of [[data.source]] that need no row to be read."""
    if t.data.train:
        rule = "prompts come from one file, or from sources"
        yield Finding(("data.train",), rule, "remove it, or every [[data.source]]: a file is a source with path")
    if t.data.arrivals:
        rule = "an open stream is one file, in its order"
        yield Finding(("data.arrivals",), rule, "set it to false, or give the file as data.train")
    for at, one in enumerate(t.data.source):
        yield from _source_faults(one, f"data.source.{at}")
    for at, share in enumerate(shares([one.weight for one in t.data.source])):
        if not share:
            rule = f"its share of the draws is less than 1 in {BLOCK}: no prompt of it would be drawn"
            yield Finding((f"data.source.{at}.weight",), rule, "raise it, or remove the source")


def _source_faults(one: DataSource, at: str) -> Iterator[Finding]:
    kind = format_of(one.path, one.format, one.function, one.tasks)
    given = [name for name in ("path", "function", "tasks") if getattr(one, name)]
    needed = GIVES.get(kind, "path")
    if given != [needed]:
        have = f"has {' and '.join(given)}" if given else "has neither path, function nor tasks"
        yield Finding((f"{at}.{needed}",), f"a source of format {kind} has {needed}, and this one {have}",
                      f"give {needed} and no other")
        return
    if needed == "path" and not Path(one.path).exists():
        yield Finding((f"{at}.path",), "no such file or folder", "give a path relative to this topology")
    if kind == "hf" and Path(one.path).is_dir():
        try:
            files_of(Path(one.path), one.split)
        except Refused as refused:
            yield Finding((f"{at}.split", f"{at}.path"), refused.problem.rule, refused.problem.remedy)
    if kind == "reasoning_gym" and not one.size:
        yield Finding((f"{at}.size",), "tasks are made: say how many", "for example size = 10000")
    for name in ("function", "filter"):
        if (text := getattr(one, name)) and not FUNCTION.fullmatch(text):
            yield Finding((f"{at}.{name}",), "expected package.module:function or file.py:function", "write both parts")
    try:
        parse_where(one.where)
    except ValueError as problem:
        yield Finding((f"{at}.where",), str(problem), "a filter = \"file.py:function\" can decide anything else")
    if one.too_long != "drop" and not one.max_prompt_tokens:
        yield Finding((f"{at}.too_long",), "nothing is too long without max_prompt_tokens", "set it too")
    if 0 < one.max_prompt_tokens < one.min_prompt_tokens:
        yield Finding((f"{at}.max_prompt_tokens",), f"below min_prompt_tokens = {one.min_prompt_tokens}", "raise it")


# -- converting -----


def _name(one: DataSource) -> str:
    return one.tag or (Path(one.path).stem if one.path else one.function.rpartition(":")[2] or "+".join(one.tasks))


def _job(t: Topology, out: str, answers: bool) -> Job:
    own, folder = t.data, machine.model_at(t.model.path)
    sources = [
        Source(
            **{name: value for name, value in dataclasses.asdict(one).items() if name != "weight"} | {
                "name": _name(one), "format": format_of(one.path, one.format, one.function, one.tasks),
                "prompt_key": one.prompt_key or own.prompt_key, "tag": one.tag or _name(one),
                "answer_key": one.answer_key or t.reward.answer_key or own.answer_key,
            }
        )
        for one in own.source
    ]
    return Job(
        sources=sources, out=out, seed=t.run.seed, model=str(folder or ""), prompt_key=own.prompt_key,
        answer_key=t.reward.answer_key or own.answer_key, answers=answers, template=own.template, system=own.system,
        tools_key=own.tools_key, template_arguments=own.template_arguments,
    )


def _convert(t: Topology, job: Job) -> tuple[Event, list[Finding]]:
    """The last event of the converting process, and its problems by the keys of the sources."""
    last = Event(at="starting")
    with foreign(t, "reward", "busrl.data.convert") as (child, printed):
        assert child.stdin is not None and child.stdout is not None
        try:
            child.stdin.write(msgspec.json.encode(job) + b"\n")
            child.stdin.flush()
        except BrokenPipeError:
            pass  # it says below why it died
        events = Events(child.stdout)
        while not (last.made or last.problems):
            if (found := events.next(SILENT_S)) is None:
                rule = f"no row for {SILENT_S:g} s at {last.at}: it hangs"
                rule = f"converting it died at {last.at}: {last_words(child, printed)}" if events.ended else rule
                return last, [Finding(("data.source",), rule, "see what is read, or called, there", value=ALL)]
            last = msgspec.convert(found, Event)
    return last, [_finding(job, *one) for one in last.problems]


def _finding(job: Job, at: int, place: str, value: str, rule: str, remedy: str) -> Finding:
    own = place == job.sources[at].name  # of the source as a whole: named by the line of its key
    return Finding((f"data.source.{at}",), rule, remedy, value=value or place, place="" if own else place)


# -- what a run has made before -----


def _fingerprint(t: Topology, answers: bool) -> str:
    """Settings, and age and size of every file, as one number."""
    stats = [_age(path) for one in t.data.source for path in _read(one)]
    settings = msgspec.structs.asdict(_job(t, "", answers))
    settings["sources"] = [msgspec.structs.asdict(one) for one in settings["sources"]]
    tokenizer = _age(Path(settings["model"]) / "tokenizer.json") if settings["model"] else []
    text = json.dumps([FORMAT, settings, stats, tokenizer, tools_of_chats(t)], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _read(one: DataSource) -> list[Path]:
    if format_of(one.path, one.format, one.function, one.tasks) == "hf":
        return [path for path, _ in files_of(Path(one.path), one.split)]
    functions = [text.rpartition(":")[0] for text in (one.function, one.filter)]
    return [Path(path) for path in (one.path, *functions) if path and Path(path).is_file()]


def _age(path: Path) -> list[Any]:
    try:
        found = path.stat()
    except OSError:
        return [str(path)]
    return [str(path), found.st_size, found.st_mtime_ns]


def _made_before(run_dir: Path | None, key: str, weights: list[int]) -> _Prepared | None:
    """The file of an earlier start in that directory, if its bytes are those that it was made with."""
    recorded = machine.read_config(run_dir, "topology.json") if run_dir else {}
    try:
        derived = recorded.get("derived", {})
        if not run_dir or derived.get("sources_key") != key:
            return None
        path = run_dir / "data" / Path(recorded["data"]["train"]).name
        rows = tuple(SourceLines(**{**row, "share": share}) for row, share in zip(derived["sources"], weights))
    except (KeyError, TypeError):
        return None
    return _Prepared(str(path.resolve()), rows, key) if _crc(path) == path.stem else None


def _crc(path: Path) -> str:
    crc = 0
    try:
        with open(path, "rb") as file:
            while block := file.read(1 << 20):
                crc = zlib.crc32(block, crc)
    except OSError:
        return ""
    return f"{crc:08x}"
