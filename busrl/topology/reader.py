"""From the text of a topology file and its overrides to the tables of `schema`: strictly, and every problem at once.

Parses TOML, finds the line of every key, applies `--set a.b=value`, and converts each value by the rule of its key.

- A place is `file:line` or `--set key`; what an override sets belongs to the override.
- A key with a problem gets its default, so that the rest can be checked too.
- Every message holds place, key, value, rule and remedy.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
import os
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from busrl.algorithms.catalog import where_set
from busrl.errors import Problem, TopologyError
from busrl.states import ENVIRONMENT, TINY
from busrl.topology import schema
from busrl.topology.declare import REQUIRED, Item, Wrong, convert, items, tables
from busrl.topology.foreign_names import counterpart

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

parse_toml = tomllib.loads  # raises a ValueError

# -- the line of every key, which the standard library's parser does not give -----

KeyPath = tuple["str | int", ...]


# A string of four kinds, a comment, a run of other characters, a mark or the end of a line.
TOKEN = re.compile(
    r'"""(?:\\.|[^\\])*?"""(?!")' r"|'''.*?'''(?!')" r'|"(?:\\.|[^"\\])*"' r"|'[^']*'"
    r"""|\#[^\n]*|[^\s"'\#=.,\[\]{}]+|[^ \t\r]""",
    re.DOTALL,
)


def positions(text: str) -> dict[KeyPath, int]:
    """Line numbers, from 1, of all keys and tables of an accepted TOML text."""
    return _Lines(text.replace("\r\n", "\n")).lines


class _Lines:
    """Walks the tokens of a text that a TOML parser has accepted, and notes where keys, tables and elements stand, by
    paths of key names and array indices: ("process", 1, "count")."""

    def __init__(self, text: str) -> None:
        self.lines: dict[KeyPath, int] = {}
        self._arrays: dict[KeyPath, int] = {}  # path of an array of tables -> index of its newest element
        self._tokens, self._at, line = list[tuple[str, int]](), 0, 1
        for token in TOKEN.findall(f"{text}\n"):
            if token[0] != "#":
                self._tokens.append((token, line))
            line += token.count("\n")
        prefix: KeyPath = ()
        while mark := self._peek():
            if mark == "[":
                prefix = self._header()
            else:
                self._assignment(prefix)

    def _peek(self) -> str:
        """The next token that is no end of a line, empty at the end of the text."""
        while self._at < len(self._tokens) and self._tokens[self._at][0] == "\n":
            self._at += 1
        return self._tokens[self._at][0] if self._at < len(self._tokens) else ""

    def _take(self) -> tuple[str, int]:
        self._at += 1
        return self._tokens[self._at - 1]

    def _keys(self) -> list[str]:
        names: list[str] = []
        while not names or self._tokens[self._at][0] == ".":
            self._at += bool(names)
            name = self._take()[0]
            names.append(name[1:-1] if name[0] in "\"'" else name)
        return names

    def _header(self) -> KeyPath:
        _, line = self._take()
        double = self._peek() == "["
        self._at += double
        path: KeyPath = ()
        for name in self._keys():
            if path in self._arrays:  # an array of tables on the way means its newest element
                path += (self._arrays[path],)
            path += (name,)
        self._at += 1 + double
        self.lines.setdefault(path, line)
        if double:
            self._arrays[path] = self._arrays.get(path, -1) + 1
            path += (self._arrays[path],)
            self.lines[path] = line
        return path

    def _assignment(self, prefix: KeyPath) -> None:
        line, keys = self._tokens[self._at][1], self._keys()
        for depth in range(1, len(keys) + 1):
            self.lines.setdefault((*prefix, *keys[:depth]), line)
        if self._take()[0] != "=":
            raise ValueError(f"line {line}: not a key: the text was not accepted by a TOML parser")
        self._value((*prefix, *keys))

    def _value(self, path: KeyPath) -> None:
        opening, _ = self._take()
        if opening not in ("[", "{"):
            while self._tokens[self._at][0] not in (",", "]", "}", "\n"):
                self._at += 1
            return
        index = 0
        while (mark := self._peek()) not in ("]", "}"):
            if mark == ",":
                self._at += 1
            elif opening == "{":
                self._assignment(path)
            else:
                element = (*path, index)
                self.lines[element] = self._tokens[self._at][1]
                self._value(element)
                index += 1
        self._at += 1


