"""Declarations of a topology's keys, and how their values are read: strictly from a file, by shape from topology.json.

The tables of `schema.py` are the only list of keys; all that reads, explains or documents them asks `items`.

- What a run recorded was checked when it was written: there a rule's bounds and choices do not apply.
- A bool is not a number; a whole number is accepted where a number is expected.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
import re
import types
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeVar

from busrl.algorithms.catalog import letters
from busrl.errors import UserError

if typing.TYPE_CHECKING:
    from typing_extensions import dataclass_transform
else:

    def dataclass_transform(**_: Any) -> Any:
        """Leave a class as it is: `typing` has this word for type checkers since Python 3.11 only."""
        return lambda cls: cls


T = TypeVar("T")
REQUIRED = object()  # the default of a key that has none
ONE_OR_SEVERAL = str | tuple[str, ...]
FUNCTION = re.compile(r"[^:]+:[A-Za-z_][\w.]*")  # package.module:name or file.py:name


# -- declaring a key -----


@dataclass(frozen=True)
class Rule:
    """The bounds of a value beyond its type: at least `low` or above `above`, at most `high` or below `below`."""

    doc: str
    low: float | None = None
    above: float | None = None
    high: float | None = None
    below: float | None = None
    choices: tuple[str, ...] = ()
    function: bool = False  # besides the choices, the import path of a user's function
    words: tuple[str, ...] = ()  # words allowed where a number is expected ("auto", "inf")
    path: bool = False  # a file or folder: made absolute, relative to the file that names it
    methods: bool = False  # the choices name methods: one that is merely spelt alike is never suggested
    finite: bool = True
    required: bool = False
    unless: str = ""  # required only where this key of the same table is not given

    def text(self) -> str:
        """The rule as a reader of the reference sees it, empty if every value of the type is allowed."""
        if self.choices:
            names = "one of " + ", ".join(f'"{choice}"' for choice in self.choices)
            return f"{names}, or a function as package.module:name or file.py:name" if self.function else names
        words = [f'"{word}"' for word in self.words]
        return " or ".join(part for part in (self._bounds(), *words) if part)

    def _bounds(self) -> str:
        bounds = {">=": self.low, ">": self.above, "<=": self.high, "<": self.below}
        return " and ".join(f"{sign} {_shown(bound)}" for sign, bound in bounds.items() if bound is not None)

    def allows(self, number: float) -> bool:
        if math.isnan(number) or (self.finite and math.isinf(number)):
            return False
        if (self.low is not None and number < self.low) or (self.above is not None and number <= self.above):
            return False
        return not ((self.high is not None and number > self.high) or (self.below is not None and number >= self.below))

    def unbounded(self) -> Rule:
        """The rule without what may change between two versions of busrl: bounds and choices."""
        return Rule(self.doc, words=self.words, finite=False)


def _shown(value: float) -> str:
    return str(int(value)) if value == int(value) else f"{value:g}"


def key(default: Any, doc: str, **rule: Any) -> Any:
    """A dataclass field with its documentation and rule; `REQUIRED` for one without a default."""
    if default is REQUIRED:
        return dataclasses.field(metadata={"rule": Rule(doc, required=True, **rule)})
    return dataclasses.field(default=default, metadata={"rule": Rule(doc, **rule)})


# -- declaring a table -----


@dataclass_transform(frozen_default=True, field_specifiers=(dataclasses.field,))
class Table:
    """Frozen dataclass of keys, whose methods all tables share.

    `@dataclass(frozen=True)` compiles six methods for each class, and every process of a run imports some fifty tables:
    with methods of their own they are a good part of what a process spends on its imports.
    """

    __dataclass_fields__: typing.ClassVar[dict[str, dataclasses.Field[Any]]]

    def __init_subclass__(cls) -> None:
        dataclasses.dataclass(init=False, repr=False, eq=False)(cls)

    def __init__(self, *positional: Any, **by_name: Any) -> None:
        fields = self.__dataclass_fields__
        values = dict(zip(fields, positional))
        wrong = sorted(by_name.keys() - fields.keys() | by_name.keys() & values.keys())
        if wrong or len(positional) > len(fields):
            raise TypeError(f"{type(self).__name__} has the keys {', '.join(fields)}, each once: {wrong or positional}")
        values |= by_name
        self.__dict__.update({name: values[name] if name in values else _default(fields[name]) for name in fields})
        self.__post_init__()

    def __post_init__(self) -> None:
        """Check the values together; a table whose values depend on each other overrides it."""

    def _compared(self) -> tuple[Any, ...]:
        return tuple(self.__dict__[name] for name, field in self.__dataclass_fields__.items() if field.compare)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Table) and type(other) is type(self) and self._compared() == other._compared()

    def __hash__(self) -> int:
        return hash(self._compared())

    def __repr__(self) -> str:
        return f"{type(self).__qualname__}({', '.join(f'{name}={value!r}' for name, value in self.__dict__.items())})"

    def __setattr__(self, name: str, value: Any) -> None:
        raise dataclasses.FrozenInstanceError(f"cannot assign to field {name!r}")

    def __delattr__(self, name: str) -> None:
        raise dataclasses.FrozenInstanceError(f"cannot delete field {name!r}")


def _default(field: dataclasses.Field[Any]) -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    if field.default is dataclasses.MISSING:
        raise TypeError(f"{field.name} needs a value")
    return field.default


# -- walking the tables -----


@dataclass(frozen=True)
class Item:
    """A field of a table: a key (`rule`), a table within it (`table`), or an array of tables (`row`)."""

    field: dataclasses.Field[Any]
    hint: Any
    table: type | None
    row: type | None

    @property
    def name(self) -> str:
        return self.field.name

    @property
    def rule(self) -> Rule:
        """The rule that `key` attached; nothing beyond the type for a field that was declared without it."""
        rule: Rule = self.field.metadata.get("rule", Rule(""))
        return rule

    @property
    def default(self) -> Any:
        """The value of a key that is left out; `REQUIRED` if it has none."""
        if self.field.default_factory is not dataclasses.MISSING:
            return self.field.default_factory()
        return REQUIRED if self.field.default is dataclasses.MISSING else self.field.default


@cache
def items(cls: type) -> dict[str, Item]:
    """The fields of a table by name, in the order of their declaration."""
    hints = typing.get_type_hints(cls)
    return {field.name: _item(field, hints[field.name]) for field in dataclasses.fields(cls)}


def _item(field: dataclasses.Field[Any], hint: Any) -> Item:
    inner = typing.get_args(hint)[0] if typing.get_origin(hint) is tuple else None
    row = inner if isinstance(inner, type) and dataclasses.is_dataclass(inner) else None
    kinds = typing.get_args(hint) if type(None) in typing.get_args(hint) else (hint,)  # X | None: a table, or none
    table = next((kind for kind in kinds if isinstance(kind, type) and dataclasses.is_dataclass(kind)), None)
    return Item(field, hint, table, row)


def tables(name: str, cls: type) -> Iterator[tuple[str, type]]:
    """A table and every table in it, by dotted name; arrays of tables are left out."""
    yield name, cls
    for item in items(cls).values():
        if item.table:
            yield from tables(f"{name}.{item.name}", item.table)


# -- reading a value -----


class Wrong(Exception):
    """A value that does not fit: the rule, and what to write instead."""

    def __init__(self, rule: str, remedy: str = "") -> None:
        super().__init__(rule)
        self.rule, self.remedy = rule, remedy


def convert(hint: Any, rule: Rule, value: Any) -> Any:
    """A value of the annotated type that keeps the rule; `Wrong` otherwise."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if hint == ONE_OR_SEVERAL:
        return _strings(value) if isinstance(value, list) else _text(rule, value)
    if origin is types.UnionType or origin is typing.Union:  # int | str: a number or one of the rule's words
        if value is None and type(None) in args:
            return None
        kind = float if float in args else int
        return value if isinstance(value, str) and value in rule.words else _number(kind, rule, value)
    if hint in (int, float):
        return _number(hint, rule, value)
    if hint is bool:
        return _typed(bool, value, "true or false")
    if hint is str:
        return _text(rule, value)
    if origin is dict:
        return _environment(value) if args[1] is str else _table(args[1], rule, value)
    if args == (float, float):
        return _pair(rule, value)
    if args == (int, ...):
        return tuple(_number(int, rule, item) for item in _typed(list, value, "a list of whole numbers"))
    return _strings(value)


