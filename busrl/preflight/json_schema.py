"""The JSON schema of a topology file, by which editors complete keys, show their texts and mark wrong values.

Made from the tables and rules of `busrl.topology`; `busrl schema` prints it. Knows nothing of a run.

- The schema refuses of a single value what the reader of topologies refuses.
"""

from __future__ import annotations

import math
import types
import typing
from typing import Any

from busrl.topology import schema
from busrl.topology.declare import FUNCTION, ONE_OR_SEVERAL, REQUIRED, Item, Rule, items
from busrl.topology.reader import SECTIONS

DIALECT = "https://json-schema.org/draft/2020-12/schema"
BOUNDS = {"low": "minimum", "above": "exclusiveMinimum", "high": "maximum", "below": "exclusiveMaximum"}
Schema = dict[str, Any]
OF_TABLES: dict[Any, Schema] = {Any: {}, float: {"type": "number", "exclusiveMinimum": 0}, str: {"type": "string"}}


def json_schema() -> Schema:
    """Describe every section and key of a topology file."""
    sections = {name: _table_schema(kind) for name, kind in SECTIONS.items()}
    sections["process"] = {"type": "array", "items": _table_schema(schema.Process)}
    sections["model"] = {"anyOf": [sections["model"], {"type": "array", "items": _tag_schema(sections)}]}
    return {"$schema": DIALECT, "title": "busrl topology", "type": "object", "additionalProperties": False,
            "properties": sections}


def _tag_schema(sections: dict[str, Schema]) -> Schema:
    """Describe a [[model]]: keys of [model], those that make a tag, and tables that it overrides."""
    own = {name: _item_schema(item) for name, item in items(schema.Tag).items() if item.rule.doc or item.table}
    tables = {item.name: {key: value for key, value in sections[item.name].items() if key != "required"}
              for item in items(schema.Own).values() if item.table and item.name in sections and item.name != "model"}
    properties = {**sections["model"]["properties"], **own, **tables}
    return {**sections["model"], "properties": properties, "required": ["tag", "path"]}


def _table_schema(cls: type) -> Schema:
    declared = items(cls)
    described = {"type": "object", "additionalProperties": False,
            "properties": {name: _item_schema(item) for name, item in declared.items()}}
    needed = [name for name, item in declared.items() if item.default is REQUIRED and not item.rule.unless]
    return {**described, "required": needed} if needed else described


def _item_schema(item: Item) -> Schema:
    if item.table:
        return _table_schema(item.table)
    if item.row:
        return {"type": "array", "items": _table_schema(item.row)}
    text = " ".join(part for part in (item.rule.doc, item.rule.text()) if part)
    default = "inf" if item.default == math.inf else item.default  # as a topology has it: JSON has no number for it
    shown = {} if default in (REQUIRED, None, ()) else {"default": default}
    return {**value_schema(item.hint, item.rule), **({"description": text} if text else {}), **shown}


def value_schema(hint: Any, rule: Rule) -> Schema:
    """Describe the values that this type and rule allow."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if hint == ONE_OR_SEVERAL:
        return {"anyOf": [value_schema(arg, rule) for arg in args]}
    if origin is types.UnionType or hint in (int, float):
        bounds = {word: getattr(rule, name) for name, word in BOUNDS.items() if getattr(rule, name) is not None}
        number = {"type": "integer" if int in (hint, *args) else "number", **bounds}
        return {"anyOf": [number, {"enum": list(rule.words)}]} if rule.words else number
    if hint is bool:
        return {"type": "boolean"}
    if hint is str and rule.choices:
        choices: Schema = {"enum": list(rule.choices)}
        function = {"type": "string", "pattern": f"^{FUNCTION.pattern}$"}
        return {"anyOf": [choices, function]} if rule.function else choices
    if hint is str:
        return {"type": "string", **({"minLength": 1} if rule.required else {})}
    if origin is dict:
        return {"type": "object", "additionalProperties": OF_TABLES.get(args[1], {"type": "object"})}
    if args == (float, float):
        return {"type": "array", "items": value_schema(float, rule), "minItems": 2, "maxItems": 2}
    return {"type": "array", "items": {"type": "string"}}
