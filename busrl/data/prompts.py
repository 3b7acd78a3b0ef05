"""The prompts of a run: what one line of a JSONL file must be, its draws, and what a model is asked with it.

Talks to one file, which it never changes. Knows nothing of the ring, groups, fates or token ids; messages become text
and ids by the tokenizer's own chat template (`busrl.engines.base` in an engine, `chat` where there is no torch).

- `prompt_of` alone decides what a model is asked: rollouts, `busrl check` and whatever shows a prompt call it.
- The bytes of a line, without its newline, are the task: their crc32 identifies the prompt in the ledger and the log.
- Empty lines at the end of a file and a byte order mark at its beginning are no part of any line.
- Every finding names file:line, the value, the rule and the remedy; those after the first few are counted by rule.
"""

from __future__ import annotations

import os
import zlib
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import numpy.typing as npt

from busrl.errors import DataError, Problem

if TYPE_CHECKING:
    from busrl.config.schema import Data

# -- what a model is asked -----------------------------------


Message = dict[str, Any]
Prompt = str | list[Message]
SYSTEM_ROLES = ("system", "developer")


def prompt_of(record: dict[str, Any], settings: Data) -> Prompt:
    """A text to be encoded as it stands, or the messages for the model's chat template; DataError otherwise.

    A text under `template = "chat"` is one user turn; a list of messages is a chat already and needs that template.
    `data.system` begins every chat that has no system message of its own.
    """
    value = record.get(settings.prompt_key)
    if rule := fault(value):
        raise DataError(f"{settings.prompt_key} = {value!r}: {rule}; correct the data file")
    if settings.template == "none":
        if isinstance(value, str):
            return value
        raise DataError(f'{settings.prompt_key} is a list of messages: set data.template = "chat"')
    if settings.template != "chat":
        raise DataError(f"data.template = {settings.template!r}: must be none or chat")
    chat: list[Message] = [{"role": "user", "content": value}] if isinstance(value, str) else list(value or ())
    if settings.system and chat[0]["role"] not in SYSTEM_ROLES:
        chat.insert(0, {"role": "system", "content": settings.system})
    return chat


def fault(value: object) -> str:
    """The rule that a prompt breaks, "" for a good one."""
    if isinstance(value, str):
        return ""
    if not isinstance(value, list):
        return "must be a string, or a list of messages"
    if not value:
        return "has no message: a chat needs one at least"
    for message in value:
        parts = (message.get("role"), message.get("content")) if isinstance(message, dict) else (None,)
        if not all(isinstance(part, str) for part in parts):
            return 'every message must be {"role": "...", "content": "..."} with strings'
    if value[-1]["role"] == "assistant":
        return "the last message is the assistant's own, and its answer is what is asked for"
    return ""


def plain_text(value: object) -> str:
    """A prompt as text without a template, for predictors and people: what stands in its messages, line by line."""
    if isinstance(value, list):
        return "\n".join(str(message.get("content", "")) for message in value if isinstance(message, dict))
    return str(value)


# -- checking a file -----------------------------------------


BOM = b"\xef\xbb\xbf"  # a byte order mark, which some editors put before the first line
SHOWN = 5  # findings that a scan keeps; the rest is only counted
_decoder = msgspec.json.Decoder()


@dataclass(frozen=True)
class Scan:
    """What a prompt file holds. `broken` counts all bad lines, `problems` has the first few, `more` says how many of
    the others break which rule. `starts`, `sizes`: per line its offset, and the bytes of its prompt."""

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


def scan(path: str | Path, prompt_key: str = "prompt", answer_key: str = "") -> Scan:
    """Read every line of a prompt file. `DataError` if there is no such file; what is wrong in it comes back."""
    path = Path(path)
    count = longest_line = chats = 0
    starts, sizes = array("q"), array("q")
    problems: list[Problem] = []
    more: Counter[str] = Counter()
    with open(open_file(path), "rb") as file:
        for start, line in prompt_lines(file):
            count += 1
            longest_line = max(longest_line, len(line))
            found = parse_line(line, f"{path}:{count}", prompt_key, answer_key)
            size = 0
            if not isinstance(found, Problem):
                chats += isinstance(found[prompt_key], list)
                size = len(plain_text(found[prompt_key]).encode())
            elif len(problems) < SHOWN:
                problems.append(found)
            else:
                more[found.rule.partition(" (")[0]] += 1
            starts.append(start)
            sizes.append(size)
    broken = len(problems) + more.total()
    if count == 0:
        rule = "the file is empty: it must hold one JSON object per line"
        problems.append(Problem(str(path), "", rule, "write some"))
    longest = max(sizes, default=0)
    counted = tuple(more.most_common())
    return Scan(path, count, longest, longest_line, broken, tuple(problems), chats, counted, starts, sizes)


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


def decode_line(line: bytes, place: str, prompt_key: str, answer_key: str = "") -> dict[str, object]:
    """The object of one line: its prompt is a string or a list of messages, its answer, where `answer_key` names one, a
    string, a number, true or false. `DataError` that starts with `place` otherwise."""
    found = parse_line(line, place, prompt_key, answer_key)
    if isinstance(found, Problem):
        raise DataError(str(found))
    return found