def _number(kind: type, rule: Rule, value: Any) -> Any:
    if kind is float and isinstance(value, str) and value in rule.words:
        return float(value)
    noun = "a whole number" if kind is int else "a number"
    right = isinstance(value, int) or (kind is float and isinstance(value, float))
    if isinstance(value, bool) or not right or not rule.allows(value):
        raise Wrong(" ".join(part for part in (f"expected {noun}", rule.text()) if part))
    return kind(value)


def _typed(kind: type, value: Any, noun: str) -> Any:
    if not isinstance(value, kind):
        raise Wrong(f"expected {noun}")
    return value


MEANT = {"gpu": "cuda"}  # what is nearer by letters to another word


def _text(rule: Rule, value: Any) -> str:
    text: str = _typed(str, value, rule.text() or "a string")
    by_path = rule.function and FUNCTION.fullmatch(text)
    if rule.choices and text not in rule.choices and not by_path:
        near = [choice for choice in rule.choices if letters(choice) == letters(text)]
        near = near if rule.methods else difflib.get_close_matches(MEANT.get(text, text), rule.choices, n=1)
        raise Wrong(f"expected {rule.text()}", f'did you mean "{near[0]}"?' if near else "")
    if "\0" in text or (rule.required and not text):
        raise Wrong("expected a string that is not empty")
    return text


