"""Makes the sources of a run into one file of prompt lines: `python -m busrl.data.convert`, started by `busrl.config`.

Talks to its parent (a job as a line of JSON on stdin, events as lines on stdout), to the sources and to the file that
it writes. A process of its own, since functions of the user run in it, and libraries that take seconds to import.
Knows nothing of draws, weights or run directories.

- The lines of a source stand together, in its order: JSON with sorted keys, so the same rows give the same bytes.
- A row that cannot be a prompt is a problem with its place; one that a rule leaves out is counted under that rule.
- Between two events there is one row at most, or one import: a parent that hears nothing knows what hangs.
"""

from __future__ import annotations

import hashlib
import os
import re
import sys
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

import msgspec

from busrl.data.chat import LightTokenizer
from busrl.data.prompts import SHOWN, Prompt, fault, parse_line, prompt_lines, prompt_of
from busrl.data.sources import Condition, Origin, Record, Refused, column, parse_where, rows_of
from busrl.errors import DataError, Problem, UserError, cause
from busrl.imports import load

TAG, PLACE = "tag", re.compile(r"\{([^{}]+)\}")
EVENT_S = 0.5
TRIES = 8  # of shortening a text until it fits
LEFT, RIGHT = "truncate_left", "truncate_right"


class Source(msgspec.Struct, frozen=True, kw_only=True):
    """One [[data.source]], its empty keys filled in."""

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
    """What is to be made, with the keys of [data] that say what a line asks."""

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
    without: str = ""  # a file of prompt lines, none of whose prompts is taken


class Made(msgspec.Struct):
    """What became of a source: `count` lines from line `start`, of `read` rows; the others by reason."""

    name: str
    start: int
    count: int = 0
    read: int = 0
    left_out: dict[str, int] = {}
    shortened: int = 0


class Event(msgspec.Struct):
    """Where the work is; the last one has either what was made, or what is wrong (source, place, value, rule, remedy).
    """

    at: str = ""
    made: list[Made] = []
    crc: int = 0
    problems: list[tuple[int, str, str, str, str]] = []


class Stopped(Exception):
    """Enough problems were found."""


class Conversion:
    """One job; `run` yields what it is doing, and gives the last event."""

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
        origin = Origin(
            source.name, source.format, source.path, source.split, source.function, source.tasks,
            source.task_options, source.size, source.tag,
        )
        left_out: Counter[str] = Counter()
        told = time.monotonic()
        for place, record in rows_of(origin, self.job.seed):
            made.read += 1
            if time.monotonic() - told > EVENT_S:
                yield Event(place)
                told = time.monotonic()
            found = record if isinstance(record, Problem) else rules.line(place, record)
            if isinstance(found, Problem):
                self._problem(number, found)
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
    """What a source's keys do with a row."""

    def __init__(self, job: Job, source: Source, seen: set[bytes], known: frozenset[bytes] = frozenset()) -> None:
        self.job, self.source, self.seen, self.known = job, source, seen, known
        self.shortened = 0
        self._where: list[Condition] = parse_where(source.where)
        self._filter: Callable[[Record], Any] | None = None
        if source.filter:
            try:
                self._filter = load("filter", source.filter, UserError)
            except UserError as problem:
                raise Refused(source.name, str(problem), "a file is relative to the topology") from None
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
            return _no_column(place, record, str(missing.args[0]))
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
            made[job.prompt_key] = _present(made, own.prompt_key)
            del made[own.prompt_key]
        if own.answer_key != job.answer_key:
            made[job.answer_key] = _present(made, own.answer_key)
            del made[own.answer_key]
        elif job.answers:
            _present(made, job.answer_key)
        prompt = _present(made, job.prompt_key)
        if isinstance(prompt, list):  # columns have a place for every field, empty ones too
            made[job.prompt_key] = [_without_nulls(message) for message in prompt]
        made.setdefault(TAG, own.tag)
        return made

    def _refusal(self, place: str, record: Record) -> str:
        """Why the row is left out, "" if it is not; `Refused` for one that can be no prompt."""
        prompt = record[self.job.prompt_key]
        if rule := fault(prompt):
            shown = repr(prompt)[:60]
            raise Refused(place, rule, _remedy(self.source.prompt_key, prompt), f"{self.source.prompt_key} = {shown}")
        if self.job.answers and not isinstance(record[self.job.answer_key], (str, int, float)):
            shown = f"{self.source.answer_key} = {record[self.job.answer_key]!r}"
            remedy = _remedy(self.source.answer_key, record[self.job.answer_key])
            raise Refused(place, "must be a string, a number, true or false", remedy, shown)
        if self._filter is not None and not self._kept(place, record):
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
        assert self._filter is not None
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
            found = (parse_line(line, "", prompt_key, "") for _, line in prompt_lines(file))
            return frozenset(_digest(one[prompt_key]) for one in found if not isinstance(one, Problem))
    except OSError:
        return frozenset()


def _present(record: Record, name: str) -> Any:
    if name not in record:
        raise KeyError(name)
    return record[name]


def _remedy(name: str, value: Any) -> str:
    """What to do about a value that can be no prompt, or no answer."""
    if value is None:
        return f'correct it, or leave it out: where = "{name} != null"'
    if isinstance(value, (int, float)):
        return f'prompt_text = "{{{name}}}" makes a text of it'
    return "correct it, or leave it out by a filter"


def _no_column(place: str, record: Record, name: str) -> Problem:
    columns = ", ".join(sorted(record)) or "none"
    return Problem(place, "", f"no column {name!r}; the columns are {columns}", "name one of them")


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
