"""Sources of prompts' rows, and the program that makes them into one file of prompt lines.

Rows come from files (JSONL, Parquet), folders of data sets, functions, tasks of reasoning-gym, and seeds of
environments. `python -m busrl.data.sources`, started by `busrl.preflight`, gets a job as a line of JSON on stdin and
tells events as lines on stdout: a process of its own, since functions of the user run in it, and libraries that take
seconds to import. Talks to files, and there to pyarrow and reasoning-gym. Knows nothing of draws, weights or run
directories.

- A row is its place, for people, and a map of its columns, or what is wrong with it; rows come in the order of their
  file, the same each time. The lines of a source stand together, with sorted keys: the same rows give the same bytes.
- What cannot be read is a `Refused` with place, rule and remedy; a row that a rule leaves out is counted under it.
- Conditions have a grammar of their own: nothing that a topology says is evaluated as code.
- Between two events there is one row at most, or one import: a parent that hears nothing knows what hangs.
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
from busrl.data.prompts import SHOWN, Prompt, asked, fault, open_lines, parse_line, prompt_lines, prompt_of, shares
from busrl.errors import DataError, Problem, UserError, cause
from busrl.states import ENVIRONMENT
from busrl.system.files import read_map
from busrl.system.imports import load

Record = dict[str, Any]
Rows = Iterator[tuple[str, "Record | Problem"]]
BATCH = 1_000
INDEX = "index"  # key of a line: the seed of an environment, or the number of a task
INDICES, HIGHEST_FIRST = 1024, 1 << 30  # of an environment where no number is given; servers may take 32 bits
PARQUET = (".parquet", ".pq")
OTHERS = (".csv", ".tsv", ".json", ".gz", ".zst", ".zip")  # that have rows too; as path one says how it is converted
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
    """A file of lines to make, with the keys of [data] that say what a line asks."""

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
    without: str = ""  # a file of prompt lines, none of whose prompts is taken


class Made(msgspec.Struct):
    """The lines made of a source: `count` lines from line `start`, of `read` rows; the others by reason."""

    name: str
    start: int
    count: int = 0
    read: int = 0
    left_out: dict[str, int] = {}
    shortened: int = 0


class Event(msgspec.Struct):
    """A report of the work; the last one has either what was made, or what is wrong (source, place, value, rule,
    remedy)."""

    at: str = ""
    made: list[Made] = []
    crc: int = 0
    problems: list[tuple[int, str, str, str, str]] = []


class Refused(Exception):
    """A source that cannot be used, or not any further."""

    def __init__(self, place: str, rule: str, remedy: str, value: str = "") -> None:
        super().__init__(f"{place}: {rule}; {remedy}")
        self.problem = Problem(place, value, rule, remedy)


def format_of(path: str, given: str = "auto", function: str = "", tasks: Mapping[str, float] | None = None) -> str:
    """Tell the format of a source by its keys and the name of its path."""
    if given != "auto":
        return given
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
    return (row for one, kind in files for row in readers[kind](one))


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


def _said(problem: Exception) -> str:
    """The message of pyarrow, without the place within pyarrow."""
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
        others = sorted(path.name for path in folder.rglob("*") if not found and path.suffix in OTHERS)
        more = f", of other kinds {', '.join(others[:8])}" if others else ""
        rule = f"no Parquet or JSONL file of split {split!r} in this folder; such files in it: {there}{more}"
        raise Refused(str(folder), rule, "set split, or give one of the files as path")
    return [(path, "parquet" if path.name.endswith(PARQUET) else "jsonl") for path in parts]


def _words(path: Path, folder: Path) -> str:
    return re.sub(r"[^A-Za-z0-9]+", " ", str(path.relative_to(folder)))


# -- code -----


def _indices(source: Source, seed: int) -> Rows:
    """Seeds of an environment, numbered on from `seed`; what it shows for each is known when an agent plays it."""
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
    """Questions of reasoning-gym, their number shared out by the weights of the tasks."""
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
        made = _gym_task(source, name, {"size": count, "seed": seed})
        for number, entry in enumerate(made, 1):
            row = {"prompt": entry["question"], "answer": entry["answer"], "metadata": entry["metadata"]}
            yield f"{name}: item {number}", row | {"tag": source.tag or name}


def _gym_task(source: Source, name: str, own: Record) -> Iterable[Record]:
    """A task with the options of its source; the library checks them as it makes it, by assertions too."""
    from reasoning_gym.factory import DATASETS, create_dataset

    given = dict(source.task_options.get(name, {}))
    there = sorted({one.name for one in dataclasses.fields(DATASETS[name][1])} - own.keys())
    if wrong := [option for option in given if option not in there]:
        rule = f"task {name!r} of reasoning-gym has no option {wrong[0]!r}; it has {', '.join(there)}"
        raise Refused(source.name, rule, f"name one of them in task_options.{name}")
    try:
        made: Iterable[Record] = create_dataset(name, **given, **own)
    except Exception as problem:
        rule = f"task {name!r} of reasoning-gym refuses {given}: {cause(problem)}"
        raise Refused(source.name, rule, f"correct task_options.{name}") from None
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


# -- one file of lines -----


class Stopped(Exception):
    """Enough problems were found."""


class Conversion:
    """A job; `run` yields what it is doing, and gives the last event."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.made: list[Made] = []
        self.problems: list[tuple[int, str, str, str, str]] = []
        self._seen: set[bytes] = set()
        self._known = _prompts_of(Path(job.without), job.prompt_key) if job.without else frozenset()
        self._crc = self._lines = 0

    def run(self) -> Iterator[Event]:
        with open(self.job.out, "wb", buffering=1 << 20) as file:
            for number, source in enumerate(self.job.sources):
                made = Made(source.name, self._lines)
                yield Event(f"{source.name}: opening it")
                try:
                    rules = Rules(self.job, source, self._seen, self._known)
                    yield from self._source(rules, source, made, file, number)
                except Refused as refused:
                    self._problem(number, refused.problem)
                except Stopped:
                    pass
                self._lines += made.count
                self.made.append(made)
        yield Event(made=self.made, crc=self._crc, problems=self.problems)

    def _source(self, rules: Rules, source: Source, made: Made, file: IO[bytes], number: int) -> Iterator[Event]:
        left_out: Counter[str] = Counter()
        told = time.monotonic()
        for place, record in rows_of(source, self.job.seed, self.job.base_dir):
            made.read += 1
            if time.monotonic() - told > EVENT_S:
                yield Event(place)
                told = time.monotonic()
            found = record if isinstance(record, Problem) else rules.line(place, record)
            if isinstance(found, Problem):
                self._problem(number, found)
                if rules.lacks and made.read == 1:
                    return  # the other rows have no such column either
            elif isinstance(found, str):
                left_out[found] += 1
            else:
                file.write(found)
                self._crc = zlib.crc32(found, self._crc)
                made.count += 1
                if made.count == source.size:
                    break
        made.left_out, made.shortened = dict(left_out.most_common()), rules.shortened
        if not made.count and not any(one[0] == number for one in self.problems):
            why = ", ".join(f"{count} {reason}" for reason, count in made.left_out.items())
            rule = f"none of its {made.read} rows is left: {why}" if made.read else "it has no row"
            self._problem(number, Problem(source.name, "", rule, "give rows, or conditions that some of them keep"))

    def _problem(self, number: int, problem: Problem) -> None:
        self.problems.append((number, problem.place, problem.value, problem.rule, problem.remedy))
        if sum(one[0] == number for one in self.problems) >= SHOWN:
            rule = f"no row after the {SHOWN} broken ones is looked at"
            self.problems.append((number, self.job.sources[number].name, "", rule, "correct those first"))
            raise Stopped


