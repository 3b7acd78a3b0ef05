"""Sources of prompts' rows, and the program that makes them into one file of prompt lines.

Rows come from files (JSONL, Parquet), folders of data sets, functions, tasks of reasoning-gym, and seeds of
environments. `python -m busrl.data.sources`, started by `busrl.preflight`, reads a job as a line of JSON from stdin and
writes events as lines to stdout. It is a process of its own, since it runs functions of the user and imports libraries
that take seconds. Talks to files, pyarrow and reasoning-gym. Knows nothing of draws, weights or run directories.

- A row is its place, in words for people, and a map of its columns, or a `Problem`. Rows come in the order of their
  file, the same each time. The lines of a source stand together, with sorted keys: the same rows give the same bytes.
- A source that cannot be read raises `Refused` with place, rule and remedy; rows that a rule leaves out are counted by
  rule.
- Conditions have a grammar of their own: no text of a topology is evaluated as code.
- Between two events there is one row at most, or one import: the last event names what hangs.
"""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
import operator
import os
import re
import sys
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import msgspec

from busrl.data.chat import LightTokenizer
from busrl.data.prompts import SHOWN, Prompt, fault, normalised, open_lines, parse_line, prompt_lines, prompt_of, shares
from busrl.errors import DataError, Problem, UserError, cause
from busrl.states import ENVIRONMENT
from busrl.system.files import read_map
from busrl.system.imports import load

Record = dict[str, Any]
Rows = Iterator[tuple[str, "Record | Problem"]]
BATCH = 1_000
INDEX = "index"  # key of a line: the seed of an environment, or the number of a task
INDICES, HIGHEST_FIRST = 1024, 1 << 30  # of an environment without a size; its server may take 32 bits
PARQUET = (".parquet", ".pq")
OTHERS = (".csv", ".tsv", ".json", ".gz", ".zst", ".zip")  # have rows too; given as path, the error says how to convert
TAG, PLACE = "tag", re.compile(r"\{([^{}]+)\}")
EVENT_S = 0.5
BESIDE = "a file is relative to the topology, and a module lies beside it or is installed"
TRIES = 8  # of shortening a text until it fits
LEFT, RIGHT = "truncate_left", "truncate_right"


class Source(msgspec.Struct, frozen=True, kw_only=True):
    """A [[data.source]], its empty keys filled in."""

    name: str
    format: str
    path: str
    split: str
    function: str
    tasks: dict[str, float]
    task_options: dict[str, dict[str, Any]]
    size: int
    prompt_key: str
    prompt_text: str
    answer_key: str
    tag: str
    where: str
    filter: str
    dedupe: bool
    min_prompt_tokens: int
    max_prompt_tokens: int
    too_long: str


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """The file of lines to make, and the keys of [data] by which a line becomes a prompt."""

    sources: list[Source]
    out: str
    seed: int
    model: str  # folder of the tokenizer, "" where none is there
    prompt_key: str
    answer_key: str
    answers: bool  # every line must have a right answer
    template: str
    system: str
    tools_key: str
    template_arguments: dict[str, Any]
    base_dir: str  # of the topology, for code of the user's
    without: str = ""  # a file of prompt lines; rows with one of its prompts are left out


class Made(msgspec.Struct):
    """The lines made of a source: `count` lines from line `start`, of `read` rows; `left_out` counts the others by
    reason."""

    name: str
    start: int
    count: int = 0
    read: int = 0
    left_out: dict[str, int] = {}
    shortened: int = 0


class Event(msgspec.Struct):
    """A report of the work. The last one has either `made`, or `problems` (source, place, value, rule, remedy)."""

    at: str = ""
    made: list[Made] = []
    crc: int = 0
    problems: list[tuple[int, str, str, str, str]] = []


class Refused(Exception):
    """A source that cannot be used, or not any further."""

    def __init__(self, place: str, rule: str, remedy: str, value: str = "") -> None:
        super().__init__(f"{place}: {rule}; {remedy}")
        self.problem = Problem(place, value, rule, remedy)


