"""Writes the generated parts of docs/protocol.md from the structs, and the golden vectors with `--vectors`.

`python -m busrl.protocol.reference` rewrites the page between its marks; a test compares. Uses `catalog` (routes,
versions), `meanings`, `vectors` and `session`; knows nothing of sockets. A message or field that has no docstring,
route, version or meaning is an error that says what to add.
"""

from __future__ import annotations

import argparse
import inspect
import json
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import msgspec
from msgspec import inspect as kinds

from busrl.protocol import codec, meanings, session, vectors
from busrl.protocol import messages as m
from busrl.protocol.catalog import (
    ROUTES,
    check,
    described,
    fields_of,
    message_since,
    records,
    since,
    topic_form,
)
from busrl.protocol.messages import Message, name_of
from busrl.protocol.registry import ALL

ROOT: Final = Path(__file__).resolve().parents[2]
PAGE: Final = Path("docs/protocol.md")
VECTORS: Final = Path("docs/vectors")
MARK: Final = "<!-- generated: {} -->"
END: Final = "<!-- end of generated: {} -->"
HEX_WIDTH: Final = 104  # characters of hex a line


class Incomplete(ValueError):
    """Structs and catalog do not agree; the message says what to add, a line for each."""


def complete() -> None:
    """Raise `Incomplete` if anything about a message is missing."""
    problems = check() + [line for kind in ALL for line in meanings.missing(name_of(kind), fields_of(kind))]
    for record in records():
        problems += meanings.missing(record.__name__, [field.name for field in described(record)])
    if problems:
        raise Incomplete("\n".join(problems))


# -- types in words ------------------------------------------------------------------------------------------------


def words(kind: kinds.Type) -> str:
    """A field's type as the page says it; lengths of text are in characters."""
    if isinstance(kind, kinds.Metadata):
        return words(kind.type)
    if isinstance(kind, kinds.StrType):
        return "text" if kind.max_length is None else f"text ≤ {kind.max_length}"
    if isinstance(kind, kinds.IntType):
        return "integer ≥ 0" if kind.ge == 0 else "integer"
    if isinstance(kind, kinds.BytesType):
        return "bytes" if kind.max_length is None else f"bytes ≤ {kind.max_length}"
    if isinstance(kind, (kinds.ListType, kinds.VarTupleType)):
        return f"array of {words(kind.item_type)}" + _at_most(kind.max_length)
    if isinstance(kind, kinds.DictType):
        return f"map of {words(kind.key_type)} to {words(kind.value_type)}" + _at_most(kind.max_length)
    if isinstance(kind, kinds.UnionType):
        return " or ".join(words(one) for one in kind.types)
    if isinstance(kind, kinds.StructType):
        return f"[{kind.cls.__name__}](#record-{kind.cls.__name__.lower()})"
    known = {kinds.FloatType: "float", kinds.BoolType: "boolean", kinds.NoneType: "nil"}
    if type(kind) not in known:
        raise TypeError(f"{type(kind).__name__} is no type that a message may have; write words for it in {__file__}")
    return known[type(kind)]


def _at_most(length: int | None) -> str:
    return "" if length is None else f", at most {length}"


def presence(field: kinds.Field) -> str:
    """`required`, or what a receiver takes where the field is absent."""
    if field.required:
        return "required"
    if field.default_factory is not msgspec.NODEFAULT:
        return f"default `{json.dumps(field.default_factory())}`"
    return "default nil" if field.default is None else f"default `{json.dumps(field.default)}`"


# -- the generated parts --------------------------------------------------------------------------------------------


def overview() -> str:
    """The table of all messages."""
    rows = ["| message | sent by | topic | read by | since | meaning |", "|---|---|---|---|---|---|"]
    for kind in ALL:
        route, name = ROUTES[kind], name_of(kind)
        rows.append(
            f"| [`{name}`](#{name.lower()}) | {route.sent_by} | `{topic_form(kind)}` | "
            f"{route.read_by} | {message_since(name)} | {_first_sentence(kind)} |"
        )
    return "\n".join(rows)


