"""Writes `configs/reference.toml` from the declarations of the keys, so that the reference can not fall behind.

`python -m busrl.topology.reference > configs/reference.toml`; a test compares. Knows nothing of values in use.
"""

from __future__ import annotations

import dataclasses
import math
import sys
import typing
from collections.abc import Iterator
from typing import Any

from busrl.topology import schema
from busrl.topology.keys import Rule, rule_of
from busrl.topology.reader import SECTIONS, row_class, show

HEAD = """\
# Every key of a topology with its default, made by `python -m busrl.topology.reference`.
# A key without a default stands here with an example. Give only what differs; `busrl check FILE` explains a file,
# `--set section.key=value` changes one for a start (`process.rollout.count=2` for processes).
"""
EXAMPLES = {
    "model.path": "tiny:sort", "data.train": "tiny:sort", "faults.crash.process": "rollout/0",
    "faults.crash.point": "commit.before",
}  # fmt: skip
PROCESSES = """\
# Processes: one [[process]] per kind; bus, keeper and scheduler are implied, one each."""


def text() -> str:
    """The whole file."""
    lines = [HEAD]
    for name, cls in SECTIONS.items():
        lines += [*_section(name, cls), ""]
    lines += [PROCESSES]
    for role in schema.SPAWNED_ROLES:
        lines += ["[[process]]", *_keys(schema.Process, f"process.{role}", explain=role == "rollout"), ""]
    return "\n".join(lines).rstrip("\n") + "\n"


def _section(name: str, cls: type) -> Iterator[str]:
    yield f"[{name}]  # {(cls.__doc__ or '').split(': ', 1)[-1].rstrip('.')}"
    yield from _keys(cls, name)
    for field, nested in typing.get_type_hints(cls).items():
        if dataclasses.is_dataclass(nested):
            yield ""
            yield from _section(f"{name}.{field}", typing.cast(type, nested))
        elif row := row_class(nested):
            yield ""
            yield from (f"# {line}" for line in _rows(f"{name}.{field}", row))


def _rows(name: str, cls: type) -> Iterator[str]:
    """An array of tables is empty by default, so an example of an entry stands there as a comment."""
    yield f"[[{name}]]  # {(cls.__doc__ or '').split(': ', 1)[-1].rstrip('.')}"
    for field in dataclasses.fields(cls):
        yield f"{field.name} = {_default(field, name)}  # {_comment(rule_of(field))}"


def _keys(cls: type, prefix: str, explain: bool = True) -> Iterator[str]:
    for field in dataclasses.fields(cls):
        if "rule" not in field.metadata:  # tables within this one have a place of their own
            continue
        if prefix.startswith("process.") and not explain and field.name != "role":
            continue
        rule = rule_of(field)
        if explain:
            yield f"# {_comment(rule)}"
        yield f"{field.name} = {_default(field, prefix)}"


def _comment(rule: Rule) -> str:
    allowed = rule.text()
    return f"{rule.doc} ({allowed})" if allowed else rule.doc


def _default(field: dataclasses.Field[Any], prefix: str) -> str:
    if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
        role = prefix.partition(".")[2]
        return show(EXAMPLES.get(f"{prefix}.{field.name}", role))
    value = field.default_factory() if field.default_factory is not dataclasses.MISSING else field.default
    if isinstance(value, float) and (math.isinf(value) or value == int(value) or abs(value) >= 1e-3):
        return '"inf"' if math.isinf(value) else str(value)
    return show(value)


if __name__ == "__main__":
    sys.stdout.write(text())
