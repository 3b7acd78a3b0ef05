"""Writes what is generated in docs/protocol.md and messages.md from the structs; with `--vectors` the golden vectors.

`python -m tools.reference.protocol_page` rewrites the page between its marks; a test compares. Uses `catalog` (routes,
versions, meanings) and `vectors`; knows nothing of sockets. A message or field that lacks a docstring, route, version
or meaning is an error that says what to add.

- The page shows what the wire holds, not what the codec believes: bytes are taken apart by a decoder of their own,
  which knows only the part of msgpack that messages use.
- The session is what a worker without a library sends and receives, made from the codec, the topics and the framing of
  ZMTP 3. A test plays its bytes on plain sockets against a real broker. A line is `SOCKET > hex ; words` for what the
  worker sends, and `SOCKET < hex ; words` for what the broker does.
"""

from __future__ import annotations

import argparse
import inspect
import json
import re
import struct
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec
from msgspec import inspect as kinds

from busrl.hosts import messages as g
from busrl.protocol import codec
from busrl.protocol import messages as m
from busrl.protocol.codec import ALL, topic
from busrl.protocol.messages import Message, name_of
from tools.reference import vectors
from tools.reference.catalog import (
    ROUTES,
    check,
    described,
    fields_of,
    meaning,
    message_since,
    records,
    since,
    topic_form,
)
from tools.reference.vectors import ARRAYS

# -- msgpack, token by token -----


_SIZED = {0xC4: "bin 8", 0xC5: "bin 16", 0xC6: "bin 32", 0xD9: "str 8", 0xDA: "str 16", 0xDB: "str 32"}
_NESTED = {0xDC: "array 16", 0xDD: "array 32", 0xDE: "map 16", 0xDF: "map 32"}
_NUMBERS = {
    0xCA: (">f", "float 32"), 0xCB: (">d", "float 64"),
    0xCC: (">B", "uint 8"), 0xCD: (">H", "uint 16"), 0xCE: (">I", "uint 32"), 0xCF: (">Q", "uint 64"),
    0xD0: (">b", "int 8"), 0xD1: (">h", "int 16"), 0xD2: (">i", "int 32"), 0xD3: (">q", "int 64"),
}
_PLAIN = {0xC0: "nil", 0xC2: "false", 0xC3: "true"}
_WIDTH = (1, 2, 4)


@dataclass(frozen=True)
class Token:
    """One value or header: where it begins, its bytes, its type, what it says, how deep it lies."""

    offset: int
    raw: bytes
    form: str
    text: str
    depth: int
    children: int = 0


def tokens(raw: bytes) -> list[Token]:
    """All tokens of one msgpack value; ValueError for bytes that are none."""
    found = list(_walk(raw, 0, 0))
    last = found[-1]
    if last.offset + len(last.raw) != len(raw):
        raise ValueError(f"{len(raw) - last.offset - len(last.raw)} bytes after the value")
    return found


def fields(raw: bytes) -> list[tuple[bytes, str]]:
    """The pieces of a value, in order, that together are `raw`: a new one at each key of a map; with a text."""
    pieces: list[tuple[bytes, str]] = []
    open_: list[list[int]] = []  # of each map or array around: values still to come, 1 if it is a map
    for token in tokens(raw):
        while open_ and open_[-1][0] == 0:
            open_.pop()
        is_key = bool(open_ and open_[-1][1] and open_[-1][0] % 2 == 0)
        if open_:
            open_[-1][0] -= 1
        said = " ".join(filter(None, (token.form, token.text)))
        if is_key:
            pieces.append((token.raw, "  " * (sum(one[1] for one in open_) - 1) + said + ":"))
        else:
            before, text = pieces.pop() if pieces else (b"", "")
            pieces.append((before + token.raw, f"{text} {said}" if text else said))
        if "map" in token.form or "array" in token.form:
            open_.append([token.children, int("map" in token.form)])
    return pieces


def _walk(raw: bytes, at: int, depth: int) -> Iterator[Token]:
    token = _token(raw, at, depth)
    yield token
    at += len(token.raw)
    for _ in range(token.children):
        for inner in _walk(raw, at, depth + 1):
            yield inner
            at = inner.offset + len(inner.raw)