def format_of(path: str, form: str = "auto", function: str = "", tasks: Mapping[str, float] | None = None) -> str:
    """The format of a source: `form`, or for "auto" the one that its keys and the name of its path imply."""
    if form != "auto":
        return form
    if ENVIRONMENT.fullmatch(path):
        return "environment"
    if function or tasks:
        return "function" if function else "reasoning_gym"
    if path and Path(path).is_dir():
        return "hf"
    return "parquet" if path.endswith(PARQUET) else "jsonl"


def rows_of(source: Source, seed: int, base_dir: str) -> Rows:
    """All rows of a source; `Refused` where it cannot be read."""
    if source.format == "function":
        return _function_rows(source, base_dir)
    if source.format == "reasoning_gym":
        return _gym_rows(source, seed)
    if source.format == "environment":
        return _indices(source, seed)
    path, readers = Path(source.path), {"parquet": _parquet_rows, "arrow": _arrow_rows, "jsonl": _jsonl_rows}
    files = files_of(path, source.split) if source.format == "hf" else [(path, source.format)]
    return (row for file, kind in files for row in readers[kind](file))


# -- files -----


def _jsonl_rows(path: Path) -> Rows:
    try:
        file = open_lines(path)
    except DataError as problem:
        rule, _, remedy = str(problem).removeprefix(f"{path}: ").rpartition(": ")
        raise Refused(str(path), rule, remedy) from None
    with file:
        for number, (_, line) in enumerate(prompt_lines(file), 1):
            yield f"{path}:{number}", parse_line(line, f"{path}:{number}", "")


def _arrow(path: Path) -> Any:
    try:
        import pyarrow
        import pyarrow.parquet

        return pyarrow
    except ImportError:
        what = "Parquet files and folders of data sets need the package pyarrow"
        raise Refused(str(path), what, "pip install 'busrl[data]'") from None


def _in_words(problem: Exception) -> str:
    return f"{type(problem).__name__}: {problem}"


def _parquet_rows(path: Path) -> Rows:
    """Read one row group after the other, so that the message names the rows of a damaged group."""
    arrow = _arrow(path)
    try:
        file = arrow.parquet.ParquetFile(path)
    except (OSError, arrow.ArrowException) as problem:
        remedy = "give a Parquet file, or its format; a download may not have finished"
        raise Refused(str(path), f"not a Parquet file: {_in_words(problem)}", remedy) from None
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
                rule = f"rows {number} to {last} cannot be read: {_in_words(problem)}"
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
                file_of_batches = arrow.ipc.open_file(file)
                batches = (file_of_batches.get_batch(at) for at in range(file_of_batches.num_record_batches))
            for batch in batches:
                for begin in range(0, batch.num_rows, BATCH):
                    for record in batch.slice(begin, BATCH).to_pylist():
                        yield f"{path}: row {number}", record
                        number += 1
    except (OSError, arrow.ArrowException, UnicodeDecodeError) as problem:
        rule = f"cannot be read from row {number} on: {_in_words(problem)}"
        raise Refused(f"{path}: row {number}", rule, "save the data set again, or copy it again") from None


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
        return [(folder / str(entry["filename"]), "arrow") for entry in saved]
    paths = sorted(path for path in folder.rglob("*") if path.name.endswith((*PARQUET, ".jsonl")))
    parts = [path for path in paths if split in re.split(r"[^A-Za-z0-9]+", str(path.relative_to(folder)))]
    if not parts and not any(re.search(r"\b(train|test|validation)\b", _words(path, folder)) for path in paths):
        parts = paths  # files without the names of splits are one split
    if not parts:
        there = ", ".join(str(path.relative_to(folder)) for path in paths[:8]) or "none"
        others = sorted(path.name for path in folder.rglob("*") if not paths and path.suffix in OTHERS)
        more = f", of other kinds {', '.join(others[:8])}" if others else ""
        rule = f"no Parquet or JSONL file of split {split!r} in this folder; such files in it: {there}{more}"
        raise Refused(str(folder), rule, "set split, or give one of the files as path")
    return [(path, "parquet" if path.name.endswith(PARQUET) else "jsonl") for path in parts]


