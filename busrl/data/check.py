"""Checking prompt files: what one line must be, and a scan of a whole file for `busrl check`.

Talks to one file. Knows nothing of draws, tokenizers or the topology's other keys.

- A line is a JSON object whose prompt is a string or a list of messages, and whose answer, where one is named, is a
  string, a number, true or false. Nothing else is looked at.
- Empty lines at the end of a file and a byte order mark at its beginning are no part of any line.
- Every finding names file:line, the value, the rule and the remedy; those after the first few are counted by rule.
"""

from __future__ import annotations

import os
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from busrl.data.prompt import fault, plain_text
from busrl.errors import DataError, Problem

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
            found = look_at(line, f"{path}:{count}", prompt_key, answer_key)
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
    """The object of one line; `DataError` that starts with `place` if it is not what it must be."""
    found = look_at(line, place, prompt_key, answer_key)
    if isinstance(found, Problem):
        raise DataError(str(found))
    return found


def look_at(line: bytes, place: str, prompt_key: str, answer_key: str) -> dict[str, object] | Problem:
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
        finding = _look_at_key(record, place, table_key, key) if key else None
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


def _look_at_key(record: dict[str, object], place: str, table_key: str, key: str) -> Problem | None:
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
