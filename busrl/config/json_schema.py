"""A JSON schema of the topology, for editors: completion, each key's text, a mark below what is wrong.

Made from the declarations of the keys, as the reference is; `busrl schema` prints it. Knows nothing of rules between
keys, which `busrl check` has.

- What the reader refuses of a single value, the schema refuses; a test compares the two.
"""

from __future__ import annotations

import math
import types
import typing
from typing import Any

from busrl.config.declare import FUNCTION, REQUIRED, Item, Rule, items
from busrl.config.reader import SECTIONS
from busrl.config.schema import Process

DIALECT = "https://json-schema.org/draft/2020-12/schema"
BOUNDS = {"low": "minimum", "above": "exclusiveMinimum", "high": "maximum", "below": "exclusiveMaximum"}
Schema = dict[str, Any]
OF_TABLES: dict[Any, Schema] = {Any: {}, float: {"type": "number", "exclusiveMinimum": 0}, str: {"type": "string"}}


def schema() -> Schema:
    """The schema of a whole topology file."""
    sections = {name: _table(kind) for name, kind in SECTIONS.items()}
    sections["process"] = {"type": "array", "items": _table(Process)}
    return {"$schema": DIALECT, "title": "busrl topology", "type": "object", "additionalProperties": False,
            "properties": sections}


def _table(cls: type) -> Schema:
    found = items(cls)
    needed = [name for name, one in found.items() if one.default is REQUIRED and not one.rule.unless]
    return {"type": "object", "additionalProperties": False,
            "properties": {name: _item(one) for name, one in found.items()}, **({"required": needed} if needed else {})}


def _item(item: Item) -> Schema:
    if item.table:
        return _table(item.table)
    if item.row:
        return {"type": "array", "items": _table(item.row)}
    told = " ".join(part for part in (item.rule.doc, item.rule.text()) if part)
    default = "inf" if item.default == math.inf else item.default  # as a topology has it: JSON has no number for it
    shown = {} if default in (REQUIRED, None, ()) else {"default": default}
    return {**value(item.hint, item.rule), **({"description": told} if told else {}), **shown}


def value(hint: Any, rule: Rule) -> Schema:
    """What a value of this type and rule may be."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is types.UnionType or hint is float:
        number = _number("integer" if int in args else "number", rule)
        return {"anyOf": [number, {"enum": list(rule.words)}]} if rule.words else number
    if hint is int:
        return _number("integer", rule)
    if hint is bool:
        return {"type": "boolean"}
    if hint is str:
        return _text(rule)
    if origin is dict:
        return {"type": "object", "additionalProperties": OF_TABLES.get(args[1], {"type": "object"})}
    if args == (float, float):
        return {"type": "array", "items": _number("number", rule), "minItems": 2, "maxItems": 2}
    return {"type": "array", "items": {"type": "string"}}


def _number(kind: str, rule: Rule) -> Schema:
    bounds = {word: getattr(rule, name) for name, word in BOUNDS.items() if getattr(rule, name) is not None}
    return {"type": kind, **bounds}


def _text(rule: Rule) -> Schema:
    if not rule.choices:
        return {"type": "string", **({"minLength": 1} if rule.required else {})}
    choices: Schema = {"enum": list(rule.choices)}
    return {"anyOf": [choices, {"type": "string", "pattern": f"^{FUNCTION.pattern}$"}]} if rule.function else choices