def _token(raw: bytes, at: int, depth: int) -> Token:
    if at >= len(raw):
        raise ValueError(f"the bytes end at {at}, in the middle of a value")
    head = raw[at]
    if head < 0x80:
        return _made(raw, at, 1, "fixint", str(head), depth)
    if head < 0x90:
        return _made(raw, at, 1, "fixmap", f"of {head & 15}", depth, 2 * (head & 15))
    if head < 0xA0:
        return _made(raw, at, 1, "fixarray", f"of {head & 15}", depth, head & 15)
    if head < 0xC0:
        return _text(raw, at, 1, head & 31, "fixstr", depth)
    if head >= 0xE0:
        return _made(raw, at, 1, "negative fixint", str(head - 256), depth)
    if head in _PLAIN:
        return _made(raw, at, 1, "", _PLAIN[head], depth)
    if head in _NUMBERS:
        code, form = _NUMBERS[head]
        body = raw[at + 1 : at + 1 + struct.calcsize(code)]
        number = struct.unpack(code, body)[0] if len(body) == struct.calcsize(code) else ""
        return _made(raw, at, 1 + struct.calcsize(code), form, str(number), depth)
    return _sized(raw, at, head, depth)


def _sized(raw: bytes, at: int, head: int, depth: int) -> Token:
    if head in _SIZED:
        width = _WIDTH[(head - 0xC4) % 3 if head < 0xC8 else head - 0xD9]
        return _text(raw, at, 1 + width, int.from_bytes(raw[at + 1 : at + 1 + width], "big"), _SIZED[head], depth)
    if head in _NESTED:
        width = 2 if head in (0xDC, 0xDE) else 4
        count = int.from_bytes(raw[at + 1 : at + 1 + width], "big")
        return _made(raw, at, 1 + width, _NESTED[head], f"of {count}", depth, 2 * count if head >= 0xDE else count)
    raise ValueError(f"byte {head:#04x} at {at} begins nothing that a message may hold")


def _text(raw: bytes, at: int, header: int, size: int, form: str, depth: int) -> Token:
    body = raw[at + header : at + header + size]
    shown = f"{size} bytes" if form.startswith("bin") else f'"{body.decode()}"'
    return _made(raw, at, header + size, form, shown, depth)


def _made(raw: bytes, at: int, size: int, form: str, text: str, depth: int, children: int = 0) -> Token:
    if at + size > len(raw):
        raise ValueError(f"the value at {at} has {size} bytes, {len(raw) - at} are there")
    return Token(at, raw[at : at + size], form, text, depth, children)


# -- the session -----


WORKER: Final = "reward-9"
LIFE: Final = 1_700_000_000_000
BEGIN_NS: Final = 1_700_000_000_000_000_000
MORE, LAST, LONG, COMMAND = 1, 0, 2, 4
WIDTH: Final = 24  # bytes a line