# -- one file and its overrides as plain data -----


@dataclass
class Source:
    """The raw data of a file, where each key stands, and which text an override was given as."""

    file: str
    folder: Path
    data: dict[str, Any]
    lines: dict[KeyPath, int]
    overridden: dict[KeyPath, tuple[str, str]] = field(default_factory=dict)  # path -> (key as written, raw text)

    def place(self, path: KeyPath) -> str:
        """Name the place of `path`, or the nearest table that holds it, or the file."""
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
        override = self.overridden.get(path)
        return override[1] if override else None

    def order(self, problem: Problem) -> tuple[int, int]:
        """Sorting key: the file from top to bottom, then the overrides."""
        match = re.search(r":(\d+)$", problem.place)
        return (1 if problem.place.startswith("--set") else 0, int(match.group(1)) if match else 0)


def read(path: Path, overrides: Sequence[str]) -> Source:
    """Parse the file and apply the overrides; a TopologyError if either cannot even be parsed."""
    text = _text(path)
    try:
        data = parse_toml(text)
    except tomllib.TOMLDecodeError as error:
        raise TopologyError([_explained(path, text, error)]) from None
    except RecursionError:
        rule, remedy = "a value is nested too deeply to be read", "keys of a topology are nested a few times at most"
        raise TopologyError([Problem(str(path), "", rule, remedy)]) from None
    return _with(Source(str(path), path.absolute().parent, data, positions(text)), overrides)


def of_overrides(overrides: Sequence[str]) -> Source:
    return _with(Source("", Path.cwd(), {}, {}), overrides)


def _with(source: Source, overrides: Sequence[str]) -> Source:
    problems = [problem for override in overrides for problem in _apply(source, override)]
    if problems:
        raise TopologyError(problems)
    return source


def _text(path: Path) -> str:
    try:
        return path.read_bytes().decode("utf-8-sig")
    except FileNotFoundError:
        near = difflib.get_close_matches(path.name, [file.name for file in path.parent.glob("*.toml")], n=1)
        remedy = f"did you mean {path.with_name(near[0])}?" if near else "give the path of a topology file (.toml)"
        raise TopologyError([Problem(str(path), "", "no such file", remedy)]) from None
    except OSError as error:
        rule = f"cannot be read: {(error.strerror or str(error)).lower()}"
        remedy = "give the path of a topology file (.toml)"
        if (path / "run.json").is_file():
            remedy = f"to continue it: busrl launch TOPOLOGY --run-dir {path}, with the topology it was started with"
        raise TopologyError([Problem(str(path), "", rule, remedy)]) from None
    except UnicodeDecodeError as error:
        raise TopologyError([Problem(str(path), "", f"cannot be read as UTF-8 text ({error})")]) from None


def syntax_error(path: str | Path, text: str, error: Exception) -> tuple[int, Problem]:
    """The line that a TOML parser refuses, from 1, and the problem in the parser's own words, without a remedy."""
    message = str(error)
    match = re.search(r"\(at line (\d+), column (\d+)\)", message)
    number = int(match.group(1)) if match else text.count("\n") + 1
    rows = text.splitlines()
    shown = rows[number - 1].strip() if 0 < number <= len(rows) else ""
    return number, Problem(f"{path}:{number}", shown, "not TOML: " + re.sub(r" ?\(at .*\)$", "", message), "")


def _explained(path: Path, text: str, error: Exception) -> Problem:
    """Explain what a parser refuses, by its cause where that is one of the usual ones."""
    number, problem = syntax_error(path, text, error)
    rule, remedy = _usual_cause(text.splitlines(), number, problem)
    return dataclasses.replace(problem, rule=rule, remedy=remedy)


