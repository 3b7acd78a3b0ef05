"""Where rows of prompts come from: files (JSONL, Parquet), folders of data sets, functions, tasks of reasoning-gym, and
seeds of environments.

Talks to files and, in the process that converts them (`busrl.data.convert`), to pyarrow and reasoning-gym, which are
imported where they are used. Knows nothing of filters, tokens or runs.

- A row is its place, for people, and a map of its columns, or what is wrong with it; rows come in the order of their
  file, the same each time.
- What cannot be read is a `Refused` with place, rule and remedy. Conditions are parsed by a grammar of their own:
  nothing that a topology says is evaluated as code.
"""

from __future__ import annotations

import dataclasses
import difflib
import operator
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from busrl.data.prompts import open_file, parse_line, prompt_lines, shares
from busrl.errors import DataError, Problem, UserError, cause
from busrl.files import read_map
from busrl.imports import load

Record = dict[str, Any]
Rows = Iterator[tuple[str, "Record | Problem"]]
BATCH = 1_000
ENVIRONMENT = re.compile(r"(gymnasium|textarena|openenv|verifiers):(.+)")  # what an agent may play, by its library
INDEX = "index"  # key of a line: the seed of an environment, or the number of a task
INDICES, HIGHEST_FIRST = 1024, 1 << 30  # of an environment where no number is given; servers may take 32 bits
PARQUET = (".parquet", ".pq")


class Refused(Exception):
    """A source that cannot be used, or not any further."""

    def __init__(self, place: str, rule: str, remedy: str, value: str = "") -> None:
        super().__init__(f"{place}: {rule}; {remedy}")
        self.problem = Problem(place, value, rule, remedy)


@dataclass(frozen=True)
class Origin:
    """One [[data.source]] as far as reading goes; see `busrl.config.schema.DataSource` for the keys."""

    name: str
    format: str
    path: str = ""
    split: str = "train"
    function: str = ""
    tasks: Mapping[str, float] | None = None
    task_options: Mapping[str, Mapping[str, Any]] | None = None
    size: int = 0
    tag: str = ""  # of tasks; empty: the name of each


def format_of(path: str, given: str = "auto", function: str = "", tasks: Mapping[str, float] | None = None) -> str:
    """What a source is, by its keys and the name of its path."""
    if given != "auto":
        return given
    if ENVIRONMENT.fullmatch(path):
        return "environment"
    if function or tasks:
        return "function" if function else "reasoning_gym"
    if path and Path(path).is_dir():
        return "hf"
    return "parquet" if path.endswith(PARQUET) else "jsonl"


def rows_of(origin: Origin, seed: int) -> Rows:
    """All rows of a source; `Refused` where it cannot be read."""
    if origin.format == "function":
        return _function_rows(origin)
    if origin.format == "reasoning_gym":
        return _gym_rows(origin, seed)
    if origin.format == "environment":
        return _indices(origin, seed)
    path = Path(origin.path)
    return _folder_rows(path, origin.split) if origin.format == "hf" else _file_rows(path, origin.format)


# -- files -----


def _file_rows(path: Path, kind: str) -> Rows:
    if kind == "parquet":
        yield from _parquet_rows(path)
    elif kind == "arrow":
        yield from _arrow_rows(path)
    else:
        yield from _jsonl_rows(path)


def _jsonl_rows(path: Path) -> Rows:
    try:
        descriptor = open_file(path)
    except DataError as problem:
        rule, _, remedy = str(problem).removeprefix(f"{path}: ").rpartition(": ")
        raise Refused(str(path), rule, remedy) from None
    with open(descriptor, "rb") as file:
        for number, (_, line) in enumerate(prompt_lines(file), 1):
            yield f"{path}:{number}", parse_line(line, f"{path}:{number}", "", "")


def _arrow(path: Path) -> Any:
    try:
        import pyarrow
        import pyarrow.parquet

        return pyarrow
    except ImportError:
        what = "Parquet files and folders of data sets need the package pyarrow"
        raise Refused(str(path), what, "pip install 'busrl[data]'") from None


def _said(problem: Exception) -> str:
    """What pyarrow says, without the place within pyarrow."""
    return f"{type(problem).__name__}: {problem}"