def parse_line(line: bytes, place: str, prompt_key: str, answer_key: str) -> dict[str, object] | Problem:
    """The object of one line, or what is wrong with it."""
    if not line.strip():
        return Problem(place, "empty line", "every line must be a JSON object", "delete the line")
    try:
        record = _decoder.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError) as problem:
        return Problem(place, _short(line), f"not JSON ({problem})", "one complete JSON object per line")
    if not isinstance(record, dict):
        return Problem(place, _short(line), "every line must be a JSON object", 'write {"prompt": "..."}')
    for table_key, key in (("prompt_key", prompt_key), ("answer_key", answer_key)):
        finding = _key_problem(record, place, table_key, key) if key else None
        if finding:
            return finding
    return record


def open_file(path: Path) -> int:
    """A descriptor for reading; a missing or unreadable file is a `DataError`."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as problem:
        raise DataError(f"{path}: cannot be read ({problem.strerror}): give the path of a JSONL file") from None
    if os.path.isdir(f"/proc/self/fd/{fd}"):
        os.close(fd)
        raise DataError(f"{path}: is a directory: give the path of a JSONL file")
    return fd


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
    text = line[:limit].decode("utf-8", "replace")
    return f"{text}..." if len(line) > limit else text


# -- draws ---------------------------------------------------


EPOCHS_KEPT = 2  # a horizon of draws may reach from one epoch into the next


@dataclass(frozen=True)
class PromptLine:
    """One prompt as dispatched: line number in the file (from 0), its bytes, and their crc32."""

    index: int
    line: bytes
    crc: int


class JsonlStream:
    """Endless stream over the N lines of `path`, the same for every process and after every restart.

    Draw d is line d mod N of epoch d div N; an epoch's order depends on (seed, epoch) alone. Building it reads the file
    once; a line is one `pread`. A file that changes under a run is refused as soon as it shows.
    """

    def __init__(
        self, path: str | Path, seed: int, shuffle: bool, prompt_key: str = "prompt", answer_key: str = ""
    ) -> None:
        self.path = Path(path)
        self.seed, self.shuffle = seed, shuffle
        self.prompt_key, self.answer_key = prompt_key, answer_key
        self._orders: dict[int, npt.NDArray[np.int64]] = {}
        self._starts, self._ends = array("q"), array("q")
        self._fd = open_file(self.path)
        with open(self._fd, "rb", closefd=False) as file:
            for start, line in prompt_lines(file):
                self._starts.append(start)
                self._ends.append(start + len(line))
        if not self._starts:
            self.close()
            raise DataError(f"{self.path}: the file is empty: it must hold one JSON object per line; write some")

    def __len__(self) -> int:
        """Lines of the file, N."""
        return len(self._starts)

    def item(self, draw: int) -> PromptLine:
        """The line of draw number `draw`. `DataError` if the file has changed since it was opened."""
        if draw < 0:
            raise ValueError(f"draw must be >= 0, got {draw}")
        epoch, position = divmod(draw, len(self))
        return self.at(int(self._order(epoch)[position]) if self.shuffle else position)

    def at(self, index: int) -> PromptLine:
        """Line `index` (from 0) of the file."""
        start, end = self._starts[index], self._ends[index]
        line = os.pread(self._fd, end - start, start)
        if len(line) != end - start or b"\n" in line:
            raise DataError(
                f"{self.path}:{index + 1}: the file was changed while a run uses it: the lines must stay as they "
                "were at the start; put the old file back, or start a new run"
            )
        return PromptLine(index, line, zlib.crc32(line))

    def record(self, item: PromptLine) -> dict[str, object]:
        """The parsed line, checked; `DataError` with file:line if it is not what the topology says."""
        return decode_line(item.line, f"{self.path}:{item.index + 1}", self.prompt_key, self.answer_key)

    def prompt(self, item: PromptLine) -> str:
        """The text under `prompt_key`, or that of its messages, before any template."""
        return plain_text(self.record(item)[self.prompt_key])

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> JsonlStream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _order(self, epoch: int) -> npt.NDArray[np.int64]:
        order = self._orders.get(epoch)
        if order is None:
            order = np.random.Generator(np.random.PCG64([self.seed, epoch])).permutation(len(self))
            self._orders[epoch] = order
            for old in list(self._orders)[:-EPOCHS_KEPT]:  # oldest use first
                del self._orders[old]
        return order


# -- which prompts are measured ------------------------------


SUBSET_SEED = 0  # runs that differ in run.seed are compared on the same prompts


def lines_of(samples: int, lines: int, k: int = 1) -> npt.NDArray[np.int64]:
    """The line of the file that each answer of a round is to, `k` in a row to one prompt: a line drawn from each of
    `samples` equal stretches of a longer file (the same for every round and seed of a run), a shorter file from its
    beginning, again and again."""
    places = np.arange(samples, dtype=np.int64)
    if samples >= lines:
        return np.repeat(places % lines, k)
    edges = np.arange(samples + 1, dtype=np.int64) * lines // samples
    return np.repeat(np.random.Generator(np.random.PCG64(SUBSET_SEED)).integers(edges[:-1], edges[1:]), k)