def _usual_cause(rows: list[str], number: int, problem: Problem) -> tuple[str, str]:
    row = rows[number - 1] if problem.value else ""
    header = re.fullmatch(r"\s*(\[\[?)\s*([^\]\s]+)\s*\]\]?\s*(#.*)?", row)
    if quote := re.search("[\u201c\u201d\u201e\u2018\u2019\u00ab\u00bb]", row):
        return f"not TOML: {quote[0]} is a typographic quote", 'write a straight one: "'
    if header and header[2] == "process":
        return "processes are an array of tables, and [process] is one table", "write [[process]] every time"
    if header and header[2].partition(".")[0] == "model" and _both_forms(rows):
        return "[model] and [[model]] in one file", "write [[model]] for each of several models, and no [model]"
    if header and (first := _first(rows, number, re.escape(row.split("#")[0].strip()) + r"\s*(#.*)?")):
        return f"[{header[2]}] appears twice, first on line {first}", "put the keys of both below one heading"
    key = re.match(r"\s*([A-Za-z0-9_.-]+)\s*=", row)
    if key and "overwrite" in problem.rule and (first := _first(rows, number, rf"{re.escape(key[1])}\s*=.*")):
        return f"{key[1]} appears twice, first on line {first}", "remove one of the two"
    return problem.rule, "strings need quotes, and a key may stand only once"


def _both_forms(rows: list[str]) -> bool:
    heads = {row.split("#")[0].strip() for row in rows}
    return {"[model]", "[[model]]"} <= heads


def _first(rows: list[str], number: int, pattern: str) -> int:
    """The nearest line above `number` that matches, from 1; 0 if none does."""
    return next((at for at in range(number - 1, 0, -1) if re.fullmatch(pattern, rows[at - 1].strip())), 0)


def _apply(source: Source, override: str) -> list[Problem]:
    """Put one `a.b=value` into the data; returns its problems."""
    name, equals, text = override.partition("=")
    keys = [part.strip() for part in name.split(".")]
    if not equals or not all(keys) or len(keys) < 2:
        rule = "an override is section.key=value"
        remedy = counterpart(keys[0]) if len(keys) == 1 else ""
        return [Problem(f"--set {override}", "", rule, remedy or "for example --set learner.trigger.n_min=16")]
    if problem := _meant_for_one(source, keys, f"--set {name.strip()}"):
        return [problem]
    for path in _targets(source, keys, (name.strip(), text.strip())):
        problem = _put(source.data, path, parse_value(text), f"--set {name.strip()}")
        if problem:
            return [problem]
        source.overridden[path] = (name.strip(), text.strip())
    return []


def _meant_for_one(source: Source, keys: list[str], place: str) -> Problem | None:
    """The problem of an override that gives several [[model]] the same of what is each one's own."""
    models = source.data.get("model")
    if keys[0] != "model" or keys[1] not in OF_ONE_MODEL or not isinstance(models, list) or len(models) == 1:
        return None
    tags = [str(row.get("tag", "")) for row in models if isinstance(row, dict)]
    if keys[1] in tags:
        return None
    remedy = f"for example model.{next(filter(None, tags), 'TAG')}.{'.'.join(keys[1:])}; there are {', '.join(tags)}"
    return Problem(place, "", f"each of the {len(models)} models has its own {keys[1]}: name one", remedy)


def _targets(source: Source, keys: list[str], override: tuple[str, str]) -> list[KeyPath]:
    """The paths an override means: process.ROLE.key stands for every [[process]] of that role, model.TAG.process.ROLE.
    key for those that belong to that model (of none: in which it has a part), model.TAG.key for that [[model]], and
    model.key for all of them."""
    if tag := _whose_processes(source, keys):
        keys = keys[2:]
    if keys[0] == "model" and isinstance(models := source.data.get("model"), list):
        tagged = [i for i, row in enumerate(models) if isinstance(row, dict) and row.get("tag") == keys[1]]
        return [("model", i, *keys[2 if tagged else 1 :]) for i in tagged or range(len(models))]
    entries = source.data.setdefault("process", []) if keys[0] == "process" else None
    if not isinstance(entries, list):
        return [tuple(keys)]
    role = keys[1]
    of_role = [i for i, entry in enumerate(entries) if isinstance(entry, dict) and entry.get("role") == role]
    indices = [i for i in of_role if tag in ("", _owner(source, entries[i].get("model")))]
    indices = indices or [i for i in of_role if isinstance(listed := entries[i].get("model"), list) and tag in listed]
    if not indices:  # a role that the file does not name: the override declares it
        entries.append({"role": role, "model": tag} if tag else {"role": role})
        indices = [len(entries) - 1]
        source.overridden[("process", indices[0])] = override
    return [("process", index, *keys[2:]) for index in indices]