def _parquet_rows(path: Path) -> Rows:
    """Group of rows by group, so that a damaged one is named by its rows."""
    arrow = _arrow(path)
    try:
        file = arrow.parquet.ParquetFile(path)
    except (OSError, arrow.ArrowException) as problem:
        remedy = "give a Parquet file, or its format; a download may not have finished"
        raise Refused(str(path), f"not a Parquet file: {_said(problem)}", remedy) from None
    first = 1
    with file:
        for group in range(file.num_row_groups):
            last, number = first + file.metadata.row_group(group).num_rows - 1, first
            try:
                for batch in file.iter_batches(BATCH, row_groups=[group]):
                    for record in batch.to_pylist():
                        yield f"{path}: row {number}", record
                        number += 1
            except (OSError, arrow.ArrowException, UnicodeDecodeError) as problem:
                rule = f"rows {number} to {last} cannot be read: {_said(problem)}"
                remedy = "copy the file again, or write it again without them"
                raise Refused(f"{path}: row {number}", rule, remedy) from None
            first = last + 1


def _arrow_rows(path: Path) -> Rows:
    """A stream of record batches, as `datasets` saves it, or a file of them."""
    arrow = _arrow(path)
    number = 1
    try:
        with arrow.memory_map(str(path)) as file:
            try:
                batches = iter(arrow.ipc.open_stream(file))
            except arrow.ArrowInvalid:
                whole = arrow.ipc.open_file(file)
                batches = (whole.get_batch(at) for at in range(whole.num_record_batches))
            for batch in batches:
                for begin in range(0, batch.num_rows, BATCH):
                    for record in batch.slice(begin, BATCH).to_pylist():
                        yield f"{path}: row {number}", record
                        number += 1
    except (OSError, arrow.ArrowException, UnicodeDecodeError) as problem:
        rule = f"cannot be read from row {number} on: {_said(problem)}"
        raise Refused(f"{path}: row {number}", rule, "save the data set again, or copy it again") from None


def _folder_rows(folder: Path, split: str) -> Rows:
    """A folder that `datasets` saved, one split of it, or a data set as it is downloaded."""
    for path, kind in files_of(folder, split):
        yield from _file_rows(path, kind)


def files_of(folder: Path, split: str) -> list[tuple[Path, str]]:
    """The files of a split in order, with their formats."""
    if not folder.is_dir():
        raise Refused(str(folder), "no such folder", "give the folder of a data set")
    names = read_map(folder / "dataset_dict.json").get("splits")
    if isinstance(names, list):
        if split not in names:
            there = ", ".join(map(str, names))
            raise Refused(str(folder), f"no split {split!r}; it has {there}", "set split to one of them")
        folder = folder / split
    saved = read_map(folder / "state.json").get("_data_files")
    if isinstance(saved, list):
        return [(folder / str(one["filename"]), "arrow") for one in saved]
    found = sorted(path for path in folder.rglob("*") if path.name.endswith((*PARQUET, ".jsonl")))
    parts = [path for path in found if split in re.split(r"[^A-Za-z0-9]+", str(path.relative_to(folder)))]
    if not parts and found and not any(re.search(r"\b(train|test|validation)\b", _words(one, folder)) for one in found):
        parts = found  # files without the names of splits are one split
    if not parts:
        there = ", ".join(str(path.relative_to(folder)) for path in found[:8]) or "none"
        rule = f"no Parquet or JSONL file of split {split!r} in this folder; such files in it: {there}"
        raise Refused(str(folder), rule, "set split, or give one of the files as path")
    return [(path, "parquet" if path.name.endswith(PARQUET) else "jsonl") for path in parts]


def _words(path: Path, folder: Path) -> str:
    return re.sub(r"[^A-Za-z0-9]+", " ", str(path.relative_to(folder)))


# -- code -----


def _indices(origin: Origin, seed: int) -> Rows:
    """Seeds of an environment, numbered on from `seed`; what it shows for each is known when an agent plays it."""
    first = min(seed, HIGHEST_FIRST)
    for number in range(first, first + (origin.size or INDICES)):
        yield f"{origin.path}: index {number}", {"prompt": str(number), INDEX: number}


def _function_rows(origin: Origin) -> Rows:
    """What the user's function yields."""
    try:
        rows: Iterable[Any] = load("function", origin.function, UserError)()
        for number, record in enumerate(rows, 1):
            if not isinstance(record, dict) or not all(isinstance(name, str) for name in record):
                rule, remedy = f"yields {type(record).__name__}, not a map with strings as keys", "yield dicts"
                raise Refused(f"{origin.function}: row {number}", rule, remedy)
            yield f"{origin.function}: row {number}", record
    except Refused:
        raise
    except UserError as problem:
        raise Refused(origin.name, str(problem), "a file is relative to the topology") from None
    except BaseException as problem:  # foreign code
        raise Refused(origin.function, f"it raised {cause(problem)}", "correct it") from None