class _Script:
    """Lines of the session; numbers the messages as endpoints do."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self._seqs: dict[tuple[str, str], int] = {}
        self._time = BEGIN_NS

    def say(self, text: str) -> None:
        self.lines += ["", f"; {text}"] if self.lines else [f"; {text}"]

    def put(self, socket: str, arrow: str, raw: bytes, words: str) -> None:
        for at in range(0, len(raw), WIDTH):
            note = f" ; {words}" if at == 0 else ""
            self.lines.append(f"{socket} {arrow} {raw[at : at + WIDTH].hex(' ')}{note}")

    def message(self, socket: str, arrow: str, message: Message, sender: str, to: str = "") -> None:
        """One message: the frame of its topic, the frame of its map, field by field."""
        target = topic(message.__class__, to)
        self._seqs[sender, target] = message.msg_seq = self._seqs.get((sender, target), 0) + 1
        message.sender, message.time_ns = sender, self._time
        self._time += 1_000_000
        raw, text = codec.encode(message), target.encode()
        self.put(socket, arrow, bytes([MORE, len(text)]) + text, f'frame, more follow, {len(text)} bytes: "{target}"')
        head = bytes([LAST, len(raw)]) if len(raw) < 256 else bytes([LAST | LONG]) + len(raw).to_bytes(8, "big")
        self.put(socket, arrow, head, f"frame, the last one, {len(raw)} bytes")
        for piece, words in fields(raw):
            self.put(socket, arrow, piece, words)

    def echo(self, socket: str, since: int) -> None:
        """The broker passes on, byte for byte, what the lines from `since` on sent."""
        raw = b"".join(raw for _, _, raw in parse("\n".join(self.lines[since:])))
        self.put(socket, "<", raw, f"the same {len(raw)} bytes")


def greeting(server: bool) -> bytes:
    """ZMTP: signature, version, mechanism NULL, filler; 64 bytes."""
    signature = b"\xff" + (1 if server else 0).to_bytes(8, "big") + b"\x7f"
    return (signature + bytes([3, 1 if server else 0]) + b"NULL").ljust(64, b"\0")


def command(name: str, body: bytes) -> bytes:
    """A short ZMTP command frame."""
    text = bytes([len(name)]) + name.encode() + body
    return bytes([COMMAND, len(text)]) + text


def ready(kind: str) -> bytes:
    """READY with the one property that matters here."""
    name = b"Socket-Type"
    return command("READY", bytes([len(name)]) + name + len(kind).to_bytes(4, "big") + kind.encode())


def lines() -> list[str]:
    """The whole session."""
    script = _Script()
    _connect(script, "SUB", "XPUB", "Connect to sub.sock. Both sides greet, then say what they are.")
    _connect(script, "PUB", "XSUB", "The same on pub.sock.")
    script.say("Subscribe: a message whose first byte is 1, then the prefix. Our own PING comes last.")
    answers = [topic(kind, WORKER) for kind in (g.GatewayWelcome, g.GatewayTasks, g.GatewayAnswer)]
    for prefix in (topic(m.Stop), topic(m.DataGenerated), *answers, topic(m.Ping, WORKER)):
        script.put("SUB", ">", bytes([LAST, 1 + len(prefix), 1]) + prefix.encode(), f'subscribe "{prefix}"')
    script.say("Are we connected? A PING to ourselves, repeated until it comes back.")
    before = len(script.lines)
    script.message("PUB", ">", m.Ping(token="7c0ffee7"), WORKER, WORKER)
    script.echo("SUB", before)
    script.say("Announce ourselves. index 0: this process does not map the ring.")
    script.message("PUB", ">", m.Hello(role="reward", pid=4711, host="node-1"), WORKER)
    _work(script)
    script.say("The run ends. Hand back what we hold (nothing), say goodbye, close both sockets.")
    script.message("SUB", "<", m.Stop(reason="all steps are done", drain_s=10.0), "launch")
    script.message("PUB", ">", g.RemoteLeave(life=LIFE, req=4, reason="STOP"), WORKER)
    script.message("SUB", "<", g.GatewayAnswer(code="done", life=LIFE, req=4, about="REMOTE_LEAVE"), "keeper", WORKER)
    script.message("PUB", ">", m.Goodbye(reason="STOP"), WORKER)
    return script.lines


def _work(script: _Script) -> None:
    """Joining, a doorbell, one task and its answer."""
    script.say("Join the gateway; again every half second until it answers.")
    script.message("PUB", ">", g.RemoteJoin(life=LIFE, req=1, role="reward"), WORKER)
    welcome = g.GatewayWelcome(
        life=LIFE, req=1, index=9, lease_s=20.0, max_capacity=1024, max_message_bytes=1 << 20, max_prompt_tokens=64,
        model="/models/sort", prompt_key="prompt", answer_key="answer", template="none",
    )
    script.message("SUB", "<", welcome, "keeper", WORKER)
    script.say("A doorbell: three slots were GENERATED, slot 17 is the first of them. So ask for work.")
    bell = m.DataGenerated(slot_id=17, seq=41, uid=1289, version=12, count=3)
    script.message("SUB", "<", bell, "rollout-0")
    script.message("PUB", ">", g.RemoteClaim(life=LIFE, req=2, capacity=1), WORKER)
    script.say("One task. Its name is slot 17, claim 42, sample 1289; it is ours for 20 seconds.")
    script.message("SUB", "<", g.GatewayTasks(life=LIFE, req=2, tasks=[_task()]), "keeper", WORKER)
    script.say("Judge it and answer; again every half second until the keeper answers.")
    reward = g.RemoteRewarded(life=LIFE, req=3, task="17.42.1289", reward=1.0)
    script.message("PUB", ">", reward, WORKER)
    done = g.GatewayAnswer(code="done", life=LIFE, req=3, about="REMOTE_REWARDED", task="17.42.1289")
    script.message("SUB", "<", done, "keeper", WORKER)


def _task() -> g.Task:
    arrays = {name: msgspec.convert(array, g.Tensor) for name, array in ARRAYS.items()}
    return g.Task(
        task="17.42.1289", slot_id=17, seq=42, uid=1289, record='{"prompt":"312=","answer":"123"}', segment=1,
        version=12, completion="123", tensors=arrays,
    )


def _connect(script: _Script, ours: str, theirs: str, words: str) -> None:
    script.say(words)
    script.put(ours, ">", greeting(False), "greeting: signature, version 3.0, NULL, filler")
    script.put(ours, "<", greeting(True), "greeting of the broker: version 3.1")
    script.put(ours, ">", ready(ours), f'command READY, Socket-Type = "{ours}"')
    script.put(ours, "<", ready(theirs), f'command READY, Socket-Type = "{theirs}"')


def parse(text: str) -> Iterator[tuple[str, str, bytes]]:
    """(socket, arrow, bytes) of every line that holds any."""
    for line in text.splitlines():
        head, _, _ = line.partition(";")
        if head.strip():
            socket, arrow, *hexed = head.split()
            yield socket, arrow, bytes.fromhex("".join(hexed))


# -- the page -----


ROOT: Final = Path(__file__).resolve().parents[2]
PAGES: Final = {
    Path("docs/protocol.md"): ("envelope", "limits", "messages"),
    Path("docs/messages.md"): ("details", "session"),
}
VECTORS: Final = Path("docs/vectors")
MARK: Final = "<!-- generated: {} -->"
END: Final = "<!-- end of generated: {} -->"
HEX_WIDTH: Final = 104  # characters of hex a line


class Incomplete(ValueError):
    """Structs and catalog do not agree; the message says what to add, a line for each."""


def complete() -> None:
    """Raise `Incomplete` if anything about a message is missing."""
    if problems := check():
        raise Incomplete("\n".join(problems))


# -- types in words -----


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
    if field.default is msgspec.NODEFAULT:
        return "may be left out"
    return "default nil" if field.default is None else f"default `{json.dumps(field.default)}`"


# -- the generated parts -----


def overview() -> str:
    """The table of all messages."""
    rows = ["| message | sent by | topic | read by | since | meaning |", "|---|---|---|---|---|---|"]
    for kind in ALL:
        route, name = ROUTES[kind], name_of(kind)
        rows.append(
            f"| [`{name}`](messages.md#{name.lower()}) | {route.sent_by} | `{topic_form(kind)}` | "
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
    return "\n".join(["```", *lines(), "```"])


PARTS: Final[dict[str, Callable[[], str]]] = {
    "envelope": envelope, "limits": limits, "messages": overview, "details": details, "session": follow,
}


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
        line = meaning(name, field.name)
        rows.append(
            f"| `{field.encode_name}` | {words(field.type)} | {presence(field)} | {since(name, field.name)} | {line} |"
        )
    return "\n".join(rows)


def _first_sentence(kind: type[Message]) -> str:
    text = " ".join(inspect.cleandoc(kind.__doc__ or "").split())
    return re.split(r"(?<=[.;:])\s", text, maxsplit=1)[0].rstrip(";:.") + "."


# -- files -----


def rewritten(path: Path, page: str) -> str:
    """The page with each of its generated parts made again; `Incomplete` if a mark is missing."""
    complete()
    for name in PAGES[path]:
        begin, end = MARK.format(name), END.format(name)
        head, found, rest = page.partition(begin)
        _, closed, tail = rest.partition(end)
        if not found or not closed:
            raise Incomplete(f"{path} has no part {name!r}: put {begin} and {end} where it belongs")
        page = f"{head}{begin}\n{PARTS[name]()}\n{end}{tail}"
    return page


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser("python -m tools.reference.protocol_page", description="write the pages' tables")
    parser.add_argument("--vectors", action="store_true", help="write docs/vectors too")
    parser.add_argument("--root", type=Path, default=ROOT, help="the repository (default: where this module lies)")
    options = parser.parse_args(arguments)
    try:
        for path in PAGES:
            page = options.root / path
            page.write_text(rewritten(path, page.read_text(encoding="utf-8")), encoding="utf-8")
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
