"""The prompts of a run: the rules for a line of a JSONL file, the order of the draws, and the prompt that a line gives.

Talks to one file, which it never changes. Knows nothing of the ring, groups, fates or token ids; messages become text
and ids by the tokenizer's own chat template (`busrl.engines.base` in an engine, `chat` where there is no torch).

- `prompt_of` alone makes the prompt of a line: rollouts, `busrl check` and whatever shows a prompt call it.
- The bytes of a line, without its newline, are the task: their crc32 identifies the prompt in the ledger and the log.
- Empty lines at the end of a file and a byte order mark at its beginning are no part of any line.
- Every problem names file:line, the value, the rule and the remedy; those after the first few are counted by rule.
- The line of a draw follows from the draw's number alone, whatever the mixture of sources: a resume needs no saved
  position, and goes on at the exact item.
"""

from __future__ import annotations

import ast
import json
import os
import re
import shlex
import stat
import zlib
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Protocol, TypedDict

import msgspec
import numpy as np
import numpy.typing as npt

from busrl.errors import DataError, Problem, escaped

if TYPE_CHECKING:
    from busrl.topology.prompts import SourceLines
    from busrl.topology.schema import Topology

# -- the prompt of a line ------------------------------------


Message = dict[str, Any]


class Chat(TypedDict):
    """Messages, with the tools and the arguments for the model's chat template."""

    messages: list[Message]
    tools: list[Any]
    arguments: dict[str, Any]


Prompt = str | list[Message] | Chat
SYSTEM_ROLES = ("system", "developer")


class Settings(Protocol):
    """The keys of [data] by which a line becomes a prompt."""

    @property
    def prompt_key(self) -> str: ...
    @property
    def template(self) -> str: ...
    @property
    def system(self) -> str: ...
    @property
    def tools_key(self) -> str: ...
    @property
    def template_arguments(self) -> dict[str, Any]: ...


def prompt_of(record: dict[str, Any], settings: Settings) -> Prompt:
    """The prompt of a line: a text to be encoded as it stands, or messages for the model's chat template.

    DataError for a line that gives neither.

    A text under `template = "chat"` is one user turn; a list of messages is a chat already and needs that template.
    `data.system` begins every chat that has no system message of its own. With tools of its line, or arguments of the
    template, a prompt is a `Chat`.
    """
    try:
        value = normalised(record.get(settings.prompt_key))
    except ValueError as rule:
        shown = _short(repr(record.get(settings.prompt_key)).encode())
        raise DataError(f"{settings.prompt_key} = {shown}: {rule}; correct the data file") from None
    if settings.template == "none":
        if isinstance(value, str):
            return value
        raise DataError(f'{settings.prompt_key} is a list of messages: set data.template = "chat"')
    if settings.template != "chat":
        raise DataError(f"data.template = {settings.template!r}: must be none or chat")
    chat: list[Message] = [{"role": "user", "content": value}] if isinstance(value, str) else list(value)
    if settings.system and chat[0]["role"] not in SYSTEM_ROLES:
        chat.insert(0, {"role": "system", "content": settings.system})
    tools = _tools(record.get(settings.tools_key), settings.tools_key) if settings.tools_key else []
    if tools or settings.template_arguments:
        return {"messages": chat, "tools": tools, "arguments": settings.template_arguments}
    return chat


def _tools(value: object, key: str) -> list[Any]:
    """The tools of a line: a list of objects, or its JSON text, as tables of columns keep it."""
    if isinstance(value, str) and value:
        try:
            value = _decoder.decode(value)
        except msgspec.DecodeError as problem:
            raise DataError(f"{key} = {value!r}: not JSON ({problem}); correct the data file") from None
    if not value:
        return []
    if not isinstance(value, list) or not all(isinstance(tool, dict) for tool in value):
        raise DataError(f"{key} = {value!r}: must be a list of objects, each a tool; correct the data file")
    return value


def fault(value: object) -> str:
    """The rule that a prompt breaks, "" for a good one."""
    try:
        normalised(value)
    except ValueError as rule:
        return str(rule)
    return ""