def _whose_processes(source: Source, keys: list[str]) -> str:
    """The tag of an override model.TAG.process.ROLE.key; "" for any other."""
    of_processes = len(keys) > 4 and (keys[0], keys[2]) == ("model", "process")
    return keys[1] if of_processes and any(row.get("tag") == keys[1] for row in _models(source)) else ""


def _models(source: Source) -> list[dict[str, Any]]:
    """The tables of [[model]]; none where the file has one [model], or lacks it."""
    models = source.data.get("model")
    return [row for row in models if isinstance(row, dict)] if isinstance(models, list) else []


def _lead(source: Source) -> Any:
    """The tag of the first [[model]] that is trained."""
    rows = (row for row in _models(source) if row.get("trained") is not False and not row.get("follow"))
    return next((row.get("tag") for row in rows), None)


def _owner(source: Source, model: Any) -> Any:
    """The tag to which an entry of [[process]] with this `model` belongs: of several the lead, or the first in the
    order of [[model]]."""
    if not isinstance(model, list):
        return model or _lead(source)
    order = [_lead(source), *(row.get("tag") for row in _models(source))]
    return next((tag for tag in order if tag in model), None)


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
    except (tomllib.TOMLDecodeError, RecursionError):
        return text.strip()
    return parsed["value"] if len(parsed) == 1 else text.strip()


# -- from plain data to the tables -----

OF_ONE_MODEL = ("path", "seats", "tag", "trained", "max_steps", "follow")  # keys that each [[model]] has for itself
SHOWN = 120  # characters of a value in a message
SECTIONS: dict[str, type] = {
    item.name: item.table for item in items(schema.Topology).values() if item.table and item.name != "derived"
}


