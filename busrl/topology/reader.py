"""From plain data to the dataclasses of `schema.py`, strictly: types, bounds, allowed words, unknown keys.

Collects every problem instead of stopping at the first; a key with a problem gets its default, so that the rest can
be looked at too. Talks to `source.py` for places. Knows nothing of rules between keys or of files.

- A bool is not a number; a whole number is accepted where a number is expected.
- Every message holds place, key, value, rule and remedy.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
import os
import types
import typing
from pathlib import Path
from typing import Any

from busrl.errors import Problem
from busrl.topology import schema
from busrl.topology.keys import Rule, rule_of
from busrl.topology.moved import elsewhere
from busrl.topology.rivals import counterpart
from busrl.topology.source import KeyPath, Source

SHOWN = 120  # characters of a value in a message
SECTIONS: dict[str, type] = {
    f.name: typing.get_type_hints(schema.Topology)[f.name]
    for f in dataclasses.fields(schema.Topology)
    if f.name not in ("process", "derived", "source", "overrides")
}


class _Wrong(Exception):
    """A value that does not fit: the rule, and what to write instead."""

    def __init__(self, rule: str, remedy: str = "") -> None:
        super().__init__(rule)
        self.rule, self.remedy = rule, remedy


class Reader:
    """Reads one source; `problems` grows, `bad` holds the dotted keys that have one."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.problems: list[Problem] = []
        self.bad: set[str] = set()

    def sections(self) -> dict[str, Any]:
        """Every section of the topology and the processes, defaults where nothing (right) was given."""
        for name in sorted(set(self.source.data) - set(SECTIONS) - {"process"}):
            self._unknown((name,), [*SECTIONS, "process"])
        made = {name: self._table(cls, self.source.data.get(name, {}), (name,)) for name, cls in SECTIONS.items()}
        made["process"] = self._rows(schema.Process, self.source.data.get("process", []), ("process",))
        return made

    def _rows(self, cls: type, entries: Any, path: KeyPath) -> tuple[Any, ...]:
        if not isinstance(entries, list):
            name = _dotted(path)
            rule = "processes are an array of tables" if name == "process" else "is an array of tables"
            self._add(path, entries, rule, f"write [[{name}]], twice bracketed")
            return ()
        return tuple(self._table(cls, entry, (*path, index)) for index, entry in enumerate(entries))

    def _table(self, cls: type, data: Any, path: KeyPath) -> Any:
        if not isinstance(data, dict):
            self._add(path, data, "is a table, not a value", f"write [{_dotted(path)}] and its keys below it")
            data = {}
        fields = {f.name: f for f in dataclasses.fields(cls)}
        hints = typing.get_type_hints(cls)
        for name in data:
            if name not in fields:
                self._unknown((*path, name), list(fields))
        values: dict[str, Any] = {}
        for name, item in fields.items():
            if row := row_class(hints[name]):
                values[name] = self._rows(row, data.get(name, []), (*path, name))
            elif dataclasses.is_dataclass(hints[name]):
                values[name] = self._table(typing.cast(type, hints[name]), data.get(name, {}), (*path, name))
            elif name in data:
                values[name] = self._value(hints[name], item, data[name], (*path, name))
            else:
                values[name] = self._default(hints[name], item, path)
        return cls(**values)

    def _default(self, hint: Any, field: dataclasses.Field[Any], path: KeyPath) -> Any:
        rule = rule_of(field)
        if rule.required:
            key = (*path, field.name)
            self.bad.add(_dotted(key))
            remedy = f"add {field.name} = ... to {_bracket(key)}: {rule.doc}"
            self.problems.append(Problem(self.source.place(key), "", f"{_dotted(key)} is missing", remedy))
        return _fallback(hint, field)

    def _value(self, hint: Any, field: dataclasses.Field[Any], value: Any, path: KeyPath) -> Any:
        rule, raw = rule_of(field), self.source.raw_text(path)
        if raw is not None and hint is str:
            value = value if isinstance(value, str) else raw  # an override of a string needs no quotes
        try:
            made = _convert(hint, rule, value)
        except _Wrong as wrong:
            remedy = wrong.remedy or _default_remedy(field)
            self._add(path, value, wrong.rule, remedy)
            return _fallback(hint, field)
        return self._absolute(made, path) if rule.path else made

    def _absolute(self, text: str, path: KeyPath) -> str:
        """A path in the file is relative to the file, one on the command line to where that was typed."""
        if not text or text.startswith(schema.TINY):
            return text
        base = Path.cwd() if self.source.raw_text(path) is not None else self.source.folder
        return os.path.normpath(base / Path(text).expanduser())

    def _add(self, path: KeyPath, value: Any, rule: str, remedy: str) -> None:
        self.bad.add(_dotted(path))
        shown = f"{_dotted(path)} = {show(value)}"
        self.problems.append(Problem(self.source.place(path), shown, rule, remedy))

    def _unknown(self, path: KeyPath, known: list[str]) -> None:
        name, table = str(path[-1]), _dotted(path[:-1])
        near = difflib.get_close_matches(name, known, n=1)
        others = _sections_with(name)
        if remedy := elsewhere(_dotted(path)) or ("" if others else counterpart(name)):
            pass
        elif near and not (others and not table):
            remedy = f"did you mean {near[0]}?"
        elif others:
            remedy = f"it belongs to {' or '.join(others)}"
        else:
            remedy = f"allowed are {', '.join(known)}"
        if table:
            rule = f"unknown key in {_bracket(path)}"
        else:
            is_table = isinstance(self.source.data[name], (dict, list))
            rule = "unknown section" if is_table else "a key outside of any table"
        self.bad.add(_dotted(path))
        self.problems.append(Problem(self.source.place(path), name, rule, remedy))


