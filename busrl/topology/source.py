"""One topology file and its overrides as plain data in which every key knows its place.

Reads TOML, applies `--set a.b=value`, and answers "where does this key stand" for error messages. Knows nothing of
which keys exist.

- A place is `file:line` or `--set key`; what an override sets belongs to the override.
"""

from __future__ import annotations

import difflib
import re
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from busrl.errors import Problem, TopologyError
from busrl.topology import lines
from busrl.topology.rivals import counterpart

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

KeyPath = lines.Path


@dataclass
class Source:
    """The raw data of a file, where each key stands, and which text an override was given as."""

    file: str
    folder: Path
    data: dict[str, Any]
    lines: dict[KeyPath, int]
    overridden: dict[KeyPath, tuple[str, str]] = field(default_factory=dict)  # path -> (key as written, raw text)

    def place(self, path: KeyPath) -> str:
        """Where `path` stands, or the nearest table that holds it, or the file."""
        for end in range(len(path), 0, -1):
            if path[:end] in self.overridden:
                return f"--set {self.overridden[path[:end]][0]}"
            if path[:end] in self.lines:
                return f"{self.file}:{self.lines[path[:end]]}"
        for below, (name, _) in self.overridden.items():
            if below[: len(path)] == path:  # an override made a table where a value belongs
                return f"--set {name}"
        return self.file

    def raw_text(self, path: KeyPath) -> str | None:
        """The text of an override as typed, None for a key of the file."""
        given = self.overridden.get(path)
        return given[1] if given else None

    def order(self, problem: Problem) -> tuple[int, int]:
        """Sorting key: the file from top to bottom, then the overrides."""
        match = re.search(r":(\d+)$", problem.place)
        return (1 if problem.place.startswith("--set") else 0, int(match.group(1)) if match else 0)


def read(path: Path, overrides: Sequence[str]) -> Source:
    """Parse the file and apply the overrides; a TopologyError if either can not even be parsed."""
    text = _text(path)
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise TopologyError([_syntax_problem(path, text, str(error))]) from None
    source = Source(str(path), path.absolute().parent, data, lines.positions(text))
    problems = [problem for override in overrides for problem in _apply(source, override)]
    if problems:
        raise TopologyError(problems)
    return source


def _text(path: Path) -> str:
    try:
        return path.read_bytes().decode("utf-8-sig")
    except FileNotFoundError:
        near = difflib.get_close_matches(path.name, [p.name for p in _toml_files(path.parent)], n=1)
        remedy = f"did you mean {path.with_name(near[0])}?" if near else "give the path of a topology file (.toml)"
        raise TopologyError([Problem(str(path), "", "no such file", remedy)]) from None
    except OSError as error:
        rule = f"can not be read: {(error.strerror or str(error)).lower()}"
        remedy = "give the path of a topology file (.toml)"
        if (path / "run.json").is_file():
            remedy = f"to go on with it: busrl launch TOPOLOGY --run-dir {path}, with the topology it was started with"
        raise TopologyError([Problem(str(path), "", rule, remedy)]) from None
    except UnicodeDecodeError as error:
        raise TopologyError([Problem(str(path), "", f"can not be read as UTF-8 text ({error})")]) from None


def _toml_files(folder: Path) -> Iterable[Path]:
    return folder.glob("*.toml") if folder.is_dir() else ()


def _syntax_problem(path: Path, text: str, message: str) -> Problem:
    match = re.search(r"\(at line (\d+), column (\d+)\)", message)
    number = int(match.group(1)) if match else text.count("\n") + 1
    rows = text.splitlines()
    shown = rows[number - 1].strip() if 0 < number <= len(rows) else ""
    rule, remedy = _in_words(rows, number, re.sub(r" ?\(at .*\)$", "", message))
    return Problem(f"{path}:{number}", shown, rule, remedy)


def _in_words(rows: list[str], number: int, message: str) -> tuple[str, str]:
    """Rule and remedy for what a parser refuses at a line; its own words where the cause is none of the usual ones."""
    row = rows[number - 1] if 0 < number <= len(rows) else ""
    header = re.fullmatch(r"\s*(\[\[?)\s*([^\]\s]+)\s*\]\]?\s*(#.*)?", row)
    if quote := re.search("[\u201c\u201d\u201e\u2018\u2019\u00ab\u00bb]", row):
        return f"not TOML: {quote[0]} is a typographic quote", 'write a straight one: "'
    if header and header[2] == "process":
        return "processes are an array of tables, and [process] is one table", "write [[process]] every time"
    if header and (first := _first(rows, number, re.escape(row.split("#")[0].strip()) + r"\s*(#.*)?")):
        return f"[{header[2]}] stands twice, first on line {first}", "put the keys of both below one heading"
    key = re.match(r"\s*([A-Za-z0-9_.-]+)\s*=", row)
    if key and "overwrite" in message and (first := _first(rows, number, rf"{re.escape(key[1])}\s*=.*")):
        return f"{key[1]} stands twice, first on line {first}", "remove one of the two"
    return f"not TOML: {message}", "strings need quotes, every key stands once"


def _first(rows: list[str], number: int, pattern: str) -> int:
    """The nearest line above `number` that is so, from 1; 0 if none is."""
    return next((at for at in range(number - 1, 0, -1) if re.fullmatch(pattern, rows[at - 1].strip())), 0)


def _apply(source: Source, override: str) -> list[Problem]:
    """Put one `a.b=value` into the data; returns what is wrong with it."""
    name, equals, text = override.partition("=")
    keys = [part.strip() for part in name.split(".")]
    if not equals or not all(keys) or len(keys) < 2:
        rule = "an override is section.key=value"
        remedy = counterpart(keys[0]) if len(keys) == 1 else ""
        return [Problem(f"--set {override}", "", rule, remedy or "for example --set learner.trigger.n_min=16")]
    for path in _targets(source, keys, (name.strip(), text.strip())):
        problem = _put(source.data, path, parse_value(text), f"--set {name.strip()}")
        if problem:
            return [problem]
        source.overridden[path] = (name.strip(), text.strip())
    return []


def _targets(source: Source, keys: list[str], given: tuple[str, str]) -> list[KeyPath]:
    """The paths an override means: process.ROLE.key stands for every [[process]] of that role."""
    entries = source.data.setdefault("process", []) if keys[0] == "process" else None
    if not isinstance(entries, list):
        return [tuple(keys)]
    role = keys[1]
    found = [i for i, entry in enumerate(entries) if isinstance(entry, dict) and entry.get("role") == role]
    if not found:  # a role that the file does not name: the override declares it
        entries.append({"role": role})
        found = [len(entries) - 1]
        source.overridden[("process", found[0])] = given
    return [("process", index, *keys[2:]) for index in found]


def _put(data: Any, path: KeyPath, value: Any, place: str) -> Problem | None:
    for depth, name in enumerate(path[:-1]):
        data = data[name] if isinstance(name, int) else data.setdefault(name, {})
        if not isinstance(data, (dict, list)):
            above = ".".join(str(part) for part in path[: depth + 1])
            return Problem(place, "", f"{above} is a value, not a table", f"set {above} itself")
    if isinstance(path[-1], int) or not isinstance(data, dict):
        return Problem(place, "", "names a whole process, not one of its keys", "for example process.rollout.count=2")
    data[path[-1]] = value
    return None


def parse_value(text: str) -> Any:
    """A value in TOML syntax; text that is none is a string, so that quotes may be left out."""
    try:
        parsed = tomllib.loads(f"value = {text}\n")
    except tomllib.TOMLDecodeError:
        return text.strip()
    return parsed["value"] if len(parsed) == 1 else text.strip()