class Reader:
    """Reads one source; `problems` collects what is wrong, `bad` the dotted keys that have a problem."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.problems: list[Problem] = []
        self.bad: set[str] = set()

    def sections(self) -> dict[str, Any]:
        """Every section and the processes; defaults where a key is left out or has a problem."""
        for name in sorted(set(self.source.data) - set(SECTIONS) - {"process"}):
            self._unknown((name,), [*SECTIONS, "process"])
        sections = {name: self.table(cls, self.source.data.get(name, {}), (name,)) for name, cls in SECTIONS.items()}
        sections["process"] = self._rows(schema.Process, self.source.data.get("process", []), ("process",))
        return sections

    def _rows(self, cls: type, entries: Any, path: KeyPath) -> tuple[Any, ...]:
        if not isinstance(entries, list):
            name = _dotted(path)
            rule = "processes are an array of tables" if name == "process" else "is an array of tables"
            self._add(path, entries, rule, f"write [[{name}]], twice bracketed")
            return ()
        return tuple(self.table(cls, entry, (*path, index)) for index, entry in enumerate(entries))

    def table(self, cls: type, data: Any, path: KeyPath) -> Any:
        """A table of this kind from plain data."""
        if not isinstance(data, dict):
            self._add(path, data, "is a table, not a value", f"write [{_dotted(path)}] and its keys below it")
            data = {}
        declared = items(cls)
        for name in data:
            if name not in declared:
                self._unknown((*path, name), list(declared))
        return cls(**{name: self._item(item, data, (*path, name)) for name, item in declared.items()})

    def _item(self, item: Item, data: dict[str, Any], path: KeyPath) -> Any:
        if item.row:
            return self._rows(item.row, data.get(item.name, []), path)
        if item.table:
            return self.table(item.table, data.get(item.name, {}), path)
        if item.name in data:
            return self._value(item, data[item.name], path)
        if item.rule.required and not data.get(item.rule.unless):
            self.bad.add(_dotted(path))
            remedy = f"add {item.name} = ... to {_bracket(path)}: {item.rule.doc}"
            self.problems.append(Problem(self.source.place(path), "", f"{_dotted(path)} is missing", remedy))
        return _stand_in(item)

    def _value(self, item: Item, value: Any, path: KeyPath) -> Any:
        raw = self.source.raw_text(path)
        if raw is not None and item.hint is str:
            value = value if isinstance(value, str) else raw  # an override of a string needs no quotes
        try:
            converted = convert(item.hint, item.rule, value)
        except Wrong as wrong:
            default = f"the default is {show(item.default)}"
            usual = f"{item.name} is: {item.rule.doc}" if item.rule.required else default
            usual = (where_set(_dotted(path), value) if item.rule.methods else "") or usual
            self._add(path, value, wrong.rule, wrong.remedy or usual)
            return _stand_in(item)
        return self._absolute(converted, path) if item.rule.path else converted

    def _absolute(self, text: str, path: KeyPath) -> str:
        """A path in the file is relative to the file, one on the command line to where that was typed."""
        if not text or text.startswith(TINY) or ENVIRONMENT.fullmatch(text):
            return text
        base = Path.cwd() if self.source.raw_text(path) is not None else self.source.folder
        return os.path.normpath(base / Path(text).expanduser())

    def _add(self, path: KeyPath, value: Any, rule: str, remedy: str) -> None:
        self.bad.add(_dotted(path))
        shown = f"{_dotted(path)} = {show(value)}"
        self.problems.append(Problem(self.source.place(path), shown, rule, remedy))

    def _unknown(self, path: KeyPath, allowed: list[str]) -> None:
        name, table = str(path[-1]), _dotted(path[:-1])
        if table:
            rule = f"unknown key in {_bracket(path)}"
        else:
            is_table = isinstance(self.source.data[name], (dict, list))
            rule = "unknown section" if is_table else "a key outside of any table"
        self.bad.add(_dotted(path))
        self.problems.append(Problem(self.source.place(path), name, rule, _remedy_for_unknown(path, allowed)))


def _remedy_for_unknown(path: KeyPath, allowed: list[str]) -> str:
    """The key of busrl that does this work, or the key that was meant."""
    name, in_table = str(path[-1]), len(path) > 1
    sections = [table for section, cls in SECTIONS.items() for table in tables(section, cls)]
    others = [f"[{section}]" for section, cls in sections if name in items(cls)]
    others += ["[[process]]"] * (name in items(schema.Process))
    if remedy := "" if others else counterpart(name):
        return remedy
    near = difflib.get_close_matches(name, allowed, n=1)
    if near and (in_table or not others):
        return f"did you mean {near[0]}?"
    return f"it belongs to {' or '.join(others)}" if others else f"allowed are {', '.join(allowed)}"


def _stand_in(item: Item) -> Any:
    """The default of a key, or an empty value that the other checks can work with."""
    if item.default is not REQUIRED:
        return item.default
    return "" if item.hint is str else None


def show(value: Any, most: int = SHOWN) -> str:
    """A value as TOML would write it; a long one without its middle, since the end of a path says most."""
    if isinstance(value, float) and math.isinf(value):
        return "inf" if value > 0 else "-inf"
    try:
        text = json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError):
        text = str(value)
    return text if len(text) <= most else f"{text[: most // 2]} ... {text[-most // 2 :]}"


def _bracket(path: KeyPath) -> str:
    row = next((at for at, part in enumerate(path) if isinstance(part, int)), 0)
    if row:
        return f"[[{_dotted(path[:row])}]]" + "".join(f".{part}" for part in path[row + 1 : -1])
    return f"[{_dotted(path[:-1])}]"


def _dotted(path: KeyPath) -> str:
    return ".".join(str(part) for part in path)