def _pair(rule: Rule, value: Any) -> tuple[float, float]:
    if not isinstance(value, list) or len(value) != 2:
        raise Wrong("expected a list of two numbers")
    return _number(float, rule, value[0]), _number(float, rule, value[1])


def _strings(value: Any) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        example = json.dumps(value) if isinstance(value, str) else '"text"'
        raise Wrong("expected a list of strings", f"for example [{example}]")
    return tuple(value)


def _environment(value: Any) -> dict[str, str]:
    right = isinstance(value, dict) and all(isinstance(item, str) and "\0" not in item for item in value.values())
    if not right or not all(name and "=" not in name and "\0" not in name for name in value):
        raise Wrong("expected a table of strings", 'for example env = { OMP_WAIT_POLICY = "PASSIVE" }')
    return dict(value)


def _table(kind: Any, rule: Rule, value: Any) -> dict[str, Any]:
    """A table of numbers, of whatever plain values it has, or of such tables."""
    if typing.get_origin(kind) is dict:
        if not isinstance(value, dict):
            raise Wrong("expected a table of tables", rule.doc)
        return {name: _table(typing.get_args(kind)[1], rule, item) for name, item in value.items()}
    noun = "numbers" if kind is float else "strings, finite numbers, true and false, or lists and tables of these"
    if not isinstance(value, dict) or not all(map(_simple, value.values())):
        raise Wrong(f"expected a table of {noun}", rule.doc)
    return {name: _number(float, Rule("", above=0), item) if kind is float else item for name, item in value.items()}


def _simple(value: Any) -> bool:
    """Tell whether JSON can hold the value."""
    if isinstance(value, list):
        return all(map(_simple, value))
    if isinstance(value, dict):
        return all(map(_simple, value.values()))
    return isinstance(value, (str, int)) or (isinstance(value, float) and math.isfinite(value))


# -- topology.json -----


def build(cls: type[T], data: Any, place: str) -> T:
    """An instance of `cls` from parsed JSON; missing keys take their defaults, UserError names unknown ones."""
    if not isinstance(data, dict):
        raise UserError(f"{place}: expected a map for {cls.__name__}, got {type(data).__name__}")
    declared = items(typing.cast(type, cls))
    if unknown := sorted(set(data) - set(declared)):
        raise UserError(f"{place}: unknown keys {unknown}; the file was written by another version of busrl")
    if missing := [name for name, item in declared.items() if name not in data and item.default is REQUIRED]:
        raise UserError(f"{place}: keys {missing} are missing; the file was written by another version of busrl")
    return cls(**{name: _recorded(declared[name], value, f"{place}: {name}") for name, value in data.items()})


def _recorded(item: Item, value: Any, place: str) -> Any:
    if item.table:
        return None if value is None and item.default is None else build(item.table, value, place)
    if item.row and isinstance(value, list):
        return tuple(build(item.row, entry, place) for entry in value)
    try:
        return convert(item.hint, item.rule.unbounded(), value)
    except Wrong as wrong:
        raise UserError(f"{place}: {wrong.rule}, got {value!r}; the file is damaged") from None


def plain(value: Any) -> Any:
    """Lists for tuples and the word "inf" for infinity: what JSON can hold of a value."""
    if isinstance(value, dict):
        return {name: plain(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return "inf" if isinstance(value, float) and math.isinf(value) else value