def envelope() -> str:
    """The fields that every message has."""
    head = _table("", described(Message))
    row = "| `type` | text | required | 1.0 | Name of the message. |"
    first, second, *rest = head.splitlines()
    return "\n".join([first, second, row, *rest])


def details() -> str:
    """A section for each message: meaning, fields, example bytes."""
    examples = dict(vectors.samples())
    parts = [_section(kind, examples[f"{name_of(kind)}.typical"]) for kind in ALL]
    parts += [_record_section(record) for record in records()]
    return "\n\n".join(parts)


def limits() -> str:
    """Constants of the format."""
    rows = [
        ("names (`sender`, `worker_id`, ...)", f"{m.MAX_NAME} characters"),
        ("texts", f"{m.MAX_TEXT} characters"),
        ("activity", f"{m.MAX_ACTIVITY} characters"),
        ("maps and arrays", f"{m.MAX_MAP} entries"),
    ]
    return "\n".join(["| what | at most |", "|---|---|", *(f"| {what} | {most} |" for what, most in rows)])


def follow() -> str:
    """The session, byte by byte."""
    return "\n".join(["```", *session.lines(), "```"])


PARTS: Final[dict[str, Callable[[], str]]] = {
    "envelope": envelope, "limits": limits, "messages": overview, "details": details, "session": follow,
}  # fmt: skip


def _section(kind: type[Message], example: Message) -> str:
    name, route = name_of(kind), ROUTES[kind]
    own = [field for field in described(kind) if field.name in fields_of(kind)]
    raw = codec.encode(example)
    shown = json.dumps(vectors.plain(vectors.as_map(example)), ensure_ascii=False)
    return "\n".join(
        [
            f"### {name}",
            " ".join(inspect.cleandoc(kind.__doc__ or "").split()),
            "",
            f"Sent by {route.sent_by} on `{topic_form(kind)}`, since {message_since(name)}.",
            "",
            _table(name, own),
            "",
            "```",
            *(raw.hex()[at : at + HEX_WIDTH] for at in range(0, 2 * len(raw), HEX_WIDTH)),
            shown,
            "```",
        ]
    )


def _record_section(record: type) -> str:
    text = " ".join(inspect.cleandoc(record.__doc__ or "").split())
    return "\n".join([f"### Record {record.__name__}", text, "", _table(record.__name__, described(record))])


def _table(name: str, fields: Sequence[kinds.Field]) -> str:
    rows = ["| field | type | presence | since | meaning |", "|---|---|---|---|---|"]
    for field in fields:
        line = meanings.meaning(name, field.name)
        rows.append(
            f"| `{field.encode_name}` | {words(field.type)} | {presence(field)} | {since(name, field.name)} | {line} |"
        )
    return "\n".join(rows)


def _first_sentence(kind: type[Message]) -> str:
    text = " ".join(inspect.cleandoc(kind.__doc__ or "").split())
    return re.split(r"(?<=[.;:])\s", text, maxsplit=1)[0].rstrip(";:.") + "."


# -- files ---------------------------------------------------------------------------------------------------------


def rewritten(page: str) -> str:
    """The page with every generated part made anew; `Incomplete` if a mark is missing."""
    complete()
    for name, make in PARTS.items():
        begin, end = MARK.format(name), END.format(name)
        head, found, rest = page.partition(begin)
        _, closed, tail = rest.partition(end)
        if not found or not closed:
            raise Incomplete(f"{PAGE} has no part {name!r}: put {begin} and {end} where it belongs")
        page = f"{head}{begin}\n{make()}\n{end}{tail}"
    return page


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m busrl.protocol.reference", description="write docs/protocol.md")
    parser.add_argument("--vectors", action="store_true", help="write docs/vectors too")
    parser.add_argument("--root", type=Path, default=ROOT, help="the repository (default: where this module lies)")
    options = parser.parse_args(arguments)
    try:
        page = options.root / PAGE
        page.write_text(rewritten(page.read_text(encoding="utf-8")), encoding="utf-8")
        if options.vectors:
            (options.root / VECTORS).mkdir(exist_ok=True)
            for name, text in vectors.files().items():
                (options.root / VECTORS / name).write_text(text, encoding="utf-8")
    except (Incomplete, FileNotFoundError) as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