def normalised(value: object) -> str | list[Message]:
    """A prompt with the parts of its contents joined to texts; ValueError has the rule that it breaks. Parts without a
    message around them are one text."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise ValueError("must be a string, or a list of messages")
    if not value:
        raise ValueError("has no message: a chat needs one at least")
    if all(isinstance(part, dict) and "type" in part and "role" not in part for part in value):
        return joined(value)
    messages = [_message(message) for message in value]
    if messages[-1]["role"] == "assistant":
        raise ValueError("the last message is the assistant's own, and its answer is what is asked for")
    return messages


def _message(value: object) -> Message:
    if isinstance(value, dict) and isinstance(value.get("role"), str):
        content = value.get("content")
        if isinstance(content, str) or (value.get("tool_calls") and not content):
            return value
        if isinstance(content, list):
            return {**value, "content": joined(content)}
    raise ValueError('every message must be {"role": "...", "content": "..."} with strings')


TEXTS = ("text", "input_text", "output_text")  # kinds of content parts that are text, in OpenAI's two interfaces


def joined(parts: Sequence[object]) -> str:
    """The text of content parts, concatenated as chat templates do it; ValueError names a part that is no text."""
    if not parts:
        raise ValueError("its content has no part: write a text")
    return "".join(map(_part, parts))


def _part(part: object) -> str:
    kind = part.get("type", "text") if isinstance(part, Mapping) else type(part).__name__
    text = part.get("text") if isinstance(part, Mapping) and kind in TEXTS else None
    if isinstance(text, str):
        return text
    if kind in TEXTS:
        raise ValueError('a part of its content has no text: {"type": "text", "text": "..."}')
    raise ValueError(f"every message must be text alone, and a part of this one is of kind {kind!r}")


def plain_text(value: object) -> str:
    """A prompt as text without a template, for predictors and people: the contents of its messages, line by line."""
    if isinstance(value, list):
        with suppress(ValueError):  # a broken prompt is shown as it is: no model gets it
            value = normalised(value)
    if isinstance(value, list):
        return "\n".join(str(message.get("content") or "") for message in value if isinstance(message, dict))
    return str(value)


# -- checking a file -----------------------------------------


BOM = b"\xef\xbb\xbf"  # a byte order mark, which some editors put before the first line
SHOWN = 5  # problems that a scan keeps; the others are only counted
_decoder = msgspec.json.Decoder()


@dataclass(frozen=True)
class Scan:
    """The content of a prompt file. `broken`: the number of bad lines; `problems`: those of the first few; `more`: how
    many of the other lines break which rule. `starts`, `sizes`: per line its offset, and the bytes of its prompt."""

    path: Path
    count: int
    longest_prompt: int  # bytes
    longest_line: int  # bytes
    broken: int
    problems: tuple[Problem, ...]
    chats: int = 0  # lines whose prompt is a list of messages
    more: tuple[tuple[str, int], ...] = ()
    starts: array[int] = field(default_factory=lambda: array("q"))
    sizes: array[int] = field(default_factory=lambda: array("q"))
    absent: dict[str, str] = field(default_factory=dict)  # keys that no line has, by the key of [data] that names them
    keys: tuple[str, ...] = ()  # of the first line


def scan(path: str | Path, prompt_key: str = "prompt", answer_key: str = "") -> Scan:
    """Read every line of a prompt file. `DataError` if there is no such file; problems in it are returned."""
    path = Path(path)
    count = longest_line = chats = 0
    starts, sizes = array("q"), array("q")
    problems: list[Problem] = []
    more: Counter[str] = Counter()
    absent = {"prompt_key": prompt_key, **({"answer_key": answer_key} if answer_key else {})}
    keys: tuple[str, ...] = ()
    with open_lines(path) as file:
        for start, line in prompt_lines(file):
            count += 1
            if absent:
                there = _keys_of(line)
                keys = keys or there
                absent = {setting: key for setting, key in absent.items() if there and key not in there}
            longest_line = max(longest_line, len(line))
            record = parse_line(line, f"{path}:{count}", prompt_key, answer_key)
            size = 0
            if not isinstance(record, Problem):
                chats += isinstance(record[prompt_key], list) and isinstance(normalised(record[prompt_key]), list)
                size = len(plain_text(record[prompt_key]).encode())
            elif len(problems) < SHOWN:
                problems.append(record)
            else:
                more[record.rule.partition(" (")[0]] += 1
            starts.append(start)
            sizes.append(size)
    broken = len(problems) + more.total()
    if count == 0:
        rule = "the file is empty: it must hold one JSON object per line"
        problems.append(Problem(str(path), "", rule, "write some"))
    counted = tuple(more.most_common())
    longest = max(sizes, default=0)
    absent = absent if count else {}
    return Scan(
        path, count, longest, longest_line, broken, tuple(problems), chats, counted, starts, sizes, absent, keys
    )


def _keys_of(line: bytes) -> tuple[str, ...]:
    """The keys of a line's object; none if the line is no object."""
    try:
        record = _decoder.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return ()
    return tuple(sorted(record)) if isinstance(record, dict) else ()


