"""Checking prompt files: what one line must be, and a scan of a whole file for `busrl check`.

Talks to one file. Knows nothing of draws, tokenizers or the topology's other keys.

- A line is a JSON object whose prompt (and answer, where one is named) is a string. Nothing else is looked at.
- Every finding names file:line, the value, the rule and the remedy.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import msgspec

from busrl.errors import DataError, Problem

SHOWN = 5  # findings that a scan keeps; the rest is only counted
_decoder = msgspec.json.Decoder()


@dataclass(frozen=True)
class Scan:
    """What a prompt file holds. Lengths are in bytes; `broken` counts all bad lines, `problems` has the first few."""

    path: Path
    count: int
    longest_prompt: int
    longest_line: int
    broken: int
    problems: tuple[Problem, ...]


def scan(path: str | Path, prompt_key: str = "prompt", answer_key: str = "") -> Scan:
    """Read every line of a prompt file. `DataError` if there is no such file; what is wrong in it comes back."""
    path = Path(path)
    count = longest_prompt = longest_line = broken = 0
    problems: list[Problem] = []
    with open(open_file(path), "rb") as file:
        for raw in file:
            count += 1
            line = raw.removesuffix(b"\n")
            longest_line = max(longest_line, len(line))
            found = look_at(line, f"{path}:{count}", prompt_key, answer_key)
            if isinstance(found, Problem):
                broken += 1
                problems += [found] if broken <= SHOWN else []
            else:
                longest_prompt = max(longest_prompt, len(str(found[prompt_key]).encode()))
    if count == 0:
        rule = "the file is empty: it must hold one JSON object per line"
        problems.append(Problem(str(path), "", rule, "write some"))
    return Scan(path, count, longest_prompt, longest_line, broken, tuple(problems))


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
        rule = f"the key {key!r} (data.{table_key}) is missing"
        return Problem(place, f"keys {sorted(record)}", rule, f"add it, or set data.{table_key}")
    value = record[key]
    if isinstance(value, str):
        return None
    return Problem(place, f"{key} = {_short(repr(value).encode())}", "must be a string", "put it in quotes")


def _short(line: bytes, limit: int = 60) -> str:
    text = line[:limit].decode("utf-8", "replace")
    return f"{text}..." if len(line) > limit else text