def _gym_rows(origin: Origin, seed: int) -> Rows:
    """Questions of reasoning-gym, their number shared out by the weights of the tasks."""
    try:
        from reasoning_gym.factory import DATASETS
    except ImportError:
        rule, remedy = "tasks need the package reasoning-gym", "pip install 'busrl[rewards]'"
        raise Refused(origin.name, rule, remedy) from None
    tasks = origin.tasks or {}
    for name in tasks:
        if name not in DATASETS:
            near = difflib.get_close_matches(name, DATASETS, 3) or sorted(DATASETS)
            rule = f"reasoning-gym has no task {name!r}"
            raise Refused(origin.name, rule, f"did you mean {' or '.join(near[:3])}? It has {len(DATASETS)} tasks")
    for (name, _), count in zip(tasks.items(), shares(list(tasks.values()), origin.size)):
        if not count:
            continue
        made = _gym_task(origin, name, {"size": count, "seed": seed})
        for number, entry in enumerate(made, 1):
            row = {"prompt": entry["question"], "answer": entry["answer"], "metadata": entry["metadata"]}
            yield f"{name}: item {number}", row | {"tag": origin.tag or name}


def _gym_task(origin: Origin, name: str, own: Record) -> Iterable[Record]:
    """A task with the options of its source; the library checks them as it makes it, by assertions too."""
    import reasoning_gym
    from reasoning_gym.factory import DATASETS

    given = dict((origin.task_options or {}).get(name, {}))
    there = sorted({one.name for one in dataclasses.fields(DATASETS[name][1])} - own.keys())
    if wrong := [option for option in given if option not in there]:
        rule = f"task {name!r} of reasoning-gym has no option {wrong[0]!r}; it has {', '.join(there)}"
        raise Refused(origin.name, rule, f"name one of them in task_options.{name}")
    try:
        made: Iterable[Record] = reasoning_gym.create_dataset(name, **given, **own)
    except Exception as problem:
        rule = f"task {name!r} of reasoning-gym refuses {given}: {cause(problem)}"
        raise Refused(origin.name, rule, f"correct task_options.{name}") from None
    return made


# -- conditions on columns -----


TESTS: dict[str, Callable[[Any, Any], bool]] = {
    "==": operator.eq, "!=": operator.ne, ">=": operator.ge, "<=": operator.le, ">": operator.gt, "<": operator.lt,
}
CONDITION = re.compile(
    r"\s*(?P<column>[A-Za-z_][\w.]*|`[^`]+`)\s*(?P<test>==|!=|>=|<=|>|<)\s*"
    r"(?P<value>-?\d+(?:\.\d*)?(?:[eE][+-]?\d+)?|\"(?:[^\"\\]|\\.)*\"|'[^']*'|true|false|null)\s*"
)
GRAMMAR = "conditions are COLUMN (== != >= <= > <) NUMBER, \"TEXT\", true, false or null, joined by `and`"


@dataclass(frozen=True)
class Condition:
    """One comparison of a column with a constant."""

    column: str
    test: str
    value: Any

    def holds(self, value: Any) -> bool:
        """Whether a value passes; TypeError where the two cannot be compared. Nothing is above or below null."""
        if self.test not in ("==", "!="):
            if value is None:
                return False
            if isinstance(value, str) != isinstance(self.value, str):
                raise TypeError(f"{type(value).__name__} {self.test} {type(self.value).__name__}")
        return bool(TESTS[self.test](value, self.value))


def parse_where(text: str) -> list[Condition]:
    """The conditions of `where`; ValueError says what is not understood, and the grammar."""
    found: list[Condition] = []
    at = 0
    while text.strip():
        match = CONDITION.match(text, at)
        if match is None:
            raise ValueError(f"{text[at : at + 40]!r} is not understood: {GRAMMAR}")
        raw, at = match["value"], match.end()
        value = raw[1:-1] if raw[0] == "'" else msgspec.json.decode(raw.removesuffix("."))
        if value is None and match["test"] not in ("==", "!="):
            raise ValueError(f"{match[0].strip()!r}: nothing is above or below null: {GRAMMAR}")
        found.append(Condition(match["column"].strip("`"), match["test"], value))
        if at == len(text):
            break
        joined = re.compile(r"and\b").match(text, at)
        if joined is None:
            raise ValueError(f"{text[at : at + 40]!r} is not understood: {GRAMMAR}")
        at = joined.end()
    return found


def column(record: Record, name: str) -> Any:
    """A column, or by dots what is within one; KeyError names the columns that there are."""
    value: Any = record
    for part in (name,) if name in record else name.split("."):
        if not isinstance(value, dict) or part not in value:
            raise KeyError(name)
        value = value[part]
    return value