def row_class(hint: Any) -> type | None:
    """The dataclass of a key that is an array of tables, None for any other key."""
    inner = typing.get_args(hint)[0] if typing.get_origin(hint) is tuple else None
    return inner if isinstance(inner, type) and dataclasses.is_dataclass(inner) else None


def _convert(hint: Any, rule: Rule, value: Any) -> Any:
    """A value of the annotated type that keeps the rule; `_Wrong` otherwise."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is types.UnionType or origin is typing.Union:  # int | str: a number or one of the rule's words
        kind = float if float in args else int
        return value if isinstance(value, str) and value in rule.words else _number(kind, rule, value)
    if hint in (int, float):
        return _number(hint, rule, value)
    if hint is bool:
        return _typed(bool, value, "true or false")
    if hint is str:
        return _text(rule, value)
    if origin is dict:
        return _environment(value)
    if args == (float, float):
        return _pair(rule, value)
    return _strings(value)


def _number(kind: type, rule: Rule, value: Any) -> Any:
    if kind is float and isinstance(value, str) and value in rule.words:
        return float(value)
    noun = "a whole number" if kind is int else "a number"
    expected = " ".join(part for part in (f"expected {noun}", rule.text()) if part)
    right = isinstance(value, int) or (kind is float and isinstance(value, float))
    if isinstance(value, bool) or not right or not rule.allows(value):
        raise _Wrong(expected)
    return kind(value)


def _typed(kind: type, value: Any, noun: str) -> Any:
    if not isinstance(value, kind):
        raise _Wrong(f"expected {noun}")
    return value


def _text(rule: Rule, value: Any) -> str:
    text: str = _typed(str, value, rule.text() or "a string")
    if rule.choices and text not in rule.choices:
        near = difflib.get_close_matches(text, rule.choices, n=1)
        raise _Wrong(f"expected {rule.text()}", f'did you mean "{near[0]}"?' if near else "")
    if "\0" in text or (rule.required and not text):
        raise _Wrong("expected a string that is not empty")
    return text


def _pair(rule: Rule, value: Any) -> tuple[float, float]:
    if not isinstance(value, list) or len(value) != 2:
        raise _Wrong("expected a list of two numbers")
    return _number(float, rule, value[0]), _number(float, rule, value[1])


def _strings(value: Any) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise _Wrong("expected a list of strings", 'for example ["node", "reward.mjs"]')
    return tuple(value)


def _environment(value: Any) -> dict[str, str]:
    right = isinstance(value, dict) and all(isinstance(item, str) and "\0" not in item for item in value.values())
    if not right or not all(name and "=" not in name and "\0" not in name for name in value):
        raise _Wrong("expected a table of strings", 'for example env = { OMP_WAIT_POLICY = "PASSIVE" }')
    return dict(value)


def _fallback(hint: Any, field: dataclasses.Field[Any]) -> Any:
    if field.default is not dataclasses.MISSING:
        return field.default
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return "" if hint is str else None


def _default_remedy(field: dataclasses.Field[Any]) -> str:
    if field.default is dataclasses.MISSING:
        return f"{field.name} is: {rule_of(field).doc}"
    return f"the default is {show(field.default)}"


def _sections_with(name: str) -> list[str]:
    found = []
    nested = {"learner.trigger": schema.Trigger, "weights.sparse": schema.Sparse,
              "learner.controller": schema.Controller, "experiments.controller": schema.ControllerRules}  # fmt: skip
    for section, cls in {**SECTIONS, **nested, "process": schema.Process}.items():
        if any(f.name == name for f in dataclasses.fields(cls)):
            found.append(f"[[{section}]]" if section == "process" else f"[{section}]")
    return found


def show(value: Any) -> str:
    """A value as TOML would write it; a long one without its middle, since the end of a path says most."""
    if isinstance(value, float) and math.isinf(value):
        return "inf" if value > 0 else "-inf"
    try:
        text = json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError):
        text = str(value)
    return text if len(text) <= SHOWN else f"{text[: SHOWN // 2]} ... {text[-SHOWN // 2 :]}"


def _bracket(path: KeyPath) -> str:
    row = next((at for at, part in enumerate(path) if isinstance(part, int)), 0)
    if row:
        return f"[[{_dotted(path[:row])}]]" + "".join(f".{part}" for part in path[row + 1 : -1])
    return f"[{_dotted(path[:-1])}]"


def _dotted(path: KeyPath) -> str:
    return ".".join(str(part) for part in path)
