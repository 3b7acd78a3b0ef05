"""Dataclasses from plain data (parsed JSON), by their annotations: nested classes, tuples, numbers, "inf".

Used for topology.json, which `launch` wrote after checking everything; the strict reader of hand-written files is
`load.py`. Knows nothing of keys or rules.
"""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from typing import Any, TypeVar

from busrl.errors import UserError

T = TypeVar("T")


def build(cls: type[T], data: Any, place: str) -> T:
    """An instance of `cls`; missing keys take their defaults, unknown ones are refused by name."""
    if not isinstance(data, dict):
        raise UserError(f"{place}: expected a map for {cls.__name__}, got {type(data).__name__}")
    hints = typing.get_type_hints(cls)
    names = {f.name: f for f in dataclasses.fields(cls)}  # type: ignore[arg-type]
    unknown = sorted(set(data) - set(names))
    if unknown:
        raise UserError(f"{place}: unknown keys {unknown}; the file was written by another version of busrl")
    missing = [n for n, f in names.items() if n not in data and _needed(f)]
    if missing:
        raise UserError(f"{place}: keys {missing} are missing; the file was written by another version of busrl")
    return cls(**{name: convert(hints[name], value, f"{place}: {name}") for name, value in data.items()})


def convert(hint: Any, value: Any, place: str) -> Any:
    """One value, made to fit its annotation."""
    if dataclasses.is_dataclass(hint):
        return build(typing.cast(type, hint), value, place)
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is tuple:
        inner = args[0]
        return tuple(convert(inner, item, place) for item in value)
    if hint is float:
        return math.inf if value == "inf" else float(value)
    if origin in (types.UnionType, typing.Union) or origin is dict:
        return value
    if not isinstance(value, hint):
        raise UserError(f"{place}: expected {hint.__name__}, got {value!r}; the file is damaged")
    return value


def _needed(field: dataclasses.Field[Any]) -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