class Rules:
    """Apply a source's keys to a row."""

    def __init__(self, job: Job, source: Source, seen: set[bytes], known: frozenset[bytes] = frozenset()) -> None:
        self.job, self.source, self.seen, self.known = job, source, seen, known
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
        """The line of a row with its newline, the reason to leave it out, or what is wrong with it."""
        try:
            if not all(one.holds(column(record, one.column)) for one in self._where):
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
        """The row with prompt, answer and tag under the names that the run knows them by."""
        own, job = self.source, self.job
        made = dict(record)
        if own.prompt_text:
            made[job.prompt_key] = PLACE.sub(lambda match: str(column(record, match[1])), own.prompt_text)
        elif own.prompt_key != job.prompt_key:
            made[job.prompt_key] = made.pop(own.prompt_key)
        if own.answer_key != job.answer_key:
            made[job.answer_key] = made.pop(own.answer_key)
        elif job.answers and job.answer_key not in made:
            raise KeyError(job.answer_key)
        prompt = made[job.prompt_key]
        if isinstance(prompt, list):  # columns have a place for every field, empty ones too
            prompt = [_without_nulls(message) for message in prompt]
            made[job.prompt_key] = prompt if fault(prompt) else asked(prompt)
        made.setdefault(TAG, own.tag)
        return made

    def _refusal(self, place: str, record: Record) -> str:
        """The reason why the row is left out, "" if it is not; `Refused` for one that can be no prompt."""
        prompt = record[self.job.prompt_key]
        if rule := fault(prompt):
            shown = repr(prompt)[:60]
            raise Refused(place, rule, _remedy(self.source.prompt_key, prompt), f"{self.source.prompt_key} = {shown}")
        answer = record[self.job.answer_key] if self.job.answers else ""
        if not isinstance(answer, (str, int, float)) or answer != answer:
            shown = f"{self.source.answer_key} = {answer!r}"
            remedy = _remedy(self.source.answer_key, answer)
            raise Refused(place, "must be a string, a number, true or false", remedy, shown)
        if not self._kept(place, record):
            return "by filter"
        if self.known and _digest(prompt) in self.known:
            return "as prompts of training"
        if self.source.dedupe:
            digest = _digest(prompt)
            if digest in self.seen:
                return "as duplicates"
            self.seen.add(digest)
        return self._by_tokens(place, record) if self._tokens is not None else ""

    def _kept(self, place: str, record: Record) -> bool:
        try:
            return bool(self._filter(record))
        except BaseException as problem:  # foreign code
            remedy = f"correct {self.source.filter}, which gets the row as a map of its columns"
            raise Refused(place, f"the filter raised {cause(problem)}", remedy) from None

    # -- tokens -----

    def _by_tokens(self, place: str, record: Record) -> str:
        own = self.source
        tokens = self._count(place, record)
        if tokens < own.min_prompt_tokens:
            return f"shorter than {own.min_prompt_tokens} tokens"
        if not own.max_prompt_tokens or tokens <= own.max_prompt_tokens:
            return ""
        if own.too_long in (LEFT, RIGHT) and self._shorten(place, record, tokens):
            self.shortened += 1
            return ""
        return f"longer than {own.max_prompt_tokens} tokens"

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
    """The prompts of a file of lines, by their digests; broken lines have a message elsewhere."""
    try:
        with open(path, "rb") as file:
            found = (parse_line(line, "", prompt_key) for _, line in prompt_lines(file))
            return frozenset(_digest(one[prompt_key]) for one in found if not isinstance(one, Problem))
    except OSError:
        return frozenset()


def _remedy(name: str, value: Any) -> str:
    """The remedy for a value that can be no prompt, or no answer."""
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
    return {name: one for name, one in message.items() if one is not None} if isinstance(message, dict) else message


def main() -> int:
    """The job of stdin; what user code prints goes to stderr."""
    events = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)
    sys.stdout = sys.stderr
    for event in Conversion(msgspec.json.decode(sys.stdin.buffer.readline(), type=Job)).run():
        events.write(msgspec.json.encode(event) + b"\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