def prompt_lines(file: Iterable[bytes]) -> Iterator[tuple[int, bytes]]:
    """Offset and bytes of every line of a prompt file, without its newline."""
    offset, empty = 0, []
    for raw in file:
        start, line = offset, raw.removesuffix(b"\n")
        offset += len(raw)
        if not start and line.startswith(BOM):
            start, line = len(BOM), line.removeprefix(BOM)
        if not line.strip():
            empty.append((start, line))  # an error, unless nothing but empty lines follows
            continue
        yield from empty
        empty = []
        yield start, line


def decode_line(line: bytes, place: str, prompt_key: str) -> dict[str, object]:
    """The object of one line; `DataError` that starts with `place` for a line that is no object with a prompt."""
    record = parse_line(line, place, prompt_key)
    if isinstance(record, Problem):
        raise DataError(str(record))
    return record


def parse_line(line: bytes, place: str, prompt_key: str, answer_key: str = "") -> dict[str, object] | Problem:
    """The object of one line, or the problem with it. With a `prompt_key` its value must be a string or a list of
    messages; with an `answer_key` its value must be a string, a number, true or false."""
    if not line.strip():
        return Problem(place, "empty line", "every line must be a JSON object", "delete the line")
    try:
        record = _decoder.decode(line)
    except RecursionError:
        return Problem(place, _short(line), "nested too deeply to be read", "leave out what no prompt or reward needs")
    except (msgspec.DecodeError, UnicodeDecodeError) as problem:
        rule, remedy = _no_json(line) or (f"not JSON ({problem})", "one complete JSON object per line")
        return Problem(place, _short(line), rule, remedy)
    if not isinstance(record, dict):
        return Problem(place, _short(line), "every line must be a JSON object", 'write {"prompt": "..."}')
    for table_key, key in (("prompt_key", prompt_key), ("answer_key", answer_key)):
        finding = _key_problem(record, place, table_key, key) if key else None
        if finding:
            return finding
    return record


def _no_json(line: bytes) -> tuple[str, str] | None:
    """Rule and remedy for a line that is almost JSON; None for a cut line, or anything else."""
    try:
        text = line.decode()
    except UnicodeDecodeError as problem:
        return f"not UTF-8 text (byte {problem.start})", "save it as UTF-8, for example by iconv -f latin1 -t utf-8"
    numbers: list[str] = []
    try:
        json.loads(text, strict=False, parse_constant=numbers.append)
        if numbers:
            rule = f"not JSON, which knows no {numbers[0]}: Python's json.dumps writes it all the same"
            return rule, "write null or a text, or leave the key out; allow_nan=False finds such rows"
        if control := re.search("[\x00-\x1f]", text.strip()):
            mark = escaped(control[0])
            return f"not JSON: {mark} stands in a text as it is", f"write \\u{ord(control[0]):04x}, as json.dumps does"
        return None
    except (ValueError, RecursionError):
        pass
    try:
        if isinstance(ast.literal_eval(text.strip()), dict):
            return "not JSON: a map as Python prints it", "write it by json.dumps"
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        pass
    return None