def _words(path: Path, folder: Path) -> str:
    return re.sub(r"[^A-Za-z0-9]+", " ", str(path.relative_to(folder)))


# -- code -----


def _indices(source: Source, seed: int) -> Rows:
    """Seeds of an environment, from `seed` on; the environment shows the prompt of a seed when an agent plays it."""
    first = min(seed, HIGHEST_FIRST)
    for number in range(first, first + (source.size or INDICES)):
        yield f"{source.path}: index {number}", {"prompt": str(number), INDEX: number}


def _function_rows(source: Source, base_dir: str) -> Rows:
    try:
        rows: Iterable[Any] = load("function", source.function, UserError, base_dir)()
        for number, record in enumerate(rows, 1):
            if not isinstance(record, dict) or not all(isinstance(name, str) for name in record):
                rule, remedy = f"yields {type(record).__name__}, not a map with strings as keys", "yield dicts"
                raise Refused(f"{source.function}: row {number}", rule, remedy)
            yield f"{source.function}: row {number}", record
    except Refused:
        raise
    except UserError as problem:
        raise Refused(source.name, str(problem), BESIDE) from None
    except BaseException as problem:  # foreign code
        raise Refused(source.function, f"it raised {cause(problem)}", "correct it") from None


def _gym_rows(source: Source, seed: int) -> Rows:
    """Questions of reasoning-gym; the weights of the tasks share out their number."""
    try:
        from reasoning_gym.factory import DATASETS
    except ImportError:
        rule, remedy = "tasks need the package reasoning-gym", "pip install 'busrl[rewards]'"
        raise Refused(source.name, rule, remedy) from None
    tasks = source.tasks
    for name in tasks:
        if name not in DATASETS:
            near = difflib.get_close_matches(name, DATASETS, 3) or sorted(DATASETS)
            rule = f"reasoning-gym has no task {name!r}"
            raise Refused(source.name, rule, f"did you mean {' or '.join(near[:3])}? It has {len(DATASETS)} tasks")
    for (name, _), count in zip(tasks.items(), shares(list(tasks.values()), source.size)):
        if not count:
            continue
        entries = _gym_task(source, name, {"size": count, "seed": seed})
        for number, entry in enumerate(entries, 1):
            row = {"prompt": entry["question"], "answer": entry["answer"], "metadata": entry["metadata"]}
            yield f"{name}: item {number}", row | {"tag": source.tag or name}


def _gym_task(source: Source, name: str, required: Record) -> Iterable[Record]:
    """The entries of a task with the options of its source; the library checks the options, by assertions too."""
    from reasoning_gym.factory import DATASETS, create_dataset

    options = dict(source.task_options.get(name, {}))
    there = sorted({option.name for option in dataclasses.fields(DATASETS[name][1])} - required.keys())
    if wrong := [option for option in options if option not in there]:
        rule = f"task {name!r} of reasoning-gym has no option {wrong[0]!r}; it has {', '.join(there)}"
        raise Refused(source.name, rule, f"name one of them in task_options.{name}")
    try:
        entries: Iterable[Record] = create_dataset(name, **options, **required)
    except Exception as problem:
        rule = f"task {name!r} of reasoning-gym refuses {options}: {cause(problem)}"
        raise Refused(source.name, rule, f"correct task_options.{name}") from None
    return entries


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
    column: str
    test: str
    value: Any

    def holds(self, value: Any) -> bool:
        """Tell whether a value passes; TypeError where the two cannot be compared. Nothing is above or below null."""
        if self.test not in ("==", "!="):
            if value is None:
                return False
            if isinstance(value, str) != isinstance(self.value, str):
                raise TypeError(f"{type(value).__name__} {self.test} {type(self.value).__name__}")
        return bool(TESTS[self.test](value, self.value))


def parse_where(text: str) -> list[Condition]:
    """The conditions of `where`; ValueError names the part that does not parse, and the grammar."""
    conditions: list[Condition] = []
    at = 0
    while text.strip():
        match = CONDITION.match(text, at)
        if match is None:
            raise ValueError(f"{text[at : at + 40]!r} is not understood: {GRAMMAR}")
        raw, at = match["value"], match.end()
        value = raw[1:-1] if raw[0] == "'" else msgspec.json.decode(raw.removesuffix("."))
        if value is None and match["test"] not in ("==", "!="):
            raise ValueError(f"{match[0].strip()!r}: nothing is above or below null: {GRAMMAR}")
        conditions.append(Condition(match["column"].strip("`"), match["test"], value))
        if at == len(text):
            break
        joined = re.compile(r"and\b").match(text, at)
        if joined is None:
            raise ValueError(f"{text[at : at + 40]!r} is not understood: {GRAMMAR}")
        at = joined.end()
    return conditions


def column(record: Record, name: str) -> Any:
    """The value of a column, or, by a name with dots, of a field in it; KeyError has the name of a missing one."""
    value: Any = record
    for part in (name,) if name in record else name.split("."):
        if not isinstance(value, dict) or part not in value:
            raise KeyError(name)
        value = value[part]
    return value


# -- one file of lines -----


class Stopped(Exception):
    """The source has SHOWN problems, and no further row is read."""