def open_file(path: Path) -> int:
    """A descriptor for reading; a missing or unreadable file is a `DataError`."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # of a pipe that nobody writes to, too
    except OSError as problem:
        raise DataError(f"{path}: cannot be read ({problem.strerror}): give the path of a JSONL file") from None
    mode = os.fstat(fd).st_mode
    if not stat.S_ISREG(mode):
        os.close(fd)
        kind = "a directory" if stat.S_ISDIR(mode) else "a pipe or a device, which cannot be read again"
        raise DataError(f"{path}: is {kind}: give the path of a JSONL file")
    return fd


def open_lines(path: Path) -> BinaryIO:
    """A prompt file, opened at its beginning; a `DataError` for a file of another kind, too."""
    file = os.fdopen(open_file(path), "rb")
    try:
        other = _other_kind(file.read(HEAD), path)
        file.seek(0)
    except OSError as problem:
        file.close()
        raise DataError(f"{path}: cannot be read ({problem.strerror}): give the path of a JSONL file") from None
    if other:
        file.close()
        raise DataError(f"{path}: {other[0]}, and prompts are lines of JSON objects: {other[1]}")
    return file


# First bytes of other kinds of files, the kind, and the remedy. FILE stands for the path, quoted for a shell.
HEAD = 1 << 16
SOURCE = "name it as a [[data.source]] with format = "
BEGINNINGS: tuple[tuple[bytes, str, str], ...] = (
    (b"\x1f\x8b", "a gzip file", "unpack it by `gunzip -k FILE`"),
    (b"\x28\xb5\x2f\xfd", "a Zstandard file", "unpack it by `zstd -d FILE`"),
    (b"BZh", "a bzip2 file", "unpack it by `bunzip2 -k FILE`"),
    (b"\xfd7zXZ", "an xz file", "unpack it by `unxz -k FILE`"),
    (b"PK\x03\x04", "a zip file (a spreadsheet is one too)", "unpack it, or save the spreadsheet as CSV"),
    (b"PAR1", "a Parquet file", f'{SOURCE}"parquet"'),
    (b"ARROW1", "an Arrow file", "name the folder that `save_to_disk` made as a [[data.source]]"),
    (b"\xff\xfe", "UTF-16 text", "convert it by `iconv -f utf-16 -t utf-8 FILE > FILE.utf8`"),
    (b"\xfe\xff", "UTF-16 text", "convert it by `iconv -f utf-16 -t utf-8 FILE > FILE.utf8`"),
    (b"version https://git-lfs", "a pointer of Git LFS instead of the file", "fetch the file by `git lfs pull`"),
    (b"<", "a page of the web, or XML", "download the file itself"),
)
CONVERT = (
    "write it anew by `python3 -c 'import csv, json, sys; [print(json.dumps(row)) for row in {}]' < FILE > FILE.jsonl`"
)
COLUMNS = re.compile(rb'"?[\w.-]+"?(?:[,;\t]"?[\w.-]+"?)+\s*')  # the names of a table's columns


def _other_kind(head: bytes, path: Path) -> tuple[str, str] | None:
    """The kind of a file, by its beginning, and the remedy; None for lines of JSON, good or bad."""
    for begins, what, remedy in BEGINNINGS:
        if head.startswith(begins):
            return f"is {what}", remedy.replace("FILE", shlex.quote(str(path)))
    text = head.removeprefix(BOM).lstrip()
    first, _, rest = text.partition(b"\n")
    what, rows = "", ""
    if text.startswith(b"[") and not (rest.strip() and _is_json(first)):
        what, rows = "is one JSON array", "json.load(sys.stdin)"
    elif first.strip() == b"{":
        what, rows = "is one JSON object over several lines", 'json.load(sys.stdin)["KEY"]'
    elif not _is_json(first) and (path.suffix in (".csv", ".tsv") or COLUMNS.fullmatch(first)):
        mark = next((mark for mark in "\t;" if mark.encode() in first), "")
        how = f", delimiter={json.dumps(mark)}" if mark else ""
        what, rows = "is a CSV file", f"csv.DictReader(sys.stdin{how})"
    return (what, CONVERT.format(rows).replace("FILE", shlex.quote(str(path)))) if what else None


def _is_json(line: bytes) -> bool:
    try:
        _decoder.decode(line)
    except RecursionError:  # nested too deeply: `parse_line` says so
        return True
    except (msgspec.DecodeError, UnicodeDecodeError):
        return False
    return True


def _key_problem(record: dict[str, object], place: str, table_key: str, key: str) -> Problem | None:
    if key not in record:
        rule = f"the key {key!r} is missing (data.{table_key})"
        return Problem(place, f"keys {sorted(record)}", rule, f"add it, or set data.{table_key}")
    value = record[key]
    if table_key == "prompt_key":
        rule, remedy = fault(value), "write a text in quotes, or messages"
    else:
        rule = "" if isinstance(value, (str, int, float)) else "must be a string, a number, true or false"
        remedy = "put it in quotes"
    return Problem(place, f"{key} = {_short(repr(value).encode())}", rule, remedy) if rule else None


def _short(line: bytes, limit: int = 60) -> str:
    text = escaped(line[:limit].decode("utf-8", "backslashreplace"))
    return f"{text}..." if len(line) > limit else text


# -- draws ---------------------------------------------------


ORDERS_KEPT = 2  # a horizon of draws may reach from one epoch into the next


@dataclass(frozen=True)
class PromptLine:
    """A prompt as dispatched: line number in the file (from 0), its bytes, and their crc32."""

    index: int
    line: bytes
    crc: int


@dataclass(frozen=True)
class Place:
    """The place of a draw: its source (0 where there is one), the epoch in that source, and its line."""

    source: int
    epoch: int
    line: int


BLOCK = 1000  # draws; every source has its exact share of a block


def shares(weights: Sequence[float], total: int = BLOCK) -> list[int]:
    """Shares of each source in a block of draws: `total` divided by weights, rounded by the largest remainder; of equal
    remainders the earlier source first."""
    exact = [weight / sum(weights) * total for weight in weights]
    rounded = [int(share) for share in exact]
    by_rest = sorted(range(len(exact)), key=lambda at: (rounded[at] - exact[at], at))
    for at in by_rest[: total - sum(rounded)]:
        rounded[at] += 1
    return rounded


class JsonlStream:
    """Endless stream over the N lines of `path`, the same for every process and after every restart.

    Draw d is line d mod N of epoch d div N; an epoch's order depends on (seed, epoch) alone. With several sections each
    block of draws is a permutation of their shares that depends on (seed, block) alone, and each section has epochs of
    its own. The constructor reads the file once; a line is one `pread`. A file that changes under a run raises
    `DataError` at the first line that shows it.
    """

    def __init__(
        self, path: str | Path, seed: int, shuffle: bool, prompt_key: str = "prompt",
        sections: Sequence[SourceLines] = (),
    ) -> None:
        self.path = Path(path)
        self.seed, self.shuffle, self.prompt_key = seed, shuffle, prompt_key
        self.sections = tuple(sections) if len(sections) > 1 else ()
        self._order = lru_cache(ORDERS_KEPT * (1 + len(self.sections)))(self._permutation)
        self._starts, self._ends = array("q"), array("q")
        self._fd = open_file(self.path)
        with open(self._fd, "rb", closefd=False) as file:
            for start, line in prompt_lines(file):
                self._starts.append(start)
                self._ends.append(start + len(line))
        if not self._starts or any(section.start + section.count > len(self) for section in self.sections):
            self.close()
            what = "is empty: it must hold one JSON object per line; write some" if not self._starts else (
                "has fewer lines than its sources had: it was changed; put the old file back, or start a new run")
            raise DataError(f"{self.path}: the file {what}")

    def __len__(self) -> int:
        return len(self._starts)

    def item(self, draw: int) -> PromptLine:
        """The line of a draw. `DataError` if the file has changed since it was opened."""
        return self.at(self.place(draw).line)

    def place(self, draw: int) -> Place:
        """The place of a draw; the file is not read for it."""
        if draw < 0:
            raise ValueError(f"draw must be >= 0, got {draw}")
        if self.sections:
            return self._mixed(draw)
        epoch, position = divmod(draw, len(self))
        return Place(0, epoch, int(self._order((epoch,), len(self))[position]) if self.shuffle else position)

    def epochs(self, draw: int) -> list[int]:
        """The epoch of each source at the end of this draw's block; -1 for a source without a share of the draws."""
        if not self.sections:
            return [draw // len(self)]
        blocks = draw // BLOCK + 1
        return [(blocks * section.share - 1) // section.count if section.share else -1 for section in self.sections]

    def _mixed(self, draw: int) -> Place:
        block, position = divmod(draw, BLOCK)
        ends = np.cumsum([section.share for section in self.sections])
        sources = np.searchsorted(ends, self._order((block,), BLOCK)[: position + 1], "right")
        source = int(sources[-1])
        section, before = self.sections[source], int(np.count_nonzero(sources[:-1] == source))
        epoch, item = divmod(block * section.share + before, section.count)
        line = section.start + (int(self._order((epoch, source + 1), section.count)[item]) if self.shuffle else item)
        return Place(source, epoch, line)

    def at(self, index: int) -> PromptLine:
        start, end = self._starts[index], self._ends[index]
        line = os.pread(self._fd, end - start, start)
        if len(line) != end - start or b"\n" in line:
            raise DataError(
                f"{self.path}:{index + 1}: the file was changed while a run uses it: the lines must stay as they "
                "were at the start; put the old file back, or start a new run"
            )
        return PromptLine(index, line, zlib.crc32(line))

    def record(self, item: PromptLine) -> dict[str, object]:
        """The parsed line, checked; `DataError` with file:line if it has no prompt under `prompt_key`."""
        return decode_line(item.line, f"{self.path}:{item.index + 1}", self.prompt_key)

    def records(self, indices: Iterable[int]) -> dict[int, dict[str, object]]:
        """Records of these lines, each once, by index."""
        return {index: self.record(self.at(index)) for index in sorted(set(map(int, indices)))}

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> JsonlStream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _permutation(self, words: tuple[int, ...], size: int) -> npt.NDArray[np.int64]:
        """The permutation of `size` numbers that follows from the seed and `words`."""
        return np.random.Generator(np.random.PCG64([self.seed, *words])).permutation(size)


def training_stream(topology: Topology) -> JsonlStream:
    """The prompts of a run in the order of its draws. Answers are not checked, as a reward may need none."""
    data = topology.data
    return JsonlStream(data.train, topology.run.seed, data.shuffle, data.prompt_key, sections=topology.derived.sources)


def limit_in_words(topology: Topology) -> str:
    """The limit on a prompt's tokens, in the words of the topology, for a message about a prompt that exceeds it."""
    limit = topology.generation.max_prompt_tokens
    if isinstance(limit, int):
        return f"generation.max_prompt_tokens is {limit}"
    return f'"auto" made room for {topology.max_prompt_tokens}, as `busrl check` counts them'


# -- which prompts are measured ------------------------------


SUBSET_SEED = 0  # runs that differ in run.seed are compared on the same prompts


def lines_of(samples: int, lines: int, k: int = 1) -> npt.NDArray[np.int64]:
    """The line of the prompt for each answer of a round, `k` answers in a row to one prompt.

    From a file of more lines: one line drawn from each of `samples` equal stretches, the same for every round and every
    seed. From a shorter file: its lines in order, again and again.
    """
    places = np.arange(samples, dtype=np.int64)
    if samples >= lines:
        return np.repeat(places % lines, k)
    edges = np.arange(samples + 1, dtype=np.int64) * lines // samples
    return np.repeat(np.random.Generator(np.random.PCG64(SUBSET_SEED)).integers(edges[:-1], edges[1:]), k)