class Conversion:
    """A job under way; `run` yields its events, the result last."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.made: list[Made] = []
        self.problems: list[tuple[int, str, str, str, str]] = []
        self._seen: set[bytes] = set()
        self._of_training = _prompts_of(Path(job.without), job.prompt_key) if job.without else frozenset()
        self._crc = self._lines = 0

    def run(self) -> Iterator[Event]:
        with open(self.job.out, "wb", buffering=1 << 20) as file:
            for number, source in enumerate(self.job.sources):
                lines = Made(source.name, self._lines)
                yield Event(f"{source.name}: opening it")
                try:
                    rules = Rules(self.job, source, self._seen, self._of_training)
                    yield from self._source(rules, source, lines, file, number)
                except Refused as refused:
                    self._problem(number, refused.problem)
                except Stopped:
                    pass
                self._lines += lines.count
                self.made.append(lines)
        yield Event(made=self.made, crc=self._crc, problems=self.problems)

    def _source(self, rules: Rules, source: Source, lines: Made, file: IO[bytes], number: int) -> Iterator[Event]:
        left_out: Counter[str] = Counter()
        reported = time.monotonic()
        for place, record in rows_of(source, self.job.seed, self.job.base_dir):
            lines.read += 1
            if time.monotonic() - reported > EVENT_S:
                yield Event(place)
                reported = time.monotonic()
            line = record if isinstance(record, Problem) else rules.line(place, record)
            if isinstance(line, Problem):
                self._problem(number, line)
                if rules.lacks and lines.read == 1:
                    return  # the other rows have no such column either
            elif isinstance(line, str):
                left_out[line] += 1
            else:
                file.write(line)
                self._crc = zlib.crc32(line, self._crc)
                lines.count += 1
                if lines.count == source.size:
                    break
        lines.left_out, lines.shortened = dict(left_out.most_common()), rules.shortened
        if not lines.count and not any(problem[0] == number for problem in self.problems):
            why = ", ".join(f"{count} {reason}" for reason, count in lines.left_out.items())
            rule = f"none of its {lines.read} rows is left: {why}" if lines.read else "it has no row"
            self._problem(number, Problem(source.name, "", rule, "give rows, or conditions that some of them keep"))

    def _problem(self, number: int, problem: Problem) -> None:
        self.problems.append((number, problem.place, problem.value, problem.rule, problem.remedy))
        if sum(entry[0] == number for entry in self.problems) >= SHOWN:
            rule = f"no row after the {SHOWN} broken ones is looked at"
            self.problems.append((number, self.job.sources[number].name, "", rule, "correct those first"))
            raise Stopped


class Rules:
    """The keys of a source, applied to its rows one by one."""

    def __init__(self, job: Job, source: Source, seen: set[bytes], of_training: frozenset[bytes] = frozenset()) -> None:
        self.job, self.source, self.seen, self.of_training = job, source, seen, of_training
        self.shortened = 0
        self.lacks = ""  # a column that a row should have had
        self._where: list[Condition] = parse_where(source.where)
        self._filter: Callable[[Record], Any] = lambda record: True
        if source.filter:
            try:
                self._filter = load("filter", source.filter, UserError, job.base_dir)
            except UserError as problem:
                raise Refused(source.name, str(problem), BESIDE) from None
        self._tokens: LightTokenizer | None = None
        if source.min_prompt_tokens or source.max_prompt_tokens:
            self._tokens = LightTokenizer.of(Path(job.model)) if job.model else None
            if self._tokens is None:
                rule = "tokens cannot be counted: the model folder has no tokenizer.json, or tokenizers is missing"
                raise Refused(source.name, rule, "remove min_prompt_tokens and max_prompt_tokens, or save that file")

    def line(self, place: str, record: Record) -> bytes | str | Problem:
        """The line of a row with its newline, the reason to leave the row out (a string), or the problem in it."""
        try:
            if not all(condition.holds(column(record, condition.column)) for condition in self._where):
                return "by where"
            record = self._record(record)
            reason = self._refusal(place, record)
        except KeyError as missing:
            self.lacks = str(missing.args[0])
            return _no_column(place, record, self.lacks)
        except TypeError as problem:
            return Problem(place, "", f"where compares different kinds: {problem}", "correct the condition")
        except Refused as refused:
            return refused.problem
        if reason:
            return reason
        try:
            return msgspec.json.encode(record, enc_hook=str, order="sorted") + b"\n"
        except (TypeError, ValueError, RecursionError) as problem:
            return Problem(place, "", f"cannot be JSON: {cause(problem)}", "leave out that column, or make it text")

    def _record(self, record: Record) -> Record:
        """The row with prompt, answer and tag under the keys of [data]."""
        source, job = self.source, self.job
        row = dict(record)
        if source.prompt_text:
            row[job.prompt_key] = PLACE.sub(lambda match: str(column(record, match[1])), source.prompt_text)
        elif source.prompt_key != job.prompt_key:
            row[job.prompt_key] = row.pop(source.prompt_key)
        if source.answer_key != job.answer_key:
            row[job.answer_key] = row.pop(source.answer_key)
        elif job.answers and job.answer_key not in row:
            raise KeyError(job.answer_key)
        prompt = row[job.prompt_key]
        if isinstance(prompt, list):  # columns have a place for every field, empty ones too
            prompt = [_without_nulls(message) for message in prompt]
            row[job.prompt_key] = prompt if fault(prompt) else normalised(prompt)
        row.setdefault(TAG, source.tag)
        return row

    def _refusal(self, place: str, record: Record) -> str:
        """The reason to leave the row out, "" for none; `Refused` for a row that can be no prompt."""
        prompt = record[self.job.prompt_key]
        if rule := fault(prompt):
            shown = repr(prompt)[:60]
            raise Refused(place, rule, _remedy(self.source.prompt_key, prompt), f"{self.source.prompt_key} = {shown}")
        answer = record[self.job.answer_key] if self.job.answers else ""
        if not isinstance(answer, (str, int, float)) or answer != answer:
            shown = f"{self.source.answer_key} = {answer!r}"
            remedy = _remedy(self.source.answer_key, answer)
            raise Refused(place, "must be a string, a number, true or false", remedy, shown)
        if not self._passes_filter(place, record):
            return "by filter"
        if self.of_training and _digest(prompt) in self.of_training:
            return "as prompts of training"
        if self.source.dedupe:
            digest = _digest(prompt)
            if digest in self.seen:
                return "as duplicates"
            self.seen.add(digest)
        return self._by_tokens(place, record) if self._tokens is not None else ""

    def _passes_filter(self, place: str, record: Record) -> bool:
        try:
            return bool(self._filter(record))
        except BaseException as problem:  # foreign code
            remedy = f"correct {self.source.filter}, which gets the row as a map of its columns"
            raise Refused(place, f"the filter raised {cause(problem)}", remedy) from None

    # -- tokens -----

    def _by_tokens(self, place: str, record: Record) -> str:
        source = self.source
        tokens = self._count(place, record)
        if tokens < source.min_prompt_tokens:
            return f"shorter than {source.min_prompt_tokens} tokens"
        if not source.max_prompt_tokens or tokens <= source.max_prompt_tokens:
            return ""
        if source.too_long in (LEFT, RIGHT) and self._shorten(place, record, tokens):
            self.shortened += 1
            return ""
        return f"longer than {source.max_prompt_tokens} tokens"

    def _count(self, place: str, record: Record) -> int:
        assert self._tokens is not None
        try:
            prompt: Prompt = prompt_of(record, self.job)
            return len(self._tokens.ids(prompt))
        except DataError as problem:
            raise Refused(place, str(problem), "correct the row, or the template") from None

    def _shorten(self, place: str, record: Record, tokens: int) -> bool:
        """Cut the text, or that of the last message, until the whole prompt fits; False if no text is left."""
        assert self._tokens is not None
        key, limit = self.job.prompt_key, self.source.max_prompt_tokens
        value = record[key]
        for _ in range(TRIES):
            text = value if isinstance(value, str) else str(value[-1]["content"] or "")
            text = self._tokens.cut(text, tokens - limit, left=self.source.too_long == LEFT)
            if not text.strip():
                return False
            value = text if isinstance(value, str) else [*value[:-1], {**value[-1], "content": text}]
            record[key] = value
            tokens = self._count(place, record)
            if tokens <= limit:
                return True
        return False


def _digest(prompt: Any) -> bytes:
    return hashlib.blake2b(msgspec.json.encode(prompt, order="sorted"), digest_size=12).digest()


def _prompts_of(path: Path, prompt_key: str) -> frozenset[bytes]:
    """The digests of the prompts in a file of lines; broken lines are skipped, as the check of that file names them."""
    try:
        with open(path, "rb") as file:
            records = (parse_line(line, "", prompt_key) for _, line in prompt_lines(file))
            return frozenset(_digest(record[prompt_key]) for record in records if not isinstance(record, Problem))
    except OSError:
        return frozenset()


def _remedy(name: str, value: Any) -> str:
    """The remedy for a value that cannot be a prompt, or an answer."""
    if value is None:
        return f'correct it, or leave it out: where = "{name} != null"'
    if isinstance(value, (int, float)) and value == value:
        return f'prompt_text = "{{{name}}}" makes a text of it'
    return "correct it, or leave it out by a filter"


def _no_column(place: str, record: Record, name: str) -> Problem:
    columns = ", ".join(sorted(record)) or "none"
    near = difflib.get_close_matches(name, record, n=1)
    remedy = f"did you mean {near[0]!r}?" if near else "name one of them"
    return Problem(place, "", f"no column {name!r}; the columns are {columns}", remedy)


def _without_nulls(message: Any) -> Any:
    if not isinstance(message, dict):
        return message
    return {name: value for name, value in message.items() if value is not None}


def main() -> int:
    """Run the job of stdin; what user code prints goes to stderr."""
    events = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)
    sys.stdout = sys.stderr
    for event in Conversion(msgspec.json.decode(sys.stdin.buffer.readline(), type=Job)).run():
        events.write(msgspec.json.encode(event) + b"\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
